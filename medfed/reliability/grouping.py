"""One group of clients or two, from an estimate of each client with its own sampling error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LEAST = 0.08  # smallest difference of two groups that matters
EVIDENCE = 3.0  # twice the gain in log posterior that two groups must bring,
FEW = 16.0  # and so much more, divided by the clients accused: a single odd client is easily found,
SMALL = 60.0  # and so much more for what the groups differ by less than
CLEAR = 0.3  # of the way from the lower group to nothing but wrong labels: clean hospitals differ, too
SCALE = (0.6, 4.0)  # of the sampling variance, which its formula overrates: a guess, and the clients it is worth
SPREAD = (0.02, 3.0)  # between noisy clients, beyond the sampling error: likewise
STEPS = 60


@dataclass(frozen=True)
class Grouping:
    """Who is in the lower group.

    Args:
        clean: probability of the lower group ``[K]``.
        split: whether there are two groups.
        centre: centre of the lower group; 0 without clients.
        gain: twice the gain in log posterior of two groups over one.
    """

    clean: np.ndarray
    split: bool
    centre: float
    gain: float


def two_groups(values: np.ndarray, errors: np.ndarray) -> Grouping:
    """Splits clients into a lower and an upper group, where that explains their values better than one group.

    Each group is normal.  The variance of a client is the square of its own error, up to a factor that is common to all
    and estimated with them, plus in the upper group a spread between clients (not all err alike).
    Expectation-maximisation, from every split of the ordered values.

    Args:
        values: ``[K]``, finite.
        errors: standard errors ``[K]``.
    """
    if not len(values):
        return Grouping(np.zeros(0), False, 0.0, 0.0)
    one_value, one_centre = _one(values, errors)
    order = np.sort(values)
    cuts = (order[1:] + order[:-1])[np.diff(order) > 1e-9] / 2
    if len(cuts) > 12:
        cuts = cuts[np.unique(np.linspace(0, len(cuts) - 1, 12).round().astype(int))]
    fits = [_two(values, errors, values < cut) for cut in cuts]
    best = max(fits, key=lambda fit: fit[0], default=(-math.inf, np.ones(len(values)), one_centre))
    gain = 2 * (best[0] - one_value)
    accused = 1 - best[1]
    apart = (_centre(values, accused) - best[2]) / max(1 - best[2], 1e-6)
    if gain < EVIDENCE + FEW / max(float(accused.sum()), 1.0) + SMALL * max(CLEAR - apart, 0.0):
        return Grouping(np.ones(len(values)), False, one_centre, gain)
    return Grouping(best[1], True, best[2], gain)


def _log_normal(x: np.ndarray, centre: float, variance: np.ndarray) -> np.ndarray:
    return -0.5 * ((x - centre) ** 2 / variance + np.log(2 * math.pi * variance))


def _penalty(variance: float, guess: tuple[float, float]) -> float:
    """Log density of an inverse-gamma prior, relative to its mode."""
    ratio = guess[0] / variance
    return -0.5 * guess[1] * (ratio - 1 - math.log(ratio))


def _centre(x: np.ndarray, weight: np.ndarray) -> float:
    return float((weight * x).sum() / max(weight.sum(), 1e-12))


def _one(x: np.ndarray, errors: np.ndarray) -> tuple[float, float]:
    square, scale = errors**2, SCALE[0]
    centre = _centre(x, 1 / square)
    scale = (SCALE[1] * SCALE[0] + float(((x - centre) ** 2 / square).sum())) / (SCALE[1] + len(x))
    return float(_log_normal(x, centre, scale * square).sum()) + _penalty(scale, SCALE), centre


def _two(x: np.ndarray, errors: np.ndarray, low: np.ndarray) -> tuple[float, np.ndarray, float]:
    square, clean = errors**2, low.astype(float)
    scale, spread = SCALE[0], SPREAD[0] ** 2
    centre, value = 0.0, -math.inf
    for _ in range(STEPS):
        share = (clean.sum() + 1) / (len(x) + 2)
        centre = _centre(x, clean / square)
        wide = scale * square + spread
        other = max(_centre(x, (1 - clean) / wide), centre + LEAST)
        # How much of a noisy client's deviation is sampling error, given both variances.
        part = scale * square / wide
        deviation = (x - other) ** 2
        sampling = clean * (x - centre) ** 2 + (1 - clean) * (part**2 * deviation + part * spread)
        between = (1 - clean) * ((1 - part) ** 2 * deviation + part * spread)
        scale = (SCALE[1] * SCALE[0] + float((sampling / square).sum())) / (SCALE[1] + len(x))
        spread = (SPREAD[1] * SPREAD[0] ** 2 + float(between.sum())) / (SPREAD[1] + float((1 - clean).sum()))
        one = math.log(share) + _log_normal(x, centre, scale * square)
        two = math.log(1 - share) + _log_normal(x, other, scale * square + spread)
        total = np.logaddexp(one, two)
        clean = np.exp(one - total)
        # Whoever is cleaner than the clean group's centre is not noisy, however wide the noisy group.
        clean = np.where(x <= centre, np.maximum(clean, 1 - 1e-6), clean)
        value = float(total.sum()) + math.log(share * (1 - share) * 4)
    return value + _penalty(scale, SCALE) + _penalty(spread, (SPREAD[0] ** 2, SPREAD[1])), clean, centre
