"""The door: every reply is checked before anything is combined.

A reply that fails leaves its client out of the round, with the reason in the record (DESIGN law 6).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from medfed.federation.messages import Message, State, first_non_finite


def check_state(state: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> str | None:
    """Compares a state dict with the one that was sent.

    Args:
        state: what the client returned.
        reference: what it must look like.

    Returns:
        None, or what is wrong: missing or unexpected keys, a shape or a dtype that differs.
    """
    missing = [k for k in reference if k not in state]
    if missing:
        return f"{len(missing)} tensors missing, first '{missing[0]}'"
    unexpected = [k for k in state if k not in reference]
    if unexpected:
        return f"{len(unexpected)} unexpected tensors, first '{unexpected[0]}'"
    for name, tensor in state.items():
        if tensor.shape != reference[name].shape:
            return f"'{name}' has shape {tuple(tensor.shape)}, expected {tuple(reference[name].shape)}"
        if tensor.dtype != reference[name].dtype:
            return f"'{name}' has dtype {tensor.dtype}, expected {reference[name].dtype}"
    return None


def first_bad_tensor(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity, or None.

    A norm is finite only if every element is (or squares overflow), so most replies are read once; only where a norm
    is not finite is it looked at element by element.
    """
    inexact = {n: t.detach() for n, t in tensors.items() if t.is_floating_point() or t.is_complex()}
    if not inexact:
        return None
    norms = list(torch._foreach_norm(list(inexact.values())))
    if len({n.dtype for n in norms}) > 1:
        norms = [n.double() for n in norms]
    if math.isfinite(float(torch.stack(norms).sum())):
        return None
    return next((name for name, tensor in inexact.items() if not torch.isfinite(tensor).all().item()), None)


def check_reply(
    message: Message, expect: Mapping[str, State], numbers: Sequence[str] = (), groups: Sequence[str] = ()
) -> str | None:
    """Checks one reply.

    Args:
        message: the reply.
        expect: the groups that it must hold, each as the state dict that it must look like.
        numbers: the values that it must hold as numbers.
        groups: groups that it must hold, whatever they look like.

    Returns:
        None when the reply is admitted, otherwise the reason for leaving it out.
    """
    samples = message.values.get("samples")
    if samples is not None and not (
        isinstance(samples, (int, float)) and not isinstance(samples, bool) and samples > 0
    ):
        return f"sample count is {samples!r}, not above 0"
    bad_value = first_non_finite(message.values)
    if bad_value:
        return f"{bad_value} is not finite"
    for name in numbers:
        value = message.values.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return f"{name} is {value!r}, not a number" if name in message.values else f"{name} is missing"
    for group in groups:
        if group not in expect and not message.group(group):
            return f"{group} is missing"
    for group, reference in expect.items():
        fault = check_state(message.group(group), reference)
        if fault:
            return f"{group}: {fault}"
    bad_tensor = first_bad_tensor(message.tensors)
    if bad_tensor:
        return f"'{bad_tensor}' holds NaN or infinite numbers"
    return None
