"""The share of wrong labels at each client, from the class means that all clients send.

Under label noise the mean feature of what a client calls class o is a mixture of the true class means::

    m_ko = sum_a P_k(a | o) mu_a + sampling error

A clean client has P = I, a noisy one lies inside the simplex of the true means.  The means ``mu`` (from the *other*
clients) and the mixtures ``P`` are estimated in turn; the mixture of a class mean is linear in it (barycentric
coordinates in the metric of the spread within classes), so that its sampling error is known in closed form.

Names of classes are a convention that the data cannot tell: where many clients swap two classes, the others look
swapped.  What can be told is which side is *purer*; a nearly complete swap is less pure than no swap.  A swap without
exception is not identifiable.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

ROUNDS = 6
SHRINK = 1.0  # of the spread within classes, relative to its mean eigenvalue
PRIOR = 2.0  # samples that a client's mean purity is worth for the mixture of one class
ANCHOR = 5.0  # samples that the plain mean is worth against the unmixed one
SWAP = 0.5  # standard errors by which swapped clients must be purer for the names to be changed
SWAPPED = -0.5  # contrast of a client, as a share of the purest others, below which it counts as swapped


@dataclass(frozen=True)
class Summaries:
    """Class means of K clients in one metric.

    Args:
        counts: ``[K, C]``; 0 where a class is not described.
        means: ``[K, C, r]``, centred at the mean of all samples.
        spread: total covariance ``[r, r]`` over all clients.
        purity: a first guess of each client's purity ``[K]``, in (0, 1).
    """

    counts: np.ndarray
    means: np.ndarray
    spread: np.ndarray
    purity: np.ndarray


@dataclass(frozen=True)
class Shares:
    """What is estimated.

    Args:
        wrong: share of wrong labels of each client ``[K]``, not clipped to 0..1, and above 0 by a
            constant that is the same for all clients (few samples blur the means); NaN where no class mean is known.
        error: its standard error ``[K]``.
        mixture: ``[K, C, C]``, what the labels o (second index) of a client are made of, on the simplex.
        renamed: pairs of classes whose names were exchanged, because the swapped clients are purer.
    """

    wrong: np.ndarray
    error: np.ndarray
    mixture: np.ndarray
    renamed: tuple[tuple[int, int], ...] = ()


def estimate(data: Summaries, rounds: int = ROUNDS) -> Shares:
    """Estimates the share of wrong labels of every client.

    Args:
        data: the class means.
        rounds: alternations between means and mixtures.
    """
    classes = data.counts.shape[1]
    guess = data.purity[:, None, None]
    mixture = guess * np.eye(classes) + (1 - guess) / classes
    fit = _alternate(data, mixture, rounds)
    renamed: list[tuple[int, int]] = []
    # Greedily, a pair at most once.
    while (pair := _misnamed(data, fit, renamed)) is not None:
        names = np.arange(classes)
        names[list(pair)] = names[list(pair)[::-1]]
        renamed.append(pair)
        fit = _alternate(data, fit.mixture[:, :, names], rounds)
    wrong, error = _wrong(data.counts, fit)
    return Shares(wrong, error, fit.mixture, tuple(renamed))


@dataclass(frozen=True)
class _Fit:
    """Mixtures on the simplex and as estimated ``[K, C, C]``, and the variance of one sample ``[K, C]``."""

    mixture: np.ndarray
    raw: np.ndarray
    variance: np.ndarray


def _alternate(data: Summaries, mixture: np.ndarray, rounds: int) -> _Fit:
    raw, variance = _coordinates(data, mixture)
    for _ in range(rounds):
        mixture = _shrunk(data.counts, raw)
        raw, variance = _coordinates(data, mixture)
    return _Fit(mixture, raw, variance)


def _shrunk(counts: np.ndarray, raw: np.ndarray) -> np.ndarray:
    """Mixtures on the simplex, drawn towards the client's mean purity where a class has few samples."""
    classes = counts.shape[1]
    near = on_simplex(raw)
    own = np.einsum("koo->ko", near)
    purity = ((counts * own).sum(axis=1) + 1) / (counts.sum(axis=1) + 2)
    prior = purity[:, None, None] * np.eye(classes) + ((1 - purity) / classes)[:, None, None]
    n = counts[:, :, None]
    return (n * near + PRIOR * prior) / (n + PRIOR)


def on_simplex(points: np.ndarray) -> np.ndarray:
    """The nearest points with entries of at least 0 that sum to 1, along the last axis (Held et al. 1974)."""
    falling = -np.sort(-points, axis=-1)
    excess = np.cumsum(falling, axis=-1) - 1
    rank = np.arange(1, points.shape[-1] + 1)
    kept = (falling * rank > excess).sum(axis=-1, keepdims=True)
    return np.maximum(points - np.take_along_axis(excess, kept - 1, axis=-1) / kept, 0)


