"""Losses with a client's class prior taken into account, as functions.

Logit adjustment: Menon et al., "Long-tail learning via logit adjustment", ICLR 2021, in the form of the loss: the
offset is part of training alone, logits at test time are raw.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

Reduction = Literal["mean", "sum", "none"]
FLOOR = 1e-12


def logit_adjustment_offsets(class_counts: torch.Tensor, tau: float = 1.0, floor: float = FLOOR) -> torch.Tensor:
    """Offsets ``τ log π`` of a client's class frequencies.

    Args:
        class_counts: observed samples per class ``[C]``.
        tau: temperature τ.
        floor: least frequency.  A class that the client lacks gets ``τ log(floor)``, about −27.6: its probability
            under the adjusted logits is negligible, while cross-entropy and Kullback-Leibler terms stay finite.
            0 gives −inf for it, as released with FedISM, FedNoRo and FedELC; the cross-entropy is then still finite
            for classes that the client has, a Kullback-Leibler term is not.

    Returns:
        Offsets ``[C]``, float32, to be added to logits.

    Raises:
        ValueError: counts are negative or all zero.
    """
    return (tau * _frequencies(class_counts).clamp_min(floor).log()).float()


def log_odds_offsets(positives: torch.Tensor, samples: int, tau: float = 1.0, floor: float = FLOOR) -> torch.Tensor:
    """Offsets ``τ log(π / (1 − π))`` for independent labels: the binary case of the same adjustment.

    Args:
        positives: positive samples per label ``[C]``.
        samples: number of samples.
        tau: temperature τ.
        floor: least frequency of both outcomes, so that a label without positives (or negatives) stays finite.

    Returns:
        Offsets ``[C]``, float32, to be added to logits.
    """
    if samples < 1 or bool((positives < 0).any()) or bool((positives > samples).any()):
        raise ValueError("positives per label must be between 0 and the number of samples, which must be positive")
    share = positives.double() / samples
    return (tau * (share.clamp_min(floor).log() - (1 - share).clamp_min(floor).log())).float()


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    offsets: torch.Tensor | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy of ``logits + offsets``, in float32 whatever the precision of the logits.

    Args:
        logits: ``[B, C]``.
        labels: class indices ``[B]``, or class probabilities ``[B, C]``.
        offsets: ``[C]``, see :func:`logit_adjustment_offsets`.
        reduction: ``mean``, ``sum`` or ``none`` (``[B]``).
        label_smoothing: share of the target spread evenly over the classes; needs finite offsets.

    Returns:
        The loss.
    """
    return F.cross_entropy(shifted(logits, offsets), labels, reduction=reduction, label_smoothing=label_smoothing)


def binary_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    offsets: torch.Tensor | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Binary cross-entropy of several labels a sample, averaged over the labels.

    Args:
        logits: ``[B, C]``.
        labels: zeros and ones (or probabilities) ``[B, C]``.
        offsets: ``[C]``, see :func:`log_odds_offsets`.
        reduction: over samples: ``mean``, ``sum`` or ``none`` (``[B]``).
        label_smoothing: targets are drawn towards 1/2 by this share.

    Returns:
        The loss.
    """
    targets = labels.float() * (1 - label_smoothing) + 0.5 * label_smoothing
    losses = F.binary_cross_entropy_with_logits(shifted(logits, offsets), targets, reduction="none").mean(dim=1)
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


def generalized_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    q: float = 0.7,
    offsets: torch.Tensor | None = None,
    multilabel: bool = False,
) -> torch.Tensor:
    """Mean of ``(1 − p^q) / q``, p the probability of the observed label; cross-entropy where q is 0.

    Zhang and Sabuncu, "Generalized cross entropy loss for training deep neural networks with noisy labels", NeurIPS
    2018, equation 6.  Its gradient is that of cross-entropy times ``p^q``: samples whose label the model holds for
    wrong pull less.

    Args:
        logits: ``[B, C]``.
        labels: class indices ``[B]``; zeros and ones ``[B, C]`` where ``multilabel``.
        q: between 0 and 1; 0.7 is the paper's.
        offsets: ``[C]``, added to the logits.
        multilabel: independent labels, each with its own loss; the mean is over the labels too.

    Returns:
        The loss.
    """
    logits = shifted(logits, offsets)
    if multilabel:
        losses = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none")
    else:
        losses = F.cross_entropy(logits, labels, reduction="none")
    # −expm1(−qL) / q with L = −log p: exact also where p is close to 1.
    return (losses if q == 0 else -torch.expm1(-q * losses) / q).mean()


def per_sample_cross_entropy(network: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Plain cross-entropy of each sample ``[B]``."""
    return cross_entropy(network(batch["image"]), batch["label"], reduction="none")


def per_sample_binary_cross_entropy(network: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Plain binary cross-entropy of each sample, averaged over its labels ``[B]``."""
    return binary_cross_entropy(network(batch["image"]), batch["label"], reduction="none")


def _frequencies(class_counts: torch.Tensor) -> torch.Tensor:
    counts = class_counts.double()
    total = counts.sum()
    if bool((counts < 0).any()) or not total > 0:
        raise ValueError(f"class counts must be non-negative and not all zero, got {counts.tolist()}")
    return counts / total


def shifted(logits: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """``logits + offsets``, in float32 where the logits have half precision."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return logits if offsets is None else logits + offsets
