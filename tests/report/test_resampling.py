"""Metrics of resampled test sets against the metrics of test sets that were really drawn, and intervals of a grid."""

from __future__ import annotations

import csv
import io
import math

import numpy as np
import pytest
from fake_grid import images, labels, make_grid, method, write_predictions

from medfed.report.grid_cells import load_cells
from medfed.report.paper.intervals import ends, intervals, rows, sheets, units_of
from medfed.report.paper.layouts import written
from medfed.report.paper.resampling import auc, draw, metric_of
from medfed.training.metrics import multiclass_metrics, multilabel_metrics

RNG = np.random.default_rng(7)


def drawn_again(units: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Samples of a resample, each as often as its unit was drawn."""
    return np.concatenate([np.tile(np.flatnonzero(units == u), int(w)) for u, w in enumerate(weights)])


@pytest.mark.parametrize("name", ["accuracy", "balanced_accuracy", "f1_macro", "auc_ovo", "auc_ovr"])
def test_a_resample_has_the_metric_of_the_samples_drawn(name):
    labels, p, units = RNG.integers(0, 4, 200), RNG.dirichlet(np.ones(4), 200).round(2), RNG.integers(0, 40, 200)
    units[:40] = np.arange(40)
    weights = draw(40, 5, RNG)
    found = metric_of(name, labels, p, units, weights)
    for value, weight in zip(found, weights):
        again = drawn_again(units, weight)
        wanted = multiclass_metrics(p[again], labels[again], list("abcd"), kind="probabilities").values[name]
        assert value == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["balanced_accuracy", "f1_macro", "auc_macro"])
def test_a_resample_of_several_labels_at_once(name):
    labels, p, units = (RNG.random((150, 3)) < 0.3).astype(int), RNG.random((150, 3)), RNG.integers(0, 40, 150)
    units[:40] = np.arange(40)
    weights = draw(40, 5, RNG)
    found = metric_of(name, labels, p, units, weights)
    for value, weight in zip(found, weights):
        again = drawn_again(units, weight)
        wanted = multilabel_metrics(p[again], labels[again], list("abc"), kind="probabilities").values[name]
        assert value == pytest.approx(wanted)


def test_a_class_that_was_not_drawn():
    labels, p = np.array([0, 1, 2]), np.eye(3)
    weights = np.array([[1.0, 2.0, 0.0]])
    units = np.arange(3)
    assert metric_of("balanced_accuracy", labels, p, units, weights).tolist() == [1.0]  # of the classes that are there
    assert np.isnan(metric_of("auc_ovo", labels, p, units, weights)).all()
    assert metric_of("nll", labels, p, units, weights) is None


def test_weighted_area_by_hand():
    # Positives 0.6 (weight 2) and 0.3 (1), negatives 0.3 (1) and 0.1 (3): (2*4 + 1*(3 + 1/2)) / (3*4)
    found = auc(np.array([0.6, 0.3]), np.array([0.3, 0.1]), np.array([[2.0, 1.0]]), np.array([[1.0, 3.0]]))
    assert found == pytest.approx([(8 + 3.5) / 12])


def test_weights_draw_as_many_units_as_there_are():
    whole, *drawn = draw(30, 200, np.random.default_rng(0))
    weights = np.array(drawn)
    assert whole.tolist() == [1] * 30
    assert weights.shape == (200, 30)
    assert (weights.sum(axis=1) == 30).all()
    assert weights.var(axis=0).mean() == pytest.approx(29 / 30, rel=0.1)  # binomial(30, 1/30)


def test_ends_by_hand():
    assert ends(np.arange(201.0)) == (pytest.approx(5.0), pytest.approx(195.0), 201)
    low, high, count = ends(np.array([math.nan] * 100 + [1.0] * 20))
    assert (low, high, count) == (None, None, 20)


def grid_with_predictions(tmp_path, patients):
    """FedAvg right in 60 of 100 samples, FedISM in 80 of them, the same ones and twenty more."""
    truth = np.arange(100) % 3
    right = {"fedavg": np.arange(100) < 60, "fedism": np.arange(100) < 80}

    def numbers(condition, label, seed, round_):
        share = {"fedavg": 0.6, "fedism": 0.8}[label]
        return {"clean": {"accuracy": share, "f1_macro": share}}

    methods = {m: method(m) for m in right}
    folder = make_grid(tmp_path / "g", methods, {"": labels()}, numbers, seeds=[0], metrics=["accuracy"])
    for label, own in right.items():
        write_predictions(folder / f"{label}-s0", [1, 2], truth, own, patients)
    return load_cells(folder)


def test_intervals_of_images_are_those_of_the_binomial_distribution(tmp_path):
    cells = grid_with_predictions(tmp_path, None)
    found = intervals(cells, 4000)
    assert not found.patients
    one, other = found.found
    assert (one.method, one.point, one.units, one.rounds, one.difference) == (
        "fedavg",
        pytest.approx(0.6),
        100,
        2,
        None,
    )
    half = 1.96 * math.sqrt(0.6 * 0.4 / 100)
    assert (one.low, one.high) == (pytest.approx(0.6 - half, abs=0.015), pytest.approx(0.6 + half, abs=0.015))
    # Twenty samples of a hundred are right with FedISM alone: the difference is a share of its own.
    half = 1.96 * math.sqrt(0.2 * 0.8 / 100)
    assert other.difference == pytest.approx(0.2)
    assert (other.difference_low, other.difference_high) == (
        pytest.approx(0.2 - half, abs=0.015),
        pytest.approx(0.2 + half, abs=0.015),
    )


def test_patients_are_resampled_where_they_are_known(tmp_path):
    """Ten patients of ten images, all right or all wrong: ten units, not a hundred."""
    cells = grid_with_predictions(tmp_path, np.arange(100) // 10)
    found = intervals(cells, 4000)
    assert found.patients
    one = found.found[0]
    half = 1.96 * math.sqrt(0.6 * 0.4 / 10)
    assert one.units == 10
    assert (one.low, one.high) == (pytest.approx(0.6 - half, abs=0.06), pytest.approx(0.6 + half, abs=0.06))
    (sheet,) = sheets(found, cells)
    assert "over 10 patients, 4000 resamples" in sheet.caption
    assert sheet.lines[1].cells[0].text.startswith("80.00 [")
    assert sheet.lines[1].cells[1].text.startswith("+20.00 [")
    (first, _) = csv.DictReader(io.StringIO(written(rows(found.found, found.patients))))
    assert (first["point"], first["difference"], first["unit"]) == ("60.0", "", "%")
    assert float(first["low_95_percentile"]) == pytest.approx(100 * one.low)


def test_numbers_are_patients_whatever_they_are():
    class Found:
        patients = np.array([7, 3, 7, 90])
        labels = np.zeros(4)

    assert units_of(Found).tolist() == [1, 0, 1, 2]


def test_what_cannot_be_resampled_is_named(tmp_path):
    methods = {m: method(m) for m in ("fedavg", "fedprox", "rhfl")}
    folder = make_grid(
        tmp_path / "g",
        methods,
        {"": images()},
        lambda *_: {"clean": {"balanced_accuracy": 0.5, "loss": 1.0}},
        seeds=[0],
        metrics=["balanced_accuracy", "loss"],
    )
    truth = np.arange(30) % 3
    for label in ("fedavg", "rhfl"):
        write_predictions(folder / f"{label}-s0", [2], truth, np.arange(30) < 15, None)
    write_predictions(folder / "rhfl-s0", [2], truth, np.arange(30) < 29, None)  # not the mean that was recorded
    found = intervals(load_cells(folder), 60)
    assert [(i.method, i.key, i.rounds) for i in found.found] == [("fedavg", "clean/balanced_accuracy", 1)]
    assert found.notes == [
        "2 runs: Loss (nats) cannot be resampled",
        "1 run: no predictions are kept (evaluation.keep_predictions)",
        "1 run: its predictions do not give the Balanced accuracy that it recorded",
    ]
