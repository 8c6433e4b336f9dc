"""Files to pixels as displayed, whatever the format: DICOM, PNG, JPEG, TIFF, NIfTI, Heidelberg .vol, BMP, GIF, WebP.

The format is recognised by content, never by name.  Row 0 of the pixels is the top of the displayed picture, and
column 0 its left.  What was done beyond plain decoding is named in ``corrections``, so that it can be counted.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, Literal

import numpy as np

from medfed.errors import DataError

Header = Mapping[str, str | float]


_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"II*\x00", "tiff"),
    (b"MM\x00*", "tiff"),
    (b"II+\x00", "tiff"),
    (b"MM\x00+", "tiff"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
    (b"BM", "bmp"),
    (b"\x00\x00\x00\x0cjP  ", "jpeg2000"),
    (b"CMDb", "e2e"),
)
# Known, but not read: what to do instead.
_NOT_READ = {
    "e2e": "a Heidelberg E2E file; export it from HEYEX as .vol, XML or DICOM",
    "heyex_xml": "a HEYEX XML export, whose images are read and not the XML itself",
}
_NIFTI_HEADER = 540  # bytes: the longer of the two versions


class Undecodable(DataError):
    """A file that cannot be turned into pixels.

    Args:
        reason: short and stable, without the path: it may be counted and may leave the client.
        where: the file; for the user at this machine alone.
    """

    def __init__(self, reason: str, *, where: str | None = None):
        self.reason = reason
        super().__init__(f"cannot be decoded: {reason}.", where=where)

    def __reduce__(self) -> tuple:
        return _undecodable, (self.reason, self.where)


def _undecodable(reason: str, where: str | None) -> Undecodable:
    return Undecodable(reason, where=where)


@dataclass(frozen=True)
class DecodeOptions:
    """What to do where files do not say it all.

    Args:
        fix_12bit_wrap: undo the wrap-around of some RSNA 2019 files, whose negative Hounsfield units are stored as
            unsigned 12-bit numbers.  Off by default, since legal files of other scanners match it too.
        apply_voi: apply the VOI LUT or the window of DICOM images other than CT.
        max_pixels: the most pixels a frame may have; larger ones are refused unread.
        nifti: what NIfTI voxels are, which its header does not say.  ``"guess"`` takes a slice whose minimum is
            -900 or less for Hounsfield units.
    """

    fix_12bit_wrap: bool = False
    apply_voi: bool = True
    max_pixels: int = 200_000_000
    nifti: Literal["guess", "hounsfield", "image"] = "guess"


@dataclass(frozen=True)
class Decoded:
    """One frame as displayed.

    Args:
        pixels: float32 ``[C, H, W]``, row 0 at the top; C is 1 (grey) or 3 (RGB).
        kind: ``"hounsfield"`` (CT in Hounsfield units) or ``"image"``.
        value_range: nominal range of the values of an image, (0, 255) for 8 bit; of CT the range found.
        corrections: what was done beyond plain decoding, in snake case.
        header: modality, ids, spacing and the like, where the format has them.
    """

    pixels: np.ndarray
    kind: Literal["hounsfield", "image"]
    value_range: tuple[float, float]
    corrections: tuple[str, ...] = ()
    header: Header = field(default_factory=dict)


@dataclass(frozen=True)
class Probe:
    """What the header alone says.

    Args:
        kind: the format: ``dicom``, ``png``, ``jpeg``, ``tiff``, ``nifti``, ``bmp``, ``gif``, ``webp``, ``jpeg2000``,
            ``heidelberg_vol``.
        frames: number of frames, pages or slices.
        height: rows as displayed.
        width: columns as displayed.
        header: as in :class:`Decoded`.
    """

    kind: str
    frames: int
    height: int
    width: int
    header: Header = field(default_factory=dict)


def decode(path: str | Path, frame: int = 0, options: DecodeOptions | None = None) -> Decoded:
    """Decodes one frame of a file.

    Args:
        path: the file; its name does not matter.
        frame: index of the frame (DICOM), page (TIFF), slice (NIfTI) or B-scan (Heidelberg .vol) from 0.
        options: see :class:`DecodeOptions`.

    Returns:
        The frame as displayed.

    Raises:
        Undecodable: for whatever reason the file gives no pixels; no other error comes from its content.
    """
    options = options or DecodeOptions()
    with _opened(path) as (file, kind):
        decoded = _module(kind).decode(file, frame, options)
        known = decoded.kind == "hounsfield"  # its range is that of the pixels
        if not (np.isfinite(decoded.value_range).all() if known else is_finite(decoded.pixels)):
            raise Undecodable("NaN or infinite pixel values")
        return decoded


def probe(path: str | Path) -> Probe:
    """Reads the header of a file: format, frames, size, ids.  Pixels are not read.

    Raises:
        Undecodable: where the header already shows that there are no pixels to decode.
    """
    with _opened(path) as (file, kind):
        found = _module(kind).probe(file)
        if min(found.frames, found.height, found.width) < 1:
            raise Undecodable(f"no pixels ({found.frames} frames of {found.height} x {found.width})")
        return found


def is_finite(pixels: np.ndarray) -> bool:
    """Whether no value is NaN or infinite (both show in the extremes)."""
    return bool(pixels.size == 0 or (np.isfinite(pixels.min()) and np.isfinite(pixels.max())))


def check_frame(frame: int, frames: int) -> None:
    """Raises Undecodable where a file has no such frame."""
    if not 0 <= frame < frames:
        raise Undecodable(f"frame {frame} does not exist (the file has {frames})")


def check_size(height: int, width: int, limit: int) -> None:
    """Raises Undecodable for an empty frame or one above the limit of pixels."""
    if height < 1 or width < 1:
        raise Undecodable(f"no pixels ({height} x {width})")
    if height * width > limit:
        raise Undecodable(f"too many pixels ({height} x {width}, the limit is {limit} in all)")


def sniff(head: bytes) -> str | None:
    """The format by the first bytes (540 are enough), or None."""
    if head[128:132] == b"DICM":  # first: whole-slide files carry a TIFF header in the preamble
        return "dicom"
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    if head[:2] == b"\x1f\x8b" or _is_nifti(head):
        return "nifti"
    if _is_vol(head):
        return "heidelberg_vol"
    if b"<HEDX" in head:
        return "heyex_xml"
    return "dicom" if _starts_as_dataset(head) else None


def _is_nifti(head: bytes) -> bool:
    return head[344:348] in (b"n+1\0", b"ni1\0") or head[4:8] in (b"n+2\0", b"ni2\0")


def _is_vol(head: bytes) -> bool:
    """Heidelberg's version text, or that of files written by the library eyepy, with plausible sizes behind it."""
    if head.startswith(b"HSF-OCT"):
        return True
    sizes = [int.from_bytes(head[i : i + 4], "little") for i in (12, 16, 20)]
    return head.startswith(b"ep-v") and all(0 < n < 65536 for n in sizes)


