"""Processes whose parent was killed: they end, with all that they started, instead of working on unseen."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from filelock import FileLock

from medfed.engines.nvflare import serving
from medfed.errors import FederationError


def started(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)


def gone(pids, seconds=30.0) -> bool:
    def alive(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    until = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_a_process_ends_with_the_one_that_started_it():
    parent = started(
        """
        import os, time
        from medfed.orphans import when_orphaned
        me = os.getpid()
        child = os.fork()
        if child == 0:
            when_orphaned(me, lambda: os._exit(1))
        else:
            print(child, flush=True)
        time.sleep(600)
        """
    )
    child = int(parent.stdout.readline())
    assert not gone([child], 1.5)
    parent.kill()
    parent.wait()
    assert gone([child])


def test_a_simulation_ends_with_the_run_that_started_it_and_so_do_its_sites():
    """Left alone it went on unseen, while a resumed run began a second one on the same folder."""
    simulator = """
        import subprocess, sys, time
        from medfed.engines.nvflare import simulator
        class Runner:
            def __init__(self, **options): pass
            def run(self):
                site = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
                print(site.pid, flush=True)
                time.sleep(600)
        simulator.SimulatorRunner = Runner
        simulator.main("job", "workspace", "site", "1", sys.argv[1])
    """
    parent = started(
        f"""
        import os, subprocess, sys, time
        code = {textwrap.dedent(simulator)!r}
        process = subprocess.Popen([sys.executable, "-c", code, str(os.getpid())], start_new_session=True)
        print(process.pid, flush=True)
        time.sleep(600)
        """
    )
    pids = [int(parent.stdout.readline()), int(parent.stdout.readline())]
    assert not gone(pids, 1.5)
    parent.kill()
    parent.wait()
    assert gone(pids)


def test_a_simulation_waits_for_the_server_of_an_earlier_one(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "PATIENCE", 0.2)
    with (
        FileLock(tmp_path / ".server.lock"),
        pytest.raises(FederationError, match="earlier simulation"),
        serving._alone(tmp_path),
    ):
        pass
    with serving._alone(tmp_path):
        assert os.path.exists(tmp_path / ".server.lock")
