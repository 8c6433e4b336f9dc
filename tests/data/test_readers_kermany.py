"""Kermany's tree, with every trap of the public copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medfed.data.readers.kermany import CLASSES, Options, read
from medfed.errors import DataError


def jpeg(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(path, format="jpeg")


@pytest.fixture
def tree(tmp_path) -> Path:
    root = tmp_path / "OCT2017 "
    jpeg(
        root,
        "train/CNV/CNV-0016042-1.jpeg",
        "train/DME/DME-0016042-2.JPEG",
        "train/DRUSEN/DRUSEN-7-1.jpeg",
        "train/NORMAL/NORMAL-8-1.jpeg",
        "test/CNV/CNV-7-9.jpeg",
        "test/NORMAL/NORMAL-9-1.jpeg",
        "val/NORMAL/NORMAL-5-1.jpeg",
        "train/CNV/._CNV-0016042-1.jpeg",
    )
    (root / "train" / ".DS_Store").write_bytes(b"x")
    jpeg(tmp_path, "__MACOSX/OCT2017 /train/CNV/CNV-1-1.jpeg")
    return tmp_path


def test_patient_is_the_middle_number_alone_as_text(tree):
    cohort = read(tree, Options(straddling="keep"))
    patient = dict(zip(cohort.table["sample"], cohort.table["patient"]))
    assert patient["train/CNV/CNV-0016042-1"] == patient["train/DME/DME-0016042-2"] == "0016042"
    assert cohort.task.classes == CLASSES == ("CNV", "DME", "DRUSEN", "NORMAL")
    assert any("2 patients occur in several classes" in n for n in cohort.findings.notes)


def test_patients_on_both_sides_leave_train_and_are_counted(tree):
    cohort = read(tree, Options())
    assert sorted(cohort.table["sample"]) == [
        "test/CNV/CNV-7-9", "test/NORMAL/NORMAL-9-1", "train/CNV/CNV-0016042-1", "train/DME/DME-0016042-2",
        "train/NORMAL/NORMAL-8-1", "val/NORMAL/NORMAL-5-1",
    ]  # fmt: skip
    assert any("1 patients occur in train and test; their 1 images" in n for n in cohort.findings.notes)
    assert cohort.class_counts().tolist() == [2, 1, 0, 3]


def test_straddling_patients_may_be_kept(tree):
    assert len(read(tree, Options(straddling="keep"))) == 7


@pytest.mark.parametrize(("how", "count"), [("merge", 0), ("keep", 1), ("drop", 0)])
def test_the_tiny_validation_folder(tree, how, count):
    cohort = read(tree, Options(val=how))
    assert (cohort.table["split"] == "val").sum() == count
    assert cohort.table["sample"].str.contains("NORMAL-5-1").any() == (how != "drop")


def test_no_system_file_is_a_sample(tree):
    cohort = read(tree, Options())
    assert not cohort.table["path"].str.contains(r"__MACOSX|\._", regex=True).any()
    assert any("operating system" in n for n in cohort.findings.notes)


def test_nested_copies_are_counted_once(tmp_path):
    jpeg(tmp_path, "OCT2017/train/CNV/CNV-1-1.jpeg", "OCT2017/OCT2017/train/CNV/CNV-1-1.jpeg")
    cohort = read(tmp_path, Options())
    assert len(cohort) == 1
    assert any("1 further copies" in n for n in cohort.findings.notes)


def test_flat_tree_odd_names_and_wrong_folders(tmp_path):
    jpeg(tmp_path, "cnv/DME-3-1.jpeg", "NORMAL/scan17.jpeg", "other/CNV-4-1.jpeg")
    cohort = read(tmp_path, Options())
    assert cohort.table["split"].tolist() == ["", ""]
    assert dict(zip(cohort.table["sample"], cohort.table["patient"])) == {
        "NORMAL/scan17": "NORMAL/scan17",
        "CNV/DME-3-1": "3",
    }
    assert cohort.findings.unusable[0].path.endswith("CNV-4-1.jpeg")
    assert any("1 files not named" in n for n in cohort.findings.notes)
    assert any("1 files whose name gives another class" in n for n in cohort.findings.notes)


def test_wrong_folder_says_what_is_there(tmp_path):
    jpeg(tmp_path, "cats/a.jpeg")
    with pytest.raises(DataError, match=r"CNV, DME, DRUSEN or NORMAL.*1 images.*cats/"):
        read(tmp_path, Options())
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="folder is empty"):
        read(tmp_path / "empty", Options())


def test_real_scans(shared):
    cohort = read(shared / "data" / "oct", Options())
    assert len(cohort) == 792
    assert cohort.class_counts().tolist() == [192, 202, 191, 207]
    stems = [Path(p).stem.split("-") for p in cohort.table["path"]]
    assert cohort.table["patient"].nunique() == len({s[1] for s in stems})
    classes_of = {}
    for label, patient, _ in stems:
        classes_of.setdefault(patient, set()).add(label)
    several = sum(len(c) > 1 for c in classes_of.values())
    assert several > 0
    assert any(f"{several} patients occur in several classes" in n for n in cohort.findings.notes)
