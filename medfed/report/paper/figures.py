"""The curves of both papers from a grid: FedISM's Figures 4 and 5, OCT-FedSIR's Figures 3 and 4.

A point is the mean over seeds, its bar the sample standard deviation over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from medfed.report.grid_cells import GridCells
from medfed.report.metrics import metric
from medfed.report.paper import fedism, oct_fedsir
from medfed.report.paper.charts import Curve, Panel, line_chart
from medfed.report.paper.entries import Column, Row, entry
from medfed.report.paper.facts import Setting, matches_sharpness, name_of, without

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPREAD = "Points are means over seeds, bars the sample standard deviation (n - 1) over seeds."


@dataclass(frozen=True)
class Chart:
    """A figure of a paper.

    Args:
        id: short name, for files.
        paper: the paper's name and which of its figures it is.
        caption: what it shows.
        figure: the drawing.
        notes: what a reader must know.
    """

    id: str
    paper: str
    caption: str
    figure: Figure
    notes: tuple[str, ...] = ()

    @property
    def narrow(self) -> bool:
        """Whether it is drawn for half the width of a page."""
        return bool(self.figure.get_figwidth() < 8)


def ratio_of_corrupted(cells: GridCells) -> list[Chart] | str:
    """FedISM's Figure 4: methods against the share of clients whose images are corrupted."""
    found = fedism.corrupted_settings(cells)
    if not found:
        return fedism.NO_CORRUPTION
    charts = []
    for number, (cohort, alpha) in enumerate(dict.fromkeys((s.cohort, s.alpha) for s in found), start=1):
        own = [s for s in found if (s.cohort, s.alpha) == (cohort, alpha)]
        if len({s.ratio for s in own}) < 2:
            continue
        rows = [
            [
                Panel(
                    f"{part} images",
                    "",
                    metric(name),
                    _curves(cells, fedism.rivals(cells), own, f"{part}/{name}", lambda s: s.ratio),
                )
                for part in ("clean", "corrupted")
            ]
            for name in fedism.measures(cells)
        ]
        if rows := _drawn(rows):
            where = f"{cohort}, α = {alpha:g}" if len(_places(found)) > 1 and alpha is not None else cohort
            caption = f"Methods against the share of clients with corrupted images; {where}. {SPREAD}"
            figure = line_chart(rows, "clients with corrupted images (%)", percent=True, shared=False)
            charts.append(
                Chart(
                    f"fedism-figure-4-{number}",
                    "FedISM, Figure 4",
                    caption,
                    figure,
                    _gaps(cells, fedism.rivals(cells), own),
                )
            )
    return charts or "the share of clients with corrupted images does not vary among finished runs"


def _places(found: Iterable[Setting]) -> set[tuple[str, float | None]]:
    return {(s.cohort, s.alpha) for s in found}


def exponent(cells: GridCells) -> list[Chart] | str:
    """FedISM's Figure 5: the exponent q, with FedAvg and the best other method as levels."""
    families: dict[str, list[str]] = {}
    for label, own in cells.methods.items():
        if matches_sharpness(own) and own.get("method.q") is not None:
            families.setdefault(without(own, "method.q"), []).append(label)
    swept = max(families.values(), key=len, default=[])
    if len(swept) < 2:
        return "no method of FedISM's kind is there with several exponents q"
    charts = []
    for number, setting in enumerate(fedism.corrupted_settings(cells), start=1):
        levels = _levels(cells, setting, swept)
        rows = []
        for name in fedism.measures(cells):
            panels = []
            for part in ("clean", "corrupted"):
                key = f"{part}/{name}"
                points = [
                    (float(cells.methods[m]["method.q"]), p)
                    for m in swept
                    if (p := _point(cells, m, [setting.label], key))
                ]
                curves = (
                    [Curve(swept[0], tuple((q, mean, spread) for q, (mean, spread) in sorted(points)))]
                    if points
                    else []
                )
                for label in levels:
                    if (at := _point(cells, label, [setting.label], key)) is not None:
                        curves.append(Curve(label, ((0.0, *at),), level=True))
                panels.append(Panel(f"{part} images", "", metric(name), tuple(curves) if points else ()))
            rows.append(panels)
        if rows := _drawn(rows):
            where = f"{setting.cohort}, {setting.label}" if setting.label else setting.cohort
            beside = " and ".join(levels) or "no other method"
            caption = f"The exponent q of {swept[0]}, and as levels {beside}; {where}. {SPREAD}"
            gaps = _gaps(cells, [*swept, *levels], [setting])
            charts.append(
                Chart(
                    f"fedism-figure-5-{number}", "FedISM, Figure 5", caption, line_chart(rows, "q", shared=False), gaps
                )
            )
    return charts or "no run with corrupted images has finished"