def _starts_as_dataset(head: bytes) -> bool:
    """DICOM without its preamble: the first element is of group 0002 or 0008."""
    if len(head) < 8:
        return False
    little, big = int.from_bytes(head[:2], "little"), int.from_bytes(head[:2], "big")
    if not (little in (2, 8) or big in (2, 8)):
        return False
    order: Literal["little", "big"] = "little" if little in (2, 8) else "big"
    explicit = head[4:6].isalpha() and head[4:6].isupper()
    return explicit or int.from_bytes(head[4:8], order) < 1024


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[BinaryIO, str]]:
    """The opened file and its format; whatever goes wrong inside becomes Undecodable."""
    try:
        with open(path, "rb") as file:
            head = file.read(_NIFTI_HEADER)
            if not head:
                raise Undecodable("empty file")
            kind = sniff(head)
            if kind is None:
                raise Undecodable("not a known image format")
            if kind in _NOT_READ:
                raise Undecodable(_NOT_READ[kind])
            file.seek(0)
            if head[:2] == b"\x1f\x8b":
                with gzip.open(file) as unzipped:
                    if not _is_nifti(unzipped.read(_NIFTI_HEADER)):
                        raise Undecodable("a gzip file that is not NIfTI")
                    unzipped.seek(0)
                    yield unzipped, kind  # type: ignore[misc]
            else:
                yield file, kind
    except Undecodable as error:
        raise Undecodable(error.reason, where=str(path)) from error.__cause__
    except FileNotFoundError as error:
        raise Undecodable("file not found", where=str(path)) from error
    except IsADirectoryError as error:
        raise Undecodable("a folder, not a file", where=str(path)) from error
    except PermissionError as error:
        raise Undecodable("no permission to read the file", where=str(path)) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Undecodable("damaged gzip file", where=str(path)) from error
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # decoders raise anything on damaged bytes, some in Rust not even an Exception
        raise Undecodable(f"damaged file ({type(error).__name__})", where=str(path)) from error


def _module(kind: str) -> ModuleType:
    """The module that reads a format; imported when the first such file is met."""
    if kind == "dicom":
        from medfed.data import dicom

        return dicom
    if kind == "nifti":
        from medfed.data import nifti

        return nifti
    if kind == "heidelberg_vol":
        from medfed.data import vol

        return vol
    from medfed.data import image

    return image
