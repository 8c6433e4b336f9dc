"""Builds a site's client from the plan and the site's own settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from medfed.data.cohort import Task
from medfed.engines.host import ClientHost
from medfed.engines.nvflare.plan import SitePlan
from medfed.engines.nvflare.shares import open_share, share_path
from medfed.engines.nvflare.site import Desk
from medfed.errors import ConfigError
from medfed.federation.memory import client_folder
from medfed.ledger import LEDGER, Ledger
from medfed.methods.registry import resolve_method

if TYPE_CHECKING:
    from medfed.training.bundle import TrainingBundle


def open_desk(plan: SitePlan, site: str, workspace: Path, log: Callable[[str], object]) -> Desk:
    """A site's desk: everything is kept below ``<workspace>/medfed/<run>``, and found there again after a restart.

    Args:
        plan: what all agreed on.
        site: this site's name.
        workspace: the site's NVFlare workspace.
        log: told what went wrong, in words that stay here.

    Raises:
        ConfigError: the site has no part in the job.
    """
    client = plan.client(site)
    clients = Path(plan.simulation.clients) if plan.simulation else workspace / "medfed" / plan.run
    ledger = Ledger(clients / client_folder(client) / LEDGER)

    def make_host() -> ClientHost:
        return simulated_host(plan, client, clients)

    return Desk(client, plan.run, make_host, plan.limit, ledger, log)


def agreed_bundle(plan: SitePlan, root: str | None = None) -> TrainingBundle:
    """The bundle that all agreed on, with the job's classes.

    Args:
        plan: what all agreed on.
        root: where the site keeps the bundle; by default where the plan says.

    Raises:
        ConfigError: the site's bundle is another one.
    """
    from medfed.training.bundle import TrainingBundle

    overrides = {**plan.overrides, "classes": list(plan.classes), "task": plan.task}
    bundle = TrainingBundle.load(root or plan.bundle, overrides)
    if bundle.content_hash() != plan.bundle_hash:
        raise ConfigError(
            f"the bundle '{plan.bundle}' is not the agreed one "
            f"(hash {bundle.content_hash()[:12]}, agreed {plan.bundle_hash[:12]})",
            where=str(bundle.root),
            fix="Install the agreed version of medfed and of the bundle.",
        )
    return bundle


def simulated_host(plan: SitePlan, client: str, clients: Path) -> ClientHost:
    """A client of a simulation, with its share of the stored condition."""
    from medfed.training.local import LocalTrainer

    assert plan.simulation is not None
    bundle = agreed_bundle(plan)
    method, _ = resolve_method(plan.method)
    trainer = LocalTrainer(
        bundle,
        device=plan.simulation.device,
        amp=plan.amp,
        channels_last=plan.channels_last,
        compile=plan.compile,
        threads=plan.simulation.threads,
    )
    share = share_path(Path(plan.simulation.shares), client)
    return ClientHost(
        (client,),
        method.tasks,
        Task(plan.task, plan.classes),
        lambda name: open_share(share, name),
        trainer,
        clients,
        plan.seed,
    )
