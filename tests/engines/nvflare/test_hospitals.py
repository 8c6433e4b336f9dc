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
from medfed.data.cohort import Task
from medfed.engines.nvflare.export import export
from medfed.engines.nvflare.held_out import HELD_OUT
from medfed.engines.nvflare.hospitals import agree
from medfed.engines.nvflare.hosting import REPORT, open_desk
from medfed.engines.nvflare.plan import RUNS, ServerPlan, SitePlan, read_plan
from medfed.engines.nvflare.serving import serve
from medfed.engines.nvflare.site_bundle import agreed_bundle
from medfed.engines.nvflare.site_settings import own_data, read_site
from medfed.federation.messages import Message
from medfed.federation.state import same_state
from medfed.ledger import LEDGER, differences, read_ledger
from medfed.report.runs import load_run
from medfed.tracking.records import RecordLog
from medfed.training.local import LocalTrainer
from medfed.training.metrics import metrics_for, pool_scores
from medfed.training.pooling import NO_HISTOGRAMS, SCORE_BINS

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
        "sites": {"names": list(SITES), "classes": list(CLASSES), "held_out": 0.25},
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


def settle(kit: Path, root: Path, **more) -> None:
    (kit / "local").mkdir(parents=True, exist_ok=True)
    settings = {"cohort": {"reader": "folder", "root": str(root)}, "device": "cpu", "threads": 1, **more}
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
    return tmp_path / "kits" / "server" / RUNS / plan.run, said


@pytest.fixture
def job(data, tmp_path):
    for seed, (name, classes) in enumerate(SITES.items()):
        settle(tmp_path / "kits" / name, write_images(tmp_path / "images" / name, classes, seed))
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(data))
    return export(tmp_path / "experiment.yaml", tmp_path / "job")


def test_sites_of_different_classes_train_one_model_and_measure_it_on_their_held_out_shares(job, tmp_path):
    run, _ = run_job(job, tmp_path)
    records = RecordLog(run / "records.jsonl").read()
    assert [r["admitted"] for r in records] == [sorted(SITES)] * 2
    assert records[0]["clients"]["north"]["samples"] == 12  # a quarter of 16 is held out
    assert records[0]["clients"]["south"]["samples"] == 6
    assert records[0]["asked"] == sorted(SITES)
    assert records[0]["warnings"] == []
    check_evaluation(records[-1], run, tmp_path)
    for kit in (tmp_path / "kits").iterdir():  # where NVFlare's processes start: nothing there is taken for the package
        assert {p.name for p in kit.iterdir()} <= {"local", RUNS, "cache"}
        assert not (kit / "medfed").exists()
    meta = json.loads((run / "run.json").read_text())
    assert (meta["status"], meta["classes"]) == ("completed", list(CLASSES))
    model = load_file(run / "model.safetensors")
    assert all(torch.isfinite(t).all() for t in model.values())
    assert load_run(run).records
    assert (run / "report.html").is_file()
    received = read_ledger(run / LEDGER)
    for name in SITES:
        sent = read_ledger(tmp_path / "kits" / name / RUNS / run.name / name / LEDGER)
        assert differences(sent, [e for e in received if e["client"] == name]) == ([], [])
    for path in run.rglob("*"):  # where a site keeps its images is nowhere at the server
        assert not path.is_file() or str(tmp_path / "images").encode() not in path.read_bytes()


def check_evaluation(record: dict, run: Path, tmp_path: Path) -> None:
    """The record is what the final model is worth on the held-out images, found by other means: all put together."""
    plan = read_plan(SitePlan, tmp_path / "job" / "medfed_site" / "config")
    model, parts = load_file(run / "model.safetensors"), {}
    for name in SITES:
        kit = tmp_path / "kits" / name
        bundle = agreed_bundle(plan)
        own = own_data(read_site(kit / "local" / "site.yaml"), plan, name, bundle, kit / "cache")
        trainer = LocalTrainer(bundle, device="cpu", threads=1)
        trainer.load(model)
        parts[name] = trainer.predict(own.held_out).numpy(), own.held_out.labels.numpy()
    task = Task(plan.task, plan.classes)
    want = metrics_for(task, *pool_scores(parts.values()))
    found = record["evaluation"]
    assert found["clean"]["samples"] == 8
    assert found["pooled"]["sites"] == 3
    for name, value in want.values.items():
        if not name.startswith("auc"):
            assert found["clean"][name] == pytest.approx(value), name
    assert found["clean"]["auc_ovo"] is None
    assert record["undefined"]["clean/auc_ovo"] == NO_HISTOGRAMS
    for site, (scores, labels) in parts.items():
        assert found["clients"][site] == pytest.approx(metrics_for(task, scores, labels, per_class=False).values)
    assert found["client_mean"]["auc_ovo"] == found["clients"]["north"]["auc_ovo"]  # the others lack classes
    assert found["client_mean"]["auc_ovo_sites"] == 1


