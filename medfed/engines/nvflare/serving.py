"""medfed's server inside a job: opens the run, or goes on with it, and runs its rounds. Knows nothing of NVFlare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from medfed.conducting import conduct
from medfed.config import Experiment, validate
from medfed.engines.nvflare.engine import NVFlareEngine, Post
from medfed.engines.nvflare.hospitals import agree
from medfed.engines.nvflare.plan import RUNS, ServerPlan
from medfed.engines.planning import available_cores
from medfed.errors import FederationError
from medfed.experiment import Prepared, Say, prepare
from medfed.federation.state import ServerState, load_state
from medfed.ledger import LEDGER, Ledger
from medfed.rundir import META, RunFolder
from medfed.running import check_unchanged, federate, new_folder

PATIENCE = 10.0


def serve(plan: ServerPlan, post: Post, workspace: Path, say: Say, opened: Callable[[NVFlareEngine], object]) -> None:
    """Runs what remains of a run.

    Args:
        plan: the server's plan.
        post: sends to sites.
        workspace: the server's NVFlare workspace, below which a run without a folder gets one.
        say: told in one line what is going on.
        opened: told the engine, which then wants to hear of late answers.

    Raises:
        MedfedError: anything that is wrong with the input, or a federation that cannot go on.
    """
    plan.enter()
    experiment = validate(plan.experiment, "the job")
    if experiment.sites is not None:
        serve_hospitals(plan, experiment, post, workspace, say, opened)
        return
    prepared = prepare(experiment, say=say)
    missing = sorted(set(prepared.condition.clients) - set(plan.sites.values()))
    if missing:
        raise FederationError(
            f"no site stands for {', '.join(missing)}: the server's data are not those of the export.",
            fix="Export the job anew.",
        )
    simulated = plan.folder is not None
    folder = open_run(prepared, Path(plan.folder) if plan.folder else workspace / RUNS / plan.run, plan.run)
    # In a simulation the process that started it keeps others away from the run, while it lives.
    with _alone(folder.path) if simulated else folder.held():
        check_unchanged(prepared, folder.meta(), folder.path)
        state = load_state(folder.checkpoint)
        if state is not None and state.round >= experiment.rounds and folder.meta()["status"] == "completed":
            say(f"All {experiment.rounds} rounds are done.")
            return
        say(f"Run {folder.path}, after round {state.round if state else 0} of {experiment.rounds}")
        ledger = Ledger(folder.path / LEDGER)
        engine = NVFlareEngine(plan.by_client(), post, run=plan.run, limit=plan.limit, ledger=ledger)
        opened(engine)
        trainer = prepared.trainer(folder.meta()["hardware"]["device"], available_cores())
        federate(prepared, folder, engine, trainer, state=state, say=say)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Waits until the server of a simulation whose starter was killed is gone too."""
    try:
        with FileLock(path / ".server.lock").acquire(timeout=PATIENCE):
            yield
    except Timeout:
        raise FederationError(
            "the server of an earlier simulation is still at this run.", where=str(path), fix="End that process."
        ) from None


def serve_hospitals(
    plan: ServerPlan,
    experiment: Experiment,
    post: Post,
    workspace: Path,
    say: Say,
    opened: Callable[[NVFlareEngine], object],
) -> None:
    """Runs what remains of a run whose images are at real sites; see :func:`serve`."""
    agreed, path = agree(experiment), workspace / RUNS / plan.run
    if (path / META).is_file():
        folder = RunFolder.open(path)
    else:
        folder = RunFolder.at(path, experiment.dump())
        agreed.begin(folder, plan.run)
    with folder.held():
        state = load_state(folder.checkpoint)
        if state is not None and state.round >= experiment.rounds and folder.meta()["status"] == "completed":
            say(f"All {experiment.rounds} rounds are done.")
            return
        say(f"Run {folder.path}, after round {state.round if state else 0} of {experiment.rounds}")
        evaluate = agreed.evaluation(available_cores(), say)
        ledger = Ledger(folder.path / LEDGER)
        engine = NVFlareEngine(plan.by_client(), post, run=plan.run, limit=plan.limit, ledger=ledger)
        opened(engine)
        conduct(agreed, folder, engine, state or ServerState(agreed.initial_model()), evaluate, say=say)


def open_run(prepared: Prepared, path: Path, uid: str) -> RunFolder:
    """The run's folder, made where it is not there yet."""
    if (path / META).is_file():
        return RunFolder.open(path)
    return new_folder(prepared, path=path, uid=uid)
