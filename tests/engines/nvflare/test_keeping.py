"""A participant by its kit: does it run, with what, and how it is stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from filelock import FileLock
from typer.testing import CliRunner

from medfed import rundir
from medfed.cli import app
from medfed.engines.nvflare import hosting, jobs, keeping, participant, plan
from medfed.engines.nvflare.keeping import process_of, role_of, status, stop
from medfed.errors import ConfigError, FederationError
from medfed.federation.messages import Message
from medfed.ledger import LEDGER, Ledger
from medfed.rundir import RunFolder


@pytest.fixture
def kit(tmp_path):
    startup = tmp_path / "north" / "startup"
    startup.mkdir(parents=True)
    target = {"servers": [{"service": {"target": "localhost:1"}}]}
    (startup / "fed_client.json").write_text(json.dumps(target))
    return tmp_path / "north"


@pytest.fixture
def running(kit):
    """A process that looks like NVFlare's of this kit, and one of another kit."""
    code = [sys.executable, "-c", "import time; time.sleep(60)", participant.MODULES["site"], "-m"]
    made = [subprocess.Popen([*code, str(folder)]) for folder in (kit.parent / "south", kit)]
    # Popen returns a moment before the kernel shows the command line.
    until = time.monotonic() + 30
    while not all(psutil.Process(p.pid).cmdline() for p in made) and time.monotonic() < until:
        time.sleep(0.01)
    yield made[1]
    for process in made:
        process.kill()
        process.wait()


def test_names_that_are_written_twice_are_the_same():
    assert (keeping.RUNS, keeping.SITE_REPORT, keeping.SITE_ERRORS) == (plan.RUNS, hosting.REPORT, hosting.ERRORS)
    assert {"server": jobs.ALLOWED[0], "site": jobs.ALLOWED[1]} == participant.ADMITTED


def test_a_process_is_found_by_its_kit_and_ended(kit, running):
    found = process_of(kit)
    assert found is not None
    assert found.pid == running.pid
    stop(kit)
    running.wait(5)
    assert process_of(kit) is None
    with pytest.raises(FederationError, match="does not run"):
        stop(kit)


def test_what_start_sh_would_start_again_is_asked_to_end(kit, running):
    """Where NVFlare's loop keeps it alive a word of NVFlare's ends both; nobody listens to it here."""
    (kit / keeping.DAEMON).write_text(str(running.pid))
    with pytest.raises(FederationError, match="did not end within"):
        stop(kit, 0.2)
    assert (kit / keeping.SHUTDOWN).is_file()


@pytest.mark.parametrize(("file", "words"), [("fed_admin.json", "an administrator's kit"), ("x", "no startup kit")])
def test_what_is_no_kit_of_a_participant_is_told(tmp_path, file, words):
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / file).touch()
    with pytest.raises(ConfigError, match=words):
        role_of(tmp_path)
    for command in ("start", "stop", "status"):
        done = CliRunner().invoke(app, ["nvflare", command, str(tmp_path)])
        assert words in str(done.exception)


def test_a_site_reads_how_its_runs_stand(kit):
    own = kit / "runs" / "r1" / "north"
    own.mkdir(parents=True)
    report = {"method": {"name": "fedism"}, "training_images": 80, "held_out_images": 20, "tells_of_them": "counts"}
    (own / "site.json").write_text(json.dumps({**report, "overrides": {"batch_size": 8}}))
    assert list(status(kit))[3] == "  nothing was sent yet"
    ledger = Ledger(own / LEDGER)
    ledger.append(b"x", Message(), client="north", kind="reply", task="train", round=3)
    said = list(status(kit))
    assert said[0] == "north (site): does not run"
    assert said[1] == "run r1: fedism, 80 training images, 20 held out (tells counts of them)"
    assert said[2] == "  overrides batch_size: 8"
    assert said[3].startswith("  1 messages sent, the last at ")
    assert said[3].endswith(" in round 3 (train)")
    ledger.append(b"x", None, client="north", kind="refusal", reason="cannot take part", round=4)
    (own / "errors.log").touch()
    assert "(refused: cannot take part)" in list(status(kit))[3]
    assert list(status(kit))[4] == f"  what went wrong here: {own / 'errors.log'}"


