"""The tables of OCT-FedSIR (Gholami et al., arXiv 2609.14734, 2026) from a grid: robustness to wrong labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from medfed.report.grid_cells import GridCells
from medfed.report.metrics import metric
from medfed.report.paper.entries import JUDGED, Column, PaperTable, Row, build
from medfed.report.paper.facts import Setting, name_of, percent, settings, switched_off

PAPER = "OCT-FedSIR"
RELABELLING = tuple(k for k in JUDGED if k.startswith("relabelling/"))
LETTERS = {"symmetric": "symmetric noise", "asymmetric": "asymmetric noise", "ordinal": "ordinal noise"}
PLAIN = "no condition has wrong labels"


def noisy_settings(cells: GridCells) -> list[Setting]:
    """Conditions with wrong labels, by data set, kind, decreasing concentration and rate."""
    found = [s for s in settings(cells).values() if s.kind]
    kinds = list(LETTERS)
    return sorted(
        found, key=lambda s: (s.cohort, kinds.index(s.kind) if s.kind in kinds else 9, -(s.alpha or 0), s.rate or 0)
    )


def true_settings(cells: GridCells) -> list[Setting]:
    """Conditions in which all labels are true."""
    return [s for s in settings(cells).values() if not s.kind]


def as_true(cells: GridCells, conditions: Iterable[str]) -> tuple[str, ...]:
    """The conditions with true labels that are otherwise like some of those given."""
    known = settings(cells)
    like = {(s.cohort, s.alpha, s.corrupted, s.rest) for c in conditions for s in [known[c]]}
    return tuple(s.label for s in true_settings(cells) if (s.cohort, s.alpha, s.corrupted, s.rest) in like)


def whole_methods(cells: GridCells) -> list[str]:
    """Labels of the methods that are not OCT-FedSIR with a part switched off."""
    return [label for label in cells.methods if not _ablated(cells, label)]


def _ablated(cells: GridCells, label: str) -> bool:
    return _repairs(cells, label) and bool(switched_off(cells, label))


def _repairs(cells: GridCells, label: str) -> bool:
    """Whether it is a method of OCT-FedSIR's kind, which corrects labels and weighs models."""
    return {"method.daagg", "method.relabel"} <= set(cells.methods[label])


def metrics_recorded(cells: GridCells) -> set[str]:
    """Metrics of the finished runs."""
    return {m for run in cells.finished.values() for m in run.metrics()}


def method_rows(
    cells: GridCells, columns: Sequence[Column], group: str = "", only: frozenset[str] | None = None
) -> list[Row]:
    """Methods, then what they are held against: pruning, and training on true labels."""
    labels = whole_methods(cells)
    pruned = [m for m in labels if name_of(cells, m) == "pruning"]
    rows = [Row(m, m, group, only=only) for m in labels if m not in pruned]
    rows += [Row(m, m, group, reference=True, only=only) for m in pruned]
    plain = [m for m in labels if name_of(cells, m) == "fedavg"][:1]
    for m in plain:
        instead = {
            i: as_true(cells, [c for c in column.conditions if only is None or c in only])
            for i, column in enumerate(columns)
        }
        if any(instead.values()):
            rows.append(Row(f"{m} (all labels true)", m, group, reference=True, conditions=instead))
    return rows


def by_kind(cells: GridCells, key: str) -> list[Column]:
    """A column a data set and kind of noise, over all rates and concentrations, and one over everything."""
    found = noisy_settings(cells)
    columns = [
        Column(key, kind, cohort, tuple(s.label for s in found if (s.cohort, s.kind) == (cohort, kind)))
        for cohort, kind in dict.fromkeys((s.cohort, s.kind) for s in found)
    ]
    return [*columns, Column(key, "overall", "", tuple(s.label for s in found))] if len(columns) > 1 else columns


def averages(cells: GridCells) -> list[PaperTable] | str:
    """Table 1, and the same in macro-F1: methods over data sets and kinds of noise."""
    if not noisy_settings(cells):
        return PLAIN
    tables = []
    for name, mark, as_ in (("accuracy", "", ""), ("f1_macro", "-f1", "as ")):
        columns = by_kind(cells, f"clean/{name}")
        count = len({c for column in columns for c in column.conditions})
        title = f"{metric(name).axis}, mean over {count} condition{'s' if count > 1 else ''}"
        tables.append(
            build(cells, f"oct-fedsir-1{mark}", f"{PAPER}, {as_}Table 1", title, method_rows(cells, columns), columns)
        )
    return [t for t in tables if t] or "accuracy is not recorded"


def identification(cells: GridCells) -> list[PaperTable] | str:
    """Table 2: how well clients with true labels are found."""
    if not noisy_settings(cells):
        return PLAIN
    tables = []
    for key, mark in (("identification/clean_f1", ""), ("identification/accuracy", "-accuracy")):
        columns = by_kind(cells, key)
        title = f"{JUDGED[key].axis}, newest verdict, mean over conditions"
        rows = [Row(m, m) for m in cells.methods if _records(cells, m, key)]
        tables.append(build(cells, f"oct-fedsir-2{mark}", f"{PAPER}, Table 2", title, rows, columns))
    return [t for t in tables if t] or "no finished run has judged its clients"