def _levels(cells: GridCells, setting: Setting, swept: Sequence[str]) -> list[str]:
    """FedAvg, and of the other methods without SALT the best on corrupted images."""
    rivals = [m for m in fedism.rivals(cells) if m not in swept]
    plain = [m for m in rivals if name_of(cells, m) == "fedavg"][:1]
    names = fedism.measures(cells)
    others = {
        m: p[0]
        for m in rivals
        if m not in plain and names and (p := _point(cells, m, [setting.label], f"corrupted/{names[0]}"))
    }
    best = [max(others, key=lambda m: others[m] * (1 if metric(names[0]).higher else -1))] if others else []
    return plain + best


def against_rate(cells: GridCells) -> list[Chart] | str:
    """OCT-FedSIR's Figures 3 and 4: a kind of noise each, a row a data set, a panel a concentration."""
    found = oct_fedsir.noisy_settings(cells)
    if not found:
        return oct_fedsir.PLAIN
    charts = []
    labels = oct_fedsir.whole_methods(cells)
    for kind in dict.fromkeys(s.kind for s in found):
        own = [s for s in found if s.kind == kind]
        if len({s.rate for s in own}) < 2:
            continue
        for name, mark, as_ in (("f1_macro", "", ""), ("accuracy", "-accuracy", "as ")):
            rows = []
            for cohort in dict.fromkeys(s.cohort for s in own):
                panels = []
                for alpha in dict.fromkeys(s.alpha for s in own if s.cohort == cohort):
                    here = [s for s in own if (s.cohort, s.alpha) == (cohort, alpha)]
                    curves = _curves(cells, labels, here, f"clean/{name}", lambda s: s.rate or 0.0)
                    curves += _all_true(cells, labels, here, f"clean/{name}") if curves else ()
                    title = "" if alpha is None else f"α = {alpha:g}"
                    panels.append(Panel(title, cohort, metric(name), curves))
                rows.append(panels)
            if rows := _drawn(rows):
                number = {"symmetric": "Figure 3", "asymmetric": "Figure 4"}.get(kind, "Figures 3 and 4")
                caption = f"{metric(name).label} under {oct_fedsir.LETTERS.get(kind, kind)}. {SPREAD}"
                figure = line_chart(rows, "label noise rate (%)", percent=True)
                charts.append(
                    Chart(
                        f"oct-fedsir-figure-{kind}{mark}",
                        f"OCT-FedSIR, {as_}{number}",
                        caption,
                        figure,
                        _gaps(cells, labels, own),
                    )
                )
    return charts or "no kind of noise has finished runs at several rates"


def _all_true(cells: GridCells, labels: Sequence[str], own: Sequence[Setting], key: str) -> tuple[Curve, ...]:
    """The level of FedAvg on true labels."""
    plain = [m for m in labels if name_of(cells, m) == "fedavg"][:1]
    conditions = oct_fedsir.as_true(cells, [s.label for s in own])
    at = _point(cells, plain[0], conditions, key) if plain and conditions else None
    return () if at is None else (Curve(f"{plain[0]} (all labels true)", ((0.0, *at),), level=True),)


def _curves(
    cells: GridCells, labels: Sequence[str], own: Sequence[Setting], key: str, place: Callable[[Setting], float]
) -> tuple[Curve, ...]:
    curves = []
    for label in labels:
        points = []
        for x in sorted({place(s) for s in own}):
            if (at := _point(cells, label, [s.label for s in own if place(s) == x], key)) is not None:
                points.append((x, *at))
        if points:
            curves.append(Curve(label, tuple(points)))
    return tuple(curves)


def _point(cells: GridCells, method: str, conditions: Sequence[str], key: str) -> tuple[float, float | None] | None:
    found = entry(cells, Row(method, method), Column(key, "", "", tuple(conditions)))
    return None if found.mean is None else (found.mean, found.spread("sample"))


def _drawn(rows: Sequence[Sequence[Panel]]) -> list[list[Panel]]:
    """The panels that hold a curve, of rows that hold one."""
    kept = [[p for p in row if any(not c.level for c in p.curves)] for row in rows]
    return [row for row in kept if row]


def _gaps(cells: GridCells, labels: Sequence[str], own: Sequence[Setting]) -> tuple[str, ...]:
    """What is missing of a figure's cells."""
    wanted = [k for k in cells.by_place if k[1] in labels and k[0] in {s.label for s in own}]
    missing = [k for k in wanted if k not in cells.finished]
    return (
        (f"{len(missing)} of {len(wanted)} cells have not finished; points are of those that have",) if missing else ()
    )
