"""One form for every table of a grid's report, and the same as LaTeX and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from medfed.report.grid_cells import GridCells
from medfed.report.paper.entries import SPREADS, PaperTable, text
from medfed.report.tables import escape_latex, escape_markdown

LEGEND = (
    "Best in bold, second best underlined, among entries of the same cells; –: none has finished; "
    "(k/n): k of its n cells have; n/a: finished, but the number is not defined."
)


@dataclass(frozen=True)
class Written:
    """A cell as it is written: 1 best, 2 second best."""

    text: str
    rank: int | None = None


@dataclass(frozen=True)
class Line:
    """A row as it is written."""

    label: str
    cells: tuple[Written, ...]
    group: str = ""
    reference: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table as it is written.

    Args:
        id: short name; a label in LaTeX.
        paper: which table of which paper it is; empty for others.
        caption: what it shows, with the kind of spread by name.
        corner: head of the first column.
        heads: heads of the other columns.
        groups: what stands above them, by column; neighbours with the same text share it.
        lines: rows.
        notes: what a reader must know.
    """

    id: str
    paper: str
    caption: str
    corner: str
    heads: tuple[str, ...]
    groups: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()

    @property
    def spans(self) -> list[tuple[str, int]]:
        """Shared heads and how many columns each spans; empty where there are none."""
        found = [(name, len(list(members))) for name, members in groupby(self.groups)]
        return found if any(name for name, _ in found) else []

    @property
    def grouped(self) -> list[tuple[str, list[Line]]]:
        """Rows below their headings."""
        return [(name, list(members)) for name, members in groupby(self.lines, key=lambda line: line.group)]


def sheet(table: PaperTable, cells: GridCells, kind: str = "sample") -> Sheet:
    """A paper's table as it is written.

    Args:
        table: the table.
        cells: the grid.
        kind: what stands behind ±; see :data:`~medfed.report.paper.entries.SPREADS`.  A table whose entries are means
            over conditions has nothing to pool and gets the sample standard deviation instead.
    """
    used = "sample" if kind == "pooled" and not table.poolable else kind
    seeds = len(table.seeds)
    shown = [table.entries[r, c].spread(used) for r in range(len(table.rows)) for c in range(len(table.columns))]
    behind = f"; mean ± {SPREADS[used]}" if any(s is not None for s in shown) else ""
    over = f"{seeds} seed{'s' if seeds != 1 else ''}"
    judged = all(c.key.startswith(("identification", "relabelling")) for c in table.columns)
    window = "" if judged else f"; a run's number is the mean of its last {cells.last} rounds"
    notes = list(table.notes)
    if missing := table.missing(cells):
        notes.append(f"{len(missing)} of {len(table.cells)} cells have not finished: {_few(missing)}")
    lines = []
    for r, row in enumerate(table.rows):
        entries = [table.entries[r, c] for c in range(len(table.columns))]
        written = (Written(text(c, e, used), e.rank) for c, e in zip(table.columns, entries))
        lines.append(Line(row.label, tuple(written), row.group, row.reference))
    return Sheet(
        table.id,
        table.paper,
        f"{table.title}{window}{behind}; {over}.",
        table.corner,
        tuple(c.head for c in table.columns),
        tuple(c.group for c in table.columns),
        tuple(lines),
        tuple(notes),
    )


def _few(names: Sequence[str], most: int = 6) -> str:
    return "; ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def to_latex(sheets: Sequence[Sheet]) -> str:
    """LaTeX ``table`` environments for the package ``booktabs``; best in bold, second best underlined."""
    out = ["% needs \\usepackage{booktabs}; wide tables also \\usepackage{graphicx} and \\resizebox"]
    for one in sheets:
        out += _table(one)
    return "\n".join(out).rstrip() + "\n"


def _table(one: Sheet) -> list[str]:
    width = len(one.heads)
    name = f"{one.paper}: " if one.paper else ""
    out = [f"% {' '.join(f'{name}{one.caption}'.split())}", "\\begin{table}", "  \\centering"]
    out += [f"  \\caption{{{escape_latex(one.caption)}}}", f"  \\label{{tab:{one.id}}}"]
    out += [f"  \\begin{{tabular}}{{l{'r' * width}}}", "    \\toprule"]
    if one.spans:
        parts, rules, start = [], [], 2
        for name, span in one.spans:
            parts.append(f"\\multicolumn{{{span}}}{{c}}{{{escape_latex(name)}}}")
            rules += [f"\\cmidrule(lr){{{start}-{start + span - 1}}}"] if name else []
            start += span
        out += [f"     & {' & '.join(parts)} \\\\", f"    {' '.join(rules)}"]
    heads = " & ".join(escape_latex(h) for h in one.heads)
    out += [f"    {escape_latex(one.corner.capitalize())} & {heads} \\\\", "    \\midrule"]
    for k, (group, lines) in enumerate(one.grouped):
        if group:
            out += ["    \\midrule"] if k else []
            out.append(f"    \\multicolumn{{{width + 1}}}{{l}}{{\\textit{{{escape_latex(group)}}}}} \\\\")
        for j, line in enumerate(lines):
            if line.reference and j and not lines[j - 1].reference:
                out.append("    \\addlinespace")
            out.append(f"    {escape_latex(line.label)} & " + " & ".join(map(_cell, line.cells)) + r" \\")
    out += ["    \\bottomrule", "  \\end{tabular}", "\\end{table}"]
    return out + [f"% {' '.join(note.split())}" for note in one.notes] + [""]


def _cell(cell: Written) -> str:
    macro = {1: "\\textbf", 2: "\\underline"}.get(cell.rank or 0)
    body = escape_latex(cell.text)
    return f"{macro}{{{body}}}" if macro else body


def to_markdown(sheets: Sequence[Sheet]) -> str:
    """GitHub Markdown; best in bold, second best in italics, what stands above columns as a part of their heads."""
    out: list[str] = []
    for one in sheets:
        name = f"{one.paper}: " if one.paper else ""
        heads = [" ".join(filter(None, (g, h))) for g, h in zip(one.groups or ("",) * len(one.heads), one.heads)]
        out += [escape_markdown(f"{name}{one.caption}"), ""]
        out.append(f"| {' | '.join(escape_markdown(h) for h in (one.corner, *heads))} |")
        out.append(f"|---{'|---:' * len(heads)}|")
        for group, lines in one.grouped:
            if group:
                out.append(f"| *{escape_markdown(group)}* |{' |' * len(heads)}")
            for line in lines:
                cells = (
                    {1: "**", 2: "*"}.get(c.rank or 0, "").join(["", escape_markdown(c.text), ""]) for c in line.cells
                )
                out.append(f"| {escape_markdown(line.label)} | {' | '.join(cells)} |")
        out += ["", *(f"- {escape_markdown(note)}" for note in one.notes), *([""] if one.notes else [])]
    return "\n".join(out).rstrip() + "\n" if out else ""


def with_notes(one: Sheet, *notes: str) -> Sheet:
    """The same with further notes."""
    return replace(one, notes=(*one.notes, *notes))
