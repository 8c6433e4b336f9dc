"""Which class a sample probably has, from what its features look like *and* what its label says.

A label that is wrong in 60 % of cases still says something, above all where mistakes have a pattern (two classes that
are exchanged).  With features x and observed label o, and mistakes that depend on the true class c alone::

    P(c | x, o)  ~  p(x | c) J(c, o)

The likelihood p(x | c) is that of normal classes with a common covariance, from moments that clients with right labels
send: means of classes and the scatter within them.  The client itself estimates the joint distribution J of true and
observed classes, and how its images differ from the others', by expectation-maximisation on its own samples (Dempster,
Laird, Rubin, J. R. Statist. Soc. B 1977), with a prior that half believes its labels.  The mode of the posterior is the
target with the smallest probability of being wrong.

A proposal is a target for training and a signal of data quality, not a diagnosis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medfed.reliability.evidence import DIMENSION, MIN_MEAN, normalised, projected

SHRINK = 1.0  # of the scatter within classes, relative to its mean eigenvalue
SHARPNESS = 0.3  # of the log-likelihood: features are not normal, and a sharp posterior follows a poor reference
PRIOR = 1.0  # samples that the prior of what an observed class is made of is worth,
RIGHT = 0.5  # and the share of them that are right; the rest is spread over all classes
OWN = 0.3  # what a sample of the client counts in the means, beside one of the reference
STEPS = 30


@dataclass(frozen=True)
class ClassMoments:
    """What clients with right labels say of the classes.

    Args:
        counts: samples behind each mean, float64 ``[C]``; 0 where a class is not described.
        means: float64 ``[C, p]``; 0 where a class is not described.
        scatter: float64 ``[p, p]``, sum of the outer squares of the samples' distances to the mean of their class.
    """

    counts: Tensor
    means: Tensor
    scatter: Tensor

    def to_tensors(self) -> dict[str, Tensor]:
        """For a message, float32: ``counts`` [C], ``means`` [C, p], ``scatter`` [p (p + 1) / 2]."""
        upper = torch.triu_indices(*self.scatter.shape)
        packed = self.scatter[upper[0], upper[1]]
        return {"counts": self.counts.float(), "means": self.means.float(), "scatter": packed.float()}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], num_classes: int) -> ClassMoments:
        """From a message.

        Raises:
            KeyError: a part is missing.
            ValueError: parts do not fit together or the classes, or are no moments of finite samples.
        """
        counts, means, packed = (tensors[name].to("cpu", torch.float64) for name in ("counts", "means", "scatter"))
        size = means.shape[-1] if means.ndim else 0
        if counts.shape != (num_classes,) or means.shape != (num_classes, size):
            raise ValueError(f"counts {list(counts.shape)} and means {list(means.shape)} of {num_classes} classes")
        if packed.shape != (size * (size + 1) // 2,):
            raise ValueError(f"scatter {list(packed.shape)} of {size} numbers")
        if not all(bool(torch.isfinite(t).all()) for t in (counts, means, packed)) or bool((counts < 0).any()):
            raise ValueError("numbers that are not finite, or counts below 0")
        upper = torch.triu_indices(size, size)
        scatter = torch.zeros(size, size, dtype=torch.float64)
        scatter[upper[0], upper[1]] = packed
        if bool((scatter.diagonal() < 0).any()):
            raise ValueError("negative scatter")
        return cls(counts, means, scatter + scatter.triu(1).T)


@dataclass(frozen=True)
class Posterior:
    """What a client's samples probably are.

    Args:
        probability: float64 ``[N, C]``, rows sum to 1; NaN in rows of samples of which nothing can be said (features
            not finite; observed classes without a mean; fewer than two classes with one), 0 for classes without one.
        joint: float64 ``[C, C]``, estimated share of the samples with true class (first index) and observed class;
            sums to 1, or to 0 where nothing can be said.
    """

    probability: Tensor
    joint: Tensor


def class_moments(features: Tensor, labels: Tensor, num_classes: int, dimension: int = DIMENSION) -> ClassMoments:
    """The moments of one client's classes.

    Features are brought to the unit sphere and projected as for :func:`medfed.reliability.evidence.evidence`.  Classes
    with a single sample are left out: their mean would be a sample.

    Args:
        features: ``[N, d]``; rows that are not finite are left out.
        labels: observed classes, int64 ``[N]``.
        num_classes: C.
        dimension: p, of the projection; features that have no more are not projected.

    Returns:
        The moments, on the CPU.
    """
    x, finite = _prepared(features, dimension)
    x, own = x[finite], labels.cpu()[finite]
    counts = torch.bincount(own, minlength=num_classes)
    counts = torch.where(counts >= MIN_MEAN, counts, 0)
    sums = torch.zeros(num_classes, x.shape[1], dtype=torch.float64).index_add_(0, own, x)
    means = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], 0.0)
    kept = counts[own] > 0
    apart = x[kept] - means[own[kept]]
    return ClassMoments(counts.to(torch.float64), means, apart.T @ apart)


def pooled(parts: Sequence[ClassMoments]) -> ClassMoments:
    """The moments of the samples of several clients together.

    Only sums over the clients are needed of counts n, of n m, and of scatter + sum over classes of n m m', so that a
    secure sum would do.

    Raises:
        ValueError: no parts, or parts of different shapes.
    """
    if not parts:
        raise ValueError("no moments to pool")
    if len({(p.means.shape, p.counts.shape, p.scatter.shape) for p in parts}) > 1:
        raise ValueError("moments of different shapes")
    counts = torch.stack([p.counts for p in parts]).sum(dim=0)
    sums = torch.stack([p.counts[:, None] * p.means for p in parts]).sum(dim=0)
    means = sums / counts.clamp(min=1)[:, None]
    scatter = torch.zeros_like(parts[0].scatter)
    for p in parts:
        apart = torch.where(p.counts[:, None] > 0, p.means - means, 0.0)
        scatter = scatter + p.scatter + (apart.T * p.counts) @ apart
    return ClassMoments(counts, means, scatter)


def posterior(features: Tensor, observed: Tensor, moments: ClassMoments, inside: bool = False) -> Posterior:
    r"""The posterior of the true classes of one client's samples.

    The log-likelihood of class c is :math:`-\frac s2 d_c^2` with
    :math:`d_c^2 = (x-m_c)^\top(S+\lambda I)^{-1}(x-m_c)`, S the covariance within classes, :math:`\lambda` its mean
    eigenvalue and s = 0.3.  Expectation (the posterior of each sample) and maximisation (J, and the means, in which the
    samples of the reference count more than the client's own) alternate.  A distance is always to the mean without the
    sample itself.

    Args:
        features: ``[N, d]``.
        observed: observed classes, int64 ``[N]``.
        moments: of the reference, of the same features.
        inside: the samples are part of the moments themselves, under their observed classes.  The means then stay.

    Returns:
        The posterior, on the CPU.  Repeatable: nothing is drawn.
    """
    counts, size = moments.counts, len(moments.counts)
    x, finite = _prepared(features, moments.means.shape[1])
    own, known = observed.cpu(), counts > 0
    usable = finite & known[own]
    probability = torch.full((len(x), size), math.nan, dtype=torch.float64)
    if int(known.sum()) < 2 or not bool(usable.any()):
        return Posterior(probability, torch.zeros(size, size, dtype=torch.float64))
    own = own[usable]
    x, reference = _white(x[usable], moments)
    label = torch.nn.functional.one_hot(own, size).to(torch.float64)
    prior = RIGHT * torch.eye(size, dtype=torch.float64) + (1 - RIGHT) / known.sum()
    prior = PRIOR * prior * (known[:, None] & (label.sum(dim=0) > 0))
    joint = prior * (label.sum(dim=0) + PRIOR)
    squares = x.square().sum(dim=1, keepdim=True)
    # How much of each sample is in each mean.
    means, weight, part = reference, counts, label if inside else torch.zeros_like(label)
    for _ in range(STEPS):
        rest = (weight - part).clamp(min=1e-9)
        far = squares + means.square().sum(dim=1) - 2 * x @ means.T
        far = far * (weight / rest).square()
        fit = torch.where(known, -0.5 * SHARPNESS * far, -math.inf)
        inner = torch.softmax(fit + (joint / joint.sum()).T[own].log(), dim=1)
        joint = prior + inner.T @ label
        if not inside:
            part = OWN * inner
            weight = counts + part.sum(dim=0)
            means = (counts[:, None] * reference + part.T @ x) / weight.clamp(min=1)[:, None]
    probability[usable] = inner
    return Posterior(probability, joint / joint.sum())


def _white(x: Tensor, moments: ClassMoments) -> tuple[Tensor, Tensor]:
    """Samples ``[N, p]`` and means ``[C, p]`` in coordinates in which classes are round."""
    freedom = float((moments.counts.sum() - (moments.counts > 0).sum()).clamp(min=1))
    covariance = moments.scatter / freedom
    level = max(float(covariance.diagonal().mean()) * SHRINK, 1e-12)
    root = torch.linalg.cholesky(covariance + level * torch.eye(len(covariance), dtype=torch.float64))
    white = torch.linalg.solve_triangular(root, torch.cat([x, moments.means]).T, upper=False).T
    return white[: len(x)], white[len(x) :]


def proposals(probability: Tensor, confidence: float = 0.0) -> Tensor:
    """The most probable class of each sample.

    Args:
        probability: of :class:`Posterior`, ``[N, C]``.
        confidence: a class with a smaller probability is not proposed.

    Returns:
        int64 ``[N]``: the class, or -1 where nothing can be said or two classes are equally probable.
    """
    if probability.shape[1] < 2:
        return torch.full((len(probability),), -1)
    known = probability.nan_to_num(nan=0.0)
    top = known.topk(2, dim=1)
    decided = (top.values[:, 0] > top.values[:, 1]) & (top.values[:, 0] >= confidence)
    return torch.where(decided, top.indices[:, 0], -1)


def _prepared(features: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
    """Normalised and projected features ``[N, p]`` with zeros for rows that are not finite, and which rows are."""
    finite = torch.isfinite(features).all(dim=1)
    x = projected(normalised(torch.where(finite[:, None], features, 0.0)), dimension)
    return x.cpu(), finite.cpu()
