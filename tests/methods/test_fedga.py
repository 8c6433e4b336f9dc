"""FedGA on the real trainer: weights from gaps by hand, both forms, and gaps that vanish."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fairness_oracle import CLIENTS, adam, close, killed_and_resumed, loss_of, offsets_of, orders, theta_of
from test_fedce import balanced
from test_methods_degenerate import MULTI, faulty, multilabel_clients
from tiny_federation import Federation, client_data, distance, three_clients

from medfed.errors import ConfigError
from medfed.federation.messages import Message
from medfed.federation.state import same_state
from medfed.methods.fedga import METHOD
from medfed.methods.registry import resolve_method
from medfed.methods.validation import parts_of

CASES = {
    "published": ({}, {"d": 0.2}),
    "large step": ({"step": 0.99}, {"d": 0.99}),
    "as released": ({"form": "as_released"}, {"d": 0.05}),
    "official code": ({"centred": False}, {"d": 0.2, "centred": False}),
    "accuracy": ({"metric": "balanced_accuracy"}, {"d": 0.2, "metric": lambda theta, data: -balanced(theta, data)}),
}


@pytest.mark.parametrize("case", CASES)
def test_four_rounds_are_those_of_the_equations(case):
    section, oracle = CASES[case]
    measure, d = oracle.get("metric", loss_of), oracle["d"]
    data = three_clients()
    ours = Federation({"name": "fedga", "learning_rate": 0.05, **section}, data, rounds=4)
    split = {n: parts_of(ours.server.engine.host.client(n), ours.settings.validation) for n in CLIENTS}
    assert all((p.training is p.validation) == (case == "as released") for p in split.values())
    ours.run()
    theta, weights = theta_of(ours.initial), np.full(3, 1 / 3)
    for round in (1, 2, 3, 4):
        models = [
            adam(theta, p.training, orders(0, round, n, len(p.training), 1), offsets_of(data[n].labels.numpy()), 0.05)
            for n, p in split.items()
        ]
        theta = sum(w * m for w, m in zip(weights, models))
        assert ours.column("weight", round) == pytest.approx(dict(zip(CLIENTS, weights)), abs=1e-6)
        assert close(ours.models[round - 1], theta, 1e-5)
        gaps = np.array(
            [measure(theta, p.validation) - measure(m, p.validation) for m, p in zip(models, split.values())]
        )
        if round < 4:
            assert ours.column("gap", round) == pytest.approx(dict(zip(CLIENTS, gaps)), abs=1e-5)
            moved = gaps - gaps.mean() if oracle.get("centred", True) else gaps
            if np.abs(moved).max() > 1e-9:
                weights = np.clip(weights + d * (1 - round / 4) / 3 * moved / np.abs(moved).max(), 0, 1)
                weights = weights / weights.sum()
    assert ours.column("gap", 4) == {}
    assert ours.records[0]["server"]["step"] == pytest.approx(d * 0.75 / 3)


def claiming(own, aggregated):
    """FedGA whose clients claim these losses."""

    def train(client, message):
        reply = METHOD.tasks["train"](client, message)
        return Message(reply.tensors, {**reply.values, "own_validation": own[client.name]})

    def validate(client, message):
        return Message.of({"aggregated_validation": aggregated[client.name]})

    return replace(METHOD, tasks={"train": train, "validate": validate})


def test_the_largest_gap_gains_the_whole_step():
    """Gaps 0.1, 0.2, 0.6, d = 0.2, T = 4: the third gains 0.2 * 3/4 / 3 = 0.05, the others lose 2/3 and 1/3 of it."""
    own, aggregated = dict.fromkeys(CLIENTS, 1.0), {"c0": 1.1, "c1": 1.2, "c2": 1.6}
    done = Federation(claiming(own, aggregated), three_clients(), rounds=4).run()
    expected = {"c0": 1 / 3 - 0.1 / 3, "c1": 1 / 3 - 0.05 / 3, "c2": 1 / 3 + 0.05}
    assert done.column("weight", 2) == pytest.approx(expected)
    assert done.column("weight", 4)["c2"] == pytest.approx(1 / 3 + 0.05 * (1 + 2 / 3 + 1 / 3))


def test_equal_gaps_change_nothing():
    done = Federation(claiming(dict.fromkeys(CLIENTS, 1.0), dict.fromkeys(CLIENTS, 1.3)), three_clients()).run()
    assert done.column("weight", 3) == pytest.approx(dict.fromkeys(CLIENTS, 1 / 3))
    still = Federation({"name": "fedga", "step": 0}, three_clients()).run()
    assert still.column("gap", 1) == {}
    assert still.column("weight", 3) == pytest.approx(dict.fromkeys(CLIENTS, 1 / 3))


def test_weights_never_fall_below_zero():
    """A step of d near 1 for many rounds: one client is out, the statistics of BatchNorm stay sound."""
    own, aggregated = dict.fromkeys(CLIENTS, 1.0), {"c0": 0.5, "c1": 1.5, "c2": 1.5}
    data = three_clients()
    done = Federation(claiming(own, aggregated), data, network="Normed", rounds=9)
    done.settings = METHOD.settings(step=0.99)
    done.run()
    assert done.column("weight", 9)["c0"] == 0.0
    assert sum(done.column("weight", 9).values()) == pytest.approx(1.0)
    assert all((m["norm.running_var"] > 0).all() for m in done.models)


@pytest.mark.parametrize("form", ["published", "as_released"])
def test_one_client_and_one_class(form):
    data = {"only": client_data([2] * 6, 1)}
    done = Federation({"name": "fedga", "form": form}, data, network="Normed").run()
    assert done.column("weight", 3) == {"only": 1.0}


def test_part_of_the_clients():
    data = {f"c{i}": client_data([0, 1, 2, 1, 0, 2], i) for i in range(5)}
    done = Federation({"name": "fedga", "step": 0.9}, data, rounds=8, fraction=0.6, dropout=0.2).run()
    assert len({tuple(r["admitted"]) for r in done.records}) > 2
    for t, record in enumerate(done.records, start=1):
        assert set(done.column("gap", t)) == (set(record["admitted"]) if t < 8 else set())
        assert sum(done.column("weight", t).values()) == pytest.approx(1.0) if record["admitted"] else True
    kept = done.server.notes["weights"].values
    assert set(kept) == set(data)
    assert sum(kept.values()) == pytest.approx(1.0)


def test_client_that_fails_in_training_or_in_validation():
    done = Federation(faulty(METHOD, "train", "nan"), three_clients()).run()
    assert done.records[0]["admitted"] == ["c0", "c2"]
    assert set(done.column("gap", 1)) == {"c0", "c2"}
    assert done.server.notes["weights"].values.keys() == set(CLIENTS)
    done = Federation(faulty(METHOD, "validate", "crash"), three_clients()).run()
    assert done.records[0]["admitted"] == list(CLIENTS)
    assert set(done.column("gap", 1)) == {"c0", "c2"}
    assert done.column("weight", 2)["c1"] == pytest.approx(1 / 3)
    method = METHOD
    for client in CLIENTS:
        method = faulty(method, "validate", "crash", client)
    done = Federation(method, three_clients()).run()
    assert done.records[0]["admitted"] == list(CLIENTS)
    assert done.column("weight", 2) == pytest.approx(dict.fromkeys(CLIENTS, 1 / 3))
    for client in CLIENTS:
        method = faulty(method, "train", "crash", client)
    done = Federation(method, three_clients()).run()
    assert same_state(done.models[0], done.initial)


def test_killed_run_goes_on_bitwise(tmp_path):
    killed_and_resumed("fedga", tmp_path, 2)


def test_several_labels_and_salt():
    section = {"name": "fedga", "local_epochs": 3}
    plain = Federation(section, multilabel_clients(), bundle_changes=MULTI).run()
    section |= {"salt": {"rho": 0.5}, "metric": "accuracy"}
    sharp = Federation(section, multilabel_clients(), bundle_changes=MULTI).run()
    assert distance(plain.models[0], sharp.models[0]) > 1e-6
    assert all(-1 <= v <= 0 for v in sharp.column("own_validation", 1).values())
    assert all(torch.isfinite(t).all() for t in plain.models[-1].values())


def test_settings():
    _, settings = resolve_method({"name": "fedga"})
    assert (settings.step, settings.validation, settings.centred, settings.metric) == (0.2, 0.2, True, "loss")
    _, settings = resolve_method({"name": "fedga", "form": "as_released"})
    assert (settings.step, settings.validation) == (0.05, 0.0)
    for section in ({"step": 1.0}, {"metric": "auc"}, {"validation": -0.1}, {"form": "official"}):
        with pytest.raises(ConfigError, match=next(iter(section))):
            resolve_method({"name": "fedga", **section})
