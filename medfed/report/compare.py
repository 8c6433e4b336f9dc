"""The paired comparison of runs: methods against each other on the very same conditions.

A *condition* is the partition, the corruption and the initial model; their hashes are recorded with every run.
Two runs with the same seed are compared only where these are the same, since otherwise the difference is not
the method's; a run on the true labels of the same partition is let in and named as such.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from medfed.errors import MedfedError, nearest
from medfed.report.contents import flat
from medfed.report.metrics import COLUMNS, choose, metric
from medfed.report.notices import collapse, few, notes_on
from medfed.report.runs import LAST, Run

if TYPE_CHECKING:
    from rich.console import Console

TRUE_LABELS = "true labels"


@dataclass
class Cell:
    """One method, metric and column.

    All numbers are as recorded (fractions where the metric is shown in percent).

    Args:
        per_run: ``(seed, mean over the last rounds)`` of each run in which it is defined.
        pooled: every defined value of the last rounds of every run.
        differences: by seed, this method minus the baseline on the same condition.
        better: in how many of the seeds this method is better than the baseline.
        rank: 1 for the best method, 2 for the second best; None otherwise.
    """

    per_run: list[tuple[int | None, float]] = field(default_factory=list)
    pooled: list[float] = field(default_factory=list)
    differences: dict[int | None, float] = field(default_factory=dict)
    better: int = 0
    rank: int | None = None

    @property
    def mean(self) -> float | None:
        """Mean over runs of each run's mean over the last rounds."""
        return _mean([v for _, v in self.per_run])

    @property
    def std(self) -> float | None:
        """Sample standard deviation (n - 1) over runs of each run's mean; None for fewer than two runs."""
        return statistics.stdev(v for _, v in self.per_run) if len(self.per_run) > 1 else None

    @property
    def pooled_mean(self) -> float | None:
        """Mean over all (round, run) values of the last rounds."""
        return _mean(self.pooled)

    @property
    def pooled_std(self) -> float | None:
        """Population standard deviation (n) over all (round, run) values of the last rounds.

        This is the spread printed in the tables of the FedISM paper: last five rounds times three runs.
        """
        return statistics.pstdev(self.pooled) if self.pooled else None

    @property
    def difference(self) -> float | None:
        """Mean over seeds of the paired differences."""
        return _mean(list(self.differences.values()))

    @property
    def difference_std(self) -> float | None:
        """Sample standard deviation over seeds of the paired differences; None for fewer than two."""
        return statistics.stdev(self.differences.values()) if len(self.differences) > 1 else None

    @property
    def same_sign(self) -> int:
        """In how many seeds the difference has the more frequent sign (0 counts for neither)."""
        signs = [(d > 0) - (d < 0) for d in self.differences.values()]
        return max(signs.count(1), signs.count(-1))


@dataclass
class Comparison:
    """Runs grouped by method, with their paired table.

    Args:
        runs: the runs of each method, by its label, in the order given.
        metrics: the metrics compared.
        baseline: the label of the method that differences are taken against.
        paired: whether runs of one seed share their condition; no differences otherwise.
        last: rounds that a run's number is the mean of, at most; fewer than asked for where no run has as many.
        cells: by (method, metric, column).
        notes: what a reader must know: incomplete runs, collapsed models, undefined values, unequal seeds.
    """

    runs: dict[str, list[Run]]
    metrics: list[str]
    baseline: str
    paired: bool
    last: int
    cells: dict[tuple[str, str, str], Cell]
    notes: list[str]

    @property
    def methods(self) -> list[str]:
        """Labels of the methods, in the order given."""
        return list(self.runs)

    @property
    def others(self) -> list[str]:
        """The methods other than the baseline."""
        return [m for m in self.runs if m != self.baseline]

    def cell(self, method: str, metric: str, column: str) -> Cell:
        """One cell of the table."""
        return self.cells[method, metric, column]

    def render(self, console: Console, pooled: bool = False) -> None:
        """Prints the tables to a Rich console; see :func:`medfed.report.tables.render`."""
        from medfed.report.tables import render

        render(self, console, pooled)

    def to_csv(self) -> str:
        """One line a cell, in the unit shown; see :func:`medfed.report.tables.to_csv`."""
        from medfed.report.tables import to_csv

        return to_csv(self)

    def to_markdown(self) -> str:
        """Markdown tables with captions."""
        from medfed.report.tables import to_markdown

        return to_markdown(self)

    def to_latex(self) -> str:
        """LaTeX tables (booktabs)."""
        from medfed.report.tables import to_latex

        return to_latex(self)

    def to_json(self) -> str:
        """Everything, with the numbers as recorded."""
        from medfed.report.tables import to_json

        return to_json(self)


