"""MLflow beside a running federation: it may be slow, dead or absent, and training does not notice."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from medfed.errors import MedfedError
from medfed.tracking.pusher import ENDINGS, Pusher, TooSlow
from medfed.tracking.settings import TrackingSettings, open_hint, resolve_uri
from medfed.tracking.store import quiet

logger = logging.getLogger("medfed.tracking")

BUDGET = 15.0
"""Seconds a push may take beside training, once connected."""
CLOSING_BUDGET = 300.0
"""Seconds the last push, with its artifacts, may take."""
SHARE = 0.05
"""Share of the run's time that pushing may take; with many clients and short rounds several rounds go together."""
FIRST_WAIT, LONGEST_WAIT = 30.0, 3600.0
"""Seconds of rest after a first failure, and at most."""


class MLflowTracker:
    """Copies the record of a run to MLflow, round by round.

    One MLflow run for the federation and one below it for each client; step = round.  What counts is
    ``records.jsonl``: each push copies what is recorded and not yet there, so that nothing is lost while a server is
    down and nothing is logged twice after a crash.  No method raises because of MLflow.

    Args:
        run_dir: the run, with ``run.json`` (``uid``) and ``records.jsonl``.
        settings: the ``tracking`` section.
        clock: seconds, monotonic; for tests.

    Raises:
        ConfigError: the store is a folder of files.
    """

    def __init__(self, run_dir: Path, settings: TrackingSettings, *, clock: Callable[[], float] = time.monotonic):
        self.run_dir, self.settings, self.clock = Path(run_dir), settings, clock
        self.uri = resolve_uri(settings, self.run_dir.parent)
        self._pusher = self._new_pusher()
        self._failures = 0
        self._not_before = 0.0

    @property
    def hint(self) -> str:
        """What opens the tracking pages."""
        return open_hint(self.uri)

    def start(self) -> None:
        """Call when a run starts or is resumed: it is open (again) and described anew.  Does not call MLflow."""
        if self.settings.enabled:
            self._note(wanted=None, described=False)

    def push(self) -> None:
        """Call after each recorded round.  Returns at once while MLflow rests after a failure or a costly push."""
        if not self.settings.enabled or self.clock() < self._not_before:
            return
        self._guarded(self._push)

    def finish(self, status: str, artifacts: Iterable[str | Path] = ()) -> None:
        """Call when a run ends, however it ends: pushes the rest, uploads artifacts, closes the MLflow runs.

        Args:
            status: ``finished``, ``failed``, ``killed`` or ``interrupted``.
            artifacts: files and folders of the run to upload; those that are not there are left out.

        Raises:
            ValueError: another status, or an artifact outside the run.
        """
        if status.lower() not in ENDINGS:
            raise ValueError(f"a run ends as one of {sorted(ENDINGS)}, not {status!r}")
        names = [_relative(Path(a), self.run_dir) for a in artifacts]
        if not self.settings.enabled:
            return
        wanted = {"status": ENDINGS[status.lower()], "time": int(time.time() * 1000), "artifacts": names}
        self._note(wanted=wanted)
        self._guarded(self._close)

    def _push(self) -> float:
        pusher = self._pusher
        if len(pusher.waiting()) < self.settings.every:
            return 0.0
        pusher.connect()  # once; the cost of importing MLflow and of making a store counts for neither limit
        started = self.clock()
        pusher.deadline = started + BUDGET
        pusher.push()
        return self.clock() - started

    def _close(self) -> float:
        self._pusher.connect()
        self._pusher.deadline = self.clock() + CLOSING_BUDGET
        self._pusher.push()
        self._pusher.close()
        return 0.0

    def _note(self, **fields: Any) -> None:
        """Writes down, before MLflow is called, what MLflow is to be told."""
        try:
            with self._lock(timeout=60):
                self._pusher.load()
                self._pusher.cursor.__dict__.update(fields)
                self._pusher.cursor.save()
        except (Timeout, OSError) as error:
            logger.warning("tracking.json cannot be written (%s); the run goes on", type(error).__name__)

    def _guarded(self, action: Callable[[], float]) -> None:
        started = self.clock()
        pusher = self._pusher
        pusher.deadline = math.inf
        try:
            with contextlib.ExitStack() as stack, quiet():
                try:
                    stack.enter_context(self._lock(timeout=0))
                except Timeout:
                    return  # somebody is syncing this very run: what is recorded by then goes with it
                pusher.load()
                cost = action()
        except TooSlow:
            self._slow(self.clock() - started)
            return
        except Exception as error:
            # whatever MLflow raises (requests, SQL, its own), a record on disk is worth more than a copy of it
            self._failed(error, self.clock() - started)
            return
        if self._failures:
            logger.warning("MLflow is reachable again; what was recorded meanwhile has been copied")
        self._failures = 0
        self._not_before = self.clock() + cost / SHARE

    def _slow(self, cost: float) -> None:
        """The rest goes with later pushes; only at the end of the run it has to be said that it did not."""
        self._not_before = self.clock() + cost / SHARE
        if self._pusher.cursor.wanted is not None:
            logger.warning(
                "MLflow is slow and lacks a part of this run. Copy it with: medfed sync %s", self.run_dir.name
            )

    def _failed(self, error: Exception, cost: float) -> None:
        if not self._failures:
            reason = str(error) if isinstance(error, MedfedError) else type(error).__name__
            logger.warning(
                "MLflow cannot be used (%s); the run goes on and all is in records.jsonl. "
                "Copy it later with: medfed sync %s",
                reason,
                self.run_dir.name,
            )
        wait = max(FIRST_WAIT, cost / SHARE) * 2**self._failures
        self._failures += 1
        self._not_before = self.clock() + min(wait, LONGEST_WAIT)
        self._pusher = self._new_pusher()  # what is there is asked anew

    def _new_pusher(self) -> Pusher:
        return Pusher(self.run_dir, self.uri, self.settings.experiment, self.clock)

    def _lock(self, timeout: float) -> FileLock:
        return run_lock(self.run_dir, timeout)


def run_lock(run_dir: Path, timeout: float) -> FileLock:
    """The lock that whoever copies a run to MLflow holds."""
    return FileLock(run_dir / ".tracking.lock", timeout=timeout)


def _relative(path: Path, run_dir: Path) -> str:
    full = path if path.is_absolute() else run_dir / path
    return full.relative_to(run_dir).as_posix()
