"""Which files a call wants, and which of them the store has seen before."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from medfed.data.cohort import Cohort
from medfed.data.store_build import Job
from medfed.data.store_index import Index, Key
from medfed.errors import DataError, nearest

BATCH = 512


@dataclass
class Wanted:
    """The samples of one call, and what is known of their files.

    Args:
        samples: ids, in the order of the cohort.
        paths: the file of each.
        frames: the frame of each within its file.
        digests: content digest by path.
        unreadable: why a file cannot be read, by path.
        stale: size and time of change of the files that are new or changed, by path.
    """

    samples: list[str]
    paths: list[str]
    frames: list[int]
    digests: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    stale: dict[str, tuple[int, int]] = field(default_factory=dict)

    def identify(self, index: Index) -> None:
        """Looks unchanged files up, and notes which ones are new, changed or not there.  Reads no content."""
        files = index.files()
        for path in dict.fromkeys(self.paths):
            try:
                stat = os.stat(path)
            except OSError as error:
                self.unreadable[path] = error.strerror or type(error).__name__
                continue
            size, mtime_ns, digest = files.get(path, (-1, -1, ""))
            if (size, mtime_ns) == (stat.st_size, stat.st_mtime_ns):
                self.digests[path] = digest
            else:
                self.stale[path] = (stat.st_size, stat.st_mtime_ns)

    def digest(self, index: Index, workers: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Reads the files that are new or changed, and remembers their digests.

        Args:
            index: where they are remembered, batch by batch: a call that is broken off need not begin anew.
            workers: files read at the same time.
            progress: called with (files read, files to read).
        """
        paths = list(self.stale)
        with ThreadPoolExecutor(workers) as pool:
            for start in range(0, len(paths), BATCH):
                batch = paths[start : start + BATCH]
                seen = []
                for path, (digest, reason) in zip(batch, pool.map(_try_digest, batch)):
                    if reason:
                        self.unreadable[path] = reason
                    else:
                        self.digests[path] = digest
                        seen.append((path, *self.stale[path], digest))
                index.remember_files(seen)
                if progress:
                    progress(start + len(batch), len(paths))

    def keyed(self) -> Iterator[tuple[str, str, Key]]:
        """Sample, path and key of each sample whose file could be read."""
        for sample, path, frame in zip(self.samples, self.paths, self.frames):
            if path in self.digests:
                yield sample, path, (self.digests[path], frame)

    def jobs(self, known: set[Key]) -> dict[Key, Job]:
        """One job for each key that is not known yet; equal files have one key."""
        jobs: dict[Key, Job] = {}
        for sample, path, key in self.keyed():
            if key not in known:
                jobs.setdefault(key, Job(path, key[1], sample, key[0]))
        return jobs


def select(cohort: Cohort, samples: Iterable[str] | None) -> Wanted:
    """Some samples of a cohort (all where None).

    Raises:
        DataError: ids that the cohort does not have.
    """
    table = cohort.table
    if samples is not None:
        chosen = set(samples)
        unknown = sorted(chosen.difference(table["sample"]))
        if unknown:
            raise DataError(
                f"{len(unknown)} samples are not in the cohort, first {unknown[0]!r}.",
                where=cohort.name,
                fix=nearest(unknown[0], table["sample"]) if len(table) < 100 else None,
            )
        table = table[table["sample"].isin(chosen)]
    return Wanted(table["sample"].tolist(), [str(p) for p in table["path"]], [int(f) for f in table["frame"]])


def _try_digest(path: str) -> tuple[str, str]:
    """The digest, or the reason why there is none."""
    try:
        return file_digest(path), ""
    except OSError as error:
        return "", error.strerror or type(error).__name__


def file_digest(path: str) -> str:
    """sha256 of a file's bytes, as hexadecimal text."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
