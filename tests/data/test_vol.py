"""Heidelberg .vol: the layout is written here by hand, offset by offset, as Heidelberg's description has it."""

from __future__ import annotations

import logging
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medfed.data.decode import DecodeOptions, Undecodable, decode, probe
from medfed.data.readers import folder, table
from medfed.data.transforms import DecodeImaged, ToUnitRanged
from medfed.seeding import numpy_generator

INVALID = np.finfo(np.float32).max
PATIENT = "SECRET-PATIENT-7"


def vol(scans: np.ndarray, *, layers: int = 3, patient: str = PATIENT, eye: str = "OS", pattern: int = 3) -> bytes:
    """A volume of reflectivities ``[scans, height, width]`` with a fundus picture of 6 x 5 and a thickness grid."""
    count, height, width = scans.shape
    length = 256 + layers * 4 * width
    head = bytearray(2048)
    head[0:12] = b"HSF-OCT-103\0"
    struct.pack_into("<III", head, 12, width, count, height)
    struct.pack_into("<ddd", head, 24, 0.0115, 0.12, 0.00387)
    struct.pack_into("<II", head, 48, 6, 5)
    head[84:86] = eye.encode()
    struct.pack_into("<II", head, 96, pattern, length)
    struct.pack_into("<I", head, 136, 4711)
    head[140 : 140 + len(patient)] = patient.encode()
    parts = [bytes(head), bytes(6 * 5)]
    for scan in scans.astype("<f4"):
        own = bytearray(256)
        own[0:11] = b"HSF-BS-103\0"
        struct.pack_into("<I", own, 12, length)
        parts += [bytes(own), np.full((layers, width), INVALID, "<f4").tobytes(), scan.tobytes()]
    return b"".join([*parts, bytes(40)])


@pytest.fixture
def scans() -> np.ndarray:
    return numpy_generator(0, "vol").random((3, 4, 6), dtype=np.float32)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_grey_is_the_fourth_root_of_reflectivity(tmp_path):
    scan = np.zeros((1, 2, 3), np.float32)
    scan[0, 0] = [1 / 16, 1 / 81, 1]  # fourth roots 1/2, 1/3, 1: row 0 is the top of the picture
    scan[0, 1, 2] = INVALID
    decoded = decode(write(tmp_path / "a", vol(scan)))
    np.testing.assert_allclose(decoded.pixels[0], [[127.5, 85, 255], [0, 0, 0]], rtol=1e-6)
    assert (decoded.kind, decoded.value_range) == ("image", (0.0, 255.0))
    assert decoded.corrections == ("vol_invalid_pixels_blackened",)


@pytest.mark.parametrize("pattern", [1, 2, 3, 4, 5])  # line, circle, volumes, star
def test_each_b_scan_is_a_frame_whatever_the_scan_pattern(tmp_path, scans, pattern):
    path = write(tmp_path / "no_suffix", vol(scans, pattern=pattern))
    found = probe(path)
    assert (found.kind, found.frames, found.height, found.width) == ("heidelberg_vol", 3, 4, 6)
    assert found.header["patient_id"] == PATIENT
    assert (found.header["laterality"], found.header["modality"]) == ("L", "OPT")
    assert found.header["spacing"] == "0.00387\\0.0115"  # between rows, between columns, as in DICOM
    for frame in range(3):
        decoded = decode(path, frame)
        np.testing.assert_allclose(decoded.pixels[0], 255 * scans[frame].astype(float) ** 0.25, rtol=1e-5)
        assert not decoded.corrections
    with pytest.raises(Undecodable, match="frame 3 does not exist"):
        decode(path, 3)
    with pytest.raises(Undecodable, match="too many pixels"):
        decode(path, 0, DecodeOptions(max_pixels=23))


@pytest.mark.parametrize(("patient", "expected"), [("", "HEYEX-4711"), ("unknown", "HEYEX-4711"), ("007", "007")])
def test_who_has_no_id_is_known_by_the_number_in_the_database(tmp_path, scans, patient, expected):
    assert probe(write(tmp_path / "a.vol", vol(scans, patient=patient))).header["patient_id"] == expected


def test_values_beyond_one_are_clipped_and_counted(tmp_path, scans):
    scans[0, 0, 0], scans[0, 0, 1] = 1.5, -0.25
    decoded = decode(write(tmp_path / "a", vol(scans)))
    assert decoded.pixels[0, 0, :2].tolist() == [255, 0]
    assert decoded.corrections == ("vol_out_of_range_clipped",)


