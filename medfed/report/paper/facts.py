"""What the conditions and methods of a grid are, as the papers' tables tell them apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from medfed.report.grid_cells import GridCells
from medfed.report.metrics import choose

NOISE = "condition.label_noise"
PARTITION = "condition.partition"
ABLATIONS = {
    "method.daagg": "DaAgg",
    "method.logit_adjustment": "LA",
    "method.distillation": "KD",
    "method.relabel": "relabelling",
}
"""Parts of OCT-FedSIR, and of methods like it, that can be switched off, and what its Table 4 calls them."""


@dataclass(frozen=True)
class Setting:
    """One condition of a grid.

    Args:
        label: its label in the grid.
        cohort: name of its data set.
        kind: kind of label noise; empty where all labels are true.
        rate: of the label noise; None where all labels are true.
        alpha: concentration of the partition; None where it does not apply.
        corrupted: clients with corrupted images.
        clients: all clients; 0 where that is not recorded.
        reference: its label noise is not applied and no image is corrupted: what methods could reach at best.
        rest: everything else that tells conditions apart.
    """

    label: str
    cohort: str
    kind: str
    rate: float | None
    alpha: float | None
    corrupted: int
    clients: int
    reference: bool
    rest: str

    @property
    def ratio(self) -> float:
        """Share of the clients whose images are corrupted."""
        return self.corrupted / self.clients if self.clients else 0.0


def settings(cells: GridCells) -> dict[str, Setting]:
    """The conditions of a grid by label."""
    cohorts = _cohorts(cells)
    return {label: _setting(label, facts, cohorts[label]) for label, facts in cells.conditions.items()}


def _setting(label: str, facts: Mapping[str, Any], cohort: str) -> Setting:
    noisy = facts.get(f"{NOISE}.kind") is not None and facts.get(f"{NOISE}.apply") is not False
    named = facts.get(f"{PARTITION}.corrupted_clients")
    corrupted = len(named) if isinstance(named, (list, tuple)) else int(facts.get(f"{PARTITION}.corrupted") or 0)
    if facts.get("condition.corruption.kind") is None:
        corrupted = 0
    alpha = facts.get(f"{PARTITION}.alpha") if facts.get(f"{PARTITION}.kind") != "given" else None
    rest = {k: v for k, v in facts.items() if not k.startswith((NOISE, "cohort."))}
    rest = {k: v for k, v in rest.items() if k not in (f"{PARTITION}.alpha", f"{PARTITION}.corrupted")}
    return Setting(
        label,
        cohort,
        str(facts[f"{NOISE}.kind"]) if noisy else "",
        float(facts.get(f"{NOISE}.rate") or 0.0) if noisy else None,
        None if alpha is None else float(alpha),
        corrupted,
        int(facts.get(f"{PARTITION}.clients") or 0),
        facts.get(f"{NOISE}.kind") is not None and not noisy and not corrupted,
        json.dumps(rest, sort_keys=True, default=str),
    )


def _cohorts(cells: GridCells) -> dict[str, str]:
    """Name of the data set of each condition: its reader, with the name of its folder where several have it."""
    parts = {label: {k: v for k, v in f.items() if k.startswith("cohort.")} for label, f in cells.conditions.items()}
    readers = {label: str(p.get("cohort.reader") or "images") for label, p in parts.items()}
    roots = {label: PurePath(str(p.get("cohort.root") or "")).name for label, p in parts.items()}
    several = {r for r in readers.values() if len({roots[c] for c in parts if readers[c] == r}) > 1}
    return {c: f"{readers[c]} {roots[c]}".strip() if readers[c] in several else readers[c] for c in parts}


def chosen_metrics(cells: GridCells) -> list[str]:
    """The metrics of tests and intervals: those of the grid, else those of the paper that the grid is like.

    These are accuracy and macro-F1 where labels are wrong anywhere, balanced accuracy and an AUC elsewhere.
    """
    recorded = {m for run in cells.finished.values() for m in run.metrics()}
    if wanted := [m for m in cells.metrics or [] if m in recorded]:
        return wanted
    noisy = any(s.kind for s in settings(cells).values())
    default: list[str] = [m for m in ("accuracy", "f1_macro") if m in recorded] if noisy else []
    return default or choose(recorded, ("balanced accuracy", "AUC"))


def name_of(cells: GridCells, method: str) -> str:
    """The name of the method behind a label."""
    return str(cells.methods[method].get("method.name", method))


def salted(settings: Mapping[str, Any]) -> bool:
    """Whether clients train with SALT, sharpness-aware local training."""
    return any(k.startswith("method.salt") and v not in (None, False) for k, v in settings.items())


def matches_sharpness(settings: Mapping[str, Any]) -> bool:
    """Whether it is a method of FedISM's kind: with SAGA to switch on and off, and an exponent."""
    return "method.saga" in settings and "method.q" in settings


def without(settings: Mapping[str, Any], *keys: str) -> str:
    """What a method is but for some settings, as text to compare by."""
    kept = {k: v for k, v in settings.items() if not any(k == key or k.startswith(f"{key}.") for key in keys)}
    return json.dumps(kept, sort_keys=True, default=str)


def switched_off(cells: GridCells, label: str) -> list[str]:
    """The parts of OCT-FedSIR that a method lacks and the same method has under another label of the grid."""
    own = cells.methods[label]
    kin = [cells.methods[m] for m in cells.methods if name_of(cells, m) == name_of(cells, label)]
    return [
        name
        for key, name in ABLATIONS.items()
        if own.get(key) is False and any(other.get(key) is True for other in kin)
    ]


def percent(value: float) -> str:
    """A share for people: ``40%``."""
    return f"{100 * value:g}%"
