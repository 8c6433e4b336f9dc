"""What a person is told of a method's settings before a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from medfed.checks import advice
from medfed.config import load_experiment
from medfed.methods.registry import METHODS, resolve_method

FILE = Path(__file__).parents[2] / "configs" / "results" / "oct.yaml"


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("sets", "clients"),
    [([], 10), (["participation.fraction=0.5"], 10), (["participation.dropout=0.1"], 10), ([], 1), ([], 2)],
)
def test_a_method_that_needs_all_clients_says_when_some_are_left_out(name, sets, clients):
    public = ["condition.public={fraction: 0.1}", "rounds=100"]
    experiment = load_experiment(FILE, [f"method={name}", f"condition.partition.clients={clients}", *public, *sets])
    method, settings = resolve_method(experiment.method)
    told = [n for n in advice(experiment, settings) if n.startswith(f"{name} is made for all") or f"{name} needs" in n]
    everybody = "every round" in method.needs  # as `medfed methods` says it
    alone = "two clients" in method.needs and clients < 2
    assert len(told) == (everybody and bool(sets)) + alone


@pytest.mark.parametrize(
    ("method", "amp", "told"),
    [
        ("{name: fedavg, salt: {rho: 0.005}}", True, True),
        ("{name: fedavg, salt: {rho: 0.005}}", False, False),
        ("{name: fedavg}", True, False),
        ("{name: fedism}", True, True),
        ("{name: fedism, salt: false}", True, False),  # sharpness is measured in full precision
        ("{name: fedmerit, period: 4}", True, False),  # the need is measured in full precision
        ("{name: fedmerit, period: 4, salt: true}", True, True),
        ("{name: oct_fedsir, period: 4}", True, False),
    ],
)
def test_small_steps_that_half_precision_loses_are_named(method, amp, told):
    experiment = load_experiment(FILE, [f"method={method}", f"engine.amp={str(amp).lower()}"])
    _, settings = resolve_method(experiment.method)
    assert any("engine.amp" in note for note in advice(experiment, settings)) is told
    assert set(settings.check(experiment.rounds)) <= set(advice(experiment, settings))
