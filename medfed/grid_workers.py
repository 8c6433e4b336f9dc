"""Cells of a grid side by side: a process a slot, each with its device and its share of the cores.

A process that dies (memory, a signal) costs the cell that it was running; the next cell gets a new one.
"""

from __future__ import annotations

import _thread
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from medfed.engines.planning import available_cores
from medfed.grid import Bench, Event, Tell, attempt, others_of
from medfed.grid_file import Grid
from medfed.orphans import when_orphaned

VISIBLE = "CUDA_VISIBLE_DEVICES"
START = "spawn"
"""How processes are started: CUDA and the threads of OpenMP do not survive a fork."""
PATIENCE = 10.0
"""Seconds that an interrupted process has to write down how its run stands."""


@dataclass
class Worker:
    """A process and the cell that it is running."""

    process: BaseProcess
    pipe: Connection
    slot: int
    cell: int | None = None


def run_side_by_side(grid: Grid, waiting: Sequence[int], slots: int, tell: Tell) -> None:
    """Runs cells in processes.

    Args:
        grid: the grid.
        waiting: indices of the cells to run.
        slots: cells at a time.
        tell: told of every event.
    """
    queue = deque(waiting)
    workers = [start(grid, slot, slots) for slot in range(min(slots, len(queue)))]
    try:
        for worker in workers:
            give(grid, worker, queue)
        while busy := [w for w in workers if w.cell is not None]:
            # A process's own workers can outlive it and hold its pipe open; its sentinel tells that it has died.
            heard = set(wait([*(w.pipe for w in busy), *(w.process.sentinel for w in busy)]))
            for worker in busy:
                if not heard & {worker.pipe, worker.process.sentinel}:
                    continue
                event = receive(worker)
                if event.kind in ("done", "failed"):
                    here = worker
                    if event.died:
                        here = start(grid, worker.slot, slots)
                        workers[workers.index(worker)] = here
                    give(grid, here, queue)
                tell(event)
    finally:
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.pipe.send(None)
            worker.pipe.close()
        for worker in workers:
            worker.process.join(PATIENCE if worker.cell is not None else None)
            for end in (worker.process.terminate, worker.process.kill):
                if worker.process.is_alive():
                    end()
                    worker.process.join(PATIENCE)


def give(grid: Grid, worker: Worker, queue: deque[int]) -> None:
    """Gives a process its next cell, where there is one."""
    worker.cell = queue.popleft() if queue else None
    if worker.cell is not None:
        cell = grid.cells[worker.cell]
        # A process that has died since is noticed when it is heard.
        with contextlib.suppress(OSError):
            worker.pipe.send((worker.cell, cell, others_of(grid, cell)))


def receive(worker: Worker) -> Event:
    """The next event of a process; a failure of its cell where the process has died."""
    if worker.cell is None:
        raise ValueError("a process without a cell has nothing to say")
    with contextlib.suppress(EOFError, OSError):
        if worker.pipe.poll():
            event: Event = worker.pipe.recv()
            return event
    worker.process.join()
    code = worker.process.exitcode or 0
    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return Event("failed", worker.cell, reason=f"its process {how}; run the grid again to go on with it", died=True)


def start(grid: Grid, slot: int, slots: int) -> Worker:
    """Starts the process of a slot."""
    devices = grid.file.devices
    device = devices[slot % len(devices)] if devices else None
    context = multiprocessing.get_context(START)
    here, there = context.Pipe()
    # Not a daemon: a cell may have worker processes of its own.
    args = (there, None if device is None else device.partition(":")[0], share(slot, slots), grid.folder, slot)
    process: BaseProcess = context.Process(target=serve, args=args)  # type: ignore[attr-defined]
    with seeing(device):
        process.start()
    there.close()
    return Worker(process, here, slot)


def share(slot: int, slots: int) -> list[int]:
    """The cores of a slot, so that what a cell decides by the number of cores leaves room for the others.

    All slots have the same number, as far as there are enough: rounding errors depend on the number of threads, and a
    cell must come out the same whichever slot it is given.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(available_cores()))
    each = len(cores) // slots
    return cores[slot * each : (slot + 1) * each] or [cores[slot % len(cores)]]


@contextlib.contextmanager
def seeing(device: str | None) -> Iterator[None]:
    """An environment in which the one GPU is the device, so that a run says ``cuda`` and can go on on any other."""
    _, _, number = (device or "").partition(":")
    before = os.environ.get(VISIBLE)
    if number:
        known = (before or "").split(",") if before else []
        os.environ[VISIBLE] = known[int(number)] if int(number) < len(known) else number
    try:
        yield
    finally:
        if number and before is None:
            del os.environ[VISIBLE]
        elif number and before is not None:
            os.environ[VISIBLE] = before


def end_with_parent() -> None:
    """Interrupts this process when the one that started it is gone, however it went.

    A cell would otherwise go on unseen to the end of its round, and a grid that is started again would find it taken.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def end() -> None:
        if hasattr(signal, "pthread_kill"):  # wakes the main thread where it waits for others
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        else:
            _thread.interrupt_main()
        time.sleep(PATIENCE)
        os._exit(1)  # where interrupts are ignored; the last checkpoint stands

    when_orphaned(parent.pid or 0, end)


def serve(pipe: Connection, device: str | None, cores: list[int], folder: Path, slot: int) -> None:
    """The process of a slot: runs cells until the pipe is closed."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    log = os.open(folder / f"worker-{slot}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    bench = Bench(device)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the cell says how it stands and cleans up
    end_with_parent()

    def tell(event: Event) -> None:
        try:
            pipe.send(event)
        except OSError:
            raise KeyboardInterrupt from None  # nobody listens any more: the grid was interrupted

    with contextlib.suppress(KeyboardInterrupt, EOFError, OSError):
        while True:
            task = pipe.recv()
            if task is None:
                return
            index, cell, others = task
            attempt(bench, cell, index, others, tell)
