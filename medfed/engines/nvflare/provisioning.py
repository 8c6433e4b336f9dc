"""Startup kits by NVFlare's own ``nvflare provision``, and what medfed closes in them.

NVFlare's kits let a job build many classes of NVFlare, let an administrator send any code with a job, and stream a
site's error log to the server. None of it is needed here: a kit admits medfed's class and no other, and keeps its logs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from nvflare.apis.fl_constant import AdminCommandNames

from medfed.engines.nvflare.jobs import ALLOWED
from medfed.engines.nvflare.participant import CODE
from medfed.engines.nvflare.plan import site_names
from medfed.errors import ConfigError

PROJECT = "project.yml"


def project(
    name: str, server: str, sites: Sequence[str], admin: str, *, org: str, port: int, admin_port: int
) -> dict[str, Any]:
    """The content of NVFlare's project file.

    Args:
        name: name of the project.
        server: host name of the server, as sites reach it.
        sites: names of the sites.
        admin: e-mail address of the administrator.
        org: organisation, letters, digits and underscores.
        port: port that sites connect to.
        admin_port: port that the administrator connects to; may be the same.
    """
    builders = "nvflare.lighter.impl"
    return {
        "api_version": 3,
        "name": name,
        "description": "a federation of medfed",
        "participants": [
            {"name": server, "type": "server", "org": org, "fed_learn_port": port, "admin_port": admin_port},
            *({"name": site, "type": "client", "org": org} for site in sites),
            {"name": admin, "type": "admin", "org": org, "role": "project_admin"},
        ],
        "builders": [
            {
                "path": f"{builders}.workspace.WorkspaceBuilder",
                "args": {"template_file": ["master_template.yml"]},
            },
            {"path": f"{builders}.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
            {"path": f"{builders}.cert.CertBuilder"},
            {"path": f"{builders}.signature.SignatureBuilder"},
        ],
    }


def provision(content: dict[str, Any], out: Path, storage: Path | None = None) -> dict[str, Path]:
    """Writes the project file, has NVFlare make the kits, and closes them.

    Args:
        content: of the project file; see :func:`project`.
        out: folder for both. Made again with the same content, NVFlare keeps the root certificate.
        storage: folder on the server's machine where NVFlare keeps its list of jobs; by default NVFlare's own, which is
            below ``/tmp`` and shared by all servers of a machine.

    Returns:
        The kit of each participant.

    Raises:
        ConfigError: a name that NVFlare does not admit; whatever else it says.
    """
    names = [p["name"] for p in content["participants"] if p["type"] == "client"]
    bad = [name for name in names if name not in site_names([name])]
    if bad:
        raise ConfigError(
            f"NVFlare admits no site of the name {', '.join(map(repr, bad))}.",
            fix="Use letters, digits, '-' and '_', as in `medfed nvflare export`'s answer.",
        )
    out.mkdir(parents=True, exist_ok=True)
    file = out / PROJECT
    file.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", str(file), "-w", str(out), "--force"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    made = sorted((out / content["name"]).glob("prod_*"))
    if done.returncode or not made:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ConfigError(f"nvflare provision failed: {said[-1] if said else 'it said nothing'}.", where=str(file))
    kits = {p["name"]: made[-1] / p["name"] for p in content["participants"]}
    for participant in content["participants"]:
        if participant["type"] in ("server", "client"):
            close_kit(kits[participant["name"]], ALLOWED[participant["type"] == "client"], storage)
    return kits


def close_kit(kit: Path, allowed: str, storage: Path | None = None) -> Path:
    """Closes a kit: only one class may be built, no job may bring code, and no log is streamed.

    Writes ``local/resources.json`` and ``local/authorization.json``.  Both are needed: NVFlare does not look at the
    list of classes where a job brings code.

    Args:
        kit: a startup kit.
        allowed: the class.
        storage: where a server keeps its list of jobs.
    """
    local = kit / "local"
    resources = json.loads((local / "resources.json.default").read_text(encoding="utf-8"))
    resources |= {"class_allow_list": [allowed], "class_list_enforcement_mode": "enforce"}
    if "allow_log_streaming" in resources:
        resources["allow_log_streaming"] = False
    resources["components"] = [c for c in resources.get("components", []) if c.get("id") != "site_log_streamer"]
    if storage is not None and "snapshot_persistor" in resources:
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(storage / "snapshots")
        manager = next(c for c in resources["components"] if c["id"] == "job_manager")
        manager["args"]["uri_root"] = str(storage / "jobs")
    path = local / "resources.json"
    path.write_text(json.dumps(resources, indent=2), encoding="utf-8")
    rules = json.loads((local / "authorization.json.default").read_text(encoding="utf-8"))
    (local / "authorization.json").write_text(json.dumps(_without_code(rules), indent=2), encoding="utf-8")
    return path


def _without_code(rules: dict[str, Any]) -> dict[str, Any]:
    """NVFlare's rules of who may do what, without the rights to bring code; a role that may do all is written out."""
    roles = rules["permissions"]
    commands = {name for key, name in vars(AdminCommandNames).items() if not key.startswith("_")}
    every = sorted(commands.union(*(held for held in roles.values() if isinstance(held, dict))))
    written = {name: held if isinstance(held, dict) else dict.fromkeys(every, held) for name, held in roles.items()}
    return {**rules, "permissions": {name: {**held, **dict.fromkeys(CODE, "none")} for name, held in written.items()}}
