"""medfed's own identification: which clients' labels can be relied on, from the evidence they sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from medfed.reliability.identification import Verdict


class EvidenceLike(Protocol):
    """What of a client's evidence reaches the server: a message, or :class:`~medfed.reliability.evidence.Evidence`."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Plain values by name."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Tensors by name."""


def judge(
    evidence: Mapping[str, EvidenceLike], previous: Mapping[str, Any] | None = None, seed: int = 0
) -> tuple[Verdict, dict[str, Any]]:
    """Judges every client.

    Args:
        evidence: what each client sent; see :func:`medfed.reliability.evidence.evidence`.
        previous: the state that an earlier call returned, where evidence is pooled over rounds.
        seed: seed of what is drawn.

    Returns:
        The verdict, and the state for the next call (plain values).
    """
    names = sorted(evidence)
    known = [n for n in names if "separability" in evidence[n].values]
    x = np.array([evidence[n].values["separability"] for n in known], dtype=float)
    error = np.array([evidence[n].values["separability_error"] for n in known], dtype=float)
    status = dict.fromkeys(names, "undetermined")
    posterior = dict.fromkeys(names, math.nan)
    note = ""
    if len(known) >= 2:
        clean, note = _two_components(x, error)
        for name, p in zip(known, clean):
            posterior[name] = float(p)
            status[name] = "clean" if p >= 0.5 else "noisy"
    elif known:
        status[known[0]], note = "clean", "a single client that can be judged has nobody to differ from"
    state = {"clients": {n: dict(evidence[n].values) for n in names}}
    return Verdict(status, posterior, note), state


def _two_components(x: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, str]:
    """Probability of clean ``[K]`` under two normal components whose variance is tied plus each client's own."""
    one = _fit(x, error, np.ones((1, len(x))))
    best = None
    for cut in np.unique(x)[1:]:
        start = np.stack([x >= cut, x < cut]).astype(float)
        fit = _fit(x, error, start)
        if best is None or fit[0] > best[0]:
            best = fit
    if best is None or 2 * (best[0] - one[0]) < 2 * math.log(len(x)) + 2:
        return np.ones(len(x)), "no two groups of clients can be told apart: all count as clean"
    means, share = best[1], best[2]
    return share[int(np.argmax(means))], ""


def _fit(x: np.ndarray, error: np.ndarray, share: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Expectation-maximisation: log likelihood, means and responsibilities ``[components, K]``."""
    between, value = 0.01, -math.inf
    means = np.zeros(len(share))
    for _ in range(200):
        precision = 1 / (between + error**2)
        weight = share * precision
        means = (weight @ x) / np.maximum(weight.sum(axis=1), 1e-12)
        prior = np.maximum(share.mean(axis=1), 1e-12)
        excess = (share * precision**2 * ((x - means[:, None]) ** 2 - error**2)).sum()
        between = max(excess / (share * precision**2).sum(), 1e-4)
        variance = between + error**2
        logs = np.log(prior)[:, None] - 0.5 * ((x - means[:, None]) ** 2 / variance + np.log(2 * math.pi * variance))
        total = np.logaddexp.reduce(logs, axis=0)
        share = np.exp(logs - total)
        new = float(total.sum())
        if abs(new - value) < 1e-9:
            break
        value = new
    return value, means, share
