"""Tests of paired differences and of ranks.  Numbers in, numbers out; what SciPy has is SciPy's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from medfed.seeding import numpy_generator

EXACT = 36
"""Most differences all of whose sign changes are counted."""
DRAWN = 19_999
"""Sign changes that are drawn where there are more differences."""


@dataclass(frozen=True)
class Friedman:
    """Friedman's test over blocks and Nemenyi's critical difference.

    Args:
        ranks: mean rank of each method ``[M]``; 1 is the best.
        blocks: blocks in which every method has a value.
        p: of the hypothesis that all methods are alike; None where it is not defined.
        critical: mean ranks that differ by more differ at the level 0.05, all pairs considered.
    """

    ranks: np.ndarray
    blocks: int
    p: float | None
    critical: float


def sign_flip(differences: Sequence[float]) -> float | None:
    """Two-sided p of the sign-flip test of the mean of paired differences (Fisher 1935).

    Under the hypothesis each difference is as likely to have the other sign.  Exact for up to :data:`EXACT`
    differences: sums of one half of them are counted against sums of the other.  For more, sign changes are drawn, and
    what was observed counts as one of them.

    Returns:
        The share of sign changes whose mean is at least as far from 0; None without a difference.
    """
    found = np.asarray(differences, np.float64)
    if not len(found):
        return None
    # Sums of the same numbers in another order differ in their last bits.
    least = abs(found.sum()) - 1e-12 * np.abs(found).sum()
    if least <= 0:
        return 1.0
    if len(found) > EXACT:
        signs = numpy_generator(0, "sign flips", len(found)).choice(np.array([-1.0, 1.0]), (DRAWN, len(found)))
        return (int(np.count_nonzero(np.abs(signs @ found) >= least)) + 1) / (DRAWN + 1)
    one, other = _sums(found[: len(found) // 2]), _sums(found[len(found) // 2 :])
    above = len(other) - np.searchsorted(other, least - one, side="left")
    below = np.searchsorted(other, -least - one, side="right")
    return int(above.sum() + below.sum()) / 2.0 ** len(found)


def smallest_sign_flip(count: int) -> float:
    """The smallest p that :func:`sign_flip` can give for so many differences: 2 of 2^n sign changes."""
    return 2.0 ** (1 - max(count, 1)) if count <= EXACT else 1 / (DRAWN + 1)


def _sums(numbers: np.ndarray) -> np.ndarray:
    """Sums of the numbers under all changes of their signs ``[2^n]``, sorted."""
    sums = np.zeros(1)
    for number in numbers:
        sums = np.concatenate([sums - number, sums + number])
    return np.sort(sums)


def signed_rank(differences: Sequence[float]) -> float | None:
    """Two-sided p of Wilcoxon's signed-rank test; differences of 0 are left out.  None where nothing is left."""
    found = np.asarray(differences, np.float64)
    if not np.any(found):
        return None
    from scipy.stats import wilcoxon

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ties, for which SciPy changes over to the normal distribution
        return _probability(wilcoxon(found).pvalue)


def paired_t(differences: Sequence[float]) -> float | None:
    """Two-sided p of the paired t test; None for fewer than two differences or where they are all the same."""
    found = np.asarray(differences, np.float64)
    if len(found) < 2 or np.ptp(found) <= 1e-12 * np.abs(found).max():
        return None
    from scipy.stats import ttest_1samp

    return _probability(ttest_1samp(found, 0.0).pvalue)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p adjusted for their number by Holm's step-down method (Holm 1979); None stays None and is not counted."""
    known = sorted((p, k) for k, p in enumerate(values) if p is not None)
    adjusted: list[float | None] = [None] * len(values)
    highest = 0.0
    for rank, (p, k) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * p))
        adjusted[k] = highest
    return adjusted


def friedman(blocks: np.ndarray, higher: bool = True, level: float = 0.05) -> Friedman | None:
    """Friedman's test with Nemenyi's critical difference (Demsar 2006, JMLR 7, section 3.2.2).

    Args:
        blocks: values ``[N, M]`` of the methods in each block, all finite.
        higher: whether more is better.
        level: of the critical difference, q sqrt(M (M + 1) / 6 N).

    Returns:
        None for fewer than three methods or two blocks.
    """
    count, methods = blocks.shape
    if methods < 3 or count < 2:
        return None
    from scipy.stats import friedmanchisquare, rankdata, studentized_range

    ranks = rankdata(-blocks if higher else blocks, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p = _probability(friedmanchisquare(*blocks.T).pvalue)
    q = float(studentized_range.ppf(1 - level, methods, np.inf)) / math.sqrt(2)
    return Friedman(ranks.mean(axis=0), count, p, q * math.sqrt(methods * (methods + 1) / (6 * count)))


def _probability(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
