"""A comparison as tables: for the terminal, CSV, Markdown, LaTeX and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from medfed.report.metrics import COLUMN_LABELS, COLUMN_MEANINGS, COLUMNS, metric

if TYPE_CHECKING:
    from rich.console import Console

    from medfed.report.compare import Cell, Comparison


Section = tuple[str, list[str], Callable[[str, "Cell"], str]]


def by_seeds(name: str, cell: Cell) -> str:
    """``mean ± sample standard deviation over runs``; without spread where there is one run."""
    shown = metric(name)
    spread = "" if cell.std is None else f" ± {shown.text(cell.std)}"
    return shown.text(cell.mean) + spread


def by_pool(name: str, cell: Cell) -> str:
    """``mean ± population standard deviation`` over the last rounds of all runs, pooled."""
    shown = metric(name)
    spread = "" if cell.pooled_std is None else f" ± {shown.text(cell.pooled_std)}"
    return shown.text(cell.pooled_mean) + spread


def by_difference(name: str, cell: Cell) -> str:
    """``mean ± sample standard deviation`` of the paired differences and in how many seeds it is better."""
    if cell.difference is None:
        return "n/a"
    shown = metric(name)
    spread = "" if cell.difference_std is None else f" ± {shown.text(cell.difference_std)}"
    return f"{shown.text(cell.difference, signed=True)}{spread} ({cell.better}/{len(cell.differences)})"


def captions(comparison: Comparison, name: str) -> dict[str, str]:
    """What the three tables of one metric show, by ``seeds``, ``pool`` and ``difference``."""
    label, last = metric(name).axis, comparison.last
    counts = {len(members) for members in comparison.runs.values()}
    seeds = "1 seed" if counts == {1} else f"{'–'.join(map(str, sorted({min(counts), max(counts)})))} seeds"
    over = "" if counts == {1} else f"; mean ± sample standard deviation (n - 1) over {seeds}"
    return {
        "seeds": f"{label}, {metric(name).direction}: mean of a run's last {last} rounds{over}.",
        "pool": f"{label}: mean ± population standard deviation (n) over the last {last} rounds of {seeds}, "
        "pooled, the form of the published FedISM tables.",
        "difference": f"{label}: paired difference to {comparison.baseline}, mean ± sample standard "
        "deviation over seeds, and in how many seeds the method is better.",
    }


def sections(comparison: Comparison, name: str) -> list[Section]:
    """The tables of one metric: caption, methods in the rows, how a cell is written."""
    text = captions(comparison, name)
    tables: list[Section] = [
        (text["seeds"], comparison.methods, by_seeds),
        (text["pool"], comparison.methods, by_pool),
    ]
    if comparison.paired and comparison.others:
        tables.append((text["difference"], comparison.others, by_difference))
    return tables


def legend(columns: Sequence[str]) -> str:
    """What the columns are."""
    return "; ".join(f"{COLUMN_LABELS[c]}: {COLUMN_MEANINGS[c]}" for c in columns) + "."


def measured(comparison: Comparison) -> list[str]:
    """The columns in which anything is defined: without a corruption there is nothing to compare with."""
    filled = {column for (_, _, column), cell in comparison.cells.items() if cell.per_run}
    return [c for c in COLUMNS if c in filled] or list(COLUMNS)


def on_terminal(comparison: Comparison, name: str, pooled: bool = False) -> list[Section]:
    """The tables of one metric that a terminal shows: differences of several seeds only, the pool when asked for."""
    seeds = max(len(comparison.cell(m, name, c).differences) for m in comparison.methods for c in COLUMNS)
    hidden = ([] if pooled else [by_pool]) + ([by_difference] if seeds < 2 else [])
    return [section for section in sections(comparison, name) if section[2] not in hidden]


def render(comparison: Comparison, console: Console, pooled: bool = False) -> None:
    """Prints the tables to a Rich console; best in bold, second best underlined.

    Args:
        comparison: the comparison.
        console: where to print; 80 characters are enough.
        pooled: also the form of the published FedISM tables.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    columns = measured(comparison)
    for name in comparison.metrics:
        for caption, methods, write in on_terminal(comparison, name, pooled):
            console.print(Text(f"\n{caption}"))
            # Five cells of "55.11 ± 0.60" and the method within 80 characters leave no room between them.
            wide = any(comparison.cell(m, name, c).std is not None for m in methods for c in COLUMNS)
            table = Table(box=SIMPLE_HEAD, padding=0 if wide or write is not by_seeds else (0, 1))
            table.add_column("method", overflow="fold")
            for column in columns:
                table.add_column(COLUMN_LABELS[column], justify="right", no_wrap=True)
            for method in methods:
                cells = []
                for column in columns:
                    cell = comparison.cell(method, name, column)
                    style = {1: "bold", 2: "underline"}.get(cell.rank or 0, "")
                    text = write(name, cell)
                    if write is by_difference:  # in two lines, since one of that length does not fit five times
                        text, style = text.replace(" (", "\n("), ""
                    cells.append(Text(text, style=style))
                table.add_row(Text(method), *cells)
            console.print(table)
    if len(comparison.methods) > 1 and console.is_terminal:
        console.print(Text("Best in bold, second best underlined."))
    console.print(Text(legend(columns)))
    for note in comparison.notes:
        console.print(Text(f"! {note}"))


