"""How reliable the labels of clients were found to be: what a run recorded, as plain values.

Methods that identify noisy clients record, in the rounds of an identification, a verdict and its grounds for each
client, and in the rounds of a relabelling how many training targets changed; evaluation adds, in a simulation, how
right that was.  Everything here reads the run directory; :mod:`medfed.report.reliability_page` makes tables of it and
:mod:`medfed.report.reliability_figures` drawings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from medfed.report.contents import client_table
from medfed.report.runs import Run, quantity

STATUS = ("clean", "noisy", "undetermined")
DESCRIPTORS = {
    "descriptor_mean": "mean cosine",
    "descriptor_energy": "mean squared cosine",
    "descriptor_max": "largest cosine",
}
"""What describes the similarity of a client's classes, and what it is called."""
QUALITY = {
    "accuracy": "accuracy",
    "clean_precision": "clean precision",
    "clean_recall": "clean recall",
    "clean_f1": "clean F1",
    "noisy_recall": "noisy recall",
    "noisy_f1": "noisy F1",
}
RELABELLING = {
    "edit_rate": "edit rate",
    "recovery": "recovery",
    "correction_precision": "correction precision",
    "false_correction_rate": "false-correction rate",
    "residual_noise": "residual noise",
    "noise_rate": "observed noise",
}
"""The shares that evaluation records of a relabelling, in the order of the tables."""
MEANINGS = {
    "edit_rate": "targets that differ from the observed label",
    "recovery": "wrong labels that were set right; higher is better",
    "correction_precision": "edits that are right; higher is better",
    "false_correction_rate": "right labels that were made wrong; lower is better",
    "residual_noise": "targets that are wrong; lower is better",
    "noise_rate": "observed labels that are wrong",
}
ERROR = "_error"
"""Evidence of this ending is the standard error of the evidence without it."""
_TRAINING = {"samples", "loss", "weight", "distance", "steps", "skipped", "sharpness", "edited", "proposed", "seconds"}
_GROUNDS = {"p_clean", "observed_classes", *DESCRIPTORS}


@dataclass(frozen=True)
class Judged:
    """One client as it was judged.

    Args:
        status: the newest verdict, one of :data:`STATUS`.
        history: round and verdict wherever the verdict changed; the first one is the first verdict.
        values: ``p_clean``, descriptors, ``observed_classes`` and further evidence; NaN where not defined.
    """

    status: str
    history: tuple[tuple[int, str], ...]
    values: Mapping[str, float]

    @property
    def p_clean(self) -> float:
        """Probability of being clean; NaN where the identification gave none."""
        return self.values.get("p_clean", math.nan)


@dataclass(frozen=True)
class Identification:
    """The verdicts of a run.

    Args:
        rounds: the rounds in which clients were judged.
        kind: which identification it was; empty where that is not recorded.
        clients: by name, sorted.
        evidence: names of the values beside probability, descriptors and number of classes.
        noisy: clients whose labels a simulation corrupted; None where the truth is not known.
        quality: what evaluation measured at the newest identification; empty where there is no truth.
    """

    rounds: tuple[int, ...]
    kind: str
    clients: Mapping[str, Judged]
    evidence: tuple[str, ...]
    noisy: frozenset[str] | None
    quality: Mapping[str, float]

    def of(self, status: str) -> list[str]:
        """Names with this verdict."""
        return [n for n, c in self.clients.items() if c.status == status]

    @property
    def errors(self) -> set[str]:
        """Evidence that is the standard error of other evidence."""
        return {e for n in self.evidence if (e := f"{n}{ERROR}") in self.evidence}

    def defined(self, name: str) -> bool:
        """Whether a value is defined for any client."""
        return any(math.isfinite(c.values.get(name, math.nan)) for c in self.clients.values())

    def counts(self, name: str) -> bool:
        """Whether a value is a count: no probability, no descriptor, and whole at every client."""
        values = [c.values.get(name, math.nan) for c in self.clients.values()]
        return name not in ("p_clean", *DESCRIPTORS) and all(v.is_integer() for v in values if math.isfinite(v))

    def wrong(self, name: str) -> bool:
        """Judged, and otherwise than the truth has it."""
        return self.noisy is not None and self.clients[name].status == ("clean" if name in self.noisy else "noisy")

    def confusion(self) -> dict[str, list[int]] | None:
        """Clients by truth (``clean``, ``noisy``) and verdict (:data:`STATUS`); None without truth."""
        if self.noisy is None:
            return None
        rows = {"clean": [0, 0, 0], "noisy": [0, 0, 0]}
        for name, client in self.clients.items():
            rows["noisy" if name in self.noisy else "clean"][STATUS.index(client.status)] += 1
        return rows


@dataclass(frozen=True)
class Checkpoint:
    """One relabelling.

    Args:
        round: its round.
        edited: targets that differ from the observed labels, pooled over clients.
        pooled: ``edit_rate`` and, in a simulation, the other keys of :data:`RELABELLING`; NaN where not defined.
        clients: the same by client.
    """

    round: int
    edited: int
    pooled: Mapping[str, float]
    clients: Mapping[str, Mapping[str, float]]


def noisy_clients(run: Run) -> frozenset[str] | None:
    """The clients that hold wrong labels, as evaluation recorded it of a simulation; None where nobody knows."""
    known = [
        clients for r in run.records if isinstance(clients := _measured(r, "identification").get("clients"), Mapping)
    ]
    if not known:
        return None
    return frozenset(str(c) for c, v in known[-1].items() if isinstance(v, Mapping) and v.get("noisy") is True)


