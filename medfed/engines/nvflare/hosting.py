"""Builds a site's client from the plan that all agreed on and from the site's own settings."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from medfed.data.cohort import Task
from medfed.durable import write_atomically
from medfed.engines.host import ClientHost
from medfed.engines.nvflare.held_out import HELD_OUT, SiteData, keep_apart, measuring
from medfed.engines.nvflare.plan import RUNS, SitePlan
from medfed.engines.nvflare.shares import open_share, share_path
from medfed.engines.nvflare.site import Desk
from medfed.engines.nvflare.site_bundle import site_bundle
from medfed.engines.nvflare.site_settings import SITE_FILE, SiteSettings, own_data, read_site
from medfed.engines.nvflare.wire import MEGABYTE
from medfed.engines.planning import available_cores
from medfed.errors import FederationError
from medfed.federation.memory import client_folder
from medfed.ledger import LEDGER, Ledger
from medfed.methods.registry import resolve_method
from medfed.training.local import resolve_device

if TYPE_CHECKING:
    from medfed.training.bundle import TrainingBundle

ERRORS, REPORT = "errors.log", "site.json"


def open_desk(plan: SitePlan, site: str, workspace: Path) -> Desk:
    """A site's desk: everything is kept below ``<workspace>/runs/<run>``, and found there again after a restart.

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
    clients = Path(plan.simulation.clients) if plan.simulation else workspace / RUNS / plan.run
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
        bundle = site_bundle(plan, settings)
        try:
            data = own_data_of(plan, client, settings, base, bundle, workspace)
        except Exception:
            log(traceback.format_exc())
            raise FederationError("its images and labels cannot be used") from None
        if plan.simulation is None:
            write_report(plan, data, settings, bundle, own)
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


def own_data_of(
    plan: SitePlan, client: str, settings: SiteSettings, base: Path, bundle: TrainingBundle, workspace: Path
) -> SiteData:
    """The client's images and labels, from its share of a condition or from its own files, and what it keeps apart."""
    if settings.share is None:
        return own_data(settings, plan, client, bundle, workspace / "cache")
    share = open_share(base / settings.share, client)
    return keep_apart(share, len(plan.classes), plan.held_out, plan.held_out_seed, client)


def build_host(
    plan: SitePlan, client: str, data: SiteData, settings: SiteSettings, bundle: TrainingBundle, clients: Path
) -> ClientHost:
    """The client, with its trainer, and its memory below ``clients``."""
    from medfed.training.local import LocalTrainer

    method, _ = resolve_method(plan.method)
    trainer = LocalTrainer(
        bundle,
        device=str(resolve_device(settings.device)),
        amp=plan.amp,
        channels_last=plan.channels_last,
        compile=plan.compile,
        threads=available_cores() if settings.threads == "auto" else settings.threads,
    )
    told = sorted(settings.overrides) if settings.tell_overrides else None
    tasks = {**method.tasks, HELD_OUT: measuring(data.held_out, settings.evaluation, told)}
    task = Task(plan.task, plan.classes)
    return ClientHost((client,), tasks, task, lambda _: data.training, trainer, clients, plan.seed)


def write_report(plan: SitePlan, data: SiteData, settings: SiteSettings, bundle: TrainingBundle, folder: Path) -> None:
    """Writes ``site.json``, atomically: with what the site takes part. It stays at the site."""
    report = {
        "run": plan.run,
        "method": plan.method,
        "bundle": Path(plan.bundle).name,
        "bundle_hash": plan.bundle_hash,
        "overrides": settings.overrides,
        "bundle_hash_with_overrides": bundle.content_hash(),
        "training_images": len(data.training),
        "held_out_images": 0 if data.held_out is None else len(data.held_out),
        "tells_of_them": settings.evaluation,
        "device": str(resolve_device(settings.device)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / REPORT, json.dumps(report, indent=1).encode())
