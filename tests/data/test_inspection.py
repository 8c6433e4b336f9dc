"""What an inspection finds."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from rich.console import Console

from medfed.data.decode import DecodeOptions
from medfed.data.duplicates import difference_hash, exact_duplicates, near_duplicates, thumbnail
from medfed.data.inspection import inspect_cohort
from medfed.data.readers.folder import Options, read


def scene(seed: int, size: int = 64) -> np.ndarray:
    """A smooth random picture, uint8."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.uniform(0, 255, (6, 6)).astype(np.uint8))
    return np.asarray(small.resize((size, size), Image.Resampling.BICUBIC))


def save(path: Path, pixels: np.ndarray, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


@pytest.fixture
def tree(tmp_path) -> Path:
    root = tmp_path / "data"
    for k in range(6):
        save(root / "train" / "a" / f"p{k}_0.png", scene(k))
        save(root / "train" / "b" / f"p{10 + k}_0.png", scene(10 + k))
    save(root / "test" / "a" / "p20_0.png", scene(20))
    save(root / "test" / "b" / "p21_0.png", scene(21, 32))
    # The same bytes in test under another patient and label; the same picture again as JPEG.
    shutil.copyfile(root / "train" / "a" / "p0_0.png", root / "test" / "b" / "p30_0.png")
    save(root / "test" / "a" / "p31_0.jpg", scene(1), quality=80)
    save(root / "test" / "a" / "p2_1.png", scene(22))  # patient 2 is in train as well
    save(root / "train" / "b" / "p40_0.png", np.full((64, 64), 90, np.uint8))
    (root / "train" / "b" / "p41_0.png").write_bytes((root / "train" / "a" / "p0_0.png").read_bytes()[:200])
    return root


def inspect(root: Path, tmp_path: Path, **options):
    cohort = read(root, Options(patient_pattern=r"/p(\d+)_"))
    return inspect_cohort(cohort, cache=tmp_path / "cache", **options)


def test_counts_sizes_and_patients(tree, tmp_path):
    found = inspect(tree, tmp_path)
    counts = {(r["class"], r["split"]): r["samples"] for r in found.counts.to_dict("records")}
    assert counts == {("a", "train"): 6, ("b", "train"): 8, ("a", "test"): 3, ("b", "test"): 2}
    summary = found.summary()
    assert summary["samples"] == 19
    assert summary["patients"] == 18
    assert summary["samples_per_patient"] == {"min": 1, "median": 1.0, "max": 2}
    assert found.sizes["32x32"] == 1
    assert found.modalities["jpeg"] == 1


def test_unusable_blank_and_straddling(tree, tmp_path):
    found = inspect(tree, tmp_path)
    assert [u.sample for u in found.cohort.findings.unusable] == ["train/b/p41_0.png"]
    assert found.decoded == 18
    assert found.blank == ["train/b/p40_0.png"]
    assert found.straddling.to_dict("records") == [{"patient": "2", "splits": "test+train", "samples": 2}]


def test_duplicates_exact_and_near_with_their_conflicts(tree, tmp_path):
    found = inspect(tree, tmp_path)
    pairs = {(r["kind"], frozenset((r["sample_a"], r["sample_b"]))) for r in found.duplicates.to_dict("records")}
    assert pairs == {
        ("exact", frozenset({"train/a/p0_0.png", "test/b/p30_0.png"})),
        ("near", frozenset({"train/a/p1_0.png", "test/a/p31_0.jpg"})),
    }
    texts = {(p.severity, p.text) for p in found.problems}
    assert ("error", "1 pairs of identical images lie across splits (duplicates.csv)") in texts
    assert ("warning", "1 pairs of identical images have different labels (duplicates.csv)") in texts
    assert ("warning", "1 pairs of nearly identical images lie across splits (duplicates.csv)") in texts
    assert ("error", "1 patients lie in several splits (straddling.csv)") in texts
    assert not found.usable


def test_tables_summary_and_sheet_are_written(tree, tmp_path):
    out = tmp_path / "out"
    found = inspect(tree, tmp_path, out=out)
    assert sorted(p.name for p in out.iterdir()) == [
        "duplicates.csv", "sheet.png", "straddling.csv", "summary.json", "unusable.csv",
    ]  # fmt: skip
    unusable = pd.read_csv(out / "unusable.csv")
    assert unusable.columns.tolist() == ["path", "reason", "sample"]
    assert len(unusable) == 1
    text = (out / "summary.json").read_text()
    assert json.loads(text)["duplicates"] == {"exact": 1, "near": 1}
    assert str(tmp_path) not in text
    assert "p41" not in text
    assert np.asarray(Image.open(out / "sheet.png")).std() > 10
    stream = io.StringIO()
    found.render(Console(file=stream, width=120))
    assert "error: 1 patients lie in several splits" in stream.getvalue()
    assert "19" in stream.getvalue()


def test_a_clean_cohort_has_no_problem(tmp_path):
    for k in range(8):
        save(tmp_path / "data" / "ab"[k % 2] / f"p{k}_0.png", scene(k))
    found = inspect(tmp_path / "data", tmp_path)
    assert found.problems == []
    assert found.usable


def test_max_decode_limits_the_work_and_says_so(tree, tmp_path):
    told = []
    found = inspect(tree, tmp_path, max_decode=5, progress=lambda *a: told.append(a))
    assert found.decoded <= 5
    assert found.summary()["decoded"] == found.decoded
    assert [t for t in told if t[0] == "images"][-1] == ("images", 5, 5)


def test_sheet_shows_the_pipeline_and_the_corrupted_version_under_it(tree, tmp_path):
    def white(path, frame):
        return np.ones((1, 8, 8), np.float32)

    def black(path, frame):
        return np.zeros((1, 8, 8), np.float32)

    sheet = inspect(tree, tmp_path, pipeline=white, corrupted=black).sheet
    column = np.asarray(sheet)[:, 130, 0].astype(int)
    starts = np.flatnonzero(np.diff(column) != 0)
    # Two classes, a white row and a black row each: the column turns dark twice.
    assert (column[[60, 60 + 132, 60 + 264, 60 + 396]] == [255, 0, 255, 0]).all()
    assert len(starts) >= 3


def test_ct_windows_lie_side_by_side_and_colours_do_not(tmp_path, shared):
    from medfed.data.cohort import Cohort

    root = tmp_path / "ct"
    for k in ("10", "15"):
        (root / k).mkdir(parents=True)
        shutil.copyfile(shared / "data" / "ct" / "ge_head_trauma" / f"{k}.dcm", root / k / "x.dcm")
    cohort: Cohort = read(root, Options(cache=tmp_path / "cache"))

    def three(path, frame):
        return np.ones((3, 8, 8), np.float32)

    wide = inspect_cohort(cohort, pipeline=three, cache=tmp_path / "cache").sheet
    narrow = inspect(_plain(tmp_path), tmp_path, pipeline=three).sheet
    assert wide.width - narrow.width == 2 * 128


def _plain(tmp_path: Path) -> Path:
    save(tmp_path / "plain" / "a" / "p1_0.png", scene(1))
    save(tmp_path / "plain" / "b" / "p2_0.png", scene(2))
    return tmp_path / "plain"


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.full((1, 4, 4), np.nan), "NaN or infinite"),
        (np.full((1, 4, 4), 255.0), "outside 0..1"),
        (np.zeros((4, 4)), "shape (4, 4)"),
    ],
)
def test_a_faulty_pipeline_is_a_problem_and_no_crash(tmp_path, pixels, message):
    found = inspect(_plain(tmp_path), tmp_path, pipeline=lambda path, frame: pixels)
    assert any(message in p.text for p in found.problems)


