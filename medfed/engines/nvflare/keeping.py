"""A participant on this machine by its startup kit: whether it runs, with what, and how to stop it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from medfed.engines.nvflare.participant import FILES, MODULES, healthy
from medfed.errors import ConfigError, FederationError, MedfedError
from medfed.ledger import LEDGER, read_ledger
from medfed.rundir import META, RunFolder

RUNS, SITE_REPORT, SITE_ERRORS = "runs", "site.json", "errors.log"  # as in plan.py and hosting.py, heavy to import
DAEMON, SHUTDOWN = "daemon_pid.fl", "shutdown.fl"  # of NVFlare's start.sh


def role_of(kit: Path) -> str:
    """``server`` or ``site``, by the files of a kit.

    Raises:
        ConfigError: it is an administrator's kit, or none.
    """
    for role, file in FILES.items():
        if (kit / "startup" / file).is_file():
            return role
    admin = (kit / "startup" / "fed_admin.json").is_file()
    what = "this is an administrator's kit: there is nothing to start." if admin else "this is no startup kit."
    raise ConfigError(what, where=str(kit), fix="Give the folder of the server's or of a site's kit.")


def process_of(kit: Path) -> psutil.Process | None:
    """NVFlare's process of a kit, however it was started; None where there is none."""
    module, folder = MODULES[role_of(kit)], str(kit.absolute())
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if module in words and folder in words:
                return process
    return None


def stop(kit: Path, limit: float = 60.0) -> None:
    """Ends NVFlare's process of a kit, as NVFlare's ``stop_fl.sh`` does, without its question.

    Args:
        kit: the startup kit.
        limit: seconds to wait for the end.

    Raises:
        FederationError: it does not run, or does not end.
    """
    process = process_of(kit)
    if process is None:
        raise FederationError("does not run.", where=str(kit))
    if _kept_alive(kit):  # the loop of start.sh would start it again
        (kit / SHUTDOWN).touch()
    else:
        process.terminate()
    try:
        process.wait(limit)
    except psutil.TimeoutExpired:
        raise FederationError(f"process {process.pid} did not end within {limit:g} s.", where=str(kit)) from None


def _kept_alive(kit: Path) -> bool:
    try:
        return psutil.pid_exists(int((kit / DAEMON).read_text()))
    except (OSError, ValueError):
        return False


def status(kit: Path) -> Iterator[str]:
    """How a participant and its runs stand, in lines.

    Raises:
        ConfigError: it is no kit.
    """
    role, process = role_of(kit), process_of(kit)
    if process is None:
        yield f"{kit.name} ({role}): does not run"
    else:
        words = ("listens", "does not listen") if role == "server" else ("is connected", "is not connected")
        state = words[0] if healthy(role, kit) else words[1]
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(process.create_time()))
        yield f"{kit.name} ({role}): runs since {since}, {state}"
    folder = kit / RUNS
    runs = sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime) if folder.is_dir() else []
    for run in (r for r in runs if r.is_dir()):
        if role == "site":
            yield from _at_site(run)
        elif (run / META).is_file():  # what MLflow keeps lies there too
            yield from _at_server(run)


def _at_server(run: Path) -> Iterator[str]:
    folder = RunFolder(run)
    try:
        meta = folder.meta()
    except MedfedError as error:
        yield f"run {run.name}: {error.what}"
        return
    # What stands behind the last end of a line was torn by a crash, or is being written.
    lines = folder.records.read_bytes().split(b"\n")[:-1] if folder.records.is_file() else []
    state = meta.get("status")
    if state == "running" and not _held(run / ".lock"):
        state = "broken off (submit its job again)"
    yield f"run {run.name}: {meta.get('method')}, {state}, round {len(lines)} of {meta.get('rounds')}"
    if lines:
        record = json.loads(lines[-1])
        yield f"  last round: {len(record['admitted'])} of {len(record['asked'])} sites counted"
        yield from (f"  {r['client']}: {r['reason']}" for r in record["refused"])


def _held(path: Path) -> bool:
    """Whether a process has the lock of a run: one that was killed leaves the file, and not the lock."""
    if not path.is_file():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True


def _at_site(run: Path) -> Iterator[str]:
    for own in sorted(p for p in run.iterdir() if p.is_dir()):
        report, told = _json(own / SITE_REPORT), [f"run {run.name}"]
        if report:
            told += [f"{report['method'].get('name')}", f"{report['training_images']} training images"]
            if report["held_out_images"]:
                told += [f"{report['held_out_images']} held out (tells {report['tells_of_them']} of them)"]
        yield ": ".join((told[0], ", ".join(told[1:]))) if told[1:] else told[0]
        for key, value in (report.get("overrides") or {}).items():
            yield f"  overrides {key}: {json.dumps(value)}"
        if not (own / LEDGER).is_file():
            yield "  nothing was sent yet"
            continue
        try:
            sent = read_ledger(own / LEDGER)
        except MedfedError as error:
            yield f"  {error.what}"
            continue
        if sent:
            last = sent[-1]
            what = f"refused: {last['reason']}" if last["kind"] == "refusal" else last.get("task")
            yield f"  {len(sent)} messages sent, the last at {last['time'][:19]} in round {last.get('round')} ({what})"
        if (own / SITE_ERRORS).is_file():
            yield f"  what went wrong here: {own / SITE_ERRORS}"


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or torn by a crash: the site writes it anew when it begins again
        return {}
    return content if isinstance(content, dict) else {}
