"""Corruptions against their definition, SciPy and statistics."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage, stats

from medfed.data.corruption import KINDS, Corruption, blur_along, to_uint8
from medfed.errors import ConfigError
from medfed.seeding import numpy_generator

GREY = np.full((1, 200, 200), 0.5, dtype=np.float32)
PHOTO = ndimage.gaussian_filter(numpy_generator(1, "photo").random((3, 40, 48)), (0, 2, 2)).astype(np.float32)


# algorithms.md has the table from the paper's code; ImageNet-C's is the same.
@pytest.mark.parametrize(("severity", "sigma"), [(1, 0.08), (2, 0.12), (3, 0.18), (4, 0.26), (5, 0.38)])
def test_gaussian_noise_has_the_standard_deviation_of_its_severity(severity, sigma):
    noisy = Corruption("gaussian_noise", severity).apply(GREY, "a")
    inside = (noisy > 0) & (noisy < 1)
    noise = (noisy - 0.5)[inside] / sigma
    half = 0.5 / sigma
    truth = stats.truncnorm(-half, half)
    assert noise.std() == pytest.approx(truth.std(), rel=0.015)
    assert abs(noise.mean()) < 0.02
    assert 1 - inside.mean() == pytest.approx(2 * stats.norm.sf(half), abs=0.005)  # what was clipped
    assert stats.kstest(noise, truth.cdf).pvalue > 1e-3
    assert noisy.dtype == np.float32


def test_a_colour_image_gets_coloured_noise():
    noisy = Corruption("gaussian_noise", 1).apply(np.repeat(GREY, 3, 0), "a") - 0.5
    assert np.abs(np.corrcoef(noisy.reshape(3, -1)) - np.eye(3)).max() < 0.03


def test_noise_in_hounsfield_units_is_not_clipped():
    air = np.full((1, 200, 200), -1000, dtype=np.float32)
    for width, sigma in ((80, 14.4), (200, 36)):
        noisy = Corruption("gaussian_noise", 3, "hounsfield", hu_range=width).apply(air, "a")
        assert noisy.std() == pytest.approx(sigma, rel=0.02)
        assert noisy.mean() == pytest.approx(-1000, abs=1)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_for_each_image_and_seed(kind):
    corruption = Corruption(kind, 2, seed=4)
    first = {name: corruption.apply(PHOTO, name) for name in ("a", "b")}
    again = {name: Corruption(kind, 2, seed=4).apply(PHOTO, name) for name in ("b", "a")}
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
        assert first[name].dtype == np.float32
        assert first[name].shape == PHOTO.shape
        assert first[name].min() >= 0
        assert first[name].max() <= 1
        assert (first[name] != PHOTO).any()
    if kind in ("gaussian_noise", "shot_noise", "motion_blur"):
        assert (first["a"] != first["b"]).any()
        assert (first["a"] != Corruption(kind, 2, seed=5).apply(PHOTO, "a")).any()


def test_the_input_is_left_alone():
    for kind in KINDS:
        before = PHOTO.copy()
        Corruption(kind, 5).apply(PHOTO, "a")
        np.testing.assert_array_equal(PHOTO, before)


def test_the_same_in_another_process():
    code = (
        "import numpy as np; from medfed.data.corruption import Corruption;"
        "print(Corruption('gaussian_noise', 3).apply(np.full((1, 4, 4), 0.5, np.float32), 'x').sum())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    here = Corruption("gaussian_noise", 3).apply(np.full((1, 4, 4), 0.5, np.float32), "x").sum()
    assert other.strip() == str(here)


@pytest.mark.parametrize("angle", [0, 30, -45, 90])
def test_motion_blur_is_a_convolution(angle):
    """The picture convolved with the image of one point, edges repeated, by SciPy."""
    point = np.zeros((1, 41, 41), dtype=np.float32)
    point[0, 20, 20] = 1
    kernel = blur_along(point, 5, 3, angle)[0]
    assert kernel.sum() == pytest.approx(1, abs=1e-6)
    truth = np.stack([ndimage.convolve(channel, kernel, mode="nearest") for channel in PHOTO])
    np.testing.assert_allclose(blur_along(PHOTO, 5, 3, angle), truth, atol=1e-5)


def test_motion_blur_kernel_by_hand():
    """Along the row: weights exp(-d^2 / 18) for d = 0..4, normalised, to the left of the point."""
    point = np.zeros((1, 21, 21), dtype=np.float32)
    point[0, 10, 10] = 1
    weights = np.exp(-(np.arange(5) ** 2) / 18)
    kernel = blur_along(point, 2, 3, 0)[0]
    np.testing.assert_allclose(kernel[10, 10:5:-1], weights / weights.sum(), rtol=1e-5)
    assert np.count_nonzero(kernel) == 5


def test_motion_blur_is_the_same_on_all_channels_and_keeps_the_mean():
    blob = np.zeros((1, 101, 101), dtype=np.float32)
    blob[:, 40:60, 40:60] = 0.5
    blurred = Corruption("motion_blur", 5).apply(np.repeat(blob, 3, 0), "a")
    assert (blurred[0] == blurred[1]).all()
    assert (blurred[0] == blurred[2]).all()
    assert blurred.mean() == pytest.approx(blob.mean(), rel=1e-5)
    np.testing.assert_allclose(Corruption("motion_blur", 5).apply(GREY, "a"), GREY, atol=1e-6)


def test_shot_noise_has_the_variance_of_counted_photons():
    for severity, photons in enumerate((60, 25, 12, 5, 3), start=1):
        noisy = Corruption("shot_noise", severity).apply(GREY / 2, "a")
        counts = noisy[noisy < 1] * photons
        np.testing.assert_allclose(counts, np.rint(counts), atol=1e-4)
        assert (noisy == 0).mean() == pytest.approx(np.exp(-photons / 4), abs=0.01)


def test_contrast_by_hand():
    picture = np.array([[[0.2, 0.4], [0.6, 0.8]]], dtype=np.float32)
    np.testing.assert_allclose(Corruption("contrast", 3).apply(picture, "a"), 0.5 + 0.2 * (picture - 0.5), atol=1e-6)


def test_blurs_keep_a_flat_picture_and_blur_more_with_severity():
    for kind in ("gaussian_blur", "defocus_blur", "low_resolution"):
        np.testing.assert_allclose(Corruption(kind, 3).apply(GREY, "a"), GREY, atol=1e-5)
        noise = numpy_generator(0, "n").random((1, 64, 64)).astype(np.float32)
        spread = [Corruption(kind, severity).apply(noise, "a").std() for severity in range(1, 6)]
        assert all(a > b for a, b in itertools.pairwise(spread))


def test_low_resolution_by_hand():
    """A quarter of the size: each 4 x 4 block becomes its mean."""
    picture = numpy_generator(0, "p").random((1, 8, 12)).astype(np.float32)
    means = picture.reshape(1, 2, 4, 3, 4).mean(axis=(2, 4))
    truth = means.repeat(4, 1).repeat(4, 2)
    np.testing.assert_allclose(Corruption("low_resolution", 5).apply(picture, "a"), truth, atol=1e-6)


def test_jpeg_is_pillows():
    colour = Corruption("jpeg", 1).apply(PHOTO, "a")
    with io.BytesIO() as file:
        Image.fromarray(np.moveaxis(np.rint(PHOTO * 255), 0, -1).astype(np.uint8)).save(file, "JPEG", quality=25)
        truth = np.moveaxis(np.asarray(Image.open(file)), -1, 0) / 255
    np.testing.assert_allclose(colour, truth, atol=1e-6)
    assert Corruption("jpeg", 1).apply(GREY, "a").shape == GREY.shape


def test_to_uint8():
    levels = np.arange(256)
    for unit in ((levels / 255).astype(np.float32), levels / 255):
        np.testing.assert_array_equal(to_uint8(unit), levels)
        np.testing.assert_array_equal(to_uint8(unit, truncate=False), levels)
    between = np.array([0.5, 127.9, 128.2, -3, 300]) / 255
    np.testing.assert_array_equal(to_uint8(between), [0, 127, 128, 0, 255])
    np.testing.assert_array_equal(to_uint8(between, truncate=False), [0, 128, 128, 0, 255])


def test_keys_differ_where_pixels_do():
    kinds = [Corruption(kind, severity, seed=seed) for kind in KINDS for severity in (1, 5) for seed in (0, 1)]
    kinds += [Corruption("gaussian_noise", 1, "hounsfield", hu_range=width) for width in (80, 200)]
    keys = [corruption.key() for corruption in kinds]
    assert len(set(keys)) == len(keys)
    assert all(key.isalnum() and len(key) == 16 for key in keys)
    assert Corruption("jpeg", 1).key() == Corruption("jpeg", 1, hu_range=200).key()
    assert Corruption("gaussian_noise", 1, hu_range=80).key() == Corruption("gaussian_noise", 1, hu_range=80.0).key()


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"kind": "gausian_noise", "severity": 3}, "Did you mean 'gaussian_noise'"),
        ({"kind": "gaussian_noise", "severity": 0}, "1, 2, 3, 4 or 5"),
        ({"kind": "gaussian_noise", "severity": 2.5}, "1, 2, 3, 4 or 5"),
        ({"kind": "gaussian_noise", "severity": True}, "1, 2, 3, 4 or 5"),
        ({"kind": "gaussian_noise", "severity": 3, "domain": "hu"}, "hounsfield"),
        ({"kind": "jpeg", "severity": 3, "domain": "hounsfield"}, "no meaning"),
        ({"kind": "gaussian_noise", "severity": 3, "domain": "hounsfield", "hu_range": 0}, "above 0"),
    ],
)
def test_what_is_no_corruption(given, answer):
    with pytest.raises(ConfigError, match=answer):
        Corruption(**given)


def test_importing_it_does_not_import_monai():
    code = "import sys, medfed.data.corruption; print('monai' in sys.modules, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False False"
