"""Multi-label metrics against scikit-learn and against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn import metrics as sk

from medfed.data.cohort import Task
from medfed.errors import DataError
from medfed.training.metrics import metrics_for, multilabel_metrics

RSNA = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural", "any")


def draw(seed: int, n: int, c: int, *, ties: bool):
    rng = np.random.default_rng(seed)
    labels = (rng.random((n, c)) < 0.35).astype(np.float32)
    labels[0], labels[1] = 0, 1
    logits = rng.normal(size=(n, c)) + 1.5 * labels - 0.7
    return (np.round(logits, 0) if ties else logits), labels


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("n", "c"), [(2, 1), (30, 2), (300, 6)])
@pytest.mark.parametrize("seed", [0, 1])
def test_agrees_with_scikit_learn(seed, n, c, ties):
    logits, labels = draw(seed, n, c, ties=ties)
    p, names = sigmoid(logits), RSNA[:c]
    got = multilabel_metrics(logits, labels, names)
    guess = p >= 0.5
    truth = labels.astype(int)
    for k, name in enumerate(names):
        assert got[f"auc/{name}"] == pytest.approx(sk.roc_auc_score(truth[:, k], p[:, k]))
        ap = sk.average_precision_score(truth[:, k], p[:, k])
        assert got[f"average_precision/{name}"] == pytest.approx(ap)
        balanced = sk.balanced_accuracy_score(truth[:, k], guess[:, k])
        assert got[f"balanced_accuracy/{name}"] == pytest.approx(balanced)
        assert got[f"recall/{name}"] == pytest.approx(sk.recall_score(truth[:, k], guess[:, k]))
        assert got[f"f1/{name}"] == pytest.approx(sk.f1_score(truth[:, k], guess[:, k]))
        assert got[f"support/{name}"] == truth[:, k].sum()
    assert got["auc_macro"] == pytest.approx(sk.roc_auc_score(truth, p, average="macro"))
    assert got["average_precision"] == pytest.approx(
        np.mean([sk.average_precision_score(truth[:, k], p[:, k]) for k in range(c)])
    )
    f1 = [sk.f1_score(truth[:, k], guess[:, k]) for k in range(c)]
    assert got["f1_macro"] == pytest.approx(np.mean(f1))
    losses = [sk.log_loss(truth[:, k], p[:, k], labels=[0, 1]) for k in range(c)]
    assert got["log_loss"] == pytest.approx(np.mean(losses))
    if c == 6:
        assert got["weighted_log_loss"] == pytest.approx((sum(losses) + losses[5]) / 7)
    else:
        assert "weighted_log_loss" not in got.values


def test_weighted_log_loss_by_hand():
    p = np.full((1, 6), 0.5)
    p[0, 5] = 0.25
    labels = np.zeros((1, 6))
    labels[0, 5] = 1
    got = multilabel_metrics(p, labels, RSNA, kind="probabilities")
    assert got["weighted_log_loss"] == pytest.approx((5 * math.log(2) + 2 * math.log(4)) / 7)


def test_label_without_positives_is_undefined_with_its_reason():
    logits, labels = draw(2, 40, 3, ties=False)
    labels[:, 1] = 0
    logits[:, 1] = -1.0
    got = multilabel_metrics(logits, labels, RSNA[:3])
    absent = "label 'intraparenchymal' is absent"
    for name in ("auc_macro", "average_precision", "auc/intraparenchymal", "recall/intraparenchymal"):
        assert got[name] is None
        assert got.undefined[name] == absent
    assert got["balanced_accuracy"] == pytest.approx(
        np.mean([sk.balanced_accuracy_score(labels[:, k], logits[:, k] >= 0) for k in (0, 2)])
    )
    assert got.undefined["f1/intraparenchymal"] == absent + " and never predicted"


def test_label_present_in_every_sample():
    logits, labels = draw(2, 10, 2, ties=False)
    labels[:, 0] = 1
    got = multilabel_metrics(logits, labels, RSNA[:2])
    assert got.undefined["auc/epidural"] == "label 'epidural' is present in every sample"
    assert got["average_precision/epidural"] == 1.0


def test_non_finite_and_empty():
    logits, labels = draw(4, 10, 2, ties=False)
    logits[0] = np.nan
    got = multilabel_metrics(logits, labels, RSNA[:2])
    assert got["log_loss"] is None
    assert got["non_finite"] == 1
    assert multilabel_metrics(np.zeros((0, 2)), np.zeros((0, 2)), RSNA[:2]).undefined["log_loss"] == "no samples"


def test_extreme_logits_keep_their_exact_loss():
    got = multilabel_metrics(np.array([[-800.0], [800.0]]), np.array([[1], [1]]), RSNA[:1])
    assert got["log_loss"] == pytest.approx(400.0)


def test_bad_labels_and_task_dispatch():
    with pytest.raises(DataError, match="Only 0 and 1"):
        multilabel_metrics(np.zeros((2, 2)), np.array([[0, 1], [2, 0]]), RSNA[:2])
    with pytest.raises(ValueError, match="labels have the shape"):
        multilabel_metrics(np.zeros((2, 2)), np.array([0, 1]), RSNA[:2])
    logits, labels = draw(1, 20, 2, ties=False)
    assert "auc_macro" in metrics_for(Task("multilabel", RSNA[:2]), logits, labels).values
