"""A whole run whose images stay at the sites: exported, served and trained, without the network between."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from flare import flare
from PIL import Image
from safetensors.torch import load_file

from medfed.config import validate
from medfed.engines.nvflare.export import export
from medfed.engines.nvflare.hospitals import NOT_EVALUATED, agree
from medfed.engines.nvflare.hosting import open_desk
from medfed.engines.nvflare.plan import ServerPlan, SitePlan, read_plan
from medfed.engines.nvflare.serving import serve
from medfed.federation.state import same_state
from medfed.ledger import LEDGER, differences, read_ledger
from medfed.report.runs import load_run
from medfed.tracking.records import RecordLog

CLASSES = ("CNV", "DME", "DRUSEN", "NORMAL")
SITES = {"north": ("CNV", "DME", "DRUSEN", "NORMAL"), "south": ("NORMAL", "DME"), "west": ("CNV", "NORMAL")}


def write_images(root: Path, classes: tuple[str, ...], seed: int) -> Path:
    rng = np.random.default_rng(seed)
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(rng.integers(0, 256, (24, 24), dtype=np.uint8)).save(root / name / f"{i}.png")
    return root


@pytest.fixture
def data(tmp_path):
    return {
        "name": "trial",
        "sites": {"names": list(SITES), "classes": list(CLASSES)},
        "bundle": "oct_bscan_classification",
        "overrides": {
            "image_size": [16, 16],
            "batch_size": 4,
            "network_name": "ResNet",
            "network_def::block": "basic",
            "network_def::layers": [1, 1, 1, 1],
            "network_def::block_inplanes": [4, 4, 4, 4],
            "network_def::conv1_t_size": 3,
        },
        "method": "fedism",
        "rounds": 2,
        "participation": {"quorum": 2, "timeout": 120},
        "engine": {"kind": "nvflare", "device": "cpu", "threads": 1},
        "tracking": {"enabled": False},
        "cache": str(tmp_path / "cache"),
    }


def settle(kit: Path, root: Path) -> None:
    (kit / "local").mkdir(parents=True)
    settings = {"cohort": {"reader": "folder", "root": str(root)}, "device": "cpu", "threads": 1}
    (kit / "local" / "site.yaml").write_text(yaml.safe_dump(settings))


def run_job(job: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """Runs a job on the task management of NVFlare; gives the run's folder and what was said."""
    plan = read_plan(ServerPlan, job / "medfed_server" / "config")
    site_plan = read_plan(SitePlan, job / "medfed_site" / "config")
    said: list[str] = []
    with flare(dict.fromkeys(SITES, 1), tmp_path / "toy", one_at_a_time=True) as f:
        for name in SITES:
            f.sites[name].executor._desk = open_desk(site_plan, name, tmp_path / "kits" / name)
        serve(plan, f.controller._post, tmp_path / "kits" / "server", said.append, lambda engine: None)
    return tmp_path / "kits" / "server" / "medfed" / plan.run, said


@pytest.fixture
def job(data, tmp_path):
    for seed, (name, classes) in enumerate(SITES.items()):
        settle(tmp_path / "kits" / name, write_images(tmp_path / "images" / name, classes, seed))
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(data))
    return export(tmp_path / "experiment.yaml", tmp_path / "job")


def test_sites_of_different_classes_train_one_model_and_the_server_says_that_it_cannot_evaluate(job, tmp_path):
    run, _ = run_job(job, tmp_path)
    records = RecordLog(run / "records.jsonl").read()
    assert [r["admitted"] for r in records] == [sorted(SITES)] * 2
    assert records[0]["clients"]["north"]["samples"] == 16
    assert records[0]["clients"]["south"]["samples"] == 8
    assert NOT_EVALUATED in records[0]["warnings"]
    meta = json.loads((run / "run.json").read_text())
    assert (meta["status"], meta["classes"]) == ("completed", list(CLASSES))
    model = load_file(run / "model.safetensors")
    assert all(torch.isfinite(t).all() for t in model.values())
    assert load_run(run).records
    assert (run / "report.html").is_file()
    received = read_ledger(run / LEDGER)
    for name in SITES:
        sent = read_ledger(tmp_path / "kits" / name / "medfed" / run.name / name / LEDGER)
        assert differences(sent, [e for e in received if e["client"] == name]) == ([], [])
    for path in run.rglob("*"):  # where a site keeps its images is nowhere at the server
        assert not path.is_file() or str(tmp_path / "images").encode() not in path.read_bytes()


def test_a_job_that_is_submitted_again_is_done(job, tmp_path):
    run, _ = run_job(job, tmp_path)
    before = load_file(run / "model.safetensors")
    again, said = run_job(job, tmp_path)
    assert again == run
    assert said[-1] == "All 2 rounds are done."
    assert same_state(before, load_file(run / "model.safetensors"))


def test_test_images_at_the_server_are_used_for_evaluation_alone(data, job, tmp_path):
    root = write_images(tmp_path / "tests", ("DME", "NORMAL"), 9)
    with_tests = {**data, "cohort": {"reader": "folder", "root": str(root)}}
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(with_tests))
    run, said = run_job(export(tmp_path / "experiment.yaml", tmp_path / "job2"), tmp_path)
    assert "8 test images at the server" in said
    record = RecordLog(run / "records.jsonl").read()[-1]
    assert 0 <= record["evaluation"]["clean"]["accuracy"] <= 1
    assert NOT_EVALUATED not in record["warnings"]
    other, _ = run_job(job, tmp_path)
    assert same_state(load_file(run / "model.safetensors"), load_file(other / "model.safetensors"))


def test_the_quorum_can_be_reached(data):
    from medfed.errors import ConfigError

    with pytest.raises(ConfigError, match="quorum"):
        agree(validate({**data, "participation": {"quorum": 4}}, "test"))
