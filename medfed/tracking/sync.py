"""``medfed sync RUN``: copies to MLflow what is recorded and not there."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout
from pydantic import ValidationError

from medfed.errors import ConfigError, MedfedError
from medfed.tracking.cursor import Cursor
from medfed.tracking.describe import read_yaml
from medfed.tracking.mlflow_sink import run_lock
from medfed.tracking.pusher import ENDINGS, RESULTS, Pusher
from medfed.tracking.settings import URI_VARIABLE, TrackingSettings, resolve_uri, sqlite_path, without_password
from medfed.tracking.store import quiet


@dataclass(frozen=True)
class SyncReport:
    """What a sync did.

    Args:
        run: name of the run.
        uri: the store, without password.
        rounds: rounds that were copied.
        metrics: points that were missing there.
        runs: MLflow runs that were made.
        artifacts: files that were uploaded.
        status: the status set in MLflow; None while the run is open.
    """

    run: str
    uri: str
    rounds: tuple[int, ...]
    metrics: int
    runs: int
    artifacts: tuple[str, ...]
    status: str | None

    def __str__(self) -> str:
        return (
            f"{self.run}: {len(self.rounds)} rounds, {self.metrics} metrics, {self.runs} new runs and "
            f"{len(self.artifacts)} artifacts copied to {self.uri}"
        )


def sync(run_dir: Path, settings: TrackingSettings | None = None) -> SyncReport:
    """Copies to MLflow what a run has recorded and MLflow lacks: runs, parameters, rounds, artifacts, status.

    Doing it again changes nothing.

    Args:
        run_dir: the run.
        settings: where to; by default what the run's experiment says, or where it went before.

    Returns:
        What was done.

    Raises:
        MedfedError: not a run, another process is copying it, or MLflow cannot be used (says why).
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise MedfedError("there is no such run.", where=str(run_dir), fix="Give the folder of a run.")
    chosen = settings or _settings_of(run_dir)
    pusher = Pusher(run_dir, _uri(run_dir, chosen), chosen.experiment)
    try:
        with contextlib.ExitStack() as stack, quiet():
            try:
                stack.enter_context(run_lock(run_dir, timeout=10))
            except Timeout:
                what = "another process is copying this run."
                raise MedfedError(what, where=run_dir.name, fix="Try again.") from None
            pusher.load()
            pusher.push()
            _settle(pusher)
            pusher.close()
    except (MedfedError, KeyboardInterrupt):
        raise
    except Exception as error:  # whatever MLflow raises
        first = (str(error).splitlines() or [""])[0][:200]
        raise MedfedError(
            f"MLflow cannot be used: {type(error).__name__}: {first}",
            where=without_password(pusher.uri),
            fix="Nothing is lost; sync again when it can be reached.",
        ) from None
    done = pusher.done
    uri = without_password(pusher.uri)
    artifacts = tuple(done.artifacts)
    return SyncReport(run_dir.name, uri, tuple(done.rounds), done.metrics, done.runs, artifacts, pusher.cursor.closed)


def _settings_of(run_dir: Path) -> TrackingSettings:
    section = read_yaml(run_dir / "experiment.yaml").get("tracking") or {}
    try:
        return TrackingSettings.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(first["msg"], where="tracking." + ".".join(map(str, first["loc"]))) from None


def _uri(run_dir: Path, settings: TrackingSettings) -> str:
    """The stated store; where none is stated, the one that the run went to before, else the default."""
    before = Cursor.load(run_dir / "tracking.json").uri
    local = sqlite_path(before)
    if local is not None and not local.exists():  # the runs were moved, or the file was deleted
        before = ""
    if before and not settings.uri and not os.environ.get(URI_VARIABLE):
        return before
    return resolve_uri(settings, run_dir.parent)


def _settle(pusher: Pusher) -> None:
    """How the run ended, where the run itself did not get to say so to its tracker."""
    status = str(pusher.meta.get("status")).lower()
    if pusher.cursor.wanted is None and status in ENDINGS:
        records, _ = pusher.log.tail(0)
        when = records[-1].get("time", time.time()) if records else time.time()
        wanted = {"status": ENDINGS[status], "time": int(when * 1000), "artifacts": list(RESULTS)}
        pusher.cursor.wanted = wanted
        pusher.cursor.save()
