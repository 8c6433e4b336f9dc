"""Messages: named tensors and plain values, nothing else.

Tensor names are ``group/name`` (``model/conv1.weight``), so that a message can carry several state dicts.  What is
neither a tensor nor a plain value cannot be sent, and nothing is ever pickled.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

PLAIN = (bool, int, float, str, type(None))
State = dict[str, torch.Tensor]
_LARGEST = int(sys.float_info.max)


def check_plain(value: Any, name: str = "value") -> None:
    """Raises TypeError unless ``value`` is a plain value: a scalar, text, or lists and dicts of these."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{name}: keys are text, not {type(key).__name__}")
            check_plain(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            check_plain(item, f"{name}[{i}]")
    elif not isinstance(value, PLAIN):
        raise TypeError(f"{name}: {type(value).__name__} is not a plain value (bool, int, float, str, None)")


def check_tensors(tensors: Mapping[str, Any]) -> None:
    """Raises TypeError unless every one is a dense tensor; an array of NumPy is none."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            what = "sparse" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"'{name}' is {what}, not a dense tensor")


def first_non_finite(value: Any, name: str = "value") -> str | None:
    """The name of the first NaN or infinity in a plain value, or whole number that no float can hold, or None."""
    if isinstance(value, Mapping):
        return next((f for k, v in value.items() if (f := first_non_finite(v, f"{name}.{k}"))), None)
    if isinstance(value, (list, tuple)):
        return next((f for i, v in enumerate(value) if (f := first_non_finite(v, f"{name}[{i}]"))), None)
    if isinstance(value, float) and not math.isfinite(value):
        return name
    if isinstance(value, int) and abs(value) > _LARGEST:
        return name
    return None


@dataclass(frozen=True)
class Message:
    """What one side sends to the other.

    Args:
        tensors: tensors by ``group/name``.
        values: plain values by name.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any] | None = None, **groups: Mapping[str, torch.Tensor]) -> Message:
        """A message of named groups of tensors, e.g. ``Message.of({"round": 3}, model=state_dict)``."""
        tensors = {f"{group}/{name}": t for group, state in groups.items() for name, t in state.items()}
        return cls(tensors, dict(values or {}))

    def group(self, name: str) -> State:
        """The tensors of one group, without the prefix."""
        prefix = f"{name}/"
        return {k[len(prefix) :]: t for k, t in self.tensors.items() if k.startswith(prefix)}

    def groups(self) -> list[str]:
        """The names of the groups, sorted."""
        return sorted({k.split("/", 1)[0] for k in self.tensors})

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


@dataclass(frozen=True)
class Reply:
    """An admitted answer of one client."""

    client: str
    message: Message

    @property
    def values(self) -> Mapping[str, Any]:
        """The plain values of the message."""
        return self.message.values

    def group(self, name: str) -> State:
        """One group of tensors of the message."""
        return self.message.group(name)


@dataclass(frozen=True)
class Refusal:
    """A client that was asked and is not part of the round, and why."""

    client: str
    reason: str


@dataclass(frozen=True)
class Replies:
    """What came back from one request, in sorted client order.

    Args:
        replies: the admitted replies.
        refused: who was left out, with the reason (failed, late, dropped, not admitted).
        mean: group means computed on the way, where the request asked for one (see ``Server.ask``).
    """

    replies: tuple[Reply, ...]
    refused: tuple[Refusal, ...] = ()
    mean: Mapping[str, State] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Reply]:
        return iter(self.replies)

    def __len__(self) -> int:
        return len(self.replies)

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients whose reply was admitted."""
        return tuple(r.client for r in self.replies)

    def value(self, name: str) -> dict[str, Any]:
        """One plain value of every client, by client."""
        return {r.client: r.values[name] for r in self.replies}

    def states(self, group: str) -> dict[str, State]:
        """One group of tensors of every client, by client."""
        return {r.client: r.group(group) for r in self.replies}
