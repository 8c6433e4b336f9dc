"""The figures of one run's page, each a function of the run that returns a figure or None when there is nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from medfed.report.contents import Predictions
from medfed.report.metrics import metric
from medfed.report.plots import (
    CLEAN,
    CORRUPTED,
    DASHES,
    GRID,
    INK,
    MUTED,
    THIRD,
    UNKNOWN,
    fitted,
    legend_above,
    line,
    panel,
    round_axis,
    styled,
)
from medfed.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_POINTS = 8000
"""Points of one panel beyond which bands are drawn in place of single clients."""
BINS = 15
"""Equal bins of a reliability diagram, as in the calibration error that is recorded."""

STATES = {
    "admitted": (THIRD, 0.76),
    "refused": (CORRUPTED, 0.76),
    "dropped out": ("#e69f00", 0.32),
    "no answer": (UNKNOWN, 0.32),
}
"""Colour and height of a bar: who did not answer is also told apart without colour."""


@styled
def metric_curves(run: Run, name: str, last: int) -> Figure | None:
    """One metric on the clean and the corrupted test set, round by round."""
    shown = metric(name).shown
    curves = {g: [(r, shown(v)) for r, v in run.values(f"{g}/{name}")] for g in ("clean", "corrupted")}
    if not any(math.isfinite(v) for points in curves.values() for _, v in points):
        return None
    figure, axes = panel()
    window = run.final(f"clean/{name}", last).rounds or run.final(f"corrupted/{name}", last).rounds
    if len(window) > 1 and len(run.rounds) > len(window):
        axes.axvspan(window[0], window[-1], color=GRID, alpha=0.45, lw=0)
    if name == "balanced_accuracy" and run.classes:
        chance = 50.0 if run.multilabel else 100 / len(run.classes)
        axes.axhline(chance, color=MUTED, lw=1, ls=(0, (1, 2)), label="chance")
    for (group, points), colour, dash in zip(curves.items(), (CLEAN, CORRUPTED), DASHES):
        line(axes, points, tip=group, color=colour, ls=dash, label=group if points else None)
    axes.set_ylabel(metric(name).axis)
    round_axis(axes, run.rounds)
    legend_above(axes)
    return figure


@styled
def client_curves(run: Run, key: str, label: str, corrupted: frozenset[str] | None) -> tuple[Figure, bool] | None:
    """One quantity of every client, round by round, corrupted clients coloured.

    Args:
        run: the run.
        key: the quantity with ``{client}`` in place of the name, e.g. ``"client/{client}/sharpness"``.
        label: axis label with unit.
        corrupted: corrupted clients; None where the truth is not known.

    Returns:
        The figure, and whether bands stand in for single clients; None when nothing was recorded.
    """
    name = key.rpartition("/")[2]
    shown = metric(name).shown if key.startswith("client_evaluation") else float
    curves = {c: [(r, shown(v)) for r, v in run.values(key.format(client=c))] for c in run.clients}
    curves = {c: p for c, p in curves.items() if any(math.isfinite(v) for _, v in p)}
    if not curves:
        return None
    figure, axes = panel()
    bands = sum(map(len, curves.values())) > MOST_POINTS
    if corrupted is None:
        groups = [("client", UNKNOWN, list(curves))]
    else:
        groups = [
            ("clean client", CLEAN, [c for c in curves if c not in corrupted]),
            ("corrupted client", CORRUPTED, [c for c in curves if c in corrupted]),
        ]
    for (title, colour, members), dash in zip(groups, DASHES):
        if not members:
            continue
        if bands:
            rounds, low, middle, high = _band([dict(curves[c]) for c in members])
            axes.fill_between(rounds, low, high, color=colour, alpha=0.2, lw=0)
        else:
            for client in members:
                line(axes, curves[client], tip=client, color=colour, ls=dash, lw=0.9, alpha=0.5)
            rounds, _, middle, _ = _band([dict(curves[c]) for c in members])
        line(axes, list(zip(rounds, middle)), color=colour, ls=dash, lw=2.4, label=f"median {title} ({len(members)})")
    axes.set_ylabel(label)
    round_axis(axes, run.rounds)
    legend_above(axes, 2)
    return figure, bands


def _band(curves: Sequence[dict[int, float]]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Rounds with lowest, median and highest defined value."""
    rounds = sorted({r for c in curves for r, v in c.items() if math.isfinite(v)})
    stats = [[v for c in curves if math.isfinite(v := c.get(r, math.nan))] for r in rounds]
    return rounds, [min(s) for s in stats], [float(np.median(s)) for s in stats], [max(s) for s in stats]


