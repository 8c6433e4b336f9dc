"""What a run's page shows of the reliability of labels: plain values and tables for the template, and figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from medfed.report.notices import in_rounds
from medfed.report.plots import inline
from medfed.report.reliability import (
    DESCRIPTORS,
    ERROR,
    MEANINGS,
    QUALITY,
    RELABELLING,
    STATUS,
    Checkpoint,
    Identification,
    Judged,
    checkpoints,
    identification,
    noisy_clients,
    similarities,
)
from medfed.report.reliability_figures import descriptor_space, distributions, relabelling
from medfed.report.runs import Run


def labels_view(run: Run) -> dict[str, Any] | None:
    """What is shown of the reliability of labels; None where no client was judged and no label proposed."""
    found, relabelled = identification(run), checkpoints(run)
    if found is None and not relabelled:
        return None
    view: dict[str, Any] = {
        "found": found,
        "noisy": noisy_clients(run),
        "relabelling": relabelling_table(relabelled),
        "checkpoints": inline(
            relabelling(relabelled),
            "Relabelling by checkpoint",
            "How many training targets are edited or wrong, and how right the edits are.",
        ),
    }
    if found is None:
        return view
    return view | {
        "judged": in_rounds(found.rounds),
        "counts": [(s, len(found.of(s))) for s in STATUS],
        "quality": [(t, percent(found.quality[k])) for k, t in QUALITY.items() if k in found.quality],
        "verdicts": verdict_table(found),
        "confusion": confusion_table(found),
        "similarity": similarity_tables(run, found),
        "distributions": inline(
            distributions(found),
            "Grounds of the verdicts",
            "Each client's probability of being clean, descriptors and evidence, by verdict.",
        ),
        "space": inline(
            descriptor_space(found),
            "Descriptor space",
            "The three descriptors of every client against each other, coloured by verdict.",
        ),
    }


def verdict_table(found: Identification) -> dict[str, Any]:
    """A row a client: ``header`` (name, meaning) and ``rows`` (client, status, truly noisy or not, wrong, cells)."""
    names = ("p_clean", *DESCRIPTORS, "observed_classes", *found.evidence)
    shown = [n for n in names if found.defined(n) and n not in found.errors]
    titles = {"p_clean": "p(clean)", "observed_classes": "classes", **DESCRIPTORS}
    revised = any(len(c.history) > 1 for c in found.clients.values())
    rows = []
    for name, client in found.clients.items():
        cells = [_cell(client, n, 0 if found.counts(n) else 3) for n in shown]
        if revised:
            earlier = ", ".join(f"{status} in round {round_}" for round_, status in client.history[:-1])
            cells.append(earlier or "–")
        truth = None if found.noisy is None else name in found.noisy
        rows.append((name, client.status, truth, found.wrong(name), cells))
    header = [titles.get(n, n.replace("_", " ")) for n in shown] + ["earlier"] * revised
    return {"header": header, "rows": rows, "known": found.noisy is not None}


def confusion_table(found: Identification) -> list[tuple[str, list[tuple[int, float, bool]]]] | None:
    """Rows by truth: count, share of the row and whether it is right, for each verdict; None without truth."""
    table = found.confusion()
    if table is None:
        return None
    return [
        (truth, [(n, n / max(sum(row), 1), verdict == truth) for n, verdict in zip(row, STATUS)])
        for truth, row in table.items()
    ]


def similarity_tables(run: Run, found: Identification) -> dict[str, Any] | None:
    """Cosines for the page, with a shade from 0 (lowest of all off the diagonal) to 1 (highest).

    Returns:
        ``low``, ``high`` and ``tables``: status, client and rows of (class, cells of (text, shade or None)).
    """
    matrices = similarities(run, found)
    if not matrices:
        return None
    off = ~np.eye(len(run.classes), dtype=bool)
    values = np.concatenate([m[off] for _, _, m in matrices])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    span = high - low or 1.0
    tables = []
    for status, client, matrix in matrices:
        rows = []
        for i, (name, row) in enumerate(zip(run.classes, matrix)):
            cells = [
                (number(v, 2), float((v - low) / span) if i != j and math.isfinite(v) else None)
                for j, v in enumerate(row)
            ]
            rows.append((name, cells))
        tables.append((status, client, rows))
    return {"low": number(low, 2), "high": number(high, 2), "tables": tables}


def relabelling_table(found: list[Checkpoint]) -> dict[str, Any] | None:
    """``header``, ``pooled`` (checkpoint by checkpoint) and ``clients`` (at the last one), cells in percent."""
    if not found:
        return None
    last = found[-1]
    known = {k for c in found for part in (c.pooled, *c.clients.values()) for k in part}
    keys = [k for k in RELABELLING if k in known]

    def cells(values: Mapping[str, float]) -> list[str]:
        return [percent(values.get(k, math.nan)) for k in keys]

    return {
        "header": [(RELABELLING[k], MEANINGS[k]) for k in keys],
        "pooled": [(c.round, c.edited, cells(c.pooled)) for c in found],
        "clients": [(n, cells(v)) for n, v in sorted(last.clients.items())],
        "round": last.round,
    }


def _cell(client: Judged, name: str, digits: int) -> str:
    error = client.values.get(f"{name}{ERROR}", math.nan)
    spread = f" ± {number(error, digits)}" if math.isfinite(error) else ""
    return number(client.values.get(name, math.nan), digits) + spread


def number(value: float, digits: int = 3) -> str:
    """A number of a table."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"


def percent(value: float) -> str:
    """A share in percent, without the sign."""
    return f"{100 * value:.1f}" if math.isfinite(value) else "–"