def test_a_pipeline_that_raises_names_only_the_kind_of_fault(tmp_path):
    def broken(path, frame):
        raise RuntimeError(str(path))

    found = inspect(_plain(tmp_path), tmp_path, pipeline=broken)
    assert [p.text for p in found.problems] == ["the pipeline fails with RuntimeError (2x)"]


def test_one_class_and_imbalance(tmp_path):
    for k in range(42):
        save(tmp_path / "data" / "a" / f"p{k}_0.png", scene(k))
    assert any("one class only" in p.text for p in inspect(tmp_path / "data", tmp_path).problems)
    save(tmp_path / "data" / "b" / "p99_0.png", scene(99))
    assert any("the largest class is 42 times" in p.text for p in inspect(tmp_path / "data", tmp_path).problems)


def test_difference_hash_by_hand():
    ramp = np.tile(np.arange(9, dtype=np.float32), (8, 1))
    assert difference_hash(ramp) == 2**64 - 1
    assert difference_hash(ramp[:, ::-1]) == 0
    one = np.zeros((8, 9), np.float32)
    one[0, 1] = 1  # brighter than its left neighbour: the first bit alone
    assert difference_hash(one) == 1 << 63


def test_thumbnail_is_a_unit_vector_and_zero_for_a_constant():
    assert np.linalg.norm(thumbnail(scene(0).astype(np.float32))) == pytest.approx(1, abs=1e-5)
    assert not thumbnail(np.full((20, 20), 7, np.float32)).any()


