"""The server as a method's program sees it: ask clients, combine, report a round.

The server knows neither the engine that moves its messages nor the tracking that reads its reports.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from medfed.data.cohort import Task
from medfed.errors import DataError
from medfed.federation.admission import check_reply
from medfed.federation.client import PUBLIC_FIX, Request
from medfed.federation.means import Mean, Means
from medfed.federation.messages import Message, Refusal, Replies, Reply, State, check_plain
from medfed.federation.participation import dropped, sample_clients
from medfed.federation.report import RoundReport
from medfed.federation.state import ServerState

if TYPE_CHECKING:
    from medfed.data.arrays import ArrayDataset
    from medfed.training.local import LocalTrainer


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


@dataclass(frozen=True)
class Workbench:
    """What a server trains and predicts with itself, in methods that ask it to.

    Args:
        data: public images without labels (-1 each).
        trainer: a trainer; its resident network may hold anything.
    """

    data: ArrayDataset
    trainer: LocalTrainer


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
        public: public images and a trainer; None where there are none.
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
        public: Workbench | None = None,
    ):
        self.engine, self.state, self.task = engine, state, task
        self.num_rounds, self.seed, self.fraction, self.dropout = rounds, seed, fraction, dropout
        self.patience = patience or Patience()
        self._save, self._public = save, public
        self._confirmed = state.step
        self._report = RoundReport(state.round)
        self._between_rounds = True
        self._counted: set[str] = set()

    @property
    def model(self) -> State:
        """The global model."""
        return self.state.model

    @model.setter
    def model(self, value: State) -> None:
        self.state.model = value

    @property
    def public(self) -> Workbench:
        """Public images, and a trainer to use them.

        Raises:
            DataError: there are none at the server.
        """
        if self._public is None:
            raise DataError("there are no public images at the server.", where="condition.public", fix=PUBLIC_FIX)
        return self._public

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

    def rounds(self, until: int | None = None) -> Iterator[int]:
        """The rounds that remain, beginning after the last completed one.

        What was asked before a round (an identification, say) counts towards the record of that round.

        Args:
            until: last round of a stage; the run's last by default. A stage that is over is passed by after a
                restart, so that a program of several stages is one loop after another.

        Raises:
            RuntimeError: the program went on to the next round without yielding a report.
        """
        last = self.num_rounds if until is None else min(until, self.num_rounds)
        while self.state.round < last:
            report = RoundReport(self.state.round + 1)
            if self._between_rounds:
                report.absorb(self._report)
            self._report, self._between_rounds = report, False
            yield report.round
            if self.state.round < report.round:
                raise RuntimeError(f"the program left round {report.round} without yielding server.report(...)")

    def participants(self) -> tuple[str, ...]:
        """The clients of the current round, sorted."""
        return sample_clients(self.clients, self.fraction, self.seed, self.round)

    def once(self, name: str, produce: Callable[[], Message]) -> Message:
        """Does something once in the whole run, also across a restart (identification, a first exchange).

        Refusals, bytes and reported values of what ``produce`` asks are kept with the result, so that the record of
        the round is the same after a restart.

        Args:
            name: key of the result among the server's notes.
            produce: makes the result; not called again when it is there already.
        """
        if name not in self.notes:
            self._open()
            outer, self._report = self._report, RoundReport(self._report.round)
            try:
                note = produce()
            finally:
                inner, self._report = self._report, outer
            check_plain(dict(note.values), name)
            self.notes[name] = note
            self.state.once[name] = {"after": self.state.round, "report": inner.to_plain()}
            self.save()
        account = self.state.once.get(name)
        if account is not None and account["after"] == self.state.round and name not in self._counted:
            self._report.absorb(RoundReport.from_plain(account["report"]))
            self._counted.add(name)
        return self.notes[name]

    @contextlib.contextmanager
    def apart(self) -> Iterator[RoundReport]:
        """What is asked within counts towards a report of its own, not towards the record of the round.

        For what is no part of the method: measuring the model of a round that is over.
        """
        outer, self._report = self._report, RoundReport(self._report.round)
        try:
            yield self._report
        finally:
            self._report = outer

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
        each: Mapping[str, Mapping[str, Any]] | None = None,
        expect: Mapping[str, State] | None = None,
        numbers: Sequence[str] = (),
        mean: str | Sequence[str] | Mapping[str, Mean] = (),
        weight: str | Mapping[str, float] = "samples",
        quorum: int | None = None,
    ) -> Replies:
        """Asks clients to do a task, checks every reply and returns those admitted, in sorted client order.

        Args:
            task: name of a client task of the method.
            message: what the task needs.
            clients: who is asked; the round's participants by default.
            each: values for one client alone, by client, added to those of the message. Clients can so be told
                different things (a status, a coefficient) in one request, and all their replies go into one mean.
            expect: groups each reply must hold, with a state dict that it must match. Besides these, a group that
                is to be averaged must be there, and a group that the request carries too must match it.
            numbers: values each reply must hold as numbers.
            mean: groups to average on the way, or several means by name (:class:`~medfed.federation.means.Mean`).
                Their tensors are not kept, so that memory does not grow with the number of clients; the means are in
                ``Replies.mean``.
            weight: weight of a client in the means of named groups: a value of its reply, or a mapping by client.
            quorum: fewest admitted replies that count; by default the run's, or all where fewer are asked.

        Returns:
            The replies. With fewer than the quorum, or with weights that are all zero, all are refused and there is
            no mean.

        Raises:
            TypeError: the message holds what is no plain value.
        """
        asked = tuple(sorted(set(self.participants() if clients is None else clients)))
        least = min(self.patience.quorum, len(asked)) if quorum is None else quorum
        means = Means(mean, weight)
        check_plain(dict(message.values))
        check_plain(dict(each or {}), "each")
        sent = {group: message.group(group) for group in message.groups()}
        required = {**{g: sent[g] for g in means.groups if g in sent}, **(expect or {})}
        self._open()
        self.state.step += 1
        request = Request(task, self.round, self.state.step, self._confirmed, message, each or {})
        silent = [c for c in asked if dropped(c, self.dropout, self.seed, self.round)]
        refused = [Refusal(c, "did not answer (simulated dropout)") for c in silent]
        reachable = [c for c in asked if c not in silent]

        started = time.perf_counter()
        admitted: list[Reply] = []
        for client, answer in self.engine.exchange(request, reachable, replace(self.patience, quorum=least)):
            if isinstance(answer, Refusal):
                refused.append(answer)
                continue
            self._report.traffic.up += answer.nbytes()
            same = {g: sent[g] for g in answer.groups() if g in sent}
            reason = check_reply(answer, {**same, **required}, numbers, means.groups) or means.fault(client, answer)
            if reason is not None:
                refused.append(Refusal(client, reason))
                continue
            means.add(client, answer)
            admitted.append(Reply(client, _kept(answer, means.groups)))
            # A group that was not sent has its first reply as the form that the others must have.
            required |= {g: _form(answer.group(g)) for g in means.groups if g not in required}
        self._note(asked, admitted, refused, message.nbytes() * len(reachable), time.perf_counter() - started)

        short = ""
        if len(admitted) < least:
            short = f"quorum of {least} not reached ({len(admitted)} admitted)"
        elif admitted and means.empty:
            short = "all weights are zero"
        if short:
            left_out = tuple(Refusal(r.client, short) for r in admitted)
            self._report.refuse(left_out)
            self._report.admitted = ()
            self._report.warnings.append(f"{task}: {short}; the previous model is kept")
            return Replies((), (*refused, *left_out))
        return Replies(tuple(admitted), tuple(refused), means.results())

    def report(self, *replies: Replies, server: Mapping[str, Any] | None = None, **columns: Mapping) -> RoundReport:
        """The record of the current round; a program yields it.

        Args:
            *replies: the replies that made the model: who counted (that of the last request by default), and all
                their plain values. Called more than once in a round, the last call says who counted.
            server: plain values of the round.
            **columns: a further value by client, e.g. ``weight={"client_00": 0.2}``.
        """
        report = self._report
        if replies:
            report.admitted = tuple(sorted({c for r in replies for c in r.clients}))
        for reply in (reply for some in replies for reply in some):
            report.clients.setdefault(reply.client, {}).update(_scalars(reply.values))
        for name, by_client in columns.items():
            for client, value in by_client.items():
                report.clients.setdefault(client, {})[name] = value
        report.server.update(server or {})
        return report

    def _open(self) -> None:
        """Begins a report of what happens after a round that is complete and before the next one."""
        if self._report.round <= self.state.round and not self._between_rounds:
            self._report, self._between_rounds = RoundReport(self.state.round), True

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
        report.refuse(tuple(refused))
        report.admitted = tuple(r.client for r in admitted)
        report.traffic.down += down
        report.traffic.requests += 1
        report.seconds += seconds


def _form(state: State) -> State:
    """Names, shapes and types of a state dict, without its numbers."""
    return {name: tensor.to("meta") for name, tensor in state.items()}


def _kept(message: Message, streamed: Sequence[str]) -> Message:
    """A message that outlives the engine's buffers, without the groups that were averaged on the way."""
    tensors = {k: t.clone() for k, t in message.tensors.items() if k.split("/", 1)[0] not in streamed}
    return Message(tensors, dict(message.values))


def _scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if isinstance(v, (bool, int, float, str)) or v is None}
