"""Tables over the cells of a grid: what a row and a column hold, and the numbers where they meet.

A number is a mean over conditions of means over seeds, as the papers have it ("condition-level mean accuracies").  Only
finished runs count.  Where cells are missing, what exists is averaged, the entry says how many of how many cells that
are, and it is ranked only among entries made of the same cells.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from medfed.report.grid_cells import GridCells
from medfed.report.metrics import Metric, metric
from medfed.report.runs import Run

SPREADS = {
    "sample": "sample standard deviation (n - 1) over seeds",
    "population": "population standard deviation (n) over seeds",
    "pooled": "population standard deviation (n) over the last rounds of all seeds, pooled",
}
"""What can stand behind the sign ±.  ``pooled`` is the form of FedISM's tables."""
JUDGED = {
    m.key: m
    for m in (
        Metric("identification/accuracy", "Identification accuracy"),
        Metric("identification/clean_precision", "Clean-client precision"),
        Metric("identification/clean_recall", "Clean-client recall"),
        Metric("identification/clean_f1", "Clean-client F1"),
        Metric("identification/noisy_recall", "Noisy-client recall"),
        Metric("relabelling/edit_rate", "Edit rate"),
        Metric("relabelling/recovery", "Recovery"),
        Metric("relabelling/correction_precision", "Correction precision"),
        Metric("relabelling/false_correction_rate", "False-correction rate", higher=False),
        Metric("relabelling/residual_noise", "Residual noise", higher=False),
    )
}
"""What is measured of judgements about labels; the newest value counts, not the mean of the last rounds."""
UNRANKED = frozenset({"relabelling/edit_rate", "gap"})
"""What is neither better nor worse for being more."""

Place = tuple[str, int]
"""Condition and seed."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        key: a quantity of the round record; see :func:`medfed.report.runs.quantity`.
        head: its own head.
        group: the head that it shares with its neighbours.
        conditions: the conditions that are averaged.
        minus: label of a method whose value on the same condition and seed is taken off.
    """

    key: str
    head: str
    group: str = ""
    conditions: tuple[str, ...] = ()
    minus: str = ""

    @property
    def metric(self) -> Metric:
        """How its numbers are shown."""
        return JUDGED.get(self.key) or metric(self.key.partition("/")[2])


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Args:
        label: what stands in front of it.
        method: label of the method in the grid.
        group: the heading that it shares with its neighbours.
        reference: shown for comparison and not ranked.
        conditions: by column, conditions in place of the column's.
        only: conditions to which the column's are restricted; None for all.
    """

    label: str
    method: str
    group: str = ""
    reference: bool = False
    conditions: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    only: frozenset[str] | None = None


@dataclass(frozen=True)
class Entry:
    """The number where a row meets a column; all numbers as recorded (fractions).

    Args:
        values: by condition and seed the number of each finished run in which it is defined.
        windows: the values that these are the means of, by condition and seed.
        places: every condition and seed that the grid has for it.
        finished: how many of these have finished.
        rank: 1 best, 2 second best, None otherwise.
    """

    values: Mapping[Place, float]
    windows: Mapping[Place, Sequence[float]]
    places: tuple[Place, ...]
    finished: int
    rank: int | None = None

    @property
    def whole(self) -> bool:
        """Whether every cell counts."""
        return bool(self.places) and len(self.values) == len(self.places)

    @cached_property
    def mean(self) -> float | None:
        """Mean over conditions of the means over seeds."""
        by_condition: dict[str, list[float]] = {}
        for (condition, _), value in self.values.items():
            by_condition.setdefault(condition, []).append(value)
        means = [statistics.fmean(v) for v in by_condition.values()]
        return statistics.fmean(means) if means else None

    @cached_property
    def by_seed(self) -> dict[int, float]:
        """Mean over the conditions of each seed that has all conditions that any seed has."""
        conditions = {c for c, _ in self.values}
        found = {seed: [v for (_, s), v in self.values.items() if s == seed] for _, seed in self.values}
        return {s: statistics.fmean(v) for s, v in found.items() if len(v) == len(conditions)}

    @property
    def pooled(self) -> list[float]:
        """Every value of the last rounds of all seeds; empty for a mean over several conditions."""
        several = len({c for c, _ in self.values}) > 1
        return [] if several else [v for window in self.windows.values() for v in window]

    def spread(self, kind: str) -> float | None:
        """The spread of a kind, see :data:`SPREADS`; None where there are too few values for it."""
        if kind == "pooled":
            return statistics.pstdev(self.pooled) if len(self.pooled) > 1 else None
        values = list(self.by_seed.values())
        if len(values) < 2:
            return None
        return statistics.stdev(values) if kind == "sample" else statistics.pstdev(values)

    def centre(self, kind: str) -> float | None:
        """The mean that goes with a spread."""
        return statistics.fmean(self.pooled) if kind == "pooled" and self.pooled else self.mean


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper.

    Args:
        id: short name, for files and lines of CSV.
        paper: the paper's name and which of its tables it is.
        title: what it shows.
        corner: head of the first column.
        columns: its columns.
        rows: its rows.
        entries: by row and column.
        notes: what a reader must know.
    """

    id: str
    paper: str
    title: str
    corner: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    entries: Mapping[tuple[int, int], Entry]
    notes: tuple[str, ...] = ()

    @property
    def cells(self) -> set[tuple[str, str, int]]:
        """Every cell of the grid that stands in it: condition, method and seed."""
        return {(c, self.rows[r].method, s) for (r, _), e in self.entries.items() for c, s in e.places}

    def missing(self, cells: GridCells) -> list[str]:
        """Names of its cells that have not finished."""
        return [cells.by_place[place].name for place in sorted(self.cells) if place not in cells.finished]

    @property
    def seeds(self) -> set[int]:
        """Seeds that count anywhere in it."""
        return {s for e in self.entries.values() for _, s in e.values}

    @property
    def poolable(self) -> bool:
        """Whether every entry is of one condition, so that last rounds and seeds can be pooled."""
        return all(len({c for c, _ in e.places}) <= 1 for e in self.entries.values())


