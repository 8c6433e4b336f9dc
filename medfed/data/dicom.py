"""DICOM to pixels: Hounsfield units for CT, displayed values for everything else.

Sections of the DICOM standard are named where they are followed (PS3.3 2024).  pydicom with pylibjpeg decodes the
transfer syntaxes; the meaning of the numbers (rescale, padding, windows, palettes, functional groups) is settled here.
"""

from __future__ import annotations

import os
import struct
import warnings
from typing import Any, BinaryIO

import numpy as np
from pydicom import dcmread, uid
from pydicom.dataset import Dataset
from pydicom.pixels import as_pixel_options, get_decoder
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi

from medfed.data.decode import Decoded, DecodeOptions, Header, Probe, Undecodable, check_frame, check_size

# pydicom warns of each oddity of each file; what matters of them is counted as a correction.
warnings.filterwarnings("ignore", category=UserWarning, module=r"pydicom|medfed\.data\.dicom")

AIR = -1024.0
_AIR_LIKE = -1000.0
_UNDEFINED_LENGTH = 0xFFFFFFFF
_PIXEL_KEYWORDS = {0x0010: "PixelData", 0x0008: "FloatPixelData", 0x0009: "DoubleFloatPixelData"}
_J2K_START = b"\xff\x4f\xff\x51"  # SOC and SIZ markers, ISO/IEC 15444-1 Annex A

_TEXTS = {
    "modality": "Modality",
    "patient_id": "PatientID",
    "study_uid": "StudyInstanceUID",
    "series_uid": "SeriesInstanceUID",
    "sop_uid": "SOPInstanceUID",
    "sop_class": "SOPClassUID",
    "photometric": "PhotometricInterpretation",
    "spacing": "PixelSpacing",
    "orientation": "ImageOrientationPatient",
    "position": "ImagePositionPatient",
    "instance_number": "InstanceNumber",
    "laterality": "ImageLaterality",
    "burned_in_annotation": "BurnedInAnnotation",
}


def probe(file: BinaryIO) -> Probe:
    """Frames, size and ids of a DICOM file; pixels are not read."""
    dataset = _read_header(file)
    _require_image(dataset)
    rows, columns = int(dataset.get("Rows") or 0), int(dataset.get("Columns") or 0)
    return Probe("dicom", _frames(dataset), rows, columns, _header(dataset))


def decode(file: BinaryIO, frame: int, options: DecodeOptions) -> Decoded:
    """Decodes one frame of an opened DICOM file; see :func:`medfed.data.decode.decode`."""
    dataset = _read_header(file)
    _require_image(dataset)
    frames = _frames(dataset)
    check_frame(frame, frames)
    check_size(int(dataset.get("Rows") or 0), int(dataset.get("Columns") or 0), options.max_pixels)
    corrections: list[str] = []
    stored, photometric = _stored_pixels(file, dataset, frame, corrections)
    if _is_hounsfield(dataset, photometric):
        pixels = _hounsfield(dataset, stored, frame, options, corrections)[None]
        value_range = (float(pixels.min()), float(pixels.max()))
        return Decoded(pixels, "hounsfield", value_range, tuple(corrections), _header(dataset))
    if photometric.startswith("MONOCHROME"):
        grey, value_range = _displayed(dataset, stored, frame, options, corrections)
        if photometric == "MONOCHROME1":
            grey = np.float32(sum(value_range)) - grey
            corrections.append("monochrome1_inverted")
        pixels = grey[None]
    else:
        pixels, value_range = _colour(dataset, stored, photometric, corrections)
    return Decoded(pixels, "image", value_range, tuple(corrections), _header(dataset))


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


def _read_header(file: BinaryIO) -> Dataset:
    try:
        return dcmread(file, stop_before_pixels=True, force=True)
    except Exception as error:
        raise Undecodable("damaged DICOM header") from error


def _require_image(dataset: Dataset) -> None:
    meta = getattr(dataset, "file_meta", None) or Dataset()
    sop_class = uid.UID(str(dataset.get("SOPClassUID") or meta.get("MediaStorageSOPClassUID") or ""))
    if sop_class == uid.MediaStorageDirectoryStorage or "DirectoryRecordSequence" in dataset:
        raise Undecodable("DICOMDIR")
    if dataset.get("Rows") is None or dataset.get("Columns") is None:
        known = sop_class and sop_class.name != str(sop_class) and "Image" not in sop_class.name
        raise Undecodable(f"not an image: {sop_class.name}" if known else "no pixel data")


