"""Clients side by side in resident worker processes, with the same result for any number of workers.

One broadcast goes through shared memory; each worker trains with its own resident model and leaves replies in its
own slots; the server consumes them in sorted client order, so the order of the floating-point sums never depends on
who was faster. Workers live as long as the engine; control messages are JSON.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from medfed.engines.buffers import Layout, SharedBuffer, decode, encode, message_fields, scratch_folder
from medfed.engines.host import ClientHost
from medfed.errors import FederationError
from medfed.federation.client import Request
from medfed.federation.messages import Message, Refusal
from medfed.federation.server import Patience
from medfed.orphans import orphaned, own_output, when_orphaned

HostFactory = Callable[[], ClientHost]


class PoolEngine:
    """Runs clients in worker processes of this machine.

    Args:
        clients: names of all clients.
        make_host: builds a worker's :class:`ClientHost`; runs in the worker. With ``start="spawn"`` it must be
            importable (a module-level function or a partial of one).
        workers: number of processes.
        threads: intra-op threads of each.
        model_bytes: size of one model, to choose the number of reply slots.
        start: ``"fork"`` (instant; the parent must not have trained before) or ``"spawn"`` (needed for CUDA).
    """

    def __init__(
        self,
        clients: Sequence[str],
        make_host: HostFactory,
        *,
        workers: int,
        threads: int = 1,
        model_bytes: int = 0,
        start: str = "fork",
    ):
        self._clients = tuple(sorted(clients))
        self._each: Mapping[str, Mapping[str, Any]] = {}
        self._slots = max(2, min(8, (64 << 20) // max(model_bytes, 1)))
        self._folder = scratch_folder(model_bytes * (1 + workers * self._slots))
        self._down = SharedBuffer(self._folder / "down")
        self._up = [[SharedBuffer(self._folder / f"up-{w}-{s}") for s in range(self._slots)] for w in range(workers)]
        self._layouts: dict[tuple[int, int], Layout] = {}
        context: Any = multiprocessing.get_context(start)
        self._pipes: list[Connection] = []
        self._workers = []
        self._codes: list[int | None] = []
        self._cut = False
        for w in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work,
                args=(theirs, make_host, threads, str(self._folder), w, self._slots, os.getpid()),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._workers.append(process)

    @property
    def clients(self) -> tuple[str, ...]:
        """All clients, sorted."""
        return self._clients

    def exchange(
        self, request: Request, clients: Sequence[str], patience: Patience
    ) -> Iterator[tuple[str, Message | Refusal]]:
        """Serves the clients side by side and yields in order; see :class:`medfed.federation.server.Engine`.

        A worker that dies takes only the clients it was working on out of the round.
        """
        layout, size = self._down.pack(request.message.tensors)
        head = {
            "task": request.task,
            "round": request.round,
            "step": request.step,
            "confirmed": request.confirmed,
            **message_fields(request.message, layout, size),
        }
        for w in self._alive():
            self._send(w, encode("request", **head))
        todo = deque(clients)
        self._each = request.each
        given: list[deque[str]] = [deque() for _ in self._pipes]
        held = [0] * len(self._pipes)
        done: dict[str, tuple[int, int, Message | Refusal]] = {}
        # The cores belong to the workers meanwhile: who adds up what they send takes one thread, or waits for its own.
        ours = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for name in clients:
                while name not in done:
                    self._hand_out(todo, given, held)
                    self._collect(given, held, done, todo)
                worker, slot, answer = done.pop(name)
                yield name, answer
                if slot >= 0:
                    held[worker] -= 1
        except KeyboardInterrupt:
            # It may have struck between sending and counting: nobody knows what is still to come. The run ends anyway.
            self._cut = True
            for waiting in given:
                waiting.clear()
            raise
        finally:
            # Who stops listening half-way must not find these answers in the next request.
            while any(given):
                self._collect(given, held, {}, deque())
            torch.set_num_threads(ours)

    def _hand_out(self, todo: deque[str], given: list[deque[str]], held: list[int]) -> None:
        # Two clients at a time a worker, so that it need not wait for us, but for the last ones, which whoever is free
        # first should take; never more than its reply slots.
        alive = self._alive()
        for depth in (1, 2):
            for w in alive:
                if depth == 2 and len(todo) < len(alive):
                    return
                if todo and len(given[w]) < depth and held[w] + len(given[w]) < self._slots:
                    name = todo.popleft()
                    given[w].append(name)
                    self._send(w, encode("client", client=name, own=dict(self._each.get(name, {}))))

    def _collect(
        self,
        given: list[deque[str]],
        held: list[int],
        done: dict[str, tuple[int, int, Message | Refusal]],
        todo: deque[str],
    ) -> None:
        busy = [w for w in range(len(self._pipes)) if given[w]]
        if not busy:
            if todo and not self._alive():
                raise FederationError(
                    f"all {len(self._pipes)} worker processes died (exit codes {', '.join(map(str, self._codes))}); "
                    f"{todo[0]} and {len(todo) - 1} more clients of this round were not asked.",
                    fix="Use fewer workers if memory ran out, and resume the run.",
                )
            return
        sentinels = {self._pipes[w]: w for w in busy}
        for ready in wait(list(sentinels)):
            w = sentinels[ready]  # type: ignore[index]
            try:
                fields = decode(self._pipes[w].recv_bytes())
            except (EOFError, OSError):
                code = self._bury(w)
                for name in given[w]:
                    done[name] = (w, -1, Refusal(name, f"its worker process died (exit code {code})"))
                given[w].clear()
                continue
            name = given[w].popleft()
            if fields["kind"] == "refusal":
                done[name] = (w, -1, Refusal(name, fields["reason"]))
            else:
                slot = fields["slot"]
                if fields["layout"] is not None:
                    self._layouts[w, slot] = fields["layout"]
                views = self._up[w][slot].views(self._layouts[w, slot], fields["size"])
                done[name] = (w, slot, Message(views, fields["values"]))
                held[w] += 1

    def _alive(self) -> list[int]:
        return [w for w, process in enumerate(self._workers) if process is not None]

    def _send(self, worker: int, data: bytes) -> None:
        # A broken pipe is noticed, with the clients that the worker held, when we next wait for it.
        with contextlib.suppress(BrokenPipeError, OSError):
            self._pipes[worker].send_bytes(data)

    def _bury(self, worker: int) -> int | None:
        process = self._workers[worker]
        self._workers[worker] = None
        process.join(timeout=5)
        self._codes.append(process.exitcode)
        return process.exitcode

    def close(self) -> None:
        """Ends the workers and removes the shared buffers."""
        workers = [p for p in self._workers if p is not None]
        try:
            if not self._cut:  # otherwise they are at clients of a round that nobody waits for any more
                for w in self._alive():
                    self._send(w, encode("stop"))
                until = time.monotonic() + 5
                for process in workers:
                    process.join(timeout=max(0.0, until - time.monotonic()))
        finally:  # also at a second Ctrl-C
            for process in workers:
                process.kill()
            for process in workers:
                process.join(timeout=5)
            shutil.rmtree(self._folder, ignore_errors=True)


def _work(
    pipe: Connection, make_host: HostFactory, threads: int, folder: str, worker: int, slots: int, parent: int
) -> None:
    """A worker's life: receive a request, serve the clients named to it, leave replies in slots in turn."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, and the server ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    own_output()

    def leave() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    when_orphaned(parent, leave)
    torch.set_num_threads(threads)
    host = make_host()
    down = SharedBuffer(Path(folder) / "down")
    up = [SharedBuffer(Path(folder) / f"up-{worker}-{s}") for s in range(slots)]
    told: list[Layout | None] = [None] * slots
    request: Request | None = None
    turn = 0
    while True:
        try:
            fields = decode(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        if orphaned(parent):  # a resumed run may already use the memories of the clients
            leave()
        if fields["kind"] == "stop":
            return
        if fields["kind"] == "request":
            message = Message(down.views(fields["layout"], fields["size"]), fields["values"])
            request = Request(fields["task"], fields["round"], fields["step"], fields["confirmed"], message)
            continue
        if request is None:
            raise FederationError("a worker was given a client before a request.")
        answer = host.serve(fields["client"], replace(request, each={fields["client"]: fields["own"]}))
        if isinstance(answer, Refusal):
            pipe.send_bytes(encode("refusal", reason=answer.reason))
            continue
        try:
            layout, size = up[turn].pack(answer.tensors)
        except FederationError as error:
            pipe.send_bytes(encode("refusal", reason=str(error)))
            continue
        news, told[turn] = (None if told[turn] == layout else layout), layout
        pipe.send_bytes(encode("reply", slot=turn, **message_fields(answer, news, size)))
        turn = (turn + 1) % slots
