"""From files to network input as MONAI dictionary transforms.

Each is usable in any ``monai.transforms.Compose`` and from a bundle by ``_target_``.  The mathematics stands in
:mod:`medfed.data.pixels`, as functions of tensors ``[C, H, W]``.  Beside ``d[key]`` the transforms keep

- ``d[f"{key}_kind"]``: ``"hounsfield"`` or ``"image"``,
- ``d[f"{key}_range"]``: nominal range of the values,
- ``d[f"{key}_corrections"]``: names of what was done, a tuple of text that collates to a list of tuples.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import MapTransform
from torch.utils.data._utils.collate import default_collate_fn_map

from medfed.data.borders import mask_white_border
from medfed.data.corruption import Corruption
from medfed.data.decode import DecodeOptions, decode
from medfed.data.pixels import (
    FITS,
    RESIZE_MODES,
    ct_windows,
    resize,
    resolve_windows,
    to_channels,
    to_unit_range,
)
from medfed.errors import ConfigError, DataError, nearest


class Corrections(tuple):
    """Names of corrections; a batch of them is a list, since each image has its own number of them."""


default_collate_fn_map[Corrections] = lambda batch, *, collate_fn_map=None: list(batch)


class _Imaged(MapTransform):
    """A dictionary transform that knows kind, range and corrections of an image."""

    def kind(self, d: Mapping, key: Hashable, default: str) -> str:
        return d.get(f"{key}_kind", default)

    def range(self, d: Mapping, key: Hashable) -> tuple[float, float]:
        low, high = d.get(f"{key}_range", (0.0, 1.0))
        return float(low), float(high)

    def correct(self, d: dict, key: Hashable, *names: str | None) -> None:
        have = d.get(f"{key}_corrections", ())
        d[f"{key}_corrections"] = Corrections((*have, *(name for name in names if name)))

    def unit(self, d: dict, key: Hashable) -> None:
        d[f"{key}_kind"], d[f"{key}_range"] = "image", (0.0, 1.0)


class DecodeImaged(_Imaged):
    """Files to pixels: ``d[key]``, a path, becomes float32 ``[C, H, W]`` as displayed.

    ``d["frame"]`` says which frame where a file has several.

    Args:
        keys: keys of paths.
        fix_12bit_wrap: see :class:`medfed.data.decode.DecodeOptions`, as the next three.
        apply_voi: apply the VOI LUT or window of DICOM other than CT.
        max_pixels: the most pixels a frame may have.
        nifti: ``"guess"``, ``"hounsfield"`` or ``"image"``.
        frame_key: key of the frame index.
        meta: give a MONAI ``MetaTensor``, with what the header says as its meta data, instead of a plain tensor.
        allow_missing_keys: as in MONAI.

    Raises:
        Undecodable: for a file that gives no pixels.
    """

    def __init__(
        self,
        keys: KeysCollection,
        fix_12bit_wrap: bool = False,
        apply_voi: bool = True,
        max_pixels: int = 200_000_000,
        nifti: Literal["guess", "hounsfield", "image"] = "guess",
        frame_key: str = "frame",
        meta: bool = False,
        allow_missing_keys: bool = False,
    ):
        super().__init__(keys, allow_missing_keys)
        self.options = DecodeOptions(fix_12bit_wrap, apply_voi, max_pixels, nifti)
        self.frame_key, self.meta = frame_key, meta

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Decodes each key."""
        d = dict(data)
        for key in self.key_iterator(d):
            decoded = decode(os.fspath(d[key]), int(d.get(self.frame_key, 0)), self.options)
            pixels = torch.from_numpy(decoded.pixels)
            d[key] = MetaTensor(pixels, meta=dict(decoded.header)) if self.meta else pixels
            d[f"{key}_kind"], d[f"{key}_range"] = decoded.kind, decoded.value_range
            d[f"{key}_corrections"] = Corrections(decoded.corrections)
        return d


