"""What a client minimises: ``objective(network, batch) -> loss``.

A batch is a mapping with ``image`` ``[B, C, H, W]``, ``label`` and ``index`` ``[B]`` (the row within the client's
data).  An objective is any callable of that form; a method that adds a term (proximal, distillation, corrected
labels) writes its own around :class:`ClassificationObjective`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.func import functional_call

from medfed.errors import ConfigError, nearest
from medfed.training.losses import binary_cross_entropy, cross_entropy, shifted

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
        return LOSSES[self.kind](logits, labels, self._on(logits), label_smoothing=self.label_smoothing)

    def losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Loss of each sample ``[B]``."""
        offsets = self._on(logits)
        return LOSSES[self.kind](logits, labels, offsets, reduction="none", label_smoothing=self.label_smoothing)

    def adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits with the offsets, as the loss sees them."""
        return shifted(logits, self._on(logits))

    def _on(self, logits: torch.Tensor) -> torch.Tensor | None:
        """The offsets, on the device of the logits."""
        if self.offsets is not None and self.offsets.device != logits.device:
            self.offsets = self.offsets.to(logits.device)
        return self.offsets

    def __call__(self, network: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean loss of a batch, a 0-dim tensor."""
        return self.loss(network(batch["image"]), batch["label"])


class ProximalObjective:
    """Adds ``mu/2 ||w - w_t||^2`` to an objective (FedProx, Li et al., MLSys 2020, Eq. 2).

    The sum goes over trainable parameters alone: neither frozen ones nor BatchNorm statistics are held back.

    Args:
        base: the objective F.
        anchor: the received model w_t, by name; what it holds besides trainable parameters is not used.
        mu: weight of the term; 0 leaves ``base`` as it is, bit by bit.

    Raises:
        ConfigError: ``mu`` is negative, or (at the first batch) the anchor lacks a parameter.
    """

    def __init__(self, base: Objective, anchor: Mapping[str, torch.Tensor], mu: float):
        if not mu >= 0:
            raise ConfigError(f"mu must not be negative, got {mu}.", where="mu")
        self.base, self.mu, self._anchor = base, float(mu), anchor
        self._way: _Way | None = None

    def __call__(self, network: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean loss of a batch with the proximal term, a 0-dim tensor."""
        loss = self.base(network, batch)
        if not self.mu:
            return loss
        if self._way is None:
            own = {name: p for name, p in network.named_parameters() if p.requires_grad}
            _require(own, self._anchor, "anchor")
            self._way = _Way(own, self._anchor)
        return loss + 0.5 * self.mu * _SquaredLength.apply(self._way, *self._way.params)


class _Way:
    """The way from an anchor to the parameters, calculated in room that is used again.

    Fresh memory for a whole model costs more than the arithmetic.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], anchor: Mapping[str, torch.Tensor]):
        self.params = list(params.values())
        with torch.no_grad():
            self._from = [torch.empty_like(p).copy_(anchor[name]) for name, p in params.items()]
            self._room = [torch.empty_like(p) for p in self.params]

    def now(self) -> list[torch.Tensor]:
        torch._foreach_copy_(self._room, [p.detach() for p in self.params])
        torch._foreach_sub_(self._room, self._from)
        return self._room


