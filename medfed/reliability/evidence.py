"""Evidence of label reliability that a client computes before any training, from frozen features.

If labels are right, they can be predicted from the features of the *other* samples about as well as the task allows; if
they were drawn at random, they cannot.  Each client measures this on itself: a ridge classifier with leave-one-out
predictions in closed form (Allen 1974; Cook & Weisberg 1982), balanced over its observed classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

DEFAULT_RIDGE = 1.0
MIN_CLASS = 4  # a class with fewer samples says next to nothing when one of them is left out


@dataclass(frozen=True)
class SampleEvidence:
    """What the leave-one-out classifier says of each sample; it stays at the client.

    Args:
        predicted: int64 ``[N]``, the class predicted without the sample; -1 where nothing can be said.
        margin: float32 ``[N]``, best score of another class minus the score of the observed one: above 0 the others
            contradict the label.  0 where nothing can be said.
    """

    predicted: torch.Tensor
    margin: torch.Tensor


@dataclass(frozen=True)
class Evidence:
    """A client's evidence.

    Args:
        values: plain scalars that leave the client; see :func:`evidence`.
        tensors: tensors that leave the client, by ``group/name``.
        samples: evidence of each sample, which stays at the client.
    """

    values: dict[str, float | int]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    samples: SampleEvidence = field(default_factory=lambda: SampleEvidence(torch.zeros(0).long(), torch.zeros(0)))


def leave_one_out(
    features: torch.Tensor, labels: torch.Tensor, num_classes: int, ridge: float = DEFAULT_RIDGE
) -> torch.Tensor:
    """Scores of a class-balanced ridge classifier for each sample, fitted without that sample.

    Minimises ``sum_i w_i |y_i - b - W' x_i|^2 + lambda |W|^2`` with one-hot targets, ``w_i = N / (C_obs n_class(i))``
    (each observed class weighs the same) and an unpenalised intercept; lambda is ``ridge`` times the mean weighted
    variance of a feature times N.  The leave-one-out residual is ``r_i / (1 - h_i)`` exactly, with weights and lambda
    those of all samples.

    Args:
        features: ``[N, d]``.
        labels: observed classes, int64 ``[N]``.
        num_classes: C.
        ridge: strength relative to the mean eigenvalue of the centred Gram matrix.

    Returns:
        float64 ``[N, C]``; NaN in the columns of unobserved classes.
    """
    x = features.to(torch.float64)
    y = torch.nn.functional.one_hot(labels, num_classes).to(torch.float64)
    counts = y.sum(dim=0)
    weights = (len(labels) / ((counts > 0).sum() * counts.clamp(min=1)))[labels]
    root = weights.sqrt()
    x = (x - (weights @ x) / weights.sum()) * root[:, None]
    target = (y - (weights @ y) / weights.sum()) * root[:, None]
    gram = x @ x.T
    penalty = ridge * gram.diagonal().mean()
    identity = torch.eye(len(x), dtype=torch.float64, device=x.device)
    # Constant features: nothing but the intercept is fitted.
    hat = torch.linalg.solve(gram + penalty * identity, gram) if penalty > 0 else torch.zeros_like(gram)
    leverage = (hat.diagonal() + weights / weights.sum()).clamp(max=1 - 1e-9)
    residual = (target - hat @ target) / root[:, None] / (1 - leverage)[:, None]
    scores = y - residual
    scores[:, counts == 0] = math.nan
    return scores


def evidence(
    features: torch.Tensor,
    labels: torch.Tensor,
    num_classes: int,
    *,
    ridge: float = DEFAULT_RIDGE,
    min_class: int = MIN_CLASS,
) -> Evidence:
    """The evidence of one client.

    Args:
        features: pooled features of the frozen network ``[N, d]``.
        labels: observed classes, int64 ``[N]``.
        num_classes: C.
        ridge: strength of the ridge; see :func:`leave_one_out`.
        min_class: fewest samples of a class that counts.

    Returns:
        What leaves the client is in ``values``: ``evidence_samples`` (N), ``evidence_classes`` (those that count) and,
        with two of those or more, ``separability`` (balanced leave-one-out accuracy, 0 at chance and 1 at best) and
        ``separability_error`` (its standard error).
    """
    nothing = SampleEvidence(torch.full((len(labels),), -1), torch.zeros(len(labels)))
    finite = torch.isfinite(features).all(dim=1)
    counts = torch.bincount(labels[finite], minlength=num_classes)
    counted = counts >= min_class
    values: dict[str, float | int] = {"evidence_samples": len(labels), "evidence_classes": int(counted.sum())}
    usable = finite & counted[labels]
    if values["evidence_classes"] < 2:
        return Evidence(values, samples=nothing)
    own, kept = labels[usable], torch.nonzero(usable).flatten()
    scores = leave_one_out(features[usable], own, num_classes, ridge).nan_to_num(nan=-math.inf)
    predicted = scores.argmax(dim=1)
    right = (predicted == own).to(torch.float64)
    n = counts[counted].to(torch.float64)
    hits = torch.zeros(num_classes, dtype=torch.float64).index_add_(0, own.cpu(), right.cpu())[counted.cpu()]
    classes = len(n)
    accuracy = float((hits / n).mean())
    smooth = (hits + 1) / (n + 2)
    error = math.sqrt(float((smooth * (1 - smooth) / n).sum())) / classes
    chance = 1 / classes
    values["separability"] = (accuracy - chance) / (1 - chance)
    values["separability_error"] = error / (1 - chance)
    others = scores.scatter(1, own[:, None], -math.inf).max(dim=1).values
    margin = others - scores.gather(1, own[:, None]).flatten()
    nothing.predicted[kept.cpu()] = predicted.cpu()
    nothing.margin[kept.cpu()] = margin.float().cpu()
    return Evidence(values, samples=nothing)
