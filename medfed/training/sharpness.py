"""Sharpness-aware mathematics: SAM, ASAM, GSAM and the sharpness of a data set, as functions without state.

Sources: SAM, Foret et al., ICLR 2021, Eq. 2; ASAM, Kwon et al., ICML 2021; GSAM, Zhuang et al., ICLR 2022, Eq. 5-7;
FedISM (IJCAI 2024), Eq. 11-13, with the constant radius that its authors ran; FedISM+ (arXiv 2503.09587).

A list of tensors stands for one long vector: all norms and inner products run over every trainable tensor together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from medfed.errors import ConfigError, nearest
from medfed.training.losses import per_sample_cross_entropy
from medfed.training.predict import evaluating

Tensors = Sequence[torch.Tensor]
PerSampleLoss = Callable[[nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]
RadiusRule = Literal["constant", "relative", "adaptive", "bounded"]

_TINY = 1e-12
SHARPNESS_FLOOR = 1e-10


def global_norm(tensors: Tensors) -> torch.Tensor:
    """Euclidean norm over all tensors together, a 0-dim tensor on their device."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors))))


def inner_product(a: Tensors, b: Tensors) -> torch.Tensor:
    """Inner product over all tensors together, a 0-dim tensor on their device."""
    return torch.stack([torch.dot(x.reshape(-1), y.reshape(-1)) for x, y in zip(a, b)]).sum()


def perturbation(
    grads: Tensors, rho: float | torch.Tensor, adaptive_params: Tensors | None = None
) -> list[torch.Tensor]:
    """The ascent step ε of length ρ along the gradient.

    SAM: ``ε = ρ g / (‖g‖ + 1e-12)``.  ASAM, with T = diag(|w|): ``ε = ρ T² g / (‖T g‖ + 1e-12)``, so that
    ``‖T⁻¹ε‖ = ρ`` and the step does not change when a layer is scaled up and the next one down.

    Args:
        grads: gradient g.
        rho: radius ρ; a float, or a 0-dim tensor on the device of the gradients.
        adaptive_params: the parameters w, for ASAM; None for SAM.

    Returns:
        ε, one tensor for each of ``grads``.
    """
    grads = list(grads)
    if adaptive_params is None:
        return list(torch._foreach_mul(grads, rho / (global_norm(grads) + _TINY)))
    size = torch._foreach_abs(list(adaptive_params))
    scaled = torch._foreach_mul(size, grads)
    rate = rho / (global_norm(scaled) + _TINY)
    return list(torch._foreach_mul(torch._foreach_mul(scaled, size), rate))


def gsam_gradient(g: Tensors, gp: Tensors, alpha: float) -> list[torch.Tensor]:
    """GSAM's descent direction ``g_p − α g_⊥``, where ``g_⊥`` is the part of g orthogonal to g_p.

    ``cos φ = <g, g_p> / (‖g‖‖g_p‖ + 1e-12)`` and ``g_⊥ = g − cos φ ‖g‖ g_p / (‖g_p‖ + 1e-12)``.
    The direction is homogeneous: with both gradients scaled by s it is scaled by s, so that a loss scale of mixed
    precision needs no undoing first.

    Args:
        g: gradient at the weights.
        gp: gradient at the perturbed weights.
        alpha: weight α of the orthogonal part; 0 gives SAM, exactly.

    Returns:
        The direction, one tensor for each of ``gp``.
    """
    gp = list(gp)
    if alpha == 0:
        return gp
    norm, norm_p = global_norm(g), global_norm(gp)
    cosine = inner_product(g, gp) / (norm * norm_p + _TINY)
    out = torch._foreach_mul(gp, 1 + alpha * cosine * norm / (norm_p + _TINY))
    torch._foreach_add_(out, list(g), alpha=-alpha)
    return list(out)


def rho_schedule(rho: float, round: int, rounds: int, power: float = 0.5) -> float:
    """FedISM+'s radius ``ρ_t = ρ (t/T)^p``, rounds t counted from 1; p = 0.5 as published."""
    if not 1 <= round <= rounds:
        raise ValueError(f"round must be in 1..{rounds}, got {round}")
    return rho * (round / rounds) ** power


def warm_up(rho: float, round: int, warm_up_rounds: int) -> float:
    """A radius that rises linearly to ρ over the first rounds (counted from 1) and stays there.

    A network whose classifier is still random has steep gradients everywhere; a full radius then perturbs it out of
    the region where its gradient means anything.
    """
    return rho if warm_up_rounds <= 0 else rho * min(1.0, round / warm_up_rounds)


