"""The tables of a grid from whatever cells exist: one comparison a condition, one against each axis of numbers."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfed.errors import MedfedError
from medfed.report.against import Against, against
from medfed.report.compare import Comparison, compare
from medfed.report.runs import LAST, Run, load_run

if TYPE_CHECKING:
    from rich.console import Console

CONTENT = "grid.json"
"""What a grid consists of, beside its runs."""


@dataclass
class GridTables:
    """All tables of a grid.

    Args:
        name: of the grid.
        folder: of the grid.
        conditions: the comparison of each condition that has runs, by its label.
        axes: the comparisons against each number, by its dotted name.
        notes: cells that are not there, and what cannot be compared.
    """

    name: str
    folder: Path
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
    try:
        content: dict[str, Any] = json.loads((folder / CONTENT).read_text(encoding="utf-8"))
        listed = [(c["condition"], c["method"], folder / c["folder"]) for c in content["cells"]]
        result = GridTables(content["name"], folder)
    except (OSError, ValueError, KeyError, TypeError):
        raise MedfedError("is not the folder of a grid.", where=str(folder), fix=f"It lacks {CONTENT}.") from None
    found: dict[str, list[Run]] = {}
    missing = []
    for condition, method, path in listed:
        run = load_run(path) if (path / "run.json").is_file() else None
        if run is None or not run.records:
            missing.append(path.name)
            continue
        # The grid's labels tell methods apart, and group runs as the names of methods do.
        found.setdefault(condition, []).append(replace(run, meta={**run.meta, "method": method}))
    if not found:
        raise MedfedError("no round of this grid is done yet.", where=str(folder), fix="Run it first.")
    if missing:
        result.notes.append(f"{len(missing)} of {len(listed)} cells have no round yet: {', '.join(missing)}")
    how: dict[str, Any] = {"metrics": content.get("metrics"), "last": content.get("last") or LAST}
    for condition, runs in found.items():
        try:
            result.conditions[condition] = compare(runs, baseline=_present(content.get("baseline"), runs), **how)
        except MedfedError as error:
            result.notes.append(f"{condition or 'the runs'}: {error}")
    together = [run for runs in found.values() for run in runs]
    for key in content.get("axes", ()):
        try:
            result.axes[key] = against(together, key, baseline=_present(content.get("baseline"), together), **how)
        except MedfedError as error:
            result.notes.append(f"against {key}: {error}")
    return result


def _present(baseline: str | None, runs: Sequence[Run]) -> str | None:
    return baseline if any(run.method == baseline for run in runs) else None


def write_grid_report(folder: Path) -> list[Path]:
    """Writes ``report.html``, ``tables.csv``, ``tables.tex`` and a CSV for each axis into a grid's folder.

    Returns:
        The files written, the page first.

    Raises:
        MedfedError: as :func:`grid_tables`; or a file cannot be written.
    """
    from medfed.report.html import environment, write_page
    from medfed.report.page import against_view, common, comparison_view

    found = grid_tables(folder)
    page = environment().get_template("grid.html")
    html = page.render(
        title=found.name,
        grid=found,
        conditions=[(label, comparison_view(c, label)) for label, c in found.conditions.items()],
        axes=[(key, against_view(a, key)) for key, a in found.axes.items()],
        **common(),
    )
    texts = {"report.html": html, "tables.csv": found.to_csv(), "tables.tex": found.to_latex()}
    texts |= {f"against-{re.sub('[^A-Za-z0-9]+', '-', key)}.csv": a.to_csv() for key, a in found.axes.items()}
    return [write_page(text, folder / name) for name, text in texts.items()]
