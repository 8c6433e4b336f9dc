"""HEYEX XML exports as volumes."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medfed.data.decode import Undecodable, decode
from medfed.data.readers import folder, table
from medfed.data.readers.heyex import read_export

IMAGE = """<Image><ID>{k}</ID><ImageType><Type>{kind}</Type></ImageType>
<ImageData><ExamURL>file:///\\\\server\\share%20one\\{name}</ExamURL></ImageData></Image>"""


def export(place: Path, names: list[str], *, patient: str = "P-9", number: str = "0042", write: bool = True) -> Path:
    """An export of some B-scans (``B...``) and fundus pictures (other names), which are written beside it."""
    place.mkdir(parents=True, exist_ok=True)
    images = ""
    for k, name in enumerate(names):
        images += IMAGE.format(k=k, kind="OCT" if name.startswith("B") else "LOCALIZER", name=name.replace(" ", "%20"))
        if write:
            Image.fromarray(np.full((4, 6), 10 * k, np.uint8)).save(place / name)
    path = place / "export.xml"
    path.write_text(
        f'<?xml version="1.0"?><HEDX><BODY><Patient><ID>{number}</ID><PatientID>{patient}</PatientID>'
        f"<LastName>Doe-Secret</LastName><Study><Series>{images}</Series></Study></Patient></BODY></HEDX>",
        encoding="utf-8",
    )
    return path


def test_an_export_is_one_volume_of_its_patient(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "medfed")
    export(tmp_path / "data/DME/e1", ["N1.tif", "B10.tif", "B 2.tif"])
    export(tmp_path / "data/NORMAL", ["N1.tif", "B1.tif"], patient="")
    cohort = folder.read(tmp_path / "data", folder.Options(cache=tmp_path / "cache"))
    found = cohort.table
    # In the order of the XML and not of the names; the fundus pictures are no B-scans.
    assert [Path(p).name for p in found["path"]] == ["B10.tif", "B 2.tif", "B1.tif"]
    assert found["sample"].tolist() == ["DME/e1/export.xml#0", "DME/e1/export.xml#1", "NORMAL/export.xml"]
    assert found["patient"].tolist() == ["P-9", "P-9", "HEYEX-42"]
    assert found["frame"].tolist() == [0, 0, 0]
    assert [decode(p).pixels[0, 0, 0] for p in found["path"]] == [10, 20, 10]
    assert any("2 HEYEX exports; 2 fundus pictures left out" in n for n in cohort.findings.notes)
    assert "Secret" not in str(cohort) + caplog.text


def test_the_middle_scan_of_an_export(tmp_path):
    export(tmp_path / "DME", ["B1.tif", "B2.tif", "B3.tif"])
    cohort = folder.read(tmp_path, folder.Options(frames="middle", cache=tmp_path / "cache"))
    assert [Path(p).name for p in cohort.table["path"]] == ["B2.tif"]


def test_a_table_names_exports_or_their_pictures(tmp_path):
    export(tmp_path / "a", ["B1.tif", "B2.tif"])
    export(tmp_path / "b", ["B1.tif", "B2.tif"], patient="P-10")
    (tmp_path / "t.csv").write_text("path,label\na/export.xml,x\nb/B1.tif,y\nb/B2.tif,y\n")
    cohort = table.read(tmp_path / "t.csv", table.Options(cache=tmp_path / "cache"))
    assert cohort.table["sample"].tolist() == ["a/export.xml#0", "a/export.xml#1", "b/B1.tif", "b/B2.tif"]
    assert cohort.table["patient"].tolist() == ["P-9", "P-9", "P-10", "P-10"]
    assert cohort.labels.tolist() == [0, 0, 1, 1]


def test_what_is_missing_or_damaged_is_named(tmp_path):
    export(tmp_path / "DME/a", ["B1.tif", "B2.tif"])
    (tmp_path / "DME/a/B2.tif").unlink()
    whole = export(tmp_path / "DME/b", ["B1.tif"])
    whole.write_bytes(whole.read_bytes()[:-30])
    export(tmp_path / "DME/c", ["B1.tif"], write=False)
    (tmp_path / "DME/d").mkdir()
    (tmp_path / "DME/d/notes.xml").write_text("<notes/>")
    cohort = folder.read(tmp_path, folder.Options(cache=tmp_path / "cache"))
    reasons = {Path(u.path).relative_to(tmp_path).as_posix(): u.reason for u in cohort.findings.unusable}
    assert reasons == {
        "DME/a/B2.tif": "named by the HEYEX export, but not beside it",
        "DME/b/export.xml": "damaged HEYEX XML export",
        "DME/c/export.xml": "a HEYEX XML export without B-scans beside it",
    }
    # Where the XML is of no use, its pictures are still pictures.
    assert cohort.table["sample"].tolist() == ["DME/a/export.xml", "DME/b/B1.tif"]


def test_an_xml_that_is_no_export_is_no_image(tmp_path):
    (tmp_path / "a.xml").write_text("<a/>")
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "b.png")
    (tmp_path / "t.csv").write_text("path,label\na.xml,x\nb.png,y\n")
    cohort = table.read(tmp_path / "t.csv", table.Options(cache=tmp_path / "cache"))
    assert [u.reason for u in cohort.findings.unusable] == ["not a HEYEX XML export"]
    with pytest.raises(Undecodable, match="not a known image format"):
        decode(tmp_path / "a.xml")


def test_the_xml_alone_is_no_picture(tmp_path):
    with pytest.raises(Undecodable, match="whose images are read and not the XML itself"):
        decode(export(tmp_path, ["B1.tif"]))


def test_a_name_cannot_lead_elsewhere(tmp_path):
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "B1.tif")
    path = export(tmp_path / "e", ["B2.tif"])
    path.write_text(path.read_text().replace("B2.tif", "..%2FB1.tif"))
    with pytest.raises(Undecodable, match="without B-scans"):
        read_export(path)


def test_the_vendor_export(shared):
    found = read_export(shared / "data/oct_vendor/heyex_xml/test_dummy.xml")
    assert [p.name for p in found.bscans] == [f"B{k}.tif" for k in range(1, 11)]
    assert [p.name for p in found.fundus] == ["NIR1.tif"]
    assert (found.patient, found.missing) == ("Study-01", ())
