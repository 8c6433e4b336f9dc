"""Starting, resuming and finishing a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfed.checks import check_method
from medfed.conducting import conduct, write_beginning
from medfed.config import Experiment, load_experiment, validate
from medfed.engines.host import ClientHost
from medfed.engines.local import LocalEngine
from medfed.engines.planning import available_cores, choose_workers
from medfed.engines.pool import PoolEngine
from medfed.errors import ConfigError, FederationError
from medfed.experiment import Prepared, Progress, Say, kind_of, prepare, write_findings
from medfed.federation.loop import Listener, Record
from medfed.federation.participation import round_half_up
from medfed.federation.server import Engine, Workbench
from medfed.federation.state import ServerState, load_state
from medfed.judging import AnnotationJudge
from medfed.measuring import evaluation
from medfed.methods.registry import resolve_method
from medfed.rundir import EXPERIMENT, RunFolder
from medfed.training.local import resolve_device
from medfed.training.predictions import PredictionFiles
from medfed.yaml_file import read_yaml

if TYPE_CHECKING:
    from medfed.console import Screen
    from medfed.training.local import LocalTrainer


def start(
    experiment: Experiment,
    *,
    say: Say = lambda _: None,
    progress: Progress | None = None,
    listeners: Sequence[Listener] = (),
) -> Path:
    """Runs an experiment from its beginning.

    Args:
        experiment: the validated experiment.
        say: told in one line what is going on.
        progress: told (what, done, total) while images are decoded.
        listeners: told of every finished round.

    Returns:
        The run's folder.

    Raises:
        MedfedError: anything that is wrong with the input, or a federation that cannot go on.
    """
    if experiment.engine.kind == "nvflare":
        import medfed.engines.nvflare  # noqa: F401 - says at once where it is not installed
    prepared = prepare(experiment, say=say, progress=progress)
    folder = new_folder(prepared)
    say(f"Run {folder.path}")
    for warning in prepared.warnings:
        say(f"Note: {warning}")
    with folder.held():
        execute(prepared, folder, say=say, listeners=listeners)
    return folder.path


def start_all(
    config: Path, sets: Sequence[str], methods: Sequence[str], seeds: Sequence[int], screen: Screen, check: bool = False
) -> list[Path]:
    """Runs an experiment for every method and seed asked for, one after another, and compares them at the end.

    All combinations are validated before the first one starts.

    Args:
        config: the experiment file.
        sets: ``key=value`` changes.
        methods: methods to run instead of the file's own.
        seeds: seeds to run instead of the file's own.
        screen: shows what is going on.
        check: only validate and prepare.

    Returns:
        The runs' folders.
    """
    planned = []
    wanted_seeds: list[int | None] = list(seeds) or [None]
    wanted_methods: list[str | None] = list(methods) or [None]
    for seed in wanted_seeds:
        for method in wanted_methods:
            changes = [*([] if method is None else [f"method={method}"]), *sets]
            changes += [] if seed is None else [f"seed={seed}"]
            planned.append(load_experiment(config, changes))
    for experiment in planned:
        chosen, settings = resolve_method(experiment.method)
        settings.check(experiment.rounds)
        if experiment.cohort is not None:
            check_method(experiment, chosen, kind_of(experiment.cohort))
    paths = []
    for experiment in planned:
        with screen:
            if check:
                prepared = prepare(experiment, say=screen.say, progress=screen.progress)
                screen.say(f"Condition {prepared.condition.hash[:12]} with {len(prepared.condition.clients)} clients")
                for warning in prepared.warnings:
                    screen.say(f"Note: {warning}")
            else:
                paths.append(start(experiment, say=screen.say, progress=screen.progress, listeners=[screen.round]))
    if paths:
        screen.finish(paths)
    return paths


def resume(
    path: Path,
    *,
    rounds: int | None = None,
    say: Say = lambda _: None,
    progress: Progress | None = None,
    listeners: Sequence[Listener] = (),
) -> Path:
    """Goes on with a run after its last checkpoint; see :func:`start`.

    Args:
        path: the run's folder.
        rounds: new last round, also of a run that was completed.
        say: as in :func:`start`.
        progress: as in :func:`start`.
        listeners: as in :func:`start`.

    Raises:
        MedfedError: the folder is no run, another process has it, its data have changed since, or its rounds cannot
            be changed.
    """
    folder = RunFolder.open(path)
    with folder.held():
        meta = folder.meta()
        experiment = validate(read_yaml(path / EXPERIMENT), str(path / EXPERIMENT))
        state = load_state(folder.checkpoint)
        if rounds is not None and rounds != experiment.rounds:
            experiment = with_rounds(experiment, rounds, state.round if state else 0, path)
            folder.write_experiment(experiment.dump())
        if meta.get("rounds") != experiment.rounds:  # also after a kill between the two files
            meta = folder.write_meta(rounds=experiment.rounds)
        if state is not None and state.round >= experiment.rounds and meta["status"] == "completed":
            say(f"All {experiment.rounds} rounds are done.")
            return path
        prepared = prepare(experiment, say=say, progress=progress)
        check_unchanged(prepared, meta, path)
        say(f"Going on after round {state.round if state else 0} of {experiment.rounds}")
        execute(prepared, folder, state=state, say=say, listeners=listeners)
    return path


def with_rounds(experiment: Experiment, rounds: int, done: int, path: Path) -> Experiment:
    """An experiment with another last round, where what was done so far would have been the same with it.

    Raises:
        ConfigError: fewer rounds than are done, or a method whose rounds depend on how many there are in all.
    """
    if rounds < max(done, 1):
        raise ConfigError(f"{done} rounds are done already.", where=str(path), fix=f"Give --rounds {done} or more.")
    method, settings = resolve_method(experiment.method)
    if done and settings.depends_on_rounds:
        raise ConfigError(
            f"with these settings every round of {method.name} depends on the number of rounds in all "
            f"({experiment.rounds}).",
            where=str(path),
            fix="Start a new run with more rounds.",
        )
    return experiment.model_copy(update={"rounds": rounds})


def check_unchanged(prepared: Prepared, meta: dict[str, Any], path: Path) -> None:
    """Refuses to go on with a run whose data, bundle or initial model are no longer those that it began with."""
    for what, restore, key, value in (
        ("data", "the images and labels", "data_hash", prepared.data_hash),
        ("data", "the images and labels", "condition_hash", prepared.condition.hash),
        ("settings of the bundle", "the bundle", "bundle_hash", prepared.bundle.content_hash()),
        ("initial weights", "the weights file", "initial_model_hash", prepared.initial_model_hash),
    ):
        if key in meta and meta[key] != value:
            raise FederationError(
                f"the {what} are no longer those that the run began with ({key} differs).",
                where=str(path),
                fix=f"Restore {restore}, or start a new run.",
            )


def new_folder(prepared: Prepared, *, path: Path | None = None, uid: str | None = None, **facts: Any) -> RunFolder:
    """Makes the run's folder and writes down everything that is known before the first round.

    Args:
        prepared: all that the run needs.
        path: the folder; by default a new one below the experiment's output.
        uid: the run's name that is unique everywhere; made anew by default.
        **facts: further plain values for ``run.json``.
    """
    experiment = prepared.experiment
    name = f"{experiment.name}-{prepared.method.name}-s{experiment.seed}"
    if path is None:
        folder = RunFolder.create(experiment.output, name, experiment.dump())
    else:
        folder = RunFolder.at(path, experiment.dump())
    prepared.condition.save(folder.path / "condition")
    write_findings(prepared.findings, folder.path / "findings")
    plan = plan_workers(prepared)
    write_beginning(
        folder,
        prepared,
        uid=uid,
        clients=prepared.condition.clients,
        cohort=prepared.cohort_name,
        plan=plan,
        condition_hash=prepared.condition.hash,
        partition_hash=prepared.condition.partition_hash,
        mislabelled=sum(prepared.condition.mislabelled.values()),
        data_hash=prepared.data_hash,
        initial_model_hash=prepared.initial_model_hash,
        warnings=prepared.warnings,
        **facts,
    )
    return folder


def plan_workers(prepared: Prepared) -> tuple[str, int, int]:
    """Device, number of workers and threads a worker.

    ``workers: auto`` trains clients side by side on a CPU where a client's training is worth more than moving its
    model between processes; see :mod:`medfed.engines.planning`. On a GPU one resident model is the default.
    """
    engine, part = prepared.experiment.engine, prepared.experiment.participation
    device = str(resolve_device(engine.device))
    cores = available_cores()
    clients = len(prepared.condition.clients)
    asked = max(1, round_half_up(min(part.fraction, 1.0) * clients))
    if engine.workers != "auto":
        workers = min(engine.workers, clients)
    elif engine.kind == "nvflare":
        workers = clients  # NVFlare ends and starts a site's process at every turn where not all have one
    elif device != "cpu":
        workers = 1
    else:
        samples = len(prepared.rows) / clients * (getattr(prepared.settings, "local_epochs", 1) or 1)
        workers = choose_workers(prepared.bundle, clients=asked, samples=samples, cores=cores)
    threads = max(1, cores // workers) if engine.threads == "auto" else engine.threads
    return device, workers, threads


def execute(
    prepared: Prepared,
    folder: RunFolder,
    *,
    state: ServerState | None = None,
    say: Say = lambda _: None,
    listeners: Sequence[Listener] = (),
) -> None:
    """Runs the rounds that remain on the experiment's engine and finishes the run; see :func:`federate`."""
    device, workers, threads = (folder.meta()["hardware"][k] for k in ("device", "workers", "threads"))
    if prepared.experiment.engine.kind == "nvflare":
        from medfed.engines.nvflare.simulation import simulate

        simulate(prepared, folder, workers, say=say, listeners=listeners)
        return
    engine, trainer = make_engine(prepared, folder, device, workers, threads)
    federate(prepared, folder, engine, trainer, state=state, say=say, listeners=listeners)


