"""Starts a server or a site from its startup kit, in the foreground: what a container or a service manager runs.

A kit's own ``start.sh`` goes to the background and fails late and far from the cause. Here the kit is looked at first;
what is wrong with it is one message and exit code 2. Nothing heavy is imported, so that a health check is cheap.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from medfed.errors import ConfigError, MedfedError

ROLES = ("server", "site")
FILES = {"server": "fed_server.json", "site": "fed_client.json"}
MODULES = {
    "server": "nvflare.private.fed.app.server.server_train",
    "site": "nvflare.private.fed.app.client.client_train",
}
ADMITTED = {  # as in jobs.py, which is heavy to import
    "server": "medfed.engines.nvflare.controller.MedfedController",
    "site": "medfed.engines.nvflare.executor.MedfedExecutor",
}
# Rights of NVFlare to bring code with a job, or to have a Flower application run that lies at the server.
CODE = ("byoc", "server-predeployed-flwr")
SITE_FILE = "site.yaml"
ARENAS = "4"  # of glibc's malloc


@dataclass(frozen=True)
class Kit:
    """What a startup kit says.

    Args:
        folder: the kit, which is also NVFlare's workspace.
        role: ``server`` or ``site``.
        name: of the participant, from its certificate.
        org: its organisation, from its certificate.
        port: of the server, that sites connect to.
    """

    folder: Path
    role: str
    name: str
    org: str
    port: int


def read_kit(role: str, folder: Path) -> Kit:
    """Reads a startup kit and checks that a participant can start from it.

    Args:
        role: ``server`` or ``site``.
        folder: the kit.

    Raises:
        ConfigError: it is no kit, another's kit, incomplete, not readable, not this project's, expired or not closed; a
            site has no valid ``site.yaml``.
    """
    if not folder.is_dir():
        raise ConfigError("there is no such folder.", where=str(folder), fix="Mount the startup kit there.")
    startup = folder / "startup"
    settings = read_settings(role, startup)
    try:
        port = int(settings["servers"][0]["service"]["target"].rpartition(":")[2])
        of_site = settings["servers"][0] if role == "server" else settings["client"]
        paths = [startup / of_site[key] for key in ("ssl_cert", "ssl_root_cert", "ssl_private_key")]
    except (LookupError, TypeError, ValueError, AttributeError):
        where = str(startup / FILES[role])
        raise ConfigError("names no server or no certificate.", where=where, fix="Ask for the kit again.") from None
    name, org = read_certificate(*paths)
    check_closed(role, folder / "local" / "resources.json")
    check_no_code(folder / "local" / "authorization.json")
    if not os.access(folder, os.W_OK):
        raise ConfigError(
            f"user {os.getuid()} may not write here.", where=str(folder), fix="Give the folder to that user."
        )
    if role == "site":
        check_site(folder / "local" / SITE_FILE)
    return Kit(folder, role, name, org, port)


def read_settings(role: str, startup: Path) -> dict[str, Any]:
    """The content of a kit's ``fed_server.json`` or ``fed_client.json``.

    Raises:
        ConfigError: it is not there, or not readable as JSON.
    """
    path = startup / FILES[role]
    if not path.is_file():
        others = {FILES["server"]: "the server's", FILES["site"]: "a site's", "fed_admin.json": "an administrator's"}
        found = [whose for name, whose in others.items() if (startup / name).is_file()]
        what = (
            f"this is {found[0]} startup kit"
            if found
            else "this is no startup kit: startup/" + path.name + " is missing"
        )
        raise ConfigError(f"{what}.", where=str(startup.parent), fix=f"Mount the kit of {article(role)} there.")
    data = read_json(path)
    if not isinstance(data, dict):
        raise ConfigError("is not an object of JSON.", where=str(path), fix="Ask for the kit again.")
    return data


def article(role: str) -> str:
    """The role with its article."""
    return "the server" if role == "server" else "this site"


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        ConfigError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(read_bytes(path))
    except ValueError:
        raise ConfigError("is not valid JSON.", where=str(path), fix="Ask for the kit again.") from None


def read_bytes(path: Path) -> bytes:
    """The content of a file of the kit.

    Raises:
        ConfigError: it is not there, or may not be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError("is missing.", where=str(path), fix="Copy the whole kit.") from None
    except OSError as error:
        fix = f"Give the kit to user {os.getuid()}."
        raise ConfigError(f"cannot be read: {error.strerror}.", where=str(path), fix=fix) from None