def test_grey_values_in_place_of_reflectivity_are_taken_as_they_are(tmp_path):
    grey = np.arange(24, dtype=np.float32).reshape(1, 4, 6) * 11
    decoded = decode(write(tmp_path / "a", vol(grey)))
    np.testing.assert_array_equal(decoded.pixels, grey)
    assert decoded.corrections == ("vol_grey_values_taken",)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda b: b[:1000], "header of 1000 bytes"),
        (lambda b: b[: 2048 + 30 + 8], r"shorter than the header says \(0 of 3"),
        (lambda b: b[:-50], r"shorter than the header says \(2 of 3"),
        (lambda b: b[:12] + b"\0\0\0\0" + b[16:], "damaged Heidelberg .vol header"),
        (lambda b: b[:16] + b"\xff\xff\xff\xff" + b[20:], "damaged Heidelberg .vol header"),
        (lambda b: b[:48] + b"\xff\xff\xff\x7f" + b[52:], "damaged Heidelberg .vol header"),
        (lambda b: b[: 2078 + 12] + b"\1\0\0\0" + b[2078 + 16 :], "damaged header of a B-scan"),
    ],
)
def test_damaged_volumes_are_refused_with_a_reason(tmp_path, scans, spoil, reason):
    path = write(tmp_path / "a.vol", spoil(vol(scans)))
    for read in (probe, decode):
        with pytest.raises(Undecodable, match=reason) as refused:
            read(path)
        assert PATIENT not in str(refused.value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [(np.nan, "NaN or infinite"), (np.inf, "NaN or infinite"), (INVALID, "no valid pixels"), (7.5, "no reflectivity")],
)
def test_pixels_that_are_no_picture_are_refused(tmp_path, value, reason):
    with pytest.raises(Undecodable, match=reason):
        decode(write(tmp_path / "a.vol", vol(np.full((1, 4, 6), value))))


def test_readers_take_frames_and_patient_and_name_what_they_leave_out(tmp_path, scans, caplog, capfd):
    caplog.set_level(logging.DEBUG, "medfed")
    write(tmp_path / "data/DME/a.vol", vol(scans))
    write(tmp_path / "data/DME/cut.vol", vol(scans)[:-60])
    write(tmp_path / "data/NORMAL/b.vol", vol(scans, patient="other"))
    write(tmp_path / "data/NORMAL/odd.vol", b"something else")
    write(tmp_path / "data/NORMAL/c.e2e", b"CMDb" + bytes(200))
    cohort = folder.read(tmp_path / "data", folder.Options(cache=tmp_path / "cache"))
    assert cohort.table["sample"].tolist() == [f"{v}#{k}" for v in ("DME/a.vol", "NORMAL/b.vol") for k in range(3)]
    assert cohort.table["patient"].tolist() == [PATIENT] * 3 + ["other"] * 3
    reasons = {u.sample: u.reason for u in cohort.findings.unusable}
    assert reasons["DME/cut.vol"].startswith("pixel data shorter")
    assert reasons["NORMAL/odd.vol"] == "not a known image format"
    assert "export it from HEYEX" in reasons["NORMAL/c.e2e"]

    (tmp_path / "data/table.csv").write_text("path,label,frame\nDME/a.vol,DME,2\nNORMAL/b.vol,NORMAL,\n")
    cohort = table.read(tmp_path / "data/table.csv", table.Options(frames="middle", cache=tmp_path / "cache"))
    assert cohort.table["frame"].tolist() == [2, 1]
    assert cohort.table["patient"].tolist() == [PATIENT, "other"]

    row = cohort.table.iloc[0]
    load = DecodeImaged("image")
    d = ToUnitRanged("image")(load({"image": row["path"], "frame": row["frame"]}))
    np.testing.assert_allclose(d["image"][0], scans[2].astype(float) ** 0.25, rtol=1e-5)
    assert "vol_invalid" not in str(d["image_corrections"])
    # Neither patient nor eye goes anywhere but into the table and the pixels' own meta data.
    said = caplog.text + "".join(capfd.readouterr()) + str(cohort.findings) + str(dict(d))
    assert PATIENT not in said


def test_vendor_volume_shows_the_pictures_of_its_xml_export(shared):
    """The same B-scans, exported both ways by another program: same orientation, same order."""
    vendor = shared / "data/oct_vendor"
    path = vendor / "test_volume.vol"
    assert probe(path).frames == 10
    for frame in range(10):
        picture = np.asarray(Image.open(vendor / f"heyex_xml/B{frame + 1}.tif"))
        np.testing.assert_array_equal(decode(path, frame).pixels[0], picture)


def test_eyepy_reads_the_same_numbers(tmp_path, scans):
    reader = pytest.importorskip("eyepy.io.he.vol_reader")
    scans[1, 0, 0] = INVALID
    path = write(tmp_path / "a.vol", vol(scans))
    theirs = reader.HeVolReader(path).parsed_file
    assert theirs.patient_id == PATIENT
    for frame, bscan in enumerate(theirs.bscans):
        valid = bscan.data < 3e38
        expected = 255 * np.where(valid, bscan.data, 0).astype(float) ** 0.25
        np.testing.assert_allclose(decode(path, frame).pixels[0], expected, rtol=1e-5)