def _frames(dataset: Dataset) -> int:
    return max(int(dataset.get("NumberOfFrames") or 1), 1)


def _header(dataset: Dataset) -> Header:
    header: dict[str, str | float] = {}
    for name, keyword in _TEXTS.items():
        try:
            value = dataset.get(keyword)
        except Exception:  # an unreadable id does not spoil the pixels
            continue
        if value is not None and value != "":
            # hasattr: several values, joined as DICOM writes them
            header[name] = "\\".join(map(str, value)) if hasattr(value, "append") else str(value)
    header["transfer_syntax"] = str(_transfer_syntax(dataset)[0])
    return header


def _transfer_syntax(dataset: Dataset) -> tuple[uid.UID, bool]:
    """The transfer syntax, and whether the file states it (a dataset without it is taken for uncompressed)."""
    meta = getattr(dataset, "file_meta", None) or Dataset()
    if stated := meta.get("TransferSyntaxUID"):
        return uid.UID(stated), True
    implicit, little = dataset.original_encoding
    if implicit:
        return uid.ImplicitVRLittleEndian, False
    return (uid.ExplicitVRLittleEndian if little else uid.ExplicitVRBigEndian), False


def _stored_pixels(file: BinaryIO, dataset: Dataset, frame: int, corrections: list[str]) -> tuple[np.ndarray, str]:
    """The stored numbers of one frame, ``[H, W]`` or ``[H, W, 3]``, and their photometric interpretation."""
    syntax, stated = _transfer_syntax(dataset)
    if not stated:
        corrections.append("transfer_syntax_guessed")
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError as error:
        raise Undecodable(f"unsupported transfer syntax {syntax.name}") from error
    options = as_pixel_options(dataset)
    source: Any = file
    if syntax == uid.DeflatedExplicitVRLittleEndian:  # pydicom inflates it to memory
        file.seek(0)
        source = dcmread(file, force=True)
        if "PixelData" not in source:
            raise Undecodable("no pixel data")
        _check_length(dataset, len(source.PixelData), corrections)
    else:
        keyword, representation, length = _pixel_element(file, dataset)
        options.update(pixel_keyword=keyword, pixel_vr=representation)
        if syntax.is_encapsulated:
            _check_codestream(file, options.get("bits_stored"), syntax, corrections)
        elif length == _UNDEFINED_LENGTH:
            raise Undecodable("compressed pixel data without a transfer syntax that says so")
        else:
            left = os.fstat(file.fileno()).st_size - file.tell()
            _check_length(dataset, min(length, left), corrections)
    try:
        stored, meta = decoder.as_array(source, index=frame, **options)
    except Exception as error:
        raise Undecodable(f"damaged pixel data ({syntax.name})") from error
    before, after = str(options.get("photometric_interpretation")), str(meta["photometric_interpretation"])
    if before.startswith("YBR") and after == "RGB":
        corrections.append("ybr_to_rgb")
    return stored, before if after.startswith("YBR_RCT") else after


def _pixel_element(file: BinaryIO, dataset: Dataset) -> tuple[str, str, int]:
    """Keyword, value representation and length of the pixel element; the file then stands at its value."""
    implicit, little = dataset.original_encoding
    head = file.read(8)
    if len(head) < 8:
        raise Undecodable("no pixel data")
    order = "<" if little else ">"
    if implicit:
        group, element, length = struct.unpack(order + "HHL", head)
        representation = "OW"
    else:
        group, element = struct.unpack(order + "HH", head[:4])
        representation = head[4:6].decode("latin-1")
        more = file.read(4)
        length = struct.unpack(order + "L", more)[0] if len(more) == 4 else 0
    if group != 0x7FE0 or element not in _PIXEL_KEYWORDS:
        raise Undecodable("no pixel data")
    return _PIXEL_KEYWORDS[element], representation, length


