"""Drawing with matplotlib's object API: no global state is left behind, nothing needs a display.

Colours are Okabe and Ito's, told apart also by the colour-blind.  A figure for a page is inline SVG: its text is
text, its colours become CSS variables (so that it follows light and dark), it carries a title and a description.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
from markupsafe import Markup, escape

from medfed.report.compare import Comparison, group_by_method
from medfed.report.metrics import TEST_SETS, choose, metric
from medfed.report.runs import LAST, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1b1f24", "#59636e", "#d8dee4"
CLEAN, CORRUPTED, THIRD, UNKNOWN = "#0072b2", "#d55e00", "#009e73", "#7a7f87"
PALETTE = (CLEAN, CORRUPTED, THIRD, "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#5c4a3d")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
MARKERS = "osD^vPX*"
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    UNKNOWN: "unknown",
    **{c: f"c{i}" for i, c in enumerate(PALETTE)},
}
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # names of clients and methods are text, also with a dollar sign
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": "cycler('color', ['#0072b2'])",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "path.simplify_threshold": 0.2,
}
P = ParamSpec("P")
T = TypeVar("T")


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Runs a drawing function in medfed's style and restores what was set before."""

    @wraps(draw)
    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return inside


def line_style(index: int) -> dict[str, Any]:
    """Colour and dashes of the method of an index, told apart from those of all others up to 32."""
    dash = (index // 2 + index // len(PALETTE)) % len(DASHES)
    return {"color": PALETTE[index % len(PALETTE)], "ls": DASHES[dash]}


def marked_style(index: int) -> dict[str, Any]:
    """As :func:`line_style`, with a mark, which is hollow from the ninth method on."""
    fill = "full" if index // len(MARKERS) % 2 == 0 else "none"
    return {**line_style(index), "marker": MARKERS[index % len(MARKERS)], "fillstyle": fill}


def panel(width: float = 5.4, height: float = 3.1) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, sizes in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def round_axis(axes: Axes, rounds: Sequence[int] | np.ndarray) -> None:
    """Labels the x axis as rounds, with whole numbers, also for a single round."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    if len(rounds):
        low, high = min(rounds), max(rounds)
        margin = 0.5 if low == high else 0.02 * (high - low)
        axes.set_xlim(low - margin, high + margin)


def line(axes: Axes, points: Sequence[tuple[int, float]], *, tip: str = "", **style: Any) -> None:
    """Draws (round, value) points: NaN leaves a gap, a lone point becomes a dot; ``tip`` shows on hover."""
    if not points:
        return
    rounds, values = np.asarray([p[0] for p in points]), np.asarray([p[1] for p in points], float)
    defined = np.isfinite(values)
    before, after = np.r_[False, defined[:-1]], np.r_[defined[1:], False]
    artist = axes.plot(rounds, values, solid_capstyle="round", **style)[0]
    if tip:
        artist.set_gid(hover(tip))
    alone = defined & ~before & ~after
    if alone.any():
        axes.plot(rounds[alone], values[alone], "o", ms=4, color=style.get("color"), alpha=style.get("alpha"))


def legend_above(axes: Axes, columns: int = 4) -> None:
    """A legend above the axes, if anything has a label."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.2, handlelength=2.6)


def fitted(name: str, most: int = 32) -> str:
    """A name short enough for a figure: a longer one loses its middle, since mostly its end tells it apart."""
    if len(name) <= most:
        return name
    return f"{name[: (most - 1) // 2]}…{name[len(name) - most // 2 :]}"


def legend_outside(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """A legend above all panels, of as many columns as the width of the figure has room for."""
    if not names:
        return
    room = int(figure.get_figwidth() * 11)  # letters in a row; a handle takes eight
    names = [fitted(n, room - 8) for n in names]
    columns = min(len(names), max(1, room // (max(map(len, names)) + 8)))
    figure.legend(handles, names, loc="outside upper left", ncols=columns, handlelength=3)


def hover(text: str) -> str:
    """The id of an artist that makes :func:`svg` show a text where a pointer rests on it."""
    return _TIP + text


_TIP = "tip:"
_ID = re.compile(r"""<g id=(["'])(.*?)\1([^>]*)>""")
_TAG = re.compile(r"<[^>]*>")
_LONG = re.compile(r"(-?\d+\.\d\d)\d+")
_HEAD = re.compile(r"<svg [^>]*?viewBox=\"([^\"]*)\"[^>]*>")


@styled
def svg(figure: Figure, title: str, description: str) -> Markup:
    """A figure as inline SVG for a page.

    Args:
        figure: the figure.
        title: its accessible name.
        description: what it shows, for those who cannot see it.
    """
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": title}):  # ids of shared shapes: the same in every rendering
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    head = _HEAD.search(text)
    body = text[head.end() :] if head else text
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = _ID.sub(_tip_or_nothing, body)
    body = _TAG.sub(_shorten, body)
    for colour, name in VARIABLES.items():
        body = body.replace(colour, f"var(--{name})")
    box = head[1] if head else "0 0 100 100"
    return Markup(
        f'<svg role="img" viewBox="{box}" preserveAspectRatio="xMidYMid meet"><title>{escape(title)}</title>'
        f"<desc>{escape(description)}</desc>{body}"
    )


def inline(figure: Figure | None, title: str, description: str) -> Markup | None:
    """As :func:`svg`; None where there is nothing to draw."""
    return None if figure is None else svg(figure, title, description)


def _shorten(tag: re.Match[str]) -> str:
    """Cuts coordinates to hundredths of a point; text between tags (tick labels, names) stays as it is."""
    return re.sub(r"\s+", " ", _LONG.sub(r"\1", tag[0])).replace(" L ", "L")


def _tip_or_nothing(match: re.Match[str]) -> str:
    """Keeps no id of a group (each figure has the same ones); a line's tip, escaped already, is its title."""
    _, name, rest = match.groups()
    return f"<g{rest}><title>{name[len(_TIP) :]}</title>" if name.startswith(_TIP) else f"<g{rest}>"


@styled
def comparison_figure(comparison: Comparison, names: Sequence[str] | None = None) -> Figure:
    """Curves of each method over rounds: mean as a thick line, each seed as a thin one.

    Args:
        comparison: the comparison.
        names: metrics, one row of panels each; the compared ones by default.

    Returns:
        A panel a metric and test set on which anything was measured, clean on the left, on a shared scale.
    """
    from matplotlib.figure import Figure

    names = list(comparison.metrics if names is None else names)
    rows = max(len(names), 1)
    runs = [run for members in comparison.runs.values() for run in members]
    measured = [g for g in TEST_SETS if any(run.values(f"{g}/{n}") for run in runs for n in names)] or ["clean"]
    figure = Figure(figsize=(10, 0.6 + 3.4 * rows), layout="constrained")
    grid = figure.subplots(rows, len(measured), sharex=True, sharey="row", squeeze=False)
    everything = [r for run in runs for r in run.rounds]
    for row, name in zip(grid, names):
        for axes, group in zip(row, measured):
            axes.set_title(f"{group} test set", loc="left", fontsize=10)
            for i, method in enumerate(comparison.methods):
                _method_curves(axes, comparison.runs[method], f"{group}/{name}", method, i)
            round_axis(axes, everything)
            axes.tick_params(labelbottom=True)
        row[0].set_ylabel(metric(name).axis)
    legend_outside(figure, *grid[0][0].get_legend_handles_labels())
    return figure


def _method_curves(axes: Axes, runs: Sequence[Run], key: str, label: str, index: int) -> None:
    scale = metric(key.partition("/")[2]).shown
    style = line_style(index)
    curves = [{r: scale(v) for r, v in run.values(key)} for run in runs]
    if len(curves) > 1:
        for run, curve in zip(runs, curves):
            line(axes, list(curve.items()), tip=f"{label}, seed {run.seed}", lw=0.7, alpha=0.45, **style)
    rounds = sorted({r for c in curves for r in c})
    # The mean is drawn where every run of the method has the round: elsewhere it would jump with who is missing.
    mean = [(r, float(np.mean([c[r] for c in curves]))) for r in rounds if all(r in c for c in curves)]
    if mean:
        line(axes, mean, lw=2.2, label=label, **style)


@styled
def difference_figure(comparison: Comparison, name: str) -> Figure | None:
    """Per-seed paired differences to the baseline, a dot a seed and a bar at their mean; None without pairs."""
    columns = ("clean", "corrupted", "average", "worst")
    rows = [(m, c) for m in comparison.others for c in columns if comparison.cell(m, name, c).differences]
    if not comparison.paired or not rows:
        return None
    figure, axes = panel(11, 0.9 + 0.27 * len(rows))
    shown = metric(name).shown
    for y, (method, column) in enumerate(rows):
        cell = comparison.cell(method, name, column)
        colour = PALETTE[comparison.methods.index(method) % len(PALETTE)]
        axes.plot([shown(d) for d in cell.differences.values()], [y] * len(cell.differences), "o", color=colour, ms=5)
        axes.plot([shown(cell.difference or 0.0)], [y], "|", color=INK, ms=15, mew=2)
    axes.axvline(0, color=MUTED, lw=1)
    axes.set_yticks(range(len(rows)), [f"{fitted(m, 48)}: {'worst client' if c == 'worst' else c}" for m, c in rows])
    axes.tick_params(axis="y", colors=INK, length=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    unit = "percentage points" if metric(name).percent else "recorded unit"
    axes.set_xlabel(f"{metric(name).label}: difference to {comparison.baseline} ({unit})")
    return figure


def comparison_plot(
    runs: Sequence[Run], out: str | Path, *, metrics: Sequence[str] | None = None, last: int = LAST
) -> Path:
    """Writes the curves of several runs as a picture; the suffix of ``out`` says which kind (png, svg, pdf).

    Args:
        runs: the runs, of any methods, seeds and conditions.
        out: the file to write.
        metrics: the metrics; balanced accuracy (or what stands in for it) by default.
        last: rounds of a final number; only kept with the comparison.

    Returns:
        The file written.
    """
    out = Path(out)
    recorded = {m for run in runs for m in run.metrics()}
    names = choose(recorded, ("balanced accuracy",)) if metrics is None else list(metrics)
    groups = group_by_method(runs)
    save(comparison_figure(Comparison(groups, names, next(iter(groups), ""), False, last, {}, [])), out)
    return out


@styled
def save(figure: Figure, out: str | Path) -> None:
    """Writes a figure on white, creating the folder."""
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150, facecolor="white")
