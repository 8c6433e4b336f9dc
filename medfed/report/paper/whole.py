"""Everything that a grid's report has beside its comparisons: published layouts, tests and intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from medfed.report.grid_cells import GridCells
from medfed.report.paper import figures, intervals, layouts, significance, spectra
from medfed.report.paper.figures import Chart
from medfed.report.paper.intervals import Intervals
from medfed.report.paper.layouts import Layouts
from medfed.report.paper.sheets import Sheet, sheet
from medfed.report.paper.significance import Family

CHARTS: tuple[tuple[str, Callable[[GridCells], list[Chart] | str]], ...] = (
    ("FedISM, Figure 4: ratio of corrupted clients", figures.ratio_of_corrupted),
    ("FedISM, Figure 5: exponent q", figures.exponent),
    ("OCT-FedSIR, Figure 2a to e: spectra and descriptors", spectra.spectral),
    ("OCT-FedSIR, Figures 3 and 4: curves over the noise rate", figures.against_rate),
)
FOREST = 6
"""Conditions whose intervals are drawn."""


@dataclass
class Papers:
    """The published layouts of a grid, its tests and its intervals.

    Args:
        cells: the grid.
        layouts: the tables.
        sheets: the same as they are written.
        charts: the figures.
        absent: layouts that do not apply, with the reason.
        families: the tests.
        intervals: the bootstrap intervals; None where none were asked for.
    """

    cells: GridCells
    layouts: Layouts
    sheets: list[Sheet] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    families: list[Family] = field(default_factory=list)
    intervals: Intervals | None = None

    @property
    def test_sheets(self) -> list[Sheet]:
        """Tests and ranks as they are written."""
        found = [(significance.difference_sheet(f), significance.rank_sheet(f)) for f in self.families]
        return [s for pair in found for s in pair if s is not None]

    @property
    def interval_sheets(self) -> list[Sheet]:
        """Intervals as they are written."""
        return [] if self.intervals is None else intervals.sheets(self.intervals, self.cells)

    def forests(self) -> list[Chart]:
        """The intervals of the first metric, drawn for the first conditions."""
        if self.intervals is None:
            return []
        charts = []
        name = next((i.key.partition("/")[2] for i in self.intervals.found), "")
        for number, condition in enumerate(list(self.cells.conditions)[:FOREST], start=1):
            drawn = intervals.forest(self.intervals, self.cells, condition, name)
            if drawn is not None:
                caption = (
                    f"{condition + ': ' if condition else ''}a mark is one seed's model on its test set, its bar the "
                    f"95% bootstrap interval over {self.intervals.unit}; how far the marks of a method lie apart is "
                    "the spread over seeds."
                )
                charts.append(Chart(f"intervals-{number}", "", caption, drawn))
        return charts


def papers(cells: GridCells, bootstrap: int, spread: str) -> Papers:
    """Recognises and fills in every published layout, and tests and resamples what has finished.

    Args:
        cells: the grid.
        bootstrap: resamples of the intervals; 0 for none.
        spread: what stands behind ± in tables; see :data:`~medfed.report.paper.entries.SPREADS`.
    """
    found = Papers(cells, layouts.layouts(cells))
    found.sheets = [sheet(t, cells, spread) for t in found.layouts.tables]
    found.absent = dict(found.layouts.absent)
    counted = spectra.confusion(cells)
    if isinstance(counted, str):
        found.absent["OCT-FedSIR, Figure 2f: clients by truth and verdict"] = counted
    else:
        found.sheets += counted
    for name, builder in CHARTS:
        built = builder(cells)
        if isinstance(built, str):
            found.absent[name] = built
        else:
            found.charts += built
    found.families = significance.families(cells)
    if bootstrap:
        found.intervals = intervals.intervals(cells, bootstrap)
    return found


def texts(found: Papers) -> dict[str, str]:
    """The files that are text, by name."""
    from medfed.report.paper.sheets import to_latex, to_markdown

    written = {
        "paper.csv": layouts.to_csv(found.layouts.tables),
        "paper.tex": to_latex([*found.sheets, *found.test_sheets]),
        "paper.md": to_markdown([*found.sheets, *found.test_sheets]),
        "tests.csv": layouts.written(significance.rows(found.families)),
    }
    if found.intervals is not None:
        rows = intervals.rows(found.intervals.found, found.intervals.patients)
        written["intervals.csv"] = layouts.written(rows)
    return {name: text for name, text in written.items() if text}
