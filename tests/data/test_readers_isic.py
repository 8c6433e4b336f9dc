"""ISIC 2019 and HAM10000, with every trap of the public copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medfed.data.readers.isic import HAM_CLASSES, ISIC_CLASSES, Options, read
from medfed.errors import DataError

HEADER = "image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK"


def jpg(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(path, format="jpeg")


def one_hot(name: str, *marked: str) -> str:
    return ",".join([name, *("1.0" if c in marked else "0.0" for c in HEADER.split(",")[1:])])


def write(root: Path, split: str, truth: list[str], metadata: list[str]) -> None:
    (root / f"ISIC_2019_{split}_GroundTruth.csv").write_text("\n".join([HEADER, *truth]) + "\n")
    head = "image,age_approx,anatom_site_general,lesion_id,sex"
    (root / f"ISIC_2019_{split}_Metadata.csv").write_text("\n".join([head, *metadata]) + "\n")


@pytest.fixture
def isic(tmp_path) -> Path:
    nested = tmp_path / "ISIC_2019_Training_Input" / "ISIC_2019_Training_Input"
    for name in ("ISIC_0000000", "ISIC_0000002_downsampled", "ISIC_0000003", "ISIC_0000004", "ISIC_9999999"):
        jpg(nested / f"{name}.jpg")
    jpg(nested / "ISIC_0000002.jpg")  # another image than ISIC_0000002_downsampled
    jpg(tmp_path / "ISIC_2019_Test_Input" / "ISIC_0034321.jpg")
    truth = [
        one_hot("ISIC_0000000", "NV"),
        one_hot("ISIC_0000002_downsampled", "MEL"),
        one_hot("ISIC_0000003", "SCC"),
        one_hot("ISIC_0000004", "SCC"),
        one_hot("ISIC_0000005", "AK"),
        one_hot("ISIC_9999999", "MEL", "NV"),
    ]
    metadata = [
        "ISIC_0000000,55,,BCN_0000001,f",
        "ISIC_0000002_downsampled,60,,MSK4_0000002,m",
        "ISIC_0000003,,,,m",
        "ISIC_0000004,,,BCN_0000001,m",
    ]
    write(tmp_path, "Training", truth, metadata)
    return tmp_path


def test_classes_stems_and_lesions(isic):
    cohort = read(isic, Options())
    assert cohort.task.classes == ISIC_CLASSES
    assert cohort.table["sample"].tolist() == [
        "ISIC_0000000", "ISIC_0000002_downsampled", "ISIC_0000003", "ISIC_0000004",
    ]  # fmt: skip
    assert cohort.labels.tolist() == [1, 0, 7, 7]
    assert cohort.table["patient"].tolist() == ["BCN_0000001", "MSK4_0000002", "ISIC_0000003", "BCN_0000001"]
    assert (cohort.table[["client", "split"]] == "").all(axis=None)


def test_nothing_is_left_out_silently(isic):
    findings = read(isic, Options()).findings
    reasons = {(u.sample or Path(u.path).name): u.reason for u in findings.unusable}
    assert reasons["ISIC_0000005"] == "no file for this row of the label table"
    assert "exactly one class" in reasons["ISIC_9999999"]
    assert reasons["ISIC_0000002.jpg"] == "no row in the label table for this file"
    assert any("1 files of an unlabelled test set" in n for n in findings.notes)
    assert any("1 images without a lesion id" in n for n in findings.notes)


def test_centres_from_the_lesion_prefix(isic):
    cohort = read(isic, Options(client="centre"))
    assert cohort.table["client"].tolist() == ["BCN", "MSK", "unknown", "BCN"]


def test_the_dataset_column_of_ham10000_refines_the_centre(isic):
    (isic / "HAM10000_metadata").write_text(
        "lesion_id,image_id,dx,dx_type,age,sex,localization,dataset\n"
        "HAM_1,ISIC_0000003,nv,histo,1,f,back,vidir_modern\n"
    )
    cohort = read(isic, Options(client="centre"))
    assert cohort.task.classes == ISIC_CLASSES
    assert cohort.table["client"].tolist() == ["BCN", "MSK", "vidir_modern", "BCN"]


def test_a_labelled_test_set_is_the_test_split_and_unk_appears_when_used(isic):
    write(isic, "Test", [one_hot("ISIC_0034321", "UNK")], ["ISIC_0034321,,,BCN_9,m"])
    cohort = read(isic, Options())
    assert cohort.task.classes == (*ISIC_CLASSES, "UNK")
    assert cohort.table["split"].tolist() == ["train"] * 4 + ["test"]
    assert cohort.labels[-1] == 8


def test_repeated_rows_merge_and_contradictions_are_left_out(isic):
    path = isic / "ISIC_2019_Training_GroundTruth.csv"
    path.write_text(path.read_text() + one_hot("ISIC_0000000", "NV") + "\n" + one_hot("ISIC_0000003", "NV") + "\n")
    cohort = read(isic, Options())
    assert "ISIC_0000000" in set(cohort.table["sample"])
    assert "ISIC_0000003" not in set(cohort.table["sample"])
    assert any("1 duplicated image ids dropped" in n for n in cohort.findings.notes)
    assert any(u.sample == "ISIC_0000003" and "contradict" in u.reason for u in cohort.findings.unusable)


@pytest.mark.parametrize("name", ["HAM10000_metadata", "HAM10000_metadata.csv", "labels.csv"])
def test_ham10000_in_two_parts(tmp_path, name):
    (tmp_path / name).write_text(
        "lesion_id,image_id,dx,dx_type,age,sex,localization,dataset\n"
        "HAM_0000118,ISIC_1,bkl,histo,80,male,scalp,vidir_molemax\n"
        "HAM_0000118,ISIC_2,BKL,histo,80,male,scalp,vidir_molemax\n"
        "NaN,ISIC_3,nv,histo,80,male,scalp,rosendahl\n"
    )
    jpg(tmp_path / "HAM10000_images_part_1" / "ISIC_1.jpg")
    jpg(tmp_path / "HAM10000_images_part_2" / "ISIC_2.jpg")
    jpg(tmp_path / "HAM10000_images_part_2" / "ISIC_3.jpg")
    cohort = read(tmp_path, Options(client="centre"))
    assert cohort.task.classes == HAM_CLASSES
    assert cohort.labels.tolist() == [2, 2, 5]
    assert cohort.table["patient"].tolist() == ["HAM_0000118", "HAM_0000118", "ISIC_3"]
    assert cohort.table["client"].tolist() == ["vidir_molemax", "vidir_molemax", "rosendahl"]


def test_unknown_diagnosis_names_row_and_nearest(tmp_path):
    (tmp_path / "labels.csv").write_text("image_id,dx,lesion_id\nA,nv,1\nB,melx,2\n")
    jpg(tmp_path / "A.jpg")
    with pytest.raises(DataError, match=r"row 3 .*'melx'.*Did you mean 'mel'"):
        read(tmp_path, Options())


def test_missing_tables_images_and_centres(isic, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(DataError, match=r"GroundTruth.*folder is empty"):
        read(empty, Options())
    with pytest.raises(DataError, match="None of the images"):
        read(isic, Options(images=empty))
    for path in isic.glob("*Metadata.csv"):
        path.unlink()
    with pytest.raises(DataError, match="client: none"):
        read(isic, Options(client="centre"))
    assert any("no metadata table" in n for n in read(isic, Options()).findings.notes)


def test_real_dermoscopy(shared):
    cohort = read(shared / "data" / "derm", Options())
    assert len(cohort) == 2407
    assert cohort.table["patient"].nunique() == 2407
    assert cohort.table["patient"].str.startswith("HAM_").all()
    assert cohort.class_counts().sum() == 2407
    assert (cohort.class_counts() > 0).all()
    assert not cohort.findings.unusable
