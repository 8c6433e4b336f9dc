"""``medfed run`` in NVFlare's simulator: server and sites in processes of this machine, on one stored condition."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfed.engines.nvflare.jobs import ALLOWED, write_job
from medfed.engines.nvflare.participant import ARENAS
from medfed.engines.nvflare.plan import ServerPlan, Simulation, site_names, site_plan
from medfed.engines.nvflare.shares import write_share
from medfed.errors import FederationError
from medfed.federation.client import Request
from medfed.federation.loop import Listener
from medfed.federation.server import Patience, Server
from medfed.federation.state import ServerState
from medfed.rundir import RunFolder, now

if TYPE_CHECKING:
    from medfed.experiment import Prepared, Say

LOOK = 0.3


def simulate(
    prepared: Prepared, folder: RunFolder, workers: int, *, say: Say, listeners: Sequence[Listener] = ()
) -> None:
    """Runs what remains of a run in NVFlare's simulator.

    Args:
        prepared: the run.
        folder: its folder; what NVFlare writes goes to ``nvflare/`` in it.
        workers: sites that run at once.
        say: told in one line what is going on.
        listeners: told of every finished round.

    Raises:
        FederationError: the simulation ended before the last round.
    """
    experiment, meta = prepared.experiment, folder.meta()
    base = folder.path / "nvflare"
    shutil.rmtree(base, ignore_errors=True)
    sites = site_names(prepared.condition.clients)
    shards = prepared.shards()
    for client in prepared.condition.clients:
        write_share(shards, client, base / "shares", own_images=False)
    at = Simulation(
        shares=str((base / "shares").resolve()),
        clients=str(folder.clients.resolve()),
        device=meta["hardware"]["device"],
        threads=meta["hardware"]["threads"],
    )
    server = ServerPlan(
        run=meta["uid"],
        sites=sites,
        max_message_mb=experiment.engine.max_message_mb,
        experiment=experiment.model_dump(mode="json"),
        folder=str(folder.path.resolve()),
        cwd=os.getcwd(),
    )
    plan = site_plan(experiment, prepared.bundle, meta["uid"], sites, at)
    least = min(experiment.participation.quorum, len(sites))
    job = write_job(base / "job", experiment.name, server, plan, least=least, interval=0.1)
    say(f"NVFlare's simulator runs {len(sites)} sites, {min(workers, len(sites))} at once; log: {base / 'log.txt'}")
    with _workspace(base) as workspace, open(base / "log.txt", "wb") as log:
        (workspace / "local").mkdir(parents=True)
        (workspace / "local" / "resources.json").write_text(json.dumps({"class_allow_list": list(ALLOWED)}))
        command = [sys.executable, "-m", "medfed.engines.nvflare.simulator", str(job.resolve()), str(workspace)]
        process = subprocess.Popen(
            [*command, ",".join(sites), str(min(workers, len(sites))), str(os.getpid())],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={"MALLOC_ARENA_MAX": ARENAS, **os.environ},  # as in the kits of real participants
        )
        try:
            _follow(process, prepared, folder, listeners)
        except BaseException:
            folder.write_meta(status="interrupted", finished=now())
            say(f"Interrupted. Go on with: medfed resume {folder.path}")
            raise
        finally:
            _end(process)
    status = folder.meta()
    if status["status"] != "completed":
        folder.write_meta(status="failed", finished=now())
        say(f"Failed. Go on with: medfed resume {folder.path}")
        raise FederationError(
            f"the simulation ended with {status['status']} (exit code {process.returncode}): "
            f"{status.get('error') or 'no reason was given'}",
            where=str(base / "log.txt"),
            fix="See that log.",
        )


def _follow(
    process: subprocess.Popen[bytes], prepared: Prepared, folder: RunFolder, listeners: Sequence[Listener]
) -> None:
    """Tells of every round that the server's process has written down, until it ends."""
    told = folder.records.read_bytes().count(b"\n") if folder.records.exists() else 0
    while True:
        ended = process.poll() is not None
        told += _tell(folder, told, prepared, listeners)
        if ended:
            return
        time.sleep(LOOK)


def _tell(folder: RunFolder, told: int, prepared: Prepared, listeners: Sequence[Listener]) -> int:
    if not listeners or not folder.records.exists():
        return 0
    lines = folder.records.read_bytes().split(b"\n")[:-1][told:]
    for line in lines:
        record = json.loads(line)
        server = Server(
            _Elsewhere(prepared.condition.clients),
            ServerState({}, record["round"]),
            prepared.task,
            rounds=prepared.experiment.rounds,
        )
        for listener in listeners:
            listener(record, server)
    return len(lines)


class _Elsewhere:
    """Stands for the engine in the process that only looks on."""

    def __init__(self, clients: tuple[str, ...]):
        self.clients = clients

    def exchange(self, request: Request, clients: Sequence[str], patience: Patience) -> Any:
        """Not from here."""
        raise FederationError("the server is in another process.")

    def close(self) -> None:
        """Nothing to end."""


@contextlib.contextmanager
def _workspace(base: Path) -> Any:
    # NVFlare's simulator breaks a path with blanks or quotes into words.
    wanted = (base / "workspace").resolve()
    if shlex.split(str(wanted)) == [str(wanted)]:
        yield wanted
        return
    with tempfile.TemporaryDirectory(prefix="medfed-") as folder:
        yield Path(folder) / "workspace"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the simulator; its sites notice and end themselves."""
    if process.poll() is not None:
        return
    for word in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, word)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)  # a grid gives a cell ten seconds for its end
            return
