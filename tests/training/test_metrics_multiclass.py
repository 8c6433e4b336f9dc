"""Multi-class metrics against scikit-learn and against values worked out by hand."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from sklearn import metrics as sk

from medfed.data.cohort import Task
from medfed.errors import DataError
from medfed.training.metrics import (
    ConfusionCounts,
    calibration_error,
    collapse_warning,
    last_rounds,
    log_softmax,
    metrics_for,
    multiclass_metrics,
    pool_scores,
)

NAMES = tuple("ABCDEFGH")


def draw(seed: int, n: int, c: int, *, ties: bool, present: int | None = None):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, present or c, n)
    labels[: present or c] = np.arange(present or c)
    logits = rng.normal(size=(n, c)) + 1.2 * np.eye(c)[labels]
    return (np.round(logits) if ties else logits), labels


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("n", "c"), [(2, 2), (40, 2), (30, 3), (200, 5), (500, 8)])
@pytest.mark.parametrize("seed", [0, 1])
def test_agrees_with_scikit_learn(seed, n, c, ties):
    logits, labels = draw(seed, n, c, ties=ties)
    p, names = softmax(logits), NAMES[:c]
    if ties:  # handed over as they are: a softmax of another summation order may break a tie in the last bit
        got = multiclass_metrics(p, labels, names, kind="probabilities")
        assert len(np.unique(p[:, 0])) < n or n < 30
    else:
        got = multiclass_metrics(logits, labels, names)
    guess = p.argmax(1)
    assert got["accuracy"] == pytest.approx(sk.accuracy_score(labels, guess))
    assert got["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(labels, guess))
    assert got["f1_macro"] == pytest.approx(sk.f1_score(labels, guess, average="macro"))
    assert got["nll"] == pytest.approx(sk.log_loss(labels, p, labels=range(c)))
    if c > 2:
        for way in ("ovo", "ovr"):
            want = sk.roc_auc_score(labels, p, multi_class=way, average="macro")
            assert got[f"auc_{way}"] == pytest.approx(want)
    else:
        assert got["auc_ovo"] == pytest.approx(sk.roc_auc_score(labels, p[:, 1]))
        assert got["auc_ovr"] == pytest.approx(sk.roc_auc_score(labels, p[:, 1]))
    precision, recall, f1, support = sk.precision_recall_fscore_support(
        labels, guess, labels=range(c), zero_division=np.nan
    )
    for k, name in enumerate(names):
        assert got[f"recall/{name}"] == pytest.approx(recall[k])
        assert got[f"f1/{name}"] == pytest.approx(f1[k])
        assert got[f"support/{name}"] == support[k]
        assert got[f"auc/{name}"] == pytest.approx(sk.roc_auc_score(labels == k, p[:, k]))
        if np.any(guess == k):
            assert got[f"precision/{name}"] == pytest.approx(precision[k])
        else:
            assert got[f"precision/{name}"] is None
    assert set(got.undefined) == {k for k, v in got.values.items() if v is None}


@pytest.mark.parametrize("ties", [False, True])
def test_absent_class_is_left_out_of_recall_and_leaves_areas_undefined(ties):
    logits, labels = draw(3, 60, 5, ties=ties, present=4)
    logits[:, 4] = -20  # never predicted either
    got = multiclass_metrics(logits, labels, NAMES[:5])
    assert got["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(labels, logits.argmax(1)))
    assert got["f1_macro"] == pytest.approx(sk.f1_score(labels, logits.argmax(1), average="macro"))
    for name in ("auc_ovo", "auc_ovr", "recall/E", "auc/E"):
        assert got[name] is None
        assert got.undefined[name] == "class 'E' is absent"
    assert got.undefined["f1/E"] == "class 'E' is absent and never predicted"
    assert got["support/E"] == 0
    assert got["auc/A"] is not None


def test_class_predicted_but_absent_scores_zero_in_macro_f1():
    logits = np.array([[2.0, 0, 0], [0, 2, 0], [0, 0, 2]])
    labels = np.array([0, 1, 1])
    got = multiclass_metrics(logits, labels, NAMES[:3])
    assert got["f1/C"] == 0.0
    assert got["f1_macro"] == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert got["balanced_accuracy"] == pytest.approx((1 + 0.5) / 2)


def test_two_absent_classes_are_both_named():
    got = multiclass_metrics(np.zeros((2, 4)), np.array([0, 1]), NAMES[:4])
    assert got.undefined["auc_ovo"] == "classes 'C', 'D' are absent"


def test_one_class_only():
    got = multiclass_metrics(np.array([[1.0, 0], [0, 1]]), np.array([0, 0]), NAMES[:2])
    assert got["balanced_accuracy"] == 0.5
    assert got["auc_ovo"] is None
    assert got.undefined["auc/A"] == "class 'A' is the only one present"
    alone = multiclass_metrics(np.array([[1.0], [2.0]]), np.array([0, 0]), ["A"])
    assert alone["accuracy"] == 1.0
    assert alone.undefined["auc_ovo"] == "there is only one class"


def test_all_scores_tied_gives_one_half():
    got = multiclass_metrics(np.zeros((6, 3)), np.array([0, 1, 2, 0, 1, 2]), NAMES[:3])
    assert got["auc_ovo"] == got["auc_ovr"] == 0.5
    assert got["nll"] == pytest.approx(math.log(3))


def test_probabilities_give_the_same_as_their_logits():
    logits, labels = draw(5, 80, 4, ties=False)
    a = multiclass_metrics(logits, labels, NAMES[:4])
    b = multiclass_metrics(softmax(logits), labels, NAMES[:4], kind="probabilities")
    assert a.values == pytest.approx(b.values)
    sure = multiclass_metrics(np.array([[0.0, 1.0]]), np.array([0]), NAMES[:2], kind="probabilities")
    assert sure["nll"] == pytest.approx(-math.log(1e-15))


def test_huge_logits_do_not_overflow():
    assert log_softmax(np.array([[1e4, 0.0]])) == pytest.approx(np.array([[0.0, -1e4]]))
    got = multiclass_metrics(np.array([[1e4, 0.0], [0, 1e4]]), np.array([0, 0]), NAMES[:2])
    assert got["nll"] == pytest.approx(5e3)


def test_non_finite_logits_withdraw_every_metric_and_are_counted():
    logits, labels = draw(6, 20, 3, ties=False)
    logits[3, 1], logits[7, 0] = np.nan, np.inf
    got = multiclass_metrics(logits, labels, NAMES[:3])
    assert got["non_finite"] == 2
    assert got["samples"] == 20
    assert got["support/A"] == (labels == 0).sum()
    rest = {k: v for k, v in got.values.items() if k.split("/")[0] not in ("support", "samples", "non_finite")}
    assert set(rest.values()) == {None}
    assert got.undefined["nll"] == "2 of 20 samples have scores that are not finite"


def test_no_samples():
    got = multiclass_metrics(np.zeros((0, 3)), np.zeros(0, int), NAMES[:3])
    assert got["samples"] == 0
    assert got["accuracy"] is None
    assert set(got.undefined.values()) == {"no samples"}


def test_calibration_error_by_hand():
    # bins of width 1/15: 0.95 in (14/15, 1], 0.61 and 0.65 in (9/15, 10/15], 0.6 at the upper end of (8/15, 9/15]
    confidence = np.array([0.95, 0.61, 0.65, 0.6])
    correct = np.array([True, True, False, False])
    want = (abs(1 - 0.95) + abs(1 - 1.26) + abs(0 - 0.6)) / 4
    assert calibration_error(confidence, correct) == pytest.approx(want)
    assert calibration_error(np.array([1.0, 0.0]), np.array([True, False])) == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_calibration_error_against_a_loop_over_bins(seed):
    rng = np.random.default_rng(seed)
    confidence, correct = rng.uniform(0.2, 1, 300), rng.random(300) < 0.6
    want = 0.0
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if inside.any():
            want += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    assert calibration_error(confidence, correct) == pytest.approx(want)


def test_pooled_counts_and_scores_equal_the_metrics_of_the_concatenation_not_their_mean():
    parts = [draw(s, n, 3, ties=False) for s, n in ((0, 10), (1, 60), (2, 25))]
    all_logits, all_labels = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    counts = [ConfusionCounts.of(y, x.argmax(1), 3) for x, y in parts]
    pooled = counts[0] + counts[1] + counts[2]
    assert np.array_equal(pooled.matrix, sk.confusion_matrix(all_labels, all_logits.argmax(1)))
    got = pooled.metrics(NAMES[:3])
    assert got["f1_macro"] == pytest.approx(sk.f1_score(all_labels, all_logits.argmax(1), average="macro"))
    assert got["f1_macro"] != pytest.approx(np.mean([c.metrics(NAMES[:3])["f1_macro"] for c in counts]), abs=1e-3)
    area = multiclass_metrics(*pool_scores(parts), NAMES[:3])["auc_ovo"]
    want = sk.roc_auc_score(all_labels, softmax(all_logits), multi_class="ovo")
    assert area == pytest.approx(want)
    assert area != pytest.approx(np.mean([multiclass_metrics(x, y, NAMES[:3])["auc_ovo"] for x, y in parts]), abs=1e-3)


def test_counts_of_different_classes_do_not_add_up():
    with pytest.raises(ValueError, match="2 and of 3"):
        ConfusionCounts(np.zeros((2, 2), int)) + ConfusionCounts(np.zeros((3, 3), int))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"\[2, 2\], not \[N, 3\]"):
        multiclass_metrics(np.zeros((2, 2)), np.zeros(2, int), NAMES[:3])
    with pytest.raises(ValueError, match=r"labels have the shape \[3\], not \[2\]"):
        multiclass_metrics(np.zeros((2, 3)), np.zeros(3, int), NAMES[:3])
    with pytest.raises(DataError, match="1 labels are outside"):
        multiclass_metrics(np.zeros((2, 3)), np.array([0, 3]), NAMES[:3])
    with pytest.raises(DataError, match="0 to 2"):
        multiclass_metrics(np.zeros((2, 3)), np.array([0, -1]), NAMES[:3])


def test_summary_and_task_dispatch():
    task = Task("multiclass", NAMES[:3])
    logits, labels = draw(1, 30, 3, ties=False)
    full = metrics_for(task, logits, labels)
    short = metrics_for(task, logits, labels, per_class=False)
    assert full.summary() == short.values
    assert "recall/A" in full.values
    assert "recall/A" not in short.values


def test_speed_on_5000_samples_of_8_classes():
    logits, labels = draw(0, 5000, 8, ties=False)
    times = []
    for _ in range(5):
        start = time.process_time()
        multiclass_metrics(logits, labels, NAMES)
        times.append(time.process_time() - start)
    assert min(times) < 0.2  # seconds of processor time; comparing all pairs would take many times as long


def test_last_rounds():
    assert last_rounds([9, 1, 2, 3, 4, 5]) == 3
    assert last_rounds([1, 2], k=5) == 1.5
    assert last_rounds([1, None, 3], k=2) is None
    assert last_rounds([None, 1, 3], k=2) == 2
    assert last_rounds([]) is None


def test_collapse_warning():
    assert collapse_warning(np.zeros(50, int), 7) == "the global model predicts 1 of 7 classes"
    assert collapse_warning(np.array([0, 1, 2] * 9), 7) == "the global model predicts 3 of 7 classes"
    assert collapse_warning(np.arange(7), 7) is None
    mostly = np.array([0] * 98 + [1, 2])
    assert collapse_warning(mostly, 3) == "the global model gives 98% of the samples to 1 of 3 classes"
    assert collapse_warning(mostly, 3, labels=mostly) is None  # it is so in truth
    assert collapse_warning(mostly, 7, labels=np.array([0, 1, 2] * 33 + [0])) is not None
    assert collapse_warning(np.zeros(9, int), 7, labels=np.zeros(9, int)) is None  # only one class to predict
    assert collapse_warning(np.zeros(10, int), 2, labels=np.array([0, 1] * 5)) is not None
    assert collapse_warning(np.zeros(0, int), 7) is None
