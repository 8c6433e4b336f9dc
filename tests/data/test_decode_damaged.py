"""Whatever the bytes are, the answer is pixels or Undecodable."""

from __future__ import annotations

import io
import pickle

import nibabel as nib
import numpy as np
import pydicom
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from pydicom.data import get_testdata_file

from medfed.data.decode import Undecodable, decode, probe, sniff
from medfed.seeding import numpy_generator

pytestmark = pytest.mark.filterwarnings("ignore")
RANDOM = numpy_generator(0, "damage")
PICTURE = RANDOM.integers(0, 255, (24, 31), dtype=np.uint8)


def encoded(kind: str) -> bytes:
    if kind == "NIFTI":
        return nib.Nifti1Image(PICTURE.astype(np.int16), np.eye(4)).to_bytes()
    if kind.startswith("DICOM"):
        dataset = pydicom.dcmread(get_testdata_file("MR_small_RLE.dcm" if kind == "DICOM-RLE" else "CT_small.dcm"))
        with io.BytesIO() as file:
            dataset.save_as(file)
            return file.getvalue()
    with io.BytesIO() as file:
        Image.fromarray(PICTURE).save(file, kind, **({"compression": "tiff_lzw"} if kind == "TIFF" else {}))
        return file.getvalue()


KINDS = ["PNG", "JPEG", "TIFF", "GIF", "BMP", "WEBP", "NIFTI", "DICOM", "DICOM-RLE"]


def attempt(path) -> np.ndarray | None:
    """Pixels, or None where the file is refused; any other error fails the test."""
    try:
        probe(path)
        decoded = decode(path)
    except Undecodable as error:
        refusal = error
    else:
        refusal = None
    if refusal:
        assert refusal.reason
        assert str(path) not in refusal.reason
        return None
    assert decoded.pixels.dtype == np.float32
    assert np.isfinite(decoded.pixels).all()
    return decoded.pixels


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_refused_or_whole(tmp_path, kind):
    """Never a picture that is partly grey: what decodes after a cut is the whole picture."""
    whole, path = encoded(kind), tmp_path / "a"
    path.write_bytes(whole)
    truth = attempt(path)
    assert truth is not None
    cuts = {*np.linspace(0, len(whole) - 1, 40, dtype=int).tolist(), 1, 2, 3, 8, 131, 132, 140, len(whole) - 2}
    refused = 0
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        pixels = attempt(path)
        refused += pixels is None
        if pixels is not None:
            np.testing.assert_array_equal(pixels, truth)
    assert refused > len(cuts) // 2


@pytest.mark.parametrize("kind", KINDS)
def test_changed_bytes(tmp_path, kind):
    whole, path = np.frombuffer(encoded(kind), dtype=np.uint8), tmp_path / "a"
    for _ in range(40):
        damaged = whole.copy()
        places = RANDOM.integers(0, min(len(whole), 1500), RANDOM.integers(1, 12))
        damaged[places] = RANDOM.integers(0, 256, len(places))
        path.write_bytes(damaged.tobytes())
        attempt(path)


@given(
    st.binary(max_size=700),
    st.sampled_from(
        [
            b"",
            b"\x89PNG\r\n\x1a\n",
            b"\xff\xd8\xff\xe0",
            b"II*\0",
            b"GIF89a",
            b"BM",
            b"\x1f\x8b\x08",
            b"\0" * 128 + b"DICM",
            b"\x08\0\x05\0CS",
            b"\x02\0\0\0UL\x04\0",
            b"RIFF\x10\0\0\0WEBP",
        ]
    ),
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes(tmp_path, body, start):
    (tmp_path / "a").write_bytes(start + body)
    attempt(tmp_path / "a")


def test_compressed_dicom_is_not_half_decoded(tmp_path, shared):
    folder = shared / "data" / "dicom_odd"
    for name in (
        "JPGLosslessP14SV1_1s_1f_8b",
        "CTImage_JPEG2000LosslessOnly",
        "CTImage_JPEGLSLossless",
        "CTImage_RLELossless",
    ):
        whole = (folder / f"{name}.dcm").read_bytes()
        (tmp_path / "a").write_bytes(whole[: len(whole) * 2 // 3])
        assert attempt(tmp_path / "a") is None, name


def test_what_a_decoder_raises_beyond_exceptions(tmp_path, monkeypatch):
    """A panic of a decoder written in Rust derives from BaseException; Ctrl-C stays Ctrl-C."""
    from medfed.data import dicom

    class PanicException(BaseException):
        pass

    def raising(error):
        def read(*_):
            raise error

        return read

    (tmp_path / "a").write_bytes(encoded("DICOM"))
    monkeypatch.setattr(dicom, "decode", raising(PanicException()))
    with pytest.raises(Undecodable) as refused:
        decode(tmp_path / "a")
    assert refused.value.reason == "damaged file (PanicException)"
    monkeypatch.setattr(dicom, "decode", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        decode(tmp_path / "a")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"\0" * 1000, "not a known image format"),
        (b"sample,label\n1,2\n", "not a known image format"),
    ],
)
def test_clear_reasons(tmp_path, content, reason):
    (tmp_path / "a.dcm").write_bytes(content)
    for read in (decode, probe):
        with pytest.raises(Undecodable) as refused:
            read(tmp_path / "a.dcm")
        assert refused.value.reason == reason


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(Undecodable, match="file not found"):
        decode(tmp_path / "absent.png")
    with pytest.raises(Undecodable, match="a folder"):
        decode(tmp_path)


def test_the_error_survives_a_process_border():
    error = pickle.loads(pickle.dumps(Undecodable("empty file", where="a/b.png")))
    assert (error.reason, error.where, str(error)) == (
        "empty file",
        "a/b.png",
        "a/b.png: cannot be decoded: empty file.",
    )


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"II*\0" + b"\0" * 124 + b"DICM", "dicom"),  # whole-slide files are both
        (b"\x08\x00\x08\x00CS\x16\x00", "dicom"),
        (b"\x08\x00\x00\x00\x04\x00\x00\x00", "dicom"),
        (b"\x00\x08\x00\x05CS\x00\x0a", "dicom"),
        (b"\x08\x00\x00\x00\xff\xff\xff\x7f", None),
        (b"%PDF-1.7", None),
        (b"PK\x03\x04", None),
    ],
)
def test_sniff(head, kind):
    assert sniff(head) == kind
