"""The local engine: clients one after another in this process, on one resident model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from medfed.engines.host import ClientHost
from medfed.federation.client import Request
from medfed.federation.messages import Message, Refusal
from medfed.federation.server import Patience


class LocalEngine:
    """Runs every client in this process.

    Nothing is copied: a client's reply holds views of the resident network, which the server adds to its running
    sum before the next client is trained.

    Args:
        host: the clients of this process.
    """

    def __init__(self, host: ClientHost):
        self.host = host

    @property
    def clients(self) -> tuple[str, ...]:
        """All clients, sorted."""
        return tuple(sorted(self.host.clients))

    def exchange(
        self, request: Request, clients: Sequence[str], patience: Patience
    ) -> Iterator[tuple[str, Message | Refusal]]:
        """Serves the clients in order; see :class:`medfed.federation.server.Engine`."""
        for name in clients:
            yield name, self.host.serve(name, request)

    def close(self) -> None:
        """Nothing to end."""
