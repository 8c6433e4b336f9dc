"""The engine of a federation over NVFlare: who is waited for, how long, and whose answer counts.

NVFlare's own rules (``min_responses`` counts failed answers, a task closes at once at its quorum) are not used: quorum,
timeout and grace mean here what they mean everywhere in medfed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from medfed.engines.nvflare.wire import WireError, own_values, pack_request, read_answer, too_large, unpack
from medfed.errors import FederationError, MedfedError
from medfed.federation.admission import check_reply
from medfed.federation.client import Request
from medfed.federation.messages import Message, Refusal
from medfed.federation.server import Patience
from medfed.ledger import Ledger

Arrived = Callable[[str, Any, str], None]
POLL = 0.2
GONE = "is not connected"


class Post(Protocol):
    """What the engine needs of NVFlare."""

    def connected(self) -> Collection[str]:
        """The sites that take part in the job now."""
        ...

    def send(self, data: bytes, own: Mapping[str, str], arrived: Arrived) -> object:
        """Gives some sites a task.

        Args:
            data: the request, the same for all.
            own: for each of these sites what it alone is told.
            arrived: called with (site, answer, fault) for each answer; the answer is None where there is a fault.
        """
        ...

    def cancel(self, sent: object) -> None:
        """Takes back a task; nothing happens where it is over."""
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
        self._fault: Exception | None = None
        self._news = threading.Condition()

    def put(
        self, client: str, answer: Message | Refusal, counts: bool, seen: Callable[[bool], object] = lambda late: None
    ) -> None:
        """Takes an answer in, unless it is late.

        Args:
            client: who answers.
            answer: its reply or refusal.
            counts: whether it counts towards the quorum after which only the grace remains.
            seen: told whether it is late, before anybody can take it.
        """
        with self._news:
            late = self._closed or self._late() is not None
            seen(late)
            if late:
                return
            self._answers[client] = answer
            self._counted += counts
            if counts and self._counted == self._patience.quorum:
                self._quorum_at = self._clock()
            self._news.notify_all()

    def fail(self, error: Exception) -> bool:
        """Ends the wait for answers, because one could not be taken in.

        Returns:
            Whether anybody may still wait, and will hear of it.
        """
        with self._news:
            self._fault = self._fault or error
            self._news.notify_all()
            return not self._closed

    def take(self, client: str, hopeless: Callable[[], str | None]) -> Message | Refusal:
        """Waits for a client's answer and hands it out; a refusal where it does not come in time.

        Args:
            client: whose answer.
            hopeless: asked now and then; gives the reason why no answer will come, or None.

        Raises:
            FederationError: an answer, of whichever client, could not be taken in.
        """
        with self._news:
            while self._fault is None and client not in self._answers:
                reason = self._late() or hopeless()
                if reason is not None:
                    return Refusal(client, reason)
                self._news.wait(min(POLL, max(0.0, self._end() - self._clock())))
            if self._fault is not None:
                raise _cannot_go_on(self._fault) from self._fault
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
        asked = {self._sites[name]: name for name in clients if self._sites[name] in connected}
        own = {site: own_values(request, name) for site, name in asked.items()}
        for name in set(clients) - set(asked.values()):
            window.put(name, Refusal(name, GONE), counts=False)

        def arrived(site: str, body: Any, fault: str) -> None:
            name = asked[site]
            if body is None:
                window.put(name, Refusal(name, fault), counts=False)
                return
            try:
                answer = read_answer(body, name, self._run, request.step, self._limit)
                window.put(name, answer, promising(request, answer), seen=lambda late: self.note(name, body, late))
            except Exception as error:  # NVFlare would log it, and the run would wait for ever
                if not window.fail(error):
                    raise

        sent = self._post.send(data, own, arrived) if own else None
        try:
            for name in clients:
                yield name, window.take(name, partial(self._hopeless, self._sites[name]))
        finally:
            window.close()
            if sent is not None:
                self._post.cancel(sent)

    def _hopeless(self, site: str) -> str | None:
        if self._post.aborted():
            raise Aborted("the job was stopped")
        return None if site in self._post.connected() else GONE

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


def _cannot_go_on(error: Exception) -> FederationError:
    if isinstance(error, MedfedError):
        what, where, fix = error.what, error.where, error.fix
    else:
        what, where, fix = f"{type(error).__name__}: {error}", None, None
    return FederationError(f"an answer could not be taken in: {what}", where=where, fix=fix)


def promising(request: Request, answer: Message | Refusal) -> bool:
    """Whether the server may admit an answer: one that it surely refuses must not end the wait for others."""
    if isinstance(answer, Refusal):
        return False
    sent = {group: request.message.group(group) for group in request.message.groups() if group in answer.groups()}
    return check_reply(answer, sent) is None
