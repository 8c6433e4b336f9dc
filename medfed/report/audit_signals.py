"""What a client's memory says about its own labels, criterion by criterion; see :mod:`medfed.report.audit`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from medfed.errors import DataError

CRITERIA = {
    "representative": "class direction",
    "residual": "residual directions",
    "left_out": "leave-one-out prediction",
    "posterior": "posterior of features and label",
}
"""The criteria and what they are called in sentences."""


@dataclass(frozen=True)
class Evidence:
    """What a client's memory says about its labels, in the order of its samples; any part may be missing.

    Args:
        rounds: the rounds of the relabelling checkpoints.
        proposals: int64 ``[checkpoints, N]``: the class both spectral criteria agreed on, or -1.
        representative: S_R ``[N, C]`` of the last checkpoint, NaN for a class without reference; or None.
        residual: S_N ``[N, C]``, likewise.
        posterior: probability of each class given features and observed label ``[N, C]``, NaN where nothing can be
            said; or None.
        left_out: int64 ``[N]``: leave-one-out prediction (-1: none); or None.
        left_out_margin: ``[N]``: how strongly it contradicts the observed label, above 0 where it does.
        targets: int64 ``[N]``: current training targets; None before the first relabelling.
    """

    rounds: tuple[int, ...] = ()
    proposals: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    representative: np.ndarray | None = None
    residual: np.ndarray | None = None
    left_out: np.ndarray | None = None
    left_out_margin: np.ndarray | None = None
    targets: np.ndarray | None = None
    posterior: np.ndarray | None = None

    @classmethod
    def of(cls, memory: Mapping[str, Any]) -> Evidence | None:
        """The evidence in a client's memory, or None where there is none."""

        def array(name: str, dtype: type) -> np.ndarray | None:
            return np.asarray(memory[name], dtype) if name in memory else None

        rounds = tuple(int(r) for r in memory.get("audit_rounds", ()))
        proposals = array("audit_proposals", np.int64)
        found = cls(
            rounds=rounds if proposals is not None else (),
            proposals=np.zeros((0, 0), np.int64) if proposals is None else proposals,
            representative=array("audit_representative", np.float64),
            residual=array("audit_residual", np.float64),
            left_out=array("audit_loo_label", np.int64),
            left_out_margin=array("audit_loo_margin", np.float64),
            targets=array("labels", np.int64),
            posterior=array("audit_posterior", np.float64),
        )
        return found if len(found.proposals) or found.spectral or found.leave_one_out else None

    @property
    def spectral(self) -> bool:
        """There are scores of both spectral criteria."""
        return self.representative is not None and self.residual is not None

    @property
    def leave_one_out(self) -> bool:
        """There are leave-one-out predictions."""
        return self.left_out is not None and self.left_out_margin is not None


@dataclass(frozen=True)
class Signal:
    """What one criterion says of every sample.

    Args:
        points: int64 ``[N]``: the class it points to, -1 where it cannot say.
        margin: float64 ``[N]``: above 0 where it contradicts the observed label, below 0 where it confirms it,
            NaN where it cannot compare.
    """

    points: np.ndarray
    margin: np.ndarray

    @property
    def contradicts(self) -> np.ndarray:
        """Bool ``[N]``."""
        return self.margin > 0  # NaN is not


def spectral_signal(scores: np.ndarray, observed: np.ndarray, *, smallest: bool = False) -> Signal:
    """One spectral criterion against the observed labels.

    Args:
        scores: S_R or S_N ``[N, C]``, not negative; NaN for classes that cannot be scored.
        observed: int64 ``[N]``.
        smallest: the smallest score wins (S_N) instead of the largest.

    Returns:
        The winning class (the observed one in a tie), and the margin between the best other class and the observed
        one over the larger of the two scores: -1 to 1 and free of the scale of the features.
    """
    scores = np.where(np.isfinite(scores), scores, np.nan).astype(np.float64)
    good = -scores if smallest else scores
    rows = np.arange(len(scores))
    own = scores[rows, observed]
    others = np.where(np.isnan(good), -np.inf, good)
    others[rows, observed] = -np.inf
    best = others.argmax(axis=1)
    other = np.where(np.isneginf(others[rows, best]), np.nan, scores[rows, best])
    larger = np.fmax(np.abs(own), np.abs(other))
    gap = own - other if smallest else other - own
    margin = np.divide(gap, larger, out=np.where(np.isnan(gap), np.nan, 0.0), where=larger > 0)
    points = np.where(margin > 0, best, observed)
    points = np.where(np.isnan(own), np.where(np.isnan(other), -1, best), points)
    return Signal(points, margin)