@dataclass(frozen=True)
class Radius:
    """How far the weights are perturbed.

    Args:
        rho: the radius ρ > 0, in the unit of its rule.
        rule: ``constant``: ``‖ε‖ = ρ`` (SAM; FedISM's choice with ρ = 0.05 on ResNet-18).
            ``relative``: ``‖ε‖ = ρ ‖w‖``, a share of the weights' own norm; how far a network can be moved grows with
            the size of its weights (filter normalisation, Li et al., NeurIPS 2018, for the same reason).
            ``adaptive``: ``‖ε/|w|‖ = ρ`` element by element (ASAM), invariant to rescaling of layers; published
            radii for it are about ten times those of SAM.
            ``bounded``: ``‖ε‖ = min(ρ, share L / ‖g‖)``, constant but for steep points, where the loss rise that the
            gradient predicts, ``‖ε‖‖g‖``, is held to a share of the loss L itself.  Not published; for networks without
            BatchNorm, whose gradients can be a hundred times steeper: there ρ = 0.05 predicts a rise far above the
            loss, the perturbed gradient tells nothing of the point it is used at, and training drifts into a flat
            constant prediction.  Meant for training; clients measured with it would each have a radius of their own.
        share: share of the loss, for ``bounded`` alone.
    """

    rho: float = 0.05
    rule: RadiusRule = "constant"
    share: float = 0.1

    def __post_init__(self) -> None:
        if self.rule not in get_args(RadiusRule):
            raise ConfigError(
                f"'{self.rule}' is no rule for the radius.",
                where="radius",
                fix=nearest(self.rule, get_args(RadiusRule)),
            )
        for name, value in (("rho", self.rho), ("share", self.share)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"must be a positive number, got {value}.", where=name)

    def perturbation(
        self, grads: Tensors, params: Tensors, loss: torch.Tensor | float | None = None
    ) -> list[torch.Tensor]:
        """The ascent step at some weights.

        Args:
            grads: the gradient there.
            params: the weights.
            loss: the loss there, on the scale of the gradient; needed by ``bounded``.
        """
        if self.rule == "bounded":
            if loss is None:
                raise ValueError("the bounded radius needs the loss")
            return perturbation(grads, (self.share * loss / (global_norm(grads) + _TINY)).clamp(0, self.rho))
        if self.rule == "adaptive":
            return perturbation(grads, self.rho, params)
        rho = self.rho * global_norm(params) if self.rule == "relative" else self.rho
        return perturbation(grads, rho)


@dataclass(frozen=True)
class Sharpness:
    """How much the mean loss of a data set rises when the weights move by ε along its gradient.

    Args:
        loss: mean loss at the weights.
        perturbed_loss: mean loss at the perturbed weights.
        sharpness: their difference, at least 1e-10; NaN where a loss is not finite.
        gradient_norm: norm of the gradient of the mean loss.
        samples: number of samples.
    """

    loss: float
    perturbed_loss: float
    sharpness: float
    gradient_norm: float
    samples: int


def dataset_sharpness(
    network: nn.Module,
    batches: Callable[[], Iterable[Mapping[str, Any]]],
    radius: Radius | float = 0.05,
    loss: PerSampleLoss = per_sample_cross_entropy,
    *,
    resampled: bool = False,
) -> Sharpness:
    """Sharpness of a network on a data set (FedISM Eq. 13, as its authors computed it).

    ``G = Σ_i ∇ℓ_i(w)`` over the whole set, ``ε = ρ G / (‖G‖ + 1e-12)`` and
    ``S = max(mean ℓ(w + ε) − mean ℓ(w), 1e-10)``: the exact difference of losses, in evaluation mode, without logit
    adjustment.  Losses are summed in float64.  Parameters, buffers, gradients and the mode of every module are left
    exactly as they were.

    Args:
        network: the network, any mode.
        batches: gives the whole data set as batches on the network's device, anew each call.
        radius: the radius, or ρ of the constant rule.
        loss: ``loss(network, batch) -> [B]``, one loss a sample.
        resampled: the passes see different random augmentations (as the released code has it), so that the loss
            at the weights needs a pass of its own.

    Returns:
        The losses and their difference.

    Raises:
        ValueError: there are no batches.
    """
    radius = radius if isinstance(radius, Radius) else Radius(radius)
    params: list[torch.Tensor] = [p for p in network.parameters() if p.requires_grad]
    with evaluating(network):
        total, samples, gradient = _loss_and_gradient(network, batches(), params, loss)
        if resampled:
            total, _ = _total_loss(network, batches(), loss)
        kept = [p.detach().clone() for p in params]
        with torch.no_grad():
            try:
                torch._foreach_add_(params, radius.perturbation(gradient, params, total))
                perturbed, _ = _total_loss(network, batches(), loss)
            finally:
                torch._foreach_copy_(params, kept)
    at, moved = total / samples, perturbed / samples
    rise = moved - at
    return Sharpness(
        loss=at,
        perturbed_loss=moved,
        sharpness=max(rise, SHARPNESS_FLOOR) if math.isfinite(rise) else math.nan,
        gradient_norm=float(global_norm(gradient)) / samples,
        samples=samples,
    )


def _loss_and_gradient(
    network: nn.Module, batches: Iterable[Mapping[str, Any]], params: list[torch.Tensor], loss: PerSampleLoss
) -> tuple[float, int, list[torch.Tensor]]:
    gradient = [torch.zeros_like(p) for p in params]
    total: torch.Tensor | float = 0.0
    samples = 0
    for batch in batches:
        losses = loss(network, batch)
        grads = torch.autograd.grad(losses.sum(), params, allow_unused=True)
        used = [(whole, part) for whole, part in zip(gradient, grads) if part is not None]
        torch._foreach_add_([whole for whole, _ in used], [part for _, part in used])
        total = total + losses.detach().double().sum()
        samples += len(losses)
    if not samples:
        raise ValueError("the sharpness of an empty data set is not defined")
    return float(total), samples, gradient


def _total_loss(network: nn.Module, batches: Iterable[Mapping[str, Any]], loss: PerSampleLoss) -> tuple[float, int]:
    total: torch.Tensor | float = 0.0
    samples = 0
    with torch.no_grad():
        for batch in batches:
            losses = loss(network, batch)
            total = total + losses.double().sum()
            samples += len(losses)
    return float(total), samples
