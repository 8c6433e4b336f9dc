"""Evidence of label reliability that a client computes before any training, from frozen features.

If labels are right, they can be predicted from the features of the *other* samples about as well as the task allows; if
they were drawn at random, they cannot.  A client measures this on itself: a ridge classifier with leave-one-out
predictions in closed form (Allen, Technometrics 1974), which leave out the whole patient where patients are known.
What only a comparison tells (labels that are swapped tidily) the server reads from the class means of all clients; see
:mod:`medfed.reliability.shares`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medfed.seeding import torch_generator

RIDGE = 0.3
DIMENSION = 128
MIN_CLASS = 4  # a class with fewer samples says next to nothing when one of them is left out
MIN_MEAN = 2  # the mean of fewer samples would be a sample


@dataclass(frozen=True)
class SampleEvidence:
    """What the leave-one-out classifier says of each sample; it stays at the client.

    Args:
        predicted: int64 ``[N]``, the class predicted without the sample; -1 where nothing can be said.
        margin: float32 ``[N]``, best score of another class minus the score of the observed one: above 0 the other
            samples contradict the label.  0 where nothing can be said.
    """

    predicted: Tensor
    margin: Tensor


@dataclass(frozen=True)
class Evidence:
    """A client's evidence.

    Args:
        values: plain scalars that leave the client; see :func:`evidence`.
        tensors: tensors that leave the client, by ``group/name``; see :func:`evidence`.
        samples: evidence of each sample, which stays at the client.
    """

    values: dict[str, float | int]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    samples: SampleEvidence = field(default_factory=lambda: SampleEvidence(torch.zeros(0).long(), torch.zeros(0)))


def normalised(features: Tensor) -> Tensor:
    """Rows on the unit sphere after a signed square root (the Hellinger map for pooled ReLU features), float64 [N, d].

    It tames the few large entries of pooled features and takes out differences of overall contrast between images.
    """
    x = features.to(torch.float64)
    x = x.sign() * x.abs().sqrt()
    return x / x.norm(dim=1, keepdim=True).clamp(min=1e-12)


def projected(x: Tensor, dimension: int = DIMENSION) -> Tensor:
    """Rows after a random projection to ``dimension`` numbers, the same everywhere; unchanged where they have no more.

    Args:
        x: ``[N, d]`` float64.
        dimension: of the projection.
    """
    if x.shape[1] <= dimension:
        return x
    generator = torch_generator("projection of evidence", x.shape[1], dimension)
    matrix = torch.randn(x.shape[1], dimension, generator=generator, dtype=torch.float64) / math.sqrt(dimension)
    return x @ matrix.to(x.device)


def leave_one_out(
    features: Tensor, labels: Tensor, num_classes: int, ridge: float = RIDGE, groups: Tensor | None = None
) -> Tensor:
    r"""Scores of a class-balanced ridge classifier for each sample, fitted without that sample, or without its patient.

    Minimises :math:`\sum_i w_i \|y_i - b - W^T x_i\|^2 + \lambda \|W\|^2` with one-hot targets, no penalty on b
    and :math:`w_i = N / (C_{obs}\, n_{class(i)})`, so that each observed class weighs the same.  The residual without
    the sample is :math:`r_i / (1 - h_i)`, exactly, at the weights and the :math:`\lambda` of all samples; the residuals
    of a patient's samples g without all of them are :math:`(I - H_{gg})^{-1} r_g`, for residuals and hat matrix of the
    problem in which samples are scaled by :math:`\sqrt{w_i}`.

    Args:
        features: ``[N, d]``, finite.
        labels: observed classes, int64 ``[N]``.
        num_classes: C.
        ridge: :math:`\lambda` as a multiple of the mean eigenvalue of the weighted, centred Gram matrix ``[N, N]``.
        groups: the patient of each sample as a number ``[N]``; by default each sample is left out alone.

    Returns:
        float64 ``[N, C]``; NaN in the columns of unobserved classes, and everywhere where there is one patient only.
    """
    x = features.to(torch.float64)
    y = torch.nn.functional.one_hot(labels, num_classes).to(torch.float64)
    counts = y.sum(dim=0)
    weights = (len(labels) / ((counts > 0).sum() * counts.clamp(min=1)))[labels]
    root = weights.sqrt()[:, None]
    x = (x - (weights @ x) / weights.sum()) * root
    target = (y - (weights @ y) / weights.sum()) * root
    gram = x @ x.T
    penalty = ridge * gram.diagonal().mean()
    # Constant features: nothing but the intercept is fitted.
    hat = torch.zeros_like(gram)
    if float(penalty) > 1e-20:
        hat = torch.linalg.solve(gram + penalty * torch.eye(len(x), dtype=x.dtype, device=x.device), gram)
    hat = hat + root @ root.T / weights.sum()
    residual = target - hat @ target
    members = _members(groups, len(labels))
    alone = torch.tensor([m[0] for m in members if len(m) == 1], dtype=torch.int64, device=x.device)
    residual[alone] /= (1 - hat.diagonal()[alone].clamp(max=1 - 1e-9))[:, None]
    for rows in (m.to(x.device) for m in members if len(m) > 1):
        inner = torch.eye(len(rows), dtype=x.dtype, device=x.device) - hat[rows[:, None], rows]
        residual[rows] = torch.linalg.solve(inner, residual[rows]) if len(members) > 1 else math.nan
    scores = y - residual / root
    scores[:, counts == 0] = math.nan
    return scores


def _members(groups: Tensor | None, samples: int) -> tuple[Tensor, ...]:
    """The samples of each patient, in their order."""
    if groups is None:
        return tuple(torch.arange(samples).split(1))
    sizes = torch.unique(groups, return_counts=True)[1]
    return torch.argsort(groups, stable=True).cpu().split(sizes.tolist())


def _patients(labels: Tensor, groups: Tensor | None, num_classes: int) -> Tensor:
    """Patients of each class [C]; samples, where patients are not known."""
    if groups is not None:
        labels = torch.unique(torch.stack([groups, labels]), dim=1)[1]
    return torch.bincount(labels, minlength=num_classes)


def evidence(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    ridge: float = RIDGE,
    min_class: int = MIN_CLASS,
    dimension: int = DIMENSION,
    groups: Tensor | None = None,
) -> Evidence:
    """The evidence of one client; deterministic, without any training and without the truth.

    What leaves the client:

    - ``values``: ``evidence_samples`` (samples with finite features), ``evidence_classes`` (classes that at least
      ``min_class`` patients have) and, with two such classes or more, ``separability`` (balanced leave-one-out
      accuracy, 0 at chance and 1 at best), ``separability_error`` (its standard error) and ``contrast`` (mean
      leave-one-out score of the right minus the wrong class over all pairs of classes).
    - ``tensors``, all after a random projection to ``dimension`` numbers that is the same everywhere:
      ``evidence/counts`` [C] and ``evidence/means`` [C, dimension] of the observed classes with at least two samples
      (zero for others), ``evidence/total`` [dimension] and ``evidence/moment`` [dimension (dimension + 1) / 2], sum
      and second moment of all samples, whatever their label.  The server needs no more than the sums of the last
      two over all clients.

    Args:
        features: pooled features of the frozen network ``[N, d]``; rows that are not finite are left out.
        labels: observed classes, int64 ``[N]``.
        num_classes: C.
        ridge: strength of the ridge; see :func:`leave_one_out`.
        min_class: fewest patients of a class that counts in the leave-one-out statistics.
        dimension: of the projection; features that have no more are not projected.
        groups: the patient of each sample as a number ``[N]``: a label is predicted from other patients alone, since
            several images of one patient would support each other.  By default each sample is a patient.

    Returns:
        The evidence.
    """
    labels = labels.to(features.device)
    finite = torch.isfinite(features).all(dim=1)
    x, own = normalised(features[finite]), labels[finite]
    groups = None if groups is None else groups.to(features.device)[finite]
    counts = _patients(own, groups, num_classes)
    values: dict[str, float | int] = {
        "evidence_samples": len(own),
        "evidence_classes": int((counts >= min_class).sum()),
    }
    predicted, margin = torch.full((len(labels),), -1), torch.zeros(len(labels))
    if values["evidence_classes"] >= 2:
        usable = counts[own] >= min_class
        of_whom = None if groups is None else groups[usable]
        scores = leave_one_out(x[usable], own[usable], num_classes, ridge, of_whom).cpu()
        seen, truthful = own[usable].cpu(), counts.cpu() >= min_class
        values.update(_separability(scores, seen, truthful, counts.cpu()))
        rows = torch.nonzero(finite).flatten()[usable].cpu()
        scores = scores.nan_to_num(nan=-math.inf)
        predicted[rows] = scores.argmax(dim=1)
        best_other = scores.scatter(1, seen[:, None], -math.inf).max(dim=1).values
        margin[rows] = (best_other - scores.gather(1, seen[:, None]).flatten()).float()
    return Evidence(values, _moments(x, own, num_classes, dimension), SampleEvidence(predicted, margin))


def _separability(scores: Tensor, labels: Tensor, counted: Tensor, patients: Tensor) -> dict[str, float]:
    """Statistics of leave-one-out scores [N, C] over the classes that count [C], with patients by class [C]."""
    classes = torch.nonzero(counted).flatten()
    hit = (scores.nan_to_num(nan=-math.inf).argmax(dim=1) == labels).to(torch.float64)
    hits = torch.stack([hit[labels == c].sum() for c in classes])
    size = torch.stack([(labels == c).sum() for c in classes]).to(torch.float64)
    mean = torch.stack([scores[labels == c][:, classes].mean(dim=0) for c in classes])
    own = mean.diagonal()
    contrast = (own[:, None] + own[None, :] - mean - mean.T) / 2
    # Add-one proportions, so that no error is zero.
    share, chance = (hits + 1) / (size + 2), 1 / len(classes)
    error = math.sqrt(float((share * (1 - share) / patients[classes]).sum())) / len(classes)
    return {
        "separability": (float((hits / size).mean()) - chance) / (1 - chance),
        "separability_error": error / (1 - chance),
        "contrast": float(contrast.sum()) / (len(classes) * (len(classes) - 1)),
    }


def _moments(x: Tensor, labels: Tensor, num_classes: int, dimension: int) -> dict[str, Tensor]:
    x = projected(x, dimension)
    x, labels = x.cpu(), labels.cpu()
    counts = torch.bincount(labels, minlength=num_classes)
    counts = torch.where(counts >= MIN_MEAN, counts, 0)
    sums = torch.zeros(num_classes, x.shape[1], dtype=torch.float64).index_add_(0, labels, x)
    means = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], 0.0)
    upper = torch.triu_indices(x.shape[1], x.shape[1])
    return {
        "evidence/counts": counts.float(),
        "evidence/means": means.float(),
        "evidence/total": x.sum(dim=0).float(),
        "evidence/moment": (x.T @ x)[upper[0], upper[1]].float(),
    }
