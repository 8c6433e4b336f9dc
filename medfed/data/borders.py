"""White borders of OCT scans that were rotated or shifted on a white page (Kermany's OCT2017).

They come as corners and bars of saturated white, and as slivers a few pixels thick along an edge of the picture, which
resizing turns into a grey line.  Bright retina may be saturated too and may reach the edge, as a thin layer
that goes on inwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from medfed.data.dicom_values import touching_border

_SATURATED = 250 / 255
_WHITE, _BLENDED, _FADING = 0.88, 0.4, 0.15  # mean of a sliver, of a line that resizing blended, of their ends
_LAYER = 0.015  # of the shorter side: half of how thick saturated layers of the retina may be
_DEPTH = 0.02  # of the shorter side: how thick a sliver may be
_LINE_DEPTH = 2  # pixels: how thick a blended line may be
_DROP = 0.5  # of the outermost value: what lies behind a sliver is darker than this
_SHORTEST, _WHITE_LENGTH, _LINE_LENGTH = 6, 0.012, 0.03  # pixels, and shares of the side
_BRIGHTER = 1.2  # than retina behind it
_BEHIND = 4  # pixels over which that is judged


def mask_white_border(
    pixels: torch.Tensor, value_range: Sequence[float], min_fraction: float = 0.0005, grow: int = 2
) -> tuple[torch.Tensor, bool]:
    """Blackens white at the border of a picture: saturated regions that touch it, and slivers along it.

    Args:
        pixels: ``[C, H, W]``.
        value_range: nominal range; saturated is 250/255 of it and above, in all channels.
        min_fraction: regions smaller than this fraction of the picture are left: bright tissue at the edge.
        grow: pixels by which a region is widened, to take the grey seam that JPEG leaves.

    Returns:
        The picture, and whether anything was blackened.
    """
    from scipy.ndimage import binary_dilation

    low, high = map(float, value_range)
    unit = ((pixels.amin(0) - low) / (high - low)).numpy()
    mask = _regions(unit, min_fraction)
    if grow and mask.any():
        mask = binary_dilation(mask, iterations=grow)
    mask |= _slivers(np.where(mask, np.float32(0), unit), grow)
    if not mask.any():
        return pixels, False
    return pixels.masked_fill(torch.from_numpy(mask), low), True


def _regions(unit: np.ndarray, min_fraction: float) -> np.ndarray:
    """Saturated regions that touch the border and are large enough, without the saturated layers of the retina."""
    from scipy.ndimage import label

    regions, count = label(touching_border(_thick(unit >= _SATURATED)))
    if not count:
        return np.zeros(unit.shape, dtype=bool)
    sizes = np.bincount(regions.ravel())
    sizes[0] = 0
    return (sizes >= max(min_fraction * unit.size, 1))[regions]


def _thick(mask: np.ndarray) -> np.ndarray:
    """A mask without what is thinner than the page: opened by a square, as if the page went on beyond the picture.

    What JPEG frayed is put back: pixels of the mask no further from the rest than the square is wide.
    """
    from scipy.ndimage import maximum_filter, minimum_filter

    if not mask.any():
        return mask
    size = 2 * max(1, round(_LAYER * min(mask.shape))) + 1
    page = np.pad(mask, size, constant_values=True).view(np.uint8)
    opened = maximum_filter(minimum_filter(page, size), size)[size:-size, size:-size]
    return mask & maximum_filter(opened, 2 * size + 1).astype(bool)


def _slivers(unit: np.ndarray, grow: int) -> np.ndarray:
    """White slivers and blended lines along each of the four sides."""
    mask = np.zeros(unit.shape, dtype=bool)
    depth = max(_LINE_DEPTH, round(_DEPTH * min(unit.shape)))
    for turns in range(4):  # views: what is written below stands in the mask
        side, out = np.rot90(unit, turns), np.rot90(mask, turns)
        if len(side) > depth + _BEHIND:
            _mark(side[: depth + _BEHIND + 1], out, depth, grow)
    return mask


def _mark(strip: np.ndarray, out: np.ndarray, depth: int, grow: int) -> None:
    """Marks the slivers along row 0 of a strip ``[depth + a few, length]``."""
    from scipy.ndimage import label, uniform_filter1d

    smooth = uniform_filter1d(strip, 3, axis=1, mode="nearest")  # speckle
    edge = smooth[0]
    behind = np.stack([smooth[k : k + _BEHIND].max(0) for k in range(1, depth + 2)])  # what follows row k - 1
    dark = behind < _DROP * edge
    thickness = np.where(dark.any(0), dark.argmax(0) + 1, len(dark) + 1)  # rows until it is dark and stays so
    white = (edge >= _WHITE) & (thickness <= depth)
    line = (edge >= _BLENDED) & (thickness <= _LINE_DEPTH)
    fading = (edge >= _FADING) & (thickness <= depth)
    sure = _long_runs(white, _WHITE_LENGTH) | _long_runs(line, _LINE_LENGTH)
    if not sure.any():
        return
    runs, _ = label(_closed(fading | white | line, 2))
    found = (runs > 0) & np.isin(runs, runs[sure])
    found, reach = _across_retina(smooth, found, np.where(thickness <= depth, thickness, 1))
    out[: len(strip)] |= found & (np.arange(len(strip))[:, None] < reach + (grow + 1) // 2)


def _closed(marked: np.ndarray, gap: int) -> np.ndarray:
    """A line of marks with gaps of up to twice ``gap`` closed, also against the ends of the line."""
    from scipy.ndimage import maximum_filter1d, minimum_filter1d

    wide = np.pad(marked.view(np.uint8), 2 * gap, mode="edge")
    return minimum_filter1d(maximum_filter1d(wide, 2 * gap + 1), 2 * gap + 1)[2 * gap : -2 * gap].astype(bool)


def _long_runs(marked: np.ndarray, share: float) -> np.ndarray:
    """The runs, small gaps closed, that reach a share of the whole length."""
    from scipy.ndimage import label

    runs, _ = label(_closed(marked, 2))
    lengths = np.bincount(runs)
    lengths[0] = 0
    return (lengths >= max(_SHORTEST, share * len(marked)))[runs]


def _across_retina(smooth: np.ndarray, found: np.ndarray, reach: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Follows slivers on to where bright retina lies behind them: there they are only somewhat brighter than it."""
    from scipy.ndimage import label

    along = np.arange(len(found))
    reach = np.where(found, reach, np.rint(np.interp(along, along[found], reach[found]))).astype(int)
    rows = reach[None] + np.arange(1, 4)[:, None]
    behind = np.take_along_axis(smooth, np.minimum(rows, len(smooth) - 1), axis=0).mean(0)
    brighter = (smooth[0] >= _BLENDED) & (smooth[0] >= _BRIGHTER * behind)
    runs, _ = label(_closed(found | brighter, 3))
    return (runs > 0) & np.isin(runs, runs[found]), reach
