"""Flipped bits and read-only folders."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import time
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from medfed.data.cohort import Cohort, Task
from medfed.data.corruption import Corruption
from medfed.data.store import ImageStore, Pipeline
from medfed.errors import DataError

SHAPE = (1, 3, 3)
NOISE = Corruption("gaussian_noise", 2, seed=1)


class Load:
    def __init__(self):
        self.calls = 0

    def __call__(self, data):
        self.calls += 1
        return {**data, "image": torch.from_numpy(np.load(data["image"]))}


@pytest.fixture
def load():
    return Load()


@pytest.fixture
def pipeline(load):
    return Pipeline(load, lambda data: data, "k", SHAPE)


def cohort_of(folder: Path, count: int) -> Cohort:
    folder.mkdir(exist_ok=True)
    for k in range(count):
        if not (folder / f"{k}.npy").exists():
            np.save(folder / f"{k}.npy", np.random.default_rng(k).random(SHAPE, dtype=np.float32))
    names = [f"{k}.npy" for k in range(count)]
    table = pd.DataFrame({"sample": names, "path": [str(folder / n) for n in names], "patient": names})
    return Cohort(Task("multiclass", ("a",)), table.assign(frame=0, client="", split=""), np.zeros(count, np.int64))


def flip(store: ImageStore, byte: int, bit: int = 0) -> None:
    with (store.folder / "images.bin").open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0] ^ (1 << bit)
        file.seek(byte)
        file.write(bytes([value]))


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("byte", [0, 13, 9 * 5 - 1])  # in the first, a middle and the last record
def test_a_flipped_bit_is_noticed_and_the_image_made_again(tmp_path, pipeline, load, byte, bit):
    cohort = cohort_of(tmp_path / "d", 5)
    store = ImageStore.open(tmp_path, pipeline)
    rows = store.ensure(cohort, workers=1).rows_of(cohort.table["sample"])
    truth, mapped = store.images[rows].copy(), store.images
    flip(store, byte, bit)

    again = ImageStore.open(tmp_path, pipeline)
    built = again.ensure(cohort, workers=1)
    np.testing.assert_array_equal(again.images[built.rows_of(cohort.table["sample"])], truth)
    assert (built.decoded, built.reused, load.calls) == (1, 4, 6)
    assert built.notes == ("1 damaged records in the image store: the images are made again",)
    assert len(mapped) == 5  # who had mapped the file can still read all of it
    assert mapped.sum() >= 0

    last = ImageStore.open(tmp_path, pipeline)
    assert last.ensure(cohort, workers=1).notes == ()
    assert load.calls == 6


def test_only_what_is_wanted_is_read(tmp_path, pipeline):
    cohort = cohort_of(tmp_path / "d", 4)
    store = ImageStore.open(tmp_path, pipeline)
    row = store.ensure(cohort, workers=1).rows["3.npy"]
    flip(store, row * 9)
    assert not ImageStore.open(tmp_path, pipeline).ensure(cohort, samples=["0.npy"], workers=1).notes
    assert ImageStore.open(tmp_path, pipeline).ensure(cohort, samples=["3.npy"], workers=1).notes


def test_a_damaged_clean_record_corrupts_no_other(tmp_path, pipeline):
    """Noise is laid on the clean record: a damaged one is made again first."""
    cohort = cohort_of(tmp_path / "d", 3)
    other = ImageStore.open(tmp_path / "other", pipeline)
    rows = other.ensure(cohort, corruption=NOISE, workers=1).rows_of(cohort.table["sample"])

    store = ImageStore.open(tmp_path, pipeline)
    store.ensure(cohort, workers=1)
    flip(store, 10, 6)
    store = ImageStore.open(tmp_path, pipeline)
    built = store.ensure(cohort, corruption=NOISE, workers=1)
    np.testing.assert_array_equal(
        store.images[built.rows_of(cohort.table["sample"])],
        other.images[rows],
    )
    flip(store, 9 * built.rows["1.npy"] + 2, 3)
    store = ImageStore.open(tmp_path, pipeline)
    built = store.ensure(cohort, corruption=NOISE, workers=1)
    assert (built.decoded, built.derived) == (0, 1)
    np.testing.assert_array_equal(store.images[built.rows_of(cohort.table["sample"])], other.images[rows])


def test_an_index_without_checksums_gets_them(tmp_path, pipeline, load):
    cohort = cohort_of(tmp_path / "d", 3)
    store = ImageStore.open(tmp_path, pipeline)
    store.ensure(cohort, workers=1)
    index = store.folder / "index.sqlite"
    connection = sqlite3.connect(index)
    connection.executescript(
        "CREATE TABLE old AS SELECT row, digest, frame, variant, corrections FROM images; DROP TABLE images;"
        "CREATE TABLE images (row INTEGER PRIMARY KEY, digest TEXT NOT NULL, frame INTEGER NOT NULL, variant TEXT"
        " NOT NULL, corrections TEXT NOT NULL, UNIQUE (variant, digest, frame));"
        "INSERT INTO images SELECT * FROM old; DROP TABLE old;"
    )
    connection.close()
    ImageStore.open(tmp_path, pipeline).ensure(cohort, workers=1)
    assert load.calls == 3
    with sqlite3.connect(index) as connection:
        found = dict(connection.execute("SELECT row, checksum FROM images"))
    content = (store.folder / "images.bin").read_bytes()
    assert found == {row: zlib.crc32(content[9 * row : 9 * row + 9]) for row in range(3)}
    flip(store, 0)
    assert ImageStore.open(tmp_path, pipeline).ensure(cohort, workers=1).notes


def test_2400_images_are_compared_within_a_second(tmp_path):
    """2400 records of 3 x 128 x 128, 118 MB."""
    shape = (3, 128, 128)
    picture = np.random.default_rng(0).random(shape, dtype=np.float32)
    constant = Pipeline(lambda d: {**d, "image": picture}, lambda d: d, "k", shape)
    cohort = cohort_of(tmp_path / "d", 1)
    table = pd.concat([cohort.table] * 2400, ignore_index=True)
    table["sample"], table["frame"] = [str(k) for k in range(2400)], range(2400)
    many = Cohort(cohort.task, table, np.zeros(2400, np.int64))
    ImageStore.open(tmp_path, constant).ensure(many, workers=1)
    start = time.process_time()
    built = ImageStore.open(tmp_path, constant).ensure(many)
    assert built.reused == 2400
    assert time.process_time() - start < 1.0


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def unprivileged(task, *arguments) -> str:
    """Runs in another process as somebody whom folder permissions bind; what went wrong there, or nothing."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child():
        try:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            task(*arguments)
        except BaseException as error:
            theirs.send(f"{type(error).__name__}: {error}")
        else:
            theirs.send("")

    process = context.Process(target=child)
    process.start()
    said = ours.recv() if ours.poll(60) else "no answer"
    process.join(10)
    return said


