"""Figures of several clients give the metrics of their samples put together."""

from __future__ import annotations

import numpy as np
import pytest

from medfed.data.cohort import Task
from medfed.training.metrics import metrics_for
from medfed.training.pooling import AREAS, NO_HISTOGRAMS, SCORE_BINS, Figures

THREE = Task("multiclass", ("a", "b", "c"))
LABELS = Task("multilabel", ("a", "any"))


def parts_of(task: Task, sizes: tuple[int, ...], seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    parts = []
    for n in sizes:
        logits = rng.normal(0, 3, (n, task.num_classes))
        if task.kind == "multiclass":
            labels = rng.integers(0, task.num_classes, n)
            logits[np.arange(n), labels] += 1.5
        else:
            labels = (rng.random((n, task.num_classes)) < 0.4).astype(float)
            logits += 2 * labels
        parts.append((logits, labels))
    return parts


def pooled(task: Task, parts, histogram: bool) -> Figures:
    figures = [Figures.of(task, logits, labels, histogram) for logits, labels in parts]
    total = figures[0]
    for more in figures[1:]:
        total = total + more
    return total


@pytest.mark.parametrize("task", [THREE, LABELS])
def test_all_but_areas_are_exactly_those_of_the_samples_put_together(task):
    parts = parts_of(task, (7, 40, 1))
    scores, labels = (np.concatenate(x) for x in zip(*parts, strict=True))
    want, got = metrics_for(task, scores, labels), pooled(task, parts, False).metrics()
    areas = [n for n in want.values if n.startswith(("auc", "average_precision"))]
    assert set(AREAS[task.kind]) <= set(areas)
    for name, value in want.values.items():
        if name not in areas:
            assert got[name] == pytest.approx(value, abs=1e-12), name
    assert set(got.values) == {n for n in want.values if "/" not in n or n not in areas}
    for name in AREAS[task.kind]:
        assert got[name] is None
        assert got.undefined[name] == NO_HISTOGRAMS


@pytest.mark.parametrize("task", [THREE, LABELS])
@pytest.mark.parametrize("seed", range(4))
def test_areas_of_histograms_are_those_of_the_scores_within_the_bound(task, seed):
    parts = parts_of(task, (30, 60, 25), seed)
    scores, labels = (np.concatenate(x) for x in zip(*parts, strict=True))
    total = pooled(task, parts, True)
    want, got, bound = metrics_for(task, scores, labels), total.metrics(), total.bound()
    assert 0 < bound < 0.02
    assert set(got.values) == set(want.values)
    for name, value in want.values.items():
        if name.startswith("auc"):
            assert abs(got[name] - value) <= bound + 1e-12, name
        elif name.startswith("average_precision"):
            assert got[name] == pytest.approx(value, abs=0.05), name


def test_scores_of_one_interval_count_as_tied():
    """Two samples each, all of probability one half: every pair is a tie, so the area is one half, give or take it."""
    task = Task("multiclass", ("a", "b"))
    figures = Figures.of(task, np.zeros((4, 2)), np.array([0, 0, 1, 1]), True)
    total = figures + Figures.of(task, np.zeros((0, 2)), np.zeros(0, int), True)
    assert (total.metrics()["auc_ovo"], total.bound()) == (0.5, 0.5)
    assert total.histogram.shape == (2, 2, SCORE_BINS)
    assert total.histogram.sum() == 2 * 4


@pytest.mark.parametrize("task", [THREE, LABELS])
def test_the_figures_of_one_client_are_its_metrics(task):
    ((logits, labels),) = parts_of(task, (50,))
    want = metrics_for(task, logits, labels, per_class=False)
    got = Figures.of(task, logits, labels).metrics(per_class=False)
    assert got.values == pytest.approx(want.values)


def test_a_class_that_is_absent_is_the_reason_for_an_undefined_area():
    figures = Figures.of(THREE, np.eye(3)[[0, 1]], np.array([0, 1]), True)
    want = metrics_for(THREE, np.eye(3)[[0, 1]], np.array([0, 1]), per_class=False)
    for found in (figures.metrics(per_class=False), (figures + figures).metrics(per_class=False)):
        assert found.undefined == want.undefined == dict.fromkeys(AREAS["multiclass"], "class 'c' is absent")


def test_a_class_absent_at_one_client_is_there_in_the_pool():
    one = Figures.of(THREE, np.eye(3)[[0, 1]], np.array([0, 1]), True)
    other = Figures.of(THREE, np.eye(3)[[2]], np.array([2]), True)
    assert (one + other).metrics()["auc_ovo"] == 1.0
    assert (one + other).metrics()["balanced_accuracy"] == 1.0


@pytest.mark.parametrize("task", [THREE, LABELS])
def test_scores_that_are_not_finite_withdraw_every_value_of_the_pool(task):
    parts = parts_of(task, (5, 5))
    parts[0][0][2, 0] = np.nan
    got = pooled(task, parts, True).metrics()
    assert (got["samples"], got["non_finite"]) == (10, 1)
    assert got["balanced_accuracy"] is None
    assert got.undefined["balanced_accuracy"] == "1 of 10 samples have scores that are not finite"


def test_one_histogram_that_is_missing_leaves_the_pool_without_areas():
    (a, b) = parts_of(THREE, (20, 20))
    total = Figures.of(THREE, *a, True) + Figures.of(THREE, *b, False)
    assert total.metrics().undefined["auc_ovr"] == NO_HISTOGRAMS
    assert total.bound() is None
