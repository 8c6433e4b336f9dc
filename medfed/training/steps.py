"""Optimiser steps: what a MONAI ``SupervisedTrainer`` does with one batch, as its ``iteration_update``.

In a bundle::

    iteration_update:
      _target_: medfed.training.steps.SharpnessAwareStep
      rho: 0.05

The loss is ``engine.objective(network, batch)`` where the engine has an objective, as medfed's own trainer does; in any
other trainer it is the engine's ``loss_function`` of the network's prediction.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from medfed.errors import ConfigError
from medfed.training.sharpness import Radius, RadiusRule, global_norm, gsam_gradient

logger = logging.getLogger(__name__)


class Snapshot:
    """A copy of tensors, to be put back bit by bit.

    Args:
        tensors: the tensors to keep; grouped by type, so that each group is one fused copy.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]):
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            groups.setdefault(tensor.dtype, []).append(tensor)
        self._groups = [(live, [torch.empty_like(t) for t in live]) for live in groups.values()]

    @torch.no_grad()
    def save(self) -> None:
        """Copies the tensors as they are now."""
        for live, kept in self._groups:
            torch._foreach_copy_(kept, live)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the last saved values back."""
        for live, kept in self._groups:
            torch._foreach_copy_(live, kept)


class Parts:
    """The trainable parameters of a network and room for copies, found and made once for all clients.

    Args:
        network: the network.
    """

    def __init__(self, network: nn.Module):
        self.network = network
        self.params = [p for p in network.parameters() if p.requires_grad]
        self._buffers = list(network.buffers())

    @functools.cached_property
    def before(self) -> Snapshot:
        """Buffers as they were before a step."""
        return Snapshot(self._buffers)

    @functools.cached_property
    def between(self) -> Snapshot:
        """Buffers as they were between the two passes of a step."""
        return Snapshot(self._buffers)

    @functools.cached_property
    def weights(self) -> Snapshot:
        """Weights before their perturbation."""
        return Snapshot(self.params)


class PlainStep:
    """One optimiser step on the gradient of the batch loss.

    A batch whose loss or gradient is not finite is skipped: parameters, optimiser and buffers (BatchNorm statistics)
    stay as they were before it, and the output says ``skipped``.

    The output is a dict with ``loss`` (of the unperturbed weights, detached) and ``skipped``; in a plain MONAI trainer
    also ``image``, ``label`` and ``pred``, for its handlers.
    """

    def __init__(self) -> None:
        self._network: nn.Module | None = None

    def __call__(self, engine: Any, batchdata: Any) -> dict[str, Any]:
        """Runs one iteration; ``(engine, batch) -> output`` as MONAI expects of an ``iteration_update``."""
        if batchdata is None:
            raise ValueError("Must provide batch data for current iteration.")
        if engine.network is not self._network:
            self._attach(engine)
        if not engine.network.training:
            engine.network.train()
        self._before.save()
        self._clear()
        events = _events()
        output: dict[str, Any] = {}
        engine.state.output = output
        compute = _loss_of(engine, batchdata, output)
        loss = compute()
        output["loss"] = loss.detach()
        engine.fire_event(events.LOSS_COMPLETED)
        _backward(engine, loss)
        self._adjust(engine, compute, output)
        engine.fire_event(events.BACKWARD_COMPLETED)
        output["skipped"] = skipped = not self._apply(engine, output["loss"])
        if skipped:
            self._before.restore()
            logger.warning("step %d skipped: its loss or gradient is not finite", engine.state.iteration)
        self._clear()
        engine.fire_event(events.MODEL_COMPLETED)
        # Handlers of that event may have replaced it, as decollation does.
        return engine.state.output

    def _attach(self, engine: Any) -> None:
        if getattr(engine, "accumulation_steps", 1) > 1:
            raise ConfigError(
                f"{type(self).__name__} takes one optimiser step a batch.",
                where="accumulation_steps",
                fix="Set it to 1, or enlarge batch_size.",
            )
        # medfed's own trainer has them from the client before.
        parts = getattr(engine, "parts", None)
        self._parts = Parts(engine.network) if parts is None or parts.network is not engine.network else parts
        self._network, self._params = engine.network, self._parts.params
        if not self._params:
            raise ConfigError("the network has no trainable parameter.", where="network")
        self._before = self._parts.before

    def _clear(self) -> None:
        for param in self._params:
            param.grad = None

    def _adjust(self, engine: Any, compute: Callable[[], torch.Tensor], output: dict[str, Any]) -> None:
        """Hook: replaces the gradient of the batch loss, which stands in ``param.grad``."""

    def _apply(self, engine: Any, loss: torch.Tensor) -> bool:
        """Takes the optimiser step unless the loss or the gradient is not finite; says whether it did."""
        grads = [p.grad for p in self._params if p.grad is not None]
        # One transfer to the host a step: the sum is finite only if both are.
        finite = math.isfinite(float(loss.float() + global_norm(grads)))
        scaler = engine.scaler if engine.amp else None
        if scaler is None or not scaler.is_enabled():
            if finite:
                engine.optimizer.step()
            return finite
        scaler.unscale_(engine.optimizer)
        if finite:
            scaler.step(engine.optimizer)
        scaler.update()
        return finite


class SharpnessAwareStep(PlainStep):
    """One GSAM step (SAM where ``alpha`` is 0) on top of any optimiser.

    ``g`` at the weights, ``ε`` along it, ``g_p`` at the perturbed weights for the same batch, then the optimiser's step
    with ``g_p − α g_⊥`` at the unperturbed weights; see :mod:`medfed.training.sharpness`.  The weights are put
    back from a copy, bit by bit.  Buffers change in the first pass only.  Dropout draws anew in the second pass.

    Args:
        rho: radius of the perturbation.
        alpha: weight of the orthogonal part; FedISM uses 0.1.
        radius: rule of the radius, see :class:`~medfed.training.sharpness.Radius`.
        share: for the rule ``bounded``: the most that the perturbation may raise the loss to first order, as a share.

    The output has ``perturbed_loss`` besides.
    """

    def __init__(self, rho: float = 0.05, alpha: float = 0.1, radius: RadiusRule = "constant", share: float = 0.1):
        super().__init__()
        if not (math.isfinite(alpha) and alpha >= 0):
            raise ConfigError(f"alpha must not be negative, got {alpha}.", where="alpha")
        self.radius, self.alpha = Radius(rho, radius, share), alpha

    def _attach(self, engine: Any) -> None:
        super()._attach(engine)
        self._weights, self._between = self._parts.weights, self._parts.between

    def _adjust(self, engine: Any, compute: Callable[[], torch.Tensor], output: dict[str, Any]) -> None:
        # Under a loss scale both gradients carry it: the perturbation does not depend on it where the loss carries it
        # too, and the GSAM direction is homogeneous, so that unscaling can wait for the optimiser.
        height = _scaled(engine, output["loss"])
        params = [p for p in self._params if p.grad is not None]
        first = [p.grad for p in params if p.grad is not None]
        self._weights.save()
        self._between.save()
        with torch.no_grad():
            torch._foreach_add_(params, self.radius.perturbation(first, params, height))
        self._clear()
        try:
            loss = compute()
            _backward(engine, loss)
        finally:
            self._weights.restore()
            self._between.restore()
        output["perturbed_loss"] = loss.detach()
        second = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        for param, grad in zip(params, gsam_gradient(first, second, self.alpha)):
            param.grad = grad


def _loss_of(engine: Any, batchdata: Any, output: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """The batch loss as a function that may be evaluated twice."""
    autocast = _autocast(engine)
    objective = getattr(engine, "objective", None)
    if objective is not None:

        def compute() -> torch.Tensor:
            with autocast():
                return objective(engine.network, batchdata)

        return compute
    prepared = engine.prepare_batch(batchdata, engine.state.device, engine.non_blocking, **engine.to_kwargs)
    inputs, targets, args, kwargs = prepared if len(prepared) == 4 else (*prepared, (), {})
    output.update(image=inputs, label=targets)

    def compute_prediction() -> torch.Tensor:
        with autocast():
            prediction = engine.inferer(inputs, engine.network, *args, **kwargs)
            if "pred" not in output:
                output["pred"] = prediction
                engine.fire_event(_events().FORWARD_COMPLETED)
            return engine.loss_function(prediction, targets).mean()

    return compute_prediction


def _autocast(engine: Any) -> Callable[[], Any]:
    if not engine.amp:
        return nullcontext
    kind = torch.device(engine.state.device).type
    return lambda: torch.autocast(kind, **engine.amp_kwargs)


def _backward(engine: Any, loss: torch.Tensor) -> None:
    _scaled(engine, loss).backward()


def _scaled(engine: Any, loss: torch.Tensor) -> torch.Tensor:
    scaler = engine.scaler if engine.amp else None
    return loss if scaler is None else scaler.scale(loss)


def _events() -> Any:
    from monai.engines.utils import IterationEvents

    return IterationEvents
