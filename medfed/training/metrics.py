"""Metrics of classification as pure functions on arrays.

A metric that is not defined is ``None`` with a reason, never NaN and never a silent 0.  What is pooled over clients
is the sufficient statistic (:class:`ConfusionCounts`, :func:`pool_scores`), never a metric.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from medfed.data.cohort import Task
from medfed.errors import DataError
from medfed.training.counts import ConfusionCounts, LabelCounts, Metrics
from medfed.training.ranking import average_precision, binary_auc, class_wins, one_vs_one, one_vs_rest

Kind = Literal["logits", "probabilities"]
CALIBRATION_BINS = 15
SMALLEST_PROBABILITY = 1e-15


def metrics_for(
    task: Task, scores: np.ndarray, labels: np.ndarray, *, kind: Kind = "logits", per_class: bool = True
) -> Metrics:
    """The metrics of the kind of labels of a task; see the two functions below."""
    metrics = multiclass_metrics if task.kind == "multiclass" else multilabel_metrics
    return metrics(scores, labels, task.classes, kind=kind, per_class=per_class)


def multiclass_metrics(
    scores: np.ndarray,
    labels: np.ndarray,
    classes: Sequence[str],
    *,
    kind: Kind = "logits",
    per_class: bool = True,
) -> Metrics:
    """Metrics where every sample has one class.

    ``auc_ovo`` (Hand and Till 2001) and ``auc_ovr`` are macro averages over all classes, hence undefined as soon as one
    class is absent; ``calibration_error`` is the expected calibration error of the top probability over 15 bins of
    equal width (Guo et al. 2017, equation 3); ``nll`` is the mean negative log likelihood in nats.

    Args:
        scores: ``[N, C]``.
        labels: class indices ``[N]``.
        classes: the class names ``[C]``.
        kind: whether ``scores`` are logits (softmax is applied) or probabilities.
        per_class: whether to add the values of each class.

    Returns:
        The metrics; all undefined where there is no sample, or where a score is not finite (``non_finite`` counts
        the samples with such scores).

    Raises:
        ValueError: shapes do not fit.
        DataError: a label outside the classes.
    """
    scores, labels = _checked(scores, labels, classes, ndim=1)
    safe, reason = _safe(scores)
    if not len(labels):
        labels = np.zeros(1, np.int64)
    log_p = log_softmax(safe) if kind == "logits" else np.log(np.maximum(safe, SMALLEST_PROBABILITY))
    p = np.exp(log_p) if kind == "logits" else safe
    predictions = safe.argmax(axis=1)

    counts = ConfusionCounts.of(labels, predictions, len(classes))
    out = counts.metrics(classes, per_class=per_class)
    wins, support = class_wins(p, labels), counts.support
    missing = counts.absent(classes) or "there is only one class"
    auc = one_vs_rest(wins, support)
    out.put("auc_ovo", one_vs_one(wins, support), missing)
    out.put("auc_ovr", auc.mean(), missing)
    out.put("calibration_error", calibration_error(p.max(axis=1), predictions == labels))
    out.put("nll", -log_p[np.arange(len(labels)), labels].mean())
    for c, name in enumerate(classes if per_class else ()):
        side = "is absent" if support[c] == 0 else "is the only one present"
        out.put(f"auc/{name}", auc[c], f"class {name!r} {side}")
    return _finish(out, scores, reason)


def multilabel_metrics(
    scores: np.ndarray,
    labels: np.ndarray,
    classes: Sequence[str],
    *,
    kind: Kind = "logits",
    per_class: bool = True,
) -> Metrics:
    """Metrics where every sample has several labels at once.

    ``auc_macro`` and ``average_precision`` are undefined as soon as one label has no positive (or no negative);
    ``balanced_accuracy`` (at probability 0.5) and ``f1_macro`` average the labels for which they are defined;
    ``log_loss`` is the mean over samples and labels in nats.  With a label named ``any``, ``weighted_log_loss`` is
    the score of the RSNA 2019 challenge: ``any`` weighs 2, each other label 1.

    Args:
        scores: ``[N, C]``.
        labels: zeros and ones ``[N, C]``.
        classes: the label names ``[C]``.
        kind: whether ``scores`` are logits (sigmoid is applied) or probabilities.
        per_class: whether to add the values of each label.

    Returns:
        The metrics, undefined as in :func:`multiclass_metrics`.

    Raises:
        ValueError: shapes do not fit.
        DataError: a label that is neither 0 nor 1.
    """
    scores, labels = _checked(scores, labels, classes, ndim=2)
    safe, reason = _safe(scores)
    truth = labels > 0.5 if len(labels) else np.zeros((1, len(classes)), bool)
    p = sigmoid(safe) if kind == "logits" else safe
    predicted = p >= 0.5
    loss = binary_losses(safe, truth, kind).mean(axis=0)

    counts = LabelCounts.of(truth, predicted)
    out = counts.metrics(classes, per_class=per_class)
    auc = np.array([binary_auc(p[:, c], truth[:, c]) for c in range(len(classes))])
    precisions = np.array([average_precision(p[:, c], truth[:, c]) for c in range(len(classes))])

    lacking = counts.lacking(classes)
    first = next(filter(None, lacking), "there is no label")
    out.put("auc_macro", auc.mean(), first)
    out.put("average_precision", precisions.mean(), first)
    out.put("log_loss", loss.mean())
    if "any" in classes:
        weights = np.where(np.array(classes) == "any", 2.0, 1.0)
        out.put("weighted_log_loss", np.average(loss, weights=weights))
    for c, name in enumerate(classes if per_class else ()):
        out.put(f"auc/{name}", auc[c], lacking[c])
        out.put(f"average_precision/{name}", precisions[c], f"label {name!r} is absent")
    return _finish(out, scores, reason)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Logarithm of the softmax over the last axis, without overflow."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Logistic function, without overflow."""
    return np.exp(-np.logaddexp(0.0, -logits))


