"""The tables of a grid from whatever cells exist: one comparison a condition, one against each axis of numbers."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfed.errors import MedfedError
from medfed.report.against import Against, against
from medfed.report.compare import Comparison, compare
from medfed.report.grid_cells import DONE, GridCells, load_cells
from medfed.report.runs import Run

if TYPE_CHECKING:
    from rich.console import Console


RESAMPLES = 1000
"""Resamples of the bootstrap intervals."""


@dataclass
class GridTables:
    """All tables of a grid.

    Args:
        cells: of the grid.
        conditions: the comparison of each condition that has runs, by its label.
        axes: the comparisons against each number, by its dotted name.
        notes: cells that are not there, and what cannot be compared.
    """

    cells: GridCells
    conditions: dict[str, Comparison] = field(default_factory=dict)
    axes: dict[str, Against] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def render(self, console: Console) -> None:
        """Prints the comparison of every condition."""
        for label, comparison in self.conditions.items():
            console.print(f"\n{label}" if label else "", markup=False, style="bold")
            comparison.render(console)
        for note in self.notes:
            console.print(f"- {note}", markup=False, soft_wrap=True)

    def to_csv(self) -> str:
        """One line a condition, method, metric and column."""
        rows = [
            {"condition": label, **row}
            for label, comparison in self.conditions.items()
            for row in csv.DictReader(io.StringIO(comparison.to_csv()))
        ]
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()

    def to_latex(self) -> str:
        """The tables of every condition and of every axis, each below a comment that names it."""
        parts = [("condition " + (label or "-"), c.to_latex()) for label, c in self.conditions.items()]
        parts += [(f"against {key}", a.to_latex()) for key, a in self.axes.items()]
        return "\n".join(f"% {' '.join(name.split())}\n{text}" for name, text in parts)


def grid_tables(folder: Path) -> GridTables:
    """Compares the runs that a grid has so far.

    Raises:
        MedfedError: the folder is no grid, or no round of it is done.
    """
    cells = load_cells(folder)
    result = GridTables(cells)
    found: dict[str, list[Run]] = {}
    for cell in cells.cells:
        if cell.run is not None:
            found.setdefault(cell.condition, []).append(cell.run)
    if not found:
        raise MedfedError("no round of this grid is done yet.", where=str(folder), fix="Run it first.")
    if missing := [c.folder for c in cells.cells if c.run is None]:
        result.notes.append(f"{len(missing)} of {len(cells.cells)} cells have no round yet: {', '.join(missing)}")
    how: dict[str, Any] = {"metrics": cells.metrics, "last": cells.last}
    for condition, runs in found.items():
        try:
            result.conditions[condition] = compare(runs, baseline=_present(cells.baseline, runs), **how)
        except MedfedError as error:
            result.notes.append(f"{condition or 'the runs'}: {error}")
    together = [run for runs in found.values() for run in runs]
    for key in cells.axes:
        try:
            result.axes[key] = against(together, key, baseline=_present(cells.baseline, together), **how)
        except MedfedError as error:
            result.notes.append(f"against {key}: {error}")
    return result


def _present(baseline: str | None, runs: Sequence[Run]) -> str | None:
    return baseline if any(run.method == baseline for run in runs) else None


def write_grid_report(
    folder: Path,
    out: Path | None = None,
    *,
    bootstrap: int = RESAMPLES,
    spread: str = "sample",
    say: Callable[[str], object] = lambda _: None,
) -> list[Path]:
    """Writes a grid's page, its tables as CSV and LaTeX, and the papers' figures as PDF.

    What an earlier report wrote into the same folder and this one does not is removed; see
    :mod:`medfed.report.own_files`.

    Args:
        folder: of the grid.
        out: folder of the files; the grid's own by default.
        bootstrap: resamples of the bootstrap intervals; 0 for none.
        spread: what stands behind ± in the papers' tables: ``sample``, ``population`` or ``pooled``.
        say: told which files of an earlier report were removed or left.

    Returns:
        The files written, the page first.

    Raises:
        MedfedError: as :func:`grid_tables`; or a file cannot be written.
    """
    from medfed.report.html import environment, write_page
    from medfed.report.own_files import FIGURES, OwnFiles
    from medfed.report.page import against_view, common, comparison_view
    from medfed.report.paper.sheets import LEGEND
    from medfed.report.paper.statistics import EXACT
    from medfed.report.paper.whole import papers, texts
    from medfed.report.plots import save, svg

    found = grid_tables(folder)
    out = folder if out is None else out
    own = OwnFiles(out, found.cells.name)
    if own.problem:
        found.notes.append(own.problem)
    published = papers(found.cells, bootstrap, spread)
    forests = published.forests()
    page = environment().get_template("grid.html")
    html = page.render(
        title=found.cells.name,
        grid=found,
        cells=found.cells,
        open=[c for c in found.cells.cells if c.standing != DONE],
        papers=published,
        legend=LEGEND,
        exact=EXACT,
        charts=[(c, svg(c.figure, c.paper, c.caption)) for c in published.charts],
        forests=[(c, svg(c.figure, "Bootstrap intervals", c.caption)) for c in forests],
        interval_sheets=published.interval_sheets,
        conditions=[(label, comparison_view(c, label)) for label, c in found.conditions.items()],
        axes=[(key, against_view(a, key)) for key, a in found.axes.items()],
        **common(),
    )
    files = {"report.html": html, "tables.csv": found.to_csv(), "tables.tex": found.to_latex(), **texts(published)}
    files |= {f"against-{re.sub('[^A-Za-z0-9]+', '-', key)}.csv": a.to_csv() for key, a in found.axes.items()}
    written = [write_page(text, out / name) for name, text in files.items()]
    for chart in (*published.charts, *forests):
        path = out / FIGURES / f"{chart.id}.pdf"
        save(chart.figure, path)
        written.append(path)
    for line in own.settle(written):
        say(line)
    return written
