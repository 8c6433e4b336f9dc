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
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    seed = "" if run.seed is None else f", seed {run.seed}"
    title = escape(f"{run.name} ({run.method}{seed})")
    # Without lines between the columns the longest name of a metric fits into 80 characters.
    table = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("", no_wrap=True)
    keys = choose(run.metrics())
    columns = [c for c in COLUMNS if not keys or any(run.final(f"{c}/{key}", last).rounds for key in keys)]
    for column in columns:
        table.add_column(COLUMN_LABELS[column], justify="right")
    partial = False
    for key in keys:
        cells = []
        for column in columns:
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


def shown_metric(record: Record) -> str | None:
    """The metric that :func:`round_line` shows of a round; None in a round without evaluation."""
    evaluation = record.get("evaluation") or {}
    return next(iter(choose([*(evaluation.get("clean") or {}), *(evaluation.get("corrupted") or {})])), None)


def legend(record: Record) -> str:
    """What the numbers of :func:`round_line` are."""
    key = shown_metric(record)
    loss = "Loss: mean training loss of the clients."
    if key is None:
        return loss
    sets = [c for c in ("clean", "corrupted") if quantity(record, f"{c}/{key}") is not None]
    worst = ", and worst over the clients' shares of it" if quantity(record, f"worst/{key}") is not None else ""
    return f"{metric(key).label} of the global model on the {' and the '.join(sets)} test set{worst}. {loss}"


def round_line(record: Record, planned: int | None = None) -> str:
    """One round in one line, e.g. ``round  3/30  clean 41.20 %  corrupted 30.00 %  worst 12.50 %  loss 1.250  3.0 s``.

    Args:
        record: the round record.
        planned: how many rounds there will be.
    """
    width = len(str(planned)) if planned else 3
    parts = [f"round {record.get('round', 0):>{width}}" + (f"/{planned}" if planned else "")]
    key = shown_metric(record)
    if key:
        shown = metric(key)
        found = [(c, quantity(record, f"{c}/{key}")) for c in ("clean", "corrupted", "worst")]
        parts += [f"{c} {shown.with_unit(v)}" for c, v in found if v is not None]
    losses = [quantity(record, f"client/{c}/loss") for c in record.get("clients") or {}]
    defined = [v for v in losses if v is not None and math.isfinite(v)]
    if defined:
        parts.append(f"loss {math.fsum(defined) / len(defined):.3f}")
    parts += _labels(record)
    asked, admitted = record.get("asked") or [], record.get("admitted") or []
    seconds = quantity(record, "seconds/total")
    if seconds is not None and math.isfinite(seconds):
        parts.append(f"{seconds:.1f} s")
    if len(admitted) < len(asked):
        parts.append(f"{len(admitted)} of {len(asked)} clients")
    return "  ".join(parts)


def _labels(record: Record) -> list[str]:
    """What became of clients and labels in a round with an identification or a relabelling."""
    server = record.get("server") or {}
    found = []
    if isinstance(server.get("clean_clients"), int):
        judged = [server.get(k) for k in ("clean_clients", "noisy_clients", "undetermined_clients")]
        found.append(f"{judged[0]} of {sum(n for n in judged if isinstance(n, int))} clients judged clean")
    if server.get("relabelled"):
        quality = (record.get("evaluation") or {}).get("relabelling") or {}
        before, after = quality.get("noise_rate"), quality.get("residual_noise")
        edited = [c["edited"] for c in (record.get("clients") or {}).values() if isinstance(c.get("edited"), int)]
        if before is not None and after is not None:
            found.append(f"wrong labels {100 * before:.1f} % -> {100 * after:.1f} %")
        elif edited:
            found.append(f"{sum(edited)} targets changed")
    return found
