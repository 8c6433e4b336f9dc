"""The server as a method's program sees it: ask clients, combine, report a round.

The server knows neither the engine that moves its messages nor the tracking that reads its reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from medfed.aggregation.averaging import RunningMean
from medfed.data.cohort import Task
from medfed.federation.admission import check_reply
from medfed.federation.client import Request
from medfed.federation.messages import Message, Refusal, Replies, Reply, State
from medfed.federation.participation import dropped, sample_clients
from medfed.federation.state import ServerState


@dataclass(frozen=True)
class Patience:
    """How long an engine waits between machines.

    Args:
        quorum: fewest admitted replies for a round to count.
        timeout: seconds it waits at most; None waits for ever.
        grace: seconds it waits for the others once the quorum is there; None waits for all.
    """

    quorum: int = 1
    timeout: float | None = None
    grace: float | None = None


class Engine(Protocol):
    """Moves messages between a server and clients."""

    @property
    def clients(self) -> tuple[str, ...]:
        """All clients of the federation, sorted."""
        ...

    def exchange(
        self, request: Request, clients: Sequence[str], patience: Patience
    ) -> Iterator[tuple[str, Message | Refusal]]:
        """Sends a request and yields each client's answer or its refusal, in the order of ``clients``.

        Tensors of a yielded message are valid until the next one is asked for.
        """
        ...

    def close(self) -> None:
        """Ends workers and frees what the engine holds."""
        ...


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


class Server:
    """The server's side of a federation.

    Args:
        engine: moves the messages.
        state: where the federation stands; changed by the method's program.
        task: classes and kind of labels.
        rounds: last round of the run.
        seed: seed of the run.
        fraction: share of clients asked in a round.
        patience: quorum, timeout and grace.
        dropout: simulation only: probability that a client stays silent in a round.
        save: writes a checkpoint of the state; called by :meth:`once` and after every round.
    """

    def __init__(
        self,
        engine: Engine,
        state: ServerState,
        task: Task,
        *,
        rounds: int,
        seed: int = 0,
        fraction: float = 1.0,
        patience: Patience | None = None,
        dropout: float = 0.0,
        save: Callable[[ServerState], object] | None = None,
    ):
        self.engine, self.state, self.task = engine, state, task
        self.num_rounds, self.seed, self.fraction, self.dropout = rounds, seed, fraction, dropout
        self.patience = patience or Patience()
        self._save = save
        self._confirmed = state.step
        self._report = RoundReport(state.round)

    @property
    def model(self) -> State:
        """The global model."""
        return self.state.model

    @model.setter
    def model(self, value: State) -> None:
        self.state.model = value

    @property
    def notes(self) -> dict[str, Message]:
        """What the method keeps between rounds; part of every checkpoint."""
        return self.state.notes

    @property
    def round(self) -> int:
        """The current round, from 1."""
        return self._report.round

    @property
    def clients(self) -> tuple[str, ...]:
        """All clients, sorted."""
        return self.engine.clients

    def rounds(self) -> Iterator[int]:
        """The rounds that remain, beginning after the last completed one."""
        while self.state.round < self.num_rounds:
            self._report = RoundReport(self.state.round + 1)
            yield self._report.round

    def participants(self) -> tuple[str, ...]:
        """The clients of the current round, sorted."""
        return sample_clients(self.clients, self.fraction, self.seed, self.round)

    def once(self, name: str, produce: Callable[[], Message]) -> Message:
        """Does something once in the whole run, also across a restart (identification, a first exchange).

        Args:
            name: key of the result among the server's notes.
            produce: makes the result; not called again when it is there already.
        """
        if name not in self.notes:
            self.notes[name] = produce()
            self.save()
        return self.notes[name]

    def save(self) -> None:
        """Writes a checkpoint now."""
        if self._save is not None:
            self._save(self.state)
        self._confirmed = self.state.step

    def ask(
        self,
        task: str,
        message: Message,
        *,
        clients: Iterable[str] | None = None,
        expect: Mapping[str, State] | None = None,
        mean: Sequence[str] | str = (),
        weight: str | Mapping[str, float] = "samples",
    ) -> Replies:
        """Asks clients to do a task, checks every reply and returns those admitted, in sorted client order.

        Args:
            task: name of a client task of the method.
            message: what the task needs.
            clients: who is asked; the round's participants by default.
            expect: groups each reply must hold, with a state dict that it must match. Besides these, a group that
                is to be averaged must be there, and a group that the request carries too must match it.
            mean: groups to average on the way. Their tensors are not kept, so that memory does not grow with
                the number of clients; the means are in ``Replies.mean``.
            weight: weight of a client in those means: a value of its reply, or a mapping by client.

        Returns:
            The replies. With fewer than the quorum all are refused and there is no mean.
        """
        asked = tuple(sorted(self.participants() if clients is None else clients))
        means = (mean,) if isinstance(mean, str) else tuple(mean)
        sent = {group: message.group(group) for group in message.groups()}
        required = {**{g: sent[g] for g in means if g in sent}, **(expect or {})}
        self.state.step += 1
        request = Request(task, self.round, self.state.step, self._confirmed, message)
        silent = [c for c in asked if dropped(c, self.dropout, self.seed, self.round)]
        refused = [Refusal(c, "did not answer (simulated dropout)") for c in silent]
        reachable = [c for c in asked if c not in silent]

        started = time.perf_counter()
        sums = {group: RunningMean() for group in means}
        admitted: list[Reply] = []
        for client, answer in self.engine.exchange(request, reachable, self.patience):
            if isinstance(answer, Refusal):
                refused.append(answer)
                continue
            self._report.traffic.up += answer.nbytes()
            same = {g: sent[g] for g in answer.groups() if g in sent}
            reason = check_reply(answer, {**same, **required})
            share = None if reason or not means else _weight(client, answer, weight)
            if reason is None and means and share is None:
                reason = f"no usable weight '{weight}'" if isinstance(weight, str) else "has no weight"
            if reason is not None:
                refused.append(Refusal(client, reason))
                continue
            for group, total in sums.items():
                total.add(answer.group(group), share or 0.0)
            admitted.append(Reply(client, _kept(answer, means)))
        self._note(asked, admitted, refused, message.nbytes() * len(reachable), time.perf_counter() - started)

        if len(admitted) < self.patience.quorum:
            short = f"quorum of {self.patience.quorum} not reached ({len(admitted)} admitted)"
            refused += [Refusal(r.client, short) for r in admitted]
            self._report.warnings.append(f"{task}: {short}; the previous model is kept")
            self._report.refused += tuple(Refusal(r.client, short) for r in admitted)
            return Replies((), tuple(refused))
        results = {group: total.result() for group, total in sums.items() if total.total > 0}
        return Replies(tuple(admitted), tuple(refused), results)

    def report(
        self, replies: Replies | None = None, *, server: Mapping[str, Any] | None = None, **columns: Mapping
    ) -> RoundReport:
        """The record of the current round; a program yields it.

        Args:
            replies: the replies that made the model: who counted, and all their plain values.
            server: plain values of the round.
            **columns: a further value by client, e.g. ``weight={"client_00": 0.2}``.
        """
        report = self._report
        if replies is not None:
            report.admitted = replies.clients
            for reply in replies:
                report.clients.setdefault(reply.client, {}).update(_scalars(reply.values))
        for name, by_client in columns.items():
            for client, value in by_client.items():
                report.clients.setdefault(client, {})[name] = value
        report.server.update(server or {})
        return report

    def _note(
        self,
        asked: tuple[str, ...],
        admitted: list[Reply],
        refused: list[Refusal],
        down: int,
        seconds: float,
    ) -> None:
        report = self._report
        report.asked = tuple(sorted({*report.asked, *asked}))
        known = {(r.client, r.reason) for r in report.refused}
        report.refused += tuple(r for r in refused if (r.client, r.reason) not in known)
        report.admitted = tuple(r.client for r in admitted)
        report.traffic.down += down
        report.traffic.requests += 1
        report.seconds += seconds


def _weight(client: str, message: Message, weight: str | Mapping[str, float]) -> float | None:
    value = message.values.get(weight) if isinstance(weight, str) else weight.get(client)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return float(value)
    return None


def _kept(message: Message, streamed: Sequence[str]) -> Message:
    """A message that outlives the engine's buffers, without the groups that were averaged on the way."""
    tensors = {k: t.clone() for k, t in message.tensors.items() if k.split("/", 1)[0] not in streamed}
    return Message(tensors, dict(message.values))


def _scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if isinstance(v, (bool, int, float, str)) or v is None}
