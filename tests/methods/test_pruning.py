"""Spectral pruning is federated averaging over the clients judged clean, from the initial model."""

from __future__ import annotations

import pytest
from planted import NOISY, federation, planted, watch

from medfed.federation.state import same_state

CLEAN = ("c0", "c1")
PLAIN = {"name": "pruning", "stage_one": {"epochs": 1}}


@pytest.mark.parametrize("identification", ["published", "evidence"])
def test_it_is_federated_averaging_over_the_clean_clients(identification):
    world = planted()
    done = federation({**PLAIN, "identification": identification}, world.data, rounds=3)
    seen = watch(done)
    done.run()
    assert {c for c, s in done.column("status", 1).items() if s == "noisy"} == set(NOISY)
    apart = federation("fedavg", {c: world.data[c] for c in CLEAN}, rounds=3).run()
    assert all(same_state(a, b) for a, b in zip(done.models, apart.models, strict=True))
    assert [task for task, _, _ in seen] == ["identify", "train", "train", "train"]
    assert all(r.clients == CLEAN for task, _, r in seen if task == "train")
    assert set(done.column("weight", 2)) == set(CLEAN)


def test_clients_train_on_observed_labels():
    """Clean clients' labels that are wrong in truth are used as they are: turning them changes the model."""
    world, turned = planted(), planted()
    labels = turned.data["c0"].labels.clone()
    labels[:3] = (labels[:3] + 1) % 3
    turned.data["c0"] = turned.data["c0"].with_labels(labels)
    one, other = (federation(PLAIN, w.data, rounds=1).run() for w in (world, turned))
    assert one.column("status", 1) == other.column("status", 1)
    assert not same_state(one.models[0], other.models[0])


def test_it_can_begin_from_the_models_of_stage_one():
    world = planted()
    done = federation({**PLAIN, "start": "clean"}, world.data, rounds=1)
    seen = watch(done)
    done.run()
    assert [task for task, _, _ in seen] == ["identify", "stage_one", "train"]
    assert same_state(seen[2][1]["message"].group("model"), seen[1][2].mean["model"])


def test_nobody_clean_keeps_everybody():
    counts = {f"c{k}": tuple(10 if c == k else 0 for c in range(3)) for k in range(3)}
    world = planted(counts, noisy=())
    done = federation(PLAIN, world.data, rounds=1).run()
    apart = federation("fedavg", world.data, rounds=1).run()
    assert same_state(done.models[0], apart.models[0])
    assert any("no client is judged clean" in w for w in done.records[0]["warnings"])


def test_round_without_a_clean_participant_leaves_the_model():
    world = planted()
    done = federation(PLAIN, world.data, rounds=8, fraction=0.3, seed=1)
    seen = watch(done)
    done.run()
    rounds = [r for task, _, r in seen if task == "train"]
    empty = [t for t, r in enumerate(rounds) if not r]
    assert empty
    assert len(empty) < 8
    for t in empty:
        before = done.models[t - 1] if t else done.initial
        assert same_state(done.models[t], before)
    assert all(set(r.clients) <= set(CLEAN) for r in rounds)
