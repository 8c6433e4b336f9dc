"""NIfTI phantoms with one bright voxel at a known place of the patient."""

from __future__ import annotations

import gzip
import itertools

import nibabel as nib
import numpy as np
import pytest
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, ornt_transform

from medfed.data.decode import DecodeOptions, Undecodable, decode, probe

SHAPE = (4, 5, 6)  # right, anterior, superior


def phantom(codes: str, dtype=np.int16) -> nib.Nifti1Image:
    """A volume stored along ``codes`` whose voxel far right, far anterior, third from the feet is bright."""
    voxels = np.zeros(SHAPE, dtype=dtype)
    voxels[-1, -1, 2] = 100
    image = nib.Nifti1Image(voxels, np.diag([1, 2, 3, 1]))
    return image.as_reoriented(ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(codes)))


@pytest.mark.parametrize("codes", ["RAS", "LPS", "LAS", "ASL", "PIR", "SRA", "IPL"])
def test_right_is_left_and_anterior_is_up(tmp_path, codes):
    path = tmp_path / "a.nii"
    nib.save(phantom(codes), path)
    found = probe(path)
    assert (found.kind, found.frames, found.height, found.width) == ("nifti", 6, 5, 4)
    for frame in range(6):
        decoded = decode(path, frame)
        assert decoded.pixels.shape == (1, 5, 4)
        bright = np.argwhere(decoded.pixels[0] > 50)
        assert bright.tolist() == ([[0, 0]] if frame == 2 else [])


@pytest.mark.parametrize(
    ("thin", "at"), [(1, (6 - 1 - 2, 0)), (0, (6 - 1 - 2, 0)), (2, (0, 0))], ids=["coronal", "sagittal", "axial"]
)
def test_a_volume_of_one_slice_shows_its_plane(tmp_path, thin, at):
    voxels = np.zeros(SHAPE, dtype=np.int16)
    voxels[-1, -1, 2] = 100
    index = [slice(None)] * 3
    index[thin] = slice(2, 3) if thin == 2 else slice(-1, None)
    nib.save(nib.Nifti1Image(voxels[tuple(index)], np.eye(4)), tmp_path / "a.nii")
    assert probe(tmp_path / "a.nii").frames == 1
    assert np.argwhere(decode(tmp_path / "a.nii").pixels[0] > 50).tolist() == [list(at)]


def test_two_dimensions_and_nifti_2(tmp_path):
    voxels = np.arange(12, dtype=np.int16).reshape(3, 4)
    for kind in (nib.Nifti1Image, nib.Nifti2Image):
        nib.save(kind(voxels, np.eye(4)), tmp_path / "a.nii")
        np.testing.assert_array_equal(decode(tmp_path / "a.nii").pixels[0], voxels.T[::-1, ::-1])


def test_gzip_and_any_name(tmp_path):
    nib.save(phantom("LPS"), tmp_path / "a.nii.gz")
    plain = decode(tmp_path / "a.nii.gz", 2).pixels
    (tmp_path / "a.nii.gz").rename(tmp_path / "IM01")
    np.testing.assert_array_equal(decode(tmp_path / "IM01", 2).pixels, plain)
    (tmp_path / "b").write_bytes(gzip.compress(b"no image at all"))
    with pytest.raises(Undecodable, match="gzip file that is not NIfTI"):
        decode(tmp_path / "b")


def test_scaling_and_hounsfield(tmp_path):
    voxels = np.zeros(SHAPE, dtype=np.int16)
    voxels[0, 0, 0] = 1000
    image = nib.Nifti1Image(voxels, np.eye(4))
    image.header.set_slope_inter(2, -1000)
    nib.save(image, tmp_path / "a.nii")
    decoded = decode(tmp_path / "a.nii")
    assert (decoded.kind, decoded.value_range) == ("hounsfield", (-1000, 1000))
    assert decoded.corrections == ("nifti_taken_for_hounsfield",)
    assert decode(tmp_path / "a.nii", options=DecodeOptions(nifti="image")).kind == "image"
    nib.save(phantom("RAS"), tmp_path / "b.nii")
    guessed = decode(tmp_path / "b.nii", 2)
    assert (guessed.kind, guessed.value_range) == ("image", (0, 100))
    assert decode(tmp_path / "b.nii", options=DecodeOptions(nifti="hounsfield")).kind == "hounsfield"


def test_ranges(tmp_path):
    nib.save(phantom("RAS", np.uint8), tmp_path / "a.nii")
    assert decode(tmp_path / "a.nii").value_range == (0, 255)
    image = phantom("RAS")
    image.header["cal_min"], image.header["cal_max"] = 10, 90
    nib.save(image, tmp_path / "b.nii")
    assert decode(tmp_path / "b.nii").value_range == (10, 90)


def test_missing_orientation_is_counted(tmp_path):
    image = phantom("RAS")
    image.set_sform(None, 0)
    image.set_qform(None, 0)
    nib.save(image, tmp_path / "a.nii")
    assert "nifti_orientation_missing" in decode(tmp_path / "a.nii").corrections


def test_what_is_refused(tmp_path):
    def reason(frame=0):
        with pytest.raises(Undecodable) as refused:
            decode(tmp_path / "a.nii", frame)
        return refused.value.reason

    nib.save(nib.Nifti1Image(np.zeros((2, 3, 4, 5), np.int16), np.eye(4)), tmp_path / "a.nii")
    assert "two or three dimensions" in reason()
    nib.save(phantom("RAS"), tmp_path / "a.nii")
    assert "does not exist" in reason(6)
    (tmp_path / "a.nii").write_bytes((tmp_path / "a.nii").read_bytes()[:-20])
    assert reason(5) == "pixel data shorter than the header says"
    nan = np.full(SHAPE, np.nan, dtype=np.float32)
    nib.save(nib.Nifti1Image(nan, np.eye(4)), tmp_path / "a.nii")
    assert reason() == "NaN or infinite pixel values"


def test_agrees_with_the_affine(tmp_path):
    """Each displayed pixel, sent to patient space by nibabel's affine, lies where a radiologist expects it."""
    for codes in ("".join(c) for c in itertools.islice(itertools.product("LR", "PA", "IS"), 8)):
        voxels = np.arange(np.prod(SHAPE), dtype=np.int16).reshape(SHAPE)
        image = nib.Nifti1Image(voxels, inv_ornt_aff(axcodes2ornt(codes), SHAPE))
        nib.save(image, tmp_path / "a.nii")
        picture = decode(tmp_path / "a.nii", 1).pixels[0]
        place = {int(v): image.affine @ [*index, 1] for index, v in np.ndenumerate(voxels)}
        corner, right, below = (place[int(picture[at])] for at in ((0, 0), (0, 1), (1, 0)))
        assert right[0] < corner[0]  # towards the patient's left
        assert below[1] < corner[1]  # towards posterior
