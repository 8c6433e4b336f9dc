"""The ledger: append-only, chained, readable."""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading

import pytest
import torch
from filelock import FileLock
from rich.console import Console
from typer.testing import CliRunner

from medfed import ledger as module
from medfed.errors import DataError, FederationError
from medfed.federation.messages import Message
from medfed.ledger import LEDGER, START, Ledger, differences, find_ledgers, ledger_table, read_ledger

MESSAGE = Message({"model/w": torch.zeros(2, 3)}, {"loss": 0.5, "status": "clean"})


@pytest.fixture
def path(tmp_path):
    ledger = Ledger(tmp_path / "run" / "clients" / "c0" / LEDGER)
    for step in (1, 2, 3):
        ledger.append(b"x" * step, MESSAGE, client="c0", kind="reply", task="train", round=1, step=step)
    return ledger.path


def test_an_entry_says_all_that_left(path):
    first = read_ledger(path)[0]
    assert first["tensors"] == [["model/w", "float32", [2, 3]]]
    assert first["values"] == {"loss": 0.5, "status": "clean"}
    assert (first["bytes"], first["sha256"]) == (1, hashlib.sha256(b"x").hexdigest())
    assert (first["client"], first["kind"], first["task"], first["round"], first["step"]) == (
        "c0",
        "reply",
        "train",
        1,
        1,
    )
    assert first["time"].endswith("+00:00")


def test_each_line_is_sealed_with_the_one_before(path):
    entries = read_ledger(path)
    assert [e["previous"] for e in entries] == [START, entries[0]["hash"], entries[1]["hash"]]
    plain = {k: v for k, v in entries[1].items() if k != "hash"}
    assert entries[1]["hash"] == hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def changed(lines, number):
    entry = json.loads(lines[number])
    entry["bytes"] = 0
    return [*lines[:number], json.dumps(entry), *lines[number + 1 :]]


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: changed(lines, 0),
        lambda lines: changed(lines, 2),
        lambda lines: [lines[0], lines[2]],
        lambda lines: lines[1:],
        lambda lines: [lines[1], lines[0], lines[2]],
        lambda lines: [lines[0], *lines],
        lambda lines: [*lines, "{}"],
        lambda lines: [*lines, "[]"],
    ],
)
def test_a_line_that_was_changed_inserted_removed_or_moved_shows(path, change):
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))
    with pytest.raises(DataError, match="does not follow"):
        read_ledger(path)
    with pytest.raises(DataError, match="does not follow"):
        Ledger(path)


def test_a_new_process_goes_on_with_the_chain_after_a_line_torn_by_a_kill(path):
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[0][:40])
    assert len(read_ledger(path)) == 3
    Ledger(path).append(b"new", MESSAGE, client="c0")
    assert [e["number"] for e in read_ledger(path)] == [1, 2, 3, 4]
    assert path.read_bytes().startswith(whole)  # nothing that was written is ever written over


@pytest.mark.parametrize("left", [0, 40, None])
def test_what_could_not_be_written_leaves_no_trace_and_the_chain_goes_on(path, monkeypatch, left):
    """The disk is full for a moment: nothing, a part or all of the line was there."""
    ledger, whole, fsync = Ledger(path), path.read_bytes(), os.fsync

    def full(handle):
        if left is not None:
            os.ftruncate(handle, len(whole) + left)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FederationError, match=r"the ledger cannot be written \(No space left on device\)"):
        ledger.append(b"lost", MESSAGE)
    assert path.read_bytes() == whole
    monkeypatch.setattr(os, "fsync", fsync)
    ledger.append(b"next", MESSAGE)
    Ledger(path).append(b"after a restart", MESSAGE)
    assert [e["bytes"] for e in read_ledger(path)] == [1, 2, 3, 4, 15]


@pytest.mark.parametrize("left", [40, None])
def test_what_could_not_be_taken_back_is_read_again(path, monkeypatch, left):
    ledger, size = Ledger(path), path.stat().st_size

    def fail(file, *_):
        if isinstance(file, int) and left is not None:
            os.ftruncate(file, size + left)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        broken.setattr(os, "truncate", fail)
        with pytest.raises(FederationError, match="Input/output error"):
            ledger.append(b"lost", MESSAGE)
    ledger.append(b"next", MESSAGE)
    ledger.append(b"next", MESSAGE)
    assert len(read_ledger(path)) == (5 if left else 6)


def test_two_jobs_of_one_run_write_one_chain(path):
    old, new = Ledger(path), Ledger(path)
    for ledger in (old, new, new, old):
        ledger.append(b"x", MESSAGE)
    assert [e["number"] for e in read_ledger(path)] == [1, 2, 3, 4, 5, 6, 7]


def test_writers_at_the_same_time_do_not_break_the_chain(path):
    def write(ledger):
        for _ in range(10):
            ledger.append(b"x", MESSAGE)

    writers = [threading.Thread(target=write, args=(Ledger(path),)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(read_ledger(path)) == 33


def test_a_ledger_that_another_process_keeps_is_told(path, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    with (
        FileLock(path.with_name(f".{LEDGER}.lock")),
        pytest.raises(FederationError, match="another process keeps it locked"),
    ):
        Ledger(path).append(b"x", MESSAGE)


def test_values_that_are_not_finite_are_written_and_read(path):
    Ledger(path).append(b"n", Message({}, {"loss": float("nan")}), client="c0")
    assert str(read_ledger(path)[-1]["values"]["loss"]) == "nan"


def test_differences_count_equal_messages():
    one, two = {"sha256": "a"}, {"sha256": "b"}
    assert differences([one, one, two], [one, two]) == ([one], [])
    assert differences([one], [one, two]) == ([], [two])


def test_the_table_and_the_command_show_it(path, tmp_path):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(ledger_table(read_ledger(path), "title"))
    text = console.export_text()
    assert "loss, status" in text
    assert text.count("train") == 3

    from medfed.cli import app

    done = CliRunner().invoke(app, ["ledger", str(tmp_path / "run"), "--tensors"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    digests = [e["sha256"][:12] for e in read_ledger(path)]
    narrow = CliRunner().invoke(app, ["ledger", str(tmp_path / "run")], env={"COLUMNS": "60"})
    assert [line.split()[-1] for line in narrow.output.splitlines() if "train" in line] == digests  # in a pipe too
    assert "3 messages, 6 bytes; the chain is unbroken." in done.output
    assert "model/w float32 2x3" in done.output


def test_a_folder_without_a_ledger_is_told(tmp_path):
    with pytest.raises(DataError, match="no ledger"):
        find_ledgers(tmp_path)
    with pytest.raises(DataError, match="no ledger"):
        read_ledger(tmp_path / LEDGER)
