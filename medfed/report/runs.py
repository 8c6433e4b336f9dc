"""A run directory, read back: what was recorded, as series over rounds and as final numbers.

Reading is tolerant of a run that is still going on or was killed: a torn line, and one of another form than a round
record's, is left out and named in :attr:`Run.problems`; of a round written twice (before and after a resume) the later
line counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from medfed.errors import MedfedError
from medfed.report.metrics import metric

LAST = 5
"""Rounds that a final number is averaged over, as in the tables of FedISM (last five rounds)."""

COUNTS = frozenset({"samples", "non_finite"})
"""What stands among the metrics of an evaluation without being one."""

Record = Mapping[str, Any]
_ABSENT = object()


@dataclass(frozen=True)
class Final:
    """A mean over the last rounds.

    Args:
        value: the mean over the defined rounds, or None when none is.
        defined: in how many of the rounds it was defined.
        rounds: the rounds looked at: the last in which the quantity was recorded at all.
    """

    value: float | None
    defined: int
    rounds: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Defined in every round looked at, and in at least one."""
        return 0 < self.defined == len(self.rounds)


@dataclass
class Run:
    """One run directory.

    Args:
        path: the directory.
        meta: the content of ``run.json``.
        records: the round records, one a round, in ascending order.
        problems: what could not be read, for people.
    """

    path: Path
    meta: dict[str, Any]
    records: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The run's name (its directory's name where none was recorded)."""
        return str(self.meta.get("name") or self.path.name)

    @property
    def folder(self) -> str:
        """The name of the run's directory, which tells runs of one experiment apart."""
        return self.path.resolve().name

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.meta.get("method") or "unknown method")

    @property
    def seed(self) -> int | None:
        """The seed, or None where none was recorded."""
        return self.meta.get("seed")

    @property
    def status(self) -> str:
        """The recorded status: ``new``, ``running``, ``completed``, ``interrupted`` or ``failed``."""
        return str(self.meta.get("status") or "unknown")

    @property
    def finished(self) -> bool:
        """The run came to its end and all planned rounds are recorded."""
        return self.status in ("completed", "finished") and len(self.records) >= (self.planned or 1)

    @property
    def classes(self) -> list[str]:
        """Class names in the order of the network's outputs."""
        return [str(c) for c in self.meta.get("classes") or []]

    @property
    def multilabel(self) -> bool:
        """Several classes may hold at once."""
        return self.meta.get("task") == "multilabel"

    @property
    def planned(self) -> int | None:
        """How many rounds were planned."""
        planned = self.meta.get("rounds")
        return int(planned) if isinstance(planned, (int, float)) else None

    @property
    def rounds(self) -> list[int]:
        """The recorded rounds."""
        return [r["round"] for r in self.records]

    @property
    def clients(self) -> list[str]:
        """Every client that was planned or occurs in a record, sorted."""
        names = {str(c) for c in self.meta.get("clients") or []}
        for record in self.records:
            names.update(record.get("asked") or [], record.get("clients") or {})
            names.update(_dict(record, "evaluation", "clients"))
        return sorted(names)

    def metrics(self) -> list[str]:
        """Names of the metrics of the clean and the corrupted test set that are not of a single class."""
        names: dict[str, None] = {}
        for record in self.records:
            for group in ("clean", "corrupted"):
                scalars = _dict(record, "evaluation", group).items()
                names.update((k, None) for k, v in scalars if _is_metric(k, v))
        return list(names)

    def values(self, key: str) -> list[tuple[int, float]]:
        """Round and value of every round in which ``key`` was recorded; NaN where it is not defined."""
        found = ((r["round"], quantity(r, key)) for r in self.records)
        return [(round_, value) for round_, value in found if value is not None]

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """One quantity over all recorded rounds.

        Args:
            key: see :func:`quantity`, e.g. ``"clean/balanced_accuracy"``.

        Returns:
            Rounds ``[R]`` (int64) and values ``[R]`` (float64), NaN where not recorded or not defined.
        """
        values = [math.nan if (v := quantity(r, key)) is None else v for r in self.records]
        return np.asarray(self.rounds, dtype=np.int64), np.asarray(values, dtype=np.float64)

    def window(self, key: str, last: int = LAST) -> list[float]:
        """The defined values among the last rounds in which ``key`` was recorded."""
        return [v for _, v in self.values(key)[-last:] if math.isfinite(v)]

    def final(self, key: str, last: int = LAST) -> Final:
        """The mean over the last rounds in which ``key`` was recorded, of those in which it is defined.

        Args:
            key: see :func:`quantity`.
            last: rounds to look at, counted from the newest.  Rounds without evaluation do not count.

        Raises:
            ValueError: if ``last`` is less than 1.
        """
        if last < 1:
            raise ValueError(f"last is at least 1 round, not {last}")
        seen = self.values(key)[-last:]
        defined = [v for _, v in seen if math.isfinite(v)]
        value = math.fsum(defined) / len(defined) if defined else None
        return Final(value, len(defined), tuple(r for r, _ in seen))


