"""Copies what a run has on disk to MLflow: only what is missing there, in an order that survives any crash."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfed.errors import MedfedError
from medfed.tracking import describe
from medfed.tracking.cursor import FEDERATION, Cursor
from medfed.tracking.flatten import flatten_record
from medfed.tracking.records import RecordLog
from medfed.tracking.settings import without_password
from medfed.tracking.store import MARKER, PARENT, RunHandle, Store

if TYPE_CHECKING:
    from mlflow.entities import Metric

CHUNK = 50
# Predictions carry sample ids and stay in the run's folder.
RESULTS = ("experiment.yaml", "model.safetensors", "report.html", "records.jsonl")
ENDINGS = {
    "finished": "FINISHED",
    "completed": "FINISHED",
    "failed": "FAILED",
    "killed": "KILLED",
    "interrupted": "KILLED",
}


class TooSlow(MedfedError):
    """The store takes longer than training can wait for it; what was done is kept."""

    def __init__(self) -> None:
        super().__init__("it takes longer than the run can wait")


@dataclass
class Pushed:
    """What a push did."""

    rounds: list[int] = field(default_factory=list)
    metrics: int = 0
    runs: int = 0
    artifacts: list[str] = field(default_factory=list)


@dataclass
class Pusher:
    """Copies one run to one store.

    The caller holds the lock of the run.  Every method may raise whatever MLflow raises; calling again goes on.

    Args:
        run_dir: the run.
        uri: the store.
        experiment: name of the experiment there.
        clock: seconds, monotonic.
    """

    run_dir: Path
    uri: str
    experiment: str
    clock: Callable[[], float] = time.monotonic
    deadline: float = math.inf
    done: Pushed = field(default_factory=Pushed)

    def __post_init__(self) -> None:
        self.log = RecordLog(self.run_dir / "records.jsonl")
        self.cursor = Cursor(self.run_dir / "tracking.json")
        self.offset = self.end = self.begun = 0
        self.meta: dict[str, Any] = {}
        self.store: Store | None = None
        self.runs: dict[str, RunHandle] = {}
        self.doubtful = 0.0

    def load(self) -> None:
        """Reads the cursor; another process may have pushed meanwhile."""
        self.cursor = Cursor.load(self.cursor.path)
        self.cursor.point_to(without_password(self.uri))
        if self.cursor.pending and self.cursor.pending != self.begun:
            self.store = None  # a push of another process was cut off: ask what is there

    def waiting(self) -> list[dict[str, Any]]:
        """The recorded rounds that are not known to be there."""
        if self.log.path.exists() and self.log.path.stat().st_size < self.offset:
            self.offset = 0  # truncated by a resume
        records, self.end = self.log.tail(self.offset)
        return [r for r in records if r["round"] > self.cursor.round]

    def connect(self) -> None:
        """Finds the runs of this federation, or makes its own; MLflow's word counts more than the cursor's."""
        if self.store is not None:
            return
        self.meta = _read_meta(self.run_dir)
        store = Store(self.uri, self.experiment, self.run_dir.parent / "mlartifacts")
        self.runs = store.find(self.meta["uid"])
        known, cursor = dict(self.cursor.runs), self.cursor
        parent = self.runs.get(FEDERATION)
        there = parent.marker if parent else 0
        self.doubtful = float(cursor.pending)
        if any(key not in self.runs or self.runs[key].id != id_ for key, id_ in known.items()):
            there, cursor.described = 0, False  # a run was deleted: its rounds are logged anew
        if there < cursor.round or not known:
            cursor.round = min(cursor.round, there)
            self.offset, self.doubtful = 0, math.inf
        cursor.runs = {key: run.id for key, run in self.runs.items()}
        self.store = store
        if parent is None:
            cursor.described = False
            parent = self.run(FEDERATION)
            for key, run in self.runs.items():
                if key != FEDERATION:
                    store.client.set_tag(run.id, PARENT, parent.id)
        cursor.save()

    def reopen(self) -> None:
        """Marks the runs of a resumed federation as running."""
        assert self.store is not None
        if self.cursor.wanted is not None:
            return
        self.cursor.closed = None
        for run in self.runs.values():
            if run.status != "RUNNING":
                self.in_time()
                self.store.client.update_run(run.id, status="RUNNING")
                run.status = "RUNNING"

    def run(self, key: str) -> RunHandle:
        """The run of a client, or the federation's own; made where it is not there."""
        assert self.store is not None
        if key not in self.runs:
            self.in_time()
            known = self.cursor.runs.get(key)
            if known is not None:  # made by another process meanwhile
                run = RunHandle(known)
            else:
                parent = None if key == FEDERATION else self.runs[FEDERATION].id
                name = key or self.run_dir.name
                run = self.store.create(self.meta["uid"], key, name, parent, self._start())
                self.cursor.runs[key] = run.id  # written with the next save: until then its tags find it
                self.done.runs += 1
            self.runs[key] = run
        return self.runs[key]

    def describe(self) -> None:
        """Parameters, tags and the data set of the federation's run."""
        if self.cursor.described:
            return
        assert self.store is not None
        self.in_time()
        run = self.run(FEDERATION)
        config = describe.read_yaml(self.run_dir / "experiment.yaml")
        self.store.describe(run, describe.parameters(config), describe.tags(self.meta))
        found = describe.manifest(self.run_dir, [str(c) for c in self.meta.get("classes") or []])
        if found is not None:
            self.store.client.log_inputs(run.id, datasets=[describe.dataset_input(self.meta, found)])
            self.store.client.log_dict(run.id, found, "dataset.json")
        self.cursor.described = True
        self.cursor.save()

    def push(self) -> None:
        """Copies the recorded rounds that are not there yet."""
        self.connect()
        self.reopen()
        self.describe()
        waiting = self.waiting()
        for start in range(0, len(waiting), CHUNK):
            self._push_rounds(waiting[start : start + CHUNK])
        self.offset = self.end

    def close(self) -> None:
        """Uploads the artifacts of an ended run and sets its status and that of its clients."""
        cursor = self.cursor
        if cursor.wanted is None or self.store is None:
            return
        client, parent = self.store.client, self.run(FEDERATION)
        for name, file in describe.artifact_files(self.run_dir, cursor.wanted["artifacts"]):
            digest = _digest(file)
            if cursor.artifacts.get(name) == digest:
                continue
            self.in_time()
            with tempfile.TemporaryDirectory() as folder:
                sent = describe.publishable(file, Path(folder))
                client.log_artifact(parent.id, str(sent), name.rpartition("/")[0] or None)
            cursor.artifacts[name] = digest
            cursor.save()
            self.done.artifacts.append(name)
        status = cursor.wanted["status"]
        if cursor.closed != status:
            for key in sorted(self.runs, reverse=True):  # the federation's own run comes last
                self.in_time()
                client.set_terminated(self.runs[key].id, status, cursor.wanted["time"])
                self.runs[key].status = status
            cursor.closed = status
            cursor.save()

    def in_time(self) -> None:
        """Raises TooSlow once the deadline is over."""
        if self.clock() > self.deadline:
            raise TooSlow

    def _push_rounds(self, records: list[dict[str, Any]]) -> None:
        assert self.store is not None
        last = records[-1]["round"]
        self.cursor.pending = self.begun = max(self.cursor.pending, last)
        self.cursor.save()
        points = _points(records)
        try:
            for key in sorted(points, reverse=True):  # the federation's own marker, set last, vouches for all
                self.in_time()
                run = self.run(key)
                missing = self.store.missing(run, points[key], self.doubtful)
                self.store.log(run, missing)
                run.marker = max(run.marker, points[key][-1].step)
                self.done.metrics += len(missing)
        except TooSlow:
            self.cursor.save()
            raise
        except BaseException:
            self.store = None  # whether the last call arrived is not known: ask
            raise
        self.cursor.confirm(last)
        self.done.rounds += [r["round"] for r in records]

    def _start(self) -> int:
        records, _ = self.log.tail(0)
        if not records or "time" not in records[0]:
            return int(time.time() * 1000)
        seconds = (records[0].get("seconds") or {}).get("total") or 0.0
        return int((records[0]["time"] - seconds) * 1000)


def _points(records: list[Mapping[str, Any]] | list[dict[str, Any]]) -> dict[str, list[Metric]]:
    """Metrics by run, in ascending order of step, the marker last in each step.

    Timestamps are those of the record, so that the same point logged twice is the same row in an SQL store.
    """
    from mlflow.entities import Metric

    points: dict[str, list[Metric]] = {}
    for record in records:
        step, when = record["round"], int(record.get("time", 0.0) * 1000)
        server, clients = flatten_record(record)
        for key, values in {FEDERATION: server, **clients}.items():
            values = {**values, MARKER: float(step)}
            points.setdefault(key, []).extend(Metric(name, v, when, step) for name, v in values.items())
    return points


def _read_meta(run_dir: Path) -> dict[str, Any]:
    try:
        meta = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        meta = None
    if not isinstance(meta, dict) or not isinstance(meta.get("uid"), str) or "'" in meta["uid"]:
        raise MedfedError("not a run: there is no readable run.json with a uid.", where=run_dir.name)
    return meta


def _digest(file: Path) -> str:
    with open(file, "rb") as handle:
        digest = hashlib.sha256()
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