class _SquaredLength(torch.autograd.Function):
    """``||w - w_t||^2`` of a way, with gradient ``2 (w - w_t)``."""

    @staticmethod
    def forward(ctx: Any, way: _Way, *params: torch.Tensor) -> torch.Tensor:
        ctx.way = way
        norms = torch._foreach_norm(way.now())
        return torch.stack([n.double() for n in norms]).square().sum().to(params[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        # Autograd adds or copies what others hold too, so the room can be handed out.
        way = ctx.way.now()
        torch._foreach_mul_(way, 2.0 * grads[0])
        return (None, *way)


class DistillationObjective:
    """Follows a teacher beside the labels: mean over samples of ``w_i KL(p_T || p_S) + (1 - w_i) CE(z + m, y)``.

    FedNoRo (Wu et al., IJCAI 2023), FedSIR and OCT-FedSIR train clients with noisy labels so, with the received model
    as the teacher. ``p_T = softmax(teacher logits / tau)`` without offsets, ``p_S = softmax((z + m) / tau)``, or
    ``softmax(z + m)`` where the student is not softened. There is no factor ``tau^2``. The teacher sees the very same
    augmented images, in evaluation mode, without gradient; it draws no random number and leaves the network's
    statistics alone.

    Args:
        base: the classification objective: cross-entropy with its offsets m, which must be finite.
        teacher: the teacher's state dict, of the form of the network's.
        weight: weight w of the teacher, 0 to 1; 0 is ``base`` alone, bit by bit.
        temperature: tau.
        soften_student: whether the student's logits are divided by tau too.
        mask: ``[N]`` bool by ``batch["index"]``: samples that follow the teacher; the others have w_i = 0. All
            where None.
        observed: ``[C]`` bool: classes that count in the sum of the KL; all where None. As released, FedNoRo leaves
            out classes that the client does not have.

    Raises:
        ConfigError: not multiclass, a weight or temperature out of range, infinite offsets, or (at the first batch)
            a teacher of another form.
    """

    def __init__(
        self,
        base: ClassificationObjective,
        teacher: Mapping[str, torch.Tensor],
        weight: float,
        temperature: float = 1.0,
        soften_student: bool = True,
        mask: torch.Tensor | None = None,
        observed: torch.Tensor | None = None,
    ):
        if base.kind != "multiclass":
            raise ConfigError("distillation is for tasks with one label an image.", where="objective")
        if not 0 <= weight <= 1:
            raise ConfigError(f"the teacher's weight must be between 0 and 1, got {weight}.", where="weight")
        if not temperature > 0:
            raise ConfigError(f"the temperature must be above 0, got {temperature}.", where="temperature")
        if base.offsets is not None and not bool(torch.isfinite(base.offsets).all()):
            raise ConfigError(
                "distillation needs finite offsets, but a class that is absent has −inf.",
                where="objective",
                fix="Use a positive floor for the class frequencies.",
            )
        self.base, self.weight, self.temperature = base, float(weight), float(temperature)
        self.soften_student, self.mask, self.observed = soften_student, mask, observed
        self._given = teacher
        self._teacher: dict[str, torch.Tensor] | None = None
        self._training: list[nn.Module] = []

    def __call__(self, network: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean loss of a batch, a 0-dim tensor."""
        images, labels = batch["image"], batch["label"]
        chosen = self._chosen(batch) if self.weight else None
        if chosen is None or not len(chosen):
            return self.base.loss(network(images), labels)
        whole = len(chosen) == len(images)
        soft = (self._ask(network, images if whole else images[chosen]) / self.temperature).log_softmax(dim=1)
        logits = network(images)
        hard = self.base.losses(logits, labels)
        apart = self._divergence(soft, logits if whole else logits[chosen])
        if whole:
            return (self.weight * apart + (1 - self.weight) * hard).mean()
        return hard.index_add(0, chosen, self.weight * (apart - hard[chosen])).mean()

    def _chosen(self, batch: Batch) -> torch.Tensor:
        """Positions within the batch of the samples that follow the teacher."""
        device = batch["image"].device
        if self.mask is None:
            return torch.arange(len(batch["image"]), device=device)
        return self.mask[batch["index"].to(self.mask.device)].nonzero()[:, 0].to(device)

    def _divergence(self, soft: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """``KL(p_T || p_S)`` of each sample, from the teacher's log-probabilities and the student's logits."""
        adjusted = self.base.adjusted(logits)
        student = (adjusted / self.temperature if self.soften_student else adjusted).log_softmax(dim=1)
        terms = soft.exp() * (soft - student)
        if self.observed is not None:
            terms = terms * self.observed.to(terms.device)
        return terms.sum(dim=1)

    @torch.no_grad()
    def _ask(self, network: nn.Module, images: torch.Tensor) -> torch.Tensor:
        """The teacher's logits."""
        if self._teacher is None:
            own = network.state_dict()
            _require(own, self._given, "teacher")
            # In the memory format of the network's own weights, and out of reach of whoever changes the state.
            self._teacher = {name: torch.empty_like(t).copy_(self._given[name]) for name, t in own.items()}
            self._training = [m for m in network.modules() if m.training]
        with _resting(self._training):
            logits = functional_call(network, self._teacher, (images,))
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


@contextmanager
def _resting(modules: list[nn.Module]) -> Iterator[None]:
    """Modules that are in training mode, in evaluation mode for a while."""
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module in modules:
            module.training = True


def _require(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], where: str) -> None:
    wrong = [name for name, tensor in own.items() if name not in given or given[name].shape != tensor.shape]
    if wrong:
        raise ConfigError(
            f"'{wrong[0]}' is missing or has another shape ({len(wrong)} such).",
            where=where,
            fix="Server and client must use the same bundle and overrides.",
        )
