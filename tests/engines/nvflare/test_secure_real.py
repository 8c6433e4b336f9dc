"""Real images: the local engine, NVFlare's simulator and a federation with mutual TLS make the same model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from secure import Secure

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))
from experiments import changed

from medfed.config import validate
from medfed.federation.memory import newest_memory
from medfed.federation.state import same_state
from medfed.running import start
from medfed.tracking.records import RecordLog

SITES = ["client_00", "client_01", "client_02"]
PARTITION = {"kind": "dirichlet", "clients": 3, "alpha": 2.0}
CONDITIONS = {
    "fedism": {
        "partition": {**PARTITION, "kind": "quality", "corrupted": 1},
        "corruption": {"kind": "gaussian_noise", "severity": 3},
    },
    "oct_fedsir": {
        "partition": PARTITION,
        "label_noise": {"kind": "symmetric", "rate": 0.5, "clean": 2},
    },
}
METHODS = {"fedism": {}, "oct_fedsir": {"period": 1, "identification": "evidence", "stage_one": {"epochs": 1}}}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", CONDITIONS)
def test_three_ways_to_one_model(method, shared, tmp_path):
    """B-scans of Kermany's set in SqueezeNet, two rounds."""
    data = {
        "name": method,
        "cohort": {"reader": "kermany", "root": str(shared / "data" / "oct")},
        "condition": CONDITIONS[method],
        "bundle": "oct_bscan_classification",
        "overrides": {"image_size": [48, 48], "batch_size": 16},
        "method": {"name": method, **METHODS[method]},
        "rounds": 2,
        "engine": {"kind": "local", "workers": 1, "threads": 1, "device": "cpu"},
        "tracking": {"enabled": False},
        "output": str(tmp_path / "runs"),
        "cache": str(tmp_path / "cache"),
    }
    local = start(validate(data, "test"))
    flare = changed(data, {"engine": {"kind": "nvflare", "threads": 1, "device": "cpu"}})
    simulated = start(validate(flare, "test"))
    federation = Secure(tmp_path / "federation", flare, SITES)
    try:
        session = federation.start_all()
        assert federation.finish(session, federation.submit(session)) == "FINISHED:COMPLETED"
    finally:
        federation.close()
    model, records = load_file(local / "model.safetensors"), RecordLog(local / "records.jsonl").read()
    for run in (simulated, federation.run):
        assert same_state(model, load_file(run / "model.safetensors"))
        others = RecordLog(run / "records.jsonl").read()
        for key in ("asked", "admitted", "refused", "server", "clients", "bytes"):
            assert [r[key] for r in others] == [r[key] for r in records], key
        assert [r["evaluation"]["clean"] for r in others] == [r["evaluation"]["clean"] for r in records]
    for site in SITES:
        ours, theirs = newest_memory(local / "clients" / site), newest_memory(federation.memory(site))
        assert ours.keys() == theirs.keys()
        assert all(str(ours[name]) == str(theirs[name]) for name in ours)
