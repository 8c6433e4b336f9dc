"""Features of which the right answers are known: classes share one direction and have one each of their own.

A sample of class c is ``shared * e_0 + own * e_{1 + c}`` plus a little noise within the first ``span`` axes, in a
space turned at random, so that the direction of class c is the normalised noise-free sample, and its residual
directions are the rest of the span.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from medfed.seeding import numpy_generator, torch_generator


class Planted:
    """Classes at known places."""

    def __init__(self, classes: int = 4, dimension: int = 40, span: int = 10, shared: float = 6.0, own: float = 8.0):
        self.classes, self.span = classes, span
        turn = torch.randn(dimension, dimension, generator=torch_generator("turn"), dtype=torch.float64)
        self.axes = torch.linalg.qr(turn).Q[:span]
        places = torch.zeros(classes, span, dtype=torch.float64)
        places[:, 0] = shared
        places[torch.arange(classes), 1 + torch.arange(classes)] = own
        self.places = places @ self.axes

    def features(self, classes: Tensor, seed: int, noise: float = 0.05) -> Tensor:
        """Features of samples of these classes [N, d]."""
        values = torch.randn(len(classes), self.span, generator=torch_generator("noise", seed), dtype=torch.float64)
        return self.places[classes] + noise * values @ self.axes


def corrupted(labels: Tensor, rate: float, num_classes: int, seed: int) -> Tensor:
    """Labels of which floor(rate x n) of each class are another class, drawn evenly."""
    generator = numpy_generator("corrupt", seed)
    out = labels.clone()
    for c in range(num_classes):
        rows = np.flatnonzero(labels.numpy() == c)
        chosen = generator.permutation(rows)[: int(rate * len(rows))]
        for place, row in enumerate(chosen):
            out[row] = (c + 1 + place % (num_classes - 1)) % num_classes
    return out
