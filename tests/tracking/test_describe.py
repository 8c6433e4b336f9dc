"""What MLflow is told about a run, and what it is not."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import yaml

from medfed.tracking.describe import artifact_files, manifest, parameters, publishable, tags, without_paths


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/data/Mary Smith/ct", "(path)"),
        ("~/scans", "(path)"),
        ("../shared/derm", "(path)"),
        ("D:\\scans\\x", "(path)"),
        ("sqlite:////data/mlflow.db", "(path)"),
        ("http://me:secret@host:5000", "http://host:5000"),
        ("$@lr * 2 / 3", "$@lr * 2 / 3"),
        ("$torch.load('/data/x.pt')", "$torch.load('(path)')"),
        ("resnet18", "resnet18"),
        (0.5, 0.5),
        (None, None),
        (["/a", {"k": "/b"}], ["(path)", {"k": "(path)"}]),
    ],
)
def test_paths_are_hidden(value, shown):
    assert without_paths(value) == shown


def test_parameters_are_flat_text_of_bounded_length():
    config = {
        "method": {"name": "fedism", "q": 2.0, "on": True},
        "overrides": {"a::b": [1, 2]},
        "x": "y" * 900,
        "n": None,
    }
    got = parameters(config)
    assert got["method/name"] == "fedism"
    assert got["method/q"] == "2.0"
    assert got["method/on"] == "true"
    assert got["overrides/a::b"] == "[1, 2]"
    assert got["n"] == "null"
    assert len(got["x"]) == 500
    assert got["x"].endswith("...")


def test_tags_hold_hashes_and_versions():
    got = tags(
        {"uid": "u", "status": "running", "seed": 3, "condition_hash": "ab", "versions": {"torch": "2.14.0+cpu"}}
    )
    assert got == {"medfed.seed": "3", "medfed.condition_hash": "ab", "medfed.versions.torch": "2.14.0+cpu"}


def test_manifest_counts_without_ids(tmp_path):
    assert manifest(tmp_path, ["A", "B"]) is None
    (tmp_path / "condition").mkdir()
    rows = [("h1", "s1", 0), ("h1", "s2", 1), ("h2", "s3", 1)]
    pd.DataFrame(rows, columns=["client", "sample", "observed"]).to_parquet(tmp_path / "condition/clients.parquet")
    got = manifest(tmp_path, ["A", "B"])
    assert got["samples"] == 3
    assert got["classes"] == {"A": 1, "B": 2}
    assert got["clients"]["h1"]["classes"] == {"A": 1, "B": 1}
    assert "s1" not in json.dumps(got)


def test_manifest_of_several_labels_at_once(tmp_path):
    (tmp_path / "condition").mkdir()
    table = pd.DataFrame({"client": ["h"] * 2, "sample": ["1", "2"], "observed": [np.array([1, 1]), np.array([0, 1])]})
    table.to_parquet(tmp_path / "condition/clients.parquet")
    assert manifest(tmp_path, ["x", "any"])["classes"] == {"x": 1, "any": 2}


def test_published_copies_hold_neither_paths_nor_ids(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "experiment.yaml").write_text("cohort: {root: /data/x, reader: csv}\n")
    copy = publishable(tmp_path / "experiment.yaml", out)
    assert yaml.safe_load(copy.read_text()) == {"cohort": {"root": "(path)", "reader": "csv"}}
    pd.DataFrame({"sample": ["Mary_01", "2"], "loss": [0.5, 1.0]}).to_parquet(tmp_path / "p.parquet")
    table = pd.read_parquet(publishable(tmp_path / "p.parquet", out))
    assert table["loss"].tolist() == [0.5, 1.0]
    assert not set(table["sample"]) & {"Mary_01", "2"}
    assert pd.read_parquet(tmp_path / "p.parquet")["sample"][0] == "Mary_01"
    (tmp_path / "report.html").write_text("x")
    assert publishable(tmp_path / "report.html", out) == tmp_path / "report.html"


def test_artifacts_are_files_and_whole_folders(tmp_path):
    (tmp_path / "predictions").mkdir()
    for name in ("predictions/b.parquet", "predictions/a.parquet", "predictions/c.writing", "report.html"):
        (tmp_path / name).write_text("x")
    names = [n for n, _ in artifact_files(tmp_path, ["report.html", "predictions", "model.safetensors"])]
    assert names == ["report.html", "predictions/a.parquet", "predictions/b.parquet"]
