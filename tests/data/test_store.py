"""The image store: nothing twice, nothing lost, nothing silent."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch

from medfed.data import store as store_module
from medfed.data.cohort import Cohort, Task
from medfed.data.corruption import Corruption
from medfed.data.store import ImageStore, Pipeline, describe
from medfed.data.store_build import to_record
from medfed.data.store_index import Index
from medfed.errors import DataError

SHAPE = (1, 4, 5)
NOISE = Corruption("gaussian_noise", 3, seed=7)


class Loader:
    """Reads .npy files of [F, 1, H, W], and notes each call in a file, so that calls in workers count too."""

    def __init__(self, log: Path):
        self.log = log

    def __call__(self, data):
        with open(self.log, "a") as file:
            file.write(f"{data['sample']}\n")
        name = Path(data["image"]).name
        if name.startswith("crash"):
            os.kill(os.getpid(), signal.SIGKILL)
        if name.startswith("slow"):
            time.sleep(0.05)
        if name.startswith("flaky"):
            raise RuntimeError("applying transform") from OSError(errno.EMFILE, "Too many open files")
        pixels = np.load(data["image"])[data["frame"]]
        kind = "hounsfield" if name.startswith("ct") else "image"
        corrections = ["exif_rotated", "alpha_dropped"] if name.startswith("odd") else []
        return {**data, "image": torch.from_numpy(pixels), "image_kind": kind, "image_corrections": corrections}

    @property
    def calls(self):
        return len(self.log.read_text().split()) if self.log.exists() else 0


def prepare(data):
    """Clips to 0..255, as a window does, and scales to 0..1; NaN stays NaN."""
    return {**data, "image": data["image"].clamp(0, 255) / 255}


@pytest.fixture
def loader(tmp_path):
    return Loader(tmp_path / "calls.log")


@pytest.fixture
def pipeline(loader):
    return Pipeline(loader, prepare, "grey-4x5", SHAPE)


def write(folder, names, seed=0):
    """One file a name, with levels 0..255; returns the cohort and the levels by name."""
    generator = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    levels = {}
    for name in names:
        levels[name] = generator.integers(0, 256, SHAPE).astype(np.float32)
        np.save(folder / f"{name}.npy", levels[name][None])
    return cohort([(n, folder / f"{n}.npy", 0) for n in names]), levels


def cohort(rows):
    table = pd.DataFrame(rows, columns=["sample", "path", "frame"])
    table["path"] = table["path"].astype(str)
    for column in ("patient", "client", "split"):
        table[column] = ""
    return Cohort(Task("multiclass", ("a", "b")), table, np.zeros(len(table), dtype=np.int64))


def of(store, built, sample):
    return np.asarray(store.images[built.rows[sample]])


def test_the_second_run_decodes_nothing(tmp_path, loader, pipeline):
    data, levels = write(tmp_path / "d", [f"a{i}" for i in range(5)])
    store = ImageStore.open(tmp_path, pipeline)
    steps = []
    built = store.ensure(data, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(i, 5) for i in range(1, 6)]
    assert (built.decoded, built.reused, built.failures) == (5, 0, [])
    for name in levels:
        np.testing.assert_array_equal(of(store, built, name), levels[name].astype(np.uint8))
    assert store.images.flags.writeable is False
    again = ImageStore.open(tmp_path, pipeline)
    rebuilt = again.ensure(data)
    assert (rebuilt.decoded, rebuilt.reused, loader.calls) == (0, 5, 5)
    assert rebuilt.rows == built.rows
    assert rebuilt.digests == built.digests
    np.testing.assert_array_equal(built.rows_of(["a3", "a0"]), [built.rows["a3"], built.rows["a0"]])


def test_unchanged_files_are_not_even_read(tmp_path, pipeline, monkeypatch):
    data, _ = write(tmp_path / "d", ["a", "b"])
    ImageStore.open(tmp_path, pipeline).ensure(data)

    def read(path):
        raise AssertionError("a file was read")

    monkeypatch.setattr("medfed.data.store_files.file_digest", read)
    assert ImageStore.open(tmp_path, pipeline).ensure(data).reused == 2


def test_a_touched_file_is_read_and_a_changed_one_decoded(tmp_path, loader, pipeline):
    data, _ = write(tmp_path / "d", ["a", "b", "c"])
    store = ImageStore.open(tmp_path, pipeline)
    before = store.ensure(data)
    os.utime(tmp_path / "d" / "a.npy", (1, 1))
    np.save(tmp_path / "d" / "b.npy", np.full((1, *SHAPE), 9, dtype=np.float32))
    os.utime(tmp_path / "d" / "b.npy", (1, 1))
    after = store.ensure(data)
    assert (after.decoded, after.reused, loader.calls) == (1, 2, 4)
    assert after.rows["a"] == before.rows["a"]
    assert after.rows["b"] == 3
    assert (of(store, after, "b") == 9).all()


def test_equal_files_share_a_record_and_frames_do_not(tmp_path, loader, pipeline):
    data, _ = write(tmp_path / "d", ["a"])
    shutil.copy(tmp_path / "d" / "a.npy", tmp_path / "d" / "copy.npy")
    frames = np.arange(2, dtype=np.float32)[:, None, None, None] * np.ones((2, *SHAPE), dtype=np.float32)
    np.save(tmp_path / "d" / "multi.npy", frames)
    multi = tmp_path / "d" / "multi.npy"
    rows = [
        ("a", data.table["path"][0], 0),
        ("copy", tmp_path / "d" / "copy.npy", 0),
        ("m0", multi, 0),
        ("m1", multi, 1),
    ]
    store = ImageStore.open(tmp_path, pipeline)
    built = store.ensure(cohort(rows))
    assert built.rows["a"] == built.rows["copy"]
    assert (loader.calls, len(store.images)) == (3, 3)
    assert of(store, built, "m0").max() == 0
    assert of(store, built, "m1").min() == 1


def test_bad_files_are_named_remembered_and_tried_again_when_changed(tmp_path, loader, pipeline):
    folder = tmp_path / "d"
    data, _ = write(folder, ["good", "nan", "shape", "range", "garbage", "missing", "frame"])
    np.save(folder / "nan.npy", np.full((1, *SHAPE), np.nan, dtype=np.float32))
    np.save(folder / "shape.npy", np.zeros((1, 1, 3, 3), dtype=np.float32))
    (folder / "garbage.npy").write_bytes(b"no image")
    (folder / "missing.npy").unlink()
    data.table.loc[6, "frame"] = 5
    wild = Pipeline(
        loader,
        lambda d: d | {"image": d["image"] / (1 if d["sample"] == "range" else 255)},
        "wild",
        SHAPE,
    )
    store = ImageStore.open(tmp_path, wild)
    built = store.ensure(data)
    reasons = {f.sample: f.reason for f in built.failures}
    assert sorted(built.rows) == ["good"]
    assert list(reasons) == ["nan", "shape", "range", "garbage", "missing", "frame"]
    assert reasons["nan"] == "NaN or infinite pixel values"
    assert reasons["shape"] == "prepared shape (1, 3, 3) instead of (1, 4, 5)"
    assert reasons["range"].startswith("prepared values from")
    assert reasons["missing"] == "No such file or directory"
    assert "out of bounds" in reasons["frame"]
    assert all(f.path.endswith(f"{f.sample}.npy") for f in built.failures)
    calls = loader.calls
    again = ImageStore.open(tmp_path, wild).ensure(data)
    assert loader.calls == calls
    assert again.failures == built.failures
    np.save(folder / "garbage.npy", np.ones((1, *SHAPE), dtype=np.float32))
    mended = store.ensure(data)
    assert loader.calls == calls + 1
    assert "garbage" in mended.rows


def test_a_fault_of_the_system_is_not_remembered(tmp_path, loader, pipeline):
    data, _ = write(tmp_path / "d", ["flaky"])
    store = ImageStore.open(tmp_path, pipeline)
    assert [f.reason for f in store.ensure(data).failures] == ["Too many open files"]
    store.ensure(data)
    assert loader.calls == 2


def test_corrections_are_counted_for_each_sample(tmp_path, pipeline):
    data, _ = write(tmp_path / "d", ["odd1", "plain", "odd2"])
    store = ImageStore.open(tmp_path, pipeline)
    expected = {"exif_rotated": 2, "alpha_dropped": 2}
    assert store.ensure(data).corrections == expected
    assert store.ensure(data, corruption=NOISE).corrections == expected
    assert ImageStore.open(tmp_path, pipeline).ensure(data, samples=["odd2", "plain"]).corrections == {
        "exif_rotated": 1,
        "alpha_dropped": 1,
    }


def test_corrections_of_prepare_are_counted_too(tmp_path, loader):
    def windowed(data):
        corrections = [*data["image_corrections"], "already_windowed"]
        return {**prepare(data), "image_corrections": corrections}

    data, _ = write(tmp_path / "d", ["odd", "plain"])
    built = ImageStore.open(tmp_path, Pipeline(loader, windowed, "windowed", SHAPE)).ensure(data)
    assert built.corrections == {"exif_rotated": 1, "alpha_dropped": 1, "already_windowed": 2}
    bare = Pipeline(loader, lambda d: {"image": prepare(d)["image"]}, "bare", SHAPE)
    assert ImageStore.open(tmp_path, bare).ensure(data).corrections == {"exif_rotated": 1, "alpha_dropped": 1}


def test_clean_rows_are_rounded_and_corrupted_ones_cut_off():
    unit = np.array([0.4999 / 255, 0.5001 / 255, 1.4999 / 255, 254.6 / 255, 1.2, -0.2], dtype=np.float32)
    assert to_record(unit, "uint8").tolist() == [0, 1, 1, 255, 255, 0]
    assert to_record(unit, "uint8", truncate=True).tolist() == [0, 0, 1, 254, 255, 0]
    levels = np.arange(256, dtype=np.float32) / np.float32(255)
    assert to_record(levels, "uint8", truncate=True).tolist() == list(range(256))
    half = to_record(unit, "float16")
    assert half.dtype == np.float16
    assert half[4] == 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_float_records(tmp_path, loader, dtype):
    data, levels = write(tmp_path / "d", ["a"])
    store = ImageStore.open(tmp_path, Pipeline(loader, prepare, f"grey-{dtype}", SHAPE, dtype))
    built = store.ensure(data)
    assert store.images.dtype == dtype
    np.testing.assert_array_equal(of(store, built, "a"), (levels["a"] / np.float32(255)).astype(dtype))


def test_image_corruption_needs_no_decoding_and_is_the_papers(tmp_path, loader, pipeline):
    data, levels = write(tmp_path / "d", ["a", "b"])
    store = ImageStore.open(tmp_path, pipeline)
    clean = store.ensure(data)
    calls = loader.calls
    noisy = store.ensure(data, corruption=NOISE)
    assert loader.calls == calls
    assert (noisy.decoded, noisy.derived) == (0, 2)
    assert not set(noisy.rows.values()) & set(clean.rows.values())
    for name in ("a", "b"):
        # by hand: clip(x + N(0, 0.18^2), 0, 1) of the 8-bit image, times 255, cut off
        values = NOISE.apply(levels[name] / np.float32(255), f"{clean.digests[name]}:0").astype(np.float64)
        np.testing.assert_array_equal(of(store, noisy, name), np.floor(values * 255).astype(np.uint8))
    assert store.ensure(data, corruption=NOISE).reused == 2


def test_corruption_is_frozen_whatever_the_order_name_and_workers(tmp_path, loader):
    names = [f"a{i:02d}" for i in range(40)]
    write(tmp_path / "d", names)
    results = []
    for trial, workers in enumerate((1, 2, 3)):
        folder = tmp_path / f"copy{trial}"
        order = np.random.default_rng(trial).permutation(40)
        folder.mkdir()
        for name in names:
            shutil.copy(tmp_path / "d" / f"{name}.npy", folder / f"other_{name}.npy")
        rows = [(names[i], folder / f"other_{names[i]}.npy", 0) for i in order]
        store = ImageStore.open(tmp_path / f"cache{trial}", Pipeline(loader, prepare, "grey", SHAPE))
        built = store.ensure(cohort(rows), corruption=NOISE, workers=workers)
        assert (built.decoded, built.derived) == (40, 40)
        results.append(store.images[built.rows_of(names)])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    assert loader.calls == 120


def test_hounsfield_corruption_acts_before_the_window(tmp_path, loader, pipeline):
    noise = Corruption("gaussian_noise", 3, domain="hounsfield", seed=1, hu_range=100)
    data, levels = write(tmp_path / "d", ["ct1", "photo"])
    store = ImageStore.open(tmp_path, pipeline)
    built = store.ensure(data, corruption=noise)
    assert [(f.sample, f.reason) for f in built.failures] == [
        ("photo", "corruption in Hounsfield units, but the file is not a CT slice")
    ]
    shifted = noise.apply(levels["ct1"], f"{built.digests['ct1']}:0")
    assert np.abs(shifted - levels["ct1"]).max() > 5  # 0.18 * 100 HU standard deviation
    expected = np.clip(shifted, 0, 255) / np.float32(255)
    np.testing.assert_array_equal(of(store, built, "ct1"), np.floor(expected.astype(np.float64) * 255))
    assert loader.calls == 2
    assert store.ensure(data, corruption=noise).reused == 1
    assert loader.calls == 2


def test_what_failed_clean_fails_corrupted(tmp_path, loader, pipeline):
    data, _ = write(tmp_path / "d", ["a", "bad"])
    (tmp_path / "d" / "bad.npy").write_bytes(b"")
    store = ImageStore.open(tmp_path, pipeline)
    clean = store.ensure(data)
    noisy = store.ensure(data, corruption=NOISE)
    assert noisy.failures == clean.failures != []
    assert loader.calls == 2


def test_a_file_that_kills_its_decoder_is_named(tmp_path, loader, pipeline):
    names = [f"a{i:02d}" for i in range(20)] + ["crash"] + [f"b{i:02d}" for i in range(20)]
    data, levels = write(tmp_path / "d", names)
    store = ImageStore.open(tmp_path, pipeline)
    built = store.ensure(data, workers=2)
    assert [(f.sample, f.reason) for f in built.failures] == [("crash", "the decoder crashed")]
    assert len(built.rows) == 40
    for name in built.rows:
        np.testing.assert_array_equal(of(store, built, name), levels[name].astype(np.uint8))


CHILD = """
import sys, time
sys.path.insert(0, {here!r})
from contextlib import closing
from pathlib import Path
import test_store as t
from medfed.data import store
store.COMMIT_IMAGES = 3
folder = Path({folder!r})
pipeline = t.Pipeline(t.Loader(folder / "calls.log"), t.prepare, "grey-4x5", t.SHAPE)
names = [f"slow{{i:02d}}" for i in range(60)]
data = t.cohort([(n, folder / "d" / (n + ".npy"), 0) for n in names])
def progress(i, n):
    print(i, flush=True)
    time.sleep(60 if i == 11 else 0)  # until it is killed
