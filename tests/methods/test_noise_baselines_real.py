"""FedProx, FedNoRo, FedSIR and pruning for two rounds on real B-scans, three of five clients with wrong labels."""

from __future__ import annotations

import json

import pytest
import torch
from planted import memories
from test_contract_staged import CHANGES, clients  # noqa: F401 (a fixture)
from tiny_federation import Federation, distance

from medfed.federation.state import same_state

SECTIONS = {
    "fedprox": {"name": "fedprox", "mu": 0.2},
    "fednoro": {"name": "fednoro", "warmup": 1, "local_epochs": 1, "ramp_end": 2},
}


@pytest.mark.parametrize("name", SECTIONS)
def test_two_rounds_on_real_images(name, clients):  # noqa: F811
    done = Federation(SECTIONS[name], clients, rounds=2, bundle_changes=CHANGES).run()
    assert [r["admitted"] for r in done.records] == [sorted(clients)] * 2
    assert all(r["refused"] == [] and r["warnings"] == [] for r in done.records) or name == "fednoro"
    assert all(torch.isfinite(t).all() for m in done.models for t in m.values() if t.is_floating_point())
    assert distance(done.models[1], done.models[0]) > 0
    for round in (1, 2):
        assert sum(done.column("weight", round).values()) == pytest.approx(1.0)
        assert all(loss > 0 for loss in done.column("loss", round).values())
    assert json.dumps(done.records)
    if name == "fednoro":
        assert set(done.column("status", 2).values()) == {"clean", "noisy"}
        assert max(done.column("distance", 2).values()) > 0
        again = Federation(SECTIONS[name], clients, rounds=2, bundle_changes=CHANGES, workers=2).run()
        assert all(same_state(a, b) for a, b in zip(done.models, again.models, strict=True))


STAGE_ONE = {"epochs": 2}


def test_two_rounds_of_pruning_on_real_images(clients):  # noqa: F811
    section = {"name": "pruning", "stage_one": STAGE_ONE, "salt": None}
    done = Federation(section, clients, rounds=2, bundle_changes=CHANGES).run()
    status = done.column("status", 1)
    assert set(status) == set(clients)
    assert set(status.values()) == {"clean", "noisy"}
    clean = sorted(c for c, s in status.items() if s == "clean")
    total = sum(len(clients[c]) for c in clean)
    for round, record in enumerate(done.records, start=1):
        assert record["refused"] == []
        assert sorted(done.column("loss", round)) == clean
        assert done.column("weight", round) == pytest.approx({c: len(clients[c]) / total for c in clean})
    assert done.records[1]["asked"] == done.records[1]["admitted"] == clean
    assert "status" not in next(iter(done.records[1]["clients"].values()))
    assert distance(done.models[1], done.models[0]) > 0
    # The same two rounds of averaging over the clean clients alone, from the same initial model.
    alone = Federation("fedavg", {c: clients[c] for c in clean}, rounds=2, bundle_changes=CHANGES).run()
    assert all(same_state(a, b) for a, b in zip(done.models, alone.models, strict=True))


def test_two_rounds_of_fedsir_on_real_images(clients, tmp_path):  # noqa: F811
    section = {"name": "fedsir", "period": 1, "stage_one": STAGE_ONE, "ramp_begin": 0, "ramp_end": 1}
    done = Federation(section, clients, rounds=2, bundle_changes=CHANGES, folder=tmp_path).run()
    assert [r["admitted"] for r in done.records] == [sorted(clients)] * 2
    status = done.column("status", 1)
    assert set(status) == set(clients)
    assert set(status.values()) == {"clean", "noisy"}
    for name in ("descriptor_mean", "descriptor_energy"):
        told = done.column(name, 1)
        assert len({f"{v:.6g}" for v in told.values()}) == 5
        assert all(0 < v < 1 for v in told.values())
    assert done.column("descriptor_max", 1) == {}  # FedSIR has two descriptors, OCT-FedSIR three
    assert done.records[1]["server"]["relabelled"]
    noisy = {c for c, s in status.items() if s == "noisy"}
    kept = memories(done, tmp_path)
    assert {c for c in kept if "labels" in kept[c]} == set(done.column("edited", 2)) == noisy
    for client, edited in done.column("edited", 2).items():
        assert edited == int((kept[client]["labels"] != clients[client].labels).sum())
    assert max(done.column("edited", 2).values()) > 0
    for round in (1, 2):
        assert sum(done.column("weight", round).values()) == pytest.approx(1.0)
    assert distance(done.models[1], done.models[0]) > 0
    assert json.dumps(done.records)
