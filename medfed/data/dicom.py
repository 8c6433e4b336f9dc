"""DICOM to pixels.

pydicom with pylibjpeg decodes the transfer syntaxes; what the numbers mean (rescale, padding, windows, palettes,
functional groups) is settled in :mod:`medfed.data.dicom_values`.
"""

from __future__ import annotations

import logging
import os
import struct
import warnings
from typing import Any, BinaryIO

import numpy as np
from pydicom import dcmread, uid
from pydicom.dataset import Dataset
from pydicom.pixels import as_pixel_options, get_decoder
from pydicom.tag import BaseTag, Tag

from medfed.data.decode import Decoded, DecodeOptions, Header, Probe, Undecodable, check_frame, check_size
from medfed.data.dicom_values import Frame, colour, displayed, hounsfield, is_hounsfield

# pydicom warns of each oddity of each file and quotes values of the patient; what matters is counted as a correction.
logging.getLogger("pydicom").setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", category=UserWarning, module=r"pydicom|medfed\.data\.dicom")

_UNDEFINED_LENGTH = 0xFFFFFFFF
_PIXEL_KEYWORDS = {0x0010: "PixelData", 0x0008: "FloatPixelData", 0x0009: "DoubleFloatPixelData"}
_ITEM, _DELIMITER = b"\xfe\xff\x00\xe0", b"\xfe\xff\xdd\xe0"
_JPEG_START, _FRAME_MARKERS = b"\xff\xd8\xff", {*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC}
_JPEG_END = b"\xff\xd9"
_J2K_START = b"\xff\x4f\xff\x51"  # SOC and SIZ markers, ISO/IEC 15444-1 Annex A

