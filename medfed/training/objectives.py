"""What a client minimises: ``objective(network, batch) -> loss``.

A batch is a mapping with ``image`` ``[B, C, H, W]``, ``label`` and ``index`` ``[B]`` (the row within the client's
data).  An objective is any callable of that form; a method that adds a term (proximal, distillation, corrected
labels) writes its own around :class:`ClassificationObjective`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import nn

from medfed.errors import ConfigError, nearest
from medfed.training.losses import binary_cross_entropy, cross_entropy

Batch = Mapping[str, torch.Tensor]
Objective = Callable[[nn.Module, Batch], torch.Tensor]
LOSSES = {"multiclass": cross_entropy, "multilabel": binary_cross_entropy}


class ClassificationObjective:
    """Cross-entropy (multiclass) or binary cross-entropy (multilabel), optionally adjusted to a class prior.

    Args:
        kind: ``multiclass`` or ``multilabel``.
        offsets: ``[C]`` added to the logits in training; see :mod:`medfed.training.losses`.
        label_smoothing: share of the target spread over the classes.

    Raises:
        ConfigError: unknown kind, or label smoothing with an offset of −inf, which makes every loss infinite.
    """

    def __init__(
        self,
        kind: Literal["multiclass", "multilabel"] = "multiclass",
        offsets: torch.Tensor | None = None,
        label_smoothing: float = 0.0,
    ):
        if kind not in LOSSES:
            raise ConfigError(f"'{kind}' is no kind of labels.", where="objective", fix=nearest(kind, LOSSES))
        if offsets is not None and label_smoothing and not bool(torch.isfinite(offsets).all()):
            raise ConfigError(
                "label smoothing needs finite offsets, but a class that is absent has −inf.",
                where="objective",
                fix="Use a positive floor for the class frequencies.",
            )
        self.kind, self.offsets, self.label_smoothing = kind, offsets, label_smoothing

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean loss of logits ``[B, C]``."""
        offsets = self.offsets
        if offsets is not None and offsets.device != logits.device:
            self.offsets = offsets = offsets.to(logits.device)
        return LOSSES[self.kind](logits, labels, offsets, label_smoothing=self.label_smoothing)

    def __call__(self, network: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean loss of a batch, a 0-dim tensor."""
        return self.loss(network(batch["image"]), batch["label"])
