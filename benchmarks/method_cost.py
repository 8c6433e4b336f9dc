"""What a round of each method costs beside one of FedAvg, and what a client sends and gets in it.

Made-up OCT scans as of ``medfed demo --kind oct``, smaller; half of the clients have wrong labels, some images are
public.  Every method trains one local epoch a round, in one process and with one thread; each of its rounds is timed
right after a round of FedAvg, in seconds of the processor (of the clock on a GPU), which a busy machine disturbs least.
Rounds in which a method does something once (identification, a first stage, a checkpoint) are told apart from its usual
ones, of which the median of the ratios is given.  Bytes are those of the tensors of a client in a round, all its
requests together; plain numbers beside them do not count.  Settings that are not named are the methods' own.

Some methods have a second row.  FedMerit takes sharpness-aware steps only where images differ in quality, which they do
not here: ``fedmerit + salt`` takes them all the same (``salt_with: always``).  With its own settings FedNed judges
nobody to be noisy here; ``fedned + noisy`` counts a client as noisy whose model is more uncertain than the mean (in
every round at least one, and for good), and lets a noisy client train on all that the received model says, so that both
its models are trained and the server distils.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common import arguments, machine, synchronise, table, wait_until_quiet

from medfed.config import validate
from medfed.data.demo import make_demo_cohort
from medfed.demonstration import demo_experiment
from medfed.engines.local import LocalEngine
from medfed.experiment import Prepared, prepare
from medfed.federation.report import RoundReport
from medfed.federation.server import Server, Workbench
from medfed.federation.state import ServerState
from medfed.grid import with_method
from medfed.methods.registry import METHODS, get_method
from medfed.running import make_engine

LEAST = 6
"""Rounds that a run must have, so that some are usual ones."""
ONCE: dict[str, dict[int, str]] = {
    "fednoro": {1: "warm-up", 2: "identification"},
    "fedelc": {1: "warm-up", 2: "identification"},
    "fedned": {1: "warm-up"},
    "fedcorr": {1: "first stage", 2: "first stage", 4: "correction"},
    "rhfl": {1: "pre-training"},
    "pruning": {1: "identification"},
    "fedce": {1: "no score yet"},
    "rofl": {1: "first centroids"},
}
"""Rounds, from 1, in which a method does what it does not do in every round."""
PERIOD = 4
AT_CHECKPOINTS = {1: "identification", PERIOD + 1: "checkpoint"}
"""The same of methods that relabel every so many rounds."""
SETTINGS: dict[str, dict[str, Any]] = {
    "fednoro": {"warmup": 1},
    "fedelc": {"warmup": 1},
    "fedned": {"warmup": 1},
    "fedcorr": {"iterations": 2, "fine_tuning": 1},
    "rhfl": {"pretraining": 1},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "fedned + noisy": {"name": "fedned", "uncertainty": 1.0, "confidence": 0.0},
    "fedmerit + salt": {"name": "fedmerit", "salt": True, "salt_with": "always"},
    "fedavg + salt": {"name": "fedavg", "salt": True},
}
"""Second rows of methods."""


def sections(only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Methods by the label of their row, each with one local epoch."""
    for label in only.split(",") if only else [*METHODS, *VARIANTS]:
        given = VARIANTS.get(label, {"name": label})
        name = given["name"]
        period = {"period": PERIOD} if relabels(name) else {}
        yield label, {**SETTINGS.get(name, {}), **given, **period, "local_epochs": 1}


def special(label: str, name: str) -> dict[int, str]:
    """Rounds of a row, from 1, in which something is done that is not done in every round."""
    if label == "fedned + noisy":
        return {**ONCE["fedned"], 2: "first verdict"}  # the second models are trained from the next round on
    return AT_CHECKPOINTS if relabels(name) else ONCE.get(name, {})


def relabels(name: str) -> bool:
    """Whether a method has checkpoints."""
    return name in METHODS and "period" in get_method(name).settings.model_fields