_TEXTS = {
    name: Tag(keyword)
    for name, keyword in {
        "modality": "Modality",
        "image_type": "ImageType",
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
    }.items()
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
    check_frame(frame, _frames(dataset))
    check_size(int(dataset.get("Rows") or 0), int(dataset.get("Columns") or 0), options.max_pixels)
    this = Frame(dataset, frame)
    stored, photometric = _stored_pixels(file, this)
    if is_hounsfield(this, photometric):
        units, value_range = hounsfield(this, stored, options)
        return Decoded(units[None], "hounsfield", value_range, tuple(this.corrections), _header(dataset))
    if photometric.startswith("MONOCHROME"):
        grey, value_range = displayed(this, stored, options)
        if photometric == "MONOCHROME1":
            grey = np.float32(sum(value_range)) - grey
            this.corrections.append("monochrome1_inverted")
        pixels = grey[None]
    else:
        pixels, value_range = colour(this, stored, photometric)
    return Decoded(pixels, "image", value_range, tuple(this.corrections), _header(dataset))


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
    header: dict[str, str | float] = {name: text for name, tag in _TEXTS.items() if (text := _text(dataset, tag))}
    header["transfer_syntax"] = str(_transfer_syntax(dataset)[0])
    return header


def _text(dataset: Dataset, tag: BaseTag) -> str:
    """A value as text, several joined by backslashes as DICOM writes them; empty where absent or unreadable."""
    try:
        raw = dataset.get_item(tag)
        if raw is None:
            return ""
        if isinstance(raw.value, bytes) and raw.value.isascii():  # far quicker than pydicom's conversion
            return raw.value.decode("ascii").strip("\0 ")
        value = dataset[tag].value
    except Exception:  # an unreadable id does not spoil the pixels
        return ""
    if value is None:
        return ""
    return "\\".join(map(str, value)) if hasattr(value, "append") else str(value)


def _transfer_syntax(dataset: Dataset) -> tuple[uid.UID, bool]:
    """The transfer syntax, and whether the file states it (a dataset without it is taken for uncompressed)."""
    meta = getattr(dataset, "file_meta", None) or Dataset()
    if stated := meta.get("TransferSyntaxUID"):
        return uid.UID(stated), True
    implicit, little = dataset.original_encoding
    if implicit:
        return uid.ImplicitVRLittleEndian, False
    return (uid.ExplicitVRLittleEndian if little else uid.ExplicitVRBigEndian), False


def _stored_pixels(file: BinaryIO, frame: Frame) -> tuple[np.ndarray, str]:
    """The stored numbers of one frame, ``[H, W]`` or ``[H, W, 3]``, and their photometric interpretation."""
    dataset, corrections = frame.dataset, frame.corrections
    syntax, stated = _transfer_syntax(dataset)
    if not stated:
        corrections.append("transfer_syntax_guessed")
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError as error:
        name = syntax.name if syntax.name != str(syntax) else "that is not of the standard"
        raise Undecodable(f"unsupported transfer syntax {name}") from error
    if dataset.get("HighBit") not in (None, "") and int(dataset.HighBit) != int(dataset.get("BitsStored") or 0) - 1:
        corrections.append("high_bit_ignored")  # retired from the standard, and often wrong where it occurs
    options: dict[str, Any] = as_pixel_options(dataset, view_only=True)
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
            _check_fragments(file, syntax, corrections)
            _check_codestream(file, dataset, corrections)
        elif length == _UNDEFINED_LENGTH:
            raise Undecodable("compressed pixel data without a transfer syntax that says so")
        else:
            left = os.fstat(file.fileno()).st_size - file.tell()
            _check_length(dataset, min(length, left), corrections)
    try:
        stored, meta = decoder.as_array(source, index=frame.index, **options)
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


def _check_fragments(file: BinaryIO, syntax: uid.UID, corrections: list[str]) -> None:
    """Walks the fragments of compressed pixels (PS3.5 A.4): JPEG decoders fill up with grey what is cut off."""
    start, size = file.tell(), os.fstat(file.fileno()).st_size
    at, length, items = start, 0, 0
    while True:
        file.seek(at)
        head = file.read(8)
        if len(head) < 8:
            corrections.append("sequence_delimiter_missing")
            break
        tag, length_here = head[:4], int.from_bytes(head[4:], "little")
        if tag == _DELIMITER:
            break
        if tag != _ITEM:
            raise Undecodable(f"damaged pixel data ({syntax.name})")
        at, length, items = at + 8 + length_here, length_here, items + 1
        if at > size:
            raise Undecodable(f"pixel data shorter than the header says ({size - start} of {at - start} bytes)")
    if items < 2 or length == 0:  # the first is the offset table
        raise Undecodable("no pixel data")
    if syntax in uid.JPEGTransferSyntaxes or syntax in uid.JPEGLSTransferSyntaxes:
        file.seek(at - min(length, 64))
        if not file.read(min(length, 64)).rstrip(b"\0").endswith(_JPEG_END):
            raise Undecodable("pixel data ends before the end of the JPEG stream")
    file.seek(start)


def _check_codestream(file: BinaryIO, dataset: Dataset, corrections: list[str]) -> None:
    """Compares the first JPEG or JPEG 2000 stream with the header, before a decoder makes room for it."""
    start = file.tell()
    found = stream_size(file.read(65536))
    file.seek(start)
    if found is None:
        return
    rows, columns, bits = found
    if (rows, columns) != (int(dataset.Rows), int(dataset.Columns)) and rows:  # 0 rows: a later marker says it
        raise Undecodable(f"compressed pixels of another size than the header says ({rows} x {columns})")
    if bits != dataset.get("BitsStored"):
        corrections.append("codestream_bits_differ")


def stream_size(stream: bytes) -> tuple[int, int, int] | None:
    """Rows, columns and bits by the header of the first JPEG, JPEG-LS or JPEG 2000 stream in some bytes.

    ISO/IEC 15444-1 A.5.1 (SIZ marker) and 10918-1 B.2.2 (frame header).
    """
    at = stream.find(_J2K_START)
    if 0 <= at < len(stream) - 42:
        right, bottom, left, top = struct.unpack_from(">4L", stream, at + 8)
        return bottom - top, right - left, (stream[at + 42] & 0x7F) + 1
    at = stream.find(_JPEG_START) + 2
    while 2 <= at < len(stream) - 8 and stream[at] == 0xFF:
        marker, (length,) = stream[at + 1], struct.unpack_from(">H", stream, at + 2)
        if marker in _FRAME_MARKERS:
            bits, rows, columns = struct.unpack_from(">BHH", stream, at + 4)
            return rows, columns, bits
        at += 2 + length
    return None
