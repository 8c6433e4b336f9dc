"""What stored DICOM numbers mean: Hounsfield units for CT, displayed values for everything else.

Sections of the DICOM standard are named where they are followed (PS3.3 2024).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pydicom.dataset import Dataset
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi

from medfed.data.decode import DecodeOptions, Undecodable

AIR = -1024.0
_AIR_LIKE = -1000.0
_RESCALE, _VOI = "PixelValueTransformationSequence", "FrameVOILUTSequence"


class Frame:
    """One frame of a dataset: its values, wherever they stand, and what was corrected on the way."""

    def __init__(self, dataset: Dataset, index: int):
        self.dataset, self.index = dataset, index
        self.corrections: list[str] = []
        per_frame = dataset.get("PerFrameFunctionalGroupsSequence") or ()
        shared = dataset.get("SharedFunctionalGroupsSequence") or ()
        self._groups = [*per_frame[index : index + 1], *shared[:1]]

    def value(self, keyword: str, sequence: str) -> Any:
        """A value from the frame's functional group, the shared one, or the dataset (PS3.3 C.7.6.16)."""
        for group in self._groups:
            for item in group.get(sequence) or ():
                if (value := item.get(keyword)) is not None:
                    return value
        return self.dataset.get(keyword)

    def number(self, keyword: str, sequence: str = "") -> float | None:
        """The first number of a value, or None where it is absent or empty."""
        value = self.value(keyword, sequence)
        if hasattr(value, "append"):  # several windows: the first is the default one
            value = value[0] if len(value) else None
        return None if value in (None, "") else float(value)

    def integer(self, keyword: str, default: int) -> int:
        """An integer of the dataset itself."""
        value = self.dataset.get(keyword)
        return default if value in (None, "") else int(value)


def wraps_12_bit(bits_stored: int, pixel_representation: int, intercept: float) -> bool:
    """Whether a CT may be of the RSNA 2019 kind whose negative values wrapped around.

    Unsigned 12-bit pixels with an intercept near 0 cannot hold air (-1000 HU).
    """
    return bits_stored == 12 and pixel_representation == 0 and intercept > -100


def window(values: np.ndarray, centre: float, width: float, function: str = "LINEAR") -> np.ndarray:
    """Applies a window, PS3.3 C.11.2.1.2 and C.11.2.1.3.

    Args:
        values: float32, after the modality transform.
        centre: window centre.
        width: window width; at least 1 for ``LINEAR``, above 0 otherwise.
        function: ``LINEAR``, ``LINEAR_EXACT`` or ``SIGMOID``.

    Returns:
        float32 in 0..255, not rounded.
    """
    if function == "SIGMOID":
        with np.errstate(over="ignore"):
            return (255 / (1 + np.exp(-4 * (values - centre) / width))).astype(np.float32)
    if function != "LINEAR_EXACT":  # the standard's LINEAR counts integer grey levels: c - 0.5, w - 1
        centre, width = centre - 0.5, width - 1
    if width == 0:
        return np.where(values > centre, np.float32(255), np.float32(0))
    return np.clip(((values - centre) / width + 0.5) * 255, 0, 255).astype(np.float32)


def is_hounsfield(frame: Frame, photometric: str) -> bool:
    """CT in grey; an 8-bit CT without rescale is a screenshot, not Hounsfield units."""
    if frame.dataset.get("Modality") != "CT" or not photometric.startswith("MONOCHROME"):
        return False
    has_rescale = frame.value("RescaleIntercept", _RESCALE) is not None
    return has_rescale or frame.integer("BitsStored", 16) > 8


def hounsfield(frame: Frame, stored: np.ndarray, options: DecodeOptions) -> tuple[np.ndarray, tuple[float, float]]:
    """Stored CT numbers ``[H, W]`` to Hounsfield units, nothing below -1024, and the range found."""
    if "ModalityLUTSequence" in frame.dataset:
        units = apply_modality_lut(stored, frame.dataset).astype(np.float32)
    else:
        units = _rescaled(frame, stored, options)
    _fill_padding(frame, stored, units)
    low = float(units.min())
    if low < AIR:
        np.maximum(units, np.float32(AIR), out=units)
        frame.corrections.append("ct_below_air_raised")
        low = AIR
    return units, (low, float(units.max()))


def _rescaled(frame: Frame, stored: np.ndarray, options: DecodeOptions) -> np.ndarray:
    """Slope and intercept, after the 12-bit wrap is undone where that is asked for."""
    slope = frame.number("RescaleSlope", _RESCALE)
    intercept = frame.number("RescaleIntercept", _RESCALE)
    if slope is None or intercept is None:
        frame.corrections.append("ct_rescale_missing")
    kind = frame.value("RescaleType", _RESCALE)
    if kind not in (None, "", "HU"):
        frame.corrections.append("ct_rescale_type_not_hu")
    slope, intercept = 1.0 if slope is None else slope, intercept or 0.0
    if slope == 0:
        raise Undecodable("the rescale slope is 0")
    units = stored.astype(np.float32)
    unsigned = frame.integer("PixelRepresentation", 0)
    if wraps_12_bit(frame.integer("BitsStored", 16), unsigned, intercept):
        if options.fix_12bit_wrap:
            units += 1000
            units[units >= 4096] -= 4096
            intercept = -1000.0
            frame.corrections.append("rsna_12bit_wrap")
        else:
            frame.corrections.append("rsna_12bit_wrap_suspected")
    if slope != 1:
        units *= np.float32(slope)
    if intercept != 0:
        units += np.float32(intercept)
    return units


