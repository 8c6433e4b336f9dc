"""Pictures written by Pillow, or byte by byte, and read back."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medfed.data.decode import DecodeOptions, Undecodable, decode, probe

GREY = np.arange(15, dtype=np.uint8).reshape(3, 5) * 17
COLOUR = np.stack([GREY, 255 - GREY, GREY // 2], axis=-1)


def save(path: Path, array: np.ndarray, mode: str | None = None, **options) -> Path:
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(path, **options)
    return path


@pytest.mark.parametrize("extension", ["png", "bmp", "gif", "tif", "webp"])
def test_rows_are_rows(tmp_path, extension):
    path = save(
        tmp_path / f"a.{extension}",
        COLOUR if extension == "webp" else GREY,
        **({"lossless": True} if extension == "webp" else {}),
    )
    decoded = decode(path)
    assert decoded.pixels.dtype == np.float32
    assert decoded.value_range == (0, 255)
    truth = np.moveaxis(COLOUR, -1, 0) if extension == "webp" else GREY[None]
    np.testing.assert_array_equal(decoded.pixels[: len(truth)], truth)
    found = probe(path)
    assert (found.frames, found.height, found.width) == (1, 3, 5)
    assert found.kind == {"tif": "tiff"}.get(extension, extension)


def test_colour(tmp_path):
    decoded = decode(save(tmp_path / "a.png", COLOUR))
    np.testing.assert_array_equal(decoded.pixels, np.moveaxis(COLOUR, -1, 0))
    assert decoded.corrections == ()


def test_content_decides_not_the_name(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(np.full((8, 9), 100, np.uint8)).save(path, "JPEG")
    assert probe(path).kind == "jpeg"
    np.testing.assert_allclose(decode(path).pixels, 100, atol=1)
    path.rename(tmp_path / "IM0001")
    assert decode(tmp_path / "IM0001").pixels.shape == (1, 8, 9)


@pytest.mark.parametrize("extension", ["png", "tif"])
def test_16_bits_stay_16_bits(tmp_path, extension):
    deep = (np.arange(15, dtype=np.uint16).reshape(3, 5) * 4000).astype(np.uint16)
    decoded = decode(save(tmp_path / f"a.{extension}", deep))
    np.testing.assert_array_equal(decoded.pixels[0], deep)
    assert decoded.value_range == (0, 65535)


@pytest.mark.parametrize("order", ["<", ">"])
def test_16_bit_tiff_where_white_is_0(tmp_path, order):
    """A TIFF written byte by byte, PhotometricInterpretation 0."""
    deep = np.array([[0, 1000, 65535], [7, 8, 9]], dtype=np.uint16)
    entries = [(256, 3), (257, 2), (258, 16), (259, 1), (262, 0), (273, 122), (277, 1), (278, 2), (279, 12)]
    raw = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "LH", 8, len(entries))
    for tag, value in entries:
        raw += struct.pack(order + "HHL", tag, 4, 1) + struct.pack(order + "L", value)
    raw += struct.pack(order + "L", 0)
    assert len(raw) == 122
    (tmp_path / "a.tif").write_bytes(raw + deep.astype(order + "u2").tobytes())
    if order == ">":  # Pillow has no mode for this one: refused, not wrong
        with pytest.raises(Undecodable):
            decode(tmp_path / "a.tif")
        return
    decoded = decode(tmp_path / "a.tif")
    np.testing.assert_array_equal(decoded.pixels[0], 65535.0 - deep)
    assert "min_is_white_inverted" in decoded.corrections


def test_float_tiff(tmp_path):
    unit = np.linspace(0, 1, 15, dtype=np.float32).reshape(3, 5)
    decoded = decode(save(tmp_path / "a.tif", unit))
    np.testing.assert_array_equal(decoded.pixels[0], unit)
    assert (decoded.value_range, decoded.corrections) == ((0, 1), ())
    decoded = decode(save(tmp_path / "b.tif", unit * 8 - 4))
    assert (decoded.value_range, decoded.corrections) == ((-4, 4), ("no_nominal_range",))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused(tmp_path, bad):
    unit = np.zeros((3, 5), dtype=np.float32)
    unit[1, 2] = bad
    with pytest.raises(Undecodable) as refused:
        decode(save(tmp_path / "a.tif", unit))
    assert refused.value.reason == "NaN or infinite pixel values"


def test_one_bit(tmp_path):
    bits = GREY > 100
    decoded = decode(save(tmp_path / "a.png", bits))
    np.testing.assert_array_equal(decoded.pixels[0], bits)
    assert decoded.value_range == (0, 1)


def test_palette(tmp_path):
    image = Image.fromarray(np.array([[0, 1, 2]], dtype=np.uint8), "P")
    image.putpalette([255, 0, 0, 0, 255, 0, 10, 20, 30])
    image.save(tmp_path / "a.png")
    decoded = decode(tmp_path / "a.png")
    np.testing.assert_array_equal(decoded.pixels[:, 0].T, [[255, 0, 0], [0, 255, 0], [10, 20, 30]])
    assert "palette_applied" in decoded.corrections


def test_transparent_palette_lies_on_black(tmp_path):
    image = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), "P")
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.save(tmp_path / "a.png", transparency=0)
    decoded = decode(tmp_path / "a.png")
    np.testing.assert_array_equal(decoded.pixels[:, 0].T, [[0, 0, 0], [0, 255, 0]])
    assert "alpha_laid_on_black" in decoded.corrections


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha(tmp_path, mode):
    image = Image.fromarray(COLOUR).convert(mode)
    image.save(tmp_path / "opaque.png")
    opaque = decode(tmp_path / "opaque.png")
    assert opaque.corrections == ("opaque_alpha_dropped",)
    assert len(opaque.pixels) == (3 if mode == "RGBA" else 1)
    alpha = np.full((3, 5), 255, dtype=np.uint8)
    alpha[0, 0], alpha[2, 4] = 0, 51  # 51 / 255 is a fifth
    image.putalpha(Image.fromarray(alpha))
    image.save(tmp_path / "clear.png")
    laid = decode(tmp_path / "clear.png")
    assert laid.corrections == ("alpha_laid_on_black",)
    assert (laid.pixels[:, 0, 0] == 0).all()
    np.testing.assert_allclose(laid.pixels[:, 2, 4], opaque.pixels[:, 2, 4] / 5, atol=1)
    np.testing.assert_array_equal(laid.pixels[:, 1], opaque.pixels[:, 1])


def test_cmyk(tmp_path):
    """Full cyan without black is (0, 255, 255)."""
    ink = np.zeros((8, 8, 4), dtype=np.uint8)
    ink[..., 0] = 255
    Image.fromarray(ink, "CMYK").save(tmp_path / "a.tif")
    decoded = decode(tmp_path / "a.tif")
    np.testing.assert_array_equal(decoded.pixels[:, 0, 0], [0, 255, 255])
    assert "cmyk_to_rgb" in decoded.corrections


# What the stored array must be turned by for each EXIF orientation (CIPA DC-008, tag 274).
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.T,
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].T,
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("extension", ["png", "tif"])
def test_exif_rotation(tmp_path, orientation, extension):
    exif = Image.Exif()
    exif[274] = orientation
    path = tmp_path / f"a.{extension}"
    Image.fromarray(GREY).save(path, exif=exif)
    decoded, truth = decode(path), UPRIGHT[orientation](GREY)
    np.testing.assert_array_equal(decoded.pixels[0], truth)
    assert ("exif_rotated" in decoded.corrections) is (orientation != 1)
    assert (probe(path).height, probe(path).width) == truth.shape


def test_pages_are_frames(tmp_path):
    pages = [Image.fromarray(GREY), Image.fromarray(GREY.T.copy())]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:])
    assert probe(tmp_path / "a.tif").frames == 2
    np.testing.assert_array_equal(decode(tmp_path / "a.tif", 1).pixels[0], GREY.T)
    for frame in (2, -1):
        with pytest.raises(Undecodable, match="does not exist"):
            decode(tmp_path / "a.tif", frame)


def test_16_bit_colour_is_reduced_and_counted(tmp_path):
    deep = np.array([[[256 * 200, 0, 65535], [257, 512, 1024]]], dtype=">u2")

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">L", len(body)) + name + body + struct.pack(">L", zlib.crc32(name + body))

    header = struct.pack(">LLBBBBB", 2, 1, 16, 2, 0, 0, 0)
    body = zlib.compress(b"\0" + deep.tobytes())
    raw = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(raw)
    decoded = decode(tmp_path / "a.png")
    np.testing.assert_array_equal(decoded.pixels[:, 0].T, [[200, 0, 255], [1, 2, 4]])
    assert "colour_16bit_reduced_to_8" in decoded.corrections


def test_limit_of_pixels(tmp_path):
    path = save(tmp_path / "a.png", GREY)
    assert decode(path, options=DecodeOptions(max_pixels=15)).pixels.size == 15
    with pytest.raises(Undecodable) as refused:
        decode(path, options=DecodeOptions(max_pixels=14))
    assert refused.value.reason == "too many pixels (3 x 5, the limit is 14 in all)"


def test_a_bomb_is_refused_by_its_header(tmp_path):
    raw = bytearray(save(tmp_path / "a.png", GREY).read_bytes())
    raw[16:24] = struct.pack(">LL", 60000, 60000)
    raw[29:33] = struct.pack(">L", zlib.crc32(bytes(raw[12:29])))
    (tmp_path / "bomb.png").write_bytes(raw)
    for read in (decode, probe):
        with pytest.raises(Undecodable, match="too many pixels"):
            read(tmp_path / "bomb.png")


def test_real_oct_and_skin_agree_with_pillow(shared):
    folder = shared / "data"
    for path in [*sorted((folder / "oct").rglob("*.jpeg"))[::300], *sorted((folder / "derm/images").glob("*"))[::900]]:
        truth = np.asarray(Image.open(path), dtype=np.float32)
        truth = truth[None] if truth.ndim == 2 else np.moveaxis(truth, -1, 0)
        np.testing.assert_array_equal(decode(path).pixels, truth)
