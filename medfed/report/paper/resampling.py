"""Metrics of resampled test sets, all resamples at once: a resample is a weight for each unit.

A *unit* is what is drawn with replacement: a patient with all its images, or a single image where patients are not
known.  A resample draws as many units as there are; a unit drawn twice counts twice.  With all weights 1 every function
gives the metric of the test set itself, as :mod:`medfed.training.metrics` defines it.
"""

from __future__ import annotations

import itertools

import numpy as np

BLOCK = 128
"""Resamples at a time for which a weight of each sample is held in memory."""


def draw(units: int, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """How often each unit is drawn, uint16 ``[1 + B, U]``; the first row is the test set itself, each unit once."""
    parts = [np.ones((1, units), np.uint16)]
    for start in range(0, resamples, BLOCK):
        size = min(BLOCK, resamples - start)
        parts.append(generator.multinomial(units, np.full(units, 1 / units), size=size).astype(np.uint16))
    return np.concatenate(parts)


def metric_of(
    name: str, labels: np.ndarray, probabilities: np.ndarray, units: np.ndarray, weights: np.ndarray
) -> np.ndarray | None:
    """A metric of every resample.

    Args:
        name: ``accuracy``, ``balanced_accuracy``, ``f1_macro``, ``auc_ovo``, ``auc_ovr`` or ``auc_macro``.
        labels: class indices ``[N]``, or zeros and ones ``[N, C]``.
        probabilities: ``[N, C]``.
        units: unit ``[N]`` of each sample.
        weights: ``[B, U]``; see :func:`draw`.

    Returns:
        ``[B]``, NaN where the resample lacks what the metric needs; None for another metric.
    """
    several = labels.ndim == 2
    if name in ("accuracy", "balanced_accuracy", "f1_macro") and not several:
        said, size = probabilities.argmax(axis=1), probabilities.shape[1]

        def of(block: np.ndarray) -> np.ndarray:
            return _of_confusion(name, confusions(labels, said, units, block, size))
    elif name in ("balanced_accuracy", "f1_macro") and several:

        def of(block: np.ndarray) -> np.ndarray:
            return _of_labels(name, labels > 0.5, probabilities >= 0.5, units, block)
    elif name in (("auc_macro",) if several else ("auc_ovo", "auc_ovr")):

        def of(block: np.ndarray) -> np.ndarray:
            return _auc(name, labels, probabilities, block[:, units])
    else:
        return None
    starts = range(0, len(weights), BLOCK)
    return np.concatenate([of(weights[i : i + BLOCK].astype(np.float64)) for i in starts])


def confusions(
    labels: np.ndarray, predicted: np.ndarray, units: np.ndarray, weights: np.ndarray, classes: int
) -> np.ndarray:
    """Confusion matrices ``[B, C, C]`` (true, predicted) of all resamples."""
    counts = np.zeros((weights.shape[1], classes * classes))
    np.add.at(counts, (units, labels * classes + predicted), 1.0)
    return (weights @ counts).reshape(-1, classes, classes)


def _of_confusion(name: str, found: np.ndarray) -> np.ndarray:
    hits, support, predicted = np.diagonal(found, axis1=1, axis2=2), found.sum(axis=2), found.sum(axis=1)
    if name == "accuracy":
        return np.asarray(hits.sum(axis=1) / support.sum(axis=1))
    return (
        _mean_of_defined(hits, support)
        if name == "balanced_accuracy"
        else _mean_of_defined(2 * hits, support + predicted)
    )


def _of_labels(name: str, truth: np.ndarray, said: np.ndarray, units: np.ndarray, weights: np.ndarray) -> np.ndarray:
    def count(what: np.ndarray) -> np.ndarray:
        sums = np.zeros((weights.shape[1], truth.shape[1]))
        np.add.at(sums, units, what.astype(np.float64))
        return np.asarray(weights @ sums)

    hits, positives, chosen = count(truth & said), count(truth), count(said)
    if name == "f1_macro":
        return _mean_of_defined(2 * hits, positives + chosen)
    rejected, negatives = count(~truth & ~said), count(~truth)
    # A label without positives or without negatives has no balanced accuracy and does not count.
    return _mean_of_defined(hits * negatives + rejected * positives, 2 * positives * negatives)


def _mean_of_defined(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Row means of the quotients with a divisor other than 0; NaN where there is none."""
    defined = below > 0
    parts = np.divide(above, below, out=np.zeros_like(above), where=defined)
    count = defined.sum(axis=1)
    return np.where(count > 0, parts.sum(axis=1) / np.maximum(count, 1), np.nan)


def _auc(name: str, labels: np.ndarray, p: np.ndarray, weights: np.ndarray) -> np.ndarray:
    classes = range(p.shape[1])
    if name == "auc_ovo":  # Hand and Till 2001: both directions of every pair of classes
        parts = [
            auc(p[labels == i, i], p[labels == j, i], weights[:, labels == i], weights[:, labels == j])
            for i, j in itertools.permutations(classes, 2)
        ]
    else:
        held = [labels == c if labels.ndim == 1 else labels[:, c] > 0.5 for c in classes]
        parts = [auc(p[h, c], p[~h, c], weights[:, h], weights[:, ~h]) for c, h in zip(classes, held)]
    return np.mean(parts, axis=0)


def auc(positive: np.ndarray, negative: np.ndarray, of_positive: np.ndarray, of_negative: np.ndarray) -> np.ndarray:
    """Weighted area under the ROC curve of all resamples; ties count half.

    Args:
        positive: scores ``[P]``.
        negative: scores ``[M]``.
        of_positive: weights ``[B, P]``.
        of_negative: weights ``[B, M]``.

    Returns:
        ``[B]``; NaN where a side has no weight.
    """
    order = np.argsort(negative, kind="stable")
    ranked = negative[order]
    below = np.zeros((len(of_negative), len(negative) + 1))
    np.cumsum(of_negative[:, order], axis=1, out=below[:, 1:])
    left, right = np.searchsorted(ranked, positive, "left"), np.searchsorted(ranked, positive, "right")
    wins = (of_positive * (below[:, left] + below[:, right])).sum(axis=1) / 2
    pairs = of_positive.sum(axis=1) * below[:, -1]
    return np.divide(wins, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0)
