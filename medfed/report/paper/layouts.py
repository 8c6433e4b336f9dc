"""Every published layout, which of them a grid admits, and why the others do not apply."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from medfed.report.grid_cells import GridCells
from medfed.report.paper import fedism, oct_fedsir
from medfed.report.paper.entries import PaperTable

Builder = Callable[[GridCells], "list[PaperTable] | str"]
TABLES: tuple[tuple[str, Builder], ...] = (
    ("FedISM, Table 1: methods on clean and corrupted images", fedism.comparison),
    ("FedISM, Table 2: SALT and SAGA alone", fedism.ablation),
    ("FedISM, Table 3: fairness methods with SALT", fedism.with_salt),
    ("OCT-FedSIR, Table 1: accuracy over all conditions", oct_fedsir.averages),
    ("OCT-FedSIR, Table 2: identification of clients", oct_fedsir.identification),
    ("OCT-FedSIR, Table 3: corrected labels", oct_fedsir.relabelling),
    ("OCT-FedSIR, Table 4: parts switched off", oct_fedsir.ablation),
    ("OCT-FedSIR, Tables S1 to S6: against the noise rate", oct_fedsir.by_rate),
)


@dataclass
class Layouts:
    """The published tables that a grid admits.

    Args:
        tables: those that apply, in the order of the papers.
        absent: the others, each with the reason.
    """

    tables: list[PaperTable] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)


def layouts(cells: GridCells) -> Layouts:
    """Recognises the published layouts by what varies in a grid, and fills them in from its finished runs."""
    found = Layouts()
    for name, builder in TABLES:
        built = builder(cells)
        if isinstance(built, str):
            found.absent[name] = built
        else:
            found.tables += built
    return found


def to_csv(tables: list[PaperTable]) -> str:
    """One line an entry: mean and every kind of spread by name, in the unit of that line, empty where not defined."""
    rows: list[dict[str, Any]] = []
    for table in tables:
        for (r, c), one in sorted(table.entries.items()):
            if not one.places:
                continue
            row, column = table.rows[r], table.columns[c]
            shown = column.metric

            def unit(value: float | None, of: Any = shown) -> float | str:
                return "" if value is None else round(of.shown(value), 8)

            rows.append(
                {
                    "table": table.id,
                    "paper": table.paper,
                    "group": row.group,
                    "row": row.label,
                    "method": row.method,
                    "reference": int(row.reference),
                    "column_group": column.group,
                    "column": column.head,
                    "quantity": column.key,
                    "minus": column.minus,
                    "unit": shown.unit or "1",
                    "mean": unit(one.mean),
                    "sample_std_over_seeds": unit(one.spread("sample")),
                    "population_std_over_seeds": unit(one.spread("population")),
                    "seeds_in_std": len(one.by_seed),
                    "pooled_mean": unit(one.centre("pooled") if one.pooled else None),
                    "pooled_population_std": unit(one.spread("pooled")),
                    "pooled_values": len(one.pooled),
                    "conditions": len({p for p, _ in one.places}),
                    "cells_counted": len(one.values),
                    "cells_finished": one.finished,
                    "cells": len(one.places),
                    "rank": one.rank or "",
                }
            )
    return written(rows)


def written(rows: list[dict[str, Any]]) -> str:
    """Rows as CSV with a head; empty text for none."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    if rows:
        writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
