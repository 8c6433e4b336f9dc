"""Methods against a number of the experiment, such as the noise rate: comparisons side by side.

Runs whose experiments differ in nothing but seed and method form a *group*, which is a paired comparison of its own
(:mod:`medfed.report.compare`).  Groups that differ in the chosen number alone form a *panel*: a line a method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from medfed.errors import MedfedError, nearest
from medfed.report.compare import Cell, Comparison, choose_baseline, compare, group_by_method
from medfed.report.contents import experiment, plain
from medfed.report.metrics import choose
from medfed.report.notices import few, notes_on
from medfed.report.runs import LAST, Run

if TYPE_CHECKING:
    from rich.console import Console

SECTIONS = ("cohort", "condition", "bundle", "overrides", "rounds", "participation")
"""What of an experiment makes a group, beside its method."""
APART = {"condition.seed", "condition.label_noise.apply", "cohort.root"}
NOISE = "condition.label_noise."
WORDS = (".kind", ".reader")
"""Endings of keys whose value says by itself what it is."""
DEFAULT = ("accuracy", "f1_macro")


@dataclass(frozen=True)
class Panel:
    """Groups that differ in the chosen number alone.

    Args:
        title: what sets it apart from the other panels; empty for a single one.
        points: the comparison at each value of the number, ascending.
    """

    title: str
    points: Mapping[float, Comparison]

    def cell(self, value: float, method: str, name: str, column: str) -> Cell | None:
        """One cell of the group at a value; None where the method has no run there."""
        return self.points[value].cells.get((method, name, column))

    def line(self, method: str, name: str, column: str) -> list[tuple[float, Cell]]:
        """Values and cells in which something is defined."""
        cells = [(x, self.cell(x, method, name, column)) for x in self.points]
        return [(x, c) for x, c in cells if c is not None and c.mean is not None]


@dataclass(frozen=True)
class Against:
    """Comparisons at several values of one number of the experiment.

    Args:
        key: the number, by its dotted name.
        panels: one for each combination of whatever else differs.
        runs: all runs of each method, by its label, in the order given.
        metrics: the metrics compared.
        baseline: the method that differences are taken against.
        last: rounds that a run's number is the mean of.
        notes: what a reader must know.
    """

    key: str
    panels: list[Panel]
    runs: dict[str, list[Run]]
    metrics: list[str]
    baseline: str
    last: int
    notes: list[str]

    @property
    def methods(self) -> list[str]:
        """Labels of the methods, in the order given."""
        return list(self.runs)

    @property
    def label(self) -> str:
        """The number's name for people, e.g. ``label noise rate``."""
        return " ".join(self.key.replace("::", ".").split(".")[-2:]).replace("_", " ").removeprefix("condition ")

    def columns(self, name: str) -> list[str]:
        """The test sets on which a metric is defined anywhere."""
        lines = {c: [p.line(m, name, c) for p in self.panels for m in self.methods] for c in ("clean", "corrupted")}
        return [c for c, found in lines.items() if any(found)]

    def render(self, console: Console, pooled: bool = False) -> None:
        """Prints the tables to a Rich console; see :func:`medfed.report.against_tables.render`."""
        from medfed.report.against_tables import render

        render(self, console)

    def to_csv(self) -> str:
        """One line a cell of every group, with its panel and value."""
        from medfed.report.against_tables import to_csv

        return to_csv(self)

    def to_markdown(self) -> str:
        """Markdown tables: a row a method, a column a value."""
        from medfed.report.against_tables import to_markdown

        return to_markdown(self)

    def to_latex(self) -> str:
        """LaTeX tables (booktabs): a row a method, a column a value."""
        from medfed.report.against_tables import to_latex

        return to_latex(self)

    def to_json(self) -> str:
        """Every group as :meth:`Comparison.to_json` has it, with its panel and value."""
        from medfed.report.against_tables import to_json

        return to_json(self)


