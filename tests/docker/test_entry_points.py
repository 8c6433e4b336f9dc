"""The entry points of the images, outside a container: they start, answer, and stop when told to."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from experiments import free_ports
from image_files import COMPOSE, STAGES, entry_point, environment_of, health_check


def here(words: list[str]) -> list[str]:
    """An image's command with this environment's programs."""
    return [str(Path(sys.executable).with_name(words[0])) if words[0] != "python" else sys.executable, *words[1:]]


@contextlib.contextmanager
def running(words: list[str], folder: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with open(folder / "output.txt", "ab") as log:
        process = subprocess.Popen(words, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, seconds: float = 150) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.3)


def stopped(process: subprocess.Popen[bytes], seconds: float = 30) -> None:
    """Waits until the process and all that it started are gone."""
    process.wait(seconds)
    end = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.killpg(process.pid, 0)
            assert time.monotonic() < end, "something of it still runs"
            time.sleep(0.2)


def status(port: int, host: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        headers = {"Host": host, "Content-Type": "application/json"}
        connection.request("POST", "/api/2.0/mlflow/experiments/search", '{"max_results": 1}', headers)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


@pytest.mark.slow
def test_mlflow_starts_takes_a_run_and_stops(tmp_path, monkeypatch):
    sys.path.insert(0, str(Path(__file__).parents[1] / "tracking"))
    from mlflow import MlflowClient
    from test_mlflow_sink import add, assert_complete, make_run

    from medfed.tracking.settings import TrackingSettings
    from medfed.tracking.sync import sync

    (port,) = free_ports(1)
    image = environment_of("mlflow", STAGES)
    ours = {k: v for k, v in image.items() if k.startswith("MLFLOW_")}
    assert (ours["MLFLOW_HOST"], ours["MLFLOW_PORT"]) == ("0.0.0.0", "5000")
    ours |= {"MLFLOW_HOST": "127.0.0.1", "MLFLOW_PORT": str(port)}
    ours = {k: v.replace("/mlflow/", f"{tmp_path}/").replace(":5000", f":{port}") for k, v in ours.items()}
    ours["MLFLOW_BACKEND_STORE_URI"] = f"sqlite:///{tmp_path}/mlflow.db"
    env = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")} | ours | {"OMP_NUM_THREADS": "1"}
    check = [w.replace(":5000", f":{port}") for w in here(health_check("mlflow", STAGES))]

    def healthy() -> bool:
        return subprocess.run(check, capture_output=True).returncode == 0

    assert not healthy()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "runs").mkdir()
    run = make_run(tmp_path / "runs")
    add(run, 1, 2)
    (run / "report.html").write_text("<p>report</p>")
    with running(here(entry_point("mlflow", STAGES)), tmp_path, env) as server:
        until(healthy, server, tmp_path / "output.txt")
        assert status(port, f"mlflow:{port}") == 200  # as the server of the federation calls it
        assert status(port, "elsewhere.example.org") == 403
        uri = f"http://127.0.0.1:{port}"
        assert sync(run, TrackingSettings(uri=uri)).rounds == (1, 2)
        assert_complete(run, 2, MlflowClient(tracking_uri=uri))
        server.send_signal(signal.SIGTERM)
        stopped(server)
    assert (tmp_path / "mlflow.db").stat().st_size > 0
    assert not healthy()


@pytest.mark.slow
def test_server_and_site_connect_and_stop(tmp_path):
    """By the kits of a project, on free ports; what they then do is shown in tests/engines/nvflare."""
    pytest.importorskip("nvflare")
    from medfed.engines.nvflare.provisioning import project, provision

    port, admin = free_ports(2)
    content = project("trial", "localhost", ["north"], "admin@hospital.org", org="city", port=port, admin_port=admin)
    kits = provision(content, tmp_path / "fed", tmp_path / "storage")
    (kits["north"] / "local" / "site.yaml").write_text("cohort: {reader: folder, root: /data}\ndevice: cpu\n")
    env = dict(os.environ) | {k: environment_of("site", STAGES)[k] for k in ("MALLOC_ARENA_MAX", "USER")}
    env["OMP_NUM_THREADS"] = "1"

    def healthy(target: str, name: str) -> bool:
        words = [w.replace("/kit", str(kits[name])) for w in here(health_check(target, STAGES))]
        return subprocess.run(words, capture_output=True, env=env).returncode == 0

    def start(target: str, name: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        return running([*here(entry_point(target, STAGES)), str(kits[name])], kits[name], env)

    def status_by_admin() -> str:
        """The words of the compose file's administrator."""
        command = yaml.safe_load(COMPOSE.read_text())["services"]["admin"]["command"]
        words = [w.replace("/kit", str(kits["admin@hospital.org"])) for w in here(command)]
        done = subprocess.run(words, capture_output=True, text=True, env=env | {"HOME": str(tmp_path)}, timeout=100)
        return done.stdout

    with start("server", "localhost") as server:
        until(lambda: healthy("server", "localhost"), server, kits["localhost"] / "output.txt")
        assert not healthy("site", "north")
        with start("site", "north") as site:
            until(lambda: healthy("site", "north"), site, kits["north"] / "output.txt")
            until(lambda: "north" in status_by_admin(), server, kits["localhost"] / "output.txt")
            site.send_signal(signal.SIGTERM)
            stopped(site)
        server.send_signal(signal.SIGTERM)
        stopped(server)
    assert "Starting server localhost." in (kits["localhost"] / "output.txt").read_text()
    assert not healthy("server", "localhost")
