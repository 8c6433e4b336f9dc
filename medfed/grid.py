"""Running a grid: cells one after another or side by side, found again after a restart, failures kept apart."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from medfed.checks import advice, check_method
from medfed.config import CohortSection, Experiment
from medfed.errors import ConfigError, FederationError, MedfedError
from medfed.experiment import Prepared, check_on, prepare, read_section
from medfed.grid_file import Cell, Grid
from medfed.methods.registry import resolve_method
from medfed.report.grid_cells import CONTENT, FAILURES, facts_of, plain, read_failures
from medfed.rundir import META, RunFolder
from medfed.running import execute, new_folder, resume

if TYPE_CHECKING:
    from medfed.federation.loop import Listener

DONE, PARTIAL, NEW, DAMAGED = "done", "to be resumed", "new", "damaged"
PATIENCE = 30.0
"""Seconds that a cell waits for another process to let go of its run."""


@dataclass(frozen=True)
class Event:
    """What happened to a cell.

    Args:
        kind: ``start``, ``round``, ``done`` or ``failed``.
        cell: index of the cell in the grid.
        round: the round that is done.
        reason: why it failed.
        died: whether the process that ran it has gone with it.
    """

    kind: str
    cell: int
    round: int = 0
    reason: str = ""
    died: bool = False


Tell = Callable[[Event], None]


def standing(cell: Cell) -> tuple[str, int]:
    """How a cell stands, and how many rounds of it are recorded.

    Returns:
        :data:`DONE`, :data:`PARTIAL`, :data:`NEW` or :data:`DAMAGED` (see :func:`check_whole`), and the rounds.
    """
    if not (cell.folder / META).is_file():
        return NEW, 0
    rounds = recorded(cell)
    try:
        status = check_whole(cell, rounds)
    except MedfedError:
        return DAMAGED, rounds
    return (DONE if status == "completed" else PARTIAL), rounds


def recorded(cell: Cell) -> int:
    """Rounds whose records are there as far as can be told without reading what is in them."""
    try:
        lines = RunFolder(cell.folder).records.read_bytes().splitlines()
    except OSError:
        return 0
    return sum(line.startswith(b"{") and line.rstrip().endswith(b"}") for line in lines)


def check_whole(cell: Cell, rounds: int) -> str:
    """Refuses a run that says nothing of how it stands, or that is completed without the records of its rounds.

    Nothing repairs it: whether to remove a run is for a person to say.

    Args:
        cell: the cell, whose run is there.
        rounds: how many of its rounds are recorded.

    Returns:
        The status of the run.

    Raises:
        ConfigError: what is wrong, and what to do.
    """
    run = RunFolder(cell.folder)
    status: str = run.meta()["status"]
    if status == "completed" and rounds < cell.experiment.rounds:
        raise ConfigError(
            f"the run is completed, but {run.records.name} holds {rounds} of its {cell.experiment.rounds} rounds.",
            where=str(cell.folder),
            fix="Restore that file, or remove the folder and run the grid again.",
        )
    return status


class Bench:
    """Runs cells in this process; what cells of one group share is read, decoded and generated once.

    Args:
        device: device of the cells; the experiment's own unless given.
    """

    def __init__(self, device: str | None = None):
        self.device = device
        self._group: tuple[str, int] | None = None
        self._prepared: Prepared | None = None
        self._refused: MedfedError | None = None

    def run(self, cell: Cell, others: Sequence[Path], listener: Listener) -> None:
        """Runs a cell from its beginning, or from its last checkpoint.

        Args:
            cell: the cell.
            others: folders of the runs of its group.
            listener: told of every round.

        Raises:
            MedfedError: whatever :func:`medfed.running.start` and :func:`medfed.running.resume` raise, and a condition
                that is not that of the group.
        """
        if standing(cell)[0] != NEW:
            wait_until_free(cell.folder)
            resume(cell.folder, listeners=[listener])
            return
        prepared = self.prepare(cell)
        check_same(prepared, others)
        folder = new_folder(prepared, path=cell.folder, grid=cell.tags())
        with folder.held():
            execute(prepared, folder, listeners=[listener])

    def prepare(self, cell: Cell) -> Prepared:
        """All that a cell needs."""
        experiment = cell.experiment
        if self.device is not None:
            engine = experiment.engine.model_copy(update={"device": self.device})
            experiment = experiment.model_copy(update={"engine": engine})
        if self._group == cell.group and self._refused is not None:
            raise self._refused
        if self._prepared is None or self._group != cell.group:
            self._prepared, self._refused = None, None  # two cohorts need not be in memory at once
            self._group = cell.group
            try:
                self._prepared = prepare(experiment)
            except MedfedError as error:  # no method is in it: they are checked when the grid is read
                self._refused = error
                raise
            return self._prepared
        return with_method(self._prepared, experiment)


def wait_until_free(folder: Path) -> None:
    """Gives a process of an earlier grid that was killed a moment to write down how its run stands."""
    with suppress(Timeout), FileLock(folder / ".lock").acquire(timeout=PATIENCE):
        pass


def with_method(prepared: Prepared, experiment: Experiment) -> Prepared:
    """What another method needs on the same condition, as :func:`medfed.experiment.prepare` would make it.

    Args:
        prepared: what was prepared for one method.
        experiment: the experiment, which differs in nothing but the method.
    """
    method, settings = resolve_method(experiment.method)
    check_method(experiment, method, prepared.task.kind)
    common = prepared.warnings[len(advice(prepared.experiment, prepared.settings)) :]
    warnings = [*advice(experiment, settings), *common]
    return replace(prepared, experiment=experiment, method=method, settings=settings, warnings=warnings)


def check_same(prepared: Prepared, others: Sequence[Path]) -> None:
    """Refuses a cell whose condition or initial model are not those of the runs that it is to be paired with."""
    for path in others:
        if not (path / META).is_file():
            continue
        try:
            meta = RunFolder(path).meta()
        except MedfedError:
            continue  # a damaged run is reported as a failure of its own
        for what, key, value in (
            ("condition", "condition_hash", prepared.condition.hash),
            ("initial model", "initial_model_hash", prepared.initial_model_hash),
        ):
            if meta.get(key) != value:
                raise FederationError(
                    f"the {what} is not that of {path.name} ({key} differs), so that the two cannot be paired.",
                    where="grid",
                    fix="Restore the data and weights, or remove the older runs.",
                )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Makes a grid's folder and keeps other processes from running the same grid at the same time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot be made ({error.strerror}).", where=str(folder), fix="Change 'output'.") from None
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FederationError("another process is running this grid.", where=str(folder)) from None
    try:
        yield
    finally:
        lock.release()


def write_content(grid: Grid) -> None:
    """Writes what the grid consists of, for reports."""
    content: dict[str, Any] = {
        "name": grid.file.name,
        "baseline": grid.file.baseline,
        "metrics": grid.file.metrics,
        "last": grid.cells[0].experiment.evaluation.last,
        "axes": list(grid.axes),
        "methods": {c.method: method_facts(c.experiment) for c in grid.cells},
        "conditions": {c.condition: facts_of(c.experiment.model_dump(mode="json")) for c in grid.cells},
        "cells": [
            {"condition": c.condition, "method": c.method, "seed": c.seed, "folder": c.folder.name} for c in grid.cells
        ],
    }
    write_json(grid.folder / CONTENT, content)


def method_facts(experiment: Experiment) -> dict[str, Any]:
    """A method's name and all its settings, by dotted name."""
    method, settings = resolve_method(experiment.method)
    return plain({"method": {"name": method.name, **settings.model_dump(mode="json")}})