def test_a_server_reads_how_its_runs_stand(kit):
    (kit / "startup" / "fed_client.json").rename(kit / "startup" / "fed_server.json")
    run = kit / "runs" / "r1"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"method": "fedism", "status": "running", "rounds": 9}))
    record = {"asked": ["a", "b"], "admitted": ["a"], "refused": [{"client": "b", "reason": "is not connected"}]}
    (run / "records.jsonl").write_text(json.dumps(record) + "\n")
    with FileLock(run / ".lock"):
        done = CliRunner().invoke(app, ["nvflare", "status", str(kit)])
    assert done.exit_code == 0
    (run / ".lock").touch()  # left by a server that was killed
    broken_off = "run r1: fedism, broken off (submit its job again), round 1 of 9"
    assert list(status(kit))[1] == broken_off
    (run.parent / "mlartifacts").mkdir()  # of MLflow, where the server keeps its record in a file
    with FileLock(run / ".lock"):
        assert CliRunner().invoke(app, ["nvflare", "status", str(kit)]).output == done.output
    assert done.output.splitlines() == [
        "north (server): does not run",
        "run r1: fedism, running, round 1 of 9",
        "  last round: 1 of 2 sites counted",
        "  b: is not connected",
    ]


@pytest.mark.parametrize("torn", ['{"round": 2, "adm', '{"round": 2}', ""])
def test_a_record_torn_by_a_crash_is_passed_over(kit, torn):
    (kit / "startup" / "fed_client.json").rename(kit / "startup" / "fed_server.json")
    run = kit / "runs" / "r1"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"method": "fedism", "status": "failed", "rounds": 9}))
    record = {"round": 1, "asked": ["a", "b"], "admitted": ["a"], "refused": []}
    (run / "records.jsonl").write_text(json.dumps(record) + "\n" + torn)
    assert list(status(kit))[1:] == ["run r1: fedism, failed, round 1 of 9", "  last round: 1 of 2 sites counted"]
    (run / "run.json").write_text('{"method"')
    assert list(status(kit))[1:] == ["run r1: its run.json is damaged."]


def test_a_report_of_a_site_torn_by_a_crash_is_passed_over(kit):
    own = kit / "runs" / "r1" / "north"
    own.mkdir(parents=True)
    (own / "site.json").write_text('{"run"')
    assert list(status(kit))[1:] == ["run r1", "  nothing was sent yet"]


def test_a_report_of_a_site_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    plan = SimpleNamespace(run="r1", method={"name": "fedism"}, bundle="bundles/x", bundle_hash="a")
    data = SimpleNamespace(training=[1, 2], held_out=None)
    settings = SimpleNamespace(overrides={}, evaluation="counts", device="cpu")
    bundle = SimpleNamespace(content_hash=lambda: "b")
    hosting.write_report(plan, data, settings, bundle, tmp_path)
    before = (tmp_path / "site.json").read_text()
    assert json.loads(before)["training_images"] == 2

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    data.training.append(3)
    with pytest.raises(OSError, match="No space"):
        hosting.write_report(plan, data, settings, bundle, tmp_path)
    assert (tmp_path / "site.json").read_text() == before


def test_a_run_begins_although_somebody_looks_at_it_just_then(tmp_path, monkeypatch):
    looks = threading.Event()

    def look():
        with FileLock(tmp_path / ".lock"):
            looks.set()
            time.sleep(0.2)

    onlooker = threading.Thread(target=look)
    onlooker.start()
    assert looks.wait(10)
    with monkeypatch.context() as patient:
        patient.setattr(rundir, "PATIENCE", 30.0, raising=False)  # a busy machine may keep the onlooker from its end
        with RunFolder(tmp_path).held():
            assert keeping._held(tmp_path / ".lock")
    onlooker.join()
    monkeypatch.setattr(rundir, "PATIENCE", 0.1, raising=False)
    with (
        FileLock(tmp_path / ".lock"),
        pytest.raises(FederationError, match="another process is running this run"),
        RunFolder(tmp_path).held(),
    ):
        pass


def test_a_start_is_checked_first(kit: Path, capsys):
    done = CliRunner().invoke(app, ["nvflare", "start", str(kit), "--check"])
    assert done.exit_code == 2
    assert "names no server or no certificate" in done.output


@pytest.mark.parametrize(("given", "found"), [(None, "4"), ("2", "2")])
def test_a_start_limits_the_arenas_of_malloc_as_start_sh_does(tmp_path, monkeypatch, given, found):
    """Otherwise each of NVFlare's threads keeps free memory of its own, and the server's process grows."""
    seen = []
    monkeypatch.setattr(participant, "read_kit", lambda role, folder: participant.Kit(folder, role, "n", "o", 1))
    monkeypatch.setattr(os, "execv", lambda path, words: seen.append(os.environ["MALLOC_ARENA_MAX"]))
    monkeypatch.setenv("MALLOC_ARENA_MAX", given) if given else monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    participant.main(["site", str(tmp_path)])
    assert seen == [found]
    monkeypatch.delenv("MALLOC_ARENA_MAX")