class CTWindowd(_Imaged):
    """Hounsfield units ``[1, H, W]`` to a stack of windows ``[n, H, W]`` in 0..1.

    An image (a CT that somebody has saved as PNG) passes as it is, with its grey values in each of the n channels,
    and ``already_windowed`` is counted.

    Args:
        keys: keys of the images.
        windows: names of :data:`medfed.data.pixels.WINDOWS` or [centre, width] pairs in HU.
        allow_missing_keys: as in MONAI.
    """

    def __init__(
        self,
        keys: KeysCollection,
        windows: Sequence[str | Sequence[float]] = ("brain", "subdural", "soft_tissue"),
        allow_missing_keys: bool = False,
    ):
        super().__init__(keys, allow_missing_keys)
        self.windows = resolve_windows(windows)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Windows each key."""
        d = dict(data)
        for key in self.key_iterator(d):
            if self.kind(d, key, "hounsfield") == "hounsfield":
                d[key] = ct_windows(d[key], self.windows)
            else:
                unit = to_unit_range(d[key], self.range(d, key))
                if len(unit) not in (1, len(self.windows)):
                    unit, correction = to_channels(unit, 1)
                    self.correct(d, key, correction)
                d[key], _ = to_channels(unit, len(self.windows))
                self.correct(d, key, "already_windowed")
            self.unit(d, key)
        return d


class ToUnitRanged(_Imaged):
    """Images of any nominal range to 0..1.

    Raises:
        DataError: for Hounsfield units, which need a window.
    """

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Scales each key."""
        d = dict(data)
        for key in self.key_iterator(d):
            if self.kind(d, key, "image") == "hounsfield":
                raise DataError("a CT in Hounsfield units has no nominal range.", where=str(key), fix="Use CTWindowd.")
            d[key] = to_unit_range(d[key], self.range(d, key))
            self.unit(d, key)
        return d


class ToChannelsd(_Imaged):
    """Grey to colour or colour to grey; see :func:`medfed.data.pixels.to_channels`.

    Args:
        keys: keys of the images.
        channels: how many channels there shall be.
        allow_missing_keys: as in MONAI.
    """

    def __init__(self, keys: KeysCollection, channels: int = 1, allow_missing_keys: bool = False):
        super().__init__(keys, allow_missing_keys)
        if isinstance(channels, bool) or not isinstance(channels, int) or channels < 1:
            raise ConfigError(f"channels is {channels!r}.", where="ToChannelsd", fix="Give 1 or 3.")
        self.channels = channels

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Changes each key."""
        d = dict(data)
        for key in self.key_iterator(d):
            d[key], correction = to_channels(d[key], self.channels)
            self.correct(d, key, correction)
        return d


class ResizeImaged(_Imaged):
    """Resizes without aliasing; see :func:`medfed.data.pixels.resize`.

    Args:
        keys: keys of the images.
        size: [height, width].
        mode: ``"bilinear"`` or ``"area"``.
        fit: ``"squeeze"``, ``"pad"`` or ``"crop"``: what becomes of a picture of another aspect ratio.
        pad: value of the padding.
        allow_missing_keys: as in MONAI.
    """

    def __init__(
        self,
        keys: KeysCollection,
        size: Sequence[int],
        mode: str = "bilinear",
        fit: Literal["squeeze", "pad", "crop"] = "squeeze",
        pad: float = 0.0,
        allow_missing_keys: bool = False,
    ):
        super().__init__(keys, allow_missing_keys)
        if mode not in RESIZE_MODES:
            raise ConfigError(f"unknown mode {mode!r}.", where="ResizeImaged", fix=nearest(str(mode), RESIZE_MODES))
        if fit not in FITS:
            raise ConfigError(f"unknown fit {fit!r}.", where="ResizeImaged", fix=nearest(str(fit), FITS))
        if isinstance(size, str) or len(size) != 2 or any(int(n) != n or n < 1 for n in size):
            raise ConfigError(f"size is {size!r}.", where="ResizeImaged", fix="Give [height, width].")
        self.size, self.mode, self.fit, self.pad = (int(size[0]), int(size[1])), mode, fit, pad

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Resizes each key."""
        d = dict(data)
        for key in self.key_iterator(d):
            d[key] = resize(d[key], self.size, self.mode, self.fit, self.pad)
        return d