def compare(
    runs: Sequence[Run],
    *,
    metrics: Sequence[str] | None = None,
    baseline: str | None = None,
    last: int = LAST,
    allow_unpaired: bool = False,
    groups: dict[str, list[Run]] | None = None,
) -> Comparison:
    """Compares runs of several methods, paired by seed.

    Args:
        runs: the runs, in the order in which methods are to be listed.
        metrics: the metrics; balanced accuracy and one AUC (one-vs-one where recorded) unless given.
        baseline: the method that differences are taken against; the first unless given.
        last: rounds that a run's number is the mean of.
        allow_unpaired: compare although conditions differ; then no differences are given.
        groups: the runs by the label of their method; as :func:`group_by_method` has them unless given.

    Returns:
        The comparison.

    Raises:
        MedfedError: if there is no run, runs of one seed differ in their condition, a method has a seed twice,
            or a metric or the baseline is not known.
    """
    if not runs:
        raise MedfedError("there is no run to compare.", fix="Name at least one run directory.")
    groups = group_by_method(runs) if groups is None else groups
    unlike = unpaired(groups)
    if unlike and not allow_unpaired:
        raise MedfedError(f"the runs are not paired: {few(unlike, 2, '; ')}.", fix=_pairing(runs))
    chosen = _choose_metrics(runs, metrics)
    base = choose_baseline(groups, baseline)
    cells = {key: _cell(groups[key[0]], key[1], key[2], last) for key in itertools.product(groups, chosen, COLUMNS)}
    # Shorter runs have fewer rounds to take the mean of.
    averaged = max(len(run.final(f"{c}/{name}", last).rounds) for c in COLUMNS for name in chosen for run in runs)
    result = Comparison(groups, chosen, base, not unlike, averaged or last, cells, [])
    if result.paired:
        _pair(result)
    _rank(result)
    result.notes = notes_on(result, unlike)
    return result


def _pairing(runs: Sequence[Run]) -> str:
    """What can be done about runs that are not paired."""
    from medfed.report.against import candidates

    found = candidates(runs)
    other = f" For a line over {few(found)}: --against {found[0]}." if found else ""
    return f"Compare runs made on the same condition, or allow unpaired runs (no differences then).{other}"


