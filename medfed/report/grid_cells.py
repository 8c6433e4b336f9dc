"""The cells of a grid as its folder has them: what each is, how it stands, and why it is not there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from medfed.errors import MedfedError
from medfed.report.against import settings_of
from medfed.report.contents import plain
from medfed.report.runs import LAST, Run, load_run

CONTENT = "grid.json"
"""What a grid consists of, beside its runs."""
FAILURES = "failures.json"
"""Cells that have failed and were not started since, with their reasons, by folder."""
DONE, FAILED, STOPPED, MISSING = "done", "failed", "not finished", "not run"
STANDINGS = (DONE, STOPPED, FAILED, MISSING)


@dataclass(frozen=True)
class GridCell:
    """One cell.

    Args:
        condition: label of its condition.
        method: label of its method.
        seed: its seed.
        folder: name of its run's folder.
        run: its run, where a round of it is recorded; the cell's label stands for its method.
        standing: one of :data:`STANDINGS`.
        reason: why it is not done; empty where that is not known.
    """

    condition: str
    method: str
    seed: int
    folder: str
    run: Run | None
    standing: str
    reason: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return " · ".join(filter(None, (self.condition, self.method, f"seed {self.seed}")))


@dataclass(frozen=True)
class GridCells:
    """All cells of a grid, those that exist and those that do not.

    Args:
        name: of the grid.
        folder: of the grid.
        cells: in the order of the grid.
        methods: name and settings of each method by its label, by dotted name (``method.q``).
        conditions: cohort and condition by label, by dotted name, without the seed.
        baseline: label of the method that differences are taken against; the first unless one is named.
        metrics: metrics of the tables; None for the default ones.
        last: rounds that a run's number is the mean of.
        axes: dotted names of the numbers along which conditions lie.
    """

    name: str
    folder: Path
    cells: tuple[GridCell, ...]
    methods: Mapping[str, Mapping[str, Any]]
    conditions: Mapping[str, Mapping[str, Any]]
    baseline: str
    metrics: list[str] | None = None
    last: int = LAST
    axes: tuple[str, ...] = ()

    @cached_property
    def by_place(self) -> dict[tuple[str, str, int], GridCell]:
        """Cells by condition, method and seed."""
        return {(c.condition, c.method, c.seed): c for c in self.cells}

    @cached_property
    def seeds(self) -> list[int]:
        """All seeds, in the order of the grid."""
        return list(dict.fromkeys(c.seed for c in self.cells))

    @property
    def runs(self) -> list[Run]:
        """All runs with a record, finished or not."""
        return [c.run for c in self.cells if c.run is not None]

    @cached_property
    def finished(self) -> dict[tuple[str, str, int], Run]:
        """Finished runs by condition, method and seed: what tables of papers are made of."""
        return {k: c.run for k, c in self.by_place.items() if c.standing == DONE and c.run is not None}

    def counts(self) -> dict[str, int]:
        """How many cells there are of each standing."""
        found = Counter(c.standing for c in self.cells)
        return {s: found[s] for s in STANDINGS if found[s]}


def read_cell(folder: Path, entry: Mapping[str, Any], failures: Mapping[str, str]) -> GridCell:
    """How a cell stands; one whose run cannot be read has failed.

    Args:
        folder: of the grid.
        entry: the cell in :data:`CONTENT`.
        failures: reasons by folder, as :data:`FAILURES` has them.
    """
    name = str(entry["folder"])
    run, reason = None, failures.get(name, "")
    if (folder / name / "run.json").is_file():
        try:
            run = load_run(folder / name)
        except MedfedError as error:
            reason = reason or f"its run cannot be read: {error.what}"
    if run is not None and not run.meta.get("status"):  # without it nothing else that stands there can be relied on
        run, reason = None, reason or "its run.json is damaged: it does not say how the run stands"
    if run is not None and run.finished:
        standing, reason = DONE, ""
    elif reason or (run is not None and run.status == "failed"):
        standing, reason = FAILED, reason or str((run and run.meta.get("error")) or "no reason was recorded")
    elif run is not None:
        standing, reason = STOPPED, f"{run.status}, {len(run.records)} of {run.planned} rounds recorded"
        reason = "; ".join((reason, *run.problems[:1]))
    else:
        standing = MISSING
    run = run if run is not None and run.records else None
    return GridCell(str(entry["condition"]), str(entry["method"]), int(entry["seed"]), name, run, standing, reason)


def load_cells(folder: Path) -> GridCells:
    """Reads a grid's folder.

    Raises:
        MedfedError: it is not the folder of a grid, or a cell's folder holds something else than a run.
    """
    try:
        content: dict[str, Any] = json.loads((folder / CONTENT).read_text(encoding="utf-8"))
        name, listed = str(content["name"]), content["cells"]
        failures = read_failures(folder)
        cells = tuple(read_cell(folder, entry, failures) for entry in listed)
    except FileNotFoundError:
        raise MedfedError("is not the folder of a grid.", where=str(folder), fix=f"It lacks {CONTENT}.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MedfedError(
            f"{CONTENT} cannot be read ({type(error).__name__}: {error}).",
            where=str(folder),
            fix="Run the grid again: finished cells are kept and the file is written anew.",
        ) from None
    if not cells:
        raise MedfedError("the grid has no cell.", where=str(folder))
    methods = _told(content.get("methods"), (c.method for c in cells))
    conditions = _told(content.get("conditions"), (c.condition for c in cells))
    for cell in cells:  # grids of before these were written down
        if cell.run is not None and not (methods[cell.method] and conditions[cell.condition]):
            known = settings_of(cell.run)
            methods[cell.method] = methods[cell.method] or {k: v for k, v in known.items() if k.startswith("method.")}
            conditions[cell.condition] = conditions[cell.condition] or facts_of(known)
    # The grid's labels tell methods apart, and group runs as the names of methods do.
    cells = tuple(c if c.run is None else replace(c, run=labelled(c.run, c.method)) for c in cells)
    baseline = content.get("baseline")
    return GridCells(
        name,
        folder,
        cells,
        methods,
        conditions,
        baseline if baseline in methods else cells[0].method,
        content.get("metrics"),
        content.get("last") or LAST,
        tuple(content.get("axes", ())),
    )


def facts_of(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """What of an experiment makes its condition, by dotted name: cohort and condition without the seed."""
    parts = {k: v for k, v in plain(experiment).items() if k.split(".")[0] in ("cohort", "condition")}
    return {k: v for k, v in parts.items() if k != "condition.seed"}


def labelled(run: Run, label: str) -> Run:
    """The run with a label in place of its method's name."""
    return replace(run, meta={**run.meta, "method": label})


def _told(content: Any, labels: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    given = content if isinstance(content, Mapping) else {}
    return {label: told if isinstance(told := given.get(label), Mapping) else {} for label in labels}


def read_failures(folder: Path) -> dict[str, str]:
    """Reasons of failed cells by folder; none where the file is not there or damaged: the next failure writes it."""
    try:
        found = json.loads((folder / FAILURES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}