def read_only(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    for path in folder.parents:  # those above may be closed to others
        if os.getuid() == 0 == path.stat().st_uid and not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o001)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_complete_store_may_be_read_only(tmp_path, pipeline, load):
    cohort = cohort_of(tmp_path / "d", 4)
    store = ImageStore.open(tmp_path / "cache", pipeline)
    rows = store.ensure(cohort, corruption=NOISE, workers=1).rows_of(cohort.table["sample"])
    truth = store.images[rows].copy()
    read_only(tmp_path / "cache")
    before = tree(tmp_path / "cache")

    def use():
        found = ImageStore.open(tmp_path / "cache", pipeline)
        assert found.read_only
        built = found.ensure(cohort, corruption=NOISE, workers=1)
        np.testing.assert_array_equal(found.images[built.rows_of(cohort.table["sample"])], truth)
        assert (built.decoded, built.derived, built.reused) == (0, 0, 4)

    assert unprivileged(use) == ""
    assert tree(tmp_path / "cache") == before
    # Files that were moved or touched are known by their content, though that cannot be remembered.
    for path in (tmp_path / "d").iterdir():
        os.utime(path, (1, 1))
    assert unprivileged(use) == ""

    def ask_more():
        ImageStore.open(tmp_path / "cache", pipeline).ensure(cohort_of(tmp_path / "d", 5), workers=1)

    cohort_of(tmp_path / "d", 5)
    assert "read-only, but 1 of the images wanted" in unprivileged(ask_more)
    for path in (store.folder, *store.folder.iterdir()):
        path.chmod(0o755)
    flip(store, 3)
    read_only(tmp_path / "cache")
    assert "read-only, but 1 of the images wanted" in unprivileged(use)
    for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*")):
        path.chmod(0o755)


@pytest.mark.parametrize(("name", "words"), [("meta.json", "no description"), ("index.sqlite", "no index")])
def test_a_read_only_store_must_be_whole(tmp_path, pipeline, monkeypatch, name, words):
    store = ImageStore.open(tmp_path, pipeline)
    store.ensure(cohort_of(tmp_path / "d", 2), workers=1)
    (store.folder / name).unlink()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(DataError, match=words):
        ImageStore.open(tmp_path, pipeline)


def test_a_read_only_store_with_a_short_file_is_refused(tmp_path, pipeline, monkeypatch):
    store = ImageStore.open(tmp_path, pipeline)
    store.ensure(cohort_of(tmp_path / "d", 2), workers=1)
    os.truncate(store.folder / "images.bin", 10)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(DataError, match="records are missing"):
        ImageStore.open(tmp_path, pipeline)
