"""Every method in federations at the edges: none crashes, models stay finite, and all tell who was left out.

What each method does there beyond that is tested where the method is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_rhfl import public
from tiny_federation import Federation, client_data, three_clients

from medfed.data.arrays import ArrayDataset
from medfed.federation.server import Patience
from medfed.federation.state import same_state
from medfed.methods.registry import METHODS, get_method

ROUNDS = 3
ONE_EPOCH = {"stage_one": {"epochs": 1}}
SECTIONS: dict[str, dict[str, Any]] = {
    "fednoro": {"warmup": 1, "local_epochs": 1},
    "fedelc": {"warmup": 1, "local_epochs": 1},
    "fedcorr": {"iterations": 1, "fine_tuning": 1, "local_epochs": 1, "confidence": 0.3, "neighbours": 4},
    "fedlsr": {"local_epochs": 1},
    "rofl": {"local_epochs": 1, "pseudo_from": 1},
    "rhfl": {"pretraining": 1},
    "fedned": {"warmup": 1, "local_epochs": 1, "uncertainty": 1.0, "images": 8, "passes": 2, "steps": 2},
    "fedsir": {"period": 1, "ramp_end": 2, **ONE_EPOCH},
    "oct_fedsir": {"period": 1, **ONE_EPOCH},
    "fedmerit": {"period": 1},
    "pruning": ONE_EPOCH,
}
FORMS = [
    (name, form)
    for name in METHODS
    for form in ("published", "as_released")
    if form == "published" or "form" in get_method(name).settings.model_fields
]


def run(name: str, form: str, data: dict[str, ArrayDataset], rounds: int = ROUNDS, **options: Any) -> Federation:
    given = {"form": form} if form != "published" else {}
    section = {"name": name, **SECTIONS.get(name, {}), **given}
    options.setdefault("public", public(12) if get_method(name).public else None)
    return Federation(section, data, network=options.pop("network", "Normed"), rounds=rounds, **options).run()


def sound(done: Federation, rounds: int = ROUNDS) -> None:
    """A record a round, weights that are shares, models of finite numbers."""
    assert [r["round"] for r in done.records] == list(range(1, rounds + 1))
    for model in done.models:
        assert all(torch.isfinite(t).all() for t in model.values() if t.is_floating_point())
        assert (model["norm.running_var"] > 0).all()
    for number in range(1, rounds + 1):
        weights = done.column("weight", number)
        if (
            done.method.name != "rhfl"
        ):  # its weights are of the others' predictions; those of the first round sum to more
            assert not weights or sum(weights.values()) == pytest.approx(1.0)
        assert all(0 <= w <= 1 + 1e-12 for w in weights.values())


def refused(done: Federation) -> set[str]:
    return {r["client"] for record in done.records for r in record["refused"]}


def not_numbers() -> ArrayDataset:
    labels = three_clients()["c1"].labels
    return ArrayDataset(np.full((len(labels), 1, 4, 4), np.nan, np.float32), np.arange(len(labels)), labels)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_odd_clients_some_of_them_away(name, form):
    """One class, two samples, grey pictures, pictures that are not numbers, a class that nobody has; silent in turn."""
    data = {
        "c0": client_data([0, 1, 1, 0, 1, 0, 0, 1, 0, 1], 1),
        "c1": not_numbers(),
        "c2": client_data([1] * 6, 2),
        "c3": client_data([0, 1], 3),
        "c4": client_data([1, 0, 0, 1, 1], 4, contrast=0.0),
        "c5": client_data([1, 1, 0, 1, 0, 1, 0, 1, 1], 5),
    }
    done = run(name, form, data, rounds=5, dropout=0.3, seed=2)
    sound(done, rounds=5)
    reasons = {(r["client"], r["reason"]) for record in done.records for r in record["refused"]}
    others = {(client, reason) for client, reason in reasons if reason != "did not answer (simulated dropout)"}
    assert {client for client, _ in others} == {"c1"}
    assert all("finite" in reason or "NaN" in reason for _, reason in others)
    assert len({tuple(r["admitted"]) for r in done.records}) > 1
    assert all("c1" not in r["admitted"] for r in done.records)


@pytest.mark.parametrize("name", METHODS)
def test_one_client_of_two_classes_in_as_few_rounds_as_the_method_admits(name):
    least = {"fednoro": 2, "fedelc": 2, "fedcorr": 2, "fedned": 2, "fedsir": 2, "oct_fedsir": 2, "fedmerit": 2}.get(
        name, 1
    )
    data = {"only": client_data([0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1], 6)}
    done = run(name, "published", data, rounds=least, bundle_changes={"classes": ["healthy", "ill"]})
    sound(done, rounds=least)
    assert [r["refused"] for r in done.records] == [[]] * least
    assert all(done.column("weight", r) in ({}, {"only": 1.0}) for r in range(1, least + 1))
    assert (name == "rhfl") == same_state(done.models[-1], done.initial)


@pytest.mark.parametrize("name", METHODS)
def test_a_quorum_that_is_not_reached_keeps_the_model(name):
    """One of three can never answer. A request to fewer clients than the quorum asks for all of these."""
    done = run(name, "published", {**three_clients(), "c1": not_numbers()}, patience=Patience(quorum=3))
    sound(done)
    alone = {"fedcorr": "visits one client after another", "pruning": "asks clean clients alone"}
    if name not in alone:
        assert all(same_state(m, done.initial) for m in done.models)
        assert all(any("quorum of 3 not reached" in w for w in r["warnings"]) for r in done.records)
