"""Rules that turn what clients report into aggregation weights: pure functions of small vectors, or of models."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from medfed.federation.messages import State

EPSILON = 1e-10
_BLOCK = 1 << 16


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


def needs_of_groups(
    needs: Mapping[str, float],
    samples: Mapping[str, float],
    groups: Sequence[Sequence[str]],
    trusted: Collection[str],
) -> dict[str, float]:
    """Need of each group of clients: the size-weighted mean over its trusted members (FedMerit).

    A group without a trusted member that was measured takes the mean over the others, but at most the greatest need of
    a group with one: where labels may be wrong, a high loss proves nothing.

    Args:
        needs: of the clients that were measured.
        samples: their sample counts.
        groups: of clients, disjoint.
        trusted: clients whose labels are relied on.

    Returns:
        A need by the first member of each group in which somebody was measured.
    """
    relied: dict[str, float] = {}
    doubtful: dict[str, float] = {}
    for group in groups:
        measured = [c for c in group if c in needs]
        sure = [c for c in measured if c in trusted]
        if measured:
            taken = sure or measured
            mean = math.fsum(samples[c] * needs[c] for c in taken) / math.fsum(samples[c] for c in taken)
            (relied if sure else doubtful)[group[0]] = mean
    most = max(relied.values(), default=math.inf)
    return relied | {name: min(value, most) for name, value in doubtful.items()}


def by_merit(
    samples: Mapping[str, float],
    wrong: Mapping[str, float | None],
    needs: Mapping[str, float],
    q: float,
    classes: int,
) -> dict[str, float]:
    """Weights of FedMerit: w_k in proportion to N_k (1 - C/(C-1) wrong_k) need_k^q, with the second factor at least 0.

    Args:
        samples: N_k of each client.
        wrong: share of wrong labels of clients that are not relied on; None, where it is not known, counts as half of
            the share (C-1)/C of labels drawn at random.
        needs: of each client; empty for the same everywhere.
        q: how strongly weights follow needs.
        classes: C.

    Returns:
        Weights that sum to one; those without ``wrong`` where they would all be zero.
    """
    random = (classes - 1) / classes if classes > 1 else 1.0
    purity = {c: max(1 - (random / 2 if w is None else w) / random, 0.0) for c, w in wrong.items()}
    most = max(needs.values(), default=0.0)
    scaled = {c: (needs[c] / most) ** q if needs and most > 0 else 1.0 for c in samples}
    raw = {c: float(n) * purity.get(c, 1.0) * scaled[c] for c, n in samples.items()}
    total = math.fsum(raw.values())
    if not total > 0:
        return by_merit(samples, {}, needs, q, classes) if wrong else by_samples(samples)
    return {c: w / total for c, w in raw.items()}


@torch.no_grad()
def distances(states: Mapping[str, State], clean: Collection[str]) -> dict[str, float]:
    """Distance of every model to the nearest clean one (FedNoRo, Wu et al. IJCAI 2023; OCT-FedSIR).

    d_k = min over clean j of sum over tensors of ||theta_k - theta_j||_2, and 0 for clean clients. Norms are taken
    tensor by tensor and then added; all floating tensors count, BatchNorm statistics too.

    Args:
        states: models by client, of the same form.
        clean: clients judged clean; those without a model here do not count.

    Returns:
        A distance by client, in the order of ``states``; all 0 where no clean model is at hand.
    """
    judges = [client for client in sorted(states) if client in clean]
    return {
        client: 0.0 if client in clean or not judges else min(_between(state, states[judge]) for judge in judges)
        for client, state in states.items()
    }


def _between(one: State, other: State) -> float:
    """Sum of the norms of the differences, in float64 and in blocks that stay in the processor's cache."""

    def squares(name: str, tensor: torch.Tensor) -> Iterator[float]:
        size = _BLOCK if tensor.device.type == "cpu" else max(tensor.numel(), 1)
        for a, b in zip(tensor.reshape(-1).split(size), other[name].reshape(-1).split(size)):
            yield float(torch.linalg.vector_norm(a - b, dtype=torch.float64)) ** 2

    return math.fsum(math.sqrt(math.fsum(squares(n, t))) for n, t in one.items() if t.is_floating_point())


def distance_aware(
    states: Mapping[str, State], samples: Mapping[str, float], clean: Collection[str]
) -> dict[str, float]:
    """Weights of DaAgg (FedNoRo; OCT-FedSIR): w_k in proportion to N_k exp(-d_k / max_j d_j).

    Scale-free: the farthest model has the factor 1/e however near it is. Where no client is clean, none is noisy, or
    all models are the same, there is no distance and the weights are those of sample counts.

    Args:
        states: models by client.
        samples: sample count of each of these clients.
        clean: clients judged clean.

    Returns:
        Weights that sum to one, in the order of ``states``.

    Raises:
        ValueError: no model, or sample counts that sum to zero.
    """
    return discounted(samples, distances(states, clean))


def discounted(samples: Mapping[str, float], distance: Mapping[str, float]) -> dict[str, float]:
    """The second half of :func:`distance_aware`: weights from sample counts and distances, which name the clients."""
    largest = max(distance.values(), default=0.0) or 1.0
    raw = {client: float(samples[client]) * math.exp(-d / largest) for client, d in distance.items()}
    total = math.fsum(raw.values())
    if not total > 0:
        raise ValueError("the weights of an average sum to zero")
    return {client: w / total for client, w in raw.items()}
