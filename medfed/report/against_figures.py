"""Methods against a number of the experiment, drawn: a panel each for whatever else differs, a line a method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfed.report.metrics import metric
from medfed.report.plots import legend_outside, marked_style, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from medfed.report.against import Against, Panel

ABREAST = 3
"""Panels side by side."""


@styled
def against_figure(result: Against, parts: Sequence[tuple[str, str]] | None = None) -> Figure | None:
    """Means over seeds with their sample standard deviation, one line a method.

    Args:
        result: the comparisons.
        parts: metrics and test sets, new rows for each; all that are defined by default.
    """
    from matplotlib.figure import Figure

    parts = [(m, c) for m in result.metrics for c in result.columns(m)] if parts is None else list(parts)
    if not parts:
        return None
    rows = math.ceil(len(result.panels) / ABREAST)
    columns = math.ceil(len(result.panels) / rows)
    width = 11.0 if columns > 1 else 6.5
    figure = Figure(figsize=(width, 0.7 + 3.2 * rows * len(parts)), layout="constrained")
    grid = figure.subplots(rows * len(parts), columns, squeeze=False, sharex=True)
    handles: dict[str, Any] = {}
    for i, (name, column) in enumerate(parts):
        block = grid[i * rows : (i + 1) * rows].ravel()
        for axes in block[1:]:
            axes.sharey(block[0])
        for axes, panel in zip(block, result.panels):
            _lines(axes, result, panel, name, column)
            title = panel.title if len(result.panels) > 1 else ""
            axes.set_title(title, loc="left", fontsize=10)
            _value_axis(axes, result)
            for handle, label in zip(*axes.get_legend_handles_labels()):
                handles.setdefault(label, handle)
        for axes in block[len(result.panels) :]:
            axes.set_axis_off()
        for axes in block[::columns]:
            several = len({c for _, c in parts}) > 1 or column != "clean"
            axes.set_ylabel(metric(name).axis + (f"\n{column} test set" if several else ""))
    names = [m for m in result.methods if m in handles]
    legend_outside(figure, [handles[m] for m in names], names)
    return figure


def _lines(axes: Axes, result: Against, panel: Panel, name: str, column: str) -> None:
    shown = metric(name).shown
    drawn = [m for m in result.methods if panel.line(m, name, column)]
    xs = sorted({x for p in result.panels for x in p.points})
    for k, method in enumerate(drawn):
        index = result.methods.index(method)
        line = panel.line(method, name, column)
        # Methods stand a little beside each other, so that one spread does not hide another.
        place = [x + _aside(x, xs, k - (len(drawn) - 1) / 2) for x, _ in line]
        means = [shown(c.mean or 0.0) for _, c in line]
        spread = [shown(c.std or 0.0) for _, c in line]
        axes.errorbar(
            place, means, spread, label=method, ms=5, lw=1.8, elinewidth=1, capsize=2.5, **marked_style(index)
        )


def _aside(x: float, xs: Sequence[float], steps: float) -> float:
    if _logarithmic(xs):
        return x * (1.015**steps - 1)
    return 0.008 * (xs[-1] - xs[0]) * steps


def _logarithmic(xs: Sequence[float]) -> bool:
    return xs[0] > 0 and xs[-1] / xs[0] >= 30


def _value_axis(axes: Axes, result: Against) -> None:
    """Ticks where there are runs."""
    from matplotlib.ticker import FixedLocator, NullLocator

    xs = sorted({x for p in result.panels for x in p.points})
    if _logarithmic(xs):
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator(xs))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.tick_params(labelbottom=True)
    axes.set_xlabel(result.label)


def against_plot(result: Against, out: str | Path) -> Path:
    """Writes all lines as a picture; the suffix of ``out`` says which kind (png, svg, pdf)."""
    out = Path(out)
    figure = against_figure(result)
    if figure is not None:
        save(figure, out)
    return out