def quantity(record: Record, key: str) -> float | None:
    """One number of a round record.

    Args:
        record: a round record.
        key: ``clean/<metric>``, ``corrupted/<metric>``; derived within the round: ``average/<metric>`` (of
            clean and corrupted), ``gap/<metric>`` (clean minus corrupted), ``worst/<metric>`` (over the clients for
            which it is defined); ``client/<name>/<value>`` (what a client reported),
            ``client_evaluation/<name>/<metric>``; ``seconds/<part>``, ``bytes/<direction>``,
            ``server/<scalar>``.

    Returns:
        The number; NaN where it was recorded as not defined; None where it was not recorded.
    """
    group, _, name = key.partition("/")
    if group in ("average", "gap"):
        clean, corrupted = quantity(record, f"clean/{name}"), quantity(record, f"corrupted/{name}")
        if clean is None or corrupted is None:
            return None
        return (clean + corrupted) / 2 if group == "average" else clean - corrupted
    if group == "worst":
        clients = _dict(record, "evaluation", "clients").values()
        values = [_number(c.get(name, _ABSENT)) for c in clients if isinstance(c, Mapping)]
        recorded = [v for v in values if v is not None]
        defined = [v for v in recorded if math.isfinite(v)]
        if not defined:
            return math.nan if recorded else None
        return min(defined) if metric(name).higher else max(defined)
    path: tuple[str, ...]
    if group in ("client", "client_evaluation"):
        client, _, name = name.rpartition("/")
        path = ("clients", client) if group == "client" else ("evaluation", "clients", client)
    else:
        path = (group,) if group in ("seconds", "bytes", "server") else ("evaluation", group)
    return _number(_dict(record, *path).get(name, _ABSENT))


def load_run(path: str | Path) -> Run:
    """Reads a run directory.

    Args:
        path: the directory that holds ``run.json`` and ``records.jsonl``.

    Returns:
        The run; without any record when it was only just started.

    Raises:
        MedfedError: if it is not a run directory; the message names what is missing.
    """
    from medfed.report.record_form import RunFacts, fault

    path = Path(path)
    if not path.is_dir():
        fix = "Give the run's directory." if path.is_file() else "Check the spelling."
        raise MedfedError("there is no run directory here.", where=str(path), fix=fix)
    missing = [n for n in ("run.json", "records.jsonl") if not (path / n).is_file()]
    if "run.json" in missing:
        inside = sorted(p.parent.name for p in path.glob("*/run.json"))
        fix = f"Runs inside it: {', '.join(inside)}." if inside else "Give the directory that a run left."
        raise MedfedError(f"not a run directory: {' and '.join(missing)} missing.", where=str(path), fix=fix)
    try:
        meta = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise MedfedError(f"run.json cannot be read: {error}.", where=str(path)) from None
    if not isinstance(meta, dict):
        raise MedfedError("run.json does not hold an object.", where=str(path))
    if wrong := fault(RunFacts, meta):
        fix = "Restore the file: no run writes it like that."
        raise MedfedError(f"run.json is not that of a run: {wrong}.", where=str(path), fix=fix)
    problems = ["records.jsonl is missing: no round was recorded yet"] if missing else []
    lines = [] if missing else (path / "records.jsonl").read_bytes().split(b"\n")
    return Run(path, meta, parse_records(lines, problems), problems)


def load_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Reads several run directories; see :func:`load_run`."""
    return [load_run(p) for p in paths]


def parse_records(lines: Iterable[bytes], problems: list[str]) -> list[dict[str, Any]]:
    """Round records from lines of JSON, in ascending order of rounds, the later of two lines for one round.

    Args:
        lines: lines of ``records.jsonl``.
        problems: gets one line for each that cannot be read.
    """
    from medfed.report.record_form import RoundRecord, fault

    records: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # also covers bytes that are not UTF-8
            problems.append(f"records.jsonl line {number} is torn and was left out")
            continue
        if wrong := fault(RoundRecord, record):
            problems.append(f"records.jsonl line {number} is not a round record ({wrong}) and was left out")
        else:
            records[record["round"]] = record
    return [records[r] for r in sorted(records)]


def _dict(record: Record, *path: str) -> Mapping[str, Any]:
    """The mapping at a path of a record; empty where there is none."""
    value: Any = record
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _is_metric(key: str, value: Any) -> bool:
    return "/" not in key and key not in COUNTS and (value is None or _is_number(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    """A recorded value as a number: NaN for null and non-finite, None for what is absent or no number."""
    if value is None:
        return math.nan
    if not _is_number(value):
        return None
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # a whole number of more than 308 digits
        return math.nan
