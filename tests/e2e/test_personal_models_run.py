"""A whole run of a method whose clients keep their own models and learn from public images."""

from __future__ import annotations

import json

import pytest

from medfed.data.condition import load
from medfed.errors import ConfigError
from medfed.running import resume

SECTION = {"name": "rhfl", "pretraining": 1}
CHANGES = {"method": SECTION, "condition__public": {"fraction": 0.2}, "rounds": 2}


def records(path):
    return [json.loads(line) for line in (path / "records.jsonl").read_text().splitlines()]


def test_run_is_measured_by_the_clients_models_and_goes_on(start):
    path = start(**CHANGES)
    done = records(path)
    condition = load(path / "condition")
    assert condition.public
    assert not set(condition.public) & set(condition.truth.samples)
    assert set(done[-1]["evaluation"]["clients"]) <= set(condition.clients)
    assert all(r["refused"] == [] and len(r["admitted"]) == 4 for r in done)
    scores = [r["evaluation"]["clean"]["nll"] for r in done]
    assert scores[0] != scores[1]
    assert not (path / "model.safetensors").exists()
    assert (path / "report.html").exists()
    assert json.loads((path / "run.json").read_text())["status"] == "completed"
    resume(path)
    assert records(path) == done


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"method": "rhfl"}, "rhfl needs public images"),
        ({**CHANGES, "engine": {"kind": "nvflare"}}, "runs on the local engine alone"),
    ],
)
def test_what_cannot_run_is_refused(start, changes, told):
    with pytest.raises(ConfigError, match=told):
        start(**changes)
