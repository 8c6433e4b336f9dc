"""Local intrinsic dimension: how fast a sample's neighbourhood grows.

Predictions of a network that fits wrong labels spread over more directions than those of one that fits right ones
(Ma et al., ICML 2018), which FedCorr uses to tell clients apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 512
_SMALL = 1e-6


def local_intrinsic_dimension(points: Tensor, neighbours: int = 20, released: bool = False) -> Tensor:
    """Maximum-likelihood estimate of the local intrinsic dimension of each point among the others.

    ``-1 / mean_j log(r_j / r_k)`` with the Euclidean distances r_1 <= ... <= r_k to the k nearest others (Levina and
    Bickel 2004; Amsaleg et al. 2015). Of fewer than k others, all are taken. Neighbours at distance 0 say nothing about
    growth and are left out; a point all of whose neighbours coincide with it has dimension 0.

    Args:
        points: ``[N, d]``.
        neighbours: k, at least 2.
        released: the number that FedCorr's code computes: ``-20 / (sum_j log(r_j / (r_k + 1e-6)) + 1e-6)``, where
            20 stands for k also where there are fewer neighbours, and a coinciding neighbour gives 0.

    Returns:
        ``[N]`` float64; NaN where neighbours do not tell (fewer than two, or all equally far).
    """
    points = points.detach().double()
    count = min(neighbours, len(points) - 1)
    if count < 2:
        return torch.full((len(points),), torch.nan, dtype=torch.float64)
    parts = []
    for start in range(0, len(points), _BLOCK):
        block = points[start : start + _BLOCK]
        apart = torch.cdist(block, points, compute_mode="donot_use_mm_for_euclid_dist")
        rows = torch.arange(len(block))
        apart[rows, rows + start] = torch.inf  # not its own neighbour
        nearest = apart.topk(count, largest=False).values
        parts.append(_released(nearest, neighbours) if released else _likely(nearest))
    return torch.cat(parts)


def _likely(nearest: Tensor) -> Tensor:
    """From distances ``[N, k]`` in ascending order."""
    counted = nearest > 0
    farthest = nearest[:, -1:]
    logs = torch.where(counted, nearest / farthest, 1.0).log().sum(dim=1)
    dimension = -counted.sum(dim=1) / logs
    dimension = torch.where(torch.isfinite(dimension), dimension, torch.nan)
    return torch.where(farthest[:, 0] > 0, dimension, 0.0)


def _released(nearest: Tensor, neighbours: int) -> Tensor:
    return -neighbours / ((nearest / (nearest[:, -1:] + _SMALL)).log().sum(dim=1) + _SMALL)
