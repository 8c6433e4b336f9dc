"""A job for real sites, and shares of a stored condition for a trial among them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from medfed.config import Experiment, load_experiment
from medfed.engines.nvflare.hospitals import agree
from medfed.engines.nvflare.jobs import write_job
from medfed.engines.nvflare.plan import ServerPlan, site_names, site_plan
from medfed.engines.nvflare.shares import write_share
from medfed.engines.nvflare.site_settings import SITE_FILE
from medfed.errors import ConfigError
from medfed.experiment import Prepared, Progress, Say, prepare
from medfed.rundir import EXPERIMENT, new_uid


def read_source(source: Path, sets: Sequence[str] = ()) -> Experiment:
    """The experiment of a run's folder or of an experiment file, for the NVFlare engine.

    Args:
        source: the folder or the file.
        sets: ``key=value`` changes of a file.

    Raises:
        ConfigError: it is neither, or not valid.
    """
    sets = [*sets, "engine.kind=nvflare"]
    if source.is_dir():
        if not (source / EXPERIMENT).is_file():
            raise ConfigError("is no run.", where=str(source), fix="Give an experiment file or the folder of a run.")
        return load_experiment(source / EXPERIMENT, sets)
    return load_experiment(source, sets)


def rooted(experiment: Experiment) -> dict[str, Any]:
    """The experiment as plain values, its paths absolute: NVFlare's server starts in a folder of its own."""
    data = experiment.model_dump(mode="json")
    if experiment.cohort is not None:
        data["cohort"]["root"] = str(experiment.cohort.root.resolve())
    if Path(experiment.bundle).expanduser().is_dir():
        data["bundle"] = str(Path(experiment.bundle).expanduser().resolve())
    if experiment.cache is not None:  # otherwise the server's own: who exports may be somebody else
        data["cache"] = str(experiment.cache_dir.resolve())
    return data


def check_secrets(experiment: Experiment) -> None:
    """A job is kept in clear by NVFlare's server: it must hold no password.

    Raises:
        ConfigError: the address of an MLflow server holds one.
    """
    if "@" in urlsplit(experiment.tracking.uri or "").netloc:
        raise ConfigError(
            "the job would hold a user name or password in clear.",
            where="tracking.uri",
            fix="Leave it out and set the environment variable MLFLOW_TRACKING_URI at the server.",
        )


def export(
    source: Path,
    out: Path,
    sets: Sequence[str] = (),
    *,
    say: Say = lambda _: None,
    progress: Progress | None = None,
) -> Path:
    """Writes a job folder that ``nvflare job submit`` accepts.

    The job names its run: submitted again, it goes on after the server's last checkpoint.

    Args:
        source: an experiment file, or a run's folder whose experiment is run again.
        out: the job folder; must not hold anything yet.
        sets: ``key=value`` changes.
        say: told in one line what is going on.
        progress: told (what, done, total) while images are decoded.

    Raises:
        MedfedError: anything that is wrong with the experiment, or a folder that is in use.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("is there already.", where=str(out), fix="Give a new folder.")
    experiment = read_source(source, sets)
    check_secrets(experiment)
    if experiment.sites is not None:
        agreed = agree(experiment)
        clients, bundle = agreed.names, agreed.bundle
    else:
        prepared = prepare(experiment, say=say, progress=progress)
        clients, bundle = prepared.condition.clients, prepared.bundle
    run, sites = new_uid(), site_names(clients)
    server = ServerPlan(
        run=run,
        sites=sites,
        max_message_mb=experiment.engine.max_message_mb,
        experiment=rooted(experiment),
    )
    least = min(experiment.participation.quorum, len(sites))
    write_job(out, experiment.name, server, site_plan(experiment, bundle, run, sites), least=least, interval=0.5)
    say(f"Job of run {run} for {len(sites)} sites: {', '.join(sites)}")
    return out


def write_shares(prepared: Prepared, out: Path) -> list[Path]:
    """Writes for each client a folder with its own images and labels and a ``site.yaml`` that names them.

    Args:
        prepared: the experiment whose condition is shared out.
        out: folder of the shares, one folder a site.

    Returns:
        The folders. What is in one belongs into the ``local`` folder of that site.
    """
    shards = prepared.shards()
    folders = []
    for site, client in site_names(prepared.condition.clients).items():
        path = write_share(shards, client, out / ".new", own_images=True)
        folder = out / site
        path.parent.rename(folder)
        (folder / SITE_FILE).write_text(yaml.safe_dump({"share": path.name, "device": "auto"}), encoding="utf-8")
        folders.append(folder)
    (out / ".new").rmdir()
    return folders


def shares(
    source: Path, out: Path, sets: Sequence[str] = (), *, say: Say = lambda _: None, progress: Progress | None = None
) -> list[Path]:
    """Prepares an experiment and writes the shares of its clients; see :func:`write_shares`."""
    if out.exists():
        raise ConfigError("is there already.", where=str(out), fix="Give a new folder.")
    prepared = prepare(read_source(source, sets), say=say, progress=progress)
    out.mkdir(parents=True)
    return write_shares(prepared, out)
