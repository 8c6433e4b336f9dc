"""PNG, JPEG, TIFF, BMP, GIF, WebP and JPEG 2000 to pixels, through Pillow.

Pillow's modes are treated one by one: no 16-bit picture is squeezed to 8 bits, palettes and alpha are resolved, EXIF
rotation is applied, and a truncated file is refused rather than filled up with grey.
"""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageOps

from medfed.data.decode import Decoded, DecodeOptions, Probe, Undecodable, check_frame, check_size, is_finite

_FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "GIF", "WEBP", "JPEG2000")
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
_PHOTOMETRIC, _BITS_PER_SAMPLE, _SAMPLE_FORMAT = 262, 258, 339  # TIFF tags
_MIN_IS_WHITE = 0


def probe(file: BinaryIO) -> Probe:
    """Format, number of frames and size as displayed."""
    image = _open(file)
    height, width = _size(image)
    return Probe(str(image.format).lower(), _frames(image), height, width)


def decode(file: BinaryIO, frame: int, options: DecodeOptions) -> Decoded:
    """Decodes one frame of an opened picture; see :func:`medfed.data.decode.decode`."""
    image = _open(file)
    check_frame(frame, _frames(image))
    if frame:
        image.seek(frame)
    check_size(image.height, image.width, options.max_pixels)
    corrections: list[str] = []
    orientation = _orientation(image)
    if _is_deep_colour(image):
        corrections.append("colour_16bit_reduced_to_8")  # Pillow has no mode for it
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
    except Exception as error:  # OSError for truncated files, but also SyntaxError, ValueError, struct.error ...
        raise Undecodable(f"truncated or damaged {image.format} file") from error
    if (orientation, _orientation(image)) != (1, 1):  # a TIFF loses it when loaded, a PNG may only then show it
        corrections.append("exif_rotated")
    pixels, value_range = _pixels(upright, image, corrections)
    return Decoded(pixels, "image", value_range, tuple(corrections))


def _open(file: BinaryIO) -> Image.Image:
    try:
        return Image.open(file, formats=_FORMATS)
    except Image.DecompressionBombError as error:
        raise Undecodable("too many pixels (Pillow's limit against decompression bombs)") from error
    except Exception as error:
        raise Undecodable("truncated or damaged picture header") from error


def _frames(image: Image.Image) -> int:
    if image.format == "MPO":  # a camera's JPEG with previews behind it
        return 1
    return int(getattr(image, "n_frames", 1))


def _orientation(image: Image.Image) -> int:
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # Pillow would decode the whole picture to look behind it
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    return orientation if orientation in range(1, 9) else 1


def _size(image: Image.Image) -> tuple[int, int]:
    """Height and width as displayed."""
    width, height = image.size
    turned = image.format != "TIFF" and _orientation(image) in _SIDEWAYS  # of a TIFF, Pillow gives it turned
    return (width, height) if turned else (height, width)


def _is_deep_colour(image: Image.Image) -> bool:
    """Whether colour (or grey with alpha) is stored with more than 8 bits a channel."""
    tags = getattr(image, "tag_v2", {})
    bits = tags.get(_BITS_PER_SAMPLE, (8,))
    if len(bits) > 1:
        return max(bits) > 8
    raw_modes = [str(tile[3]) for tile in getattr(image, "tile", ())]
    return image.format == "PNG" and image.mode[0] != "I" and any("16" in raw for raw in raw_modes)


def _pixels(image: Image.Image, source: Image.Image, corrections: list[str]) -> tuple[np.ndarray, tuple[float, float]]:
    """float32 ``[C, H, W]`` and the nominal range of an upright picture."""
    image = _without_alpha(image, corrections)
    if image.mode == "P":
        image = image.convert("RGB")
        corrections.append("palette_applied")
    elif image.mode in ("CMYK", "YCbCr", "HSV", "LAB", "RGBX"):
        corrections.append(f"{image.mode.lower()}_to_rgb")
        image = image.convert("RGB")
    array = np.asarray(image)
    if image.mode == "RGB":
        return np.moveaxis(array, -1, 0).astype(np.float32, order="C"), (0.0, 255.0)
    pixels = array.astype(np.float32)[None]
    if image.mode == "1":
        return pixels, (0.0, 1.0)
    if image.mode == "L":
        return pixels, (0.0, 255.0)
    tags = getattr(source, "tag_v2", {})
    if image.mode.startswith("I;16"):
        if tags.get(_PHOTOMETRIC) == _MIN_IS_WHITE:  # Pillow inverts it at 8 bits, but not at 16
            pixels = np.float32(65535) - pixels
            corrections.append("min_is_white_inverted")
        bits = tags.get(_BITS_PER_SAMPLE, (16,))[0]
        return pixels, (0.0, 2.0**bits - 1)
    if image.mode in ("I", "F"):
        return pixels, _open_range(pixels, image.mode, corrections)
    raise Undecodable(f"unsupported picture mode {image.mode}")


def _open_range(pixels: np.ndarray, mode: str, corrections: list[str]) -> tuple[float, float]:
    """The range of a format that has no nominal one: 0..65535 or 0..1 where the values fit, else their own."""
    if not is_finite(pixels):
        raise Undecodable("NaN or infinite pixel values")
    low, high = float(pixels.min()), float(pixels.max())
    top = 65535.0 if mode == "I" else 1.0
    if low >= 0 and high <= top:
        return 0.0, top
    corrections.append("no_nominal_range")
    return low, high if high > low else low + 1.0


def _without_alpha(image: Image.Image, corrections: list[str]) -> Image.Image:
    """Drops alpha that is opaque everywhere; otherwise lays the picture on black."""
    if image.mode in ("P", "L", "RGB", "1", "I;16") and "transparency" in image.info:
        if image.mode == "I;16":
            return image  # a transparent grey level cannot be told from the data
        image = image.convert("RGBA" if image.mode in ("P", "RGB") else "LA")
    if image.mode in ("RGBa", "La"):
        image = image.convert({"RGBa": "RGBA", "La": "LA"}[image.mode])
    if image.mode == "PA":
        image = image.convert("RGBA")
    if image.mode not in ("RGBA", "LA"):
        return image
    opaque = "RGB" if image.mode == "RGBA" else "L"
    alpha = image.getchannel("A")
    if alpha.getextrema()[0] == 255:
        corrections.append("opaque_alpha_dropped")
        return image.convert(opaque)
    corrections.append("alpha_laid_on_black")
    black = Image.new(opaque, image.size)
    black.paste(image.convert(opaque), mask=alpha)
    return black
