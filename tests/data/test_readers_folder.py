"""Class folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medfed.data.readers.folder import Options, read
from medfed.errors import DataError


def image(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(path)


def test_classes_are_the_union_over_all_splits(tmp_path):
    image(tmp_path, "train/b/1.png", "train/a/1.png", "test/c/1.png", "Validation/a/2.png")
    cohort = read(tmp_path, Options())
    assert cohort.task.classes == ("a", "b", "c")
    rows = dict(zip(cohort.table["sample"], zip(cohort.table["split"], cohort.labels.tolist())))
    assert rows == {
        "train/b/1.png": ("train", 1),
        "train/a/1.png": ("train", 0),
        "test/c/1.png": ("test", 2),
        "Validation/a/2.png": ("val", 0),
    }
    assert any("classes taken from the folders: a, b, c" in n for n in cohort.findings.notes)


def test_given_classes_fix_the_map_at_a_site_that_lacks_one(tmp_path):
    image(tmp_path, "c/1.png", "b/1.png")
    cohort = read(tmp_path, Options(classes=["a", "b", "c"]))
    assert cohort.labels.tolist() == [1, 2]
    assert any("classes without images here: a" in n for n in cohort.findings.notes)


def test_folder_outside_the_classes_is_refused(tmp_path):
    image(tmp_path, "NORMAL/1.png", "DRUSENS/1.png")
    with pytest.raises(DataError, match=r"'DRUSENS'.*Did you mean 'DRUSEN'"):
        read(tmp_path, Options(classes=["DRUSEN", "NORMAL"]))


def test_grades_are_ordered_by_value(tmp_path):
    image(tmp_path, "10/1.png", "2/1.png", "1/1.png")
    assert read(tmp_path, Options()).task.classes == ("1", "2", "10")


def test_patient_pattern(tmp_path):
    image(tmp_path, "a/p007/1.png", "a/p007/2.png", "b/p008/1.png", "b/odd.png")
    cohort = read(tmp_path, Options(patient_pattern=r"/(p\d+)/"))
    assert cohort.table["patient"].tolist() == ["p007", "p007", "b/odd.png", "p008"]
    assert any("1 samples without a patient id" in n for n in cohort.findings.notes)


@pytest.mark.parametrize(("pattern", "message"), [("p\\d+", "one group"), ("(", "not a regular expression")])
def test_bad_patterns(pattern, message):
    with pytest.raises(ValueError, match=message):
        Options(patient_pattern=pattern)


def test_stray_files_and_empty_folders_are_named(tmp_path):
    image(tmp_path, "train/a/1.png", "train/stray.png", "loose.png", "extra/b/1.png", "test/a/2.png")
    (tmp_path / "train" / "empty").mkdir()
    cohort = read(tmp_path, Options())
    assert sorted((Path(u.path).name, u.reason) for u in cohort.findings.unusable) == [
        ("1.png", "outside the folders train, val and test"),
        ("loose.png", "outside the folders train, val and test"),
        ("stray.png", "not in a class folder"),
    ]
    assert any("no classes: empty" in n for n in cohort.findings.notes)


def test_same_name_in_two_classes_gives_two_samples(tmp_path):
    image(tmp_path, "a/1.png", "b/1.png")
    assert read(tmp_path, Options()).table["sample"].tolist() == ["a/1.png", "b/1.png"]


def test_wrong_folder(tmp_path):
    image(tmp_path, "1.png", "2.png")
    with pytest.raises(DataError, match=r"root/<class>/image.*Found 2 images.*1\.png, 2\.png"):
        read(tmp_path, Options())


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_pages_of_a_tiff_are_samples_of_one_patient(tmp_path):
    image(tmp_path, "a/x.png")
    pages = [Image.fromarray(np.full((4, 4), k, np.uint8)) for k in range(4)]
    pages[0].save(tmp_path / "a" / "y.tif", save_all=True, append_images=pages[1:])
    (tmp_path / "a" / "broken.tif").write_bytes(b"II*\0broken")
    cache = tmp_path.parent / "cache"
    cohort = read(tmp_path, Options(cache=cache))
    assert cohort.table["sample"].tolist() == ["a/x.png", *(f"a/y.tif#{k}" for k in range(4))]
    assert cohort.table["frame"].tolist() == [0, 0, 1, 2, 3]
    assert cohort.table["patient"].nunique() == 2
    assert [u.sample for u in cohort.findings.unusable] == ["a/broken.tif"]
    middle = read(tmp_path, Options(frames="middle", cache=cache))
    assert middle.table["sample"].tolist() == ["a/x.png", "a/y.tif#2"]
    assert any("3 frames left aside" in n for n in middle.findings.notes)


def test_real_dicom_with_odd_files(shared, tmp_path):
    root, data = tmp_path / "root", shared / "data"
    root.mkdir()
    (root / "odd").symlink_to(data / "dicom_odd")
    (root / "trauma").symlink_to(data / "ct" / "ge_head_trauma")
    cohort = read(root, Options(cache=tmp_path / "cache"))
    per_class = dict(zip(cohort.task.classes, cohort.class_counts().tolist()))
    assert per_class["trauma"] == 28
    trauma = cohort.table[cohort.table["sample"].str.startswith("trauma")]
    assert trauma["patient"].nunique() == 1
    counts = cohort.table["path"].map(lambda p: Path(p).name).value_counts()
    for name, frames in {
        "emri_small.dcm": 10, "derived_opt_4frames.dcm": 4, "sm_image.dcm": 25, "ECT_fragmented_no_bot_jpegls.dcm": 2,
    }.items():  # fmt: skip
        assert counts[name] == frames
    unusable = {Path(u.path).name for u in cohort.findings.unusable}
    assert {"reportsi.dcm", "no-pixel-data.dcm", "meta_missing_tsyntax.dcm"} <= unusable
