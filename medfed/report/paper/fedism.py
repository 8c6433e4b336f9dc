"""The tables of FedISM (Wu et al., IJCAI 2024) from a grid: fairness under corrupted images.

Every table has balanced accuracy and an AUC on the clean and the corrupted test set and their average in each round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from medfed.report.grid_cells import GridCells
from medfed.report.metrics import choose
from medfed.report.paper.entries import Column, PaperTable, Row, build
from medfed.report.paper.facts import Setting, matches_sharpness, name_of, percent, salted, settings, without

PAPER = "FedISM"
SETS = ("clean", "corrupted", "average")
NO_CORRUPTION = "no condition has clients with corrupted images"


def corrupted_settings(cells: GridCells) -> list[Setting]:
    """Conditions in which some clients have corrupted images."""
    return [s for s in settings(cells).values() if s.corrupted]


def measures(cells: GridCells) -> list[str]:
    """The metrics of the tables: those of the grid, else balanced accuracy and an AUC as recorded."""
    recorded = {m for run in cells.finished.values() for m in run.metrics()}
    wanted = [m for m in cells.metrics or [] if m in recorded]
    return wanted or choose(recorded, ("balanced accuracy", "AUC"))


def rivals(cells: GridCells) -> list[str]:
    """Labels of the methods of Table 1: published rivals, and of FedISM's kind the whole method.

    Rivals with SALT are Table 3's, parts of FedISM Table 2's, other exponents Figure 5's.
    """
    found: dict[str, str] = {}
    for label, own in cells.methods.items():
        if matches_sharpness(own):
            if salted(own) and own.get("method.saga"):
                found.setdefault(without(own, "method.q"), label)
        elif not salted(own):
            found[label] = label
    return list(found.values())


def columns(cells: GridCells, conditions: Sequence[str]) -> list[Column]:
    """Metrics by test set."""
    return [
        Column(f"{part}/{name}", part, Column(f"{part}/{name}", "").metric.axis, tuple(conditions))
        for name in measures(cells)
        for part in SETS
    ]


def _each(cells: GridCells) -> list[tuple[Setting, str, str]]:
    """Conditions with corrupted images, with a suffix for the id and one for the title."""
    found = corrupted_settings(cells)
    several = len(found) > 1
    return [(s, f"-{i}" if several else "", f" ({s.label})" if s.label else "") for i, s in enumerate(found, start=1)]


def _tables(
    cells: GridCells, number: int, rows: Sequence[Row], title: str = "", corner: str = "method"
) -> list[PaperTable] | str:
    """One of the paper's tables, for each condition with corrupted images."""
    tables = [
        build(
            cells,
            f"fedism-{number}{mark}",
            f"{PAPER}, Table {number}",
            f"{title}{s.cohort}, {_share(s)}{where}",
            rows,
            columns(cells, [s.label]),
            corner,
        )
        for s, mark, where in _each(cells)
    ]
    return [t for t in tables if t] or "no run with corrupted images has finished"


def comparison(cells: GridCells) -> list[PaperTable] | str:
    """Table 1: rivals on clean and corrupted images; a table for each condition."""
    labels = rivals(cells)
    if not corrupted_settings(cells):
        return NO_CORRUPTION
    if len(labels) < 2:
        return "fewer than two methods are complete ones (without SALT, or of FedISM's kind with SALT and SAGA)"
    rows = [Row(m, m) for m in labels]
    return _tables(cells, 1, rows)


def ablation(cells: GridCells) -> list[PaperTable] | str:
    """Table 2: SALT and SAGA alone and together."""
    if not corrupted_settings(cells):
        return NO_CORRUPTION
    parts = {label: part for label, own in cells.methods.items() if (part := _part(cells, label, own))}
    kept = {"neither", "SALT alone", "SAGA alone", "SALT and SAGA"} & set(parts.values())
    if "SALT and SAGA" not in kept or not kept & {"SALT alone", "SAGA alone"}:
        return "it takes FedISM whole and with one of SALT and SAGA alone (fedavg with salt, fedism with salt: false)"
    seen: dict[str, str] = {}
    for label, part in parts.items():
        seen.setdefault(part, label)
    order = ("neither", "SALT alone", "SAGA alone", "SALT and SAGA")
    rows = [Row(f"{part} ({seen[part]})", seen[part]) for part in order if part in seen]
    return _tables(cells, 2, rows, "parts of FedISM; ", corner="parts")


def _part(cells: GridCells, label: str, own: Mapping[str, Any]) -> str:
    if name_of(cells, label) == "fedism":
        return {(True, True): "SALT and SAGA", (True, False): "SALT alone", (False, True): "SAGA alone"}.get(
            (salted(own), bool(own.get("method.saga"))), ""
        )
    if name_of(cells, label) == "fedavg":
        return "SALT alone" if salted(own) else "neither"
    return ""


def with_salt(cells: GridCells) -> list[PaperTable] | str:
    """Table 3: fairness methods with and without SALT."""
    if not corrupted_settings(cells):
        return NO_CORRUPTION
    pairs: dict[str, dict[bool, str]] = {}
    for label, own in cells.methods.items():
        if not matches_sharpness(own):
            pairs.setdefault(without(own, "method.salt"), {}).setdefault(salted(own), label)
    whole = [p for p in pairs.values() if len(p) == 2]
    if not whole:
        return "no method is there both with and without 'salt'"
    rows = [Row(p[salt], p[salt]) for p in whole for salt in (False, True)]
    return _tables(cells, 3, rows, "with and without SALT; ")


def _share(setting: Setting) -> str:
    whole = f" of {setting.clients} clients ({percent(setting.ratio)})" if setting.clients else " clients"
    return f"{setting.corrupted}{whole} have corrupted images"
