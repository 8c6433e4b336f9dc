"""The server's side of a run, with images of its own or without: rounds, final model, report, tracking."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from medfed.config import Experiment
from medfed.errors import FederationError, MedfedError
from medfed.experiment import Say
from medfed.federation.loop import Listener, run_rounds
from medfed.federation.messages import State
from medfed.federation.server import Engine, Patience, Server, Workbench
from medfed.federation.state import ServerState, save_state, write_tensors
from medfed.rundir import EXPERIMENT, RunFolder, hardware, new_uid, now, versions
from medfed.tracking.records import RecordLog

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

    from medfed.data.cohort import Task
    from medfed.federation.method import Method, MethodSettings
    from medfed.training.bundle import TrainingBundle

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


class Agreed(Protocol):
    """What the server of a federation needs, with images of its own (:class:`Prepared`) or without."""

    experiment: Experiment
    method: Method
    settings: MethodSettings
    bundle: TrainingBundle

    @property
    def task(self) -> Task:
        """Classes and kind of labels."""
        ...

    def initial_model(self) -> State:
        """The initial global model."""
        ...


def conduct(
    agreed: Agreed,
    folder: RunFolder,
    engine: Engine,
    state: ServerState,
    evaluate: Callable[[Server], dict[str, Any]],
    *,
    public: Workbench | None = None,
    say: Say = lambda _: None,
    listeners: Sequence[Listener] = (),
    **header: Any,
) -> None:
    """The rounds that remain, final model, report and tracking of a server; see :func:`federate`.

    Args:
        agreed: what the server needs.
        folder: the run's folder.
        engine: moves the messages; closed at the end.
        state: where the run stands.
        evaluate: measures after a round.
        public: images that everybody may see.
        say: told in one line what is going on.
        listeners: told of every finished round.
        **header: further plain values for the file of the final model.
    """
    tracker: Any = None
    try:
        from medfed.tracking.mlflow_sink import MLflowTracker

        experiment, part = agreed.experiment, agreed.experiment.participation
        log = RecordLog(folder.records)
        check_records(log, state.round)
        log.truncate_after(state.round)
        server = Server(
            engine,
            state,
            agreed.task,
            rounds=experiment.rounds,
            seed=experiment.seed,
            fraction=part.fraction,
            patience=Patience(part.quorum, part.timeout, part.grace),
            dropout=part.dropout,
            save=lambda s: save_state(s, folder.checkpoint),
            public=public,
        )
        tracker = MLflowTracker(folder.path, experiment.tracking)
        folder.write_meta(status="running", pid=os.getpid())
        tracker.start()
        with interrupts_remembered() as interrupted:
            run_rounds(
                agreed.method,
                agreed.settings,
                server,
                evaluate=evaluate,
                append=log.append,
                listeners=[lambda *_: tracker.push(), *listeners, lambda *_: interrupted()],
            )
        if not agreed.method.personal:
            save_model(folder, server.model, agreed, **header)
        folder.write_meta(status="completed", finished=now())
    except BaseException as error:
        if tracker is not None:  # otherwise the run stands as it stood
            write_end(folder, tracker, error, state.round, say)
        raise
    finally:
        engine.close()
    finish(folder, tracker, say)


def write_end(folder: RunFolder, tracker: Any, error: BaseException, round_: int, say: Say) -> None:
    """Writes down that a run has ended before its time, as far as the disk takes it, and says how to go on."""
    status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    try:
        folder.write_meta(status=status, finished=now(), error=None if status == "interrupted" else str(error))
    except (OSError, MedfedError) as fault:
        say(f"That the run is {status} could not be written down ({fault}).")
    tracker.finish(status)
    say(f"{status.capitalize()} after round {round_}. Go on with: medfed resume {folder.path}")


def check_records(log: RecordLog, done: int) -> None:
    """Refuses to go on with a run that has lost records: they are written before the checkpoint of their round.

    Args:
        log: the records.
        done: the round of the checkpoint.
    """
    missing = sorted(set(range(1, done + 1)) - {r["round"] for r in log.read()})
    if missing:
        raise FederationError(
            f"{len(missing)} of the {done} rounds that are done are not on record, first round {missing[0]}.",
            where=str(log.path),
            fix="Restore that file, or start a new run.",
        )


@contextlib.contextmanager
def interrupts_remembered() -> Iterator[Callable[[], None]]:
    """Remembers Ctrl-C (and a request to end), which is lost where a callback swallows every exception.

    Yields:
        A function that raises KeyboardInterrupt if one came since; call it where a round has ended.
    """
    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    # Handlers can be set in the main thread alone, and one that somebody else has set is left alone.
    main = threading.current_thread() is threading.main_thread()
    ours = [s for s in INTERRUPTS if main and signal.getsignal(s) is signal.default_int_handler]
    for number in ours:
        signal.signal(number, handle)
    try:
        yield check
    finally:
        for number in ours:
            signal.signal(number, signal.default_int_handler)


def write_beginning(
    folder: RunFolder,
    agreed: Agreed,
    *,
    uid: str | None,
    clients: Sequence[str],
    cohort: str,
    plan: tuple[str, int, int],
    **facts: Any,
) -> None:
    """Writes ``run.json`` as it is before the first round.

    Args:
        folder: the run's folder.
        agreed: what the server needs.
        uid: the run's name that is unique everywhere; made anew by default.
        clients: names of the clients.
        cohort: name of the data set.
        plan: device, workers and threads a worker.
        **facts: further plain values.
    """
    experiment = agreed.experiment
    folder.write_meta(
        uid=uid or new_uid(),
        name=experiment.name,
        method=agreed.method.name,
        method_settings=agreed.settings.model_dump(mode="json"),
        seed=experiment.seed,
        bundle_hash=agreed.bundle.content_hash(),
        cohort=cohort,
        task=agreed.task.kind,
        classes=list(agreed.task.classes),
        clients=list(clients),
        rounds=experiment.rounds,
        status="new",
        started=now(),
        finished=None,
        versions=versions(),
        hardware=hardware(*plan),
        **facts,
    )


def save_model(folder: RunFolder, model: State, agreed: Agreed, **more: Any) -> Path:
    """Writes the final global model with what is needed to use it."""
    header = {
        "round": agreed.experiment.rounds,
        "method": agreed.method.name,
        "classes": list(agreed.task.classes),
        "task": agreed.task.kind,
        **more,
        "bundle_hash": agreed.bundle.content_hash(),
    }
    return write_tensors(folder.path / "model.safetensors", model, header)


def finish(folder: RunFolder, tracker: Any, say: Say) -> None:
    """Report and tracking at the end; neither can lose the run."""
    from medfed.report.html import write_report

    kept = (folder.path / "model.safetensors", folder.path / EXPERIMENT, folder.records)
    artifacts = [path for path in kept if path.exists()]
    try:
        artifacts.append(write_report(folder.path))
    except Exception as error:
        say(f"The report could not be written ({type(error).__name__}: {error}); the run is complete.")
    tracker.finish("finished", artifacts=artifacts)
