"""A run in a few lines of text: the table at the end and one line a round while it goes on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from medfed.report.metrics import COLUMN_LABELS, COLUMNS, choose, metric
from medfed.report.runs import LAST, Record, Run, quantity

if TYPE_CHECKING:
    from rich.table import Table


def summary_table(run: Run, last: int = LAST) -> Table:
    """The final numbers of a run: clean, corrupted, average, worst client and gap of each metric.

    Args:
        run: the run.
        last: rounds that a number is the mean of.
    """
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    seed = "" if run.seed is None else f", seed {run.seed}"
    table = Table(title=escape(f"{run.name} ({run.method}{seed})"), title_justify="left", caption_justify="left")
    table.add_column("")
    for column in COLUMNS:
        table.add_column(COLUMN_LABELS[column], justify="right")
    partial = False
    for key in choose(run.metrics()):
        cells = []
        for column in COLUMNS:
            final = run.final(f"{column}/{key}", last)
            short = bool(final.rounds) and not final.complete and final.value is not None
            partial |= short
            cells.append(Text(metric(key).text(final.value) + ("*" if short else "")))
        table.add_row(metric(key).axis, *cells)
    of = f"Mean of the last {min(last, len(run.records))} of {len(run.records)} recorded rounds."
    if run.planned and len(run.records) < run.planned:
        of += f" Not finished: {run.planned} rounds were planned."
    table.caption = of + (" * not defined in all of them." if partial else "")
    return table


def round_line(record: Record, planned: int | None = None) -> str:
    """One round in one line, e.g. ``round  3/30  bacc clean 41.20  corrupted 30.00 ...``.

    Args:
        record: the round record.
        planned: how many rounds there will be.
    """
    width = len(str(planned)) if planned else 3
    parts = [f"round {record.get('round', 0):>{width}}" + (f"/{planned}" if planned else "")]
    evaluation = record.get("evaluation") or {}
    key = next(iter(choose([*(evaluation.get("clean") or {}), *(evaluation.get("corrupted") or {})])), None)
    if key:
        shown = metric(key)
        found = [(c, quantity(record, f"{c}/{key}")) for c in ("clean", "corrupted", "worst")]
        numbers = [f"{c} {shown.text(v)}" for c, v in found if v is not None]
        parts.append(f"{shown.short} " + "  ".join(numbers))
    losses = [quantity(record, f"client/{c}/loss") for c in record.get("clients") or {}]
    defined = [v for v in losses if v is not None and math.isfinite(v)]
    if defined:
        parts.append(f"train loss {math.fsum(defined) / len(defined):.3f}")
    asked, admitted = record.get("asked") or [], record.get("admitted") or []
    parts.append(f"{len(admitted)}/{len(asked)} clients")
    seconds = quantity(record, "seconds/total")
    if seconds is not None and math.isfinite(seconds):
        parts.append(f"{seconds:.1f} s")
    warnings = len(record.get("warnings") or [])
    if warnings:
        parts.append(f"! {warnings} warning{'s' if warnings > 1 else ''}")
    return "  ".join(parts)
