"""OCT-FedSIR's Figure 2 from a grid: similarity of classes, descriptors of clients, and who was judged what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from medfed.report.grid_cells import GridCells
from medfed.report.paper import oct_fedsir
from medfed.report.paper.charts import matrices
from medfed.report.paper.facts import Setting, name_of, percent, switched_off
from medfed.report.paper.figures import Chart
from medfed.report.paper.sheets import Line, Sheet, Written
from medfed.report.reliability import DESCRIPTORS, STATUS, identification, similarities
from medfed.report.reliability_figures import descriptor_space, distributions
from medfed.report.runs import Run

PAPER = "OCT-FedSIR, Figure 2"
TRUTHS = ("clean", "noisy")


def representatives(cells: GridCells) -> list[tuple[Setting, str, Run]]:
    """Of each data set and kind of noise one run that judged clients by descriptors.

    It is that of the lowest concentration, there of the highest rate, of OCT-FedSIR as a whole before other methods,
    and of the first seed.
    """
    found = []
    rank = {m: (name_of(cells, m) != "oct_fedsir", bool(switched_off(cells, m))) for m in cells.methods}
    methods = sorted(cells.methods, key=lambda m: rank[m])
    noisy = oct_fedsir.noisy_settings(cells)
    for cohort, kind in dict.fromkeys((s.cohort, s.kind) for s in noisy):
        own = [s for s in noisy if (s.cohort, s.kind) == (cohort, kind)]
        for setting in sorted(own, key=lambda s: (s.alpha or 0.0, -(s.rate or 0.0))):
            runs = [(m, cells.finished.get((setting.label, m, s))) for m in methods for s in cells.seeds]
            chosen = next(((m, r) for m, r in runs if r is not None and _described(r)), None)
            if chosen is not None:
                found.append((setting, *chosen))
                break
    return found


def _described(run: Run) -> bool:
    judged = identification(run)
    return judged is not None and all(judged.defined(d) for d in DESCRIPTORS)


def spectral(cells: GridCells) -> list[Chart] | str:
    """Figure 2, a to e: similarity matrices, distributions of the descriptors, and their space."""
    if not oct_fedsir.noisy_settings(cells):
        return oct_fedsir.PLAIN
    chosen = representatives(cells)
    if not chosen:
        return "no finished run has judged its clients by descriptors"
    charts = []
    shown: list[tuple[str, Any, Sequence[str]]] = []
    for number, (setting, method, run) in enumerate(chosen, start=1):
        judged = identification(run)
        if judged is None:
            continue
        where = f"{method} on {setting.cohort}, {setting.label}, seed {run.seed}"
        for status, client, matrix in similarities(run, judged):
            shown.append((f"{setting.kind}: {client}, judged {status}", matrix, run.classes))
        strips, space = distributions(judged), descriptor_space(judged)
        if strips is not None:
            caption = f"What describes the clients, by verdict: {where}. A mark is a client, a bar the median."
            charts.append(Chart(f"oct-fedsir-figure-2d-{number}", f"{PAPER}d", caption, strips))
        if space is not None:
            caption = f"The three descriptors against each other: {where}. Colour is the verdict, shape the truth."
            charts.append(Chart(f"oct-fedsir-figure-2e-{number}", f"{PAPER}e", caption, space))
    drawn = matrices(shown)
    if drawn is not None:
        caption = (
            "Cosines between the leading directions of the classes at the client judged clean, and at the one judged "
            "noisy, with the most certain verdict; dark is 0, light is 1, empty a class that the client lacks. Read "
            "from the clients' own memories."
        )
        charts.insert(0, Chart("oct-fedsir-figure-2a", f"{PAPER}a to c", caption, drawn))
    return charts or "no finished run has descriptors to draw"


def confusion(cells: GridCells) -> list[Sheet] | str:
    """Figure 2f: clients by truth and verdict over the rates of each kind of noise."""
    noisy = oct_fedsir.noisy_settings(cells)
    if not noisy:
        return oct_fedsir.PLAIN
    found: list[tuple[str, str, list[int], int]] = []
    for method in cells.methods:
        for kind, rate in dict.fromkeys((s.kind, s.rate or 0.0) for s in noisy):
            labels = [s.label for s in noisy if (s.kind, s.rate or 0.0) == (kind, rate)]
            runs = [r for (c, m, _), r in cells.finished.items() if m == method and c in labels]
            tables = [t for r in runs if (j := identification(r)) is not None and (t := j.confusion()) is not None]
            if tables:
                sums = [sum(t[truth][k] for t in tables) for truth in TRUTHS for k in range(len(STATUS))]
                found.append((method, f"{kind}, {percent(rate)}", sums, len(tables)))
    if not found:
        return "no finished run has judged clients whose truth is known"
    places = [(truth, status) for truth in TRUTHS for status in STATUS]
    kept = [k for k, (_, s) in enumerate(places) if s != "undetermined" or any(sums[k] for _, _, sums, _ in found)]
    lines = [
        Line(noise, tuple(Written(str(n)) for n in (*(sums[k] for k in kept), runs)), method)
        for method, noise, sums, runs in found
    ]
    return [
        Sheet(
            "oct-fedsir-figure-2f",
            f"{PAPER}f",
            "Clients by truth and newest verdict, summed over concentrations and seeds.",
            "noise",
            (*(f"judged {places[k][1]}" for k in kept), "runs"),
            (*(f"truly {places[k][0]}" for k in kept), ""),
            tuple(lines),
        )
    ]
