"""Logits and pooled features of a network in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from medfed.errors import ConfigError


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Puts a network into evaluation mode and gives every module its own mode back."""
    modes = [(m, m.training) for m in network.modules() if m.training]
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def classifier_of(network: nn.Module) -> nn.Linear:
    """The linear layer that gives the logits: the last one in order of registration.

    Raises:
        ConfigError: the network has no linear layer.
    """
    last = None
    for module in network.modules():
        if isinstance(module, nn.Linear):
            last = module
    if last is None:
        raise ConfigError(
            f"{type(network).__name__} has no linear classifier, so it has no pooled features.",
            where="network",
            fix="Build it with medfed.training.networks.build_network.",
        )
    return last


def pooled_features(network: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Features h(x) that the classifier sees, and the logits, of one forward pass.

    Args:
        network: a network whose last linear layer is its classifier, as :func:`build_network` makes it.
        images: ``[B, C, H, W]``.

    Returns:
        Features ``[B, d]`` and logits ``[B, classes]``; with gradient, where it is enabled.
    """
    caught: list[torch.Tensor] = []

    def catch(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        caught.append(args[0])

    handle = classifier_of(network).register_forward_pre_hook(catch)
    try:
        logits = network(images)
    finally:
        handle.remove()
    return caught[-1], logits


def predict(
    network: nn.Module,
    batches: Iterable[Mapping[str, torch.Tensor]],
    forward: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """What a network says of batches, in evaluation mode, without gradient.

    Args:
        network: the network.
        batches: batches on its device.
        forward: ``forward(network, images) -> [B, ...]``; the network's own output where None.

    Returns:
        ``[N, ...]``, float32, on the CPU.
    """
    parts = []
    with evaluating(network), torch.no_grad():
        for batch in batches:
            out = network(batch["image"]) if forward is None else forward(network, batch["image"])
            parts.append(out.detach().float().cpu())
    return torch.cat(parts)
