"""The header index: read once, read again only what changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from medfed.data import header_index
from medfed.data.header_index import COLUMNS, index_headers, user_cache


@pytest.fixture
def series(shared, tmp_path):
    for k in (1, 2, 3):
        shutil.copyfile(shared / "data" / "ct" / "ge_head_trauma" / f"0{k}.dcm", tmp_path / f"{k}.dcm")
    return sorted(tmp_path.glob("*.dcm"))


@pytest.fixture
def opened(monkeypatch):
    calls = []
    real = header_index.probe

    def counting(path):
        calls.append(path.name)
        return real(path)

    monkeypatch.setattr(header_index, "probe", counting)
    return calls


def test_only_new_and_changed_files_are_read_again(series, tmp_path, opened):
    cache = tmp_path / "cache"
    first = index_headers(series[:2], cache=cache, name="x")
    assert sorted(opened) == ["1.dcm", "2.dcm"]
    opened.clear()
    os.utime(series[0], ns=(1, 1))
    second = index_headers(series, cache=cache, name="x")
    assert sorted(opened) == ["1.dcm", "3.dcm"]
    assert list(second.columns) == list(COLUMNS)
    assert second["path"].tolist() == [str(p) for p in series]
    assert second["patient_id"].iloc[0] == first["patient_id"].iloc[0] != ""
    assert (second[["height", "width", "frames"]].to_numpy() == [512, 512, 1]).all()


def test_broken_index_and_unwritable_cache_cost_time_and_nothing_else(series, tmp_path, opened):
    cache = tmp_path / "cache"
    index_headers(series, cache=cache, name="x")
    for file in cache.iterdir():
        file.write_bytes(b"no parquet")
    opened.clear()
    assert (index_headers(series, cache=cache, name="x")["reason"] == "").all()
    assert len(opened) == 3
    (tmp_path / "file").write_text("")
    assert len(index_headers(series, cache=tmp_path / "file" / "cache", name="x")) == 3


def test_faulty_files_have_a_reason_and_progress_is_told(series, tmp_path):
    text = tmp_path / "bad.dcm"
    text.write_text("this is text")
    told = []
    table = index_headers(
        [*series, text, tmp_path / "gone.dcm"], cache=tmp_path, name="x", progress=lambda *a: told.append(a)
    )
    assert table["reason"].tolist() == ["", "", "", "not a known image format", "file not found"]
    assert told[-1] == (5, 5)


def test_index_is_private(series, tmp_path):
    cache = tmp_path / "cache"
    index_headers(series, cache=cache, name="x")
    assert [f.stat().st_mode & 0o077 for f in cache.iterdir()] == [0]


def test_draft_of_a_killed_process_is_private_and_goes_with_the_next(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(*_, **__):
        raise Killed

    cache, text, modes = tmp_path / "cache", tmp_path / "bad.dcm", []
    text.write_text("this is text")
    cache.mkdir()
    umask = os.umask(0o022)
    genuine = header_index.pd.DataFrame.to_parquet

    def looked_at(table, file, **options):
        genuine(table, file, **options)
        modes.extend(p.stat().st_mode & 0o777 for p in cache.glob("*.draft"))

    try:
        with monkeypatch.context() as patch:
            patch.setattr(header_index.pd.DataFrame, "to_parquet", looked_at)
            patch.setattr(header_index.Path, "unlink", kill)
            patch.setattr(header_index.Path, "replace", kill)
            with pytest.raises(Killed):
                index_headers([text], cache=cache, name="x")
    finally:
        os.umask(umask)
    assert modes == [0o600]
    (left,) = cache.iterdir()
    stem = left.name.split(".")[0]
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in (f"{stem}.{ended.pid}.draft", f"headers-other.{ended.pid}.draft", f"{stem}.{os.getppid()}.draft"):
        (cache / name).write_text("patients")
    index_headers([text], cache=cache, name="x")
    assert sorted(p.name for p in cache.iterdir()) == sorted([f"{stem}.parquet", f"{stem}.{os.getppid()}.draft"])


def test_cache_folder_follows_the_platform(monkeypatch, tmp_path):
    monkeypatch.setattr(header_index.sys, "platform", "linux")
    monkeypatch.delenv("MEDFED_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "medfed"
    monkeypatch.setenv("MEDFED_CACHE", str(tmp_path / "elsewhere"))
    assert user_cache() == tmp_path / "elsewhere"
