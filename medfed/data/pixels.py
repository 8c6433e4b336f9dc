"""Tensor mathematics between decoding and the network: windows, ranges, channels, size.

Pictures are float tensors ``[C, H, W]``.  The MONAI transforms over these functions stand in
:mod:`medfed.data.transforms`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from medfed.errors import ConfigError, DataError, nearest

WINDOWS: dict[str, tuple[float, float]] = {
    "brain": (40, 80),
    "subdural": (80, 200),
    "soft_tissue": (40, 380),
    "bone": (600, 2800),
}
"""Centre and width in HU of the windows that readers of head CT use (RSNA 2019)."""

_LUMINOSITY = (0.299, 0.587, 0.114)  # ITU-R BT.601
RESIZE_MODES = ("bilinear", "area")
FITS = ("squeeze", "pad", "crop")


def resolve_windows(windows: Sequence[str | Sequence[float]]) -> tuple[tuple[float, float], ...]:
    """Names of :data:`WINDOWS` or (centre, width) pairs to pairs.

    Raises:
        ConfigError: for an unknown name, something that is no pair, or a width that is not above 0.
    """
    pairs = []
    for given in windows:
        if isinstance(given, str):
            if given not in WINDOWS:
                raise ConfigError(f"unknown window {given!r}.", where="windows", fix=nearest(given, WINDOWS))
            pairs.append(WINDOWS[given])
        elif len(given) == 2 and given[1] > 0:
            pairs.append((float(given[0]), float(given[1])))
        else:
            raise ConfigError(f"{list(given)} is no window.", where="windows", fix="Give [centre, width > 0].")
    if not pairs:
        raise ConfigError("no window is given.", where="windows", fix=nearest("", WINDOWS))
    return tuple(pairs)


def ct_windows(units: torch.Tensor, windows: Sequence[Sequence[float]]) -> torch.Tensor:
    """Stacks windows of one slice.

    Args:
        units: Hounsfield units ``[1, H, W]``.
        windows: (centre, width) pairs in HU.

    Returns:
        ``[len(windows), H, W]`` in 0..1: 0 at centre - width / 2 and below, 1 at centre + width / 2 and above.
    """
    low = torch.tensor([centre - width / 2 for centre, width in windows], dtype=units.dtype).view(-1, 1, 1)
    width = torch.tensor([width for _, width in windows], dtype=units.dtype).view(-1, 1, 1)
    return ((units - low) / width).clamp_(0, 1)


def to_unit_range(pixels: torch.Tensor, value_range: Sequence[float]) -> torch.Tensor:
    """Maps a nominal range to 0..1 and clips to it."""
    low, high = map(float, value_range)
    if (low, high) == (0.0, 1.0):
        return pixels.clamp(0, 1)
    return ((pixels - low) / (high - low)).clamp_(0, 1)


def to_channels(pixels: torch.Tensor, channels: int) -> tuple[torch.Tensor, str | None]:
    """Grey to colour by repetition, colour to grey by luminosity (BT.601).

    Args:
        pixels: ``[C, H, W]``.
        channels: how many there shall be.

    Returns:
        ``[channels, H, W]`` and the name of the correction, if there was one.

    Raises:
        DataError: where neither is possible, such as 2 channels to 3.
    """
    have = pixels.shape[0]
    if have == channels:
        return pixels, None
    if have == 1:
        return pixels.expand(channels, -1, -1).contiguous(), None
    correction = None
    if bool((pixels[1:] == pixels[:1]).all()):
        grey, correction = pixels[:1], "grey_stored_as_rgb"
    elif have == 3 and channels == 1:
        weights = torch.tensor(_LUMINOSITY, dtype=pixels.dtype).view(3, 1, 1)
        return (pixels * weights).sum(0, keepdim=True), "colour_to_grey"
    else:
        raise DataError(f"an image of {have} channels cannot become one of {channels}.")
    return grey.expand(channels, -1, -1).contiguous(), correction


def resize(
    pixels: torch.Tensor, size: Sequence[int], mode: str = "bilinear", fit: str = "squeeze", pad: float = 0.0
) -> torch.Tensor:
    """Resizes a picture without aliasing.

    Args:
        pixels: float ``[C, H, W]``.
        size: height and width wanted.
        mode: ``"bilinear"``, a triangle filter as wide as the reduction (Pillow's ``BILINEAR``), or ``"area"``, the
            mean of the pixels that each new pixel covers.
        fit: what becomes of a picture of another shape: ``"squeeze"`` changes its aspect ratio, ``"pad"`` fits all of
            it inside and pads around it, ``"crop"`` takes as much of its middle as has the shape wanted.
        pad: value of the padding.

    Returns:
        float ``[C, size[0], size[1]]``.
    """
    height, width = size
    if fit == "crop":
        scale = min(pixels.shape[1] / height, pixels.shape[2] / width)
        rows, columns = max(round(height * scale), 1), max(round(width * scale), 1)
        top, left = (pixels.shape[1] - rows) // 2, (pixels.shape[2] - columns) // 2
        pixels = pixels[:, top : top + rows, left : left + columns]
    inner = (height, width)
    if fit == "pad":
        scale = min(height / pixels.shape[1], width / pixels.shape[2])
        inner = (max(round(pixels.shape[1] * scale), 1), max(round(pixels.shape[2] * scale), 1))
    if inner != tuple(pixels.shape[1:]):
        if mode == "area":
            pixels = functional.interpolate(pixels[None], inner, mode="area")[0]
        else:
            pixels = functional.interpolate(pixels[None], inner, mode="bilinear", antialias=True)[0]
    if inner != (height, width):
        top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
        around = (left, width - inner[1] - left, top, height - inner[0] - top)
        pixels = functional.pad(pixels, around, value=pad)
    return pixels
