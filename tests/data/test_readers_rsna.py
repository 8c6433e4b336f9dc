"""RSNA ICH, with every trap of the public copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian

from medfed.data.cohort import Findings
from medfed.data.readers.rsna_ich import OUTPUTS, SUBTYPES, Options, read, read_labels
from medfed.errors import DataError


def dicom(path: Path, patient: str, study: str = "") -> None:
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = CTImageStorage, "1.2.3"
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    image = Dataset()
    image.file_meta = meta
    image.SOPClassUID, image.Modality = CTImageStorage, "CT"
    image.PatientID, image.StudyInstanceUID = patient, study
    image.Rows = image.Columns = 4
    image.SamplesPerPixel, image.PhotometricInterpretation = 1, "MONOCHROME2"
    image.BitsAllocated, image.BitsStored, image.HighBit, image.PixelRepresentation = 16, 16, 15, 1
    image.RescaleIntercept, image.RescaleSlope = -1024, 1
    image.PixelData = np.zeros((4, 4), "<i2").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save_as(path, enforce_file_format=True)


def rows(name: str, *positive: str) -> list[str]:
    on = {*positive, "any"} if positive else set()
    return [f"{name}_{output},{int(output in on)}" for output in OUTPUTS]


def write(root: Path, *blocks: list[str], name: str = "stage_2_train.csv") -> Path:
    path = root / name
    path.write_text("ID,Label\n" + "\n".join(line for block in blocks for line in block) + "\n")
    return path


def options(tmp_path: Path, **values) -> Options:
    return Options(cache=tmp_path / "cache", **values)


@pytest.fixture
def rsna(tmp_path) -> Path:
    root = tmp_path / "rsna"
    train = root / "rsna-intracranial-hemorrhage-detection" / "stage_2_train"
    dicom(train / "ID_000000001.dcm", "P1", "1.1")
    dicom(train / "ID_000000002.dcm", "P1", "1.2")  # the same patient, another study
    dicom(train / "ID_000000003.dcm", "", "1.3")
    dicom(train / "ID_000000004.dcm", "", "")
    dicom(train / "ID_000000005.dcm", "P5", "1.5")
    dicom(train / "ID_000000006.dcm", "P6", "1.6")
    dicom(train / "ID_00000000e.dcm", "P9", "1.9")  # no row
    dicom(train.parent / "stage_2_test" / "ID_0000000ff.dcm", "P8", "1.8")
    write(
        train.parent,
        rows("ID_000000001", "epidural"),
        rows("ID_000000002", "subdural"),
        rows("ID_000000003", "subarachnoid"),
        rows("ID_000000004", "intraventricular"),
        rows("ID_000000005"),
        rows("ID_000000006", "epidural", "subdural"),
        rows("ID_00000000d", "epidural"),  # no file
        rows("ID_000000001", "epidural"),  # duplicated
    )
    return root


def test_five_classes_with_exactly_one_subtype(rsna, tmp_path):
    cohort = read(rsna, options(tmp_path))
    assert cohort.task.classes == SUBTYPES
    assert SUBTYPES == ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")
    assert dict(zip(cohort.table["sample"], cohort.labels.tolist())) == {
        "ID_000000001": 0, "ID_000000002": 4, "ID_000000003": 3, "ID_000000004": 2,
    }  # fmt: skip
    notes = " | ".join(cohort.findings.notes)
    assert "1 slices without haemorrhage and 1 slices with several subtypes" in notes
    assert "1 duplicated ids dropped" in notes


def test_six_outputs_include_any(rsna, tmp_path):
    cohort = read(rsna, options(tmp_path, task="multilabel"))
    label = dict(zip(cohort.table["sample"], cohort.labels.tolist()))
    assert cohort.task.classes == (*SUBTYPES, "any")
    assert label["ID_000000005"] == [0, 0, 0, 0, 0, 0]
    assert label["ID_000000006"] == [1, 0, 0, 0, 1, 1]
    assert cohort.labels.dtype == np.float32


def test_patients_come_from_headers_then_study_then_slice(rsna, tmp_path):
    cohort = read(rsna, options(tmp_path))
    assert cohort.table["patient"].tolist() == ["P1", "P1", "1.3", "ID_000000004"]
    assert any(
        "2 slices without a patient id: 1 grouped by study, 1 for themselves" in n for n in cohort.findings.notes
    )
    alone = read(rsna, options(tmp_path, group="slice"))
    assert alone.table["patient"].tolist() == alone.table["sample"].tolist()


def test_rows_without_files_and_files_without_rows_are_named(rsna, tmp_path):
    findings = read(rsna, options(tmp_path)).findings
    reasons = {(u.sample or Path(u.path).stem): u.reason for u in findings.unusable}
    assert reasons == {
        "ID_00000000d": "no file for this row of the label table",
        "ID_00000000e": "no row in the label table for this file",
    }
    notes = " | ".join(findings.notes)
    assert "1 label rows without a file" in notes
    assert "1 files without a label row" in notes
    assert "1 files of an unlabelled test set" in notes


def test_contradictory_duplicates_are_dropped_altogether(rsna, tmp_path):
    table = next(rsna.rglob("stage_2_train.csv"))
    table.write_text(table.read_text() + "\n".join(rows("ID_000000002", "epidural")) + "\n")
    cohort = read(rsna, options(tmp_path))
    assert "ID_000000002" not in set(cohort.table["sample"])
    assert any(u.sample == "ID_000000002" and "contradict" in u.reason for u in cohort.findings.unusable)


def test_incomplete_and_inconsistent_rows(tmp_path):
    partial, odd = rows("ID_1", "epidural")[:4], rows("ID_2", "subdural")
    odd[-1] = "ID_2_any,0"
    findings = Findings()
    ids, labels = read_labels(write(tmp_path, partial, odd), findings)
    assert ids.tolist() == ["ID_2"]
    assert labels.tolist() == [[0, 0, 0, 0, 1, 0]]
    assert findings.unusable[0].sample == "ID_1"
    assert "1 slices where 'any' disagrees" in findings.notes[0]


@pytest.mark.parametrize("stage", ["stage_1_train_images", "stage_2_train_images", "png_224"])
def test_older_and_derived_layouts(tmp_path, stage):
    root = tmp_path / "data"
    for k, suffix in enumerate((".png", ".JPG")):
        path = root / stage / f"ID_00000000{k}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(path)
    blocks = (rows("ID_000000000", "epidural"), rows("ID_000000001", "subdural"))
    write(root, *blocks, name="stage_1_train.csv")
    cohort = read(root, options(tmp_path))
    assert cohort.labels.tolist() == [0, 4]
    assert cohort.table["patient"].tolist() == ["ID_000000000", "ID_000000001"]


def test_dicom_is_preferred_to_a_derived_picture(rsna, tmp_path):
    path = rsna / "a_png" / "ID_000000001.png"
    path.parent.mkdir()
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(path)
    cohort = read(rsna, options(tmp_path))
    assert cohort.table["path"].iloc[0].endswith(".dcm")
    assert any("1 further copies" in n for n in cohort.findings.notes)


def test_sample_submission_is_refused(tmp_path):
    half = [line.rsplit(",", 1)[0] + ",0.5" for line in rows("ID_1")]
    path = write(tmp_path, half, name="stage_2_sample_submission.csv")
    with pytest.raises(DataError, match="sample submission"):
        read(tmp_path, Options())
    with pytest.raises(DataError, match=r"0\.5"):
        read_labels(path, Findings())


def test_bad_tables(tmp_path):
    with pytest.raises(DataError, match=r"row 2 .*'ID_1_subdurl'.*Did you mean 'subdural'"):
        read_labels(write(tmp_path, ["ID_1_subdurl,1"]), Findings())
    with pytest.raises(DataError, match=r"row 2 has the label 'yes'"):
        read_labels(write(tmp_path, ["ID_1_any,yes"]), Findings())
    (tmp_path / "stage_2_train.csv").write_text("id,target\n1,2\n")
    with pytest.raises(DataError, match=r"lacks the columns ID, Label.*id, target"):
        read_labels(tmp_path / "stage_2_train.csv", Findings())
    with pytest.raises(DataError, match=r"stage_2_train.csv with the columns ID,Label is expected"):
        read(tmp_path, Options())


def test_damaged_files_are_named_and_the_rest_is_read(rsna, tmp_path):
    path = next(rsna.rglob("ID_000000002.dcm"))
    path.write_bytes(b"")
    cohort = read(rsna, options(tmp_path))
    assert len(cohort) == 3
    assert any(u.sample == "ID_000000002" and u.reason == "empty file" for u in cohort.findings.unusable)


def test_id_list_with_and_without_header(rsna, tmp_path):
    (tmp_path / "ids.txt").write_text("ID_000000001\nID_000000003.dcm\nID_00000abcd\n")
    (tmp_path / "ids.csv").write_text("image,label\nID_000000001,0\nID_000000003,3\nID_00000abcd,1\n")
    for name in ("ids.txt", "ids.csv"):
        cohort = read(rsna, options(tmp_path, id_list=tmp_path / name))
        assert cohort.table["sample"].tolist() == ["ID_000000001", "ID_000000003"]
        assert [u.sample for u in cohort.findings.unusable if "list" in u.reason] == ["ID_00000abcd"]


def test_subset_is_seeded_stratified_and_of_the_size_asked_for(tmp_path):
    root, blocks = tmp_path / "data", []
    for k in range(60):
        subtype = SUBTYPES[0] if k < 3 else SUBTYPES[4] if k < 23 else SUBTYPES[1]
        path = root / "stage_2_train" / f"ID_{k:09x}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((2, 2), np.uint8)).save(path)
        blocks.append(rows(path.stem, subtype))
    write(root, *blocks)

    def draw(seed):
        return read(root, options(tmp_path, subset=12, seed=seed, group="slice"))

    first, again, other = draw(1), draw(1), draw(2)
    # Shares 3, 20, 37 of 60: 0.6, 4, 7.4 of 12, the rare class at least once.
    assert first.class_counts().tolist() == [1, 7, 0, 0, 4]
    assert first.table["sample"].tolist() == again.table["sample"].tolist()
    assert first.table["sample"].tolist() != other.table["sample"].tolist()