def left_out_signal(labels: np.ndarray, margin: np.ndarray, observed: np.ndarray) -> Signal:
    """The leave-one-out prediction against the observed labels; see :class:`Signal`."""
    known = (labels >= 0) & np.isfinite(margin)
    against = np.where(labels == observed, np.minimum(margin, 0.0), margin)
    return Signal(np.where(known, labels, -1), np.where(known, against, np.nan))


def signals(evidence: Evidence, observed: np.ndarray) -> dict[str, Signal]:
    """What each criterion says that the evidence allows, by name."""
    found = {}
    if evidence.representative is not None:
        found["representative"] = spectral_signal(evidence.representative, observed)
    if evidence.residual is not None:
        found["residual"] = spectral_signal(evidence.residual, observed, smallest=True)
    if evidence.left_out is not None and evidence.left_out_margin is not None:
        found["left_out"] = left_out_signal(evidence.left_out, evidence.left_out_margin, observed)
    if evidence.posterior is not None:
        found["posterior"] = spectral_signal(evidence.posterior, observed)
    return found


def strength(margins: np.ndarray) -> np.ndarray:
    """Mean over the criteria of the mid-rank of each margin among the client's samples.

    Args:
        margins: ``[criteria, N]``, NaN where a criterion cannot compare.

    Returns:
        float64 ``[N]`` in 0..1; 0 where no criterion can compare.
    """
    ranks = [(pd.Series(m).rank().to_numpy() - 0.5) / max(np.isfinite(m).sum(), 1) for m in margins]
    known = np.isfinite(margins).sum(axis=0)
    total = np.nansum(np.stack(ranks), axis=0) if ranks else np.zeros(margins.shape[1])
    return total / np.maximum(known, 1)


def check(evidence: Evidence, count: int, size: int) -> None:
    """Refuses evidence that is not of ``count`` samples and ``size`` classes."""
    shapes: list[tuple[str, np.ndarray | None, tuple[int, ...]]] = [
        ("audit_proposals", evidence.proposals if evidence.proposals.size else None, (len(evidence.rounds), count)),
        ("audit_representative", evidence.representative, (count, size)),
        ("audit_residual", evidence.residual, (count, size)),
        ("audit_posterior", evidence.posterior, (count, size)),
        ("audit_loo_label", evidence.left_out, (count,)),
        ("audit_loo_margin", evidence.left_out_margin, (count,)),
        ("labels", evidence.targets, (count,)),
    ]
    for name, value, shape in shapes:
        if value is None:
            continue
        if value.shape != shape:
            raise DataError(
                f"the client's memory holds {name} of shape {list(value.shape)}, expected {list(shape)}.",
                fix="The memory is of other images: restore those that the run was made with.",
            )
        low = 0 if name == "labels" else -1
        if value.dtype == np.int64 and value.size and not low <= value.min() <= value.max() < size:
            raise DataError(f"the client's memory holds {name} outside the {size} classes.", fix="It is damaged.")


def without_reference(evidence: Evidence, observed: np.ndarray, size: int) -> list[int]:
    """Observed classes that no spectral criterion has a score of."""
    scores = [s for s in (evidence.representative, evidence.residual) if s is not None]
    if not scores:
        return []
    absent = np.all([~np.isfinite(s).any(axis=0) for s in scores], axis=0)
    return [c for c in range(size) if absent[c] and (observed == c).any()]