def _fill_padding(frame: Frame, stored: np.ndarray, units: np.ndarray) -> None:
    """Sets declared padding (PS3.3 C.7.5.1.1.2) to air.

    Some scanners declare a value that tissue has as well (0 with intercept 0 is water): then only what is
    connected with the border is padding.
    """
    padding = frame.number("PixelPaddingValue")
    if padding is None:
        return
    limit = frame.number("PixelPaddingRangeLimit")
    low, high = sorted(_as_stored(v, stored.dtype) for v in (padding, padding if limit is None else limit))
    mask = stored == low if low == high else (stored >= low) & (stored <= high)
    if not mask.any():
        return
    if units[mask].max() > _AIR_LIKE:
        mask = touching_border(mask)
    if mask.any():
        units[mask] = AIR
        frame.corrections.append("ct_padding_to_air")


def _as_stored(value: float, dtype: np.dtype) -> int:
    """A padding value read with the wrong sign (63536 for -2000) as the pixels hold it."""
    if dtype.kind not in "iu":
        return int(value)
    info, span = np.iinfo(dtype), 1 << 8 * dtype.itemsize
    number = int(value)
    return number + span if number < info.min else number - span if number > info.max else number


def touching_border(mask: np.ndarray) -> np.ndarray:
    """The regions (4-connected) of a mask ``[H, W]`` that reach its border."""
    from scipy.ndimage import label

    regions, _ = label(mask)
    border = np.concatenate([regions[0], regions[-1], regions[:, 0], regions[:, -1]])
    return np.isin(regions, np.unique(border[border > 0]))


def displayed(frame: Frame, stored: np.ndarray, options: DecodeOptions) -> tuple[np.ndarray, tuple[float, float]]:
    """Grey values ``[H, W]`` after modality and VOI transform, and their range (MONOCHROME1 not yet inverted)."""
    slope, intercept = 1.0, 0.0
    if "ModalityLUTSequence" in frame.dataset:
        values = apply_modality_lut(stored, frame.dataset)
    else:
        slope = frame.number("RescaleSlope", _RESCALE) or 1.0
        intercept = frame.number("RescaleIntercept", _RESCALE) or 0.0
        values = stored if (slope, intercept) == (1.0, 0.0) else stored * slope + intercept
    if options.apply_voi:
        if lut := frame.dataset.get("VOILUTSequence"):
            integers = values if values.dtype.kind in "iu" else np.rint(values).astype(np.int32)
            frame.corrections.append("voi_lut_applied")
            top = 2.0 ** int(lut[0].LUTDescriptor[2]) - 1
            return apply_voi(integers, frame.dataset).astype(np.float32), (0.0, top)
        centre = frame.number("WindowCenter", _VOI)
        width = frame.number("WindowWidth", _VOI)
        function = str(frame.value("VOILUTFunction", _VOI) or "LINEAR")
        if centre is not None and width is not None:
            if width >= 1 or (width > 0 and function != "LINEAR"):
                frame.corrections.append("window_applied")
                return window(values.astype(np.float32), centre, width, function), (0.0, 255.0)
            frame.corrections.append("invalid_window_ignored")
    pixels = values.astype(np.float32)
    bits = frame.integer("BitsStored", 8)
    if stored.dtype.kind == "f" or "ModalityLUTSequence" in frame.dataset or (bits > 8 and options.apply_voi):
        # As viewers do: 12 or 16 bits are hardly ever used to the full.
        frame.corrections.append("no_window_full_range")
        return pixels, span(pixels)
    low = -(2.0 ** (bits - 1)) if stored.dtype.kind == "i" else 0.0
    high = low + 2.0**bits - 1
    ends = sorted((low * slope + intercept, high * slope + intercept))
    return pixels, (ends[0], ends[1])


def span(pixels: np.ndarray) -> tuple[float, float]:
    """Smallest and largest value; one apart where the frame is constant."""
    low, high = float(pixels.min()), float(pixels.max())
    return low, high if high > low else low + 1.0


def colour(frame: Frame, stored: np.ndarray, photometric: str) -> tuple[np.ndarray, tuple[float, float]]:
    """RGB ``[3, H, W]`` and its range."""
    top = 2.0 ** frame.integer("BitsStored", 8) - 1
    if photometric == "PALETTE COLOR":
        stored = apply_color_lut(stored, frame.dataset)[..., :3]
        top = 2.0 ** (8 * stored.dtype.itemsize) - 1
        frame.corrections.append("palette_applied")
    if stored.ndim != 3 or stored.shape[-1] != 3:
        raise Undecodable(f"unsupported photometric interpretation {photometric}")
    return np.moveaxis(stored, -1, 0).astype(np.float32, order="C"), (0.0, top)
