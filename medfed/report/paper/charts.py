"""Lines of methods over a number, in a grid of panels: the form of the papers' curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from medfed.report.metrics import Metric
from medfed.report.plots import DASHES, MUTED, PALETTE, marked_style, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Curve:
    """A method in a panel.

    Args:
        label: the method.
        points: place, mean and spread (None for a single seed).
        level: a line over the whole width at its one value, for what has no place.
    """

    label: str
    points: tuple[tuple[float, float, float | None], ...]
    level: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Args:
        title: what sets it apart in its row.
        side: what sets its row apart, at the value axis.
        metric: how its numbers are shown.
        curves: what is drawn.
    """

    title: str
    side: str
    metric: Metric
    curves: tuple[Curve, ...]


@styled
def line_chart(rows: Sequence[Sequence[Panel]], axis: str, percent: bool = False, shared: bool = True) -> Figure:
    """Rows of panels under one legend.

    Args:
        rows: the panels; rows may differ in length.
        axis: label of the places.
        percent: places are shares, shown in percent.
        shared: panels of a row have one scale.
    """
    from matplotlib.figure import Figure

    columns = max(len(row) for row in rows)
    width = 11.0 if columns > 1 else 6.5
    figure = Figure(figsize=(width, 0.8 + 3.1 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False, sharex=True, sharey="row" if shared else False)
    labels = list(dict.fromkeys(c.label for row in rows for p in row for c in p.curves))
    places = sorted({x for row in rows for p in row for c in p.curves if not c.level for x, _, _ in c.points})
    handles: dict[str, Any] = {}
    for axes_row, row in zip(grid, rows):
        for axes, panel in zip(axes_row, row):
            for k, curve in enumerate(panel.curves):
                aside = k - (len(panel.curves) - 1) / 2
                handles.setdefault(curve.label, _draw(axes, panel, curve, labels.index(curve.label), places, aside))
            axes.set_title(panel.title, loc="left", fontsize=10)
            axes.tick_params(labelbottom=True)
            axes.set_xlabel(axis)
            _ticks(axes, places, percent)
        for axes in axes_row[len(row) :]:
            axes.set_axis_off()
        axes_row[0].set_ylabel("\n".join(filter(None, (row[0].side, row[0].metric.axis))))
    shown = [label for label in labels if label in handles]
    abreast = max(1, int(width * 11 / (max(map(len, shown), default=0) + 8)))
    figure.legend(
        [handles[m] for m in shown],
        shown,
        loc="outside upper left",
        ncols=min(max(len(shown), 1), abreast),
        handlelength=3,
    )
    return figure


def _draw(axes: Axes, panel: Panel, curve: Curve, index: int, places: Sequence[float], aside: float) -> Any:
    shown = panel.metric.shown
    if curve.level:
        colour = MUTED if index >= len(PALETTE) else PALETTE[index]
        return axes.axhline(shown(curve.points[0][1]), color=colour, ls=DASHES[1], lw=1.6)
    # Methods stand a little beside each other, so that one spread does not hide another.
    xs = [_beside(x, places, aside) for x, _, _ in curve.points]
    means = [shown(m) for _, m, _ in curve.points]
    spread = [shown(s or 0.0) for _, _, s in curve.points]
    return axes.errorbar(xs, means, spread, ms=5, lw=1.8, elinewidth=1, capsize=2.5, **marked_style(index))


def _beside(x: float, places: Sequence[float], aside: float) -> float:
    if logarithmic(places):
        return float(x * 1.015**aside)
    return x + 0.006 * (places[-1] - places[0]) * aside


def logarithmic(places: Sequence[float]) -> bool:
    """Whether places are so far apart that they are drawn by their logarithms."""
    return bool(places) and places[0] > 0 and places[-1] / places[0] >= 30


def _ticks(axes: Axes, places: Sequence[float], percent: bool) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    if logarithmic(places):
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator(list(places)))
    axes.xaxis.set_major_formatter(lambda x, _: f"{100 * x:g}" if percent else f"{x:g}")


@styled
def matrices(found: Sequence[tuple[str, Any, Sequence[str]]]) -> Figure | None:
    """Class similarity matrices side by side.

    Args:
        found: title, cosines ``[C, C]`` (NaN for absent classes) and names of the classes.
    """
    from matplotlib.figure import Figure

    if not found:
        return None
    columns = min(len(found), 4)
    rows = math.ceil(len(found) / columns)
    figure = Figure(figsize=(2.75 * columns, 0.2 + 2.9 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (title, values, classes) in zip(grid.ravel(), found):
        # Cells as shapes: a page holds no pictures that are loaded from an address, not even from one within it.
        axes.pcolormesh(values, cmap="cividis", vmin=0.0, vmax=1.0, edgecolors="face", lw=0.2)
        axes.set_aspect("equal")
        axes.invert_yaxis()
        axes.grid(visible=False)
        small = len(classes) <= 8
        centres = [k + 0.5 for k in range(len(classes))]
        axes.set_xticks(centres if small else [], classes if small else [], rotation=45, ha="right", fontsize=8)
        axes.set_yticks(centres if small else [], classes if small else [], fontsize=8)
        axes.set_title(title, loc="left", fontsize=9)
        for i in range(len(classes) if small else 0):
            for j in range(len(classes)):
                if math.isfinite(value := float(values[i][j])):
                    ink = "#000000" if value > 0.6 else "#ffffff"
                    axes.text(j + 0.5, i + 0.5, f"{value:.2f}", ha="center", va="center", color=ink, fontsize=7)
    for axes in grid.ravel()[len(found) :]:
        axes.set_axis_off()
    return figure
