"""Heidelberg ``.vol`` to pixels: the raw export of Spectralis OCT volumes, one B-scan a frame.

The layout is that of Heidelberg Engineering's "Spectralis Viewing Module, special function: exporting raw data", all
numbers little-endian: a header of 2048 bytes, the fundus picture (8 bits), then for each B-scan a header of its own
with segmented layers, and the reflectivity as float32 ``[height, width]``, row 0 at the top (towards the vitreous).
Reflectivity runs from 0 to 1 and is shown by its fourth root; what the scan does not cover has the largest float32.

It is read here, since a frame needs a few bytes of each header and its own pixels alone; libraries parse the whole
volume, leave out circular and radial scans, and bring other libraries along.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from medfed.data.decode import Decoded, DecodeOptions, Header, Probe, Undecodable, check_frame, check_size

KIND = "heidelberg_vol"
_FILE_HEADER, _BSCAN_HEADER = 2048, 256  # bytes; a B-scan's header holds further bytes for the layers
_LONGEST_HEADER = 1 << 24
_LARGEST_SIDE = 1 << 16
_INVALID = np.float32(3e38)  # and above: pixels outside the scan hold the largest float32
_MOST_ABOVE_ONE = 0.05
_EYES = {"OD": "R", "OS": "L"}


@dataclass(frozen=True)
class _Volume:
    """Sizes, and where the pixels of each B-scan begin."""

    height: int
    width: int
    starts: tuple[int, ...]
    header: Header
    sizes_differ: bool


def probe(file: BinaryIO) -> Probe:
    """Number of B-scans, their size, patient and eye."""
    volume = _read(file)
    return Probe(KIND, len(volume.starts), volume.height, volume.width, volume.header)


def decode(file: BinaryIO, frame: int, options: DecodeOptions) -> Decoded:
    """Decodes one B-scan of an opened volume; see :func:`medfed.data.decode.decode`."""
    volume = _read(file)
    check_frame(frame, len(volume.starts))
    check_size(volume.height, volume.width, options.max_pixels)
    file.seek(volume.starts[frame])
    raw = np.frombuffer(file.read(4 * volume.height * volume.width), dtype="<f4")
    if not np.isfinite(raw).all():
        raise Undecodable("NaN or infinite pixel values")
    corrections = ["vol_header_sizes_differ"] if volume.sizes_differ else []
    outside = raw >= _INVALID
    if outside.all():
        raise Undecodable("no valid pixels")
    if outside.any():
        raw = np.where(outside, np.float32(0), raw)
        corrections.append("vol_invalid_pixels_blackened")
    if raw.max() > 1 and _is_grey(raw):
        grey = raw
        corrections.append("vol_grey_values_taken")
    else:
        if raw.min() < 0 or raw.max() > 1:
            if np.mean(raw > 1) > _MOST_ABOVE_ONE:
                raise Undecodable("no reflectivity between 0 and 1")
            raw = raw.clip(0, 1)
            corrections.append("vol_out_of_range_clipped")
        grey = np.sqrt(np.sqrt(raw)) * np.float32(255)
    pixels = grey.astype(np.float32).reshape(1, volume.height, volume.width)
    return Decoded(pixels, "image", (0.0, 255.0), tuple(corrections), volume.header)


def _is_grey(raw: np.ndarray) -> bool:
    """Whether a file holds the grey values 0 to 255 of the displayed picture, as libraries have written it."""
    return bool(raw.min() >= 0 and raw.max() <= 255 and (raw == np.rint(raw)).all())


def _sizes(head: bytes) -> tuple[int, int, int] | None:
    """Width, B-scans and height by the file header; None where they are no sizes of pictures."""
    sizes = struct.unpack_from("<3I", head, 12)
    return sizes if all(0 < n < _LARGEST_SIDE for n in sizes) else None


def _read(file: BinaryIO) -> _Volume:
    """Reads the headers, and checks that the file is as long as they say."""
    actual = os.fstat(file.fileno()).st_size
    head = file.read(_FILE_HEADER)
    if len(head) < _FILE_HEADER:
        raise Undecodable(f"Heidelberg .vol header of {len(head)} bytes instead of {_FILE_HEADER}")
    sizes = _sizes(head)
    if sizes is None:
        raise Undecodable("damaged Heidelberg .vol header")
    width, count, height = sizes
    fundus = struct.unpack_from("<2I", head, 48)
    if max(fundus) >= _LARGEST_SIDE:
        raise Undecodable("damaged Heidelberg .vol header")
    (stated,) = struct.unpack_from("<I", head, 100)
    at, starts, differ = _FILE_HEADER + fundus[0] * fundus[1], [], False
    for frame in range(count):
        file.seek(at)
        own = file.read(16)
        if len(own) < 16:
            raise Undecodable(f"pixel data shorter than the header says ({frame} of {count} B-scans)")
        (length,) = struct.unpack_from("<I", own, 12)  # rules where writers state another one for the file
        if not _BSCAN_HEADER <= length <= _LONGEST_HEADER:
            raise Undecodable("damaged header of a B-scan")
        differ |= length != stated
        starts.append(at + length)
        at += length + 4 * width * height
    if actual < at:
        whole = sum(start + 4 * width * height <= actual for start in starts)
        raise Undecodable(f"pixel data shorter than the header says ({whole} of {count} B-scans)")
    return _Volume(height, width, tuple(starts), _header(head), differ)


def _header(head: bytes) -> Header:
    scale_x, _, scale_y = struct.unpack_from("<3d", head, 24)
    (number,) = struct.unpack_from("<I", head, 136)
    patient = _text(head[140:164])
    if not patient or patient == "unknown":
        patient = f"HEYEX-{number}" if number else ""  # the number of the patient in the database it comes from
    eye = _text(head[84:88])
    found: dict[str, str | float] = {
        "modality": "OPT",
        "patient_id": patient,
        "laterality": _EYES.get(eye, ""),
        "spacing": f"{scale_y:.9g}\\{scale_x:.9g}" if 0 < scale_x < 1e3 and 0 < scale_y < 1e3 else "",
    }
    return {name: value for name, value in found.items() if value}


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("latin-1").strip()