def write_json(path: Path, content: Any) -> None:
    """Writes a file at once or not at all."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    os.replace(draft, path)


def remembering(grid: Grid, tell: Tell) -> Tell:
    """Tells on, and writes down which cells have failed and why, for reports.

    What a full disk does not take is written with a later event.
    """
    path = grid.folder / FAILURES
    failed = read_failures(grid.folder)
    written = dict(failed)

    def told(event: Event) -> None:
        nonlocal written
        name = grid.cells[event.cell].folder.name
        if event.kind == "failed":
            failed[name] = event.reason
        else:
            failed.pop(name, None)
        if failed != written:
            with suppress(OSError):
                write_json(path, failed)
                written = dict(failed)
        tell(event)

    return told


def check_cells(grid: Grid, slots: int | None = None, say: Callable[[str], None] = lambda _: None) -> None:
    """Refuses a cell that is still to be run, for all that can be told of it without decoding an image.

    Devices, bundles with their overrides and weights, class maps of label noise and the number of clients are looked
    at, each combination once; cohorts are read, one at a time, for the names of their classes.

    Args:
        grid: the grid.
        slots: cells that are to run at a time; None where none is to run here, and so no device need be here.
        say: told which cohort is being read.

    Raises:
        MedfedError: what is wrong, with the name of the first cell that has it.
    """
    waiting: dict[str, tuple[CohortSection, list[Cell]]] = {}
    for cell in grid.cells:
        if (section := cell.experiment.cohort) is not None and standing(cell)[0] in (NEW, PARTIAL):
            waiting.setdefault(section.model_dump_json(), (section, []))[1].append(cell)
    if slots is not None:
        _check_devices(grid, slots, [cell for _, cells in waiting.values() for cell in cells])
    for section, cells in waiting.values():
        cohort, seen, built = None, set(), set()
        for cell in cells:
            experiment = cell.experiment
            if (parts := _checked_parts(experiment)) in seen:
                continue
            seen.add(parts)
            try:
                if cohort is None:
                    say(f"Reading {section.root}")
                    cohort = read_section(section)
                network = json.dumps([experiment.bundle, experiment.overrides], sort_keys=True, default=str)
                check_on(experiment, cohort, build=network not in built)
                built.add(network)
            except MedfedError as error:
                raise type(error)(str(error), where=cell.name) from None
            except Exception as error:  # of a bundle's or a reader's own code
                raise ConfigError(f"{type(error).__name__}: {error}", where=cell.name) from error


def _check_devices(grid: Grid, slots: int, cells: Sequence[Cell]) -> None:
    """Refuses a device that is not here and that one of these cells would be given."""
    from medfed.training.local import resolve_device

    if grid.file.devices:
        for device in grid.file.devices[: min(slots, len(cells))]:
            resolve_device(device)
        return
    for device, cell in {c.experiment.engine.device: c for c in reversed(cells)}.items():
        try:
            resolve_device(device)
        except MedfedError as error:
            raise type(error)(str(error), where=cell.name) from None


def _checked_parts(experiment: Experiment) -> str:
    """What :func:`check_cells` looks at, as text."""
    content = experiment.model_dump(mode="json", include={"bundle", "overrides", "participation", "condition"})
    content["condition"].pop("seed")
    return json.dumps(content, sort_keys=True)


def others_of(grid: Grid, cell: Cell) -> list[Path]:
    """Folders of the other cells of a cell's group."""
    return [c.folder for c in grid.cells if c.group == cell.group and c is not cell]


