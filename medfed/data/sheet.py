"""A picture sheet: a few samples of each class as the network will see them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from medfed.data.cohort import Cohort
from medfed.data.decode import Undecodable, decode
from medfed.seeding import numpy_generator

Pipeline = Callable[[Path, int], np.ndarray]

_GAP, _CAPTION, _LINE = 4, 110, 14


def plain_pipeline(path: Path, frame: int) -> np.ndarray:
    """What a file shows without a bundle: the brain window (0..80 HU) or the nominal range, float32 in 0..1."""
    decoded = decode(path, frame)
    low, high = (0.0, 80.0) if decoded.kind == "hounsfield" else decoded.value_range
    return np.clip((decoded.pixels - low) / max(high - low, 1e-6), 0, 1).astype(np.float32)


def picture_sheet(
    cohort: Cohort,
    rows: np.ndarray,
    pipeline: Pipeline,
    corrupted: Pipeline | None = None,
    *,
    windows: Collection[int] = (),
    columns: int = 6,
    height: int = 128,
) -> tuple[Image.Image, list[str]]:
    """Draws the sheet.

    Args:
        cohort: the samples.
        rows: those that may be drawn (that are known to be usable).
        pipeline: file and frame to float32 ``[C, h, w]`` in 0..1.
        corrupted: the same with corruption, drawn under the clean samples.
        windows: rows of CT slices, whose channels are windows: drawn side by side, not as red, green and blue.
        columns: samples a class, of different patients as far as there are any.
        height: height of a tile in pixels.

    Returns:
        The sheet, and what went wrong in the pipelines (one line a kind of fault).
    """
    stages = [("", pipeline)] + ([("corrupted", corrupted)] if corrupted else [])
    faults: dict[str, int] = {}
    lines: list[tuple[str, list[Image.Image]]] = []
    for k, name in enumerate(cohort.task.classes):
        member = cohort.labels[:, k] > 0 if cohort.labels.ndim == 2 else cohort.labels == k
        chosen = _pick(cohort, rows[member[rows]], columns)
        for stage, run in stages:
            tiles = []
            for row in chosen:
                path, frame = Path(cohort.table["path"].iloc[row]), int(cohort.table["frame"].iloc[row])
                tile, fault = _tile(run, path, frame, int(row) in windows, height)
                tiles.append(tile)
                if fault:
                    faults[fault] = faults.get(fault, 0) + 1
            caption = stage or f"{name}\n{int(member.sum())} samples"
            lines.append((caption, tiles))
    return _compose(lines, height), [f"{fault} ({n}x)" for fault, n in faults.items()]


def _pick(cohort: Cohort, rows: np.ndarray, count: int) -> np.ndarray:
    """Some rows, drawn at random: first one a patient, then further ones."""
    rows = numpy_generator(0, "picture sheet").permutation(rows)
    again = cohort.table["patient"].iloc[rows].duplicated().to_numpy()
    return np.concatenate([rows[~again], rows[again]])[:count].astype(int)


def _tile(run: Pipeline, path: Path, frame: int, windows: bool, height: int) -> tuple[Image.Image, str]:
    try:
        pixels = np.asarray(run(path, frame), dtype=np.float32)
    except Undecodable as error:
        return _blank(height), f"a sample cannot be decoded: {error.reason}"
    except Exception as error:  # a bundle's pipeline may raise anything; the sheet shows the rest
        return _blank(height), f"the pipeline fails with {type(error).__name__}"
    if pixels.ndim != 3 or not pixels.size:
        return _blank(height), f"the pipeline gives an array of shape {pixels.shape}, not [C, h, w]"
    fault = ""
    if not np.isfinite(pixels).all():
        fault = "the pipeline gives NaN or infinite values"
    elif pixels.min() < -1e-3 or pixels.max() > 1 + 1e-3:
        fault = "the pipeline gives values outside 0..1"
    grey = np.rint(np.clip(np.nan_to_num(pixels), 0, 1) * 255).astype(np.uint8)
    if len(grey) == 3 and not windows:
        image = Image.fromarray(np.moveaxis(grey, 0, -1))
    else:
        image = Image.fromarray(np.concatenate(list(grey), axis=1)).convert("RGB")
    return image.resize((max(round(image.width * height / image.height), 1), height)), fault


def _blank(height: int) -> Image.Image:
    tile = Image.new("RGB", (height, height), (90, 0, 0))
    ImageDraw.Draw(tile).text((6, 6), "not usable", fill="white")
    return tile


def _compose(lines: Sequence[tuple[str, Sequence[Image.Image]]], height: int) -> Image.Image:
    width = max((sum(t.width + _GAP for t in tiles) for _, tiles in lines), default=0)
    sheet = Image.new("RGB", (_CAPTION + max(width, height) + _GAP, len(lines) * (height + _GAP) + _GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for k, (caption, tiles) in enumerate(lines):
        top, left = _GAP + k * (height + _GAP), _CAPTION
        for n, text in enumerate(caption.split("\n")):
            draw.text((_GAP, top + height // 2 - _LINE + n * _LINE), text, fill="black", font=font)
        for tile in tiles:
            sheet.paste(tile, (left, top))
            left += tile.width + _GAP
    return sheet
