"""Rules of fair aggregation: what clients report becomes weights. Pure functions of small vectors.

Weights that are kept from round to round cover all clients and sum to one. Where a round has some of them only, the
rule moves weight between these, and theirs together stays what it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

TINY = 1e-10


def project_to_simplex(values: Mapping[str, float]) -> dict[str, float]:
    """The point of the probability simplex nearest to a vector (Duchi et al., ICML 2008, Fig. 1).

    Sorted in falling order v_1 >= v_2 >= ..., r is the last index with ``v_r > (v_1 + ... + v_r - 1) / r``; with that
    threshold t, entries become ``max(v - t, 0)``.

    Args:
        values: finite numbers, at least one.
    """
    total, threshold = 0.0, 0.0
    for r, value in enumerate(sorted(values.values(), reverse=True), start=1):
        total += value
        if value > (total - 1.0) / r:
            threshold = (total - 1.0) / r
    return {client: max(value - threshold, 0.0) for client, value in values.items()}


def ascended(weights: Mapping[str, float], losses: Mapping[str, float], rate: float) -> dict[str, float]:
    """The adversary's step of agnostic federated learning (Mohri et al., ICML 2019): ``P(w + rate * loss)``.

    Args:
        weights: of all clients, on the simplex.
        losses: of the clients of this round; the others' entries do not rise.
        rate: step size; 0 keeps the weights.
    """
    return project_to_simplex({c: w + rate * losses.get(c, 0.0) for c, w in weights.items()})


def by_loss(losses: Mapping[str, float], q: float) -> dict[str, float]:
    """Weights ``(F_k + 1e-10)^q``, scaled to sum to one: q-FedAvg as released with FedISM; negative losses are 0."""
    logs = {c: q * math.log(max(float(loss), 0.0) + TINY) for c, loss in losses.items()}
    highest = max(logs.values())
    powers = {c: math.exp(v - highest) for c, v in logs.items()}
    total = math.fsum(powers.values())
    return {c: p / total for c, p in powers.items()}


def q_fair_share(losses: Mapping[str, float], squares: Mapping[str, float], q: float, lipschitz: float) -> float:
    """How far q-FedAvg goes from the received model towards the mean of the trained ones (Li et al., ICLR 2020).

    With ``Dw_k = L (w - w_k)``, ``D_k = F_k^q Dw_k`` and ``h_k = q F_k^(q-1) ||Dw_k||^2 + L F_k^q`` the paper has
    ``w' = w - sum D_k / sum h_k``. That is ``w' = w + share (m - w)``, where m is the mean of the w_k with weights
    F_k^q and ``share = L sum F_k^q / sum h_k``, which is at most 1.

    Args:
        losses: F_k of each client at the received model; 1e-10 is added.
        squares: ``||w - w_k||^2`` of each of them, over trainable parameters.
        q: fairness; 0 gives a share of 1.
        lipschitz: L, the inverse of the local learning rate.
    """
    floored = {c: max(float(f), 0.0) + TINY for c, f in losses.items()}
    # sum h_k / (L sum F_k^q), with the weights F_k^q / sum F_j^q, is 1 + curved.
    weights = by_loss(losses, q)
    curved = math.fsum(q * weights[c] / floored[c] * lipschitz * squares[c] for c in floored)
    return 1.0 / (1.0 + curved)


def fairfed_gaps(
    scores: Mapping[str, float], samples: Mapping[str, float], two_sided: bool = True
) -> tuple[dict[str, float], float]:
    """How far each client's score lies from the score of all (FairFed, Ezzeldin et al., AAAI 2023).

    Args:
        scores: accuracy of the received model at each client.
        samples: their sample counts; a_k = N_k / sum N_j.
        two_sided: ``|score_k - sum_j a_j score_j|``. False is the rule that was released with FedISM, where the sum was
            left out, so that the gap is ``score_k (1 - a_k)`` and weight falls with accuracy.

    Returns:
        The gaps, and the score of all.
    """
    total = math.fsum(samples[c] for c in scores)
    overall = math.fsum(samples[c] * s for c, s in scores.items()) / total
    if two_sided:
        return {c: abs(s - overall) for c, s in scores.items()}, overall
    return {c: s * (1.0 - samples[c] / total) for c, s in scores.items()}, overall


def lowered_by_gap(weights: Mapping[str, float], gaps: Mapping[str, float], beta: float) -> dict[str, float]:
    """FairFed's update: ``w_k - beta (gap_k - mean gap)``, not below 0.

    Args:
        weights: of all clients; only those with a gap change.
        gaps: of the clients of this round.
        beta: step size.
    """
    if not gaps:
        return dict(weights)
    middle = math.fsum(gaps.values()) / len(gaps)
    return _moved(weights, {c: weights[c] - beta * (gap - middle) for c, gap in gaps.items()})


def raised_by_gap(
    weights: Mapping[str, float], gaps: Mapping[str, float], step: float, centred: bool = True
) -> dict[str, float]:
    """Generalisation adjustment (FedDG-GA, Zhang et al., CVPR 2023): ``w_k + step * gap_k / max_j |gap_j|``, in 0..1.

    Args:
        weights: of all clients; only those with a gap change.
        gaps: loss of the aggregated model less loss of the client's own, of the clients of this round.
        step: what the largest gap gains before the weights are scaled to their sum.
        centred: take the mean gap off first (paper); the official code does not.

    Returns:
        The weights; unchanged where all gaps are equal (centred) or 0.
    """
    middle = math.fsum(gaps.values()) / len(gaps) if gaps and centred else 0.0
    moved = {c: gap - middle for c, gap in gaps.items()}
    largest = max((abs(gap) for gap in moved.values()), default=0.0)
    noise = 1e-12 * max((abs(gap) for gap in gaps.values()), default=0.0)
    if largest <= noise:
        return dict(weights)
    return _moved(weights, {c: min(weights[c] + step * gap / largest, 1.0) for c, gap in moved.items()})


def initial_weights(
    samples: Mapping[str, float], kept: Mapping[str, float], clients: Sequence[str]
) -> dict[str, float]:
    """Weights of all clients before a round: those kept, and sample shares for clients that are new.

    How many samples a client has that never answered is not known; it counts as an average one of those seen now. With
    everybody there in the first round these are the shares N_k / sum N_j.

    Args:
        samples: sample counts of the clients of this round.
        kept: weights from earlier rounds.
        clients: all clients.

    Returns:
        Weights by client, of those kept or seen now.
    """
    average = math.fsum(samples.values()) / len(samples) if samples else 1.0
    new = {c: n / average / len(clients) for c, n in samples.items() if c not in kept}
    return {**kept, **new}


def _moved(weights: Mapping[str, float], wanted: Mapping[str, float]) -> dict[str, float]:
    """Some weights replaced: negative ones by 0, scaled so that they keep the sum of those they replace."""
    clipped = {c: max(w, 0.0) for c, w in wanted.items()}
    before, after = math.fsum(weights[c] for c in wanted), math.fsum(clipped.values())
    if not after > 0:
        return dict(weights)
    return {**weights, **{c: w * before / after for c, w in clipped.items()}}
