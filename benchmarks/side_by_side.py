"""Clients side by side: medfed with ``workers: auto`` against a hand-written loop of one process and all cores.

The hand-written loop has one process, as many threads as there are cores, one resident network, a fresh Adam a client
and a weighted mean; medfed decides by itself how many workers it takes.  Rounds are timed in turn.  The third case
moves models and computes nothing; its peak memory is measured in a process of its own for each side.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from common import (
    RESNET,
    SMALL,
    SQUEEZENET,
    Bare,
    Case,
    Federation,
    State,
    arguments,
    cores_of_others,
    difference_after_a_round,
    in_turn,
    machine,
    processes_mb,
    smaller,
    table,
)

from medfed.engines.planning import available_cores, choose_workers
from medfed.federation.messages import Message

METHOD = {"name": "fedavg", "logit_adjustment": False}


class Resident:
    """A trainer that trains nothing: it loads a model and gives it back."""

    def __init__(self, case: Case):
        self.network = case.build_network()
        self.own = dict(self.network.state_dict())

    @torch.no_grad()
    def load(self, state: dict[str, torch.Tensor]) -> None:
        torch._foreach_copy_(list(self.own.values()), [state[k] for k in self.own])

    def state(self) -> dict[str, torch.Tensor]:
        return dict(self.own)


def give_back(client: Any, message: Message) -> Message:
    client.load(message.group("model"))
    return Message.of({"samples": client.num_samples}, model=client.model())


class BareIdle(Bare):
    def train(self, name: str) -> None:
        pass


class BareWorkers:
    """Hand-written: resident processes of one thread, the model and one sum a worker in shared memory."""

    def __init__(self, case: Case, kind: type[Bare], workers: int):
        self.model = {k: t.share_memory_() for k, t in case.initial().items()}
        self.sums = [{k: torch.zeros_like(t).share_memory_() for k, t in self.model.items()} for _ in range(workers)]
        self.pipes = []
        context = multiprocessing.get_context("fork")
        for w, total in enumerate(self.sums):
            ours, theirs = context.Pipe()
            shares = case.names[w::workers]
            context.Process(target=self.work, args=(theirs, case, kind, shares, total), daemon=True).start()
            self.pipes.append(ours)

    def work(self, pipe: Connection, case: Case, kind: type[Bare], names: tuple[str, ...], total: State) -> None:
        torch.set_num_threads(1)
        bare = kind(case)
        bare.model, bare.total = self.model, total
        while pipe.recv_bytes():
            bare.count += 1
            for k, name in enumerate(names):
                bare.load()
                bare.train(name)
                bare.add(k, 1 / case.clients)
            pipe.send_bytes(b"done")

    def round(self) -> None:
        for pipe in self.pipes:
            pipe.send_bytes(b"go")
        for pipe in self.pipes:
            pipe.recv_bytes()
        first, *others = self.sums
        for name, tensor in self.model.items():
            tensor.copy_(first[name])
            for other in others:
                if tensor.is_floating_point():
                    tensor.add_(other[name])


class BareWritten(BareIdle):
    """The third case as one writes it: ``load_state_dict``, and ``sum += weight * tensor``."""

    def round(self) -> None:
        mean: State = {}
        for _ in self.case.names:
            self.network.load_state_dict(self.model)
            for name, tensor in self.network.state_dict().items():
                if name not in mean:
                    mean[name] = tensor / self.case.clients if tensor.is_floating_point() else tensor.clone()
                elif tensor.is_floating_point():
                    mean[name] += tensor / self.case.clients
        self.model = mean


class Plain:
    """What the choice of workers reads of a bundle."""

    def __init__(self, case: Case):
        self.build_network, self.image_shape = case.build_network, case.shape


def plan(case: Case, samples: int) -> tuple[int, int]:
    """Workers and threads a worker that ``auto`` takes for a federation."""
    workers = choose_workers(Plain(case), clients=case.clients, samples=samples, cores=available_cores())
    return workers, max(1, available_cores() // workers)


def ours(case: Case, workers: int, threads: int) -> Federation:
    if case is RESNET:
        tasks = {"train": give_back}
        return Federation.of(
            case, METHOD, workers=workers, threads=threads, trainer=lambda: Resident(case), tasks=tasks
        )
    return Federation.of(case, METHOD, workers=workers, threads=threads)


def in_threads(threads: int, function: Callable[[], None]) -> Callable[[], None]:
    """The function with so many threads, while this process otherwise has one."""

    def call() -> None:
        torch.set_num_threads(threads)
        function()
        torch.set_num_threads(1)

    return call


def peak(side: str) -> list[float]:
    """Peak memory of the third case on one side, MB, of all its processes: PSS and RSS."""
    process = subprocess.run([sys.executable, __file__, "--peak", side], capture_output=True, text=True, check=True)
    return [float(x) for x in process.stdout.split()[-2:]]


def measure_peak(side: str) -> None:
    highest, done = {"pss": 0.0, "rss": 0.0}, threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            for kind in highest:
                highest[kind] = max(highest[kind], processes_mb(kind))

    if side == "medfed":
        step = ours(RESNET, *plan(RESNET, 0)).round
    else:
        step = (BareIdle if side == "hand" else BareWritten)(RESNET).round
    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(4):
        step()
    done.set()
    watcher.join()
    print(*highest.values())


def main() -> None:
    if sys.argv[1:2] == ["--peak"]:
        measure_peak(sys.argv[2])
        return
    options = arguments(__doc__, rounds=7, clients=0, cases="123")
    cores = available_cores()
    rows = []
    cases = {"1": (SMALL, SMALL.samples, Bare), "2": (SQUEEZENET, SQUEEZENET.samples, Bare), "3": (RESNET, 0, BareIdle)}
    for case, samples, kind in (cases[number] for number in options.cases):
        workers, threads = plan(case, samples)
        if options.clients and case is not RESNET:
            case = smaller(case, clients=min(case.clients, options.clients))
        torch.set_num_threads(1)  # whoever forks must not have computed with several threads
        federation = ours(case, workers, threads)
        pair = BareWorkers(case, kind, cores)
        hand = kind(case)

        sides = {
            "one process": in_threads(cores, hand.round),
            "workers": pair.round,
            "medfed": in_threads(cores, federation.round),
        }
        if kind is BareIdle:
            sides["one process, plain"] = in_threads(cores, BareWritten(case).round)
        print(f"models differ by {difference_after_a_round(federation, hand):.2g}", file=sys.stderr)
        times = in_turn(sides, options.rounds, quiet=options.quiet)
        federation.engine.close()
        one = times["one process"]
        rows += [
            [
                case.title,
                name if name != "medfed" else f"medfed ({workers} x {threads})",
                min(timing.wall),
                *list(timing.over(one).values())[:2],
                *list(timing.over(times["workers"]).values())[:2],
                cores_of_others({name: timing}),
            ]
            for name, timing in times.items()
        ]
    columns = ["clients", "side", "seconds", "to one process: medians", "minima", "to workers: medians", "minima"]
    table([*columns, "cores used by others"], rows)
    print()
    if "3" not in options.cases:
        print(machine())
        return
    sides = {"one process": "hand", "one process, plain": "plain", "medfed": "medfed"}
    table(["peak memory of the third, MB", "PSS", "RSS"], [[name, *peak(side)] for name, side in sides.items()])
    print(machine())


if __name__ == "__main__":
    main()
