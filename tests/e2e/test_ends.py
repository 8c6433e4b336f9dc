"""How a run or a cell ends where something fails: the first fault is what is said, and nothing is left open."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from grids import ran

import medfed.conducting
import medfed.grid
import medfed.running
from medfed.conducting import conduct
from medfed.errors import ConfigError, FederationError
from medfed.federation.state import ServerState
from medfed.rundir import RunFolder
from medfed.tracking.mlflow_sink import MLflowTracker
from medfed.tracking.settings import TrackingSettings


class Open:
    """An engine that knows whether it was closed."""

    clients = ("a",)
    closed = 0

    def close(self):
        self.closed += 1


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.write_meta(status="new", uid="u")
    return run


@pytest.fixture
def agreed():
    part = SimpleNamespace(fraction=1.0, quorum=1, timeout=None, grace=None, dropout=0.0)
    experiment = SimpleNamespace(participation=part, rounds=3, seed=0, tracking=TrackingSettings(enabled=False))
    method = SimpleNamespace(name="m", personal=False)
    bundle = SimpleNamespace(content_hash=lambda: "h")
    task = SimpleNamespace(classes=("a",), kind="multiclass")
    return SimpleNamespace(experiment=experiment, method=method, settings=None, task=task, bundle=bundle)


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_hides_neither_the_fault_nor_how_to_go_on(folder, agreed, monkeypatch):
    def rounds(*_, **__):
        monkeypatch.setattr(RunFolder, "write_meta", full)
        raise FederationError("the disk is full.", where="records.jsonl")

    told, ended, engine = [], [], Open()
    monkeypatch.setattr(medfed.conducting, "run_rounds", rounds)
    monkeypatch.setattr(MLflowTracker, "finish", lambda self, status, **_: ended.append(status))
    with pytest.raises(FederationError, match=r"records\.jsonl: the disk is full"):
        conduct(agreed, folder, engine, ServerState({}), None, say=told.append)
    assert (ended, engine.closed) == (["failed"], 1)
    assert "failed could not be written down" in told[0]
    assert "No space left" in told[0]
    assert told[1].endswith(f"Go on with: medfed resume {folder.path}")


@pytest.mark.parametrize("fault", [FederationError("the disk is full."), KeyboardInterrupt()], ids=["full", "stop"])
def test_a_run_whose_model_cannot_be_written_does_not_stand_as_running(folder, agreed, monkeypatch, fault):
    def save(*_, **__):
        raise fault

    told, engine = [], Open()
    monkeypatch.setattr(medfed.conducting, "run_rounds", lambda *_, **__: None)
    monkeypatch.setattr(medfed.conducting, "save_model", save)
    with pytest.raises(type(fault)):
        conduct(agreed, folder, engine, ServerState({}), None, say=told.append)
    status = "failed" if isinstance(fault, FederationError) else "interrupted"
    assert (folder.meta()["status"], engine.closed) == (status, 1)
    assert "medfed resume" in told[-1]


def test_an_engine_is_closed_where_records_are_missing_and_the_run_stands_as_it_stood(folder, agreed):
    folder.write_meta(status="completed")
    engine = Open()
    with pytest.raises(FederationError, match="not on record"):
        conduct(agreed, folder, engine, ServerState({}, round=2), None)
    assert (folder.meta()["status"], engine.closed) == ("completed", 1)


def test_an_interrupt_before_the_first_round_closes_the_engine(folder, agreed, monkeypatch):
    def stop(_):
        raise KeyboardInterrupt

    engine = Open()
    monkeypatch.setattr(MLflowTracker, "start", stop)
    with pytest.raises(KeyboardInterrupt):
        conduct(agreed, folder, engine, ServerState({}), None)
    assert (folder.meta()["status"], engine.closed) == ("interrupted", 1)


def test_workers_end_where_the_trainer_of_this_process_cannot_be_made(data, monkeypatch):
    from medfed.config import validate

    engine, prepared = Open(), medfed.running.prepare(validate(data, "test"))
    monkeypatch.setattr(medfed.running, "PoolEngine", lambda *_, **__: engine)
    monkeypatch.setattr(type(prepared), "trainer", full)
    with pytest.raises(OSError, match="No space left"):
        medfed.running.make_engine(prepared, RunFolder(Path(data["output"])), "cpu", 2, 1)
    assert engine.closed == 1


def test_workers_end_where_the_run_cannot_be_prepared(data, monkeypatch):
    from medfed.config import validate

    engine, prepared = Open(), medfed.running.prepare(validate(data, "test"))
    monkeypatch.setattr(medfed.running, "PredictionFiles", full)
    with pytest.raises(OSError, match="No space left"):
        medfed.running.federate(prepared, RunFolder(Path(data["output"])), engine, None)
    assert engine.closed == 1


def test_a_cell_that_fails_on_a_full_disk_takes_no_other_with_it(copied, monkeypatch):
    for cell in copied.cells[1:3]:
        (cell.folder / "run.json").unlink()
    genuine, reasons = Path.write_text, iter([RuntimeError("broken"), ConfigError("odd.")])

    def write(self, *args, **kwargs):
        return full() if self.suffix == ".log" or "failures.json" in self.name else genuine(self, *args, **kwargs)

    def run(self, cell, others, listener):
        raise next(reasons)

    monkeypatch.setattr(Path, "write_text", write)
    monkeypatch.setattr(medfed.grid.Bench, "run", run)
    events = ran(copied)
    assert [(e.kind, e.cell) for e in events] == [("start", 1), ("failed", 1), ("start", 2), ("failed", 2)]
    assert "RuntimeError: broken" in events[1].reason
    assert "No space left" in events[1].reason
    assert events[3].reason == "odd."


def test_failures_that_a_full_disk_did_not_take_are_written_with_the_next_event(copied, monkeypatch):
    names, path = [cell.folder.name for cell in copied.cells], copied.folder / "failures.json"
    told = medfed.grid.remembering(copied, lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(medfed.grid, "write_json", full)
        told(medfed.grid.Event("failed", 1, reason="why"))
    assert not path.exists()
    told(medfed.grid.Event("start", 2))
    assert json.loads(path.read_text()) == {names[1]: "why"}


class Killed(BaseException):
    """Stands for a signal that nothing catches."""


@pytest.mark.parametrize("again", [2, None])
def test_more_rounds_are_on_record_after_a_kill_between_two_files(copied, monkeypatch, again):
    run, genuine = copied.cells[0].folder, RunFolder.write_meta

    def write(self, **fields):
        if "rounds" in fields:
            raise Killed
        return genuine(self, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_meta", write)
        with pytest.raises(Killed):
            medfed.running.resume(run, rounds=2)
    medfed.running.resume(run, rounds=again)
    meta = RunFolder(run).meta()
    assert (meta["rounds"], meta["status"]) == (2, "completed")
    assert len((run / "records.jsonl").read_bytes().splitlines()) == 2


def test_a_cell_names_its_place_in_the_grid_from_the_first_file_on(copied, monkeypatch):
    cell, genuine = copied.cells[1], RunFolder.write_meta
    shutil.rmtree(cell.folder)

    def write(self, **fields):
        genuine(self, **fields)
        raise Killed

    monkeypatch.setattr(RunFolder, "write_meta", write)
    with pytest.raises(Killed):
        medfed.grid.Bench().run(cell, [], lambda *_: None)
    assert RunFolder(cell.folder).meta()["grid"] == cell.tags()


def test_what_a_run_is_stands_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        genuine = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, genuine=genuine: (calls.append(name), genuine(*a)))
    for make in (lambda: RunFolder.create(tmp_path, "run", "name: x\n"), lambda: RunFolder.at(tmp_path / "at", "y")):
        calls.clear()
        run = make()
        run.write_meta(status="new")
        run.write_experiment("name: z\n")
        assert calls == ["fsync", "replace", "fsync"] * 3
        assert sorted(p.name for p in run.path.iterdir()) == ["experiment.yaml", "run.json"]