def against(
    runs: Sequence[Run],
    key: str,
    *,
    metrics: Sequence[str] | None = None,
    baseline: str | None = None,
    last: int = LAST,
    allow_unpaired: bool = False,
) -> Against:
    """Compares runs of several methods at several values of a number of the experiment.

    A run for which the number means nothing (its experiment lacks it, or its labels are true whatever the noise rate)
    stands in every group that it fits otherwise: a level line.

    Args:
        runs: the runs, in the order in which methods are to be listed.
        key: dotted name in the experiment file, e.g. ``condition.label_noise.rate`` or ``method.temperature``.
        metrics: see :func:`medfed.report.compare.compare`; accuracy and macro-F1 where recorded unless given.
        baseline: see there.
        last: see there.
        allow_unpaired: see there.

    Raises:
        MedfedError: no run has the key or its value is no number; or a group cannot be compared, which is named.
    """
    if not runs:
        raise MedfedError("there is no run to compare.", fix="Name at least one run directory.")
    settings = {id(run): settings_of(run) for run in runs}
    _check(runs, settings, key)
    values = {id(run): _value(settings[id(run)], key, run) for run in runs}
    labels = _labels(runs, key)
    placed = [r for r in runs if values[id(r)] is not None]
    differing = _telling([settings[id(r)] for r in placed], key)
    recorded = {m for run in runs for m in run.metrics()}
    chosen = metrics or [m for m in DEFAULT if m in recorded] or choose(recorded, ("balanced accuracy", "F1"))
    groups = _groups(runs, settings, values, differing)
    base = choose_baseline(labels, baseline)
    notes: list[str] = []
    panels: dict[str, dict[float, Comparison]] = {}
    for (title, value), members in groups.items():
        inside = {id(r) for r in members}
        own = {label: kept for label, all_ in labels.items() if (kept := [r for r in all_ if id(r) in inside])}
        here = base if base in own else next(iter(own))
        where = f"{title}, {key} {value:g}" if title else f"{key} {value:g}"
        if here != base:
            notes.append(f"no run of {base} at {where}: differences there are to {here}")
        try:
            result = compare(
                members, metrics=chosen, baseline=here, last=last, allow_unpaired=allow_unpaired, groups=own
            )
        except MedfedError as error:
            raise MedfedError(f"at {where}: {error.what}", fix=error.fix) from None
        notes += [f"at {where}: {n}" for n in result.notes if n.startswith("not paired")]
        panels.setdefault(title, {})[value] = result
    whole = Comparison(labels, list(chosen), base, True, last, {}, [])
    return Against(
        key,
        [Panel(title, dict(sorted(points.items()))) for title, points in panels.items()],
        labels,
        list(chosen),
        base,
        last,
        notes + notes_on(whole, []),
    )


def settings_of(run: Run) -> dict[str, Any]:
    """A run's experiment by dotted name, the method's settings with their defaults under ``method``."""
    content = experiment(run) or {}
    method = {"name": run.method, **(run.meta.get("method_settings") or {})}
    return plain({**content, "method": method})


def candidates(runs: Sequence[Run]) -> list[str]:
    """Numbers of the experiment that differ between runs and could be what they are drawn against."""
    settings = [settings_of(run) for run in runs]
    keys = [k for k in _differing(settings, "") if k.startswith("method.") or _makes_groups(k)]
    return [k for k in keys if all(_is_number(s[k]) for s in settings if s.get(k) is not None)]


def _makes_groups(key: str) -> bool:
    return key.split(".")[0] in SECTIONS and key not in APART