def federate(
    prepared: Prepared,
    folder: RunFolder,
    engine: Engine,
    trainer: LocalTrainer,
    *,
    state: ServerState | None = None,
    say: Say = lambda _: None,
    listeners: Sequence[Listener] = (),
) -> None:
    """The server's side of a run on any engine: the rounds that remain, final model, report, tracking.

    An interrupt or a failure leaves the last checkpoint, says how the run stands, and is raised again.

    Args:
        prepared: all that the server needs.
        folder: the run's folder.
        engine: moves the messages; closed at the end.
        trainer: the trainer with which this process evaluates.
        state: where the run stands; at its beginning by default.
        say: told in one line what is going on.
        listeners: told of every finished round.
    """
    try:
        state = state or ServerState(prepared.initial_model())
        predictions = PredictionFiles(
            folder.path / "predictions", keep_last=prepared.experiment.evaluation.keep_predictions
        )
        predictions.truncate_after(state.round)
        judge = AnnotationJudge(prepared.condition, folder.clients)
        evaluate = evaluation(prepared, trainer, predictions, judge, folder.clients)
        public = None if (images := prepared.public()) is None else Workbench(images, trainer)
    except BaseException:
        engine.close()
        raise
    conduct(
        prepared,
        folder,
        engine,
        state,
        evaluate,
        public=public,
        say=say,
        listeners=listeners,
        condition_hash=prepared.condition.hash,
    )


