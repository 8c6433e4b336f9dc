"""Bundles as MONAI runs them: train, evaluate, infer; sharpness-aware, noise-robust; tracked."""

import csv
import json
import os
import sqlite3
import subprocess
import sys

import pytest
import torch
from monai.bundle import ConfigWorkflow

from medfed.errors import DataError
from medfed.training.bundle import TrainingBundle, find_bundle
from medfed.training.standalone import evaluation_items, training_items

NAMES = ["oct_bscan_classification", "rsna_ich_ct_classification", "isic_dermoscopy_classification"]


def workflow(name, overlays, given, kind="train", **how):
    configs = find_bundle(name) / "configs"
    files = [str(configs / f"{file}.yaml") for file in ("train", *overlays)]
    made = ConfigWorkflow(config_file=files, workflow_type=kind, logging_file=False, **how, **given)
    made.initialize()
    return made


@pytest.mark.parametrize("name", NAMES)
def test_train_evaluate_infer(name, small, tmp_path):
    given = small(name)
    train = workflow(name, [], given)
    assert train.check_properties() == []
    train.run()
    trained = torch.load(tmp_path / "models" / "model.pt", weights_only=True)
    assert trained.keys() == train.network_def.state_dict().keys()

    evaluate = workflow(name, ["evaluate"], given)
    assert evaluate.check_properties() == []
    evaluate.run()
    found = json.loads((tmp_path / "eval" / "metrics.json").read_text())
    held_out = evaluation_items(evaluate.parser["reader"], given["dataset_dir"], evaluate.parser["classes"], 0.2)
    assert found["metrics"]["samples"] == len(held_out)
    assert 0 <= found["metrics"]["balanced_accuracy"] <= 1
    assert found["metrics"]["balanced_accuracy"] == evaluate.evaluator.state.best_metric
    assert set(found["undefined"]) == {k for k, v in found["metrics"].items() if v is None}

    infer = workflow(name, ["inference"], given, "infer")
    assert infer.check_properties() == []
    infer.run()
    predicted = json.loads((tmp_path / "eval" / "predictions.json").read_text())
    with open(tmp_path / "eval" / "images.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(predicted["images"])
    assert predicted["counts"]["processed"] > 0
    assert {r["status"] for r in rows} <= {"processed", "not processed"}
    assert all(len(r["model"]) == len(r["preprocessing"]) == 64 for r in rows)


def test_a_folder_where_nothing_applies_ends_in_the_result_too(cohort_of, small, tmp_path):
    """MONAI does not start an engine without data, and would leave the user without any file."""
    network = TrainingBundle.load(NAMES[0], {"network_name": "squeezenet1_1"}).build_network(0)
    (tmp_path / "models").mkdir()
    torch.save({"model": network.state_dict()}, tmp_path / "models" / "model.pt")
    given = {**small(NAMES[0]), "dataset_dir": str(cohort_of(NAMES[1]))}
    workflow(NAMES[0], ["inference"], given, "infer").run()
    predicted = json.loads((tmp_path / "eval" / "predictions.json").read_text())
    files = [p for p in cohort_of(NAMES[1]).rglob("*") if p.is_file()]
    assert predicted["counts"]["not processed"] == len(predicted["images"]) == len(files)
    reasons = {i["reason"] for i in predicted["images"] if i["file"].endswith(".dcm")}
    assert reasons == {"not processed: modality CT, this model is for OPT, SC, OT"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("overlay", ["evaluate", "inference"])
def test_results_that_cannot_be_written_are_told_before_anything_is_computed(overlay, small, tmp_path):
    network = TrainingBundle.load(NAMES[0], {"network_name": "squeezenet1_1"}).build_network(0)
    (tmp_path / "models").mkdir()
    torch.save({"model": network.state_dict()}, tmp_path / "models" / "model.pt")
    (tmp_path / "eval").write_text("a file in the place of the folder")
    made = workflow(NAMES[0], [overlay], small(NAMES[0]), {"evaluate": "train"}.get(overlay, "infer"))
    with pytest.raises(RuntimeError) as told:
        made.run()
    chain = [error := told.value] + [error := e for _ in range(9) if (e := error.__cause__)]
    assert "results cannot be written there" in str(chain[-1])
    assert made.evaluator.state.iteration == 0


def test_too_few_patients_for_a_test_part(cohort_of):
    """The message names the bundle's key."""
    classes = TrainingBundle.load(NAMES[1]).classes
    folder = cohort_of(NAMES[1])
    assert len(training_items("rsna_ich", folder, classes, test_fraction=0)) > 1
    with pytest.raises(DataError, match="Choose another 'test_fraction'"):
        training_items("rsna_ich", folder, classes, test_fraction=1e-4)
    with pytest.raises(DataError, match="give 'test_fraction'"):
        evaluation_items("rsna_ich", folder, classes, test_fraction=0)


def test_split_keeps_patients_apart(cohort_of):
    """RSNA marks no test samples: some patients are kept back, the same ones every time."""
    given = ("rsna_ich", cohort_of(NAMES[1]), ["epidural", "intraparenchymal", "intraventricular", "subarachnoid"])
    given = (*given[:2], [*given[2], "subdural"])
    train = {item["image"] for item in training_items(*given, test_fraction=0.2)}
    test = {item["image"] for item in evaluation_items(*given, test_fraction=0.2)}
    assert not train & test
    assert train | test == {item["image"] for item in training_items(*given)}
    assert test == {item["image"] for item in evaluation_items(*given, test_fraction=0.2)}


@pytest.mark.parametrize(
    ("overlays", "step", "loss"),
    [
        ([], "PlainStep", "CrossEntropyLoss"),
        (["sharpness_aware"], "SharpnessAwareStep", "CrossEntropyLoss"),
        (["noise_robust"], "PlainStep", "NoiseRobustLoss"),
        (["sharpness_aware", "noise_robust"], "SharpnessAwareStep", "NoiseRobustLoss"),
    ],
)
def test_trainer_is_chosen_by_file(overlays, step, loss, small):
    name = NAMES[0]
    made = workflow(name, overlays, small(name, **({"rho": 0.02} if "sharpness_aware" in overlays else {})))
    trainer = made.trainer
    assert type(trainer._process_function).__name__ == type(made.parser.get_parsed_content("step")).__name__ == step
    assert type(trainer.loss_function).__name__ == loss
    if step == "SharpnessAwareStep":
        assert made.parser.get_parsed_content("step").radius.rho == 0.02
    if loss == "NoiseRobustLoss":
        labels = [int(item["label"]) for item in made.train_dataset_data]
        shares = torch.bincount(torch.tensor(labels), minlength=4) / len(labels)
        assert torch.allclose(trainer.loss_function.offsets, shares.clamp_min(1e-12).log(), atol=1e-5)
    made.run()


@pytest.mark.slow
def test_tracking_in_mlflow(small, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    made = workflow(NAMES[0], ["sharpness_aware"], small(NAMES[0]), tracking="mlflow")
    made.run()
    made.finalize()
    with sqlite3.connect(tmp_path / "eval" / "mlruns.db") as database:
        names = {row[0] for row in database.execute("select distinct key from metrics")}
    assert "train_loss" in names


def command(name, overlays, given, *more):
    configs = find_bundle(name) / "configs"
    files = [str(configs / f"{file}.yaml") for file in ("train", *overlays)]
    words = [sys.executable, "-m", "monai.bundle", "run", "--config_file", str(files)]
    for key, value in given.items():
        words += [f"--{key}", str(value)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*words, *more], capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_commands(name, small, tmp_path):
    given = small(name)
    assert "train_loss" in command(name, ["noise_robust", "sharpness_aware"], given, "--tracking", "mlflow")
    assert (tmp_path / "eval" / "mlruns.db").is_file()
    assert "balanced_accuracy" in command(name, ["evaluate"], given)
    command(name, ["inference"], given)
    assert (tmp_path / "eval" / "predictions.json").is_file()
