"""What happened in one round, for the record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from medfed.federation.messages import Refusal


@dataclass
class Traffic:
    """Bytes of tensors and number of requests of one round."""

    down: int = 0
    up: int = 0
    requests: int = 0


@dataclass
class RoundReport:
    """What happened in one round, for the record.

    Args:
        round: the round, from 1.
        asked: clients that were asked.
        admitted: clients whose replies counted.
        refused: who was left out, and why.
        clients: plain values by client (samples, loss, weight, ...).
        server: plain values of the round.
        traffic: bytes moved.
        seconds: time spent waiting for clients.
        warnings: what a person should know.
    """

    round: int
    asked: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()
    clients: dict[str, dict[str, Any]] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)

    def refuse(self, refused: tuple[Refusal, ...]) -> None:
        """Adds refusals that are not known yet."""
        known = {(r.client, r.reason) for r in self.refused}
        self.refused += tuple(r for r in refused if (r.client, r.reason) not in known)

    def absorb(self, earlier: RoundReport) -> None:
        """Adds what happened in another stretch of the same round; ``admitted`` stays."""
        self.asked = tuple(sorted({*self.asked, *earlier.asked}))
        self.refuse(earlier.refused)
        for client, values in earlier.clients.items():
            self.clients[client] = {**values, **self.clients.get(client, {})}
        self.server = {**earlier.server, **self.server}
        self.traffic.down += earlier.traffic.down
        self.traffic.up += earlier.traffic.up
        self.traffic.requests += earlier.traffic.requests
        self.seconds += earlier.seconds
        self.warnings += earlier.warnings

    def to_plain(self) -> dict[str, Any]:
        """The report as plain values that JSON can hold; what is not finite becomes None."""
        return json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RoundReport:
        """What :meth:`to_plain` gave."""
        return cls(
            **{
                **plain,
                "asked": tuple(plain["asked"]),
                "admitted": tuple(plain["admitted"]),
                "refused": tuple(Refusal(**r) for r in plain["refused"]),
                "traffic": Traffic(**plain["traffic"]),
            }
        )