def _measured(record: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    part = (record.get("evaluation") or {}).get(what)
    return part if isinstance(part, Mapping) else {}


def identification(run: Run) -> Identification | None:
    """The verdicts of a run, the newest of each client; None where no client was judged."""
    judged = [r for r in run.records if any(_status(c) for c in _clients(r).values())]
    if not judged:
        return None
    history: dict[str, list[tuple[int, str]]] = {}
    values: dict[str, dict[str, float]] = {}
    names = _evidence(run, judged)
    for record in judged:
        for client, columns in _clients(record).items():
            status = _status(columns)
            if status is None:
                continue
            seen = history.setdefault(client, [])
            if not seen or seen[-1][1] != status:
                seen.append((record["round"], status))
            found = {n: quantity(record, f"client/{client}/{n}") for n in (*_GROUNDS, *names)}
            values.setdefault(client, {}).update({n: v for n, v in found.items() if v is not None})
    clients = {c: Judged(history[c][-1][1], tuple(history[c]), values[c]) for c in sorted(history)}
    measured = [r for r in run.records if _measured(r, "identification")]
    quality = {k: v for k in QUALITY if measured and (v := quantity(measured[-1], f"identification/{k}")) is not None}
    kind = (run.meta.get("method_settings") or {}).get("identification")
    rounds = tuple(r["round"] for r in judged)
    return Identification(rounds, kind if isinstance(kind, str) else "", clients, names, noisy_clients(run), quality)


def _clients(record: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {str(c): v for c, v in (record.get("clients") or {}).items() if isinstance(v, Mapping)}


def _status(columns: Mapping[str, Any]) -> str | None:
    return columns["status"] if columns.get("status") in STATUS else None


def _evidence(run: Run, judged: list[dict[str, Any]]) -> tuple[str, ...]:
    """Numbers of clients that stand beside a verdict and nowhere else, in the order recorded."""
    rounds = {r["round"] for r in judged}
    elsewhere = {n for r in run.records if r["round"] not in rounds for c in _clients(r).values() for n in c}
    names: dict[str, None] = {}
    for record in judged:
        for client, columns in _clients(record).items():
            beside = (n for n in columns if quantity(record, f"client/{client}/{n}") is not None)
            names.update(dict.fromkeys(n for n in beside if n not in _TRAINING | _GROUNDS | elsewhere))
    return tuple(names)


def checkpoints(run: Run) -> list[Checkpoint]:
    """The relabellings of a run, in order.

    Without truth, what remains is how many targets were edited: of each client's samples.
    """
    sizes = {}
    if (table := client_table(run)) is not None:
        sizes = dict(zip(table.clients, map(int, table.samples)))
    found = []
    for record in run.records:
        measured = _measured(record, "relabelling")  # recorded in every round from the first relabelling on
        columns = {c: v for c, v in _clients(record).items() if quantity(record, f"client/{c}/edited") is not None}
        if not columns and (record.get("server") or {}).get("relabelled") is not True:
            continue
        edits = {c: int(v["edited"] or 0) for c, v in columns.items()}
        total = sum(edits.values())
        if measured:
            by_client = {str(c): _shares(v) for c, v in (measured.get("clients") or {}).items()}
            pooled = _shares(measured)
            total = int(measured["edited"]) if isinstance(measured.get("edited"), (int, float)) else total
        else:
            of = {c: sizes.get(c) or int(columns[c].get("samples") or 0) for c in columns}
            by_client = {c: {"edit_rate": edits[c] / of[c]} for c in columns if of[c]}
            pooled = {"edit_rate": total / sum(of.values())} if sum(of.values()) else {}
        found.append(Checkpoint(record["round"], total, pooled, by_client))
    return found


def _shares(values: Any) -> dict[str, float]:
    values = values if isinstance(values, Mapping) else {}
    return {k: math.nan if values[k] is None else float(values[k]) for k in RELABELLING if k in values}


def marks(run: Run) -> dict[str, list[int]]:
    """Rounds of what happens beside the training: identification and relabelling."""
    judged = identification(run)
    found = {
        "identification": list(judged.rounds) if judged else [],
        "relabelling": [c.round for c in checkpoints(run)],
    }
    return {k: v for k, v in found.items() if v and len(v) < len(run.records)}


def similarities(run: Run, found: Identification) -> list[tuple[str, str, np.ndarray]]:
    """Class similarity of the clean and of the noisy client whose verdicts are the most certain.

    They are read from the clients' own memories, which a simulation keeps in the run directory; nobody sent them.

    Returns:
        Status, client and cosines ``[C, C]`` (NaN for absent classes); of each status at most one client.
    """
    folder = run.path / "clients"
    if not folder.is_dir():
        return []
    chosen = []
    for status, sign in (("clean", -1.0), ("noisy", 1.0)):
        certain = sorted(found.of(status), key=lambda c: _or_half(sign * found.clients[c].p_clean, sign))
        for client in certain:
            matrix = _similarity(run, client)
            if matrix is not None:
                chosen.append((status, client, matrix))
                break
    return chosen


def _or_half(value: float, sign: float) -> float:
    return value if math.isfinite(value) else 0.5 * sign


def _similarity(run: Run, client: str) -> np.ndarray | None:
    from safetensors import SafetensorError

    from medfed.federation.memory import client_folder, newest_memory

    folder = run.path / "clients" / client_folder(client)
    try:
        matrix = newest_memory(folder, names=("similarity",)).get("similarity")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        run.problems.append(f"the memory of {client} cannot be read ({type(error).__name__})")
        return None
    if matrix is None:
        return None
    matrix = np.asarray(matrix, np.float64)
    size = len(run.classes)
    known = matrix.shape == (size, size) and np.isfinite(matrix[~np.eye(size, dtype=bool)]).any()
    return matrix if known else None