def test_near_duplicates_need_both_close_hashes_and_close_pictures():
    rng = np.random.default_rng(0)
    picture = thumbnail(rng.normal(size=(16, 16)))
    other = thumbnail(rng.normal(size=(16, 16)))
    base = 0x0123456789ABCDEF
    hashes = np.array([base, base ^ 0b111, base ^ 0b1111, base, base ^ (1 << 5 | 1 << 25 | 1 << 45)], np.uint64)
    pictures = np.stack([picture, picture, picture, other, picture])
    assert near_duplicates(hashes, pictures) == [(0, 1), (0, 4), (1, 2)]


def test_exact_duplicates_need_equal_bytes(tmp_path):
    blob = bytes(range(256)) * 64
    files = {"a": blob, "b": blob, "c": blob[:-1] + b"!", "d": blob + b"x", "e": b"short", "f": b"short"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    groups = exact_duplicates([str(tmp_path / n) for n in [*files, "gone"]])
    assert {Path(p).name for p in groups} == {"a", "b", "e", "f"}
    assert groups[str(tmp_path / "a")] == groups[str(tmp_path / "b")] != groups[str(tmp_path / "e")]


def test_real_scans_under_several_patients(shared, tmp_path):
    import hashlib

    from medfed.data.readers.kermany import Options as Kermany
    from medfed.data.readers.kermany import read as read_kermany

    cohort = read_kermany(shared / "data" / "oct", Kermany())
    digests = [hashlib.sha256(p.read_bytes()).hexdigest() for p in cohort.paths()]
    found = inspect_cohort(cohort, cache=tmp_path, max_decode=20)
    assert (found.duplicates["kind"] == "exact").sum() == len(digests) - len(set(digests)) > 0
    assert any("filed under different patients" in p.text for p in found.problems)


def test_nothing_decodable_is_an_error(tmp_path):
    for name in "ab":
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "p1_0.png").write_bytes(b"no image")
    found = inspect(tmp_path / "data", tmp_path, out=tmp_path / "out")
    assert found.problems[0].text == "none of the samples can be decoded"
    assert found.problems[0].severity == "error"
    empty = inspect_cohort(found.cohort.select(np.zeros(0, int)), cache=tmp_path / "cache", out=tmp_path / "out")
    assert empty.problems[0].text == "there is no sample"


def test_corrections_are_counted_with_the_options_of_the_run(shared, tmp_path):
    (tmp_path / "data" / "a").mkdir(parents=True)
    shutil.copyfile(shared / "data" / "dicom_odd" / "derived_rsna_wrap_u12.dcm", tmp_path / "data" / "a" / "x.dcm")
    cohort = read(tmp_path / "data", Options(cache=tmp_path / "cache"))
    before = inspect_cohort(cohort, cache=tmp_path / "cache")
    assert any("may have wrapped at 12 bits" in p.text for p in before.problems)
    fixed = inspect_cohort(cohort, cache=tmp_path / "cache", decode_options=DecodeOptions(fix_12bit_wrap=True))
    assert fixed.summary()["corrections"]["rsna_12bit_wrap"] == 1
    assert not any("wrapped" in p.text for p in fixed.problems)
