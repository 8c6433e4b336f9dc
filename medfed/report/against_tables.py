"""Comparisons at several values of a number, as tables: for the terminal, CSV, Markdown, LaTeX and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from medfed.report.compare import Cell
from medfed.report.metrics import metric
from medfed.report.tables import by_difference, by_seeds, escape_latex, escape_markdown

if TYPE_CHECKING:
    from rich.console import Console

    from medfed.report.against import Against, Panel

WIDE = 4
"""Values side by side on a terminal of 80 characters."""


@dataclass(frozen=True)
class Grid:
    """One table: a row a method, a column a value.

    Args:
        caption: what it shows.
        values: of the columns.
        rows: method, and for each value its text and rank (1 best, 2 second best, None otherwise).
    """

    caption: str
    values: list[float]
    rows: list[tuple[str, list[tuple[str, int | None]]]]


def grids(result: Against) -> list[Grid]:
    """All tables: of each panel and metric the numbers, and the differences to the baseline where there are seeds."""
    found = []
    for panel in result.panels:
        for name in result.metrics:
            for column in result.columns(name):
                found += panel_grids(result, panel, name, column)
    return found


def panel_grids(result: Against, panel: Panel, name: str, column: str) -> list[Grid]:
    """The tables of one panel, metric and test set."""
    where = f"{panel.title}: " if panel.title else ""
    what = f"{where}{metric(name).axis} on the {column} test set"
    cells = {m: panel.line(m, name, column) for m in result.methods}
    seeds = max((len(c.per_run) for line in cells.values() for _, c in line), default=0)
    spread = " ± sample standard deviation over seeds" if seeds > 1 else ""
    numbers = _grid(panel, result.methods, name, column, by_seeds)
    found = [Grid(f"{what}, mean of the last {result.last} rounds{spread}.", *numbers)] if numbers[1] else []
    if max((len(c.differences) for line in cells.values() for _, c in line), default=0) > 1:
        others = [m for m in result.methods if m != result.baseline]
        numbers = _grid(panel, others, name, column, by_difference)
        found.append(Grid(f"{what}, paired difference to {result.baseline} (seeds in which it is better).", *numbers))
    return found


def _grid(
    panel: Panel, methods: list[str], name: str, column: str, write: Callable[[str, Cell], str]
) -> tuple[list[float], list[tuple[str, list[tuple[str, int | None]]]]]:
    rows = []
    for method in methods:
        cells = [panel.cell(x, method, name, column) for x in panel.points]
        if any(c is not None and c.mean is not None for c in cells):
            ranked = write is not by_difference
            texts = [("", None) if c is None else (write(name, c), c.rank if ranked else None) for c in cells]
            rows.append((method, texts))
    return list(panel.points), rows


def render(result: Against, console: Console) -> None:
    """Prints the tables to a Rich console of 80 characters or more."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    for grid in grids(result):
        console.print(Text(f"\n{grid.caption}"))
        for start in range(0, len(grid.values), WIDE):
            part = slice(start, start + WIDE)
            table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
            table.add_column(result.label, overflow="fold")
            for value in grid.values[part]:
                table.add_column(f"{value:g}", justify="right", no_wrap=True)
            for method, cells in grid.rows:
                shown = []
                for text, rank in cells[part]:
                    style = {1: "bold", 2: "underline"}.get(rank or 0, "")
                    shown.append(Text(text.replace(" (", "\n("), style=style))
                table.add_row(Text(method), *shown)
            console.print(table)
    if len(result.methods) > 1 and console.is_terminal:
        console.print(Text("Best in bold, second best underlined."))
    for note in result.notes:
        console.print(Text(f"! {note}"))


def to_csv(result: Against) -> str:
    """The lines of every group (:func:`medfed.report.tables.to_csv`) with its panel and value before them."""
    out = io.StringIO()
    writer = None
    for panel in result.panels:
        for value, comparison in panel.points.items():
            for row in csv.DictReader(io.StringIO(comparison.to_csv())):
                line = {"panel": panel.title, result.key: f"{value:g}", **row}
                if writer is None:
                    writer = csv.DictWriter(out, list(line), lineterminator="\n")
                    writer.writeheader()
                writer.writerow(line)
    return out.getvalue()


def to_markdown(result: Against) -> str:
    """GitHub Markdown; best in bold, second best in italics."""
    lines = []
    for grid in grids(result):
        lines += [escape_markdown(grid.caption), ""]
        lines.append(f"| {escape_markdown(result.label)} | " + " | ".join(f"{v:g}" for v in grid.values) + " |")
        lines.append("|---" + "|---:" * len(grid.values) + "|")
        for method, cells in grid.rows:
            marks = [{1: "**", 2: "*"}.get(rank or 0, "") for _, rank in cells]
            texts = [f"{mark}{text}{mark}" for mark, (text, _) in zip(marks, cells)]
            lines.append(f"| {escape_markdown(method)} | " + " | ".join(texts) + " |")
        lines.append("")
    if len(result.methods) > 1:
        lines += ["Best in bold, second best in italics.", ""]
    return "\n".join(lines + [f"- {escape_markdown(note)}" for note in result.notes]).rstrip() + "\n"


def to_latex(result: Against) -> str:
    """LaTeX ``table`` environments for the package ``booktabs``; best in bold, second best underlined."""
    out = ["% needs \\usepackage{booktabs}"]
    for grid in grids(result):
        out += ["\\begin{table}", "  \\centering", f"  \\caption{{{escape_latex(grid.caption)}}}"]
        out += [f"  \\begin{{tabular}}{{l{'r' * len(grid.values)}}}", "    \\toprule"]
        head = " & ".join(f"{v:g}" for v in grid.values)
        out += [f"    {escape_latex(result.label.capitalize())} & {head} \\\\", "    \\midrule"]
        for method, cells in grid.rows:
            texts = []
            for text, rank in cells:
                macro = {1: "\\textbf", 2: "\\underline"}.get(rank or 0)
                texts.append(f"{macro}{{{escape_latex(text)}}}" if macro else escape_latex(text))
            out.append(f"    {escape_latex(method)} & " + " & ".join(texts) + r" \\")
        out += ["    \\bottomrule", "  \\end{tabular}", "\\end{table}", ""]
    return "\n".join(out + [f"% {note}" for note in result.notes]).rstrip() + "\n"


def to_json(result: Against) -> str:
    """Every group with every number as recorded (fractions, not percent)."""
    groups = [
        {"panel": panel.title, "value": value, **json.loads(comparison.to_json())}
        for panel in result.panels
        for value, comparison in panel.points.items()
    ]
    document = {"against": result.key, "notes": result.notes, "groups": groups}
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
