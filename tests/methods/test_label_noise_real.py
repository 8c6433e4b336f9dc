"""Methods against label noise for two rounds on real B-scans, three of five clients with wrong labels."""

from __future__ import annotations

import json

import pytest
import torch
from planted import memories
from test_contract_staged import CHANGES, clients  # noqa: F401 (a fixture)
from tiny_federation import Federation, distance

SECTIONS = {
    "fedlsr": {"name": "fedlsr", "local_epochs": 1},
    "fedlsr as released": {"name": "fedlsr", "local_epochs": 1, "form": "as_released"},
    "fedelc": {"name": "fedelc", "local_epochs": 2, "warmup": 1},
    "fedcorr": {"name": "fedcorr", "local_epochs": 1, "iterations": 1, "fine_tuning": 0, "confidence": 0.26},
    "rofl": {"name": "rofl", "local_epochs": 1, "pseudo_from": 1, "gradual": 1},
    "rhfl": {"name": "rhfl", "pretraining": 1},
    "fedned": {"name": "fedned", "local_epochs": 1, "warmup": 1, "uncertainty": 1.0, "steps": 4, "images": 16},
}


@pytest.mark.parametrize("name", SECTIONS)
def test_two_rounds_on_real_images(name, clients, tmp_path):  # noqa: F811
    section = SECTIONS[name]
    data, shown = dict(clients), None
    if section["name"] in ("rhfl", "fedned"):
        held = data.pop("hospital_4")
        shown = held.with_labels(torch.full((len(held),), -1))
    done = Federation(section, data, rounds=2, bundle_changes=CHANGES, public=shown, folder=tmp_path).run()
    assert [r["admitted"] for r in done.records] == [sorted(data)] * 2
    assert all(r["refused"] == [] for r in done.records)
    assert all(torch.isfinite(t).all() for m in done.models for t in m.values() if t.is_floating_point())
    for round in (1, 2):
        assert all(loss > 0 for loss in done.column("loss", round).values())
    assert json.dumps(done.records)
    kept = memories(done, tmp_path)
    if section["name"] == "rhfl":
        assert all("model/" in " ".join(kept[c]) for c in data)
        assert len({float(kept[c]["model/head.bias"][0]) if "model/head.bias" in kept[c] else c for c in data}) == 4
    else:
        assert distance(done.models[1], done.models[0]) > 0
    if section["name"] in ("fedelc", "fedcorr", "fedned"):
        status = dict(done.server.notes["verdict"].values["status"])
        assert set(status) == set(data)
        assert {c for c in kept if "labels" in kept[c]} <= {c for c, s in status.items() if s == "noisy"}
    if section["name"] == "rofl":
        assert all(len(kept[c]["labels"]) == len(data[c]) for c in data)
