"""Bootstrap intervals over the patients of the test set: what another test set of its kind could have given.

They say nothing of another training: that is the spread over seeds, which stands apart.  All methods of a condition and
seed are resampled alike, so that the interval of a difference is that of paired predictions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from medfed.report.contents import Predictions, prediction_files, read_predictions
from medfed.report.grid_cells import GridCells
from medfed.report.metrics import Metric, metric
from medfed.report.paper.facts import chosen_metrics
from medfed.report.paper.resampling import draw, metric_of
from medfed.report.paper.sheets import Line, Sheet, Written
from medfed.report.plots import MUTED, PALETTE, styled
from medfed.report.runs import Run
from medfed.seeding import numpy_generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVEL = 0.95
LEAST = 50
"""Resamples in which a metric is defined, below which there is no interval."""
ROUNDING = 0.005
"""How far a metric of the stored probabilities, which are float32, may be from the one recorded."""
SETS = ("clean", "corrupted")


@dataclass(frozen=True)
class Interval:
    """A number with its interval, as recorded (fractions).

    Args:
        condition: label of the condition.
        seed: the seed.
        method: label of the method.
        key: e.g. ``clean/accuracy``.
        point: of the test set itself: the mean over the last rounds whose predictions are kept.
        low: lower end of the percentile interval; None where too few resamples have the metric.
        high: upper end.
        difference: point minus the baseline's; None for the baseline and where it is missing.
        difference_low: lower end of the interval of the paired difference.
        difference_high: upper end.
        rounds: rounds that are averaged.
        units: what was resampled: how many patients or images.
        resamples: in how many resamples the metric is defined.
    """

    condition: str
    seed: int
    method: str
    key: str
    point: float
    low: float | None
    high: float | None
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    rounds: int
    units: int
    resamples: int


@dataclass
class Intervals:
    """All intervals of a grid.

    Args:
        found: the intervals.
        resamples: how many were drawn.
        patients: whether patients were resampled everywhere; images otherwise.
        notes: what could not be done.
    """

    found: list[Interval] = field(default_factory=list)
    resamples: int = 0
    patients: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def unit(self) -> str:
        """What was resampled."""
        return "patients" if self.patients else "patients where they are known, single images elsewhere"


def intervals(cells: GridCells, resamples: int) -> Intervals:
    """The intervals of all finished runs, in the metrics of :func:`~medfed.report.paper.facts.chosen_metrics`.

    Args:
        cells: the grid.
        resamples: how many to draw, e.g. 1000.
    """
    result = Intervals(resamples=resamples)
    failed: dict[str, set[str]] = defaultdict(set)
    names = chosen_metrics(cells)
    for condition in cells.conditions:
        for seed in cells.seeds:
            runs = {m: r for m in cells.methods if (r := cells.finished.get((condition, m, seed))) is not None}
            _group(cells, result, failed, condition, seed, runs, names)
    result.notes += [f"{len(runs)} run{'s' if len(runs) > 1 else ''}: {reason}" for reason, runs in failed.items()]
    return result


def _group(
    cells: GridCells,
    result: Intervals,
    failed: Mapping[str, set[str]],
    condition: str,
    seed: int,
    runs: Mapping[str, Run],
    names: Sequence[str],
) -> None:
    """The runs of one condition and seed, which share their test set."""
    weights: np.ndarray | None = None
    units: np.ndarray | None = None
    estimates: dict[str, dict[str, tuple[np.ndarray, int]]] = {}
    for method, run in runs.items():
        kept = last_rounds(run, cells.last)
        if not kept:
            failed["no predictions are kept (evaluation.keep_predictions)"].add(run.folder)
            continue
        if any(p.unusable for sets in kept for p in sets.values()):
            failed["some predictions are not finite"].add(run.folder)
            continue
        own = units_of(next(iter(kept[-1].values())))
        if units is None or weights is None:
            result.patients &= next(iter(kept[-1].values())).patients is not None
            units = own
            weights = draw(int(units.max()) + 1, result.resamples, numpy_generator(seed, "bootstrap", condition))
        same = all(np.array_equal(units_of(p), units) for sets in kept for p in sets.values())
        if not same:
            failed["its test set is not that of the first method of its condition"].add(run.folder)
            continue
        for name in names:
            for part in SETS:
                sets = [s[part] for s in kept if part in s]
                rounds = [
                    r for s in sets if (r := metric_of(name, s.labels, s.probabilities, units, weights)) is not None
                ]
                if len(rounds) < len(sets):
                    failed[f"{metric(name).label} cannot be resampled"].add(run.folder)
                elif rounds and not _as_recorded(run, f"{part}/{name}", sets, rounds):
                    failed[f"its predictions do not give the {metric(name).label} that it recorded"].add(run.folder)
                elif rounds:
                    found = np.mean(rounds, axis=0)
                    estimates.setdefault(f"{part}/{name}", {})[method] = (found, len(rounds))
    for key, by_method in estimates.items():
        base = by_method.get(cells.baseline)
        for method, (values, averaged) in by_method.items():
            if not np.isfinite(values[0]):
                continue
            low, high, count = ends(values[1:])
            apart = None if base is None or method == cells.baseline else values - base[0]
            d_low, d_high, _ = (None, None, 0) if apart is None else ends(apart[1:])
            size = 0 if units is None else int(units.max()) + 1
            difference = None if apart is None or not np.isfinite(apart[0]) else float(apart[0])
            point = float(values[0])
            result.found.append(
                Interval(
                    condition, seed, method, key, point, low, high, difference, d_low, d_high, averaged, size, count
                )
            )


def _as_recorded(run: Run, key: str, sets: Sequence[Predictions], found: Sequence[np.ndarray]) -> bool:
    """Whether predictions give what was recorded: not so where several models are evaluated and their mean counts."""
    recorded = dict(run.values(key))
    pairs = [(recorded.get(s.round, np.nan), float(r[0])) for s, r in zip(sets, found)]
    return all(abs(a - b) <= ROUNDING for a, b in pairs if np.isfinite(a) and np.isfinite(b))


def last_rounds(run: Run, last: int) -> list[dict[str, Predictions]]:
    """The predictions of the last rounds, oldest first, of those that are kept."""
    wanted = [r["round"] for r in run.records if (r.get("evaluation") or {}).get("clean")][-last:]
    kept = [read_predictions(run, round_) for round_ in prediction_files(run) if round_ in wanted]
    return [sets for sets in kept if sets]


def units_of(found: Predictions) -> np.ndarray:
    """The unit of each sample: its patient, or itself where patients are not recorded."""
    if found.patients is None:
        return np.arange(len(found.labels))
    return np.unique(found.patients, return_inverse=True)[1]


def ends(values: np.ndarray) -> tuple[float | None, float | None, int]:
    """The percentile interval of the resamples in which a metric is defined, and how many these are."""
    defined = values[np.isfinite(values)]
    if len(defined) < min(LEAST, len(values)) or not len(defined):
        return None, None, len(defined)
    low, high = np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high), len(defined)


def sheets(found: Intervals, cells: GridCells) -> list[Sheet]:
    """A table for each condition and quantity: a row a method, a column a seed; below it the differences."""
    tables = []
    places = dict.fromkeys((i.condition, i.key) for i in found.found)
    for number, (condition, key) in enumerate(places, start=1):
        own = {(i.method, i.seed): i for i in found.found if (i.condition, i.key) == (condition, key)}
        seeds = sorted({s for _, s in own})
        part, _, name = key.partition("/")
        shown = metric(name)
        rounds, units = max(i.rounds for i in own.values()), sorted({i.units for i in own.values()})
        lines = []
        for method in dict.fromkeys(m for m, _ in own):
            found_here = [own.get((method, s)) for s in seeds]
            values = tuple(Written(_text(shown, None if i is None else (i.point, i.low, i.high))) for i in found_here)
            apart = tuple(Written(_text(shown, _difference(i), signed=True)) for i in found_here)
            lines.append(Line(method, values + apart))
        count = "–".join(map(str, dict.fromkeys((units[0], units[-1]))))
        caption = (
            f"{shown.axis} on the {part} test set{f', {condition}' if condition else ''}: mean of {rounds} "
            f"round{'s' if rounds > 1 else ''} [{LEVEL:.0%} percentile bootstrap interval over {count} "
            f"{'patients' if found.patients else 'test units'}, {found.resamples} resamples], of each seed by itself."
        )
        heads = tuple(f"seed {s}" for s in seeds)
        groups = ("value",) * len(seeds) + (f"paired difference to {cells.baseline}",) * len(seeds)
        tables.append(Sheet(f"interval-{number}", "", caption, "method", heads + heads, groups, tuple(lines)))
    return tables


Range = tuple[float, float | None, float | None]


def _difference(one: Interval | None) -> Range | None:
    if one is None or one.difference is None:
        return None
    return one.difference, one.difference_low, one.difference_high


def _text(shown: Metric, values: Range | None, signed: bool = False) -> str:
    if values is None:
        return ""
    point, *span = (shown.text(v, signed=signed) for v in values)
    return f"{point} [{', '.join(span)}]"


def rows(found: Iterable[Interval], patients: bool) -> list[dict[str, Any]]:
    """One line an interval, for CSV, in the unit shown."""
    lines = []
    for one in found:
        shown = metric(one.key.partition("/")[2])

        def unit(value: float | None, of: Any = shown) -> float | str:
            return "" if value is None else round(of.shown(value), 8)

        lines.append(
            {
                "condition": one.condition,
                "seed": one.seed,
                "method": one.method,
                "quantity": one.key,
                "unit": shown.unit or "1",
                "point": unit(one.point),
                "low_95_percentile": unit(one.low),
                "high_95_percentile": unit(one.high),
                "difference": unit(one.difference),
                "difference_low_95": unit(one.difference_low),
                "difference_high_95": unit(one.difference_high),
                "rounds": one.rounds,
                "resampled": "patients" if patients else "units",
                "units": one.units,
                "resamples_defined": one.resamples,
            }
        )
    return lines


@styled
def forest(found: Intervals, cells: GridCells, condition: str, name: str) -> Figure | None:
    """A mark and a bar a seed: the number and its interval, a row a method, a panel a test set."""
    from matplotlib.figure import Figure

    parts = [p for p in SETS if any((i.condition, i.key) == (condition, f"{p}/{name}") for i in found.found)]
    if not parts:
        return None
    own = [i for i in found.found if i.condition == condition and i.key in {f"{p}/{name}" for p in parts}]
    methods = [m for m in cells.methods if any(i.method == m for i in own)]
    seeds = sorted({i.seed for i in own})
    figure = Figure(figsize=(11, 0.9 + 0.42 * len(methods)), layout="constrained")
    shown = metric(name).shown
    for axes, part in zip(figure.subplots(1, len(parts), sharey=True, squeeze=False)[0], parts):
        for i in (i for i in own if i.key == f"{part}/{name}"):
            k = seeds.index(i.seed)
            y = methods.index(i.method) + 0.6 * (k - (len(seeds) - 1) / 2) / max(len(seeds), 1)
            colour = PALETTE[k % len(PALETTE)]
            if i.low is not None and i.high is not None:
                axes.plot([shown(i.low), shown(i.high)], [y, y], color=colour, lw=1.6)
            axes.plot([shown(i.point)], [y], "o", color=colour, ms=4.5, label=f"seed {i.seed}")
        axes.set_title(f"{part} test set", loc="left", fontsize=10)
        axes.set_xlabel(metric(name).axis)
        axes.set_yticks(range(len(methods)), methods)
        axes.set_ylim(len(methods) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        for line in range(1, len(methods)):
            axes.axhline(line - 0.5, color=MUTED, lw=0.4, alpha=0.5)
    handles = {label: h for a in figure.axes for h, label in zip(*a.get_legend_handles_labels())}
    order = [f"seed {s}" for s in seeds]
    figure.legend([handles[o] for o in order], order, loc="outside upper left", ncols=8)
    return figure
