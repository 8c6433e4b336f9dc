"""Drawings of how reliable labels were found to be; see :mod:`medfed.report.reliability`.

Colour is the verdict; where a simulation knows the truth, the shape of a mark tells it and a ring marks a verdict that
is wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from medfed.report.plots import (
    CLEAN,
    CORRUPTED,
    DASHES,
    INK,
    MUTED,
    PALETTE,
    UNKNOWN,
    fitted,
    hover,
    legend_above,
    line,
    round_axis,
    styled,
)
from medfed.report.reliability import DESCRIPTORS, ERROR, RELABELLING, STATUS, Checkpoint, Identification

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"clean": CLEAN, "noisy": CORRUPTED, "undetermined": UNKNOWN}
MOST_PANELS = 8
MOST_NAMES = 3


@styled
def distributions(found: Identification) -> Figure | None:
    """Probability, descriptors and evidence of all clients by verdict: a mark a client, a bar at the median."""
    from matplotlib.figure import Figure

    names = [n for n in ("p_clean", *DESCRIPTORS, *found.evidence) if found.defined(n) and not found.counts(n)]
    shown = [n for n in names if n not in found.errors][:MOST_PANELS]
    groups = [s for s in STATUS if found.of(s)]
    if not shown:
        return None
    rows = math.ceil(len(shown) / 4)
    columns = math.ceil(len(shown) / rows)
    figure = Figure(figsize=(11, 0.5 + rows * (0.75 + 0.55 * len(groups))), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes, name in itertools.zip_longest(grid.flat, shown):
        if name is None:
            axes.set_axis_off()
            continue
        for y, status in enumerate(groups):
            _strip(axes, found, found.of(status), name, y)
        if name == "p_clean":
            axes.axvline(0.5, color=MUTED, lw=1, ls=(0, (1, 2)))
            axes.set_xlim(-0.05, 1.05)
        axes.set_xlabel({"p_clean": "probability of clean", **DESCRIPTORS}.get(name, name.replace("_", " ")))
        axes.set_ylim(len(groups) - 0.45, -0.55)
        axes.grid(axis="y", visible=False)
    for row in grid:
        row[0].set_yticks(range(len(groups)), [f"{s} ({len(found.of(s))})" for s in groups])
        row[0].tick_params(axis="y", colors=INK, length=0)
    _legend(figure, found)
    return figure


def _strip(axes: Axes, found: Identification, members: Sequence[str], name: str, y: float) -> None:
    values = {c: v for c in members if math.isfinite(v := found.clients[c].values.get(name, math.nan))}
    if not values:
        return
    for client, offset in zip(sorted(values, key=lambda c: values[c]), itertools.cycle((0.0, -0.16, 0.16, -0.3, 0.3))):
        crowded = offset if len(values) > 3 else 0.0  # the same in every rendering, unlike jitter by chance
        error = found.clients[client].values.get(f"{name}{ERROR}", math.nan)
        if math.isfinite(error):
            ends = [values[client] - error, values[client] + error]
            axes.plot(ends, [y + crowded] * 2, color=MUTED, lw=0.8, alpha=0.6)
        _mark(axes, found, client, values[client], y + crowded)
    axes.plot([float(np.median(list(values.values())))], [y], "|", color=INK, ms=24, mew=1.6, zorder=3)


@styled
def descriptor_space(found: Identification) -> Figure | None:
    """The three descriptors against each other, in pairs; None where fewer than two clients have all three.

    Three flat views: on paper, a cloud in perspective hides which of its points is in front.
    """
    from matplotlib.figure import Figure

    whole = [n for n, c in found.clients.items() if all(math.isfinite(c.values.get(d, math.nan)) for d in DESCRIPTORS)]
    if len(whole) < 2:
        return None
    figure = Figure(figsize=(11, 3.7), layout="constrained")
    pairs = list(itertools.combinations(DESCRIPTORS, 2))
    wrong = [c for c in whole if found.wrong(c)]
    for axes, (x, y) in zip(figure.subplots(1, 3), pairs):
        for client in whole:
            values = found.clients[client].values
            _mark(axes, found, client, values[x], values[y])
            if client in wrong and len(wrong) <= MOST_NAMES:
                axes.annotate(
                    fitted(client, 18), (values[x], values[y]), (6, 5), textcoords="offset points", fontsize=8
                )
        axes.set_xlabel(DESCRIPTORS[x])
        axes.set_ylabel(DESCRIPTORS[y])
        axes.margins(0.09)
    _legend(figure, found)
    return figure


def _mark(axes: Axes, found: Identification, client: str, x: float, y: float) -> None:
    noisy = found.noisy is not None and client in found.noisy
    colour = COLOURS[found.clients[client].status]
    if found.wrong(client):
        axes.plot([x], [y], "o", ms=12, mfc="none", mec=INK, mew=1.1)
    artist = axes.plot([x], [y], "D" if noisy else "o", ms=5.5 if noisy else 6.5, color=colour, alpha=0.85, mew=0)[0]
    artist.set_gid(hover(client))


def _legend(figure: Figure, found: Identification) -> None:
    from matplotlib.lines import Line2D

    def entry(label: str, marker: str, colour: str, **style: Any) -> Line2D:
        return Line2D([], [], ls="", marker=marker, color=colour, label=label, **style)

    handles = [entry(f"judged {s}", "s", COLOURS[s], ms=7) for s in STATUS if found.of(s)]
    if found.noisy is not None:
        handles += [entry("truly clean", "o", MUTED, ms=6.5), entry("truly noisy", "D", MUTED, ms=5.5)]
        if any(map(found.wrong, found.clients)):
            handles.append(entry("wrong", "o", INK, ms=11, mfc="none"))
    figure.legend(handles=handles, loc="outside upper left", ncols=6, handletextpad=0.1, columnspacing=1.2)


@styled
def relabelling(found: Sequence[Checkpoint]) -> Figure | None:
    """Checkpoint by checkpoint: the noise that remains (or how much is edited) and how right the edits are.

    Thin lines are clients, thick ones are pooled.
    """
    from matplotlib.figure import Figure

    if not any(math.isfinite(v) for c in found for v in c.pooled.values()):
        return None
    known = any(math.isfinite(c.pooled.get("residual_noise", math.nan)) for c in found)
    figure = Figure(figsize=(11, 3.2) if known else (5.4, 3.1), layout="constrained")
    panels = figure.subplots(1, 2 if known else 1, squeeze=False)[0]
    rounds = [c.round for c in found]
    left = "residual_noise" if known else "edit_rate"
    for client in sorted({n for c in found for n in c.clients}):
        points = _points([(c.round, c.clients.get(client, {})) for c in found], left)
        line(panels[0], points, tip=client, color=UNKNOWN, lw=0.8, alpha=0.55)
    if any(left in v for c in found for v in c.clients.values()):
        panels[0].plot([], [], color=UNKNOWN, lw=0.8, label="a client")
    drawn: list[tuple[Axes, str, str, Any]] = [(panels[0], left, CLEAN, "-")]
    if known:
        drawn.append((panels[0], "noise_rate", MUTED, (0, (1, 2))))
        right = ("edit_rate", "recovery", "correction_precision", "false_correction_rate")
        colours = (MUTED, PALETTE[2], PALETTE[0], PALETTE[1])
        drawn += [(panels[1], *style) for style in zip(right, colours, (DASHES[2], *DASHES))]
    for axes, key, colour, dash in drawn:
        points = _points([(c.round, c.pooled) for c in found], key)
        if any(math.isfinite(v) for _, v in points):
            label = RELABELLING[key] + (", pooled" if axes is panels[0] else "")
            line(axes, points, tip=label, label=label, color=colour, ls=dash, lw=2.2, marker="o", ms=4)
    for axes in panels:
        axes.set_ylabel("training targets (%)" if axes is panels[0] else "share (%)")
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        round_axis(axes, rounds)
        legend_above(axes, 4 if axes is panels[0] else 2)
    return figure


def _points(values: Sequence[tuple[int, Mapping[str, float]]], key: str) -> list[tuple[int, float]]:
    return [(round_, 100 * v[key]) for round_, v in values if key in v]