class Run:
    """A method's program over an engine; one call is one round."""

    def __init__(self, base: Prepared, section: Mapping[str, Any], folder: Path, given: argparse.Namespace):
        from medfed.rundir import RunFolder

        experiment = base.experiment.model_copy(update={"method": dict(section)})
        prepared = with_method(base, experiment)
        run = RunFolder(folder)
        engine, trainer = make_engine(prepared, run, given.device, 1, 1)
        assert isinstance(engine, LocalEngine)
        public = None if (images := prepared.public()) is None else Workbench(images, trainer)
        self.server = Server(
            engine, ServerState(prepared.initial_model()), prepared.task, rounds=given.rounds, public=public
        )
        self.clock = time.process_time if given.device == "cpu" else time.perf_counter
        self.quiet = given.quiet
        self.program = prepared.method.program(self.server, prepared.settings)

    def round(self) -> tuple[RoundReport, float]:
        """The record of a round and the seconds that it took."""
        wait_until_quiet(self.quiet)
        started = self.clock()
        report = next(self.program)
        synchronise()
        took = self.clock() - started
        if report.refused:
            raise RuntimeError(f"refused: {report.refused[0]}")
        self.server.state.round = report.round
        return report, took


def cohort(folder: Path, given: argparse.Namespace) -> Prepared:
    """The images and who holds what."""
    data = demo_experiment("oct", folder, given.rounds)
    make_demo_cohort(Path(data["cohort"]["root"]), "oct", patients=given.patients, seed=0)
    data["condition"] = {
        "partition": {"kind": "dirichlet", "clients": given.clients, "alpha": 5.0},
        "label_noise": {"kind": "symmetric", "rate": 0.4, "clean": given.clients // 2},
        "public": {"fraction": 0.1},
    }
    data["overrides"]["image_size"] = [given.side, given.side]
    return prepare(validate(data, "method_cost"))


def measured(
    base: Prepared, label: str, section: Mapping[str, Any], folder: Path, given: argparse.Namespace
) -> list[Any]:
    """A row of the table."""
    ours = Run(base, section, folder / label, given)
    usual = Run(base, {"name": "fedavg"}, folder / f"{label}-fedavg", given)
    ratios: dict[int, float] = {}
    up: dict[int, float] = {}
    down: dict[int, float] = {}
    judged: list[str] = []
    for number in range(1, given.rounds + 1):
        _, reference = usual.round()
        report, took = ours.round()
        clients = len(report.asked)
        ratios[number] = took / reference
        up[number], down[number] = report.traffic.up / clients, report.traffic.down / clients
        judged.append(str(report.server.get("noisy_clients", "-")))
    once = special(label, section["name"])
    rest = [n for n in ratios if n not in once]
    stages = dict.fromkeys(once.values())
    others = {what: [n for n in once if once[n] == what] for what in stages}

    def over(part: Mapping[int, float], rounds: list[int]) -> float:
        return statistics.median(part[n] for n in rounds)

    row = [
        label,
        f"{over(ratios, rest):.2f}",
        "; ".join(f"{what} {over(ratios, rounds):.1f}" for what, rounds in others.items()),
        f"{over(up, rest) / 1e3:.2f}",
        f"{over(down, rest) / 1e3:.2f}",
        "; ".join(f"{what} {over(up, rounds) / 1e3:.2f}" for what, rounds in others.items()),
        "" if set(judged) == {"-"} else " ".join(judged),
    ]
    print(*row, sep=" | ", file=sys.stderr, flush=True)
    return row


def main() -> None:
    given = arguments(__doc__, rounds=8, patients=20, clients=4, side=32, methods="")
    if given.rounds < LEAST:
        raise SystemExit(f"--rounds must be at least {LEAST}")
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        base = cohort(Path(folder), given)
        model = base.initial_model()
        size = sum(t.numel() * t.element_size() for t in model.values())
        held = len(base.condition.truth.clients)
        print(machine())
        print(f"{given.clients} clients, {held} images of {given.side}x{given.side}, {size / 1e3:.2f} kB a model")
        print(f"{len(base.public_rows)} public images\n")
        Run(base, {"name": "fedavg"}, Path(folder) / "warm", given).round()  # the first round of a process is slow
        rows = [measured(base, label, section, Path(folder), given) for label, section in sections(given.methods)]
    columns = [
        "method",
        "a usual round",
        "other rounds",
        "up, kB",
        "down, kB",
        "up in other rounds, kB",
        "judged noisy",
    ]
    table(columns, rows)


if __name__ == "__main__":
    main()