def _coordinates(data: Summaries, mixture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Barycentric coordinates of each class mean among the means of the other clients, and their variances."""
    means, metric, within = _other_means(data, mixture)
    classes = data.counts.shape[1]
    weight = means @ metric
    gram = weight @ means.transpose(0, 2, 1)
    size = np.trace(gram, axis1=1, axis2=2)[:, None, None] / classes
    inverse = np.linalg.inv(gram + (0.01 * size + 1e-12) * np.eye(classes))
    one = inverse.sum(axis=2)
    total = one.sum(axis=1)
    solve = inverse - one[:, :, None] * one[:, None, :] / total[:, None, None]
    raw = data.means @ weight.transpose(0, 2, 1) @ solve + (one / total[:, None])[:, None, :]
    reach = solve @ weight
    variance = np.einsum("kcr,rs,kcs->kc", reach, within, reach)
    return raw, variance


def _other_means(data: Summaries, mixture: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """True class means without each client ``[K, C, r]``, the metric, and the spread within classes ``[r, r]``."""
    parts = data.counts[:, :, None] * mixture
    sums = np.einsum("koa,kor->kar", parts, data.means)
    sizes = parts.sum(axis=1)
    cross = np.einsum("koa,kob->kab", parts, mixture)

    def solved(s: np.ndarray, n: np.ndarray, x: np.ndarray) -> np.ndarray:
        plain = s / np.maximum(n, 1e-9)[..., None]
        return np.linalg.solve(x + ANCHOR * np.eye(x.shape[-1]), s + ANCHOR * plain)

    s, n, x = sums.sum(axis=0), sizes.sum(axis=0), cross.sum(axis=0)
    # The plain means: unmixed ones overshoot, and would leave no spread in the directions that matter.
    plain = s / np.maximum(n, 1e-9)[:, None]
    within = data.spread - (plain.T * (n / n.sum())) @ plain
    values, vectors = np.linalg.eigh((within + within.T) / 2)
    values = np.maximum(values, 1e-3 * max(np.trace(data.spread), 1e-12) / len(values))
    within = (vectors * values) @ vectors.T
    metric = (vectors / (values + SHRINK * values.mean())) @ vectors.T
    return solved(s - sums, n - sizes, x - cross), metric, within


def _wrong(counts: np.ndarray, fit: _Fit) -> tuple[np.ndarray, np.ndarray]:
    own = np.einsum("koo->ko", fit.raw)
    n = counts.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        wrong = (counts * (1 - own)).sum(axis=1) / n
        error = np.sqrt((counts * fit.variance).sum(axis=1)) / n
    return wrong, error


def _misnamed(data: Summaries, fit: _Fit, done: list[tuple[int, int]]) -> tuple[int, int] | None:
    """The pair of classes that the clients who swap it keep apart more purely than the others, if there is one."""
    best, found = SWAP, None
    for a, b in combinations(range(data.counts.shape[1]), 2):
        if (a, b) not in done and (z := _swap_score(data.counts, fit, a, b)) > best:
            best, found = z, (a, b)
    return found


def _swap_score(counts: np.ndarray, fit: _Fit, a: int, b: int) -> float:
    na, nb = counts[:, a], counts[:, b]
    n = na + nb
    known = n > 0
    n = np.maximum(n, 1)
    contrast = (na * (fit.raw[:, a, a] - fit.raw[:, a, b]) + nb * (fit.raw[:, b, b] - fit.raw[:, b, a])) / n
    variance = 4 * (na * fit.variance[:, a] + nb * fit.variance[:, b]) / n**2
    straight = known & (contrast > 0)
    if not straight.any():
        return -np.inf
    one, one_variance = _purest(contrast[straight], n[straight], variance[straight])
    swapped = known & (contrast < min(SWAPPED * one, 0))
    if swapped.sum() < 2:
        return -np.inf  # a single client does not overrule all others
    two, two_variance = _purest(-contrast[swapped], n[swapped], variance[swapped])
    return (two - one) / np.sqrt(one_variance + two_variance + 1e-12)


def _purest(contrast: np.ndarray, n: np.ndarray, variance: np.ndarray) -> tuple[float, float]:
    """Self-weighted mean, in which the purest clients count most, and its sampling variance."""
    weight = n * contrast
    mean = (n * (contrast**2 - variance)).sum() / weight.sum()
    return float(mean), float((weight**2 * variance).sum() / weight.sum() ** 2)
