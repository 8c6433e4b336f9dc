"""medfed's own identification: which clients' labels can be relied on, from the evidence they sent.

:mod:`medfed.reliability.shares` estimates each client's share of wrong labels with its sampling error.  A mixture of
two groups, whose variance is that between clients plus each client's own sampling variance, says who is clean; where
two groups explain the shares no better than one, nobody is accused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from medfed.reliability.grouping import two_groups
from medfed.reliability.identification import Verdict
from medfed.reliability.shares import Summaries, estimate

UNSURE = (0.35, 0.65)
CHANCE = 2.0  # standard errors by which labels must be more predictable than chance, somewhere


class EvidenceLike(Protocol):
    """What of a client's evidence reaches the server: a message, a reply, or the evidence itself."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Plain values by name."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Tensors by ``group/name``."""


def judge(
    evidence: Mapping[str, EvidenceLike], previous: Mapping[str, Any] | None = None, seed: int = 0
) -> tuple[Verdict, dict[str, Any]]:
    """Judges every client.

    Args:
        evidence: what each client sent; see :func:`medfed.reliability.evidence.evidence`.
        previous: the state that an earlier call returned, where evidence is pooled over rounds.
        seed: not used: nothing is drawn.

    Returns:
        The verdict, and the state for the next call, of plain values: ``shares`` by client, each with ``wrong``
        (estimated share of wrong labels, 0 to 1, or None), ``raw`` and ``error`` (as pooled) and ``calls``; and
        ``renamed``, pairs of classes that most clients seem to have swapped.
    """
    names = sorted(evidence)
    known = [name for name in names if described(evidence[name])]
    notes: list[str] = []
    raw, error = np.zeros(0), np.zeros(0)
    renamed: tuple[tuple[int, int], ...] = ()
    if len(known) >= 2:
        found = estimate(summaries([evidence[name] for name in known]))
        raw, error, renamed = found.wrong, found.error, found.renamed
    calls = np.ones(len(known), dtype=int)
    if previous:
        raw, error, calls = pooled(known, raw, error, previous.get("shares", {}))
    group = two_groups(raw, error)
    status = dict.fromkeys(names, "undetermined")
    posterior = dict.fromkeys(names, math.nan)
    if len(known) < 2:
        status.update(dict.fromkeys(known, "clean"))
        notes.append("Fewer than two clients can be judged: nobody to differ from.")
    elif not predictable([evidence[name] for name in names]):
        notes.append("No client's labels can be predicted better than chance: none can be called clean.")
    else:
        for name, p in zip(known, group.clean):
            posterior[name] = float(p)
            status[name] = status_of(float(p))
        if not group.split:
            notes.append("One group explains the shares of wrong labels as well as two: nobody is accused.")
    if renamed:
        pairs = ", ".join(f"{a} and {b}" for a, b in renamed)
        notes.append(f"Most clients seem to have swapped the classes {pairs}: those who did not are the purer ones.")
    chance = 1 - 1 / number_of_classes(evidence.values())
    state = state_of(names, known, raw, error, calls, (group.centre, chance), chance, renamed)
    return Verdict(status, posterior, " ".join(notes)), state


def status_of(clean: float) -> str:
    """What a probability of being clean means."""
    return "clean" if clean > UNSURE[1] else "noisy" if clean < UNSURE[0] else "undetermined"


def number_of_classes(evidence: Iterable[EvidenceLike]) -> int:
    """Number of classes of the task; 2 where nobody says so."""
    counts = (one.tensors.get("evidence/counts") for one in evidence)
    return max((len(c) for c in counts if c is not None), default=2)


def described(one: EvidenceLike) -> bool:
    """Whether a client has sent the mean of any class."""
    counts = one.tensors.get("evidence/counts")
    return counts is not None and float(counts.sum()) > 0


def summaries(evidence: Sequence[EvidenceLike]) -> Summaries:
    """The class means of clients, centred and in their common metric, from what each sent."""

    def stacked(name: str) -> np.ndarray:
        return np.stack([np.asarray(one.tensors[f"evidence/{name}"], dtype=np.float64) for one in evidence])

    counts, means = stacked("counts"), stacked("means")
    samples = sum(int(one.values["evidence_samples"]) for one in evidence)
    centre = stacked("total").sum(axis=0) / samples
    spread = np.zeros((len(centre), len(centre)))
    spread[np.triu_indices(len(centre))] = stacked("moment").sum(axis=0) / samples
    spread = spread + np.triu(spread, 1).T - np.outer(centre, centre)
    means = np.where(counts[:, :, None] > 0, means - centre, 0.0)
    return Summaries(counts, means, spread, _purity(evidence))


def _purity(evidence: Sequence[EvidenceLike]) -> np.ndarray:
    """A first guess: noise at training and at testing multiply, hence the root; relative to the best clients."""
    contrast = np.array([one.values.get("contrast", math.nan) for one in evidence], dtype=float)
    if np.isnan(contrast).all():
        return np.full(len(contrast), 0.5)
    contrast = np.where(np.isnan(contrast), np.nanmedian(contrast), contrast)
    top = np.sort(contrast)[-max(2, len(contrast) // 5)]
    ratio = contrast / top if top > 0 else np.zeros_like(contrast)
    return np.clip(np.sqrt(np.clip(ratio, 0, 1)), 0.05, 0.97)


def predictable(evidence: Sequence[EvidenceLike]) -> bool:
    """Whether labels can be predicted at all: the best client's, with the number of clients allowed for."""
    values = [one.values for one in evidence if "separability" in one.values]
    return not values or max(v["separability"] / v["separability_error"] for v in values) > CHANCE


def pooled(
    names: list[str], raw: np.ndarray, error: np.ndarray, previous: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shares averaged over calls.  The labels are the same ones, so the error is averaged, not reduced."""
    raw, error, calls = raw.copy(), error.copy(), np.ones(len(names), dtype=int)
    for k, name in enumerate(names):
        old = previous.get(name)
        if old and old.get("raw") is not None:
            now, before = 1 / error[k] ** 2, old["calls"] / old["error"] ** 2
            raw[k] = (now * raw[k] + before * old["raw"]) / (now + before)
            calls[k] = old["calls"] + 1
            error[k] = math.sqrt(calls[k] / (now + before))
    return raw, error, calls


def state_of(
    names: list[str],
    known: list[str],
    raw: np.ndarray,
    error: np.ndarray,
    calls: np.ndarray,
    scale: tuple[float, float],
    chance: float,
    renamed: tuple[tuple[int, int], ...],
) -> dict[str, Any]:
    """The state for the next call; see :func:`judge`.

    Few samples draw all class means together, and all estimates towards what labels drawn at random have: a raw value
    is read on the scale from the clean clients' to that one.

    Args:
        names: of all clients.
        known: those with an estimate.
        raw: their estimates.
        error: of these.
        calls: how many are pooled in each.
        scale: raw values of right labels and of labels drawn at random.
        chance: share of labels drawn at random that is wrong.
        renamed: pairs of classes that were exchanged.
    """
    low, high = scale
    shares: dict[str, Any] = {name: {"wrong": None, "raw": None, "error": None, "calls": 0} for name in names}
    for k, name in enumerate(known[: len(raw)]):
        wrong = float(min(max(chance * (raw[k] - low) / max(high - low, 1e-6), 0.0), 1.0))
        shares[name] = {"wrong": wrong, "raw": float(raw[k]), "error": float(error[k]), "calls": int(calls[k])}
    return {"shares": shares, "renamed": [list(pair) for pair in renamed]}
