"""Which clients have unreliable labels: the published decisions of OCT-FedSIR, FedSIR, FedNoRo and FedCorr.

All of them split the clients in two by a Gaussian mixture, so that two clients that differ at all are always told
apart, and a federation without any noisy client can be split as well.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medfed.errors import DataError
from medfed.reliability.spectra import Descriptors

STATUS = ("clean", "noisy", "undetermined")
SAME = 1e-12
"""Clients whose numbers differ by no more are identical."""


@dataclass(frozen=True)
class Verdict:
    """Who is clean.

    Args:
        status: client -> one of :data:`STATUS`.
        posterior: client -> probability of being clean; NaN where it is not known.
        note: what a reader should know about the decision; empty if nothing.
    """

    status: dict[str, str]
    posterior: dict[str, float] = field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        for client, status in self.status.items():
            if status not in STATUS:
                raise ValueError(f"status of {client} must be one of {STATUS}, not {status!r}")

    def having(self, status: str) -> tuple[str, ...]:
        """The clients of a status, sorted."""
        return tuple(sorted(c for c, s in self.status.items() if s == status))

    @property
    def clean(self) -> tuple[str, ...]:
        """Clients judged clean, sorted."""
        return self.having("clean")

    @property
    def noisy(self) -> tuple[str, ...]:
        """Clients judged noisy, sorted."""
        return self.having("noisy")

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Clients that cannot be judged, sorted."""
        return self.having("undetermined")

    def to_plain(self) -> dict[str, Any]:
        """As values of JSON; an unknown probability is None."""
        posterior = {c: None if math.isnan(p) else p for c, p in self.posterior.items()}
        return {"status": dict(self.status), "posterior": posterior, "note": self.note}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Verdict:
        """The inverse of :meth:`to_plain`; further keys are ignored."""
        posterior = {c: math.nan if p is None else float(p) for c, p in plain.get("posterior", {}).items()}
        return cls(dict(plain["status"]), posterior, plain.get("note", ""))


def published(
    descriptors: Mapping[str, Descriptors],
    *,
    use_maximum: bool = True,
    seed: int = 42,
    threshold: float = 0.5,
    starts: int = 30,
    iterations: int = 2000,
    regularisation: float = 1e-6,
) -> Verdict:
    """The decision of OCT-FedSIR: a mixture of two Gaussians over the standardised descriptors.

    The component whose mean of the first descriptor (mean similarity) is lower is the clean one.  FedSIR's decision is
    the same with ``use_maximum=False`` on descriptors of absolute cosines.  The paper names only the mixture; the
    numbers are those of FedSIR's code.  The order of the clients does not matter.

    What the paper leaves open: a client with fewer than two observed classes has no descriptors, is undetermined and
    has no part in the mixture (as zeros it would look cleaner than any clean client); clients that are all identical
    are all clean, and so is a client that has none to be compared with, with unknown probability.

    Args:
        descriptors: of each client.
        use_maximum: use the maximum beside mean and energy.
        seed: of the starts of the mixture.
        threshold: probability of clean from which a client is clean.
        starts: of the mixture.
        iterations: of each start at most.
        regularisation: added to the variances of the standardised descriptors.
    """
    names = sorted(c for c, d in descriptors.items() if d.pairs and math.isfinite(d.mean + d.energy + d.maximum))
    notes = []
    if others := sorted(set(descriptors) - set(names)):
        notes.append(f"Not judged, since it takes finite descriptors of two observed classes: {', '.join(others)}.")
    numbers = [[d.mean, d.energy, d.maximum][: 3 if use_maximum else 2] for d in (descriptors[c] for c in names)]
    points = np.array(numbers, float)
    clean = np.full(len(names), np.nan)
    if len(names) < 2:
        notes.append("Nothing to compare: fewer than two clients can be judged.")
    elif np.ptp(points, axis=0).max() <= SAME:
        notes.append("The descriptors of all clients are identical; all count as clean.")
    else:
        points = (points - points.mean(0)) / (points.std(0) + SAME)
        means, member, converged = _mixture(points, seed, n_init=starts, max_iter=iterations, reg_covar=regularisation)
        clean = member[:, int(means[1, 0] < means[0, 0])]
        if not converged:
            notes.append("The mixture did not converge.")
    status = {c: "noisy" if p < threshold else "clean" for c, p in zip(names, clean)}
    return _verdict(descriptors, status, dict(zip(names, clean.tolist())), notes)


