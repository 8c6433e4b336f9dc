"""OCT as hospitals have it: Spectralis shapes, grey stored as RGB, multi-frame ophthalmic tomography."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pydicom
import pytest
import torch
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLSLossless,
    OphthalmicTomographyImageStorage,
    RLELossless,
    generate_uid,
)

from medfed.data.decode import Undecodable, decode, probe
from medfed.data.pixels import resize
from medfed.data.readers import folder
from medfed.data.transforms import ResizeImaged
from medfed.seeding import numpy_generator
from medfed.training.bundle import TrainingBundle

OCT = "oct_bscan_classification"
FRAMES, HEIGHT, WIDTH = 4, 48, 64  # JPEG 2000 encoders refuse smaller ones


def tomography(path: Path, syntax: UID, bits: int, patient: str = "000123") -> np.ndarray:
    """Writes a volume as the standard has it (PS3.3 A.52.4.3); returns its stored values ``[F, H, W]``."""
    top = 2**bits - 1
    ramp = np.linspace(0, top, WIDTH)[None, None] * np.linspace(0.2, 1, HEIGHT)[None, :, None]
    noise = numpy_generator(bits, "opt").random((FRAMES, HEIGHT, WIDTH)) * top * 0.05
    volume = (ramp * np.linspace(0.5, 0.95, FRAMES)[:, None, None] + noise).astype(np.uint16 if bits > 8 else np.uint8)
    volume[0, 0, 0], volume[:, -1, -1] = top, np.arange(FRAMES)
    d = Dataset()
    d.file_meta = FileMetaDataset()
    d.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    d.SOPClassUID = d.file_meta.MediaStorageSOPClassUID = OphthalmicTomographyImageStorage
    d.SOPInstanceUID = d.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    d.StudyInstanceUID, d.SeriesInstanceUID, d.FrameOfReferenceUID = (generate_uid() for _ in range(3))
    d.PatientID, d.PatientName, d.Modality, d.ImageLaterality = patient, "Doe^Secret", "OPT", "R"
    d.ImageType = ["ORIGINAL", "PRIMARY"]
    d.Rows, d.Columns, d.NumberOfFrames, d.SamplesPerPixel = HEIGHT, WIDTH, FRAMES, 1
    d.PhotometricInterpretation, d.PresentationLUTShape = "MONOCHROME2", "IDENTITY"
    d.BitsAllocated = 16 if bits > 8 else 8
    d.BitsStored, d.HighBit, d.PixelRepresentation = bits, bits - 1, 0
    measures, plane = Dataset(), Dataset()
    measures.PixelSpacing, measures.SliceThickness = ["0.00387", "0.0115"], "0.12"
    plane.ImageOrientationPatient = [1, 0, 0, 0, 0, -1]
    shared = Dataset()
    shared.PixelMeasuresSequence, shared.PlaneOrientationSequence = [measures], [plane]
    d.SharedFunctionalGroupsSequence = [shared]
    groups = []
    for k in range(FRAMES):
        position, content, group = Dataset(), Dataset(), Dataset()
        position.ImagePositionPatient = [0, 0.12 * k, 0]
        content.StackID, content.InStackPositionNumber, content.DimensionIndexValues = "1", k + 1, [1, k + 1]
        group.PlanePositionSequence, group.FrameContentSequence = [position], [content]
        groups.append(group)
    d.PerFrameFunctionalGroupsSequence = groups
    d.PixelData = volume.tobytes()
    d["PixelData"].VR = "OW" if bits > 8 else "OB"
    if syntax.is_encapsulated:
        try:
            d.compress(syntax)
        except (RuntimeError, NotImplementedError) as error:
            pytest.skip(f"no encoder: {error}")
    else:
        d.file_meta.TransferSyntaxUID = syntax
    path.parent.mkdir(parents=True, exist_ok=True)
    d.save_as(path, enforce_file_format=True, **_encoding(syntax))
    return volume


def _encoding(syntax: UID) -> dict[str, bool]:
    plain = syntax == ImplicitVRLittleEndian
    return {"implicit_vr": True, "little_endian": True} if plain else {}


SYNTAXES = [
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    DeflatedExplicitVRLittleEndian,
    RLELossless,
    JPEG2000Lossless,
    JPEGLSLossless,
]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda s: s.keyword)
def test_each_frame_of_a_tomography_volume_is_a_picture(tmp_path, syntax, bits):
    volume = tomography(tmp_path / "a.dcm", syntax, bits)
    found = probe(tmp_path / "a.dcm")
    assert (found.frames, found.height, found.width) == (FRAMES, HEIGHT, WIDTH)
    assert (found.header["patient_id"], found.header["modality"]) == ("000123", "OPT")
    for frame in (0, FRAMES - 1, 1):
        decoded = decode(tmp_path / "a.dcm", frame)
        assert decoded.kind == "image"
        np.testing.assert_array_equal(decoded.pixels[0], volume[frame])
        # 16 bits without a window: the range found, as viewers do.
        expected = (0, 255) if bits == 8 else (float(volume[frame].min()), float(volume[frame].max()))
        assert decoded.value_range == expected
    with pytest.raises(Undecodable, match="frame 4 does not exist"):
        decode(tmp_path / "a.dcm", FRAMES)


def test_frames_share_their_patient_and_stay_together(tmp_path, caplog):
    tomography(tmp_path / "d/DME/a.dcm", JPEG2000Lossless, 8)
    tomography(tmp_path / "d/NORMAL/b", ExplicitVRLittleEndian, 8, patient="7")
    whole = (tmp_path / "d/NORMAL/b").read_bytes()
    (tmp_path / "d/NORMAL/cut.dcm").write_bytes(whole[:-100])
    cohort = folder.read(tmp_path / "d", folder.Options(cache=tmp_path / "cache"))
    assert cohort.table["patient"].tolist() == ["000123"] * 4 + ["7"] * 4 + ["7"] * 4
    assert cohort.table["frame"].tolist() == [0, 1, 2, 3] * 3
    with pytest.raises(Undecodable, match="shorter than the header says"):
        decode(tmp_path / "d/NORMAL/cut.dcm")
    assert "Secret" not in caplog.text + str(cohort.findings)


def test_the_volume_at_hand(shared):
    path = shared / "data/dicom_odd/derived_opt_4frames.dcm"
    dataset = pydicom.dcmread(path)
    assert probe(path).frames == 4
    for frame in range(4):
        np.testing.assert_array_equal(decode(path, frame).pixels[0], dataset.pixel_array[frame])


@pytest.mark.parametrize("width", [512, 768, 1024, 1536])
def test_spectralis_shapes_squeezed_padded_and_cropped(width):
    """A disc of 200 pixels: an ellipse when squeezed, a disc otherwise; crop shows the middle square alone."""
    y, x = np.mgrid[:496, :width]
    disc = torch.from_numpy(((y - 247.5) ** 2 + (x - width / 2 + 0.5) ** 2 < 100**2).astype(np.float32))[None]

    def extent(picture: torch.Tensor) -> tuple[float, float]:
        on = picture[0]
        return float(on.sum(0).max()), float(on.sum(1).max())

    squeezed, padded, cropped = (resize(disc, (128, 128), fit=fit) for fit in ("squeeze", "pad", "crop"))
    assert squeezed.shape == padded.shape == cropped.shape == (1, 128, 128)
    assert extent(squeezed) == pytest.approx((200 * 128 / 496, 200 * 128 / width), abs=1)
    assert extent(padded) == pytest.approx((200 * 128 / width,) * 2, abs=1)
    assert extent(cropped) == pytest.approx((200 * 128 / 496,) * 2, abs=1)
    edge = (128 - round(496 * 128 / width)) // 2
    white = resize(torch.ones(1, 496, width), (128, 128), fit="pad", pad=0.25)
    assert torch.all(white[0, :edge] == 0.25)
    assert torch.allclose(white[0, edge + 1 : 127 - edge], torch.ones(()))


def test_crop_takes_the_middle_to_the_pixel():
    picture = torch.arange(4 * 9, dtype=torch.float32).view(1, 4, 9)
    assert torch.equal(resize(picture, (4, 4), fit="crop"), picture[:, :, 2:6])
    assert torch.equal(resize(picture, (2, 9), fit="crop"), picture[:, 1:3])
    d = ResizeImaged("image", [4, 4], fit="crop")({"image": picture})
    assert torch.equal(d["image"], picture[:, :, 2:6])


def test_the_bundle_offers_the_three_and_each_has_a_store_of_its_own(tmp_path):
    Image.fromarray(np.full((62, 128), 200, np.uint8)).save(tmp_path / "a.png")
    keys, dark = set(), {}
    for fit in ("squeeze", "pad", "crop"):
        pipeline = TrainingBundle.load(OCT, {"fit": fit, "image_size": [32, 32]}).pipeline()
        keys.add(pipeline.key)
        d = pipeline.prepare(pipeline.load({"image": str(tmp_path / "a.png"), "frame": 0, "sample": "a"}))
        dark[fit] = int((d["image"][0] == 0).all(1).sum())
    assert len(keys) == 3
    assert dark == {"squeeze": 0, "pad": 16, "crop": 0}


def test_grey_stored_as_rgb_is_seen_as_grey(tmp_path):
    grey = Image.fromarray(numpy_generator(1, "g").integers(0, 255, (62, 128), dtype=np.uint8))
    grey.save(tmp_path / "grey.jpg", quality=90)
    Image.open(tmp_path / "grey.jpg").convert("RGB").save(tmp_path / "rgb.png")
    seen = []
    for channels in (1, 3):
        pipeline = TrainingBundle.load(OCT, {"in_channels": channels}).pipeline()
        for name in ("grey.jpg", "rgb.png"):
            d = pipeline.prepare(pipeline.load({"image": str(tmp_path / name), "frame": 0, "sample": name}))
            assert d["image"].shape[0] == channels
            assert ("grey_stored_as_rgb" in d["image_corrections"]) == (channels == 1 and name == "rgb.png")
            seen.append(d["image"][:1])
    for other in seen[1:]:
        assert torch.equal(other, seen[0])
