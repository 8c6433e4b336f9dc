"""Directions of the classes in feature space, and how alike they are at one client.

A class of a client is the matrix of its features, one row a sample, uncentred.  Its leading right singular vector is
the direction of the class; the cosines between the directions of a client's classes say how mixed its labels are
(OCT-FedSIR, Eqs. 11 to 15; FedSIR, arXiv 2604.20825).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from medfed.errors import DataError

EPS = torch.finfo(torch.float64).eps
TIE = 1e-9


def right_singular(features: Tensor, rank: int | None = None) -> tuple[Tensor, Tensor]:
    r"""Singular values and right singular vectors, from the smaller of the two Gram matrices.

    The Gram matrix squares the singular values, so that :math:`\sigma_j` drowns in rounding below about
    :math:`\sqrt\epsilon\,\sigma_1`.  Directions with :math:`\sigma_j^2\le\max(n,d)\,\epsilon\,\sigma_1^2` (below 4e-7
    of the largest for d = 512; features in float32 carry no more) are therefore called zero and left out.  Of the
    others:

    - the vectors are orthonormal to a few :math:`\epsilon`;
    - vector j is off by about :math:`\epsilon\,\sigma_1^2/|\sigma_j^2-\sigma_i^2|` towards vector i (a decomposition
      without squaring: :math:`\epsilon\,\sigma_1/|\sigma_j-\sigma_i|`); of equal values only the span is determined;
    - the values are not roots of eigenvalues but are measured along the vectors, so that their error is that of the
      vectors squared, plus a few :math:`\epsilon\,\sigma_1`.

    The same input gives the same bits on the same machine with the same number of threads.

    Args:
        features: [n, d], finite; any floating type, on any device.
        rank: how many to return at most.

    Returns:
        The singular values, descending [r], and the vectors as columns [d, r], float64, on the device of the features.
        Each vector has the sign for which the mean projection of the rows is not negative; where that is zero, the
        sign with the larger sum of entries; where that is zero too, a positive first one of the largest entries.

    Raises:
        DataError: the features are not finite.
        ValueError: they are not a matrix of floating numbers.
    """
    rows, exponent = _scaled(features)
    n, d = rows.shape
    if n == 0 or d == 0:
        return rows.new_zeros(0), rows.new_zeros(d, 0)
    energy, basis = torch.linalg.eigh(rows @ rows.T if n <= d else rows.T @ rows)
    energy, basis = energy.flip(0), basis.flip(1)
    kept = int((energy > max(n, d) * EPS * energy[0].clamp(min=0)).sum())
    basis = basis[:, : kept if rank is None else min(kept, rank)]
    if n <= d:
        vectors, values = _orthonormal(rows.T @ basis)
    else:
        vectors, values = basis, torch.linalg.vector_norm(rows @ basis, dim=0)
    values, order = torch.sort(values, descending=True, stable=True)
    vectors = vectors[:, order]
    return torch.ldexp(values, values.new_tensor(exponent)), vectors * _signs(rows, values, vectors)


def _orthonormal(images: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal columns and lengths, by Cholesky QR, of nearly orthogonal columns of very different lengths.

    Rounding tilts the images of weak directions towards the strong ones, which come first; this takes it out.
    """
    lengths = torch.linalg.vector_norm(images, dim=0)
    unit = images / lengths
    lower, failed = torch.linalg.cholesky_ex(unit.T @ unit)
    if failed:
        unit, upper = torch.linalg.qr(images)
        return unit, upper.diagonal().abs()
    unit = torch.linalg.solve_triangular(lower.T, unit, upper=True, left=False)
    return unit, lengths * lower.diagonal()


def _scaled(features: Tensor) -> tuple[Tensor, int]:
    """The features in float64, divided exactly by a power of two so that no square overflows or vanishes."""
    if features.ndim != 2 or not features.is_floating_point():
        raise ValueError(f"features must be a floating [n, d], not {features.dtype} {list(features.shape)}")
    bad = int((~torch.isfinite(features)).sum())
    if bad:
        raise DataError(
            f"{bad} of {features.numel()} numbers are not finite.",
            where="features",
            fix="The model that made them has probably diverged: lower the learning rate.",
        )
    rows = features.detach().to(torch.float64)
    largest = float(rows.abs().max()) if rows.numel() else 0.0
    exponent = max(-1000, min(1000, math.frexp(largest)[1]))
    return rows * 2.0**-exponent, exponent


