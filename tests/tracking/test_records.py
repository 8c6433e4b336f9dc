"""The record of a run on disk."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from medfed.durable import write_atomically
from medfed.errors import DataError, FederationError
from medfed.tracking.records import RecordLog


@pytest.fixture
def log(tmp_path) -> RecordLog:
    return RecordLog(tmp_path / "run" / "records.jsonl")


def test_append_and_read_back(log):
    assert log.read() == []
    log.append({"round": 1, "clients": {"a": {"loss": np.float32(0.5), "samples": np.int64(3)}}, "time": 5.0})
    log.append({"round": 2, "text": "№ ü", "list": (1, 2)})
    first, second = log.read()
    assert first == {"time": 5.0, "round": 1, "clients": {"a": {"loss": 0.5, "samples": 3}}}
    assert second["list"] == [1, 2]
    assert second["text"] == "№ ü"
    assert second["time"] > 1.7e9
    assert [r["round"] for r in log.read(after=1)] == [2]


def test_numbers_that_are_not_finite_are_null_and_named(log):
    written = log.append(
        {
            "round": 1,
            "server": {"loss": float("nan"), "ok": 1.0},
            "clients": {"St. Mary's/№1": {"w": np.float64("inf"), "list": [1.0, float("-inf")]}},
        }
    )
    text = log.path.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text) == written
    assert written["server"] == {"loss": None, "ok": 1.0}
    assert written["non_finite"] == ["server/loss", "clients/St. Mary's/№1/w", "clients/St. Mary's/№1/list/1"]


def test_what_json_cannot_hold_is_named_and_nothing_is_written(log):
    with pytest.raises(TypeError, match="server/model: ndarray is not a plain value"):
        log.append({"round": 1, "server": {"model": np.zeros(3)}})
    with pytest.raises(TypeError, match="keys are text, not 3"):
        log.append({"round": 1, "server": {3: 1}})
    assert log.read() == []


def test_rounds_rise(log):
    log.append({"round": 3})
    for bad in (3, 2, None, True, 4.0):
        with pytest.raises(ValueError, match="round"):
            log.append({"round": bad})
    with pytest.raises(ValueError, match="round 3 cannot follow round 3"):
        RecordLog(log.path).append({"round": 3})


@pytest.mark.parametrize("torn", [b'{"round": 3, "ser', b'{"round": 3}', b"\x00\x00\x00", b'{"round": 3, "t": "\xc3'])
def test_a_torn_last_line_is_left_out_and_repaired_by_the_next_append(log, torn):
    log.append({"round": 1})
    log.append({"round": 2})
    with open(log.path, "ab") as handle:
        handle.write(torn)
    size = log.path.stat().st_size
    reader = RecordLog(log.path)
    assert [r["round"] for r in reader.read()] == [1, 2]
    assert log.path.stat().st_size == size  # a reader changes nothing: the run may be in the middle of writing
    RecordLog(log.path).append({"round": 3, "again": 1})
    assert [r["round"] for r in reader.read()] == [1, 2, 3]
    assert reader.read()[2]["again"] == 1


def test_damage_before_the_last_line_is_an_error(log):
    log.append({"round": 1})
    log.append({"round": 2})
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"broken\n" + lines[1])
    with pytest.raises(DataError, match="line 1 from byte 0"):
        log.read()


def test_tail_goes_on_where_it_stopped(log):
    log.append({"round": 1})
    records, offset = log.tail(0)
    assert len(records) == 1
    assert log.tail(offset) == ([], offset)
    with open(log.path, "ab") as handle:
        handle.write(b'{"round"')
    assert log.tail(offset) == ([], offset)
    log.repair()
    log.append({"round": 2})
    records, end = log.tail(offset)
    assert [r["round"] for r in records] == [2]
    assert end == log.path.stat().st_size


def test_truncate_after_for_a_resume(log):
    for r in range(1, 5):
        log.append({"round": r})
    assert log.truncate_after(2) == [3, 4]
    log.append({"round": 3, "second": True})
    assert [r["round"] for r in log.read()] == [1, 2, 3]
    assert log.truncate_after(9) == []
    assert log.truncate_after(0) == [1, 2, 3]
    assert log.read() == []
    assert RecordLog(log.path.parent / "none.jsonl").truncate_after(1) == []


def test_full_disk_leaves_the_rounds_before(log, monkeypatch):
    log.append({"round": 1})

    def full(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FederationError, match=r"records.jsonl: the disk is full\. .*make room"):
            log.append({"round": 2})
    assert [r["round"] for r in log.read()] == [1]
    log.append({"round": 2})
    assert [r["round"] for r in log.read()] == [1, 2]


def test_atomic_write_keeps_the_old_content_on_failure(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    write_atomically(path, b"old")

    def fail(*args):
        raise OSError(5, "broken")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="broken"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