def attempt(bench: Bench, cell: Cell, index: int, others: Sequence[Path], tell: Tell) -> None:
    """Runs a cell and tells how it went; a failure ends nothing but the cell."""
    state, rounds = standing(cell)
    tell(Event("start", index, rounds))
    try:
        if state == DAMAGED:
            check_whole(cell, rounds)
        bench.run(cell, others, lambda record, _: tell(Event("round", index, record["round"])))
    except MedfedError as error:
        tell(Event("failed", index, reason=str(error)))
    except Exception as error:
        log = cell.folder.parent / "errors" / f"{cell.folder.name}.log"
        try:
            log.parent.mkdir(exist_ok=True)
            log.write_text(traceback.format_exc(), encoding="utf-8")
            seen = f"see {log}"
        except OSError as fault:
            seen = f"{log} cannot be written: {fault.strerror or fault}"
        tell(Event("failed", index, reason=f"{type(error).__name__}: {error} ({seen})"))
    else:
        tell(Event("done", index))


def copy_the_rest(grid: Grid) -> list[str]:
    """Copies to MLflow what finished cells did not get to copy: the grid was killed, or there was no server.

    Returns:
        What a person should know; at the first copy that fails the others are left for the next time.
    """
    from medfed.tracking.cursor import Cursor
    from medfed.tracking.sync import sync

    said = []
    for cell in grid.cells:
        file = cell.folder / "tracking.json"
        if not file.is_file() or standing(cell)[0] != DONE or Cursor.load(file).closed is not None:
            continue
        if not cell.experiment.tracking.enabled:
            continue
        try:
            said.append(f"Copied to MLflow: {sync(cell.folder)}")
        except MedfedError as error:
            return [*said, f"Not copied to MLflow: {cell.folder.name}: {error}"]
    return said


def run_grid(
    grid: Grid, tell: Tell, *, parallel: int | None = None, say: Callable[[str], None] = lambda _: None
) -> None:
    """Runs the cells that are not done yet.

    Args:
        grid: the validated grid.
        tell: told of every event.
        parallel: cells at a time; by default as many as the grid names devices, or one.
        say: told in one line what is going on before the first cell starts.

    Raises:
        MedfedError: another process is running the grid, or a cell cannot be run; see :func:`check_cells`.
        KeyboardInterrupt: all cells stand at their last checkpoints.
    """
    slots = parallel or len(grid.file.devices) or 1
    with held(grid.folder):
        write_content(grid)
        tell = remembering(grid, tell)
        waiting = [i for i, cell in enumerate(grid.cells) if standing(cell)[0] != DONE]
        check_cells(grid, slots, say)
        if slots > 1 or grid.file.devices:
            from medfed.grid_workers import run_side_by_side

            run_side_by_side(grid, waiting, slots, tell)
            return
        bench = Bench()
        for index in waiting:
            cell = grid.cells[index]
            attempt(bench, cell, index, others_of(grid, cell), tell)