def build(
    cells: GridCells,
    id: str,
    paper: str,
    title: str,
    rows: Sequence[Row],
    columns: Sequence[Column],
    corner: str = "method",
    notes: Sequence[str] = (),
) -> PaperTable | None:
    """Fills in a table; None where nothing of it is defined.  Rows and columns without any number are left out."""
    entries = {(r, c): entry(cells, row, column, c) for r, row in enumerate(rows) for c, column in enumerate(columns)}
    kept_rows = [r for r in range(len(rows)) if any(entries[r, c].places for c in range(len(columns)))]
    kept_columns = [c for c in range(len(columns)) if any(entries[r, c].values for r in kept_rows)]
    if not kept_columns:
        return None
    numbers = {(i, j): entries[r, c] for i, r in enumerate(kept_rows) for j, c in enumerate(kept_columns)}
    own_rows, own_columns = tuple(rows[r] for r in kept_rows), tuple(columns[c] for c in kept_columns)
    ranked = _ranked(own_rows, own_columns, numbers)
    return PaperTable(id, paper, title, corner, own_columns, own_rows, ranked, tuple(notes))


def entry(cells: GridCells, row: Row, column: Column, index: int = 0) -> Entry:
    """The number where a row meets a column."""
    conditions = row.conditions.get(index, column.conditions)
    if row.only is not None:
        conditions = tuple(c for c in conditions if c in row.only)
    places = [(c, s) for c in conditions for s in cells.seeds if (c, row.method, s) in cells.by_place]
    if column.minus == row.method:
        return Entry({}, {}, (), 0)
    values: dict[Place, float] = {}
    windows: dict[Place, list[float]] = {}
    finished = 0
    for condition, seed in places:
        run = cells.finished.get((condition, row.method, seed))
        other = cells.finished.get((condition, column.minus, seed)) if column.minus else None
        if run is None or (column.minus and other is None):
            continue
        finished += 1
        value = number(run, column.key, cells.last)
        base = 0.0 if other is None else number(other, column.key, cells.last)
        if value is not None and base is not None:
            values[condition, seed] = value - base
            windows[condition, seed] = [] if other is not None else run.window(column.key, cells.last)
    return Entry(values, windows, tuple(places), finished)


def number(run: Run, key: str, last: int) -> float | None:
    """A run's number: the mean over its last rounds, of a judgement the newest value."""
    return run.final(key, 1 if key in JUDGED else last).value


def _ranked(
    rows: Sequence[Row], columns: Sequence[Column], entries: Mapping[tuple[int, int], Entry]
) -> dict[tuple[int, int], Entry]:
    """Marks best and second best of each column and group of rows; equal numbers share a rank."""
    found = dict(entries)
    for c, column in enumerate(columns):
        if {column.key, column.key.partition("/")[0]} & UNRANKED or column.minus:
            continue
        for group in dict.fromkeys(row.group for row in rows):
            members = [r for r, row in enumerate(rows) if row.group == group and not row.reference]
            most = max((set(found[r, c].values) for r in members), key=len, default=set())
            means = {
                r: mean for r in members if set(found[r, c].values) == most and (mean := found[r, c].mean) is not None
            }
            if len(means) < 2:
                continue
            sign = 1 if column.metric.higher else -1
            for r, mean in means.items():
                rank = 1 + sum(sign * (other - mean) > 0 for other in means.values())
                found[r, c] = replace(found[r, c], rank=rank if rank <= 2 else None)
    return found


def text(column: Column, found: Entry, kind: str) -> str:
    """How an entry is written: ``mean ± spread``, and how many of its cells count where some are missing."""
    if not found.places:
        return ""
    if not found.finished:
        return "–"
    shown, mean = column.metric, found.centre(kind)
    if mean is None or not math.isfinite(mean):
        return "n/a"
    spread = found.spread(kind)
    body = shown.text(mean, signed=bool(column.minus)) + ("" if spread is None else f" ± {shown.text(spread)}")
    return body if found.whole else f"{body} ({len(found.values)}/{len(found.places)})"
