"""Tracking through a real MLflow server on loopback: an outage, then catching up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from test_mlflow_sink import add, assert_complete, make_run, tracker

from medfed.tracking.settings import TrackingSettings
from medfed.tracking.sync import sync


def start_server(port: int, folder) -> subprocess.Popen:
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", str(folder / "artifacts")),
    ]
    server = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    for _ in range(240):
        try:
            if urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).status == 200:
                return server
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    stop(server)
    raise AssertionError("the server did not start")


def stop(server: subprocess.Popen) -> None:
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@pytest.mark.slow
def test_server_dies_in_the_middle_and_sync_catches_up(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    run = make_run(tmp_path)
    (run / "report.html").write_text("<p>report</p>")
    track = tracker(run, uri=uri)
    server = start_server(port, tmp_path)
    try:
        track.start()
        add(run, 1, 2)
        track.push()
        assert_complete(run, 2, MlflowClient(tracking_uri=uri))
    finally:
        stop(server)
    started = time.perf_counter()
    for r in range(3, 8):
        add(run, r)
        track.clock.now += 1000
        track.push()
    track.finish("finished", ["report.html"])
    assert time.perf_counter() - started < 2
    server = start_server(port, tmp_path)
    try:
        report = sync(run, TrackingSettings(uri=uri))
        assert report.rounds == (3, 4, 5, 6, 7)
        assert report.artifacts == ("report.html",)
        assert report.runs == 0
        client = MlflowClient(tracking_uri=uri)
        runs = assert_complete(run, 7, client)
        assert {r.info.status for r in runs.values()} == {"FINISHED"}
        assert [a.path for a in client.list_artifacts(runs[""].info.run_id)] == ["report.html"]
        assert sync(run, TrackingSettings(uri=uri)).metrics == 0
    finally:
        stop(server)
