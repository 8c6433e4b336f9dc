"""The few calls to MLflow that tracking needs.  Nothing here guards against a dead server; the callers do."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from medfed.errors import ConfigError
from medfed.tracking.cursor import FEDERATION
from medfed.tracking.settings import sqlite_path

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

MARKER = "round"
UID, CLIENT, PARENT = "medfed.uid", "medfed.client", "mlflow.parentRunId"
DEFAULTS = {
    # 7 retries, the default of MLflow, hang four minutes on a port that refuses
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


@dataclass
class RunHandle:
    """One MLflow run.

    Args:
        id: its run id.
        status: ``RUNNING``, ``FINISHED``, ...
        marker: the last round whose metrics are all there, 0 for none.
        keys: names of the metrics that it has.
        created: by this process: nothing can be there that we did not log.
    """

    id: str
    status: str = "RUNNING"
    marker: int = 0
    keys: frozenset[str] = frozenset()
    created: bool = False


@dataclass
class Store:
    """One experiment in an MLflow store.

    Args:
        uri: the store.
        experiment: name of the experiment, made where it is not there.
        artifacts: folder for artifacts of a local store (a server decides itself).

    Raises:
        ConfigError: the experiment was deleted in MLflow.
    """

    uri: str
    experiment: str
    artifacts: Path
    client: MlflowClient = field(init=False, repr=False)
    experiment_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.client = _client(self.uri)
        location = None if self.uri.startswith("http") else self.artifacts.absolute().as_uri()
        self.experiment_id = ensure_experiment(self.client, self.experiment, location)

    def find(self, uid: str) -> dict[str, RunHandle]:
        """The runs of a federation by client (its own run under ``""``), found by the tags we gave them.

        Of several for one client (a creation whose answer was lost) the one that got furthest counts; those that hold
        nothing are deleted.
        """
        found: dict[str, list[Any]] = {}
        token = None
        while True:
            query = f"tags.`{UID}` = '{uid}'"
            page = self.client.search_runs([self.experiment_id], query, max_results=1000, page_token=token)
            for run in page:
                found.setdefault(run.data.tags.get(CLIENT, FEDERATION), []).append(run)
            token = page.token
            if not token:
                break
        handles = {}
        for key, runs in found.items():
            runs.sort(key=lambda r: (-_marker(r), -len(r.data.metrics), r.info.start_time, r.info.run_id))
            for ghost in runs[1:]:
                if not ghost.data.metrics:
                    self.client.delete_run(ghost.info.run_id)
            best = runs[0]
            keys = frozenset(best.data.metrics)
            handles[key] = RunHandle(best.info.run_id, best.info.status, _marker(best), keys)
        return handles

    def create(self, uid: str, key: str, name: str, parent: str | None, start: int) -> RunHandle:
        """Makes the run of the federation (``key`` empty) or of a client.

        Args:
            uid: the federation's uid.
            key: the client, or ``""``.
            name: what MLflow shows.
            parent: id of the federation's run, for a client.
            start: when it began, in ms.
        """
        tags = {UID: uid}
        if parent is not None:
            tags |= {CLIENT: key, PARENT: parent}
        run = self.client.create_run(self.experiment_id, start_time=start, tags=tags, run_name=name)
        return RunHandle(run.info.run_id, created=True)

    def log(self, run: RunHandle, points: Sequence[Metric]) -> None:
        """Logs metrics in one call; they are given in ascending order of step, the marker last in each step."""
        if points:
            self.client.log_batch(run.id, metrics=points, synchronous=True)

    def missing(self, run: RunHandle, points: Iterable[Metric], doubtful: float) -> list[Metric]:
        """Those of the points that the run does not hold yet.

        Args:
            run: the run as it was found.
            points: what it should hold.
            doubtful: last step that may have been logged before.
        """
        points = [p for p in points if p.step > run.marker]
        if run.created:
            return points
        unsure = {p.key for p in points if p.step <= doubtful} & run.keys
        there = {(key, m.step) for key in unsure for m in self.client.get_metric_history(run.id, key)}
        return [p for p in points if p.step > doubtful or (p.key, p.step) not in there]

    def describe(self, run: RunHandle, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Logs parameters and tags.  A parameter cannot change in MLflow: changes go to the tag ``medfed.changed``."""
        from mlflow.entities import Param, RunTag

        known = {} if run.created else self.client.get_run(run.id).data.params
        changed = [f"{k}: {known[k]} -> {v}" for k, v in params.items() if k in known and known[k] != v]
        if changed:
            tags = {**tags, "medfed.changed": "; ".join(changed)[:5000]}
        new = [Param(k, v) for k, v in params.items() if k not in known]
        self.client.log_batch(run.id, params=new, tags=[RunTag(k, v) for k, v in tags.items()], synchronous=True)


def ensure_experiment(client: MlflowClient, name: str, location: str | None, attempts: int = 5) -> str:
    """Finds or makes an experiment, also where another process makes it at the same moment.

    Raises:
        ConfigError: it was deleted in MLflow.
    """
    from mlflow.exceptions import MlflowException

    for attempt in range(attempts):
        found = client.get_experiment_by_name(name)
        if found is not None and found.lifecycle_stage == "deleted":
            raise ConfigError(
                f"the MLflow experiment {name!r} was deleted.",
                where="tracking.experiment",
                fix="Restore it or choose another name.",
            )
        if found is not None:
            return found.experiment_id
        try:
            return client.create_experiment(name, artifact_location=location)
        except MlflowException:  # most likely made by somebody else just now: look again
            if attempt == attempts - 1:
                raise
            time.sleep(0.05 * 2**attempt)
    raise AssertionError("unreachable")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps what libraries log about making tables and about retries (with addresses) off the screen."""
    loggers = [logging.getLogger(n) for n in ("mlflow.store.db.utils", "alembic", "urllib3.connectionpool")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _client(uri: str) -> MlflowClient:
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    path = sqlite_path(uri)
    if path is None:
        return MlflowClient(tracking_uri=uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    # two processes that make the tables of one fresh file at once trip over each other
    with FileLock(path.with_name(f".{path.name}.lock"), timeout=60):
        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
    return client


def _marker(run: Any) -> int:
    return int(run.data.metrics.get(MARKER, 0))