def read_certificate(cert_file: Path, root_file: Path, key_file: Path) -> tuple[str, str]:
    """Name and organisation of a certificate that is in force, the project's own and fits its key.

    Raises:
        ConfigError: it is not.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import NameOID

    contents = [read_bytes(path) for path in (cert_file, root_file, key_file)]
    again = "Ask for the kit again."
    try:
        cert, root = (x509.load_pem_x509_certificate(data) for data in contents[:2])
        key = load_pem_private_key(contents[2], password=None)
        name, org = (
            str(cert.subject.get_attributes_for_oid(oid)[0].value)
            for oid in (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME)
        )
    except (ValueError, TypeError, LookupError):
        raise ConfigError("certificates or key are damaged.", where=str(cert_file.parent), fix=again) from None
    try:
        cert.verify_directly_issued_by(root)
    except (InvalidSignature, ValueError, TypeError):
        what = f"was not issued by {root_file.name}: files of two projects are mixed."
        raise ConfigError(what, where=str(cert_file), fix=again) from None
    if cert.public_key() != key.public_key():
        raise ConfigError(f"does not belong to {cert_file.name}.", where=str(key_file), fix=again)
    now = datetime.now(timezone.utc)
    if now >= cert.not_valid_after_utc:
        raise ConfigError(f"expired on {cert.not_valid_after_utc:%Y-%m-%d}.", where=str(cert_file), fix=again)
    if now < cert.not_valid_before_utc:
        what = f"is valid from {cert.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on."
        raise ConfigError(what, where=str(cert_file), fix="Set the clock of this machine.")
    return name, org


def check_closed(role: str, path: Path) -> None:
    """Checks that a job may build medfed's class and no other.

    Raises:
        ConfigError: it may build others.
    """
    fix = "Make kits with `medfed nvflare provision`; docs/deployment.md says what to write by hand."
    data = read_json(path) if path.is_file() else {}
    data = data if isinstance(data, dict) else {}
    if (data.get("class_list_enforcement_mode"), data.get("class_allow_list")) != ("enforce", [ADMITTED[role]]):
        raise ConfigError("does not confine jobs to medfed's class.", where=str(path), fix=fix)


def check_no_code(path: Path) -> None:
    """Checks that no role may bring code with a job, which would pass by NVFlare's list of classes.

    Raises:
        ConfigError: one may.
    """
    data = read_json(path) if path.is_file() else {}
    roles = data.get("permissions") if isinstance(data, dict) else None
    held = list(roles.values()) if isinstance(roles, dict) else []
    if not held or not all(isinstance(rights, dict) and not _brings_code(rights) for rights in held):
        fix = "Make kits with `medfed nvflare provision`; docs/deployment.md says what to write by hand."
        raise ConfigError("lets a job bring code of its own.", where=str(path), fix=fix)


def _brings_code(rights: dict[str, Any]) -> bool:
    return any(rights.get(right, "none") != "none" for right in CODE)


def check_site(path: Path) -> None:
    """Checks that the site's own settings are there and valid.

    Raises:
        ConfigError: they are not.
    """
    if not path.is_file():
        raise ConfigError("is missing.", where=str(path), fix="Write it: docs/deployment.md, site.yaml.")
    from medfed.engines.nvflare.site_settings import read_site

    read_site(path)


def command(kit: Kit) -> list[str]:
    """What a kit's ``start.sh`` runs in the end, but for its folder of custom code."""
    own = [f"uid={kit.name}"] if kit.role == "site" else []
    settings = ["secure_train=true", *own, f"org={kit.org}", "config_folder=config"]
    where = ["-m", str(kit.folder.absolute()), "-s", FILES[kit.role]]
    return [sys.executable, "-u", "-m", MODULES[kit.role], *where, "--set", *settings]


def healthy(role: str, folder: Path) -> bool:
    """Whether the server listens, or the site is connected to the server, by the system's table of sockets.

    Raises:
        ConfigError: the kit's settings cannot be read.
    """
    import psutil

    port = int(read_settings(role, folder / "startup")["servers"][0]["service"]["target"].rpartition(":")[2])
    sockets = psutil.net_connections("tcp")
    if role == "server":
        return any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in sockets)
    return any(s.status == psutil.CONN_ESTABLISHED and s.raddr and s.raddr.port == port for s in sockets)


def main(words: Sequence[str] | None = None) -> int:
    """Entry point: becomes NVFlare's process; a fault of the kit is one message and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m medfed.engines.nvflare.participant",
        description="Starts the server or a site of a federation in the foreground.",
    )
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("kit", type=Path, help="folder of the startup kit")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="check the kit, then stop")
    only.add_argument("--healthy", action="store_true", help="exit with 0 if it runs and is connected, else with 1")
    given = parser.parse_args(words)
    try:
        if given.healthy:
            return 0 if healthy(given.role, given.kit) else 1
        kit = read_kit(given.role, given.kit)
        if given.check:
            print(f"{kit.name}: the kit is complete.")
            return 0
        (kit.folder / "transfer").mkdir(exist_ok=True)
    except MedfedError as error:
        print(f"medfed: {error}", file=sys.stderr)
        return 2
    words = command(kit)
    # As start.sh does: without it every thread of NVFlare keeps memory of its own.
    os.environ.setdefault("MALLOC_ARENA_MAX", ARENAS)
    print(f"Starting {kit.role} {kit.name}.", flush=True)
    os.execv(words[0], words)


if __name__ == "__main__":
    sys.exit(main())