def to_csv(comparison: Comparison) -> str:
    """One line a method, metric and measured column; numbers in the unit of that line, empty where not defined."""
    rows, columns = [], measured(comparison)
    for (method, name, column), cell in comparison.cells.items():
        if column not in columns:
            continue

        def shown(value: float | None, name: str = name) -> float | str:
            return "" if value is None else round(metric(name).shown(value), 8)

        rows.append(
            {
                "method": method,
                "metric": name,
                "column": column,
                "unit": metric(name).unit or "1",
                "mean": shown(cell.mean),
                "sample_std_over_seeds": shown(cell.std),
                "seeds": len(cell.per_run),
                "pooled_mean": shown(cell.pooled_mean),
                "pooled_population_std": shown(cell.pooled_std),
                "pooled_values": len(cell.pooled),
                "baseline": comparison.baseline,
                "paired_difference": shown(cell.difference),
                "paired_difference_sample_std": shown(cell.difference_std),
                "seeds_better": cell.better if cell.differences else "",
                "seeds_paired": len(cell.differences),
                "rank": cell.rank or "",
            }
        )
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def to_markdown(comparison: Comparison) -> str:
    """GitHub Markdown; best in bold, second best in italics."""
    lines, columns = [], measured(comparison)
    for name in comparison.metrics:
        for caption, methods, write in sections(comparison, name):
            lines += [escape_markdown(caption), ""]
            lines.append("| method | " + " | ".join(COLUMN_LABELS[c] for c in columns) + " |")
            lines.append("|---" + "|---:" * len(columns) + "|")
            for method in methods:
                cells = []
                for column in columns:
                    cell = comparison.cell(method, name, column)
                    mark = {1: "**", 2: "*"}.get(cell.rank or 0, "") if write is not by_difference else ""
                    cells.append(mark + write(name, cell) + mark)
                lines.append(f"| {escape_markdown(method)} | " + " | ".join(cells) + " |")
            lines.append("")
    if len(comparison.methods) > 1:
        lines += ["Best in bold, second best in italics.", ""]
    lines += [legend(columns), ""] + [f"- {escape_markdown(note)}" for note in comparison.notes]
    return "\n".join(lines).rstrip() + "\n"


def to_latex(comparison: Comparison) -> str:
    """LaTeX ``table`` environments for the package ``booktabs``; best in bold, second best underlined."""
    out, columns = ["% needs \\usepackage{booktabs}"], measured(comparison)
    for name in comparison.metrics:
        for caption, methods, write in sections(comparison, name):
            out += ["\\begin{table}", "  \\centering", f"  \\caption{{{escape_latex(caption)}}}"]
            out += [f"  \\begin{{tabular}}{{l{'r' * len(columns)}}}", "    \\toprule"]
            out.append("    Method & " + " & ".join(COLUMN_LABELS[c].capitalize() for c in columns) + r" \\")
            out.append("    \\midrule")
            for method in methods:
                cells = []
                for column in columns:
                    cell = comparison.cell(method, name, column)
                    text = escape_latex(write(name, cell))
                    macro = {1: "\\textbf", 2: "\\underline"}.get(cell.rank or 0)
                    cells.append(f"{macro}{{{text}}}" if macro and write is not by_difference else text)
                out.append(f"    {escape_latex(method)} & " + " & ".join(cells) + r" \\")
            out += ["    \\bottomrule", "  \\end{tabular}", "\\end{table}", ""]
    out += [f"% {note}" for note in comparison.notes]
    return "\n".join(out).rstrip() + "\n"


def to_json(comparison: Comparison) -> str:
    """The comparison with every number as recorded (fractions, not percent)."""
    rows: list[dict[str, Any]] = [
        {
            "method": method,
            "metric": name,
            "column": column,
            "mean": cell.mean,
            "sample_std_over_seeds": cell.std,
            "per_run": [{"seed": seed, "value": value} for seed, value in cell.per_run],
            "pooled_mean": cell.pooled_mean,
            "pooled_population_std": cell.pooled_std,
            "pooled_values": len(cell.pooled),
            "paired_differences": [{"seed": s, "value": d} for s, d in cell.differences.items()],
            "paired_difference": cell.difference,
            "paired_difference_sample_std": cell.difference_std,
            "seeds_better": cell.better,
            "seeds_same_sign": cell.same_sign,
            "rank": cell.rank,
        }
        for (method, name, column), cell in comparison.cells.items()
    ]
    document = {
        "baseline": comparison.baseline,
        "paired": comparison.paired,
        "last_rounds": comparison.last,
        "unit": "as recorded (fractions)",
        "runs": {m: [r.folder for r in members] for m, members in comparison.runs.items()},
        "notes": comparison.notes,
        "cells": rows,
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
    "−": "$-$",
    "·": r"$\cdot$",
    "α": r"$\alpha$",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "\n": " ",
}
_MARKDOWN = {**{c: f"\\{c}" for c in "\\`*_{}[]|~"}, "<": "&lt;", ">": "&gt;", "\n": " "}


def escape_latex(text: str) -> str:
    """Text that LaTeX sets as it reads."""
    return "".join(_LATEX.get(c, c) for c in text)


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it reads, also within a table."""
    return "".join(_MARKDOWN.get(c, c) for c in text)