def make_engine(
    prepared: Prepared, folder: RunFolder, device: str, workers: int, threads: int
) -> tuple[Engine, LocalTrainer]:
    """The engine and the trainer with which this process evaluates."""
    clients = prepared.condition.clients
    # Engine and clients get the shards and nothing that knows the truth.
    host = partial(
        ClientHost,
        clients,
        prepared.method.tasks,
        prepared.task,
        prepared.shards(),
        folder=folder.clients,
        seed=prepared.experiment.seed,
        public=prepared.public(),
    )
    if workers == 1:
        trainer = prepared.trainer(device, threads)
        return LocalEngine(host(trainer=trainer)), trainer
    model_bytes = sum(t.numel() * t.element_size() for t in prepared.initial_model().values())
    fork = may_fork(device, threads)
    factory = (
        (lambda: host(trainer=prepared.trainer(device, threads)))
        if fork
        else partial(host_of_run, str(folder.path), device, threads)
    )
    engine = PoolEngine(
        clients,
        factory,
        workers=workers,
        threads=threads,
        model_bytes=model_bytes,
        start="fork" if fork else "spawn",
    )
    try:
        return engine, prepared.trainer(device, available_cores())
    except BaseException:
        engine.close()
        raise


def may_fork(device: str, threads: int) -> bool:
    """Whether workers can be forked: neither CUDA nor the threads of OpenMP survive a fork."""
    return device == "cpu" and threads == 1


def host_of_run(path: str, device: str, threads: int) -> ClientHost:
    """Builds a worker's clients from a run's folder; used by workers that cannot be forked."""
    folder = RunFolder(Path(path))
    prepared = prepare(validate(read_yaml(folder.path / EXPERIMENT), path))
    return ClientHost(
        prepared.condition.clients,
        prepared.method.tasks,
        prepared.task,
        prepared.shards(),
        prepared.trainer(device, threads),
        folder.clients,
        prepared.experiment.seed,
        prepared.public(),
    )


__all__ = ["Record", "execute", "resume", "start"]
