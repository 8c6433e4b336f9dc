"""A provisioned federation of separate processes on loopback: server, sites and administrator with mutual TLS."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))

import psutil
import yaml
from experiments import environment, free_ports

from medfed.engines.nvflare.plan import RUNS, ServerPlan, read_plan

SERVER, ADMIN = "localhost", "admin@hospital.org"
MODULES = {True: "nvflare.private.fed.app.server.server_train", False: "nvflare.private.fed.app.client.client_train"}


def medfed(*args: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "medfed", *map(str, args)], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr


class Secure:
    """One federation: each participant its own folder and process.

    Args:
        root: where everything is kept.
        data: the experiment.
        sites: names of the sites.
    """

    def __init__(self, root: Path, data: dict[str, Any], sites: list[str]):
        self.root, self.sites = root, sites
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.sessions: list[Any] = []
        root.mkdir(parents=True, exist_ok=True)
        self.export(data)
        medfed("nvflare", "shares", self.config, root / "shares")
        self.ports = free_ports(2)
        self.kits = self.provision("fed", sites)
        for site in sites:
            shutil.copytree(root / "shares" / site, self.kits / site / "local", dirs_exist_ok=True)
            with open(self.kits / site / "local" / "site.yaml", "a") as file:
                file.write("threads: 1\n")  # the weights' last bits are those of a number of threads

    def export(self, data: dict[str, Any], name: str = "job") -> None:
        """Makes another job for the same sites; from then on it is the one that is meant."""
        self.config, self.job = self.root / f"{name}.yaml", self.root / name
        self.config.write_text(yaml.safe_dump(data))
        medfed("nvflare", "export", self.config, self.job)

    def provision(self, name: str, sites: list[str]) -> Path:
        ports = ("--port", self.ports[0], "--admin-port", self.ports[1], "--storage", self.root / "storage")
        who = ("--sites", ",".join(sites), "--server", SERVER, "--admin", ADMIN)
        medfed("nvflare", "provision", self.root / name, *who, *ports)
        return self.root / name / "medfed" / "prod_00"

    def start(self, name: str, kit: Path | None = None) -> None:
        """What a kit's ``start.sh`` runs, without its loop that starts it again."""
        server, kit = name == SERVER, kit or self.kits / name
        settings = ["secure_train=true", "org=medfed", "config_folder=config", *([] if server else [f"uid={name}"])]
        file = "fed_server.json" if server else "fed_client.json"
        command = [sys.executable, "-u", "-m", MODULES[server], "-m", str(kit), "-s", file, "--set", *settings]
        with open(self.root / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment(), cwd=kit, start_new_session=True
            )

    def family(self, name: str) -> list[psutil.Process]:
        """A participant's process and those of its job."""
        try:
            process = psutil.Process(self.processes[name].pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def signal(self, name: str, word: signal.Signals) -> None:
        for process in self.family(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(word)

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        self.processes.pop(name).wait(30)

    def start_all(self) -> Any:
        self.start(SERVER)
        time.sleep(3)
        for site in self.sites:
            self.start(site)
        return self.connect()

    def connect(self) -> Any:
        """A session of the administrator, when all sites are connected."""
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        session = new_secure_session(ADMIN, str(self.kits / ADMIN), timeout=120)
        self.sessions.append(session)
        self.until(lambda: self.connected(session) == self.sites, 180, "all sites are connected")
        return session

    @staticmethod
    def connected(session: Any) -> list[str]:
        return sorted(client.name for client in session.get_system_info().client_info)

    def submit(self, session: Any) -> str:
        return session.submit_job(str(self.job))

    def finish(self, session: Any, job: str, limit: float = 600) -> str:
        self.until(lambda: session.get_job_meta(job)["status"].startswith("FINISHED"), limit, "the job ends")
        return session.get_job_meta(job)["status"]

    @property
    def run(self) -> Path:
        """The run's folder at the server."""
        return self.kits / SERVER / RUNS / read_plan(ServerPlan, self.job / "medfed_server" / "config").run

    def memory(self, site: str) -> Path:
        """Where a site keeps its memory and its ledger of the run."""
        return self.kits / site / RUNS / self.run.name / site

    def records(self) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError):
            return [json.loads(line) for line in (self.run / "records.jsonl").read_text().splitlines()]
        return []

    def until(self, condition: Callable[[], bool], limit: float, what: str) -> None:
        deadline = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < deadline, f"waited {limit} s in vain: {what}; {self.records()[-1:]}"
            time.sleep(0.3)

    def rounds(self, more: int, limit: float = 600) -> None:
        """Waits for some more rounds."""
        begun = len(self.records())
        self.until(lambda: len(self.records()) >= begun + more, limit, f"{more} more rounds")

    def close(self) -> None:
        for session in self.sessions:  # its threads would keep the tests' process from ending
            with contextlib.suppress(Exception):
                session.close()
        for name in list(self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.kill(name)
