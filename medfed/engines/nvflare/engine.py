"""The engine of a federation over NVFlare: who is waited for, how long, and whose answer counts.

NVFlare's own rules (``min_responses`` counts failed answers, a task closes at once at its quorum) are not used: each
client gets a task of its own, and quorum, timeout and grace mean here what they mean everywhere in medfed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from medfed.engines.nvflare.wire import WireError, own_values, pack_request, read_answer, too_large, unpack
from medfed.errors import FederationError
from medfed.federation.admission import check_reply
from medfed.federation.client import Request
from medfed.federation.messages import Message, Refusal
from medfed.federation.server import Patience
from medfed.ledger import Ledger

Arrived = Callable[[Any, str], None]
POLL = 0.2


class Post(Protocol):
    """What the engine needs of NVFlare."""

    def connected(self) -> Collection[str]:
        """The sites that take part in the job now."""
        ...

    def send(self, site: str, data: bytes, own: str, arrived: Arrived) -> object:
        """Gives a site a task; ``arrived(answer, fault)`` is called once, with one of the two."""
        ...

    def cancel(self, sent: object) -> None:
        """Takes back a task that is not answered."""
        ...

    def aborted(self) -> bool:
        """Whether the job is being stopped."""
        ...


class Aborted(FederationError):
    """The job was stopped from outside."""


class Window:
    """The answers to one request, and when it is too late for one.

    Args:
        patience: quorum, timeout and grace.
        clock: gives seconds.
    """

    def __init__(self, patience: Patience, clock: Callable[[], float] = time.monotonic):
        self._patience, self._clock = patience, clock
        self._begun = clock()
        self._quorum_at: float | None = None
        self._counted = 0
        self._answers: dict[str, Message | Refusal] = {}
        self._closed = False
        self._news = threading.Condition()

    def put(self, client: str, answer: Message | Refusal, counts: bool) -> bool:
        """Takes an answer in, unless it is late.

        Args:
            client: who answers.
            answer: its reply or refusal.
            counts: whether it counts towards the quorum after which only the grace remains.
        """
        with self._news:
            if self._closed or self._late() is not None:
                return False
            self._answers[client] = answer
            self._counted += counts
            if counts and self._counted == self._patience.quorum:
                self._quorum_at = self._clock()
            self._news.notify_all()
            return True

    def take(self, client: str, aborted: Callable[[], bool]) -> Message | Refusal:
        """Waits for a client's answer and hands it out; a refusal where it does not come in time.

        Raises:
            Aborted: the job is being stopped.
        """
        with self._news:
            while client not in self._answers:
                reason = self._late()
                if reason is not None:
                    return Refusal(client, reason)
                if aborted():
                    raise Aborted("the job was stopped")
                self._news.wait(POLL if self._end() is None else min(POLL, max(0.0, self._end() - self._clock())))
            return self._answers.pop(client)

    def close(self) -> None:
        """Whatever comes from now on is late."""
        with self._news:
            self._closed = True

    def _end(self) -> float:
        ends = [float("inf")]
        if self._patience.timeout is not None:
            ends.append(self._begun + self._patience.timeout)
        if self._patience.grace is not None and self._quorum_at is not None:
            ends.append(self._quorum_at + self._patience.grace)
        return min(ends)

    def _late(self) -> str | None:
        if self._clock() < self._end():
            return None
        part = self._patience
        if part.timeout is not None and self._end() == self._begun + part.timeout:
            return f"did not answer within {part.timeout:g} s"
        return f"did not answer within {part.grace:g} s after the quorum of {part.quorum}"


class NVFlareEngine:
    """Moves messages between medfed's server and the sites of an NVFlare job.

    Args:
        sites: the site of each client, by client.
        post: sends to sites.
        run: identifies the run, so that an answer to another one is refused.
        limit: most bytes of a message.
        ledger: where everything that came is written down; None keeps none.
    """

    def __init__(self, sites: Mapping[str, str], post: Post, *, run: str, limit: int, ledger: Ledger | None = None):
        self._sites, self._post, self._run, self._limit, self._ledger = dict(sites), post, run, limit, ledger
        self._writing = threading.Lock()

    @property
    def clients(self) -> tuple[str, ...]:
        """All clients, sorted."""
        return tuple(sorted(self._sites))

    def exchange(
        self, request: Request, clients: Sequence[str], patience: Patience
    ) -> Iterator[tuple[str, Message | Refusal]]:
        """Asks the clients' sites at once and yields in order; see :class:`medfed.federation.server.Engine`."""
        data = pack_request(request, self._run)
        if len(data) > self._limit:
            for name in clients:
                yield name, Refusal(name, too_large("the request", len(data), self._limit))
            return
        window = Window(patience)
        connected = set(self._post.connected())
        sent: dict[str, object] = {}
        for name in clients:
            site = self._sites[name]
            if site in connected:
                arrived = partial(self._arrived, window, request, name)
                sent[name] = self._post.send(site, data, own_values(request, name), arrived)
            else:
                window.put(name, Refusal(name, "is not connected"), counts=False)
        try:
            for name in clients:
                yield name, window.take(name, self._post.aborted)
        finally:
            window.close()
            for task in sent.values():
                self._post.cancel(task)

    def _arrived(self, window: Window, request: Request, client: str, data: Any, fault: str) -> None:
        """An answer has come, or NVFlare says why there is none."""
        if data is None:
            window.put(client, Refusal(client, fault), counts=False)
            return
        answer = read_answer(data, client, self._run, request.step, self._limit)
        late = not window.put(client, answer, counts=promising(request, answer))
        self.note(client, data, late)

    def note(self, client: str, data: Any, late: bool) -> None:
        """Writes down what came, whether or not it is of use."""
        if self._ledger is None or not isinstance(data, (bytes, bytearray)):
            return
        try:
            header, message = unpack(data, self._limit)
        except WireError as error:
            header, message = {"kind": "unreadable", "reason": error.what}, Message()
        facts = {k: header[k] for k in ("kind", "task", "round", "step", "reason") if k in header}
        with self._writing:
            self._ledger.append(bytes(data), message, direction="received", client=client, **facts, late=late)

    def close(self) -> None:
        """Nothing to end: NVFlare ends its own."""


def promising(request: Request, answer: Message | Refusal) -> bool:
    """Whether the server may admit an answer: one that it surely refuses must not end the wait for others."""
    if isinstance(answer, Refusal):
        return False
    sent = {group: request.message.group(group) for group in request.message.groups() if group in answer.groups()}
    return check_reply(answer, sent) is None
