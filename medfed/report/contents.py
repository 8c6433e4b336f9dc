"""What a run directory holds beside its records: the condition, what was left out, the last predictions.

Each reader returns None where its file is not there and names a file that cannot be read in ``run.problems``.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import yaml

from medfed.report.runs import Run
from medfed.tracking.describe import without_paths

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")


@dataclass(frozen=True)
class LeftOut:
    """What was left out of the data or corrected on the way.

    Args:
        reasons: number of files by reason, the most frequent first; None when not recorded.
        corrections: times each correction was applied; None when not recorded.
        notes: remarks on the data as a whole.
    """

    reasons: dict[str, int] | None
    corrections: dict[str, int] | None
    notes: list[str]


@dataclass(frozen=True)
class ClientTable:
    """Samples per client and class.

    Args:
        clients: names ``[K]``, sorted.
        counts: int64 ``[K, C]`` by observed label (positives per label where multilabel).
        samples: int64 ``[K]``.
    """

    clients: list[str]
    counts: np.ndarray
    samples: np.ndarray


@dataclass(frozen=True)
class Predictions:
    """The recorded predictions of a round on one test set.

    Args:
        round: the round.
        labels: int64 class indices ``[N]``, or zeros and ones ``[N, C]`` where multilabel.
        probabilities: float64 ``[N, C]``, all finite.
        unusable: samples that are left out because a score was not finite.
        patients: numbers ``[N]``, equal for samples of one patient; None where patients are not recorded.
    """

    round: int
    labels: np.ndarray
    probabilities: np.ndarray
    unusable: int = 0
    patients: np.ndarray | None = None


def left_out(run: Run) -> LeftOut:
    """Files left out by reason, and corrections.  Paths stay out of it: a report may leave the house."""
    reasons = _read(run, "findings/unusable.csv", _reasons)
    corrections = _read(run, "findings/corrections.json", _json_object)
    notes = _read(run, "findings/notes.txt", lambda p: p.read_text(encoding="utf-8").splitlines())
    return LeftOut(reasons, corrections, notes or [])


def experiment(run: Run) -> dict[str, Any] | None:
    """The resolved experiment; None where it is not there."""

    def read(path: Path) -> dict[str, Any]:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not a mapping")
        return content

    return _read(run, "experiment.yaml", read)


def configuration(run: Run) -> str | None:
    """The resolved experiment without this machine's paths: a report may leave the house."""

    def shown(path: Path) -> str:
        config = without_paths(yaml.safe_load(path.read_text(encoding="utf-8")))
        return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)

    return _read(run, "experiment.yaml", shown)


def condition_facts(run: Run) -> dict[str, str] | None:
    """What the condition was made from, by dotted name (``partition.alpha``), without what is empty."""
    condition = _read(run, "condition/condition.json", _json_object)
    if condition is None:
        return None
    facts = condition.get("summary") or condition.get("spec") or {}
    return {k: v for k, v in flat(facts).items() if v not in ("", "None")}


def plain(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted names and values as they are; a list counts as one value."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {k: v for name, inner in value.items() for k, v in plain(inner, f"{prefix}.{name}".lstrip(".")).items()}


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings as one, with dotted names and values as text."""
    if not isinstance(value, Mapping):
        return {prefix: ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)}
    found: dict[str, str] = {}
    for key, item in value.items():
        found.update(flat(item, f"{prefix}.{key}" if prefix else str(key)))
    return found


def corrupted_clients(run: Run) -> frozenset[str] | None:
    """The clients whose images or labels a simulation corrupted; None where no truth is recorded."""
    truth = _read(run, "condition/truth.parquet", _table)
    if truth is None or "corrupted" not in truth:
        return None
    if "client" not in truth:
        clients = _read(run, "condition/clients.parquet", _table)
        if clients is None or "sample" not in truth:
            return None
        truth = clients.merge(truth, on="sample")
    return frozenset(truth.loc[truth["corrupted"].astype(bool), "client"].astype(str))


def client_table(run: Run) -> ClientTable | None:
    """Samples per client and class, as the clients see them (observed labels)."""
    table = _read(run, "condition/clients.parquet", _table)
    if table is None or not {"client", "observed"} <= set(table) or not run.classes:
        return None
    names = sorted({*table["client"].astype(str), *map(str, run.meta.get("clients") or [])})
    row = {n: i for i, n in enumerate(names)}
    counts = np.zeros((len(names), len(run.classes)), np.int64)
    rows = np.asarray([row[c] for c in table["client"].astype(str)], np.int64)
    if run.multilabel:
        np.add.at(counts, rows, np.stack([np.asarray(o, np.int64) for o in table["observed"]]))
    else:
        np.add.at(counts, (rows, table["observed"].to_numpy(np.int64)), 1)
    return ClientTable(names, counts, np.bincount(rows, minlength=len(names)))


def prediction_files(run: Run) -> dict[int, Path]:
    """The files of predictions that are kept, by round, ascending."""
    found = {int(m[1]): p for p in run.path.glob("predictions/*.parquet") if (m := _ROUND.match(p.name))}
    return dict(sorted(found.items()))


def last_predictions(run: Run) -> dict[str, Predictions] | None:
    """The newest predictions by test set (``clean``, ``corrupted``)."""
    found = prediction_files(run)
    return read_predictions(run, max(found)) if found else None


def read_predictions(run: Run, round_: int) -> dict[str, Predictions] | None:
    """The predictions of a round by test set; None where they are not kept or cannot be read."""
    path = prediction_files(run).get(round_)
    if path is None or not run.classes:
        return None
    table = _read(run, str(path.relative_to(run.path)), _table)
    if table is None:
        return None
    scores = [f"p_{c}" for c in run.classes]
    truth = [f"label_{c}" for c in run.classes] if run.multilabel else ["label"]
    absent = [c for c in ["set", *truth, *scores] if c not in table]
    if absent:
        run.problems.append(f"predictions of round {round_} lack the columns {', '.join(absent)}")
        return None
    result = {}
    for name, part in table.groupby("set", sort=True):
        p, labels = part[scores].to_numpy(np.float64), part[truth].to_numpy(np.int64)
        usable = np.isfinite(p).all(axis=1)
        labels = labels[usable] if run.multilabel else labels[usable, 0]
        patients = part["patient"].to_numpy(np.int64)[usable] if "patient" in part else None
        result[str(name)] = Predictions(round_, labels, p[usable], int((~usable).sum()), patients)
    return result


_ROUND = re.compile(r"round-(\d+)\.parquet$")


def _read(run: Run, name: str, reader: Callable[[Path], T]) -> T | None:
    path = run.path / name
    if not path.is_file():
        return None
    try:
        return reader(path)
    except (OSError, ValueError) as error:  # ArrowInvalid, JSON and Unicode errors are ValueErrors
        problem = f"{name} cannot be read ({type(error).__name__})"
        if problem not in run.problems:
            run.problems.append(problem)
        return None


def _table(path: Path) -> pd.DataFrame:
    import pandas as pd

    return pd.read_parquet(path)


def _json_object(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _reasons(path: Path) -> dict[str, int]:
    with path.open(newline="", encoding="utf-8") as file:
        return dict(Counter(row.get("reason") or "no reason given" for row in csv.DictReader(file)).most_common())
