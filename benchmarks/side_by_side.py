"""Clients side by side: medfed with ``workers: auto`` against a hand-written loop of one process and all cores.

The hand-written loop has one process, as many threads as there are cores, one resident network, a fresh Adam a client
and a weighted mean; medfed decides by itself how many workers it takes.  Rounds are timed in turn.  The third case
moves models and computes nothing; its peak memory is measured in a process of its own for each side.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import torch
from common import (
    RESNET,
    SMALL,
    SQUEEZENET,
    Bare,
    Case,
    Federation,
    arguments,
    in_turn,
    largest_difference,
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
        self.network = case.bundle.build_network(seed=0)
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


def plan(case: Case, samples: int) -> tuple[int, int]:
    """Workers and threads a worker that ``auto`` takes for a federation."""
    workers = choose_workers(case.bundle, clients=case.clients, samples=samples, cores=available_cores())
    return workers, max(1, available_cores() // workers)


def ours(case: Case, workers: int, threads: int) -> Federation:
    if case is RESNET:
        tasks = {"train": give_back}
        return Federation.of(
            case, METHOD, workers=workers, threads=threads, trainer=lambda: Resident(case), tasks=tasks
        )
    return Federation.of(case, METHOD, workers=workers, threads=threads)


def peak(side: str) -> float:
    """Peak memory of the third case on one side, MB, of all its processes."""
    process = subprocess.run([sys.executable, __file__, "--peak", side], capture_output=True, text=True, check=True)
    return float(process.stdout.split()[-1])


def measure_peak(side: str) -> None:
    highest, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.02):
            highest = max(highest, processes_mb())

    if side == "medfed":
        federation = ours(RESNET, *plan(RESNET, 0))
        step = federation.round
    else:
        step = BareIdle(RESNET).round
    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3):
        step()
    done.set()
    watcher.join()
    if side == "medfed":
        federation.engine.close()
    print(highest)


def main() -> None:
    if sys.argv[1:2] == ["--peak"]:
        measure_peak(sys.argv[2])
        return
    options = arguments(__doc__, rounds=7, clients=0)
    cores = available_cores()
    cases = [(SMALL, SMALL.samples), (SQUEEZENET, SQUEEZENET.samples), (RESNET, 0)]
    prepared = []
    for case, samples in cases:
        workers, threads = plan(case, samples)
        if options.clients and case is not RESNET:
            case = smaller(case, clients=min(case.clients, options.clients))
        prepared.append((case, workers, threads, ours(case, workers, threads)))  # before this process computes
    rows = []
    for case, workers, threads, federation in prepared:
        torch.set_num_threads(cores)
        hand = (BareIdle if case is RESNET else Bare)(case)
        times = in_turn({"hand": hand.round, "medfed": federation.round}, options.rounds)
        ratio = times["medfed"].over(times["hand"])
        differ = largest_difference(federation.model, hand.model)
        federation.engine.close()
        rows.append(
            [
                case.title,
                f"{workers} x {threads}",
                min(times["hand"].wall),
                min(times["medfed"].wall),
                ratio["median"],
                ratio["min"],
                differ,
            ]
        )
    columns = ["clients", "workers x threads", "hand-written, s", "medfed, s", "ratio of medians", "of minima"]
    table([*columns, "models differ by"], rows)
    print()
    table(["peak memory of the third, MB", "hand-written", "medfed"], [["PSS", peak("hand"), peak("medfed")]])
    print(machine())


if __name__ == "__main__":
    main()