def relabelling(cells: GridCells) -> list[PaperTable] | str:
    """Table 3: how right the corrected labels are, at clients judged noisy."""
    found = noisy_settings(cells)
    if not found:
        return PLAIN
    methods = [
        m for m in whole_methods(cells) if _records(cells, m, RELABELLING[1]) or _records(cells, m, RELABELLING[0])
    ]
    columns = [Column(key, JUDGED[key].axis, "", tuple(s.label for s in found)) for key in RELABELLING]
    cohorts = list(dict.fromkeys(s.cohort for s in found))
    rows = []
    for kind in dict.fromkeys(s.kind for s in found):
        rates = [s.rate or 0.0 for s in found if s.kind == kind]
        group = f"{LETTERS.get(kind, kind)} (mean rate {percent(round(sum(rates) / len(rates), 3))})"
        for cohort in cohorts:
            only = frozenset(s.label for s in found if (s.kind, s.cohort) == (kind, cohort))
            rows += [Row(m if len(cohorts) == 1 else f"{cohort}: {m}", m, group, only=only) for m in methods if only]
    title = "corrected labels at clients judged noisy, newest targets, mean over conditions"
    table = build(cells, "oct-fedsir-3", f"{PAPER}, Table 3", title, rows, columns)
    return [table] if table else "no finished run has corrected labels"


def ablation(cells: GridCells) -> list[PaperTable] | str:
    """Table 4: OCT-FedSIR without one of its parts."""
    found = noisy_settings(cells)
    if not found:
        return PLAIN
    parts = {m: switched_off(cells, m) for m in cells.methods if _repairs(cells, m)}
    full = next((m for m in parts if not parts[m] and any(parts[o] and _kin(cells, m, o) for o in parts)), None)
    if full is None:
        return "it takes OCT-FedSIR whole and with daagg, logit_adjustment, distillation or relabel switched off"
    conditions = tuple(s.label for s in found)
    columns = []
    for name in ("accuracy", "f1_macro"):
        columns.append(Column(f"clean/{name}", metric(name).axis, "", conditions))
        columns.append(Column(f"clean/{name}", "difference", "", conditions, minus=full))
    rows = [Row(full if full == "full" else f"{full} (full)", full)]
    for label, off in parts.items():
        if off and _kin(cells, full, label):
            name = f"w/o {' and '.join(off)}"
            rows.append(Row(name if label == name else f"{name} ({label})", label))
    title = f"parts of {full}, mean over {len(conditions)} condition{'s' if len(conditions) > 1 else ''}"
    table = build(cells, "oct-fedsir-4", f"{PAPER}, Table 4", title, rows, columns, "configuration")
    return [table] if table else "accuracy is not recorded"


def by_rate(cells: GridCells) -> list[PaperTable] | str:
    """Tables S1 to S6: for each data set and kind of noise, methods against the rate, below each concentration."""
    found = noisy_settings(cells)
    if not found:
        return PLAIN
    tables = []
    for number, (cohort, kind) in enumerate(dict.fromkeys((s.cohort, s.kind) for s in found), start=1):
        own = [s for s in found if (s.cohort, s.kind) == (cohort, kind)]
        for name, mark, as_ in (("accuracy", "", ""), ("f1_macro", "-f1", "as ")):
            columns = [
                Column(
                    f"clean/{name}",
                    percent(rate),
                    f"{LETTERS.get(kind, kind)}, rate",
                    tuple(s.label for s in own if s.rate == rate),
                )
                for rate in sorted({s.rate or 0.0 for s in own})
            ]
            rows = []
            alphas = list(dict.fromkeys(s.alpha for s in own))
            for alpha in alphas:
                only = frozenset(s.label for s in own if s.alpha == alpha)
                group = "" if alpha is None else f"α = {alpha:g}"
                rows += method_rows(cells, columns, group, only)
            title = f"{metric(name).axis} on {cohort} under {LETTERS.get(kind, kind)}"
            id = f"oct-fedsir-s{number}{mark}"
            most = max(
                sum(s.alpha == alpha and s.rate == rate for s in own)
                for alpha in alphas
                for rate in {s.rate for s in own}
            )
            notes = (
                [f"an entry is a mean over up to {most} conditions, which differ in something else"] if most > 1 else []
            )
            tables.append(build(cells, id, f"{PAPER}, {as_}Tables S1 to S6", title, rows, columns, notes=notes))
    return [t for t in tables if t] or "accuracy is not recorded"


def _records(cells: GridCells, method: str, key: str) -> bool:
    return any(run.values(key) for (_, m, _), run in cells.finished.items() if m == method)


def _kin(cells: GridCells, one: str, other: str) -> bool:
    return one != other and name_of(cells, one) == name_of(cells, other)


Builder = Callable[[GridCells], "list[PaperTable] | str"]
