"""Rules that turn what clients report into aggregation weights: pure functions of small vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

EPSILON = 1e-10


def by_samples(samples: Mapping[str, float]) -> dict[str, float]:
    """Weights in proportion to sample counts, a_k = N_k / sum N_j (FedAvg, McMahan et al. 2017)."""
    total = float(sum(samples.values()))
    return {client: n / total for client, n in samples.items()}


def by_sharpness(sharpness: Mapping[str, float], q: float) -> dict[str, float]:
    """Sharpness-aware weights (FedISM, Eq. 13).

    s_k = S_k / sum S_j;  w_k = (s_k + e)^q / sum (s_j + e)^q with e = 1e-10. There is no factor N_k.

    Args:
        sharpness: S_k of each client, the rise of its loss within the radius; values below 1e-10 count as 1e-10.
        q: how strongly weights follow sharpness; 0 gives equal weights.

    Returns:
        Weights that sum to one.
    """
    floored = {client: max(float(s), EPSILON) for client, s in sharpness.items()}
    largest = max(floored.values())
    total = sum(s / largest for s in floored.values())
    shares = {client: s / largest / total + EPSILON for client, s in floored.items()}
    # Relative to the largest share, so that no q can bring all powers below the smallest number.
    highest = max(shares.values())
    powers = {client: (s / highest) ** q for client, s in shares.items()}
    scale = sum(powers.values())
    return {client: p / scale for client, p in powers.items()}


def moving_average(new: Mapping[str, float], previous: Mapping[str, float] | None, beta: float) -> dict[str, float]:
    """Moving average of weights over rounds (FedISM, Eq. 14): w_t = beta w~_t + (1 - beta) w_{t-1}, w_1 = w~_1.

    The released code puts beta on the new weight; at the default 0.5 both readings agree. Clients that were not
    part of the last average enter with their new weight, and the result is scaled to sum to one over the clients
    of this round, so that partial participation has a meaning.

    Args:
        new: weights of this round's clients.
        previous: weights kept from earlier rounds, or None in the first.
        beta: share of the new weight; 1 switches the average off.
    """
    if not previous:
        return dict(new)
    mixed = {c: beta * w + (1.0 - beta) * previous.get(c, w) for c, w in new.items()}
    total = sum(mixed.values())
    return {c: w / total for c, w in mixed.items()}


def normalised(weights: Mapping[str, float], clients: Sequence[str]) -> dict[str, float]:
    """The weights of some clients, scaled to sum to one."""
    total = sum(weights[c] for c in clients)
    return {c: weights[c] / total for c in clients}
