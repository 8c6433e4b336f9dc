"""FedProx and FedNoRo for two rounds on real B-scans, three of five clients with wrong labels."""

from __future__ import annotations

import json

import pytest
import torch
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
