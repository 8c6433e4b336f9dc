"""The evaluator and the prediction files."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import metrics as sk

from medfed.data.cohort import Task
from medfed.errors import ConfigError
from medfed.training.evaluation import Evaluator, worst_client
from medfed.training.predictions import PredictionFiles, write_table

TASK = Task("multiclass", ("NV", "MEL", "BCC"))


class Arrays:
    """Stands for a test set whose logits are known beforehand."""

    def __init__(self, labels, logits):
        self.labels, self.logits = labels, logits
        self.calls = 0

    def __len__(self):
        return len(self.labels)


def predict(data):
    data.calls += 1
    return torch.from_numpy(data.logits)


def make(seed: int, n: int = 60, skill: float = 1.5) -> Arrays:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, n)
    return Arrays(labels, rng.normal(size=(n, 3)) + skill * np.eye(3)[labels])


def balanced(data: Arrays, rows=slice(None)) -> float:
    return sk.balanced_accuracy_score(data.labels[rows], data.logits[rows].argmax(1))


@pytest.fixture
def pair():
    return make(0, skill=2.0), make(1, skill=0.5)


def evaluator(pair, **kwargs) -> Evaluator:
    shares = {"b": ("corrupted", np.arange(20)), "a": ("clean", np.arange(5, 60)), "c": ("clean", np.arange(5))}
    return Evaluator(TASK, {"clean": pair[0], "corrupted": pair[1]}, shares, **kwargs)


def test_each_set_is_predicted_once_and_clients_are_slices(pair):
    found = evaluator(pair).evaluate(predict)
    assert pair[0].calls == pair[1].calls == 1
    clean, corrupted = pair
    assert found.evaluation["clean"]["balanced_accuracy"] == pytest.approx(balanced(clean))
    clients = found.evaluation["clients"]
    assert list(clients) == ["a", "b", "c"]
    assert clients["b"]["balanced_accuracy"] == pytest.approx(balanced(corrupted, np.arange(20)))
    assert clients["a"]["samples"] == 55
    mean = (balanced(clean) + balanced(corrupted)) / 2
    assert found.evaluation["average"]["balanced_accuracy"] == pytest.approx(mean)
    gap = balanced(clean) - balanced(corrupted)
    assert found.evaluation["gap"]["balanced_accuracy"] == pytest.approx(gap)
    worst = min(balanced(corrupted, np.arange(20)), balanced(clean, np.arange(5)), balanced(clean, np.arange(5, 60)))
    assert found.evaluation["worst_client"]["balanced_accuracy"] == pytest.approx(worst)
    assert "recall/MEL" in found.evaluation["clean"]
    json.dumps(found.record(), allow_nan=False)


def test_undefined_values_carry_their_reason_under_set_and_client(pair):
    clean = Arrays(np.array([0, 1, 0, 1]), np.eye(3)[[0, 1, 1, 1]] * 3.0)
    found = Evaluator(TASK, {"clean": clean}, {"x": ("clean", np.array([0, 2]))}).evaluate(predict)
    assert found.evaluation["clean"]["auc_ovo"] is None
    assert found.undefined["clean/auc_ovo"] == "class 'BCC' is absent"
    assert found.undefined["clients/x/auc_ovo"] == "classes 'MEL', 'BCC' are absent"
    assert "average" not in found.evaluation
    assert "gap" not in found.evaluation


def test_average_is_undefined_where_one_side_is(pair):
    corrupted = Arrays(np.zeros(4, int), np.zeros((4, 3)))
    found = Evaluator(TASK, {"clean": pair[0], "corrupted": corrupted}).evaluate(predict)
    assert found.evaluation["average"]["auc_ovo"] is None
    assert found.evaluation["average"]["accuracy"] is not None


def test_collapse_and_non_finite_logits_warn(pair):
    constant = Arrays(np.arange(30) % 3, np.tile([1.0, 0, 0], (30, 1)))
    found = Evaluator(TASK, {"clean": constant}).evaluate(predict)
    assert found.warnings == ["clean: the global model predicts 1 of 3 classes"]
    pair[0].logits[4, 1] = np.nan
    found = evaluator(pair).evaluate(predict)
    assert "clean: 1 of 60 samples have logits that are not finite" in found.warnings
    assert found.evaluation["clean"]["accuracy"] is None
    assert found.evaluation["clients"]["a"]["accuracy"] is not None  # the bad sample is of client c
    assert found.evaluation["clients"]["c"]["accuracy"] is None
    json.dumps(found.record(), allow_nan=False)


def test_worst_is_taken_in_the_direction_of_each_metric():
    worst = worst_client(
        {
            "b": {"balanced_accuracy": 0.2, "nll": 0.5, "auc_ovo": None, "samples": 3},
            "a": {"balanced_accuracy": 0.2, "nll": 2.0, "auc_ovo": None, "samples": 9},
            "c": {"balanced_accuracy": None, "nll": 1.0, "auc_ovo": None, "samples": 0},
        }
    )
    assert worst == {"balanced_accuracy": 0.2, "nll": 2.0, "auc_ovo": None, "client": "a"}
    assert worst_client({"a": {"balanced_accuracy": None}})["client"] is None


def test_multilabel_sets():
    task = Task("multilabel", ("x", "any"))
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (40, 2)).astype(np.float32)
    data = Arrays(labels, rng.normal(size=(40, 2)) + labels)
    judge = Evaluator(task, {"clean": data}, {"a": ("clean", np.arange(10))})
    found = judge.evaluate(predict)
    assert found.evaluation["clean"]["weighted_log_loss"] > 0
    table = judge.predictions(found)
    p = 1 / (1 + np.exp(-data.logits))
    assert table["p_any"].to_numpy() == pytest.approx(p[:, 1], rel=1e-5)
    want = sk.log_loss(labels[3], p[3], labels=[0, 1])
    assert table["loss"][3] == pytest.approx(want, rel=1e-5)
    assert table["label_x"].tolist() == labels[:, 0].astype(int).tolist()
    same = Arrays(labels, np.tile([0.3, -1.0], (40, 1)))
    warnings = Evaluator(task, {"clean": same}).evaluate(predict).warnings
    assert warnings == ["clean: the global model gives every sample the same scores"]


def test_table_of_predictions(pair, tmp_path):
    pair[1].logits[7] = np.inf
    ids = [f"{i:03d}" for i in range(60)]
    judge = evaluator(pair, samples={"clean": ids})
    table = judge.predictions(judge.evaluate(predict))
    assert len(table) == 120
    p = np.exp(pair[0].logits) / np.exp(pair[0].logits).sum(1, keepdims=True)
    assert table["p_BCC"][:60].to_numpy() == pytest.approx(p[:, 2], rel=1e-5)
    assert table["loss"][0] == pytest.approx(-np.log(p[0, pair[0].labels[0]]), rel=1e-5)
    assert table["client"][0] == "c"
    assert table["client"][60:].tolist() == ["b"] * 20 + [""] * 40
    assert table["predicted"][67] == -1
    assert np.isnan(table["loss"][67])
    back = pd.read_parquet(write_table(table, tmp_path / "new" / "p.parquet"))
    assert back["sample"][7] == "007"
    assert back["sample"][67] == "7"
    pd.testing.assert_frame_equal(back, table, check_dtype=False)


def test_a_sample_in_two_shares_names_both(pair):
    judge = Evaluator(TASK, {"clean": pair[0]}, {"a": ("clean", np.array([0, 1])), "b": ("clean", np.array([1]))})
    assert judge.predictions(judge.evaluate(predict))["client"][:3].tolist() == ["a", "a;b", ""]


def test_files_are_kept_by_recency_interval_and_score(tmp_path):
    table = pd.DataFrame({"sample": ["1"]})
    files = PredictionFiles(tmp_path / "predictions", keep_last=2, keep_every=4)
    scores = [0.1, 0.9, 0.9, None, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3]
    for round_, score in enumerate(scores, start=1):
        files.write(round_, table, score)
    assert files.rounds() == [2, 4, 8, 9, 10]
    files.truncate_after(8)
    assert files.rounds() == [2, 4, 8]
    assert PredictionFiles(tmp_path / "none").rounds() == []
    nothing = PredictionFiles(tmp_path / "zero", keep_last=0, keep_best=False)
    nothing.write(1, table, 0.5)
    assert nothing.rounds() == []


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = write_table(pd.DataFrame({"a": [1]}), tmp_path / "t.parquet")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("medfed.training.predictions.pq.write_table", full)
    with pytest.raises(OSError, match="No space"):
        write_table(pd.DataFrame({"a": [2]}), path)
    assert pd.read_parquet(path)["a"].tolist() == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


@pytest.mark.parametrize(
    ("sets", "shares", "samples", "text"),
    [
        ({}, {}, {}, "no test set"),
        ({"clean": Arrays(np.zeros(0, int), None)}, {}, {}, "clean: the test set is empty"),
        ({"clients": make(0)}, {}, {}, "cannot be called 'clients'"),
        ({"clean": make(0)}, {"a": ("dirty", [0])}, {}, "a: .*unknown test set 'dirty'"),
        ({"clean": make(0)}, {"a": ("clean", [60])}, {}, "rows outside"),
        ({"clean": make(0)}, {}, {"clean": ["x"]}, "1 sample ids for 60"),
    ],
)
def test_bad_input_is_named(sets, shares, samples, text):
    with pytest.raises(ConfigError, match=text):
        Evaluator(TASK, sets, shares, samples=samples)


def test_wrong_shape_of_logits(pair):
    with pytest.raises(ValueError, match=r"gave \[60, 2\] for the set 'clean', not \[60, 3\]"):
        evaluator(pair).evaluate(lambda d: d.logits[:, :2])


def test_an_empty_share_is_undefined_not_an_error(pair):
    found = Evaluator(TASK, {"clean": pair[0]}, {"a": ("clean", np.array([], int))}).evaluate(predict)
    assert found.evaluation["clients"]["a"]["balanced_accuracy"] is None
    assert found.undefined["clients/a/balanced_accuracy"] == "no samples"
