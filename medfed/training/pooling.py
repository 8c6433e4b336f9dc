"""What one client may tell of a model on images that it keeps to itself, and what several clients' figures add up to.

Everything but areas under curves follows exactly from counts and sums. Areas need the scores of all samples in one
order; a client that agrees sends a histogram of them, from which the pooled areas follow but for ties within an
interval. Otherwise it tells its own areas, and the pool has none: a mean of areas is no area of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from medfed.data.cohort import Task
from medfed.training.counts import ConfusionCounts, LabelCounts, Metrics
from medfed.training.metrics import CALIBRATION_BINS, binary_losses, log_softmax, metrics_for, sigmoid
from medfed.training.ranking import (
    grouped_auc,
    grouped_average_precision,
    grouped_wins,
    one_vs_one,
    one_vs_rest,
    ratio,
)

SCORE_BINS, FARTHEST = 200, 10.0
"""Intervals of a histogram: of equal width in the log odds of a probability, from ``-FARTHEST`` to ``FARTHEST``."""
AREAS = {"multiclass": ("auc_ovo", "auc_ovr"), "multilabel": ("auc_macro", "average_precision")}
NO_HISTOGRAMS = "not every site sends a histogram of its scores"


@dataclass(frozen=True)
class Figures:
    """Counts and sums over some samples; figures of several clients add up.

    Args:
        task: classes and kind of labels.
        counts: int64 ``[C, C]`` (true by predicted class), or with several labels a sample ``[C, 2, 2]``.
        losses: sum of the negative log likelihood in nats, ``[1]``, or by label ``[C]``.
        calibration: float64 ``[15, 3]`` by interval of the top probability: samples, right ones, sum of the
            probabilities. Zeros with several labels a sample.
        non_finite: samples whose scores are not finite; they are in nothing else.
        histogram: int64 ``[C, K, SCORE_BINS]``: samples by class whose score it is, true class (or without and with
            the label) and interval of the score; None where it was not asked for.
        areas: areas under curves of these samples alone, by name; None where one is not defined. Empty in a sum.
    """

    task: Task
    counts: np.ndarray
    losses: np.ndarray
    calibration: np.ndarray
    non_finite: int = 0
    histogram: np.ndarray | None = None
    areas: Mapping[str, float | None] | None = None

    @classmethod
    def of(cls, task: Task, logits: np.ndarray, labels: np.ndarray, histogram: bool = False) -> Figures:
        """Figures of one client.

        Args:
            task: classes and kind of labels.
            logits: ``[N, C]``.
            labels: class indices ``[N]``, or zeros and ones ``[N, C]``.
            histogram: whether to make one.
        """
        logits, labels = np.asarray(logits, np.float64), np.asarray(labels)
        finite = np.isfinite(logits).all(axis=1)
        found = metrics_for(task, logits, labels, per_class=False)
        areas = {name: found[name] for name in AREAS[task.kind]}
        logits, labels = logits[finite], labels[finite].astype(np.int64)
        bins = np.zeros((CALIBRATION_BINS, 3))
        if task.kind == "multiclass":
            log_p = log_softmax(logits)
            said, p = logits.argmax(axis=1), np.exp(log_p)
            counts = ConfusionCounts.of(labels, said, task.num_classes).matrix
            losses = np.asarray([-log_p[np.arange(len(labels)), labels].sum()])
            top = p.max(axis=1)
            bin_of = np.clip(np.ceil(top * CALIBRATION_BINS).astype(np.int64) - 1, 0, CALIBRATION_BINS - 1)
            np.add.at(bins, bin_of, np.stack([np.ones(len(top)), said == labels, top], axis=1))
            odds = log_p - np.log(np.maximum(-np.expm1(log_p), np.finfo(np.float64).tiny))
            kinds = np.broadcast_to(labels[:, None], logits.shape)
        else:
            counts = LabelCounts.of(labels > 0, sigmoid(logits) >= 0.5).matrix
            losses = binary_losses(logits, labels > 0).sum(axis=0)
            odds, kinds = logits, labels
        made = score_histogram(odds, kinds, task.num_classes if task.kind == "multiclass" else 2) if histogram else None
        return cls(task, counts, losses, bins, int((~finite).sum()), made, areas)

    def __add__(self, other: Figures) -> Figures:
        both = self.histogram is not None and other.histogram is not None
        return Figures(
            self.task,
            self.counts + other.counts,
            self.losses + other.losses,
            self.calibration + other.calibration,
            self.non_finite + other.non_finite,
            self.histogram + other.histogram if both else None,  # type: ignore[operator]
        )

    @property
    def samples(self) -> int:
        """How many samples these are."""
        return int(self.counts.sum() if self.task.kind == "multiclass" else self.counts[0].sum()) + self.non_finite

    def metrics(self, *, per_class: bool = True) -> Metrics:
        """The metrics that :func:`~medfed.training.metrics.metrics_for` gives for the samples themselves.

        Areas are the client's own where these are the figures of one, those of the histogram where there is one, and
        not defined otherwise.
        """
        classes, multiclass = self.task.classes, self.task.kind == "multiclass"
        counts: Any = (ConfusionCounts if multiclass else LabelCounts)(self.counts)
        out: Metrics = counts.metrics(classes, per_class=per_class)
        lacking = counts.absent(classes) if multiclass else next(filter(None, counts.lacking(classes)), None)
        areas = self.areas if self.areas is not None else self._areas(out, per_class)
        for name in AREAS[self.task.kind]:
            value = areas.get(name)
            out.put(name, np.nan if value is None else value, lacking or NO_HISTOGRAMS)
        samples = self.samples - self.non_finite
        if multiclass:
            number, right, confidence = self.calibration.T
            error = ratio(np.abs(right - confidence).sum(), number.sum())
            out.put("calibration_error", float(error), "no samples")
            out.put("nll", float(ratio(self.losses[0], samples)), "no samples")
        else:
            out.put("log_loss", float(ratio(self.losses.mean(), samples)), "no samples")
            if "any" in classes:
                weights = np.where(np.array(classes) == "any", 2.0, 1.0)
                weighted = ratio(np.average(self.losses, weights=weights), samples)
                out.put("weighted_log_loss", float(weighted), "no samples")
        if self.non_finite or not samples:
            reason = f"{self.non_finite} of {self.samples} samples have scores that are not finite"
            for name in out.values:
                out.put(name, np.nan, reason if self.non_finite else "no samples")
        out.put("samples", self.samples)
        if self.non_finite:
            out.put("non_finite", self.non_finite)
        return out

    def bound(self) -> float | None:
        """How far at most an area of the histogram is from that of the scores; None without a histogram.

        Two samples of one interval count as tied, one half, while they may stand either way.
        """
        if self.histogram is None:
            return None
        pairs = self._pairs()
        worst = [ratio((own * other).sum() / 2, own.sum() * other.sum()) for own, other in pairs]
        return float(np.nanmax(worst)) if len(worst) and not np.isnan(worst).all() else None

    def _pairs(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Intervals of samples that should score high, and of those that should score low."""
        assert self.histogram is not None
        if self.task.kind == "multilabel":
            return [(h[1], h[0]) for h in self.histogram]
        return [(h[c], h[o]) for c, h in enumerate(self.histogram) for o in range(len(h)) if o != c]

    def _areas(self, out: Metrics, per_class: bool) -> dict[str, float]:
        if self.histogram is None:
            return {}
        groups = [h.T.astype(np.float64) for h in self.histogram]
        if self.task.kind == "multilabel":
            each = np.asarray([grouped_auc(g) for g in groups])
            precision = np.asarray([grouped_average_precision(g) for g in groups])
            for c, name in enumerate(self.task.classes if per_class else ()):
                out.put(f"auc/{name}", each[c], LabelCounts(self.counts).lacking(self.task.classes)[c])
                out.put(f"average_precision/{name}", precision[c], f"label {name!r} is absent")
            return {"auc_macro": float(each.mean()), "average_precision": float(precision.mean())}
        wins, support = np.stack([grouped_wins(g, c) for c, g in enumerate(groups)]), self.counts.sum(axis=1)
        each = one_vs_rest(wins, support)
        for c, name in enumerate(self.task.classes if per_class else ()):
            side = "is absent" if support[c] == 0 else "is the only one present"
            out.put(f"auc/{name}", each[c], f"class {name!r} {side}")
        return {"auc_ovo": one_vs_one(wins, support), "auc_ovr": float(each.mean())}


def score_histogram(odds: np.ndarray, kinds: np.ndarray, num_kinds: int) -> np.ndarray:
    """Counts ``[C, K, SCORE_BINS]`` of log odds ``[N, C]`` by kind ``[N, C]`` of the sample and interval.

    What lies farther out than the outermost intervals counts in these.
    """
    place = np.floor((odds + FARTHEST) / (2 * FARTHEST) * SCORE_BINS).clip(0, SCORE_BINS - 1).astype(np.int64)
    out = np.zeros((odds.shape[1], num_kinds, SCORE_BINS), np.int64)
    np.add.at(out, (np.arange(odds.shape[1])[None, :], kinds, place), 1)
    return out
