"""Clients whose classes are normal clouds at known places, and labels wrong at a known rate."""

from __future__ import annotations

import torch
from torch import Tensor

from medfed.seeding import torch_generator

CLASSES, DIMENSION, APART = 4, 24, 1.2
SWAP = torch.tensor([1, 0, 3, 2])


def client(samples: int, rate: float, seed: int, swap: bool = False) -> tuple[Tensor, Tensor]:
    """Features [N, d], float64, and labels of which the share ``rate`` is another class, or the swapped one."""
    g = torch_generator("planted evidence", seed)
    truth = torch.arange(samples) % CLASSES
    x = torch.randn(samples, DIMENSION, generator=g, dtype=torch.float64)
    # Positive like pooled features, and each class stronger in axes of its own.
    x = (x * 0.3 + 1.5).abs()
    for c in range(CLASSES):
        x[truth == c, c * 3 : c * 3 + 3] += APART
    labels = truth.clone()
    wrong = torch.randperm(samples, generator=g)[: int(rate * samples)]
    shift = torch.randint(1, CLASSES, (len(wrong),), generator=g)
    labels[wrong] = SWAP[truth[wrong]] if swap else (truth[wrong] + shift) % CLASSES
    return x, labels