def _signs(rows: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """+1 or -1 for each column."""
    mean = rows.sum(0) @ vectors
    total = vectors.sum(0)
    size = vectors.abs()
    first = (size >= (1 - TIE) * size.amax(0, keepdim=True)).to(torch.uint8).argmax(0)
    entry = vectors.gather(0, first[None])[0]
    n, d = rows.shape
    decided = torch.where(total.abs() > TIE * math.sqrt(d), total, entry)
    decided = torch.where(mean.abs() > TIE * math.sqrt(n) * values, mean, decided)
    return torch.where(decided < 0, -1.0, 1.0).to(vectors)


def class_directions(features: Tensor, labels: Tensor, num_classes: int, min_samples: int = 2) -> dict[int, Tensor]:
    """The leading right singular vector of each class (OCT-FedSIR, Eqs. 11 and 12).

    Args:
        features: [N, d].
        labels: observed classes [N], integers.
        num_classes: number of classes of the task.
        min_samples: classes with fewer samples have no direction.

    Returns:
        Class -> unit vector [d], float64; without classes that are too small or whose features are all zero.

    Raises:
        DataError: features are not finite.
        ValueError: the labels do not fit the features or the classes.
    """
    check_labels(features, labels, num_classes)
    found = {}
    for c in range(num_classes):
        rows = features[(labels == c).to(features.device)]
        if len(rows) >= max(1, min_samples):
            _, vectors = right_singular(rows, rank=1)
            if vectors.shape[1]:
                found[c] = vectors[:, 0]
    return found


def check_labels(features: Tensor, labels: Tensor, num_classes: int) -> None:
    """Refuses labels that are not one class index for each feature vector.

    Raises:
        ValueError: what does not fit.
    """
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"labels must be integers [N], one class a sample, not {labels.dtype} {list(labels.shape)}")
    if features.ndim != 2 or len(labels) != len(features):
        raise ValueError(f"{len(labels)} labels for features {list(features.shape)}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(f"labels from {int(labels.min())} to {int(labels.max())} for {num_classes} classes")


def balanced(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Indices of the class-balanced loader: every observed class is oversampled to the size of the largest.

    Args:
        labels: observed classes [N].
        generator: draws what is repeated.

    Returns:
        int64 [observed classes x size of the largest], class by class: first the samples of the class, each once, then
        those drawn from them with replacement.
    """
    own = [torch.nonzero(labels == c).flatten().cpu() for c in torch.unique(labels)]
    if not own:
        return torch.zeros(0, dtype=torch.int64)
    largest = max(len(i) for i in own)
    drawn = [i[torch.randint(len(i), (largest - len(i),), generator=generator)] for i in own]
    return torch.cat([part for pair in zip(own, drawn) for part in pair])


def similarity(directions: Mapping[int, Tensor], num_classes: int) -> Tensor:
    """Cosines between the directions of the classes (OCT-FedSIR, Eq. 12).

    Returns:
        [C, C] float64 on the CPU, symmetric, in [-1, 1], with ones on the diagonal; NaN in the rows and columns of
        classes without a direction.
    """
    out = torch.full((num_classes, num_classes), math.nan, dtype=torch.float64)
    if directions:
        classes = torch.tensor(sorted(directions))
        rows = torch.stack([directions[int(c)].detach().to("cpu", torch.float64) for c in classes])
        rows = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        cosines = rows @ rows.T
        cosines = ((cosines + cosines.T) / 2).clamp(-1, 1).fill_diagonal_(1)
        out[classes[:, None], classes] = cosines
    return out


@dataclass(frozen=True)
class Descriptors:
    """What a client sends of its class similarities: three numbers (OCT-FedSIR, Eqs. 13 to 15).

    Args:
        mean: of the off-diagonal cosines.
        energy: mean of their squares.
        maximum: largest of them.
        pairs: ordered pairs of different observed classes; without any, the three numbers are NaN.
    """

    mean: float
    energy: float
    maximum: float
    pairs: int


def descriptors(similarity: Tensor, absolute: bool = False) -> Descriptors:
    """Summarises a similarity matrix.

    Args:
        similarity: [C, C] as :func:`similarity` gives it.
        absolute: take absolute cosines, as FedSIR does.
    """
    others = similarity[~torch.eye(len(similarity), dtype=torch.bool, device=similarity.device)].to(torch.float64)
    cosines = others[~torch.isnan(others)]
    if absolute:
        cosines = cosines.abs()
    if not len(cosines):
        return Descriptors(math.nan, math.nan, math.nan, 0)
    return Descriptors(float(cosines.mean()), float(cosines.square().mean()), float(cosines.max()), len(cosines))
