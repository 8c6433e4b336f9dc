"""Class references that clean clients agree on: a representative direction and a residual basis.

The representative direction is where the features of a class are; the residual basis spans directions that they hardly
use, after the cutoff of the spectrum.  Singular vectors of different clients have arbitrary signs and turns, therefore
their projectors are averaged, not they themselves (OCT-FedSIR, Eqs. 16 to 22).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from medfed.reliability.spectra import TIE, right_singular

Weighting = Literal["samples", "spectral"]
REMAINDER = 0.01


@dataclass(frozen=True)
class ClassReference:
    """The reference of one class, of one client or of all.

    Args:
        direction: representative direction, unit vector [d].
        residual: residual basis, orthonormal columns [d, L'], L' possibly 0.
        count: samples behind it.
        dominance: (first - second) / sum of the singular values: FedSIR's eigen-gap times share of the first.
    """

    direction: Tensor
    residual: Tensor
    count: int
    dominance: float = 1.0


def cutoff(values: Tensor, kappa: float = 10.0) -> int:
    """The number of dominant directions (OCT-FedSIR, Eqs. 16 and 17).

    Args:
        values: singular values, descending [r].
        kappa: how many times the mass of the rest the dominant part must have.

    Returns:
        The smallest q for which the first q values have at least kappa / (kappa + 1) of the sum of the values (not of
        their squares); a share that misses it by rounding alone counts.
    """
    if not len(values):
        return 0
    mass = torch.cumsum(values, 0)
    return int((mass < (1 - TIE) * kappa / (kappa + 1) * mass[-1]).sum()) + 1


def class_reference(features: Tensor, kappa: float = 10.0, residual: int = 12) -> ClassReference | None:
    """The reference of one class at one client (OCT-FedSIR, Eqs. 16 to 19).

    Args:
        features: of the samples of the class [n, d].
        kappa: see :func:`cutoff`.
        residual: vectors of the residual basis (the paper's L); the residual basis has fewer columns, possibly none,
            where the numerical rank ends before.

    Returns:
        The reference, float64, on the device of the features; None without samples or where all features are zero.

    Raises:
        DataError: features are not finite.
    """
    values, vectors = right_singular(features)
    if not len(values):
        return None
    q = cutoff(values, kappa)
    second = float(values[1]) if len(values) > 1 else 0.0
    dominance = (float(values[0]) - second) / float(values.sum())
    return ClassReference(vectors[:, 0].clone(), vectors[:, q : q + residual].clone(), len(features), dominance)


def consensus(parts: Sequence[ClassReference], residual: int = 12, weighting: Weighting = "samples") -> ClassReference:
    r"""What the clean clients agree on for one class (OCT-FedSIR, Eqs. 20 to 22).

    The eigenvectors of :math:`\sum_k w_k V_kV_k^\top` are the right singular vectors of the stacked
    :math:`\sqrt{w_k}V_k^\top`, so that no d x d matrix is needed.  Clients without a residual basis have no part in the
    residual projector.  Eigenvectors of equal eigenvalues (such as the residual bases of two clients of equal weight
    that share no direction) are determined only together: which of them are the first L is then arbitrary, though
    repeatable.  Eigenvectors with under a hundredth of the largest eigenvalue are left out: where features have low
    rank, the clients' residual spaces nearly coincide, and such a remainder is the representative direction itself.

    Args:
        parts: of the clients, at least one.
        residual: columns of the residual basis at most (the paper's L).
        weighting: ``samples``: w = count (OCT-FedSIR); ``spectral``: w = count x dominance (FedSIR's code).

    Returns:
        The common reference, with the sign of the direction in which the clients' directions point on average, and the
        sum of the counts.

    Raises:
        DataError: a part is not finite.
        ValueError: no parts, or parts of different dimension.
    """
    if not parts:
        raise ValueError("no part to agree on")
    like = parts[0].direction
    weights = [p.count * (p.dominance if weighting == "spectral" else 1.0) for p in parts]
    if not any(w > 0 for w in weights):
        weights = [float(p.count) for p in parts]

    def stack(bases: list[Tensor]) -> Tensor:
        columns = [math.sqrt(w) * b.to(like.device, torch.float64) for w, b in zip(weights, bases)]
        if len({len(c) for c in columns}) > 1:
            raise ValueError(f"parts of different dimensions: {sorted({len(c) for c in columns})}")
        return torch.cat(columns, 1).T

    values, direction = right_singular(stack([p.direction[:, None] for p in parts]), rank=1)
    if not len(values):
        raise ValueError("all directions are zero")
    roots, basis = right_singular(stack([p.residual for p in parts]), rank=residual)
    basis = basis[:, roots.square() >= REMAINDER * roots[:1].square()]
    mass = torch.tensor(weights, dtype=torch.float64)
    dominance = float(sum(w * p.dominance for w, p in zip(weights, parts)) / mass.sum())
    return ClassReference(direction[:, 0].clone(), basis.clone(), sum(p.count for p in parts), dominance)
