"""What the pages show: plain values, tables and figures for the templates, no markup but the figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np
from markupsafe import Markup

from medfed.report import (
    against_figures,
    against_tables,
    contents,
    figures,
    plots,
    reliability,
    tables,
)
from medfed.report.against import Against
from medfed.report.compare import Comparison
from medfed.report.metrics import COLUMN_LABELS, COLUMN_MEANINGS, COLUMNS, TEST_SETS, choose, metric
from medfed.report.notices import in_rounds, notices, ranges, refusals
from medfed.report.reliability_page import labels_view
from medfed.report.runs import Run

REPORTED = (
    ("sharpness", "sharpness (nats)", "Sharpness", "how much the loss rises within the radius; lower is flatter"),
    ("weight", "aggregation weight", "Aggregation weight", "share in the average; neither direction is better"),
    ("loss", "training loss (nats)", "Training loss", "lower is better"),
)
"""What clients report: name in the record, axis, title, meaning."""


def run_view(run: Run, last: int) -> dict[str, Any]:
    """Everything that the page of a run shows.

    Args:
        run: the run.
        last: rounds that a final number is the mean of.
    """
    names = choose(run.metrics())
    corrupted = contents.corrupted_clients(run)
    predictions = contents.last_predictions(run) or {}
    table = contents.client_table(run)
    versions = contents.flat(run.meta.get("versions") or {})
    marks = reliability.marks(run)
    # Without a corruption there is nothing to compare with.
    shown = [c for c in COLUMNS if any(run.final(f"{c}/{n}", last).rounds for n in names)] or list(COLUMNS)
    view = {
        "run": run,
        "averaged": max((len(run.final(f"{g}/{n}", last).rounds) for g in TEST_SETS for n in names), default=0),
        "duration": duration(run),
        "started": when(run.meta.get("started")),
        "finished": when(run.meta.get("finished")),
        "settings": contents.flat(run.meta.get("method_settings") or {}),
        "versions": versions,
        "short_versions": ", ".join(f"{n} {versions[n]}" for n in ("medfed", "torch", "monai") if n in versions),
        "short_condition": _short(run.meta.get("condition_hash")),
        "short_data": _short(run.meta.get("data_hash")),
        "ranges": ranges,
        "hardware": contents.flat(run.meta.get("hardware") or {}),
        "finals": [(metric(n), [final(run, f"{c}/{n}", last) for c in shown]) for n in names],
        "columns": headed(shown),
        "curves": metric_figures(run, names, last),
        "panels": client_figures(run, names, corrupted),
        "participation": plots.inline(
            figures.participation(run, corrupted),
            "Participation",
            "What became of every client in every round: admitted, refused, dropped out, or not asked.",
        ),
        "refusals": refusals(run),
        "recalls": recalls(run, last),
        "confusions": [(g, confusion(run, p)) for g, p in predictions.items() if len(p.labels)],
        "predictions_round": max((p.round for p in predictions.values()), default=None),
        "reliability": plots.inline(
            figures.reliability(predictions, run.multilabel),
            "Reliability diagram",
            "How often a prediction is right against how confident it is.",
        ),
        "table": table,
        "largest": max(int(table.counts.max(initial=0)), 1) if table else 1,
        "corrupted": corrupted,
        "facts": contents.condition_facts(run),
        "left_out": contents.left_out(run),
        "labels": labels_view(run),
        "marks": {what: in_rounds(rounds) for what, rounds in marks.items()},
        "timing": plots.inline(
            figures.timing(run), "Seconds a round", "Time of clients, of evaluation and of the rest."
        ),
        "traffic": plots.inline(figures.traffic(run, marks), "Bytes a round", "What was sent down to clients and up."),
        "config": contents.configuration(run),
    }
    # Last, when every file was opened, so that what cannot be read is among the notices.
    return {**common(), **view, "notices": notices(run, last)}


def comparison_view(result: Comparison, title: str) -> dict[str, Any]:
    """Everything that the page of a comparison shows."""
    sections = []
    for name in result.metrics:
        sections.append(
            {
                "metric": metric(name),
                "blocks": blocks(result, name),
                "curves": plots.inline(
                    plots.comparison_figure(result, [name]),
                    f"{metric(name).label} over rounds",
                    "Mean and single seeds of each method on each test set.",
                ),
                "differences": plots.inline(
                    plots.difference_figure(result, name),
                    f"Paired differences in {metric(name).label}",
                    "A dot a seed, a bar at the mean of the seeds.",
                ),
                "per_seed": per_seed(result, name),
            }
        )
    return {
        "title": title,
        "comparison": result,
        "sections": sections,
        "members": members(result.runs),
        **common(),
        "columns": headed(tables.measured(result)),
    }


def against_view(result: Against, title: str) -> dict[str, Any]:
    """Everything that the page of comparisons against a number shows."""
    sections = []
    for name in result.metrics:
        parts = []
        for column in result.columns(name):
            drawn = plots.inline(
                against_figures.against_figure(result, [(name, column)]),
                f"{metric(name).label} on the {column} test set against {result.label}",
                "A line a method: mean and standard deviation over seeds.",
            )
            found = [g for p in result.panels for g in against_tables.panel_grids(result, p, name, column)]
            parts.append((column, drawn, found))
        if parts:
            sections.append({"metric": metric(name), "parts": parts})
    groups = [
        (panel.title, value, headed(tables.measured(group)), [(metric(n), blocks(group, n)) for n in group.metrics])
        for panel in result.panels
        for value, group in panel.points.items()
    ]
    return {
        "title": title,
        "result": result,
        "sections": sections,
        "groups": groups,
        "members": members(result.runs),
        **common(),
        "columns": headed([c for c in COLUMNS if any(c in {k for k, _, _ in g[2]} for g in groups)]),
    }


def blocks(result: Comparison, name: str) -> list[tuple[str, list[tuple[str, list[tuple[str, int | None]]]]]]:
    """The tables of one metric: caption and rows of method and cells (text, rank)."""
    found = []
    for caption, methods, write in tables.sections(result, name):
        ranked = write is not tables.by_difference
        rows = [(m, [(write(name, c), c.rank if ranked else None) for c in _row(result, m, name)]) for m in methods]
        found.append((caption, rows))
    return found


def headed(columns: Sequence[str]) -> list[tuple[str, str, str]]:
    """Columns with their label and meaning."""
    return [(c, COLUMN_LABELS[c], COLUMN_MEANINGS[c]) for c in columns]


def members(runs: Mapping[str, Sequence[Run]]) -> list[tuple[str, Run, str]]:
    """Method, run and how long it took."""
    return [(method, run, duration(run)) for method, own in runs.items() for run in own]


def common() -> dict[str, Any]:
    """What every page needs."""
    return {
        "zip": zip,
        "columns": headed(COLUMNS),
        "written": when(datetime.now(timezone.utc).isoformat()),
    }


def final(run: Run, key: str, last: int) -> dict[str, str]:
    """A final number: ``text``, the newest single value ``newest``, and ``note`` where it is not whole."""
    shown, mean, points = metric(key.partition("/")[2]), run.final(key, last), run.values(key)
    if not mean.rounds:
        return {"text": "–", "newest": "", "note": "not recorded"}
    newest = f"round {points[-1][0]}: {shown.text(points[-1][1])}"
    note = "" if mean.complete else f"defined in {mean.defined} of {len(mean.rounds)} rounds"
    return {"text": shown.text(mean.value), "newest": newest, "note": note}


def metric_figures(run: Run, names: list[str], last: int) -> list[tuple[Markup, str]]:
    """The curves on the test sets with their captions."""
    found = []
    for name in names:
        shown = metric(name)
        title = f"{shown.label} by round"
        drawn = plots.inline(figures.metric_curves(run, name, last), title, "One line for each test set.")
        if drawn:
            where = " and ".join(g for g in TEST_SETS if run.values(f"{g}/{name}"))
            found.append((drawn, f"{shown.label} of the global model on the {where} test set; {shown.direction}."))
    return found


def client_figures(run: Run, names: list[str], corrupted: frozenset[str] | None) -> list[tuple[Markup, str]]:
    """The curves of single clients with their captions."""
    wanted = [(f"client/{{client}}/{key}", axis, title, meaning) for key, axis, title, meaning in REPORTED]
    for name in names[:1]:
        shown = metric(name)
        where = "on each client's share of the test set"
        wanted.append((f"client_evaluation/{{client}}/{name}", shown.axis, f"{shown.label} {where}", shown.direction))
    found = []
    for key, axis, title, meaning in wanted:
        drawn = figures.client_curves(run, key, axis, corrupted)
        if drawn is None:
            continue
        figure, bands = drawn
        lines = "the band runs from the lowest to the highest client" if bands else "a thin line is one client"
        caption = f"{title}: {lines}, the thick line the median; {meaning}."
        found.append((plots.svg(figure, f"{title} by round", caption), caption))
    return found


def recalls(run: Run, last: int) -> list[dict[str, Any]]:
    """Recall of each class, mean of the last rounds: name, values and texts by test set, difference."""
    rows = []
    for name in run.classes:
        values = {g: run.final(f"{g}/recall/{name}", last) for g in TEST_SETS}
        if not any(v.rounds for v in values.values()):
            continue
        clean, corrupted = (values[g].value for g in TEST_SETS)
        rows.append(
            {
                "name": name,
                "cells": [(v.value, "–" if not v.rounds else _percent(v.value)) for v in values.values()],
                "change": "–" if clean is None or corrupted is None else f"{100 * (corrupted - clean):+.2f}",
            }
        )
    return rows


def confusion(run: Run, predictions: contents.Predictions) -> dict[str, Any]:
    """Counts by true and predicted class; for several labels at once, right and wrong of each at 0.5.

    Returns:
        ``header`` (column names) and ``rows``: name and cells of ``(count, share of the row)``;
        ``unusable``: samples without finite scores.
    """
    labels, p = predictions.labels, predictions.probabilities
    if labels.ndim == 2:
        held, said = labels > 0, p >= 0.5
        header = ["found", "missed", "false alarm", "rightly not"]
        counts = np.stack([held & said, held & ~said, ~held & said, ~held & ~said]).sum(axis=1).T
        of = np.repeat(np.stack([held.sum(0), (~held).sum(0)], axis=1), 2, axis=1)
    else:
        size = len(run.classes)
        header = run.classes
        counts = np.bincount(labels * size + p.argmax(axis=1), minlength=size**2).reshape(size, size)
        of = counts.sum(axis=1, keepdims=True)
    share = counts / np.maximum(of, 1)
    rows = [(c, [(int(n), float(s)) for n, s in zip(*row)]) for c, row in zip(run.classes, zip(counts, share))]
    return {"header": header, "rows": rows, "unusable": predictions.unusable}


def per_seed(result: Comparison, name: str) -> list[tuple[str, str, list[str]]]:
    """Paired differences: method, seed, and the text of each column."""
    rows = []
    for method in result.others:
        cells = _row(result, method, name)
        for seed in sorted({s for c in cells for s in c.differences}, key=str):
            found = [c.differences.get(seed) for c in cells]
            rows.append((method, str(seed), [metric(name).text(d, signed=True) for d in found]))
    return rows


def duration(run: Run) -> str:
    """How long the run took, or what its recorded rounds took where it has not finished."""
    begin, end = _moment(run.meta.get("started")), _moment(run.meta.get("finished"))
    if begin and end and (begin.tzinfo is None) == (end.tzinfo is None):
        return _span((end - begin).total_seconds())
    seconds = [v for _, v in run.values("seconds/total") if math.isfinite(v)]
    return f"{_span(math.fsum(seconds))} in recorded rounds" if seconds else "not recorded"


def when(value: Any) -> str:
    """A recorded time for people, in UTC where its zone is known."""
    moment = _moment(value)
    if moment is None:
        return "not recorded"
    if moment.tzinfo is None:
        return f"{moment:%Y-%m-%d %H:%M}"
    return f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"


def _moment(value: Any) -> datetime | None:
    """A time recorded as ISO text or as seconds since 1970."""
    try:
        if isinstance(value, (int, float)):
            return datetime.fromtimestamp(value, timezone.utc)
        return datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    except (ValueError, OverflowError, OSError):
        return None


def _span(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _short(digest: Any) -> str:
    text = str(digest or "")
    return text if len(text) <= 20 else f"{text[:16]}…"


def _percent(value: float | None) -> str:
    return "n/a" if value is None or math.isnan(value) else f"{100 * value:.2f}"


def _row(result: Comparison, method: str, name: str) -> list[Any]:
    return [result.cell(method, name, column) for column in tables.measured(result)]
