"""A job folder as NVFlare submits it: no script travels, only two plans and the names of two classes of medfed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from medfed.engines.nvflare.plan import ServerPlan, SitePlan, write_plan

SERVER_APP, SITE_APP = "medfed_server", "medfed_site"
PACKAGE = "medfed.engines.nvflare"
ALLOWED = (f"{PACKAGE}.controller.MedfedController", f"{PACKAGE}.executor.MedfedExecutor")


def server_config(interval: float) -> dict[str, Any]:
    """The content of ``config_fed_server.json``.

    Args:
        interval: seconds between a site's questions for something to do.
    """
    return {
        "format_version": 2,
        "server": {"heart_beat_timeout": 600, "task_request_interval": interval},
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
        "workflows": [{"id": "medfed", "path": ALLOWED[0], "args": {}}],
    }


def client_config() -> dict[str, Any]:
    """The content of ``config_fed_client.json``."""
    return {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": {"path": ALLOWED[1], "args": {}}}],
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
    }


def job_meta(name: str, sites: list[str], least: int) -> dict[str, Any]:
    """The content of ``meta.json``.

    Args:
        name: name of the job.
        sites: who takes part.
        least: with fewer sites alive NVFlare stops the job; the run's quorum.
    """
    return {
        "name": name,
        "resource_spec": {},
        "min_clients": least,
        "deploy_map": {SERVER_APP: ["server"], SITE_APP: sites},
    }


def write_job(folder: Path, name: str, server: ServerPlan, site: SitePlan, *, least: int, interval: float) -> Path:
    """Writes a job folder.

    Args:
        folder: where; made where it is not there.
        name: name of the job.
        server: the server's plan.
        site: the sites' plan.
        least: fewest sites.
        interval: seconds between a site's questions for something to do.
    """
    for app, file, config, plan in (
        (SERVER_APP, "config_fed_server.json", server_config(interval), server),
        (SITE_APP, "config_fed_client.json", client_config(), site),
    ):
        write_plan(plan, folder / app / "config")
        _write(folder / app / "config" / file, config)
    _write(folder / "meta.json", job_meta(name, sorted(site.sites), least))
    return folder


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
