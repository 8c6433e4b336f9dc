"""The files of predictions are of one call: all of them are replaced, or none."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import numpy as np
import pytest

from medfed import prediction_files
from medfed.data.cohort import Task
from medfed.inference import About, Collector, Input
from medfed.prediction_files import write_predictions

ABOUT = About("m", 1, "p", "b", Task("multiclass", ("a", "b")), "max")


def found(*names: str) -> Collector:
    collector = Collector(SimpleNamespace(inputs=[Input(n, n, study="s") for n in names]), 2)
    collector.logits[:] = np.arange(2)
    return collector


def content(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("writes", [0, 1])
def test_files_of_an_earlier_call_stay_whole_where_the_disk_is_full(tmp_path, monkeypatch, writes):
    write_predictions(tmp_path, found("x"), ABOUT)
    before, genuine, done = content(tmp_path), prediction_files._table, []

    def table(path, *args):
        if len(done) == writes:
            path.write_text("torn")
            raise OSError(errno.ENOSPC, "No space left on device")
        done.append(genuine(path, *args))

    monkeypatch.setattr(prediction_files, "_table", table)
    with pytest.raises(OSError, match="No space left"):
        write_predictions(tmp_path, found("x", "y"), ABOUT)
    assert content(tmp_path) == before
    monkeypatch.undo()
    write_predictions(tmp_path, found("x", "y"), ABOUT)
    after = content(tmp_path)
    assert after.keys() == before.keys() == {"images.csv", "studies.csv", "predictions.json"}
    assert all(after[name] != before[name] for name in after)


def test_files_are_on_the_disk_before_the_first_takes_its_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        genuine = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, genuine=genuine: (calls.append(name), genuine(*a)))
    write_predictions(tmp_path, found("x"), ABOUT)
    assert calls == ["fsync"] * 3 + ["replace"] * 3