def told(tmp_path: Path, run: Path, site: str) -> list[dict]:
    entries = read_ledger(tmp_path / "kits" / site / RUNS / run.name / site / LEDGER)
    return [e for e in entries if e["task"] == HELD_OUT]


def test_each_site_decides_what_it_tells_and_the_ledger_shows_it(job, tmp_path):
    settle(tmp_path / "kits" / "south", tmp_path / "images" / "south", evaluation="nothing")
    own = {"batch_size": 3, "augment::flip": 0.0625}
    settle(
        tmp_path / "kits" / "west", tmp_path / "images" / "west",
        evaluation="histogram", overrides=own, tell_overrides=True,
    )  # fmt: skip
    run, _ = run_job(job, tmp_path)
    records = RecordLog(run / "records.jsonl").read()
    assert records[0]["evaluation"]["pooled"]["sites"] == 2
    assert sorted(records[0]["evaluation"]["clients"]) == ["north", "west"]
    assert records[0]["warnings"] == ["held-out share of south: it tells of none"]
    assert [e["values"] for e in told(tmp_path, run, "south")] == [{HELD_OUT: 0}] * 2
    assert [e["tensors"] for e in told(tmp_path, run, "north")] == [[]] * 2
    entry = told(tmp_path, run, "west")[0]
    assert entry["tensors"] == [["scores/histogram", "int32", [4, 4, SCORE_BINS]]]
    assert set(entry["values"]) == {HELD_OUT, *["non_finite", "counts", "losses", "calibration", "areas", "overrides"]}
    assert sum(map(sum, entry["values"]["counts"])) == entry["values"][HELD_OUT] == 2
    assert {c: v.get("overrides") for c, v in records[0]["clients"].items()} == {
        "north": None, "south": None, "west": "augment::flip, batch_size",
    }  # fmt: skip
    report = json.loads((tmp_path / "kits" / "west" / RUNS / run.name / "west" / REPORT).read_text())
    assert (report["overrides"], report["held_out_images"], report["training_images"]) == (own, 2, 6)
    text = (run / "records.jsonl").read_text() + (run / LEDGER).read_text()
    assert "0.0625" not in text  # names, no values


def test_a_site_that_tells_nonsense_is_left_out_of_the_evaluation(job, tmp_path, monkeypatch):
    from medfed.engines.nvflare import held_out

    real = held_out.pack_figures

    def lie(figures, values=None):
        message = real(figures, values)
        return message if figures.samples != 4 else Message(message.tensors, {**message.values, "counts": [[9]]})

    monkeypatch.setattr(held_out, "pack_figures", lie)
    run, _ = run_job(job, tmp_path)
    record = RecordLog(run / "records.jsonl").read()[-1]
    assert record["warnings"] == ["held-out share of north: sent counts of a wrong form"]
    assert sorted(record["evaluation"]["clients"]) == ["south", "west"]
    assert record["admitted"] == sorted(SITES)


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
    assert record["evaluation"]["clean"]["samples"] == 8
    assert record["evaluation"]["held_out"]["samples"] == 8
    assert sorted(record["evaluation"]["clients"]) == sorted(SITES)
    other, _ = run_job(job, tmp_path)
    assert same_state(load_file(run / "model.safetensors"), load_file(other / "model.safetensors"))


@pytest.mark.slow
def test_the_server_alone_tracks_one_run_and_a_child_for_each_site(data, job, tmp_path):
    """NVFlare's own receiver makes a run of every site and none of the server (trap)."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump({**data, "tracking": {"uri": uri}}))
    run, _ = run_job(export(tmp_path / "experiment.yaml", tmp_path / "job2"), tmp_path)
    client = MlflowClient(uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "medfed"]
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [r for r in runs if "mlflow.parentRunId" not in r.data.tags]
    children = {r.info.run_name: r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id}
    assert sorted(children) == sorted(SITES)
    assert len(runs) == 4
    record = RecordLog(run / "records.jsonl").read()[-1]
    last = record["evaluation"]["clean"]["balanced_accuracy"]
    assert client.get_metric_history(parent.info.run_id, "clean/balanced_accuracy")[-1].value == last
    history = client.get_metric_history(children["north"].info.run_id, "evaluation/auc_ovo")
    assert [m.step for m in history] == [1, 2]
    assert uri not in (tmp_path / "job2" / "medfed_site" / "config" / "medfed.json").read_text()


def test_the_quorum_can_be_reached(data):
    from medfed.errors import ConfigError

    with pytest.raises(ConfigError, match="quorum"):
        agree(validate({**data, "participation": {"quorum": 4}}, "test"))