def client_state(record: dict, client: str) -> str | None:
    """What became of a client in a round: a key of :data:`STATES`, or None when it was not asked."""
    if client in (record.get("admitted") or ()):
        return "admitted"
    for entry in record.get("refused") or []:
        if entry.get("client") == client:
            gone = ("did not answer", "dropout", "dropped", "late", "timeout")
            return "dropped out" if any(w in str(entry.get("reason")) for w in gone) else "refused"
    return "no answer" if client in (record.get("asked") or ()) else None


@styled
def participation(run: Run, corrupted: frozenset[str] | None) -> Figure | None:
    """A row a client, a column a round: admitted, refused, dropped out."""
    clients = run.clients
    if not clients or not any(r.get("asked") or r.get("admitted") for r in run.records):
        return None
    figure, axes = panel(11, 0.9 + min(0.19 * len(clients), 9))
    seen: dict[str, bool] = {}
    for y, client in enumerate(clients):
        spans: dict[str, list[tuple[float, float]]] = {}
        last: tuple[str, int] | None = None
        for record in run.records:
            state, round_ = client_state(record, client), record["round"]
            if state is None:
                last = None
            elif last == (state, round_ - 1):  # a longer bar in place of one more
                start, width = spans[state][-1]
                spans[state][-1] = (start, width + 1)
                last = (state, round_)
            else:
                spans.setdefault(state, []).append((round_ - 0.5, 1.0))
                last = (state, round_)
        for state, bars in spans.items():
            label = None if seen.get(state) else state
            seen[state] = True
            colour, height = STATES[state]
            axes.broken_barh(bars, (y - height / 2, height), facecolor=colour, lw=0, label=label)
    step = max(1, math.ceil(len(clients) / 45))
    axes.set_yticks(range(0, len(clients), step), [fitted(c) for c in clients[::step]])
    for tick, client in zip(axes.get_yticklabels(), clients[::step]):
        tick.set_color(CORRUPTED if corrupted and client in corrupted else INK)
        tick.set_fontsize(8)
    axes.grid(False)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(clients) - 0.4, -0.6)
    round_axis(axes, run.rounds)
    axes.set_xlim(run.rounds[0] - 0.5, run.rounds[-1] + 0.5)
    legend_above(axes)
    return figure