t.ImageStore.open(folder, pipeline).ensure(data, workers=1, progress=progress)
"""


def test_a_killed_build_keeps_what_was_committed(tmp_path, loader, pipeline):
    names = [f"slow{i:02d}" for i in range(60)]
    data, levels = write(tmp_path / "d", names)
    code = CHILD.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    for line in child.stdout:
        if int(line) == 11:
            child.kill()
            break
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    # The worst case besides: half a record after the last commit.
    with open(tmp_path / "store" / "grey-4x5" / "images.bin", "ab") as file:
        file.write(b"\xff" * 7)
    store = ImageStore.open(tmp_path, pipeline)
    kept = len(store.images)
    assert 9 <= kept <= 12
    assert (tmp_path / "store" / "grey-4x5" / "images.bin").stat().st_size == kept * 20
    data = data.select(np.arange(20))
    built = store.ensure(data)
    assert (built.reused, built.decoded) == (kept, 20 - kept)
    for name in names[:20]:
        np.testing.assert_array_equal(of(store, built, name), levels[name].astype(np.uint8))


def test_records_lost_from_the_file_are_made_again(tmp_path, loader, pipeline):
    data, levels = write(tmp_path / "d", [f"a{i}" for i in range(6)])
    ImageStore.open(tmp_path, pipeline).ensure(data)
    os.truncate(tmp_path / "store" / "grey-4x5" / "images.bin", 4 * 20 - 3)
    store = ImageStore.open(tmp_path, pipeline)
    built = store.ensure(data)
    assert (built.reused, built.decoded) == (3, 3)
    assert built.notes == ("images.bin was too short: 3 images are made again",)
    for name in levels:
        np.testing.assert_array_equal(of(store, built, name), levels[name].astype(np.uint8))


@pytest.mark.parametrize("damage", [b"not a database at all" * 100, None])
def test_a_damaged_index_means_a_new_start(tmp_path, loader, pipeline, damage):
    data, levels = write(tmp_path / "d", ["a", "b"])
    first = ImageStore.open(tmp_path, pipeline)
    rows = first.ensure(data)
    mapped = first.images  # as another process would have it
    inode = (first.folder / "images.bin").stat().st_ino
    index = tmp_path / "store" / "grey-4x5" / "index.sqlite"
    if damage is None:  # garbage in the middle of the pages
        content = bytearray(index.read_bytes())
        content[4096:8192] = b"\x5a" * 4096
        damage = bytes(content)
    index.write_bytes(damage)
    store = ImageStore.open(tmp_path, pipeline)
    built = store.ensure(data)
    assert built.decoded == 2
    assert "damaged" in built.notes[0]
    assert (store.folder / "images.bin").stat().st_ino != inode  # cut short, the old map would raise SIGBUS
    for name in levels:
        np.testing.assert_array_equal(mapped[rows.rows[name]], levels[name].astype(np.uint8))
    assert ImageStore.open(tmp_path, pipeline).ensure(data).reused == 2


def test_a_full_disk_is_said_before_and_during(tmp_path, pipeline, monkeypatch):
    data, levels = write(tmp_path / "d", [f"a{i}" for i in range(6)])
    store = ImageStore.open(tmp_path, pipeline)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(DataError, match="disk is full"):
        store.ensure(data)
    monkeypatch.undo()
    monkeypatch.setattr(store_module, "COMMIT_IMAGES", 2)
    commits = []

    def fsync(fileno):
        commits.append(fileno)
        if len(commits) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module.os, "fsync", fsync)
    with pytest.raises(DataError, match="disk is full"):
        store.ensure(data)
    monkeypatch.undo()
    built = store.ensure(data)
    assert (built.reused, built.decoded) == (4, 2)
    for name in levels:
        np.testing.assert_array_equal(of(store, built, name), levels[name].astype(np.uint8))


def test_two_at_once_share_the_work(tmp_path, loader, pipeline):
    data, _ = write(tmp_path / "d", [f"slow{i}" for i in range(6)])
    built = {}

    def build(k):
        built[k] = ImageStore.open(tmp_path, pipeline).ensure(data)

    threads = [threading.Thread(target=build, args=(k,)) for k in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert loader.calls == 6
    assert built[0].rows == built[1].rows
    assert sorted([built[0].decoded, built[1].decoded]) == [0, 6]


def test_who_opens_a_store_that_is_just_being_made_waits_for_it(tmp_path, pipeline, monkeypatch):
    """SQLite makes the file before there is a table in it."""
    begun, create = threading.Event(), Index.create

    def slowly(index):
        if not begun.is_set():
            with closing(sqlite3.connect(index.path)) as connection:
                connection.execute("PRAGMA user_version = 1")
            begun.set()
            time.sleep(0.5)
        create(index)

    monkeypatch.setattr(Index, "create", slowly)
    first = threading.Thread(target=ImageStore.open, args=(tmp_path, pipeline))
    first.start()
    assert begun.wait(10)
    assert ImageStore.open(tmp_path, pipeline)._index.files() == {}
    first.join()


def test_who_opens_a_store_that_is_being_built_does_not_wait(tmp_path, pipeline):
    building = ImageStore.open(tmp_path, pipeline)
    with building._locked():
        opened = []
        other = threading.Thread(target=lambda: opened.append(ImageStore.open(tmp_path, pipeline)))
        other.start()
        other.join(10)
        assert len(opened) == 1


def test_an_interrupted_build_goes_on(tmp_path, pipeline):
    data, levels = write(tmp_path / "d", [f"a{i:02d}" for i in range(40)])
    store = ImageStore.open(tmp_path, pipeline)

    def stop(done, total):
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.ensure(data, workers=2, progress=stop)
    built = store.ensure(data)
    for name in levels:
        np.testing.assert_array_equal(of(store, built, name), levels[name].astype(np.uint8))


def test_the_same_key_with_another_shape_is_refused(tmp_path, loader, pipeline):
    ImageStore.open(tmp_path, pipeline)
    with pytest.raises(DataError, match=r"records of shape \[1, 4, 5\]"):
        ImageStore.open(tmp_path, Pipeline(loader, prepare, "grey-4x5", (3, 4, 5)))


def test_a_cache_that_cannot_be_made_is_said(tmp_path, pipeline):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be created"):
        ImageStore.open(tmp_path / "file", pipeline)


def test_unknown_samples_are_refused_and_a_selection_is_enough(tmp_path, loader, pipeline):
    data, _ = write(tmp_path / "d", ["alpha", "beta"])
    store = ImageStore.open(tmp_path, pipeline)
    with pytest.raises(DataError, match="Did you mean 'alpha'"):
        store.ensure(data, samples=["alpa"])
    assert list(store.ensure(data, samples=["beta"]).rows) == ["beta"]
    assert loader.calls == 1


def test_an_empty_store_has_an_empty_array(tmp_path, pipeline):
    store = ImageStore.open(tmp_path, pipeline)
    assert store.images.shape == (0, *SHAPE)
    assert store.ensure(cohort([])).rows == {}


def test_keys_of_any_kind_make_folders_of_their_own(tmp_path, loader):
    for key in ("../../evil", "a/b", "a b", "x" * 500, "", "Grün"):
        store = ImageStore.open(tmp_path, Pipeline(loader, prepare, key, SHAPE))
        assert store.folder.parent == tmp_path / "store"
        assert store.folder.name.isalnum()
    assert len(list((tmp_path / "store").iterdir())) == 6


def test_describe_tells_the_sizes(tmp_path, loader):
    data, _ = write(tmp_path / "d", ["a", "b", "c"])
    assert describe(tmp_path) == []
    for key, rows in (("small", 1), ("large", 3)):
        ImageStore.open(tmp_path, Pipeline(loader, prepare, key, SHAPE)).ensure(data.select(np.arange(rows)))
    sizes = {s.key: s for s in describe(tmp_path)}
    assert {k: s.images for k, s in sizes.items()} == {"small": 1, "large": 3}
    for size in sizes.values():
        assert size.nbytes == sum(f.stat().st_size for f in size.path.iterdir())


def test_starting_with_2400_known_images_is_quick(tmp_path, loader, pipeline):
    folder = tmp_path / "d"
    folder.mkdir()
    rows = []
    for i in range(2400):
        path = folder / f"f{i:04d}"
        path.write_bytes(i.to_bytes(2, "big"))
        rows.append((f"s{i:04d}", path, 0))
    constant = Pipeline(lambda d: {"image": np.zeros(SHAPE, dtype=np.float32)}, lambda d: d, "constant", SHAPE)
    ImageStore.open(tmp_path, constant).ensure(cohort(rows), workers=1)
    start = time.process_time()
    store = ImageStore.open(tmp_path, constant)
    built = store.ensure(cohort(rows))
    assert store.images.shape[0] == 2400
    assert built.reused == 2400
    assert time.process_time() - start < 1.0


def test_the_index_refuses_two_records_for_one_row(tmp_path, pipeline):
    data, _ = write(tmp_path / "d", ["a"])
    store = ImageStore.open(tmp_path, pipeline)
    store.ensure(data)
    with pytest.raises(sqlite3.IntegrityError):
        store._index.add("", [(0, ("other", 0), "", 0)], [])


def test_decoders_end_with_the_process_that_started_them(tmp_path, loader, pipeline):
    """Left alone they waited for work for ever, and with some versions of filelock held the store's lock."""
    names = [f"slow{i:02d}" for i in range(60)]
    data, _ = write(tmp_path / "d", names)
    code = CHILD.format(here=str(Path(__file__).parent), folder=str(tmp_path)).replace("workers=1", "workers=2")
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    decoders = psutil.Process(child.pid).children()
    assert len(decoders) == 2
    child.kill()
    child.stdout.close()
    child.wait()
    psutil.wait_procs(decoders, timeout=30)
    assert not [d for d in decoders if d.is_running() and d.status() != psutil.STATUS_ZOMBIE]
    assert len(ImageStore.open(tmp_path, pipeline).ensure(data).rows) == 60


