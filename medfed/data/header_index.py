"""Headers of many files, read once: an index kept as parquet and keyed by path, size and time of change.

RSNA's patients stand only in the headers of 750 000 files; reading them takes minutes, reading the index seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import psutil

from medfed.data.decode import Undecodable, probe

HEADER = ("patient_id", "study_uid", "series_uid", "sop_uid", "modality", "photometric")
COLUMNS = ("path", "size", "mtime", "kind", "frames", "height", "width", *HEADER, "reason")
_BATCH = 512
_SAVE_EVERY_SECONDS = 60.0

Progress = Callable[[int, int], None]


def user_cache() -> Path:
    """The folder that ``MEDFED_CACHE`` names, else the user's cache folder of medfed on this platform."""
    if given := os.environ.get("MEDFED_CACHE"):
        return Path(given)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "medfed"


def index_headers(
    paths: Sequence[Path | str],
    *,
    cache: Path | None = None,
    name: str = "",
    threads: int = 8,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Reads the headers of files, those known from an earlier call from the index.

    The index is saved every minute, so that a scan that is broken off goes on where it was.  It holds patient ids:
    it lies in the user's own cache, readable by the user alone, and never leaves the machine.

    Args:
        paths: the files.
        cache: folder of the index; default the user's cache folder.  An index that cannot be written or read is
            done without (every header is read again).
        name: what the index is about, usually the data folder; one index a name.
        threads: files read at the same time.
        progress: called with (files done, files to read).

    Returns:
        One row a file, in the given order, with :data:`COLUMNS`; ``reason`` is empty, or says why the file cannot
        be used (the other columns are then empty or 0).
    """
    names = [str(p) for p in paths]
    store = (cache or user_cache()) / f"headers-{hashlib.sha256(name.encode()).hexdigest()[:16]}.parquet"
    known = _load(store)
    stamps = dict(zip(names, map(_stamp, names)))
    stale = [p for p, stamp in stamps.items() if known.get(p, (None, None, None))[1:3] != stamp]
    saved, done = time.monotonic(), 0
    for batch in _read_batches(stale, stamps, threads):
        known.update((str(row[0]), row) for row in batch)
        done += len(batch)
        if progress:
            progress(done, len(stale))
        if time.monotonic() - saved > _SAVE_EVERY_SECONDS:
            _save(store, known)
            saved = time.monotonic()
    if stale:
        _save(store, known)
    return pd.DataFrame([known[p] for p in names], columns=list(COLUMNS))


def _stamp(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (-1, -1)
    return status.st_size, status.st_mtime_ns


def _read_batches(
    paths: list[str], stamps: dict[str, tuple[int, int]], threads: int
) -> Iterator[list[tuple[object, ...]]]:
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(paths), _BATCH):
            yield list(pool.map(lambda p: _read(p, stamps[p]), paths[start : start + _BATCH]))


def _read(path: str, stamp: tuple[int, int]) -> tuple[object, ...]:
    try:
        found = probe(Path(path))
    except Undecodable as error:
        return (path, *stamp, "", 0, 0, 0, *("" for _ in HEADER), error.reason)
    header = tuple(str(found.header.get(key) or "") for key in HEADER)
    return (path, *stamp, found.kind, found.frames, found.height, found.width, *header, "")


def _load(store: Path) -> dict[str, tuple[object, ...]]:
    try:
        table = pd.read_parquet(store)
    except (OSError, ValueError):
        return {}
    if tuple(table.columns) != COLUMNS:
        return {}
    return {str(row[0]): row for row in table.itertuples(index=False, name=None)}


def _save(store: Path, known: dict[str, tuple[object, ...]]) -> None:
    draft = store.with_suffix(f".{os.getpid()}.draft")
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        _remove_drafts(store.parent)
        with open(draft, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            pd.DataFrame(list(known.values()), columns=list(COLUMNS)).to_parquet(file, index=False)
        draft.replace(store)
    except OSError:
        pass
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _remove_drafts(cache: Path) -> None:
    """Removes what killed processes left: it holds patient ids, and nobody reads it."""
    for draft in cache.glob("headers-*.draft"):
        number = draft.suffixes[-2][1:]
        if number.isdecimal() and (int(number) == os.getpid() or not psutil.pid_exists(int(number))):
            draft.unlink(missing_ok=True)