def group_by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by method, where runs of one method with different settings are kept apart.

    The label is the method's name, and where settings differ also those that do: ``fedism (saga=False)``,
    ``fedavg (no salt)``, ``fedism (salt.rho=0.005)``.  Beside runs on wrong labels, those on true ones are called
    ``fedavg (true labels)``.
    """
    reference = {False: "", True: TRUE_LABELS if any(map(_mislabelled, runs)) else ""}
    variants: dict[str, dict[tuple[str, str], list[Run]]] = {}
    for run in runs:
        key = (repr(flat(_settings(run))), reference[not _mislabelled(run)])
        variants.setdefault(run.method, {}).setdefault(key, []).append(run)
    groups: dict[str, list[Run]] = {}
    for method, by_settings in variants.items():
        differences = _differences([_settings(m[0]) for m in by_settings.values()])
        for difference, ((_, labels), own) in zip(differences, by_settings.items()):
            label = ", ".join(filter(None, (difference, labels)))
            groups[f"{method} ({label})" if label else method] = own
    return groups


def _differences(settings: list[dict[str, Any]]) -> list[str]:
    """What sets each of several settings apart from the others; empty for one alone."""
    labels: list[list[str]] = [[] for _ in settings]
    for name in sorted({n for s in settings for n in s}):
        values = [s.get(name) for s in settings]
        if len({repr(v) for v in values}) < 2:
            continue
        sections = [v for v in values if isinstance(v, dict)]
        inner = iter(_differences(sections))
        for label, value in zip(labels, values):
            if isinstance(value, dict):
                label.append(", ".join(f"{name}.{part}" for part in next(inner).split(", ") if part) or name)
            elif sections and not value:
                label.append(f"no {name}")
            else:
                label.append(f"{name}={value}")
    return [", ".join(label) for label in labels]


def unpaired(groups: dict[str, list[Run]]) -> list[str]:
    """Why runs cannot be paired by seed: conditions or initial models that differ, none recorded, a seed twice."""
    reasons = []
    by_seed: dict[Any, list[tuple[str, Run]]] = defaultdict(list)
    for method, members in groups.items():
        for run in members:
            by_seed[run.seed].append((method, run))
    for seed, entries in by_seed.items():
        if len(entries) > 1 and not _same_condition([run for _, run in entries]):
            who = few([f"{r.folder} ({_short(r.meta.get('condition_hash'))})" for _, r in entries])
            reasons.append(f"with seed {seed} the conditions of {who} are not the same")
        models = {m for _, r in entries if (m := r.meta.get("initial_model_hash"))}
        if len(models) > 1:
            who = few([f"{r.folder} ({str(r.meta.get('initial_model_hash'))[:12]})" for _, r in entries])
            reasons.append(f"with seed {seed} the initial models of {who} are not the same")
        for method in groups:
            twice = [r.folder for m, r in entries if m == method]
            if len(twice) > 1:
                reasons.append(f"{method} has seed {seed} {len(twice)} times ({few(twice)})")
    return reasons


def _same_condition(runs: Sequence[Run]) -> bool:
    """Whether runs share their condition, or all but references on true labels do, which share its partition."""
    hashes = {run.meta.get("condition_hash") for run in runs}
    noisy = {run.meta.get("condition_hash") for run in runs if _mislabelled(run)}
    # Runs of before there was label noise record no partition: theirs is the condition.
    partitions = {run.meta.get("partition_hash") or run.meta.get("condition_hash") for run in runs}
    return all(hashes) and (len(hashes) == 1 or (len(partitions) == 1 and len(noisy) < 2))


def _mislabelled(run: Run) -> bool:
    """Whether clients hold wrong labels."""
    return bool(run.meta.get("mislabelled"))


def _short(digest: Any) -> str:
    return f"condition {str(digest)[:12]}" if digest else "no condition recorded"


def _settings(run: Run) -> dict[str, Any]:
    settings = run.meta.get("method_settings")
    return settings if isinstance(settings, dict) else {}


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _choose_metrics(runs: Sequence[Run], wanted: Sequence[str] | None) -> list[str]:
    recorded = {m for run in runs for m in run.metrics()}
    if wanted is None:
        return choose(recorded, ("balanced accuracy", "AUC"))
    for name in wanted:
        if name not in recorded:
            raise MedfedError(f"no run recorded the metric '{name}'.", fix=nearest(name, recorded))
    return list(dict.fromkeys(wanted))


def choose_baseline(groups: dict[str, list[Run]], wanted: str | None) -> str:
    """The label of the method that differences are taken against: the first unless one is named."""
    if wanted is None:
        return next(iter(groups))
    if wanted in groups:
        return wanted
    by_name = [label for label, members in groups.items() if members[0].method == wanted]
    if len(by_name) == 1:
        return by_name[0]
    fix = f"Several have that name: {'; '.join(by_name)}." if by_name else nearest(wanted, groups)
    raise MedfedError(f"'{wanted}' is not one of the methods compared.", where="baseline", fix=fix)


def _cell(members: Sequence[Run], name: str, column: str, last: int) -> Cell:
    key = f"{column}/{name}"
    finals = [(run.seed, run.final(key, last).value) for run in members]
    return Cell(
        per_run=[(seed, value) for seed, value in finals if value is not None],
        pooled=[v for run in members for v in run.window(key, last)],
    )


def gain(name: str, column: str, value: float, reference: float) -> float:
    """How much better ``value`` is than ``reference``; negative when it is worse.

    A gap is better the nearer it is to 0, whatever its sign and the metric.
    """
    if column == "gap":
        return abs(reference) - abs(value)
    return value - reference if metric(name).higher else reference - value


def _pair(result: Comparison) -> None:
    """Fills in the differences of every method against the baseline, seed by seed."""
    for method, name, column in itertools.product(result.others, result.metrics, COLUMNS):
        cell = result.cell(method, name, column)
        reference = dict(result.cell(result.baseline, name, column).per_run)
        common = [(s, v) for s, v in cell.per_run if s in reference]
        cell.differences = {s: v - reference[s] for s, v in common}
        cell.better = sum(gain(name, column, v, reference[s]) > 0 for s, v in common)


def _rank(result: Comparison) -> None:
    """Marks best and second best; equal means share a rank.

    A collapsed model's gap takes none, nor does a reference on true labels, which no method can be held against.
    """
    collapsed = {m for m, members in result.runs.items() if any(collapse(r, result.last) for r in members)}
    noise = any(_mislabelled(r) for members in result.runs.values() for r in members)
    references = {m for m, members in result.runs.items() if noise and not any(map(_mislabelled, members))}
    for name, column in itertools.product(result.metrics, COLUMNS):
        means = {
            m: mean
            for m in result.methods
            if (mean := result.cell(m, name, column).mean) is not None
            and not (column == "gap" and m in collapsed)
            and m not in references
        }
        if len(means) < 2:
            continue
        for method, mean in means.items():
            rank = 1 + sum(gain(name, column, other, mean) > 0 for other in means.values())
            result.cell(method, name, column).rank = rank if rank <= 2 else None