def test_a_decoder_that_warns_does_not_wait_for_the_lock_of_a_progress_bar(tmp_path, pipeline):
    """The bar's thread draws under a lock that standard error shares; a fork at that moment copies it as it is."""
    from rich.console import Console

    from medfed.console import Screen

    class Warner(Loader):
        def __call__(self, data):
            print("Invalid value for VR UI", file=sys.stderr)
            return super().__call__(data)

    data, _ = write(tmp_path / "d", [f"a{i:02d}" for i in range(60)])
    store = ImageStore.open(tmp_path, Pipeline(Warner(tmp_path / "calls.log"), prepare, "grey-4x5", SHAPE))
    built = []
    with open(os.devnull, "w") as nowhere, Screen(Console(force_terminal=True, file=nowhere)) as screen:
        screen.progress("Decoding", 1, 10)
        drawing = screen._bar.live._lock
        held, free = threading.Event(), threading.Event()

        def draw():
            with drawing:
                held.set()
                free.wait(60)

        thread = threading.Thread(target=draw)
        thread.start()
        held.wait()
        building = threading.Thread(target=lambda: built.append(store.ensure(data, workers=2)), daemon=True)
        building.start()
        building.join(30)
        free.set()
        thread.join()
    for process in () if built else psutil.Process().children():
        process.kill()
    assert built
