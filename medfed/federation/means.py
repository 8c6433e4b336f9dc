"""Means that the server computes while replies arrive, so that its memory does not grow with the number of clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from medfed.aggregation.averaging import RunningMean
from medfed.federation.messages import Message, State


@dataclass(frozen=True)
class Mean:
    """One mean over replies.

    Args:
        group: the group of tensors that is averaged.
        weight: a client's weight: a value of its reply, or a mapping by client. Clients that a mapping does not name
            are no part of this mean.
    """

    group: str = "model"
    weight: str | Mapping[str, float] = "samples"


class Means:
    """The means of one request.

    Args:
        wanted: groups, each averaged under its own name with ``weight``; or means by name.
        weight: weight of a client in the means of named groups; every client must have one.
    """

    def __init__(self, wanted: str | Sequence[str] | Mapping[str, Mean], weight: str | Mapping[str, float]):
        self._every_client = not isinstance(wanted, Mapping)
        if isinstance(wanted, Mapping):
            self._means = dict(wanted)
        else:
            self._means = {g: Mean(g, weight) for g in ([wanted] if isinstance(wanted, str) else wanted)}
        self._sums = {name: RunningMean() for name in self._means}

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups that are averaged."""
        return tuple(dict.fromkeys(m.group for m in self._means.values()))

    def fault(self, client: str, message: Message) -> str | None:
        """Why a reply cannot be part of the means, or None."""
        for mean in self._means.values():
            if isinstance(mean.weight, str):
                if _usable(message.values.get(mean.weight)) is None:
                    return f"no usable weight '{mean.weight}'"
            elif client not in mean.weight and not self._every_client:
                continue
            elif _usable(mean.weight.get(client)) is None:
                return "has no weight"
        return None

    def add(self, client: str, message: Message) -> None:
        """Adds an admitted reply."""
        for name, mean in self._means.items():
            given = message.values[mean.weight] if isinstance(mean.weight, str) else mean.weight.get(client)
            if given is not None:
                self._sums[name].add(message.group(mean.group), float(given))

    @property
    def empty(self) -> bool:
        """Whether a mean over every client cannot be formed, because all weights are zero."""
        return self._every_client and any(not total.total > 0 for total in self._sums.values())

    def results(self) -> dict[str, State]:
        """The means by name; one to which nobody added weight is not there."""
        return {name: total.result() for name, total in self._sums.items() if total.total > 0}


def _usable(value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and math.isfinite(value):
        return float(value)
    return None