def _differing(settings: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    names = dict.fromkeys(k for s in settings for k in s)
    return [k for k in names if k != key and len({repr(s.get(k)) for s in settings}) > 1]


def _telling(settings: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """Keys that tell the panels apart, without those that follow from others: a class map from the kind of noise."""
    found = sorted((k for k in _differing(settings, key) if _makes_groups(k)), key=lambda k: not k.endswith(WORDS))
    kept: list[str] = []
    for name in found:
        before = {repr([s.get(k) for k in kept]) for s in settings}
        after = {repr([s.get(k) for k in (*kept, name)]) for s in settings}
        if len(after) > len(before):
            kept.append(name)
    return kept


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _value(settings: Mapping[str, Any], key: str, run: Run) -> float | None:
    """The run's value; None where it has none or where it means nothing."""
    value = settings.get(key)
    if key.startswith(NOISE) and (settings.get(f"{NOISE}apply") is False or value is None):
        return None
    if value is None and key.startswith("method."):
        return None
    if value is None or not _is_number(value):
        found = "is not given" if value is None else f"is no number but {value!r}"
        raise MedfedError(f"{key} {found} in {run.folder}.", where="against", fix=nearest(key, settings))
    return float(value)


def _check(runs: Sequence[Run], settings: Mapping[int, Mapping[str, Any]], key: str) -> None:
    """Refuses a key that no run has, and names those that could be meant."""
    if any(_is_number(s.get(key)) for s in settings.values()):
        return
    possible = candidates(runs)
    known = possible or sorted({k for s in settings.values() for k, v in s.items() if _is_number(v)})
    fix = f"What differs between the runs: {few(possible, 5)}." if possible else nearest(key, known)
    raise MedfedError(f"no run has a number {key}.", where="against", fix=fix)


def _labels(runs: Sequence[Run], key: str) -> dict[str, list[Run]]:
    """Runs by method as :func:`group_by_method` has them, with the chosen number left out of the labels."""
    section, _, name = key.partition(".")
    if section != "method":
        return group_by_method(runs)
    path = name.split(".")
    originals: dict[int, Run] = {}
    bare = []
    for run in runs:
        copy = replace(run, meta={**run.meta, "method_settings": _without(run.meta.get("method_settings") or {}, path)})
        originals[id(copy)] = run
        bare.append(copy)
    return {label: [originals[id(r)] for r in members] for label, members in group_by_method(bare).items()}


def _without(settings: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    first, *rest = path
    kept = {k: v for k, v in settings.items() if k != first}
    inner = settings.get(first)
    return {**kept, first: _without(inner, rest)} if rest and isinstance(inner, Mapping) else kept


def _groups(
    runs: Sequence[Run],
    settings: Mapping[int, Mapping[str, Any]],
    values: Mapping[int, float | None],
    differing: Sequence[str],
) -> dict[tuple[str, float], list[Run]]:
    """Runs by title of the panel and value, in ascending order of titles and values."""
    titles = {id(r): _title(settings[id(r)], differing) for r in runs}
    order = {
        (titles[id(r)], v): _order(settings[id(r)], differing, v) for r in runs if (v := values[id(r)]) is not None
    }
    places = sorted(order, key=lambda place: order[place])
    found: dict[tuple[str, float], list[Run]] = {}
    for title, value in places:
        there = next(settings[id(r)] for r in runs if titles[id(r)] == title and values[id(r)] == value)
        members = [r for r in runs if (titles[id(r)], values[id(r)]) == (title, value)]
        seen: set[str] = set()
        for run in runs:
            own = settings[id(run)]
            # The same run without the chosen number may be given once for every value: one of them is enough.
            same = repr((run.method, run.seed, sorted((k, repr(v)) for k, v in own.items() if _lasting(k))))
            fits = all(own.get(k) == there.get(k) for k in differing if not k.startswith(NOISE))
            if values[id(run)] is None and fits and same not in seen:
                seen.add(same)
                members.append(run)
        found[title, value] = [r for r in runs if any(r is m for m in members)]
    return found


def _order(settings: Mapping[str, Any], differing: Sequence[str], value: float) -> list[tuple[int, float, str]]:
    """Numbers by size, words by the alphabet."""
    found = [settings.get(k) for k in differing] + [value]
    return [(0, float(v), "") if v is not None and _is_number(v) else (1, 0.0, str(v)) for v in found]


def _lasting(key: str) -> bool:
    """Whether a key makes a run without the chosen number another one."""
    return key.startswith("method.") or (_makes_groups(key) and not key.startswith(NOISE))


def _title(settings: Mapping[str, Any], differing: Sequence[str]) -> str:
    parts = []
    for key in differing:
        value = settings.get(key)
        name = key.replace("::", ".").split(".")[-1]
        parts.append(str(value) if key.endswith(WORDS) else f"{name.replace('_', ' ')} {_text(value)}")
    return ", ".join(parts)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return few([str(v) for v in value])
    return f"{value:g}" if isinstance(value, float) else str(value)