def binary_losses(scores: np.ndarray, truth: np.ndarray, kind: Kind = "logits") -> np.ndarray:
    """Negative log likelihood of each label ``[N, C]`` in nats; probabilities are clipped to 1e-15 from 0 and 1."""
    if kind == "logits":
        return np.logaddexp(0.0, np.where(truth, -scores, scores))
    p = np.clip(np.where(truth, scores, 1.0 - scores), SMALLEST_PROBABILITY, 1.0)
    return -np.log(p)


def calibration_error(confidence: np.ndarray, correct: np.ndarray, bins: int = CALIBRATION_BINS) -> float:
    """Expected calibration error: the gap of accuracy and confidence, averaged over samples by bin.

    Args:
        confidence: top probabilities ``[N]`` in 0..1, N > 0.
        correct: whether the prediction was right ``[N]``.
        bins: bins of equal width, closed at their upper end.

    Returns:
        ``sum_b |B_b| / N * |accuracy(B_b) - confidence(B_b)|``; Guo et al. (2017), equation 3.
    """
    bin_of = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    gap = np.bincount(bin_of, weights=correct - confidence, minlength=bins)
    return float(np.abs(gap).sum() / len(confidence))


def pool_scores(parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Puts the scores ``[N_k, C]`` and labels of several clients end to end, for metrics of the pool."""
    scores, labels = zip(*parts, strict=True)
    return np.concatenate(scores), np.concatenate(labels)


def last_rounds(values: Sequence[float | None], k: int = 5) -> float | None:
    """Mean of the last ``k`` values (all, where there are fewer); None if one of them is not defined."""
    tail = list(values[-k:]) if k > 0 else []
    if not tail or any(v is None for v in tail):
        return None
    return float(np.mean([v for v in tail if v is not None]))


def collapse_warning(
    predictions: np.ndarray,
    num_classes: int,
    labels: np.ndarray | None = None,
    *,
    dominance: float = 0.95,
) -> str | None:
    """Says when a model has collapsed to few classes.

    Args:
        predictions: predicted class indices ``[N]``.
        num_classes: number of classes of the task.
        labels: true class indices ``[N]``, where known: only the classes that are present count.
        dominance: share of predictions above which one class is said to take everything (unless it truly does).

    Returns:
        The warning, or None: fewer than half of the classes are predicted, or one class takes nearly all samples.
    """
    if not len(predictions):
        return None
    taken = np.bincount(predictions, minlength=num_classes)
    true = np.full(num_classes, 1.0) if labels is None else np.bincount(labels, minlength=num_classes)
    present = int((true > 0).sum())
    if present < 2:
        return None
    predicted = int((taken > 0).sum())
    top = int(taken.argmax())
    share = taken[top] / taken.sum()
    if predicted * 2 < present or predicted == 1:
        return f"the global model predicts {predicted} of {present} classes"
    if share > dominance >= true[top] / true.sum():
        return f"the global model gives {share:.0%} of the samples to 1 of {present} classes"
    return None


def _checked(
    scores: np.ndarray, labels: np.ndarray, classes: Sequence[str], *, ndim: int
) -> tuple[np.ndarray, np.ndarray]:
    scores, labels = np.asarray(scores, np.float64), np.asarray(labels)
    if scores.ndim != 2 or scores.shape[1] != len(classes):
        raise ValueError(f"scores have the shape {list(scores.shape)}, not [N, {len(classes)}]")
    wanted = scores.shape[:ndim]
    if labels.shape != wanted:
        raise ValueError(f"labels have the shape {list(labels.shape)}, not {list(wanted)}")
    allowed = np.isin(labels, np.arange(len(classes) if ndim == 1 else 2))
    if not allowed.all():
        raise DataError(
            f"{int((~allowed).sum())} labels are outside the allowed values.",
            where="labels",
            fix=f"Class indices 0 to {len(classes) - 1} are allowed." if ndim == 1 else "Only 0 and 1 are allowed.",
        )
    return scores, labels.astype(np.int64)


def _safe(scores: np.ndarray) -> tuple[np.ndarray, str | None]:
    """Scores with which every name of a metric can be computed, and why the values do not hold, if so."""
    if not len(scores):
        return np.zeros((1, scores.shape[1])), "no samples"
    bad = int((~np.isfinite(scores)).any(axis=1).sum())
    if bad:
        return np.nan_to_num(scores, nan=0.0, posinf=0.0, neginf=0.0), (
            f"{bad} of {len(scores)} samples have scores that are not finite"
        )
    return scores, None


def _finish(out: Metrics, scores: np.ndarray, reason: str | None) -> Metrics:
    """Adds the counts; withdraws every value where the scores cannot be used."""
    if reason is not None:
        for name in out.values:
            if len(scores) and name.startswith("support/"):
                continue
            out.put(name, math.nan, reason)
    out.put("samples", len(scores))
    bad = int((~np.isfinite(scores)).any(axis=1).sum())
    if bad:
        out.put("non_finite", bad)
    return out