def vote_by_loss(losses: Tensor, clients: Sequence[str], seeds: Iterable[int] = range(9)) -> Verdict:
    """The decision of FedNoRo (IJCAI 2023): mixtures over the mean losses of the classes, by majority.

    A missing class counts as the smallest loss of that class at any client; each class is scaled to [0, 1] over the
    clients; for each seed a mixture of two Gaussians (scikit-learn's defaults) is fitted, of which the component with
    the larger sum of means is the noisy one; the most frequent noisy set decides, the earlier one among equals.
    Probabilities are the share of the seeds for which a client is clean.

    What the paper leaves open: a class with the same loss everywhere, or that no client has, tells nothing and counts
    as 0; a client without any class is undetermined; clients that are all identical are all clean, and so is a client
    that has none to be compared with, with unknown probability.

    Args:
        losses: mean loss of client k on its samples of observed class c [K, C]; NaN where it has none.
        clients: names of the K rows.
        seeds: of the mixtures, at least one.

    Raises:
        DataError: a loss is infinite.
    """
    table = losses.detach().to("cpu").double().numpy().copy()
    if table.ndim != 2 or len(table) != len(clients):
        raise ValueError(f"losses {list(losses.shape)} for {len(clients)} clients")
    if bad := [c for c, row in zip(clients, table) if np.isinf(row).any()]:
        raise DataError(f"The loss is infinite at {', '.join(bad)}.", where="losses", fix="Lower the learning rate.")
    rows = [k for k in sorted(range(len(clients)), key=lambda k: clients[k]) if not np.isnan(table[k]).all()]
    names = [clients[k] for k in rows]
    notes = []
    if others := sorted(set(clients) - set(names)):
        notes.append(f"Without any class, not judged: {', '.join(others)}.")
    points = _scaled(table[rows])
    noisy: frozenset[str] = frozenset()
    share = dict.fromkeys(names, math.nan)
    if len(names) < 2:
        notes.append("Nothing to compare: fewer than two clients can be judged.")
    elif not points.size or np.ptp(points, axis=0).max() <= SAME:
        notes.append("The losses of all clients are identical; all count as clean.")
    else:
        votes = []
        for seed in seeds:
            means, member, _ = _mixture(points, seed)
            component = int(means[1].sum() > means[0].sum())
            votes.append(frozenset(c for c, p in zip(names, member) if p.argmax() == component))
        noisy, times = Counter(votes).most_common(1)[0]
        if times < len(votes):
            notes.append(f"{times} of {len(votes)} mixtures agree on the noisy clients.")
        share = {c: sum(c not in v for v in votes) / len(votes) for c in names}
    return _verdict(clients, {c: "noisy" if c in noisy else "clean" for c in names}, share, notes)


def split_by_score(scores: Mapping[str, float], seed: int = 0) -> Verdict:
    """The decision of FedCorr (CVPR 2022): a mixture of two Gaussians over one number a client, the lower one clean.

    Clients whose score is not finite are undetermined; clients that are all identical are all clean, and so is a client
    that has none to be compared with, with unknown probability.

    Args:
        scores: by client.
        seed: of the mixture.
    """
    names = sorted(c for c, s in scores.items() if math.isfinite(s))
    notes = []
    if others := sorted(set(scores) - set(names)):
        notes.append(f"Without a score, not judged: {', '.join(others)}.")
    points = np.array([[scores[c]] for c in names], float)
    clean = np.full(len(names), np.nan)
    if len(names) < 2:
        notes.append("Nothing to compare: fewer than two clients can be judged.")
    elif np.ptp(points) <= SAME:
        notes.append("The scores of all clients are identical; all count as clean.")
    else:
        means, member, _ = _mixture(points, seed)
        clean = member[:, int(means[1, 0] < means[0, 0])]
    status = {c: "noisy" if p < 0.5 else "clean" for c, p in zip(names, clean)}
    return _verdict(scores, status, dict(zip(names, clean.tolist())), notes)


def suspicious(losses: Tensor, seed: int = 0) -> Tensor:
    """Samples of the component with the higher mean in a mixture of two Gaussians over their losses ``[N]`` (FedCorr).

    None where all losses are identical or there are fewer than two; a loss that is not finite counts as the largest
    finite one.

    Args:
        losses: of one client's samples.
        seed: of the mixture.
    """
    points = losses.detach().cpu().double().numpy()[:, None]
    finite = np.isfinite(points)
    points = np.where(finite, points, points[finite].max() if finite.any() else 0.0)
    if len(points) < 2 or np.ptp(points) <= SAME:
        return torch.zeros(len(points), dtype=torch.bool)
    means, member, _ = _mixture(points, seed)
    return torch.from_numpy(member.argmax(axis=1) == int(means[1, 0] > means[0, 0]))


def _scaled(table: np.ndarray) -> np.ndarray:
    """Each column on [0, 1], with 0 for what is missing and for columns that tell nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        low = np.nanmin(table, axis=0, initial=np.inf)
        spread = np.nanmax(table, axis=0, initial=-np.inf) - low
    telling = np.isfinite(spread) & (spread > SAME * np.maximum(1, np.abs(low)))
    out = np.zeros_like(table)
    out[:, telling] = np.nan_to_num((table[:, telling] - low[telling]) / spread[telling], nan=0.0)
    return out


def _mixture(points: np.ndarray, seed: int, **settings: Any) -> tuple[np.ndarray, np.ndarray, bool]:
    """Means [2, D] and memberships [K, 2] of two Gaussians with full covariances, and whether the fit converged."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = GaussianMixture(2, random_state=seed, **settings).fit(points)
    return model.means_, model.predict_proba(points), bool(model.converged_)


def _verdict(clients: Iterable[str], status: dict[str, str], clean: dict[str, float], notes: list[str]) -> Verdict:
    if status and "clean" not in status.values():
        notes.append("No client was judged clean.")
    names = sorted(clients)
    whole = {c: status.get(c, "undetermined") for c in names}
    return Verdict(whole, {c: clean.get(c, math.nan) for c in names}, " ".join(notes))
