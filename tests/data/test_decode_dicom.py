"""DICOM decoding against pydicom's own arrays, hand-made files and the whole table of odd files."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.sequence import Sequence
from pydicom.uid import (
    CTImageStorage,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    generate_uid,
)

from medfed.data.decode import DecodeOptions, Undecodable, decode, probe
from medfed.data.dicom import stream_size
from medfed.data.dicom_values import window, wraps_12_bit

ODD = Path(__file__).resolve().parents[3] / "shared" / "data" / "dicom_odd"
ROWS = list(csv.DictReader((ODD / "MANIFEST.csv").open())) if (ODD / "MANIFEST.csv").is_file() else []

# Files of the table that must give a clear error, and the one they give.
REFUSED = {
    "no-pixel-data.dcm": "not an image: Basic Text SR Storage",
    "reportsi.dcm": "not an image: Basic Text SR Storage",
    "meta_missing_tsyntax.dcm": "no pixel data",
    "MR_truncated.dcm": "pixel data shorter than the header says (8130 of 8192 bytes)",
    "derived_head_ct_truncated.dcm": "pixel data shorter than the header says (71222 of 131072 bytes)",
    "JPEG2000-embedded-sequence-delimiter.dcm": (
        "compressed pixels of another size than the header says (1024 x 3722445056)"
    ),
    "GH177_D_CLUNIE_CT1_IVRLE_BigEndian_undefined_length.dcm": "damaged DICOM header",
}
NOTED = {
    "MR_small_padded.dcm": "trailing_bytes_ignored",
    "693_J2KI.dcm": "codestream_bits_differ",
    "vlut_04.dcm": "voi_lut_applied",
    "examples_palette.dcm": "palette_applied",
    "derived_rsna_wrap_u12.dcm": "rsna_12bit_wrap_suspected",
    "derived_dermoscopic_photo_jpeg.dcm": "ybr_to_rgb",
    "GDCMJ2K_TextGBR.dcm": "ybr_to_rgb",
}


def hounsfield(dataset: Dataset) -> np.ndarray:
    """Hounsfield units by pydicom and the header alone."""
    return dataset.pixel_array.astype(float) * float(dataset.RescaleSlope) + float(dataset.RescaleIntercept)


@pytest.mark.parametrize("row", ROWS or [None], ids=lambda row: row["file"] if row else "absent")
def test_every_odd_file_behaves_as_its_manifest_says(row, shared):
    path = ODD / row["file"]
    if row["file"] in REFUSED:
        assert re.search("error|skip|fail cleanly", row["expected"])
        with pytest.raises(Undecodable) as refused:
            decode(path)
        assert refused.value.reason == REFUSED[row["file"]]
        return
    rows, columns = map(int, re.search(r"(\d+)x(\d+)", row["header"]).groups())
    frames = re.search(r"nf=(\d+)", row["header"])
    found = probe(path)
    assert (found.frames, found.height, found.width) == (int(frames[1]) if frames else 1, rows, columns)
    decoded = [decode(path, frame) for frame in (0, found.frames - 1)]
    assert {d.pixels.shape[1:] for d in decoded} == {(rows, columns)}
    dataset = pydicom.dcmread(path)
    assert decoded[0].kind == ("hounsfield" if dataset.get("Modality") == "CT" else "image")
    with pytest.raises(Undecodable, match="does not exist"):
        decode(path, found.frames)
    if row["file"] in NOTED:
        assert NOTED[row["file"]] in decoded[0].corrections
    if "identical" in row["expected"]:
        np.testing.assert_array_equal(decoded[0].pixels, decode(ODD / "CTImage_explLE.dcm").pixels)
    if decoded[0].kind == "hounsfield" and "RescaleSlope" in dataset:
        truth = hounsfield(dataset)
        if dataset.get("PixelPaddingValue") is not None:
            truth[dataset.pixel_array == dataset.PixelPaddingValue] = -1024
        np.testing.assert_allclose(decoded[0].pixels[0], np.maximum(truth, -1024), atol=1e-3)


def test_manifest_is_covered(shared):
    names = {row["file"] for row in ROWS}
    assert len(names) == 36
    assert names > set(REFUSED) | set(NOTED)


def test_shared_functional_groups_hold_the_rescale(shared):
    """The enhanced CT states its intercept -1024 in a functional group only; nothing at the top level does."""
    path = ODD / "ECT_fragmented_no_bot_jpegls.dcm"
    stored = pydicom.dcmread(path).pixel_array
    for frame in (0, 1):
        np.testing.assert_array_equal(decode(path, frame).pixels[0], stored[frame] - 1024.0)


def test_stream_headers_say_what_the_files_say(shared):
    for name, truth in {
        "CTImage_JPEGProcess14": (512, 512, 16),
        "CTImage_JPEGLSLossless": (512, 512, 16),
        "CTImage_JPEGProcess2_4": (512, 512, 12),
        "CTImage_JPEG2000LosslessOnly": (512, 512, 16),
        "derived_dermoscopic_photo_jpeg": (160, 160, 8),
    }.items():
        whole = (ODD / f"{name}.dcm").read_bytes()
        assert stream_size(whole[whole.index(b"\xe0\x7f\x10\x00") :]) == truth, name
    assert stream_size(b"no stream") is None


def test_a_compressed_bomb_is_refused_by_its_header(tmp_path, shared):
    """A stream that claims 60000 x 60000 pixels behind a header of 512 x 512."""
    whole = (ODD / "CT1_J2KI.dcm").read_bytes()
    at = whole.index(b"\xff\x4f\xff\x51") + 8
    (tmp_path / "a").write_bytes(whole[:at] + (60000).to_bytes(4, "big") * 2 + whole[at + 8 :])
    with pytest.raises(Undecodable, match="another size"):
        decode(tmp_path / "a")


def test_rsna_wrap_is_undone_when_asked_for(shared):
    path = ODD / "derived_rsna_wrap_u12.dcm"
    truth = np.load(ODD / "derived_rsna_wrap_u12_true_hu.npy")
    fixed = decode(path, options=DecodeOptions(fix_12bit_wrap=True))
    np.testing.assert_array_equal(fixed.pixels[0], np.maximum(truth, -1024))
    assert "rsna_12bit_wrap" in fixed.corrections
    raw = decode(path)
    assert raw.pixels.max() > 3000  # air is brighter than bone
    assert "rsna_12bit_wrap" not in raw.corrections


@pytest.mark.parametrize(
    ("bits", "representation", "intercept", "wraps"),
    [
        (12, 0, 0, True),
        (12, 0, -99, True),
        (12, 0, -100, False),
        (12, 0, -1024, False),
        (12, 1, 0, False),
        (16, 0, 0, False),
    ],
)
def test_wrap_predicate(bits, representation, intercept, wraps):
    assert wraps_12_bit(bits, representation, intercept) is wraps


def test_palette_is_pydicoms(shared):
    path = ODD / "examples_palette.dcm"
    dataset = pydicom.dcmread(path)
    truth = pydicom.pixels.apply_color_lut(dataset.pixel_array, dataset)
    np.testing.assert_array_equal(decode(path).pixels, np.moveaxis(truth, -1, 0))


def test_dermoscopic_jpeg_has_the_colours_of_the_original(shared):
    original = Image.open(shared / "data" / "derm" / "images" / "ISIC_0024329.jpg").convert("RGB")
    decoded = decode(ODD / "derived_dermoscopic_photo_jpeg.dcm").pixels
    difference = np.abs(decoded - np.moveaxis(np.asarray(original, dtype=float), -1, 0))
    assert difference.mean() < 5  # it was compressed a second time


def test_real_head_ct_agrees_with_pydicom(shared):
    paths = sorted((shared / "data" / "ct" / "ge_head_trauma").glob("*.dcm"))[::9]
    for path in paths:
        decoded, dataset = decode(path), pydicom.dcmread(path)
        np.testing.assert_array_equal(decoded.pixels[0], np.maximum(hounsfield(dataset), -1024))
        assert decoded.value_range == (decoded.pixels.min(), decoded.pixels.max())
        assert decoded.header["patient_id"] == str(dataset.PatientID)
        assert decoded.header["study_uid"] == dataset.StudyInstanceUID
        assert decoded.header["spacing"] == "\\".join(map(str, dataset.PixelSpacing))


def write(path: Path, stored: np.ndarray, syntax: str = ExplicitVRLittleEndian, **values) -> Path:
    """A small DICOM file; a value None deletes the element."""
    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = syntax, CTImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    dataset = FileDataset(
        str(path),
        {},
        file_meta=meta,
        preamble=b"\0" * 128,
        is_implicit_VR=syntax == ImplicitVRLittleEndian,
        is_little_endian=syntax != ExplicitVRBigEndian,
    )
    dataset.SOPClassUID, dataset.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
    dataset.Modality, dataset.PatientID = "CT", "007"
    dataset.SamplesPerPixel = 3 if stored.ndim == 3 else 1
    dataset.PhotometricInterpretation = "RGB" if stored.ndim == 3 else "MONOCHROME2"
    dataset.Rows, dataset.Columns = stored.shape[:2]
    dataset.BitsAllocated = dataset.BitsStored = 8 * stored.dtype.itemsize
    dataset.HighBit = dataset.BitsStored - 1
    dataset.PixelRepresentation = int(stored.dtype.kind == "i")
    dataset.RescaleSlope, dataset.RescaleIntercept = "1", "-1024"
    if dataset.SamplesPerPixel == 3:
        dataset.PlanarConfiguration = 0
    for keyword, value in values.items():
        if value is None:
            delattr(dataset, keyword)
        else:
            setattr(dataset, keyword, value)
    order = ">" if syntax == ExplicitVRBigEndian else "<"
    dataset.PixelData = stored.astype(stored.dtype.newbyteorder(order)).tobytes()
    dataset["PixelData"].VR = "OW" if dataset.BitsAllocated == 16 else "OB"
    dataset.save_as(path, enforce_file_format=True)
    return path


RAMP = np.arange(12, dtype=np.int16).reshape(3, 4) * 100
MR = {"Modality": "MR", "RescaleSlope": None, "RescaleIntercept": None}


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian, ExplicitVRBigEndian])
def test_rows_are_rows_in_every_native_syntax(tmp_path, syntax):
    decoded = decode(write(tmp_path / "IM0001", RAMP, syntax))
    assert decoded.pixels.shape == (1, 3, 4)
    assert decoded.pixels.dtype == np.float32
    np.testing.assert_array_equal(decoded.pixels[0], RAMP - 1024.0)
    assert decoded.header["patient_id"] == "007"
    assert decoded.header["transfer_syntax"] == syntax


def test_slope_and_intercept(tmp_path):
    path = write(tmp_path / "a.IMA", RAMP, RescaleSlope="0.5", RescaleIntercept="-10")
    np.testing.assert_array_equal(decode(path).pixels[0], RAMP * 0.5 - 10)


def test_missing_rescale_is_counted(tmp_path):
    decoded = decode(write(tmp_path / "a", RAMP, RescaleSlope=None, RescaleIntercept=None))
    np.testing.assert_array_equal(decoded.pixels[0], RAMP)
    assert decoded.corrections == ("ct_rescale_missing",)


def test_zero_slope_is_refused(tmp_path):
    with pytest.raises(Undecodable, match="slope is 0"):
        decode(write(tmp_path / "a", RAMP, RescaleSlope="0"))


@pytest.mark.parametrize(("declared", "signed"), [(-2000, True), (63536, False)])
def test_padding_becomes_air(tmp_path, declared, signed):
    stored = RAMP.copy()
    stored[0, 0] = -2000
    path = write(tmp_path / "a", stored)
    dataset = pydicom.dcmread(path)
    dataset.add_new("PixelPaddingValue", "SS" if signed else "US", declared)
    dataset.save_as(path)
    decoded = decode(path)
    assert decoded.pixels[0, 0, 0] == -1024
    assert decoded.pixels[0, 0, 1] == 100 - 1024
    assert "ct_padding_to_air" in decoded.corrections


def test_padding_that_is_also_tissue_goes_only_at_the_border(tmp_path):
    stored = np.full((5, 6), 50, dtype=np.int16)
    stored[0, :3] = 0  # outside the scan
    stored[2, 3] = 0  # water within the head
    decoded = decode(write(tmp_path / "a", stored, RescaleIntercept="0", PixelPaddingValue=0))
    assert (decoded.pixels[0, 0, :3] == -1024).all()
    assert decoded.pixels[0, 2, 3] == 0


def test_nothing_lies_below_air(tmp_path):
    stored = RAMP - 500
    decoded = decode(write(tmp_path / "a", stored.astype(np.int16)))
    np.testing.assert_array_equal(decoded.pixels[0], np.maximum(stored - 1024.0, -1024))
    assert decoded.corrections == ("ct_below_air_raised",)


def test_an_8_bit_ct_without_rescale_is_a_screenshot(tmp_path):
    decoded = decode(write(tmp_path / "a", RAMP.astype(np.uint8), RescaleSlope=None, RescaleIntercept=None))
    assert (decoded.kind, decoded.value_range) == ("image", (0, 255))


def test_monochrome1_is_inverted(tmp_path):
    stored = np.array([[0, 1, 255]], dtype=np.uint8)
    decoded = decode(write(tmp_path / "a", stored, PhotometricInterpretation="MONOCHROME1", **MR))
    np.testing.assert_array_equal(decoded.pixels[0], [[255, 254, 0]])
    assert "monochrome1_inverted" in decoded.corrections


def test_monochrome1_after_its_window(tmp_path):
    stored = np.array([[0, 100, 1000]], dtype=np.uint16)
    values = {"WindowCenter": "100.5", "WindowWidth": "101", "PhotometricInterpretation": "MONOCHROME1"}
    decoded = decode(write(tmp_path / "a", stored, **values, **MR))
    np.testing.assert_allclose(decoded.pixels[0], [[255, 127.5, 0]], atol=1e-4)


def test_the_first_of_several_windows_is_applied(tmp_path):
    """PS3.3 C.11.2.1.2.1: y = ((x - (c - 0.5)) / (w - 1) + 0.5) 255, here c = 600, w = 1001."""
    decoded = decode(write(tmp_path / "a", RAMP, WindowCenter=[600, 40], WindowWidth=[1001, 80], **MR))
    truth = np.clip(((RAMP - 599.5) / 1000 + 0.5) * 255, 0, 255)
    np.testing.assert_allclose(decoded.pixels[0], truth, atol=1e-3)
    assert decoded.value_range == (0, 255)
    assert decoded.corrections == ("window_applied",)


def test_window_agrees_with_pydicom(tmp_path):
    for function in ("LINEAR", "LINEAR_EXACT", "SIGMOID"):
        path = write(
            tmp_path / function,
            RAMP.astype(np.uint16),
            WindowCenter=500,
            WindowWidth=400,
            VOILUTFunction=function,
            **MR,
        )
        dataset = pydicom.dcmread(path)
        truth = pydicom.pixels.apply_windowing(dataset.pixel_array, dataset) / 65535 * 255
        np.testing.assert_allclose(decode(path).pixels[0], truth, atol=1e-3)


def test_window_of_width_one_is_a_step():
    np.testing.assert_array_equal(window(np.float32([9, 10, 11]), 10, 1), [0, 255, 255])


def test_windows_can_be_left_and_bad_ones_are_ignored(tmp_path):
    path = write(tmp_path / "a", RAMP, WindowCenter=600, WindowWidth=0, **MR)
    decoded = decode(path)
    assert decoded.corrections == ("invalid_window_ignored", "no_window_full_range")
    assert decoded.value_range == (0, 1100)
    plain = decode(path, options=DecodeOptions(apply_voi=False))
    assert (plain.corrections, plain.value_range) == ((), (-32768, 32767))
    np.testing.assert_array_equal(plain.pixels[0], RAMP)


def test_per_frame_rescale_wins(tmp_path):
    stored = np.stack([RAMP, RAMP + 1])
    path = write(tmp_path / "a", RAMP, NumberOfFrames=2)
    dataset = pydicom.dcmread(path)
    groups = []
    for intercept in ("-1000", "0"):
        item, group = Dataset(), Dataset()
        item.RescaleSlope, item.RescaleIntercept = "1", intercept
        group.PixelValueTransformationSequence = Sequence([item])
        groups.append(group)
    dataset.PerFrameFunctionalGroupsSequence = Sequence(groups)
    dataset.PixelData = stored.tobytes()
    dataset.save_as(path)
    np.testing.assert_array_equal(decode(path, 0).pixels[0], RAMP - 1000.0)
    np.testing.assert_array_equal(decode(path, 1).pixels[0], RAMP + 1.0)


@pytest.mark.parametrize("planar", [0, 1])
def test_colour_by_pixel_and_by_plane(tmp_path, planar):
    picture = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)
    path = write(tmp_path / "a", picture, PlanarConfiguration=planar, **MR)
    if planar:
        dataset = pydicom.dcmread(path)
        dataset.PixelData = np.moveaxis(picture, -1, 0).tobytes()
        dataset.save_as(path)
    np.testing.assert_array_equal(decode(path).pixels, np.moveaxis(picture, -1, 0))


def test_without_preamble_and_without_meta(tmp_path):
    path = write(tmp_path / "a.dcm", RAMP)
    whole = path.read_bytes()
    (tmp_path / "b").write_bytes(whole[132:])
    np.testing.assert_array_equal(decode(tmp_path / "b").pixels[0], RAMP - 1024.0)
    for syntax in (ImplicitVRLittleEndian, ExplicitVRLittleEndian):
        dataset = pydicom.dcmread(write(tmp_path / "c.dcm", RAMP, syntax))
        start = dataset.file_meta.FileMetaInformationGroupLength + 132 + 12
        (tmp_path / "d").write_bytes((tmp_path / "c.dcm").read_bytes()[start:])
        decoded = decode(tmp_path / "d")
        np.testing.assert_array_equal(decoded.pixels[0], RAMP - 1024.0)
        assert "transfer_syntax_guessed" in decoded.corrections


def test_limits(tmp_path):
    path = write(tmp_path / "a", RAMP)
    assert decode(path, options=DecodeOptions(max_pixels=12)).pixels.size == 12
    with pytest.raises(Undecodable, match="too many pixels"):
        decode(path, options=DecodeOptions(max_pixels=11))


def test_dicomdir_is_not_an_image(tmp_path):
    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, "1.2.840.10008.1.3.10"
    meta.MediaStorageSOPInstanceUID = generate_uid()
    dataset = FileDataset("x", {}, file_meta=meta, preamble=b"\0" * 128)
    dataset.DirectoryRecordSequence = Sequence([])
    dataset.save_as(tmp_path / "DICOMDIR", enforce_file_format=True)
    for read in (decode, probe):
        with pytest.raises(Undecodable) as refused:
            read(tmp_path / "DICOMDIR")
        assert refused.value.reason == "DICOMDIR"


def test_an_unreadable_id_does_not_spoil_the_pixels(tmp_path):
    path = write(tmp_path / "a", RAMP)
    path.write_bytes(path.read_bytes().replace(b"LO\x04\x00007 ", b"LO\x04\x00\xff\xfe\xfd "))
    assert decode(path).pixels.shape == (1, 3, 4)
