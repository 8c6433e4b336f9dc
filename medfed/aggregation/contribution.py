"""FedCE's estimate of contribution: how new a client's update is, and how much the model needs it.

Jiang, Roth, Li, Yang, Zhao, Nath, Xu, Dou, Xu. Fair Federated Medical Image Segmentation via Client Contribution
Estimation. CVPR 2023.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Literal

import torch

from medfed.federation.messages import State

_BLOCK = 1 << 16
Mode = Literal["plus", "times"]


@torch.no_grad()
def gram(states: Mapping[str, State], received: State, names: Collection[str]) -> torch.Tensor:
    """Inner products ``<u_i, u_j>`` of the clients' updates ``u_k = theta_k - received``.

    Args:
        states: trained models by client.
        received: the model that they were trained from.
        names: the tensors that count: trainable parameters.

    Returns:
        ``[K, K]`` float64, in the order of ``states``.
    """
    total = torch.zeros(len(states), len(states), dtype=torch.float64)
    for name in names:
        start = received[name].reshape(-1).split(_BLOCK)
        rows = [state[name].reshape(-1).split(_BLOCK) for state in states.values()]
        for here, *parts in zip(start, *rows):
            updates = torch.stack(parts).double()
            updates -= here.to(updates)
            total += (updates @ updates.T).cpu()
    return total


def leave_one_out_cosines(products: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Cosine between each update and the weighted sum of all others, ``cos(u_k, sum_{j != k} c_j u_j)``.

    Args:
        products: ``[K, K]``, see :func:`gram`.
        weights: coefficients c ``[K]``, not all 0; their scale does not matter.

    Returns:
        ``[K]`` float64; 0 where a client's update or the sum of the others vanishes, or there are no others.
    """
    count, products = len(weights), products.double()
    others = (weights.double() / weights.double().sum()).repeat(count, 1)
    others.fill_diagonal_(0.0)  # row k: the coefficients without client k
    along = (others * products).sum(dim=1)
    length = ((others @ products) * others).sum(dim=1).clamp_min(0).sqrt()
    own = products.diagonal().clamp_min(0).sqrt()
    scale = own * length
    # An inner product of the updates carries a rounding error of this size; below it there is no direction.
    floor = 1e-15 * products.diagonal().max().clamp_min(0)
    return torch.where(scale > floor, along / scale.clamp_min(1e-300), torch.zeros_like(along)).clamp(-1, 1)


def coefficients(
    novelty: Mapping[str, float], need: Mapping[str, float], mode: Mode = "plus", floor: float = 1e-6
) -> dict[str, float]:
    """Contribution of each client: its shares of novelty and of need, added or multiplied, scaled to sum to one.

    Args:
        novelty: ``D_k = 1 - mean cosine``.
        need: ``P_k = 1 - mean score of the model without the client``.
        mode: ``plus`` (default of the official code) or ``times`` (FedISM's code).
        floor: least value before each scaling; 0 for none.

    Returns:
        Weights by client; equal where all values vanish.
    """
    one, other = _shares(novelty, floor), _shares(need, floor)
    both = {c: one[c] + other[c] if mode == "plus" else one[c] * other[c] for c in one}
    return _shares(both, floor)


def _shares(values: Mapping[str, float], floor: float) -> dict[str, float]:
    clipped = {c: max(float(v), floor, 0.0) for c, v in values.items()}
    total = math.fsum(clipped.values())
    return {c: v / total if total > 0 else 1.0 / len(clipped) for c, v in clipped.items()}


@torch.no_grad()
def minus_model(model: State, own: Mapping[str, torch.Tensor], coefficient: float) -> State:
    """The aggregated model without one client's part, ``(theta - c theta_k) / (1 - c)``.

    Only what ``own`` holds is changed. Trainable parameters belong there and buffers do not: BatchNorm's variances
    could become negative, and the network then gives NaN.

    Args:
        model: the aggregated model.
        own: the client's trainable parameters as they were aggregated.
        coefficient: c, the client's weight in the aggregation.

    Raises:
        ValueError: a coefficient outside 0 <= c < 1; at 1 there is no other client.
    """
    if not 0.0 <= coefficient < 1.0:
        raise ValueError(f"a coefficient must be at least 0 and below 1, got {coefficient}")
    changed = {
        name: torch.lerp(t.double(), own[name].to(t.device).double(), -coefficient / (1.0 - coefficient)).to(t.dtype)
        for name, t in model.items()
        if name in own
    }
    return {**model, **changed}
