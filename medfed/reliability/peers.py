"""Who has wrong labels where images differ in quality: like is compared with like.

Corrupted images shift and turn the features of a client, and make its labels harder to predict; measured against the
other clients it looks as if its labels were wrong.  Two things do not depend on labels and tell it apart: where its
features lie, and how widely they spread.  Clients whose features lie apart by several times their spread form groups of
their own, the *peers*; a difference of class mix moves a client by a fraction of that.

Within a group two estimates of a client's share of wrong labels are combined.  The differences come from the class
means of its peers (:mod:`medfed.reliability.shares`), the level from its own leave-one-out predictability, which
neither shift nor rotation changes, as a share of what its group attains at best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from medfed.reliability.grouping import two_groups
from medfed.reliability.identification import Verdict
from medfed.reliability.shares import estimate
from medfed.reliability.verdicts import (
    EvidenceLike,
    described,
    judge,
    number_of_classes,
    pooled,
    predictable,
    state_of,
    status_of,
    summaries,
)

APART = 2.5  # spreads between two clients of different quality: other class mixes lie up to 1.2 apart, noise from 4.3
ATTAINABLE = 0.6  # least that labels of bad images can be predicted, as a share of the best group's predictability
BEST = 3  # one client in so many sets what a group attains
LEAST = 5  # peers that can be judged by themselves alone
HOSPITALS = 0.1  # by which purity differs between hospitals with right labels, beyond sampling
NARROW = 0.1  # least distance of right labels and labels drawn at random, in shares of wrong labels
APPARENT = 0.3  # least difference of clean and noisy clients
FEW = 2.4  # error of class means that come from few peers, divided by the square of their number


def judge_among_peers(
    evidence: Mapping[str, EvidenceLike], previous: Mapping[str, Any] | None = None
) -> tuple[Verdict, dict[str, Any]]:
    """Judges every client in comparison with those whose images are of like quality.

    Where there is one group of peers, this is :func:`~medfed.reliability.verdicts.judge`.

    Args:
        evidence: what each client sent; see :func:`medfed.reliability.evidence.evidence`.
        previous: the state that an earlier call returned. Its groups stay, since images do not change; clients that
            it does not know form them anew, and nothing is pooled where groups have changed.

    Returns:
        The verdict, and the state for the next call: as of :func:`~medfed.reliability.verdicts.judge`, with
        ``peers``, the groups, and ``within``, the states of those that are judged by themselves as well.
    """
    known = sorted(name for name in evidence if described(evidence[name]))
    groups = [list(group) for group in (previous or {}).get("peers", [])]
    if not set(known) <= {name for group in groups for name in group}:
        groups = peer_groups({name: evidence[name] for name in known})
    earlier = previous if previous and groups == previous.get("peers") else None
    if len(groups) < 2:
        verdict, state = judge(evidence, earlier)
        return verdict, {**state, "peers": groups, "within": {}}

    present = [[name for name in group if name in known] for group in groups]
    within: dict[str, Any] = {}
    alone: dict[str, float] = {}
    wrong: dict[str, tuple[float, float]] = {}
    attained = _attained(present, evidence)
    for group, best in zip(present, attained):
        wrong |= _wrong(group, best, evidence)
        if len(group) >= LEAST:
            own = {name: evidence[name] for name in group}
            verdict, within[group[0]] = judge(own, (earlier or {}).get("within", {}).get(group[0]))
            alone |= {name: p for name, p in verdict.posterior.items() if not math.isnan(p)}

    names = sorted(wrong)
    raw, error = (np.array([wrong[name][i] for name in names]) for i in (0, 1))
    calls = np.ones(len(names), dtype=int)
    if earlier:
        raw, error, calls = pooled(names, raw, error, earlier.get("shares", {}))
    split = two_groups(raw, error)
    chance = 1 - 1 / number_of_classes(evidence.values())
    state = state_of(sorted(evidence), names, raw, error, calls, (split.centre, 1.0), chance, ())
    status = dict.fromkeys(sorted(evidence), "undetermined")
    posterior = dict.fromkeys(sorted(evidence), math.nan)
    notes = [f"{len(groups)} groups of clients with images of different quality."]
    if not predictable([evidence[name] for name in sorted(evidence)]):
        notes.append("No client's labels can be predicted better than chance: none can be called clean.")
    else:
        judged = dict(zip(names, split.clean)) | judged_by_others(names, raw, error, alone)
        for name in names:
            posterior[name] = min(float(judged[name]), alone.get(name, 1.0))
            status[name] = status_of(posterior[name])
        for group in present:
            if not predictable([evidence[name] for name in group]):
                # Their images may be too bad as well as their labels wrong.
                status.update((name, "undetermined") for name in group if status[name] == "noisy")
    return Verdict(status, posterior, " ".join(notes)), {**state, "peers": groups, "within": within}


def peer_groups(evidence: Mapping[str, EvidenceLike]) -> list[list[str]]:
    """Clients whose features lie together, whatever their labels: connected by distances below :data:`APART`.

    Args:
        evidence: of clients that sent any.

    Returns:
        Groups of names, each sorted, the largest first.
    """
    names = sorted(evidence)
    clouds = {name: _cloud(evidence[name]) for name in names}
    groups: list[list[str]] = []
    for name in names:
        near = [g for g in groups if any(distance(clouds[name], clouds[other]) < APART for other in g)]
        groups = [g for g in groups if g not in near] + [sorted([name, *(n for g in near for n in g)])]
    return sorted(groups, key=lambda group: (-len(group), group))


Cloud = tuple[int, np.ndarray, np.ndarray]


def distance(one: Cloud, other: Cloud) -> float:
    """How far two clouds of features lie apart along the line between their means, in spreads along it.

    ``(|d|^2 - tr(S_1)/n_1 - tr(S_2)/n_2) / sqrt(d' (S_1 + S_2)/2 d)`` with d the difference of the means: the squared
    length without what sampling alone adds, at least 0.

    Args:
        one: samples, mean ``[r]`` and covariance ``[r, r]``.
        other: likewise.
    """
    (n, mean, spread), (m, centre, width) = one, other
    d = mean - centre
    length = max(float(d @ d) - float(np.trace(spread)) / n - float(np.trace(width)) / m, 0.0)
    return length / math.sqrt(max(float(d @ (spread + width) @ d) / 2, 1e-30))


def _cloud(one: EvidenceLike) -> Cloud:
    n = int(one.values["evidence_samples"])
    mean = np.asarray(one.tensors["evidence/total"], dtype=np.float64) / n
    second = np.zeros((len(mean), len(mean)))
    second[np.triu_indices(len(mean))] = np.asarray(one.tensors["evidence/moment"], dtype=np.float64) / n
    second = second + np.triu(second, 1).T
    return n, mean, second - np.outer(mean, mean)


def _attained(groups: Sequence[Sequence[str]], evidence: Mapping[str, EvidenceLike]) -> list[float]:
    """How well labels can be predicted in each group at best; bad images are taken to cost a limited share."""
    tops = []
    for group in groups:
        values = sorted(_separability(evidence[name])[0] for name in group if _separable(evidence[name]))
        tops.append(float(np.mean(values[-max(1, len(values) // BEST) :])) if values else 0.0)
    return [max(top, ATTAINABLE * max(tops), 1e-6) for top in tops]


def _wrong(
    group: Sequence[str], attained: float, evidence: Mapping[str, EvidenceLike]
) -> dict[str, tuple[float, float]]:
    """What labels of each client of a group lack in purity, and its standard error, of two estimates combined.

    It is 0 of right labels and 1 of labels drawn at random, which are wrong in (C-1)/C of all cases.
    """
    chance = 1 - 1 / number_of_classes(evidence.values())
    level: dict[str, tuple[float, float]] = {}
    for name in group:
        if _separable(evidence[name]):
            value, error = _separability(evidence[name])
            # Wrong labels enter twice, in fitting and in testing.
            purity = math.sqrt(min(max(value / attained, 0.0), 1.2))
            level[name] = (1 - purity, math.hypot(error / attained / (2 * max(purity, 0.5)), HOSPITALS))
    if len(group) < 2:
        return level
    found = estimate(summaries([evidence[name] for name in group]))
    shares = {
        name: (float(wrong), math.hypot(float(error), FEW / len(group) ** 2))
        for name, wrong, error in zip(group, found.wrong, found.error)
    }
    both = [name for name in group if name in level]
    if both:
        # All shares are too large by the same amount; the level says by how much.
        mean_share, mean_level = (float(np.mean([of[name][0] for name in both])) for of in (shares, level))
        base = (mean_share - chance * mean_level) / (1 - min(mean_level, 0.99))
    else:
        base = min(wrong for wrong, _ in shares.values())
    width = chance - min(max(base, 0.0), chance - NARROW)
    scaled = {name: (1 - (chance - wrong) / width, error / width) for name, (wrong, error) in shares.items()}
    return {name: _combined([of[name] for of in (level, scaled) if name in of]) for name in group}


def judged_by_others(
    names: Sequence[str], raw: np.ndarray, error: np.ndarray, alone: Mapping[str, float]
) -> dict[str, float]:
    """Who is clean in the small groups, where the large ones tell what clean and noisy clients look like.

    Nobody is accused for nothing but being different (:mod:`medfed.reliability.grouping`); once noisy clients are
    known to be there, others need less evidence.  Bayes' rule with two normals, centred at what the two kinds have in
    the large groups, and even odds: how many are clean there says little of other hospitals.

    Args:
        names: of all clients.
        raw: their shares of wrong labels.
        error: of these.
        alone: probability of clean, of clients in groups that were judged by themselves.

    Returns:
        Probability of clean of the clients that ``alone`` does not name; empty where those are all clean or all noisy.
    """
    at = {name: k for k, name in enumerate(names)}
    clean = [at[name] for name, p in alone.items() if name in at and status_of(p) == "clean"]
    noisy = [at[name] for name, p in alone.items() if name in at and status_of(p) == "noisy"]
    if not clean or not noisy:
        return {}
    weights = 1 / error**2
    low = float(np.average(raw[clean], weights=weights[clean]))
    high = max(float(np.average(raw[noisy], weights=weights[noisy])), low + APPARENT)
    found = {}
    for name in names:
        if name not in alone:
            k = at[name]
            # Whoever is beyond a centre is of its kind.
            distance = [min(max(raw[k], low), high) - centre for centre in (low, high)]
            odds = (distance[1] ** 2 - distance[0] ** 2) / (2 * error[k] ** 2)
            found[name] = 1 / (1 + math.exp(-max(min(odds, 500.0), -500.0)))
    return found


def _combined(estimates: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Mean weighted by inverse variance, and its error."""
    weights = [1 / error**2 for _, error in estimates]
    total = math.fsum(weights)
    return math.fsum(w * value for w, (value, _) in zip(weights, estimates)) / total, total**-0.5


def _separable(one: EvidenceLike) -> bool:
    return "separability" in one.values


def _separability(one: EvidenceLike) -> tuple[float, float]:
    return float(one.values["separability"]), float(one.values["separability_error"])
