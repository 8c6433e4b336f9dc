"""Tables of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medfed.data.readers.common import read_table
from medfed.data.readers.table import Options, read
from medfed.errors import DataError


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("a.png", "b.PNG", "sub/c.png", "NA.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(path)
    return tmp_path


def csv(folder: Path, *lines: str, name: str = "table.csv") -> Path:
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


def test_all_columns_with_ids_as_text(folder):
    path = csv(
        folder,
        "path,label,patient,client,split",
        "a.png,mild,000123,site 1,train",
        "sub\\c.png,severe,NA,site 2,Test",
        "./NA.png,mild,,site 1,",
    )
    for root in (path, folder):
        cohort = read(root, Options())
        assert cohort.table["sample"].tolist() == ["a.png", "sub/c.png", "NA.png"]
        assert cohort.table["client"].tolist() == ["site 1", "site 2", "site 1"]
        assert cohort.table["split"].tolist() == ["train", "test", ""]
        assert cohort.task.classes == ("mild", "severe")
        assert cohort.labels.tolist() == [0, 1, 0]
    # "NA" stands for a missing id; leading zeros stay.
    assert cohort.table["patient"].tolist() == ["000123", "sub/c.png", "NA.png"]
    assert any("2 samples without a patient id" in n for n in cohort.findings.notes)


def test_semicolons_byte_order_mark_and_other_names(folder):
    csv(folder, "\ufeffImage;Label;patient_id;site", "a.png;1;7;x", "b.PNG;10;8;y", "sub/c.png;2;9;y")
    cohort = read(folder, Options())
    assert cohort.task.classes == ("1", "2", "10")
    assert cohort.table["patient"].tolist() == ["7", "8", "9"]
    assert cohort.table["client"].tolist() == ["x", "y", "y"]


def test_given_classes_and_a_label_outside_them(folder):
    csv(folder, "path,label", "a.png,", "b.PNG,CNV", "sub/c.png,CNW")
    with pytest.raises(DataError, match=r"row 4 has the label 'CNW'.*Did you mean 'CNV'"):
        read(folder, Options(classes=["NORMAL", "CNV"]))
    csv(folder, "path,label", "a.png,", "b.PNG,CNV")
    cohort = read(folder, Options(classes=["NORMAL", "CNV"]))
    assert cohort.labels.tolist() == [1]
    assert cohort.findings.unusable[0].reason == "the row has no label"


def test_missing_columns_are_named_with_those_found(folder):
    csv(folder, "path,diagnosis", "a.png,1")
    with pytest.raises(DataError, match=r"lacks the columns label\. Columns found: path, diagnosis"):
        read(folder, Options())


def test_missing_files_are_counted_and_all_missing_is_an_error(folder):
    csv(folder, "path,label", "a.png,x", "gone.png,y", "b.PNG,y")
    cohort = read(folder, Options())
    assert [(u.sample, u.reason) for u in cohort.findings.unusable] == [("gone.png", "the file does not exist")]
    assert cohort.labels.tolist() == [0, 1]
    with pytest.raises(DataError, match="None of the 3 files"):
        read(folder, Options(images=folder / "sub"))


def test_images_folder_and_absolute_paths(folder):
    csv(folder, "path,label", "c.png,x", f"{folder / 'a.png'},y")
    cohort = read(folder, Options(images=folder / "sub"))
    assert [Path(p).name for p in cohort.table["path"]] == ["c.png", "a.png"]


def test_several_label_columns(folder):
    csv(folder, "path,fluid,drusen", "a.png,1,0", "b.PNG,0,0", "sub/c.png,1,1")
    cohort = read(folder, Options(label_columns=["fluid", "drusen"]))
    assert (cohort.task.kind, cohort.task.classes) == ("multilabel", ("fluid", "drusen"))
    assert cohort.labels.tolist() == [[1, 0], [0, 0], [1, 1]]
    csv(folder, "path,fluid,drusen", "a.png,1,0", "b.PNG,0,2")
    with pytest.raises(DataError, match=r"row 3 has '2' in column 'drusen'"):
        read(folder, Options(label_columns=["fluid", "drusen"]))
    with pytest.raises(DataError, match="lacks the columns cyst"):
        read(folder, Options(label_columns=["fluid", "cyst"]))


def test_repeated_and_contradictory_rows(folder):
    csv(folder, "path,label", "a.png,x", "./a.png,x", "b.PNG,x", "b.PNG,y", "sub/c.png,y")
    cohort = read(folder, Options())
    assert cohort.table["sample"].tolist() == ["a.png", "sub/c.png"]
    assert any("1 repeated rows" in n for n in cohort.findings.notes)
    assert [(u.sample, u.reason) for u in cohort.findings.unusable] == [
        ("b.PNG", "rows of this file contradict each other")
    ]


@pytest.mark.parametrize(
    ("line", "message"), [("a.png,x,tset,", "Did you mean 'test'"), ("a.png,x,,first", "row 2 has the frame 'first'")]
)
def test_bad_split_and_frame(folder, line, message):
    csv(folder, "path,label,split,frame", line)
    with pytest.raises(DataError, match=message):
        read(folder, Options())


def test_which_table(folder):
    with pytest.raises(DataError, match="No table"):
        read(folder, Options())
    csv(folder, "path,label", "a.png,x", name="one.csv")
    csv(folder, "path,label", "b.PNG,x", name="two.csv")
    with pytest.raises(DataError, match=r"one\.csv, two\.csv.*options\.table"):
        read(folder, Options())
    assert read(folder, Options(table=Path("two.csv"))).table["sample"].tolist() == ["b.PNG"]
    with pytest.raises(DataError, match="does not exist"):
        read(folder, Options(table=Path("three.csv")))


def test_monai_datalist(folder):
    content = {
        "name": "demo",
        "training": [{"image": "a.png", "label": 0}, {"image": "sub\\c.png", "label": 1, "patient": "7"}],
        "validation": [{"image": "b.PNG", "label": 1}],
        "test": ["NA.png"],
    }
    (folder / "dataset.json").write_text(json.dumps(content))
    cohort = read(folder, Options())
    assert cohort.labels.tolist() == [0, 1, 1]
    assert cohort.table["split"].tolist() == ["train", "train", "val"]
    assert cohort.table["patient"].tolist() == ["a.png", "7", "b.PNG"]
    assert [(u.sample, u.reason) for u in cohort.findings.unusable] == [("NA.png", "the row has no label")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ('{"data": []}', "no list under"),
        ('{"training": [{"image": ["a", "b"]}]}', "not of the form"),
    ],
)
def test_bad_datalists(folder, text, message):
    (folder / "dataset.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read(folder, Options())


def test_frames_of_real_dicom(shared, folder, tmp_path):
    odd = shared / "data" / "dicom_odd"
    csv(
        folder,
        "path,label,frame",
        "derived_opt_4frames.dcm,CNV,0",
        "derived_opt_4frames.dcm,DME,1",
        "derived_opt_4frames.dcm,NORMAL,9",
        "CT_small.dcm,NORMAL,",
        "emri_small.dcm,NORMAL,",
    )
    cohort = read(folder, Options(images=odd, frames="first", cache=tmp_path / "cache"))
    assert cohort.table["sample"].tolist() == [
        "derived_opt_4frames.dcm#0", "derived_opt_4frames.dcm#1", "CT_small.dcm", "emri_small.dcm#0",
    ]  # fmt: skip
    assert cohort.table["patient"].iloc[0] == cohort.table["patient"].iloc[1]
    assert cohort.table["patient"].iloc[2] == "1CT1"  # PatientID of pydicom's CT_small
    assert [u.reason for u in cohort.findings.unusable] == ["frame 9 is asked for, but the file has 4 (counted from 0)"]


def test_odd_files_of_the_manifest(shared, tmp_path):
    odd = shared / "data" / "dicom_odd"
    lines = [f"{p.name},x" for p in sorted(odd.glob("*.dcm"))]
    table = csv(tmp_path, "path,label", *lines)
    cohort = read(table, Options(images=odd, cache=tmp_path / "cache", frames="first"))
    unusable = {u.sample for u in cohort.findings.unusable}
    assert {"reportsi.dcm", "no-pixel-data.dcm", "meta_missing_tsyntax.dcm"} <= unusable
    assert len(cohort) + len(unusable) == len(lines)


def test_rows_without_a_path_and_tables_without_rows(folder):
    csv(folder, "path,label", ",x", "a.png,y")
    assert [u.reason for u in read(folder, Options()).findings.unusable] == ["row 2 has no path"]
    for lines in (["path,label"], ["path,label", "a.png,"]):
        csv(folder, *lines)
        with pytest.raises(DataError, match="no row with a path and a label"):
            read(folder, Options())


def test_repeated_column_names_are_refused(folder):
    csv(folder, "path,label,label", "a.png,x,y")
    with pytest.raises(DataError, match="several columns named label"):
        read(folder, Options())


@pytest.mark.parametrize("classes", [[], ["x", "y", "x"]])
def test_class_lists_must_name_each_class_once(classes):
    with pytest.raises(ValueError, match="classes"):
        Options(classes=classes)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_separator_at_the_end_of_rows_shifts_nothing(tmp_path, separator):
    rows = ["path,label", "a.png,x,", "b.png,y,"]
    (tmp_path / "t.csv").write_text("\n".join(rows).replace(",", separator))
    table = read_table(tmp_path / "t.csv")
    assert table.to_dict("list") == {"path": ["a.png", "b.png"], "label": ["x", "y"]}


@pytest.mark.parametrize(("rows", "row"), [(["a,x,1", "b,y,2"], 2), (["a,x,", "b,y,2"], 3), (["a,x,,7", "b,y"], 2)])
def test_more_values_than_columns_are_refused(tmp_path, rows, row):
    (tmp_path / "t.csv").write_text("\n".join(["path,label", *rows]))
    with pytest.raises(DataError, match=f"row {row} has more values than there are columns"):
        read_table(tmp_path / "t.csv")


def test_a_column_without_a_name_is_kept_under_its_number(tmp_path):
    (tmp_path / "t.csv").write_text(",path,label\n0,a.png,x\n1,b.png\n")
    table = read_table(tmp_path / "t.csv")
    assert table.to_dict("list") == {"column 1": ["0", "1"], "path": ["a.png", "b.png"], "label": ["x", ""]}


@pytest.mark.parametrize("frame", ["²", "1.5", "-1", "9" * 5000, "१"])
def test_a_frame_that_is_no_plain_number_is_refused(tmp_path, frame):
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "t.csv").write_text(f"path,label,frame\na.png,x,{frame}\n", encoding="utf-8")
    with pytest.raises(DataError, match="whole number is expected") as caught:
        read(tmp_path / "t.csv", Options())
    assert len(str(caught.value)) < 400
