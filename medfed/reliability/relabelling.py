"""Proposals of training targets: a class on which the representative and the residual criterion agree.

A proposal is a target for training and a signal of data quality, not a diagnosis.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from medfed.reliability.references import ClassReference


def scores(
    features: Tensor, references: Mapping[int, ClassReference], num_classes: int, normalise: bool = False
) -> tuple[Tensor, Tensor]:
    """How well each sample fits the reference of each class (OCT-FedSIR, Eqs. 23 and 24).

    Absolute projections are taken, as in FedSIR's code: the sign of an eigenvector means nothing.  The residual norm is
    divided by the root of the number of vectors that the class has, not of the number asked for; otherwise classes
    with few of them would win.

    Args:
        features: [N, d].
        references: class -> reference; classes may be missing.
        num_classes: number of classes C of the task.
        normalise: divide the features by their length first.  It makes the scores of different samples comparable and
            changes no decision, since each is made within one sample.

    Returns:
        S_R [N, C], large where a sample lies along the class, and S_N [N, C], small where it avoids the directions that
        the class avoids; both float64, NaN for classes without a reference, S_N also for those without residual.
    """
    rows = features.detach().to(torch.float64)
    if normalise:
        rows = torch.nn.functional.normalize(rows, dim=1)
    representative = rows.new_full((len(rows), num_classes), math.nan)
    residual = representative.clone()
    for c, reference in references.items():
        representative[:, c] = (rows @ reference.direction.to(rows)).abs()
        width = reference.residual.shape[1]
        if width:
            residual[:, c] = torch.linalg.vector_norm(rows @ reference.residual.to(rows), dim=1) / math.sqrt(width)
    return representative, residual


def agreement(representative: Tensor, residual: Tensor) -> Tensor:
    """The class on which both criteria agree (OCT-FedSIR, Eqs. 25 to 27).

    A criterion decides nothing where it has fewer than two classes to compare or where two classes share the best
    score (a sample whose features are all zero, say).  A class that has a representative direction but no residual
    basis still competes for the first criterion, so that it can prevent a change but never receive one.

    Args:
        representative: S_R [N, C], NaN where a class has none.
        residual: S_N [N, C], the same.

    Returns:
        int64 [N]: the class, or -1 without agreement.
    """
    first, second = _best(representative), _best(-residual)
    return torch.where(first == second, first, -1)


def _best(score: Tensor) -> Tensor:
    """Index of the one largest entry of each row [N], or -1."""
    known = ~torch.isnan(score)
    score = torch.where(known, score, -math.inf)
    if score.shape[1] < 2:
        return torch.full((len(score),), -1, device=score.device)
    top = score.topk(2, dim=1)
    decided = (known.sum(1) >= 2) & (top.values[:, 0] > top.values[:, 1])
    return torch.where(decided, top.indices[:, 0], -1)


def relabel(labels: Tensor, proposals: Tensor, keep: Collection[int] = ()) -> Tensor:
    """The training targets after a checkpoint (OCT-FedSIR, Eq. 27).

    Args:
        labels: observed classes [N].
        proposals: of :func:`agreement` [N].
        keep: observed classes whose labels stay.  The samples of a class without a reference can only be proposed to be
            something else; who names these classes here loses no such class to the others.  The paper keeps none.

    Returns:
        int64 [N]: the proposal where there is one, otherwise the label.
    """
    proposals = proposals.to(labels.device)
    change = proposals >= 0
    for c in keep:
        change &= labels != c
    return torch.where(change, proposals, labels.to(torch.int64))