def reliability_bins(predictions: Predictions) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidence against how often it is right, in equal bins.

    Multi-class: the top probability against whether that class is right.  Multi-label: every label's probability
    against whether the label holds.

    Returns:
        Mean confidence ``[B]``, share right ``[B]`` (NaN in empty bins) and samples ``[B]``.
    """
    p, labels = predictions.probabilities, predictions.labels
    if labels.ndim == 1:
        confidence, right = p.max(axis=1), p.argmax(axis=1) == labels
    else:
        confidence, right = p.ravel(), labels.ravel() > 0
    index = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)  # bins are open below, as in Guo et al.
    count = np.bincount(index, minlength=BINS)
    with np.errstate(invalid="ignore"):
        mean = np.bincount(index, confidence, BINS) / count
        share = np.bincount(index, right.astype(float), BINS) / count
    return mean, share, count


@styled
def reliability(predictions: dict[str, Predictions], multilabel: bool) -> Figure | None:
    """Reliability diagram of the last predictions: on the diagonal, confidence is honest."""
    present = {g: p for g in ("clean", "corrupted") if (p := predictions.get(g)) and len(p.labels)}
    if not present:
        return None
    figure, axes = panel(5.4, 3.6)
    axes.plot([0, 100], [0, 100], color=MUTED, lw=1, ls=(0, (1, 2)), label="honest")
    for (group, part), marker in zip(present.items(), "os"):
        mean, share, count = reliability_bins(part)
        some = count > 0
        colour, dash = (CLEAN, DASHES[0]) if group == "clean" else (CORRUPTED, DASHES[1])
        size = 12 + 160 * count[some] / count.sum()
        axes.plot(100 * mean[some], 100 * share[some], color=colour, ls=dash, lw=1.2, alpha=0.7)
        axes.scatter(100 * mean[some], 100 * share[some], s=size, color=colour, marker=marker, label=group, lw=0)
    axes.set_xlabel("predicted probability of a label (%)" if multilabel else "confidence, top probability (%)")
    axes.set_ylabel("label holds (%)" if multilabel else "prediction right (%)")
    axes.set_xlim(-3, 103)
    axes.set_ylim(-3, 103)
    legend_above(axes)
    return figure


@styled
def timing(run: Run) -> Figure | None:
    """Seconds a round, split into clients, evaluation and the rest."""
    parts = {p: dict(run.values(f"seconds/{p}")) for p in ("clients", "evaluation", "total")}
    rounds = [r for r, v in parts["total"].items() if math.isfinite(v)]
    if not rounds:
        return None
    clients, evaluation = ([_or_zero(parts[p].get(r)) for r in rounds] for p in ("clients", "evaluation"))
    rest = [max(0.0, parts["total"][r] - a - b) for r, a, b in zip(rounds, clients, evaluation)]
    return _stacked(rounds, {"clients": clients, "evaluation": evaluation, "server and recording": rest}, "seconds")


@styled
def traffic(run: Run, marks: Mapping[str, Sequence[int]] | None = None) -> Figure | None:
    """Bytes a round, down to and up from the clients.

    Args:
        run: the run.
        marks: rounds in which more was sent than models, by what it was; marked above the bars.
    """
    parts = {p: dict(run.values(f"bytes/{p}")) for p in ("down", "up")}
    rounds = sorted({r for p in parts.values() for r in p})
    if not rounds:
        return None
    most = max(_or_zero(v) for p in parts.values() for v in p.values())
    scale, unit = next(((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if most >= s), (1.0, "bytes"))
    names = {"down": "down to clients", "up": "up to the server"}
    sizes = {names[p]: [_or_zero(parts[p].get(r)) / scale for r in rounds] for p in parts}
    figure = _stacked(rounds, sizes, unit)
    totals = {r: sum(column) for r, column in zip(rounds, zip(*sizes.values()))}
    _marked(figure.axes[0], totals, marks or {})
    return figure


def _marked(axes: Axes, totals: Mapping[int, float], marks: Mapping[str, Sequence[int]]) -> None:
    """A sign above the bar of each marked round."""
    top = max(totals.values(), default=0.0) or 1.0
    for i, (label, rounds) in enumerate(marks.items()):
        at = [r for r in rounds if r in totals]
        above = [totals[r] + top * (0.05 + 0.07 * i) for r in at]
        axes.plot(at, above, "v^"[i % 2], color=INK, ms=5, ls="", label=label)
    if marks:
        axes.set_ylim(0, top * (1.1 + 0.07 * len(marks)))
        legend_above(axes, 2)


def _or_zero(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def _stacked(rounds: list[int], parts: dict[str, list[float]], unit: str) -> Figure:
    figure, axes = panel(5.4, 2.7)
    base = np.zeros(len(rounds))
    for (label, values), colour in zip(parts.items(), (CLEAN, THIRD, "#e69f00")):
        if not any(values):
            continue
        top = base + np.asarray(values)
        edges = np.r_[np.asarray(rounds) - 0.5, rounds[-1] + 0.5]
        axes.stairs(top, edges, baseline=base, fill=True, color=colour, lw=0, label=label)
        base = top
    axes.set_ylabel(f"{unit} a round")
    axes.set_ylim(bottom=0)
    round_axis(axes, rounds)
    axes.set_xlim(rounds[0] - 0.5, rounds[-1] + 0.5)
    legend_above(axes, 3)
    return figure