class WhiteBorderd(_Imaged):
    """Blackens the white borders of rotated OCT scans; see :func:`medfed.data.borders.mask_white_border`.

    Args:
        keys: keys of the images.
        min_fraction: smallest region, as a fraction of the picture.
        grow: pixels by which a region is widened.
        allow_missing_keys: as in MONAI.
    """

    def __init__(
        self,
        keys: KeysCollection,
        min_fraction: float = 0.0005,
        grow: int = 2,
        allow_missing_keys: bool = False,
    ):
        super().__init__(keys, allow_missing_keys)
        self.min_fraction, self.grow = min_fraction, grow

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Blackens each key."""
        d = dict(data)
        for key in self.key_iterator(d):
            if self.kind(d, key, "image") == "hounsfield":
                raise DataError("a CT in Hounsfield units has no white border.", where=str(key))
            d[key], found = mask_white_border(d[key], self.range(d, key), self.min_fraction, self.grow)
            self.correct(d, key, "white_border_masked" if found else None)
        return d


class Corruptd(_Imaged):
    """Corrupts images as :class:`medfed.data.corruption.Corruption` says.

    Args:
        keys: keys of the images.
        kind: e.g. ``"gaussian_noise"``.
        severity: 1 to 5.
        domain: ``"image"`` after the range is 0..1, ``"hounsfield"`` before the window.
        seed: another seed gives other noise.
        hu_range: see :class:`~medfed.data.corruption.Corruption`.
        identity_key: key of the text that names the image.
        allow_missing_keys: as in MONAI.
    """

    def __init__(
        self,
        keys: KeysCollection,
        kind: str,
        severity: int,
        domain: Literal["image", "hounsfield"] = "image",
        seed: int = 0,
        hu_range: float = 80.0,
        identity_key: str = "sample",
        allow_missing_keys: bool = False,
    ):
        super().__init__(keys, allow_missing_keys)
        self.corruption = Corruption(kind, severity, domain, seed, hu_range)
        self.identity_key = identity_key

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Corrupts each key."""
        d = dict(data)
        domain = self.corruption.domain
        for key in self.key_iterator(d):
            if self.identity_key not in d:
                raise DataError("noise needs to know which image it is for.", where=self.identity_key)
            if self.kind(d, key, domain) != domain or (domain == "image" and self.range(d, key) != (0.0, 1.0)):
                raise DataError(
                    f"the corruption acts on {'Hounsfield units' if domain == 'hounsfield' else 'values in 0..1'}.",
                    where=str(key),
                    fix="Put it before the window (hounsfield) or after it (image).",
                )
            pixels = self.corruption.apply(np.asarray(d[key]), str(d[self.identity_key]))
            d[key] = torch.from_numpy(pixels)
        return d


class NormalizeBatch(torch.nn.Module):
    """Subtracts the mean and divides by the standard deviation of each channel, on any device.

    Args:
        mean: one value for all channels, or one a channel, in units of 0..1 images.
        std: likewise, above 0.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]):
        super().__init__()
        for name, given in (("mean", mean), ("std", std)):
            values = torch.atleast_1d(torch.as_tensor(given, dtype=torch.float32))
            if not bool(torch.isfinite(values).all()) or (name == "std" and not bool((values > 0).all())):
                raise ConfigError(f"{name} is {given!r}.", where="NormalizeBatch", fix="std must be above 0.")
            # Not persistent: what normalises is configuration, not a weight that clients exchange.
            self.register_buffer(name, values.view(-1, 1, 1), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Normalises ``[B, C, H, W]`` or ``[C, H, W]``."""
        channels = images.shape[-3]
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise ConfigError(
                    f"{name} has {len(values)} values, but the images have {channels} channels.",
                    where="NormalizeBatch",
                    fix="Give one value, or one for each channel.",
                )
        if self.mean.device != images.device:
            self.to(images.device)
        return (images - self.mean).div_(self.std)


class NormalizeUnitd(_Imaged):
    """:class:`NormalizeBatch` for single images in a dictionary."""

    def __init__(
        self,
        keys: KeysCollection,
        mean: float | Sequence[float],
        std: float | Sequence[float],
        allow_missing_keys: bool = False,
    ):
        super().__init__(keys, allow_missing_keys)
        self.normalize = NormalizeBatch(mean, std)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Normalises each key."""
        d = dict(data)
        for key in self.key_iterator(d):
            d[key] = self.normalize(d[key])
        return d
