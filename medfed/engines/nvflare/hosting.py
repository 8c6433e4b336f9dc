"""Builds a site's client from the plan that all agreed on and from the site's own settings."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medfed.bundle_check import BundleRefused, check_bundle
from medfed.data.cohort import Task
from medfed.engines.host import ClientHost
from medfed.engines.nvflare.plan import SitePlan
from medfed.engines.nvflare.shares import open_share, share_path
from medfed.engines.nvflare.site import Desk
from medfed.engines.nvflare.site_settings import SITE_FILE, SiteSettings, own_data, read_site
from medfed.engines.nvflare.wire import MEGABYTE
from medfed.engines.planning import available_cores
from medfed.errors import ConfigError, FederationError
from medfed.federation.memory import client_folder
from medfed.ledger import LEDGER, Ledger
from medfed.methods.registry import resolve_method

if TYPE_CHECKING:
    from medfed.data.arrays import ArrayDataset
    from medfed.training.bundle import TrainingBundle

ERRORS = "errors.log"


def open_desk(plan: SitePlan, site: str, workspace: Path) -> Desk:
    """A site's desk: everything is kept below ``<workspace>/medfed/<run>``, and found there again after a restart.

    What goes wrong with the site's own settings and data is told in ``errors.log`` there, and nowhere else: NVFlare's
    log may be read from outside.

    Args:
        plan: what all agreed on.
        site: this site's name.
        workspace: the site's NVFlare workspace.

    Raises:
        ConfigError: the site has no part in the job.
    """
    plan.enter()
    client = plan.client(site)
    clients = Path(plan.simulation.clients) if plan.simulation else workspace / "medfed" / plan.run
    own = clients / client_folder(client)

    def log(text: str) -> None:
        own.mkdir(parents=True, exist_ok=True)
        with open(own / ERRORS, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    limit, fault = plan.limit, None
    try:
        settings, base = site_settings(plan, client, workspace)
        if settings.max_message_mb is not None:
            limit = min(limit, int(settings.max_message_mb * MEGABYTE))
    except Exception:
        log(traceback.format_exc())
        fault = f"its {SITE_FILE} cannot be used"

    def make_host() -> ClientHost:
        if fault is not None:
            raise FederationError(fault)
        bundle = agreed_bundle(plan, settings.bundle, settings.allow)
        try:
            data = own_share(plan, client, settings, base, bundle, workspace)
        except Exception:
            log(traceback.format_exc())
            raise FederationError("its images and labels cannot be used") from None
        return build_host(plan, client, data, settings, bundle, clients)

    return Desk(client, plan.run, make_host, limit, Ledger(own / LEDGER), log)


def site_settings(plan: SitePlan, client: str, workspace: Path) -> tuple[SiteSettings, Path]:
    """The site's settings, and the folder that its paths start from."""
    simulation = plan.simulation
    if simulation is None:
        local = workspace / "local"
        return read_site(local / SITE_FILE), local
    share = share_path(Path(simulation.shares), client)
    return SiteSettings(share=share.name, device=simulation.device, threads=simulation.threads), share.parent


def agreed_bundle(plan: SitePlan, root: str | None = None, allow: Sequence[str] = ()) -> TrainingBundle:
    """The bundle that all agreed on, with the job's classes.

    At a real site its files are read as text first, and nothing of them is evaluated unless they hold nothing that they
    may not hold and are those agreed on (:func:`~medfed.bundle_check.check_bundle`).

    Args:
        plan: what all agreed on.
        root: where the site keeps the bundle; by default where the plan says.
        allow: further names that the site lets a bundle use.

    Raises:
        ConfigError: there is none, it is another one, or it holds what it may not hold.
    """
    from medfed.training.bundle import TrainingBundle

    if plan.simulation is None:
        try:
            check_bundle(root or plan.bundle, plan.files_hash, plan.overrides, allow)
        except BundleRefused as refused:
            agreed = plan.files_hash[:12]
            what = f"its bundle '{plan.bundle}' is not the agreed one ({agreed}), or holds what it may not hold"
            raise ConfigError(what, fix=str(refused)) from None
    overrides = {**plan.overrides, "classes": list(plan.classes), "task": plan.task}
    bundle = TrainingBundle.load(root or plan.bundle, overrides)
    if bundle.content_hash() != plan.bundle_hash:
        raise ConfigError(
            f"the bundle '{Path(plan.bundle).name}' is not the agreed one "
            f"(hash {bundle.content_hash()[:12]}, agreed {plan.bundle_hash[:12]})",
            where=str(bundle.root),
            fix="Install the agreed version of medfed and of the bundle.",
        )
    return bundle


def own_share(
    plan: SitePlan, client: str, settings: SiteSettings, base: Path, bundle: TrainingBundle, workspace: Path
) -> ArrayDataset:
    """The client's images and labels, from its share of a condition or from its own files."""
    if settings.share is not None:
        return open_share(base / settings.share, client)
    return own_data(settings, Task(plan.task, plan.classes), bundle, workspace / "medfed" / "cache")


def build_host(
    plan: SitePlan, client: str, data: ArrayDataset, settings: SiteSettings, bundle: TrainingBundle, clients: Path
) -> ClientHost:
    """The client, with its trainer, and its memory below ``clients``."""
    from medfed.training.local import LocalTrainer, resolve_device

    method, _ = resolve_method(plan.method)
    trainer = LocalTrainer(
        bundle,
        device=str(resolve_device(settings.device)),
        amp=plan.amp,
        channels_last=plan.channels_last,
        compile=plan.compile,
        threads=available_cores() if settings.threads == "auto" else settings.threads,
    )
    task = Task(plan.task, plan.classes)
    return ClientHost((client,), method.tasks, task, lambda _: data, trainer, clients, plan.seed)
