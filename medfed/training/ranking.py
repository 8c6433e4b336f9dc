"""Areas under curves from ranks: exact with ties, no thresholds, no loops over samples.

Undefined areas (one side of the comparison is empty) are NaN here; :mod:`medfed.training.metrics` turns them
into ``None`` with a reason.
"""

from __future__ import annotations

import numpy as np


def tie_groups(scores: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sums rows of ``counts`` over samples of equal score, from the lowest score to the highest.

    Args:
        scores: finite scores ``[N]``.
        counts: what each sample contributes ``[N, K]``.

    Returns:
        ``[G, K]``, one row a distinct score.
    """
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    return np.add.reduceat(counts[order], starts, axis=0)


def class_wins(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """How often a sample of class a scores higher for a than a sample of class b does.

    All multi-class areas follow from this one table, for which every column of scores is sorted once.

    Args:
        scores: finite scores ``[N, C]``, N > 0.
        labels: class indices ``[N]``.

    Returns:
        Mann-Whitney counts ``U [C, C]``: ``U[a, b]`` is the number of pairs (one sample of a, one of b) in which
        column a ranks the sample of a higher; a tie counts one half.
    """
    num_classes = scores.shape[1]
    members = np.eye(num_classes)[labels]
    return np.stack([grouped_wins(tie_groups(scores[:, c], members), c) for c in range(num_classes)])


def grouped_wins(groups: np.ndarray, own: int) -> np.ndarray:
    """One row of :func:`class_wins` from counts alone: samples of one group are tied.

    Args:
        groups: samples of each class ``[G, C]``, one row a distinct score, or an interval of scores, rising.
        own: the class whose samples should score high.

    Returns:
        ``[C]``: pairs in which the sample of that class ranks above one of each other, ties counting one half.
    """
    below = np.cumsum(groups, axis=0) - groups
    return groups[:, own] @ (below + groups / 2)


def one_vs_one(wins: np.ndarray, support: np.ndarray) -> float:
    """Area under the curve averaged over all pairs of classes; Hand and Till (2001), equation 7.

    Args:
        wins: the table of :func:`class_wins`.
        support: samples per class ``[C]``.

    Returns:
        The area; NaN where a class is absent or there is only one.
    """
    first, second = np.triu_indices(len(support), k=1)
    if not len(first) or np.any(support == 0):
        return float("nan")
    pairs = (wins[first, second] + wins[second, first]) / (2.0 * support[first] * support[second])
    return float(pairs.mean())


def one_vs_rest(wins: np.ndarray, support: np.ndarray) -> np.ndarray:
    """Area under the curve of each class against all others ``[C]``; NaN where one side is empty."""
    against_others = wins.sum(axis=1) - np.diag(wins)
    return ratio(against_others, support * (support.sum() - support))


def binary_auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Area under the ROC curve of scores ``[N]`` for positives ``[N]`` (bool); NaN where one side is empty."""
    members = np.stack([~positive, positive], axis=1).astype(np.float64)
    return grouped_auc(tie_groups(scores, members))


def grouped_auc(groups: np.ndarray) -> float:
    """Area under the ROC curve from counts ``[G, 2]`` of negatives and positives by rising score; see above."""
    return float(ratio(grouped_wins(groups, 1)[0], groups[:, 0].sum() * groups[:, 1].sum()))


def average_precision(scores: np.ndarray, positive: np.ndarray) -> float:
    """Sum of precision times the step in recall, from the highest score down; NaN without positives."""
    members = np.stack([~positive, positive], axis=1).astype(np.float64)
    return grouped_average_precision(tie_groups(scores, members))


def grouped_average_precision(groups: np.ndarray) -> float:
    """:func:`average_precision` from counts ``[G, 2]`` of negatives and positives by rising score, empty rows aside."""
    groups = groups[groups.sum(axis=1) > 0]
    taken, found = groups.sum(axis=1)[::-1], groups[::-1, 1]
    return float(ratio((np.cumsum(found) / np.cumsum(taken)) @ found, found.sum()))


def ratio(numerator: np.ndarray | float, denominator: np.ndarray | float) -> np.ndarray:
    """Elementwise quotient; NaN, without a warning, where the denominator is zero."""
    numerator, denominator = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    out = np.full(np.broadcast_shapes(numerator.shape, denominator.shape), np.nan)
    return np.divide(numerator, denominator, out=out, where=denominator != 0)
