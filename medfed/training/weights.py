"""Reading stored weights: a checkpoint file or torchvision's own, checked against the network before use."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medfed.errors import ConfigError

State = dict[str, torch.Tensor]


def read_weights(path: Path) -> State:
    """Reads a state dict from ``.pth``, ``.pt`` or ``.safetensors``; never unpickles anything but tensors.

    Args:
        path: the file; may hold the state dict itself or hold it under ``state_dict`` or ``model``.

    Returns:
        Tensors by name, with the type they were stored in.

    Raises:
        ConfigError: there is no such file, or it is not a checkpoint of named tensors.
    """
    if not path.is_file():
        raise ConfigError("there is no such weights file.", where=str(path), fix="Check the path under 'weights'.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ConfigError(
            "is not a plain checkpoint of tensors, and other objects are not loaded because that would run code.",
            where=str(path),
            fix="Save the network's state_dict() alone.",
        ) from None
    except Exception as error:
        raise ConfigError(
            f"cannot be read as weights ({type(error).__name__}).",
            where=str(path),
            fix="Give a state dict saved by torch.save or safetensors; the file may be truncated.",
        ) from None
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise ConfigError("holds no named tensors.", where=str(path), fix="Save the network's state_dict().")
    other = [name for name, value in content.items() if not isinstance(value, torch.Tensor)]
    if other:
        raise ConfigError(
            f"'{other[0]}' is not a tensor.", where=str(path), fix="Save the network's state_dict() alone."
        )
    return dict(content)


def state_hash(state: Mapping[str, torch.Tensor]) -> str:
    """sha256 over names, types, shapes and values of a state dict."""
    total = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def torchvision_weights(name: str, version: str = "IMAGENET1K_V1") -> State:
    """The ImageNet weights that torchvision knows for a network, from its cache or downloaded.

    Args:
        name: torchvision's name of the network.
        version: member of the network's weights enum; ``IMAGENET1K_V1`` is what ``pretrained=True`` used to mean.

    Raises:
        ConfigError: there are none, or they cannot be fetched.
    """
    from torchvision import models

    known = models.get_model_weights(name)
    if version not in known.__members__:
        offered = ", ".join(known.__members__) or "none"
        raise ConfigError(f"torchvision has no {version} weights of '{name}' (it has: {offered}).", where="weights")
    try:
        return dict(known[version].get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"the ImageNet weights of '{name}' could not be fetched ({type(error).__name__}).",
            where="weights",
            fix=f"Download {known[version].url} where there is a network and give the file as 'weights'.",
        ) from None


def load_weights(network: nn.Module, state: State, *, stem: str, heads: tuple[str, ...], where: str) -> None:
    """Copies weights into a network; every key but the classifier's must fit.

    A first convolution for three channels is adapted to the network's own number: summed for one (the answer to a grey
    picture repeated three times stays the same), otherwise repeated in turn and scaled by 3/n.  The stored classifier
    is used where it fits and left out where it does not.

    Args:
        network: the network.
        state: stored tensors by name; half precision is converted.
        stem: name of the first convolution.
        heads: names that the classifier has in the network or had before it was replaced.
        where: named in messages.

    Raises:
        ConfigError: keys are missing, unexpected or of another shape; names the first few.
    """
    state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    own = network.state_dict()
    head = {name for name in {*own, *state} if name.rpartition(".")[0] in heads}
    fits = all(name in state and state[name].shape == own[name].shape for name in head & own.keys())
    if not fits:
        state = {name: tensor for name, tensor in state.items() if name not in head}
    first = f"{stem}.weight"
    if first in state:
        state[first] = adapt_input(state[first], own[first].shape[1])
    counters = {name for name in own if name.endswith("num_batches_tracked")}
    optional = counters if fits else counters | head
    faults = {
        "missing": [name for name in own if name not in state and name not in optional],
        "unexpected": [name for name in state if name not in own],
        "of another shape": [
            f"{name} {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
            for name in own
            if name in state and state[name].shape != own[name].shape
        ],
    }
    if any(faults.values()):
        told = "; ".join(f"{len(names)} {kind} ({_some(names)})" for kind, names in faults.items() if names)
        raise ConfigError(
            f"these weights are not of this network: {told}.",
            where=where,
            fix="Name the network that the file was saved from.",
        )
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)


def adapt_input(weight: torch.Tensor, in_channels: int) -> torch.Tensor:
    """The kernel ``[out, in, ...]`` of a first convolution for another number of input channels."""
    given = weight.shape[1]
    if given == in_channels or given != 3:
        return weight
    weight = weight.float()
    if in_channels == 1:
        return weight.sum(dim=1, keepdim=True)
    return weight[:, [i % given for i in range(in_channels)]] * (given / in_channels)


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
