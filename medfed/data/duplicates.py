"""Images that occur more than once: the same bytes, or nearly the same picture.

Metadata misses many duplicates of the public sets (Cassidy et al. 2022; Abhishek et al., Sci Data 2024), so the
content decides: SHA-256 for equal files; for pictures a difference hash, confirmed on a thumbnail.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np
from PIL import Image

THUMBNAIL = 16
MAX_BITS = 3
MIN_CORRELATION = 0.995
_PEEK = 4096


def exact_duplicates(paths: Sequence[str]) -> dict[str, int]:
    """Groups files of equal content.

    Only files of equal size and equal bytes in the middle are read whole, so that a large collection without
    duplicates is hardly read at all.

    Args:
        paths: files; the same path may be given more than once.

    Returns:
        Group number of each path that has a twin; files that cannot be read have none.
    """
    groups: list[list[str]] = [list(dict.fromkeys(paths))]
    for key in (os.path.getsize, _peek, _digest):
        groups = [part for group in groups for part in _partition(group, key)]
    return {path: number for number, group in enumerate(groups) for path in group}


def _partition(paths: Iterable[str], key: Callable[[str], Hashable]) -> list[list[str]]:
    parts: dict[Hashable, list[str]] = defaultdict(list)
    for path in paths:
        try:
            parts[key(path)].append(path)
        except OSError:
            continue
    return [part for part in parts.values() if len(part) > 1]


def _peek(path: str) -> bytes:
    with open(path, "rb") as file:
        file.seek(os.path.getsize(path) // 2)
        return file.read(_PEEK)


def _digest(path: str) -> bytes:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()


def difference_hash(grey: np.ndarray) -> int:
    """The 64-bit difference hash (dHash) of a picture.

    Args:
        grey: float32 ``[H, W]``.

    Returns:
        One bit for each pixel of an 8 x 8 picture: whether its right neighbour is brighter (from 8 x 9 means).
    """
    small = _shrink(grey, 9, 8)
    bits = np.packbits(small[:, 1:] > small[:, :-1])
    return int.from_bytes(bits.tobytes(), "big")


def thumbnail(grey: np.ndarray) -> np.ndarray:
    """A 16 x 16 picture as a vector of zero mean and unit length, float32 ``[256]`` (zero if it is constant)."""
    small = _shrink(grey, THUMBNAIL, THUMBNAIL).ravel()
    small = small - small.mean()
    return (small / max(float(np.linalg.norm(small)), 1e-6)).astype(np.float32)


def _shrink(grey: np.ndarray, width: int, height: int) -> np.ndarray:
    return np.asarray(Image.fromarray(grey.astype(np.float32)).resize((width, height), Image.Resampling.BOX))


def near_duplicates(hashes: np.ndarray, thumbnails: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of pictures that are nearly the same.

    The hashes differ in at most 3 of 64 bits and the thumbnails correlate at 0.995 or more.  Two hashes with at most
    3 different bits agree in one of four 16-bit parts; only such pairs are compared.

    Args:
        hashes: uint64 ``[N]`` of :func:`difference_hash`.
        thumbnails: float32 ``[N, 256]`` of :func:`thumbnail`.

    Returns:
        Pairs of positions, the smaller first, sorted.
    """
    pairs: set[tuple[int, int]] = set()
    for shift in (0, 16, 32, 48):
        part = (hashes >> np.uint64(shift)) & np.uint64(0xFFFF)
        order = np.argsort(part, kind="stable")
        starts = np.flatnonzero(np.diff(part[order], prepend=-1.0))
        for rows in np.split(order, starts[1:]):
            if len(rows) > 1:
                pairs.update(_similar(rows, hashes, thumbnails))
    return sorted(pairs)


def _similar(rows: np.ndarray, hashes: np.ndarray, thumbnails: np.ndarray) -> list[tuple[int, int]]:
    found = []
    for start in range(0, len(rows), 512):
        some = rows[start : start + 512]
        near = thumbnails[some] @ thumbnails[rows].T >= MIN_CORRELATION
        for a, b in np.argwhere(near):
            i, j = int(some[a]), int(rows[b])
            if i < j and (int(hashes[i]) ^ int(hashes[j])).bit_count() <= MAX_BITS:
                found.append((i, j))
    return found