def _check_length(dataset: Dataset, actual: int, corrections: list[str]) -> None:
    """Compares the bytes of uncompressed pixels with what the header promises."""
    samples = int(dataset.get("SamplesPerPixel") or 1)
    bits = int(dataset.Rows) * int(dataset.Columns) * samples * int(dataset.get("BitsAllocated") or 0)
    if dataset.get("PhotometricInterpretation") == "YBR_FULL_422":
        bits = bits * 2 // 3
    expected = -(-bits * _frames(dataset) // 8)
    if actual < expected:
        raise Undecodable(f"pixel data shorter than the header says ({actual} of {expected} bytes)")
    if actual > expected + expected % 2:
        corrections.append("trailing_bytes_ignored")


def _check_codestream(file: BinaryIO, bits_stored: Any, syntax: uid.UID, corrections: list[str]) -> None:
    """Notes a JPEG 2000 stream whose precision is not the header's."""
    if syntax not in uid.JPEG2000TransferSyntaxes:
        return
    start = file.tell()
    head = file.read(4096)
    file.seek(start)
    found = head.find(_J2K_START)
    if 0 <= found < len(head) - 42 and (head[found + 42] & 0x7F) + 1 != bits_stored:
        corrections.append("codestream_bits_differ")


def _is_hounsfield(dataset: Dataset, photometric: str) -> bool:
    """CT in grey; an 8-bit CT without rescale is a screenshot, not Hounsfield units."""
    if dataset.get("Modality") != "CT" or not photometric.startswith("MONOCHROME"):
        return False
    has_rescale = _value(dataset, 0, "PixelValueTransformationSequence", "RescaleIntercept") is not None
    return has_rescale or int(dataset.get("BitsStored") or 16) > 8


def _hounsfield(
    dataset: Dataset, stored: np.ndarray, frame: int, options: DecodeOptions, corrections: list[str]
) -> np.ndarray:
    """Stored CT numbers ``[H, W]`` to Hounsfield units, nothing below -1024."""
    if "ModalityLUTSequence" in dataset:
        return apply_modality_lut(stored, dataset).astype(np.float32)
    slope = _number(dataset, frame, "PixelValueTransformationSequence", "RescaleSlope")
    intercept = _number(dataset, frame, "PixelValueTransformationSequence", "RescaleIntercept")
    if slope is None or intercept is None:
        corrections.append("ct_rescale_missing")
    kind = _value(dataset, frame, "PixelValueTransformationSequence", "RescaleType")
    if kind not in (None, "", "HU"):
        corrections.append("ct_rescale_type_not_hu")
    slope, intercept = 1.0 if slope is None else slope, intercept or 0.0
    if slope == 0:
        raise Undecodable("the rescale slope is 0")
    units = stored.astype(np.float32)
    unsigned = int(dataset.get("PixelRepresentation") or 0)
    if wraps_12_bit(int(dataset.get("BitsStored") or 16), unsigned, intercept):
        if options.fix_12bit_wrap:
            units += 1000
            units[units >= 4096] -= 4096
            intercept = -1000.0
            corrections.append("rsna_12bit_wrap")
        else:
            corrections.append("rsna_12bit_wrap_suspected")
    if slope != 1:
        units *= np.float32(slope)
    if intercept != 0:
        units += np.float32(intercept)
    _fill_padding(dataset, stored, units, corrections)
    if units.min() < AIR:
        np.maximum(units, np.float32(AIR), out=units)
        corrections.append("ct_below_air_raised")
    return units


def _fill_padding(dataset: Dataset, stored: np.ndarray, units: np.ndarray, corrections: list[str]) -> None:
    """Sets declared padding (PS3.3 C.7.5.1.1.2) to air.

    Some scanners declare a value that tissue has as well (0 with intercept 0 is water): then only what is
    connected with the border is padding.
    """
    padding = _number(dataset, 0, None, "PixelPaddingValue")
    if padding is None:
        return
    limit = _number(dataset, 0, None, "PixelPaddingRangeLimit")
    low, high = sorted(_as_stored(v, stored.dtype) for v in (padding, padding if limit is None else limit))
    mask = stored == low if low == high else (stored >= low) & (stored <= high)
    if not mask.any():
        return
    if units[mask].max() > _AIR_LIKE:
        mask = touching_border(mask)
    if mask.any():
        units[mask] = AIR
        corrections.append("ct_padding_to_air")


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


def _displayed(
    dataset: Dataset, stored: np.ndarray, frame: int, options: DecodeOptions, corrections: list[str]
) -> tuple[np.ndarray, tuple[float, float]]:
    """Grey values ``[H, W]`` after modality and VOI transform, and their range (MONOCHROME1 not yet inverted)."""
    slope, intercept = 1.0, 0.0
    if "ModalityLUTSequence" in dataset:
        values = apply_modality_lut(stored, dataset)
    else:
        slope = _number(dataset, frame, "PixelValueTransformationSequence", "RescaleSlope") or 1.0
        intercept = _number(dataset, frame, "PixelValueTransformationSequence", "RescaleIntercept") or 0.0
        values = stored if (slope, intercept) == (1.0, 0.0) else stored * slope + intercept
    if options.apply_voi:
        if lut := dataset.get("VOILUTSequence"):
            integers = values if values.dtype.kind in "iu" else np.rint(values).astype(np.int32)
            corrections.append("voi_lut_applied")
            top = 2.0 ** int(lut[0].LUTDescriptor[2]) - 1
            return apply_voi(integers, dataset).astype(np.float32), (0.0, top)
        centre = _number(dataset, frame, "FrameVOILUTSequence", "WindowCenter")
        width = _number(dataset, frame, "FrameVOILUTSequence", "WindowWidth")
        function = str(_value(dataset, frame, "FrameVOILUTSequence", "VOILUTFunction") or "LINEAR")
        if centre is not None and width is not None:
            if width >= 1 or (width > 0 and function != "LINEAR"):
                corrections.append("window_applied")
                return window(values.astype(np.float32), centre, width, function), (0.0, 255.0)
            corrections.append("invalid_window_ignored")
    pixels = values.astype(np.float32)
    bits = int(dataset.get("BitsStored") or 0)
    if stored.dtype.kind == "f" or "ModalityLUTSequence" in dataset or (bits > 8 and options.apply_voi):
        # As viewers do: 12 or 16 bits are hardly ever used to the full.
        corrections.append("no_window_full_range")
        return pixels, span(pixels)
    low = -(2.0 ** (bits - 1)) if stored.dtype.kind == "i" else 0.0
    high = low + 2.0**bits - 1
    ends = sorted((low * slope + intercept, high * slope + intercept))
    return pixels, (ends[0], ends[1])


def span(pixels: np.ndarray) -> tuple[float, float]:
    """Smallest and largest value; one apart where the frame is constant."""
    low, high = float(pixels.min()), float(pixels.max())
    return low, high if high > low else low + 1.0


def _colour(
    dataset: Dataset, stored: np.ndarray, photometric: str, corrections: list[str]
) -> tuple[np.ndarray, tuple[float, float]]:
    """RGB ``[3, H, W]`` and its range."""
    top = 2.0 ** int(dataset.get("BitsStored") or 8) - 1
    if photometric == "PALETTE COLOR":
        stored = apply_color_lut(stored, dataset)[..., :3]
        top = 2.0 ** (8 * stored.dtype.itemsize) - 1
        corrections.append("palette_applied")
    if stored.ndim != 3 or stored.shape[-1] != 3:
        raise Undecodable(f"unsupported photometric interpretation {photometric}")
    return np.moveaxis(stored, -1, 0).astype(np.float32, order="C"), (0.0, top)


def _value(dataset: Dataset, frame: int, sequence: str | None, keyword: str) -> Any:
    """A value of one frame: from its functional group, the shared one, or the dataset (PS3.3 C.7.6.16)."""
    if sequence:
        per_frame = dataset.get("PerFrameFunctionalGroupsSequence") or ()
        shared = dataset.get("SharedFunctionalGroupsSequence") or ()
        for group in [*per_frame[frame : frame + 1], *shared[:1]]:
            for item in group.get(sequence) or ():
                if (value := item.get(keyword)) is not None:
                    return value
    return dataset.get(keyword)


def _number(dataset: Dataset, frame: int, sequence: str | None, keyword: str) -> float | None:
    """The first number of a value, or None where it is absent or empty."""
    value = _value(dataset, frame, sequence, keyword)
    if hasattr(value, "append"):  # several windows: the first is the default one
        value = value[0] if len(value) else None
    return None if value in (None, "") else float(value)
