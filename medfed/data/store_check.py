"""Whether an image store is what it should be: its description, the checksums of its records, its size on disk."""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medfed.data.store_build import Pipeline
from medfed.data.store_index import Index
from medfed.errors import DataError

_CHUNK = 64  # records checked by one task of the pool


@dataclass(frozen=True)
class StoreSize:
    """Size of one store on disk."""

    key: str
    images: int
    nbytes: int
    path: Path


def describe(cache: Path | str) -> list[StoreSize]:
    """The stores in a cache with their sizes, largest first."""
    found = []
    for meta in (Path(cache) / "store").glob("*/meta.json"):
        index = Index(meta.with_name("index.sqlite"))
        try:
            key, images = json.loads(meta.read_text(encoding="utf-8"))["key"], index.count()
        except (OSError, ValueError, KeyError, sqlite3.Error):
            key, images = meta.parent.name, 0
        nbytes = sum(f.stat().st_size for f in meta.parent.iterdir() if f.is_file())
        found.append(StoreSize(key, images, nbytes, meta.parent))
    return sorted(found, key=lambda s: (-s.nbytes, s.key))


def check_meta(folder: Path, pipeline: Pipeline, read_only: bool = False) -> None:
    """Compares a store with its pipeline; a new store gets its description.

    Raises:
        DataError: it holds records of another shape, or is read-only and has no description.
    """
    file = folder / "meta.json"
    meta = {"key": pipeline.key, "shape": list(pipeline.shape), "dtype": pipeline.dtype}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if read_only:
            raise incomplete(folder, "it has no description") from error
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(meta), encoding="utf-8")
        os.replace(temporary, file)
        return
    if not isinstance(found, dict):
        found = {}
    if found != meta:
        raise DataError(
            f"The image store holds {found.get('dtype')} records of shape {found.get('shape')}, but the pipeline "
            f"of the same key makes {meta['dtype']} of {meta['shape']}.",
            where=str(folder),
            fix="Delete the folder; it is made again.",
        )


def check_read_only(folder: Path, pipeline: Pipeline, index: Index) -> None:
    """Checks that a store that cannot be written is complete in itself.

    Raises:
        DataError: it has no index, or lacks records that the index names.
    """
    check_meta(folder, pipeline, read_only=True)
    if not index.path.is_file():
        raise incomplete(folder, "it has no index")
    try:
        count = index.count()
        index.checksums("")
    except sqlite3.Error as error:
        raise incomplete(folder, f"its index cannot be read ({error})") from error
    images = folder / "images.bin"
    if (images.stat().st_size if images.exists() else 0) < count * pipeline.nbytes:
        raise incomplete(folder, "records are missing")


def incomplete(folder: Path, why: str) -> DataError:
    """The error about a store that cannot be written and cannot be used as it is."""
    return DataError(
        f"The image store is read-only, but {why}.",
        where=str(folder),
        fix="Make the folder writable, or set another cache.",
    )


def checksum(record: bytes | np.ndarray) -> int:
    """CRC-32 of a record's bytes: finds every flipped bit, at more than 1 GB/s."""
    return zlib.crc32(record if isinstance(record, bytes) else record.data)


def damaged(images: np.ndarray, expected: Mapping[int, int], threads: int) -> list[int]:
    """The rows whose bytes are not those that were written.

    Args:
        images: records ``[N, ...]``, mapped.
        expected: checksum by row.
        threads: records read at the same time.
    """
    rows = sorted(expected)

    def check(some: Sequence[int]) -> list[int]:
        return [row for row in some if row >= len(images) or checksum(images[row]) != expected[row]]

    chunks = [rows[i : i + _CHUNK] for i in range(0, len(rows), _CHUNK)]
    with ThreadPoolExecutor(threads) as pool:
        return [row for bad in pool.map(check, chunks) for row in bad]
