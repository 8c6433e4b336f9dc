"""White borders: scans rotated on a white page, where it is known which pixels are page and which retina."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import affine_transform, binary_dilation, binary_erosion, gaussian_filter

from medfed.data.borders import mask_white_border
from medfed.data.transforms import DecodeImaged, WhiteBorderd
from medfed.seeding import numpy_generator


def retina(height: int, width: int, *, tilt: float = 0.05) -> np.ndarray:
    """A dark scan in 0..255 with speckle and three bands, the thinnest saturated, that reach both sides."""
    rng = numpy_generator(3, "retina", height)
    y, x = np.mgrid[:height, :width] / height
    at = 0.5 + tilt * (x - 0.5) - 0.04 * np.cos(4 * x)
    picture = 22 + 110 * (abs(y - at) < 0.1) + 90 * (abs(y - at + 0.09) < 0.012) + 180 * (abs(y - at - 0.08) < 0.01)
    speckle = gaussian_filter(rng.gamma(3, 1 / 3, picture.shape), 0.6)
    return np.clip(picture * (0.6 + 0.4 * speckle / speckle.mean()), 0, 255)


def on_white(picture: np.ndarray, degrees: float, shift: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """The picture turned about its centre and shifted (rows, columns), white around it; where it is white."""
    turn = np.deg2rad(degrees)
    matrix = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    centre = (np.array(picture.shape) - 1) / 2
    offset = centre - matrix @ (centre + shift)
    turned = affine_transform(picture, matrix, offset, order=1, cval=0.0)
    inside = affine_transform(np.ones_like(picture), matrix, offset, order=1, cval=0.0)
    return turned + 255 * (1 - inside), inside < 0.5


def jpeg(picture: np.ndarray, size: tuple[int, int] | None = None) -> np.ndarray:
    with io.BytesIO() as file:
        image = Image.fromarray(np.rint(picture).clip(0, 255).astype(np.uint8))
        image.save(file, "JPEG", quality=85)
        opened = Image.open(file)
        return np.asarray(opened.resize(size, Image.Resampling.BILINEAR) if size else opened, np.float32)


def masked(picture: np.ndarray) -> tuple[np.ndarray, bool]:
    pixels, found = mask_white_border(torch.from_numpy(picture.astype(np.float32))[None], (0, 255))
    return pixels[0].numpy(), found


MOVES = [
    (0.0, (0.0, -2.0)),  # bars of 1 and 2 pixels
    (0.0, (1.0, 0.0)),
    (0.25, (0.0, 0.0)),  # slivers that grow thicker along the side, over retina too
    (-0.6, (0.0, 3.0)),
    (1.5, (-4.0, 2.0)),
    (-4.0, (10.0, -8.0)),
    (8.0, (0.0, 0.0)),
]


@pytest.mark.parametrize(("degrees", "shift"), MOVES)
def test_the_page_goes_and_the_scan_stays(degrees, shift):
    picture, page = on_white(retina(248, 512), degrees, shift)
    picture = jpeg(picture)
    assert (picture[page] > 200).mean() > 0.9
    result, found = masked(picture)
    assert found
    # Page in front of a saturated layer cannot be told from it; everywhere else it is gone.
    behind = binary_dilation(picture * ~page > 90, iterations=6)
    assert (result[page & ~behind] > 100).sum() <= 0.01 * page.sum() + 8
    assert (result[page] > 100).sum() <= 0.06 * page.sum()
    # Beyond the seam no pixel is changed; a sliver is a few pixels thick at most, so that this leaves all retina.
    changed = result != picture
    assert (changed & ~binary_dilation(page, iterations=4)).mean() < 0.0008
    retinal = binary_erosion(~page, iterations=10) & (picture > 150)
    assert (changed & retinal).sum() <= 0.002 * retinal.sum()


@pytest.mark.parametrize(("degrees", "shift"), [(0.25, (0.0, 0.0)), (-0.6, (0.0, 3.0)), (0.0, (3.0, 0.0))])
def test_lines_that_resizing_turned_grey_go_too(degrees, shift):
    """1024x496 to 160x160: a sliver becomes a line of one pixel, partly white."""
    picture, page = on_white(retina(496, 1024), degrees, shift)
    small = jpeg(picture, (160, 160))
    share = np.asarray(Image.fromarray(page.astype(np.float32)).resize((160, 160), Image.Resampling.BILINEAR))
    clean = np.asarray(Image.fromarray(retina(496, 1024).astype(np.float32)).resize((160, 160)))
    line = (share > 0.4) & (clean < 60)
    assert (small[line] > 90).sum() > 20
    result, _ = masked(small)
    assert (result[line] > 90).sum() <= 0.03 * line.sum()
    assert (result != small)[~binary_dilation(share > 0.02, iterations=3)].mean() < 0.0005


@pytest.mark.parametrize("tilt", [0.0, 0.3, -0.9])
@pytest.mark.parametrize("size", [(160, 160), (496, 1024)])
def test_retina_that_reaches_the_side_is_left_alone(size, tilt):
    picture = jpeg(retina(*size, tilt=tilt))
    assert (picture > 250).sum() > 50
    result, found = masked(picture)
    assert found == (tilt == -0.9 and size[0] == 496)  # there the layer fills a corner of 8 x 8 pixels
    assert (result != picture).mean() < 0.0002


def test_a_bright_layer_along_the_top_is_no_sliver():
    picture = retina(200, 200) * 0.2
    picture[:12] = 235  # thicker than slivers are, and not saturated
    assert not masked(picture)[1]


def test_colour_at_the_border_is_not_white():
    picture = torch.full((3, 100, 100), 20.0)
    picture[0, :, :2] = 255
    assert not mask_white_border(picture, (0, 255))[1]
    picture[:, :, :2] = 255
    result, found = mask_white_border(picture, (0, 255))
    assert found
    assert float(result[:, :, :2].max()) == 0


def test_another_range_gives_the_same_mask():
    picture = torch.full((1, 100, 100), 20.0)
    picture[0, 0, 10:40] = 255
    first, _ = mask_white_border(picture, (0, 255))
    second, _ = mask_white_border(picture / 255 - 0.5, (-0.5, 0.5))
    assert torch.equal(first == 0, second == -0.5)
    assert (first == 0).sum() > 0


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 300), (3, 5, 5)])
def test_tiny_pictures(shape):
    result, _ = mask_white_border(torch.full(shape, 255.0), (0, 255))
    assert result.shape == shape


def steps_at_the_edge(pixels: np.ndarray) -> int:
    """The longest run along a side that is nearly white and dark behind: what a white sliver looks like."""
    longest = 0
    for turns in range(4):
        side = np.rot90(pixels, turns)
        white = (side[0] > 235) & (side[12:18].mean(0) < 60)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], white, [0]])))
        longest = max([longest, *(edges[1::2] - edges[::2])])
    return longest


def test_no_sliver_is_left_at_real_scans(shared):
    paths = sorted((shared / "data" / "oct_fullres").rglob("*.jpeg"))[1::3]
    before, after = [], []
    for path in paths:
        d = DecodeImaged("image")({"image": str(path)})
        before.append(steps_at_the_edge(d["image"].amin(0).numpy()))
        after.append(steps_at_the_edge(WhiteBorderd("image")(d)["image"].amin(0).numpy()))
    assert max(before) > 100
    assert max(after) < 12
