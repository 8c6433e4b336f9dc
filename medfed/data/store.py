"""The image store: what ``prepare`` gives, made once and mapped into memory.

A store is a folder ``<cache>/store/<pipeline key>`` with ``images.bin`` (records of one size, appended only)
and ``index.sqlite``.  A record belongs to a content digest, a frame and a variant: empty for the clean image,
otherwise the key of a corruption.  Files that did not change are never read again, equal files share a
record, and records are committed to the index after they are safely on disk, so that a killed build loses its
last few images at most.  Each record that is used is compared with its checksum once: a flipped bit means that the
image is made again.  A store that holds all that is wanted may be read-only.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Literal

import numpy as np
from filelock import FileLock, Timeout

from medfed.data.cohort import Cohort, Unusable
from medfed.data.corruption import Corruption
from medfed.data.store_build import Job, Pipeline, Work, auto_workers, make_all
from medfed.data.store_check import StoreSize, check_meta, check_read_only, checksum, damaged, describe, incomplete
from medfed.data.store_files import Wanted, file_digest, select
from medfed.data.store_index import Index, Key
from medfed.errors import DataError

__all__ = ["Built", "ImageStore", "Pipeline", "StoreSize", "describe", "file_digest"]

COMMIT_IMAGES, COMMIT_SECONDS = 128, 2.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Built:
    """What :meth:`ImageStore.ensure` found or made.

    Args:
        rows: row of each usable sample, in the order of the cohort.
        digests: content digest of each readable sample.
        failures: samples left out, with the reason.
        corrections: how many usable samples carry each correction of the decoder.
        decoded: files decoded now.
        derived: corrupted records computed now from clean ones.
        reused: usable samples whose record was there before.
        notes: what was repaired.
    """

    rows: dict[str, int]
    digests: dict[str, str]
    failures: list[Unusable]
    corrections: dict[str, int]
    decoded: int = 0
    derived: int = 0
    reused: int = 0
    notes: tuple[str, ...] = ()

    def rows_of(self, samples: Iterable[str]) -> np.ndarray:
        """Rows of some usable samples, int64 ``[N]``."""
        return np.array([self.rows[s] for s in samples], dtype=np.int64)


@dataclass
class _Done:
    """What was done in one call."""

    made: set[Key] = field(default_factory=set)
    passing: dict[Key, str] = field(default_factory=dict)  # failures that are not remembered
    decoded: int = 0
    derived: int = 0
    steps: int = 0


class ImageStore:
    """The records of one pipeline; see the module.  Make one with :meth:`open`.

    Args:
        folder: the store's folder.
        pipeline: how a file becomes a record.
    """

    def __init__(self, folder: Path, pipeline: Pipeline):
        self.folder, self.pipeline = folder, pipeline
        self.notes: list[str] = []
        self._bin = folder / "images.bin"
        self.read_only = folder.is_dir() and not os.access(folder, os.W_OK)
        self._index = Index(folder / "index.sqlite", self.read_only)
        self._sound: set[int] = set()  # rows whose checksum was compared
        self._lock = FileLock(folder / "lock")
        self._opening = FileLock(folder / "opening.lock")
        self._images: np.ndarray | None = None

    @classmethod
    def open(cls, cache: Path | str, pipeline: Pipeline) -> ImageStore:
        """Opens the store of a pipeline, and creates or repairs it where needed.

        Raises:
            DataError: the folder cannot be made, is read-only and not complete in itself, or holds records of another
                shape under the same key.
        """
        folder = Path(cache) / "store" / _folder_name(pipeline.key)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"The image store cannot be created: {error.strerror}.", where=str(folder), fix="Set another cache."
            ) from error
        store = cls(folder, pipeline)
        if store.read_only:
            check_read_only(folder, pipeline, store._index)
            return store
        # One opens at a time. So whoever else holds the lock is building, and has repaired the store: no need to wait.
        with store._locked(store._opening):
            try:
                with store._locked(store._lock, timeout=0):
                    check_meta(folder, pipeline)
                    store._repair()
            except Timeout:
                check_meta(folder, pipeline)
        return store

    @property
    def images(self) -> np.ndarray:
        """All records, ``[N, C, h, w]``, read-only and mapped into memory."""
        if self._images is None:
            count = self._index.count()
            shape = (count, *self.pipeline.shape)
            if count:
                self._images = np.memmap(self._bin, dtype=self.pipeline.dtype, mode="r", shape=shape)
            else:
                self._images = np.zeros(shape, dtype=self.pipeline.dtype)
        return self._images

    def ensure(
        self,
        cohort: Cohort,
        *,
        corruption: Corruption | None = None,
        samples: Iterable[str] | None = None,
        workers: int | Literal["auto"] = "auto",
        progress: Progress | None = None,
        reading: Progress | None = None,
    ) -> Built:
        """Makes the records that are missing.

        A corruption in the image domain is computed from the clean record (made first where missing) and
        needs no decoding; one in Hounsfield units decodes again.  What a corruption does to an image depends
        on its content and the corruption alone.

        Args:
            cohort: the samples; only the table is read.
            corruption: None for clean images.
            samples: ids of those wanted; all by default.
            workers: processes that decode; ``auto`` takes the processors there are.
            progress: called with (done, total) while records are made.
            reading: called with (done, total) while files that are new or changed are read to know their content.

        Returns:
            Rows and findings.  A file that cannot be used is a failure with its reason, which is remembered
            until the file changes.

        Raises:
            DataError: unknown sample ids, the disk is full, or images are missing or damaged in a read-only store.
        """
        wanted = select(cohort, samples)
        wanted.identify(self._index)
        done, count = _Done(), auto_workers(workers)
        if self.read_only:
            self._images = None  # whoever can write to it may have added to it
            wanted.digest(self._index, count, reading)
            if missing := len(wanted.jobs(self._known(corruption))) + len(self._damaged(wanted, corruption, count)):
                raise incomplete(self.folder, f"{missing} of the images wanted are not in it or damaged")
        elif wanted.stale or wanted.jobs(self._known(corruption)) or self._damaged(wanted, corruption, count):
            with self._locked():
                self._repair()
                wanted.digest(self._index, count, reading)
                self._images = None
                if bad := self._damaged(wanted, corruption, count):
                    self._index.retire(bad)
                    self.notes.append(f"{len(bad)} damaged records in the image store: the images are made again")
                self._build(wanted, corruption, count, progress, done)
            self._images = None
        return self._collect(wanted, corruption, done)

    def _damaged(self, wanted: Wanted, corruption: Corruption | None, threads: int) -> list[int]:
        """Rows of what is wanted whose bytes changed on disk; each row is read and compared once."""
        bad: list[int] = []
        keys = {key for _, _, key in wanted.keyed()}
        for variant in {"", _variants(corruption)[-1]}:
            known = self._index.checksums(variant)
            rows = {row for key, (row, _) in self._index.images(variant).items() if key in keys} - self._sound
            expected = {row: value for row in rows if (value := known.get(row)) is not None}
            unknown = [row for row in rows - expected.keys() if row < len(self.images)]
            if unknown and not self.read_only:  # written before there were checksums
                self._index.remember_checksums({row: checksum(self.images[row]) for row in unknown})
            wrong = damaged(self.images, expected, threads)
            self._sound |= rows - set(wrong)
            bad += wrong
        return bad

    def _known(self, corruption: Corruption | None) -> set[Key]:
        """Keys that need no work: there is a record, or it is known that there cannot be one."""
        variants = _variants(corruption)
        failed = [key for variant in variants for key in self._index.failures(variant)]
        return {*self._index.images(variants[-1]), *failed}

    def _build(
        self, wanted: Wanted, corruption: Corruption | None, workers: int, progress: Progress | None, done: _Done
    ) -> None:
        jobs = wanted.jobs(self._known(corruption))
        derive = corruption is not None and corruption.domain == "image"
        first = wanted.jobs(self._known(None)) if derive else {}
        total = len(first) + len(jobs)
        need, free = total * self.pipeline.nbytes, shutil.disk_usage(self.folder).free
        if need > free:
            raise self._disk_full(need)

        def tick() -> None:
            done.steps += 1
            if progress:
                progress(done.steps, total)

        if derive:
            self._append("", Work(self.pipeline), first, {}, workers, tick, done)
            clean = self._index.images("")
            jobs = {key: replace(job, clean_row=clean[key][0]) for key, job in jobs.items() if key in clean}
            self._images = None
            work = Work(self.pipeline, corruption, self.images)
            corrections = {key: names for key, (_, names) in clean.items()}
        else:
            work, corrections = Work(self.pipeline, corruption), {}
        self._append(_variants(corruption)[-1], work, jobs, corrections, workers, tick, done)

    def _append(
        self,
        variant: str,
        work: Work,
        jobs: dict[Key, Job],
        corrections: dict[Key, str],
        workers: int,
        tick: Callable[[], None],
        done: _Done,
    ) -> None:
        """Makes records, appends them to the file and commits them to the index, in this order."""
        images: list[tuple[int, Key, str, int]] = []
        failures: list[tuple[Key, str]] = []
        row = self._index.count()
        try:
            with self._bin.open("ab") as file, closing(make_all(work, list(jobs.values()), workers)) as records:
                since = time.monotonic()
                for (key, job), made in zip(jobs.items(), records):
                    if made.pixels:
                        file.write(made.pixels)
                        names = corrections.get(key, " ".join(made.corrections))
                        images.append((row + len(images), key, names, checksum(made.pixels)))
                        done.made.add(key)
                    elif made.lasting:
                        failures.append((key, made.reason))
                    else:
                        done.passing[key] = made.reason
                    done.decoded += job.clean_row < 0
                    done.derived += job.clean_row >= 0
                    tick()
                    if len(images) >= COMMIT_IMAGES or time.monotonic() - since > COMMIT_SECONDS:
                        row += self._commit(file, variant, images, failures)
                        since = time.monotonic()
                self._commit(file, variant, images, failures)
        except (OSError, sqlite3.Error) as error:
            if not _is_full(error):
                raise
            raise self._disk_full(len(jobs) * self.pipeline.nbytes) from error

    def _commit(
        self, file: IO[bytes], variant: str, images: list[tuple[int, Key, str, int]], failures: list[tuple[Key, str]]
    ) -> int:
        file.flush()
        os.fsync(file.fileno())
        self._index.add(variant, images, failures)
        count = len(images)
        images.clear()
        failures.clear()
        return count

    def _collect(self, wanted: Wanted, corruption: Corruption | None, done: _Done) -> Built:
        variants = _variants(corruption)
        images = self._index.images(variants[-1])
        failed = {k: reason for v in variants for k, reason in self._index.failures(v).items()} | done.passing
        rows: dict[str, int] = {}
        failures: list[Unusable] = []
        corrections: dict[str, int] = {}
        digests: dict[str, str] = {}
        reused = 0
        for sample, path, frame in zip(wanted.samples, wanted.paths, wanted.frames):
            if path not in wanted.digests:
                failures.append(Unusable(path, wanted.unreadable[path], sample))
                continue
            key = (wanted.digests[path], frame)
            digests[sample] = key[0]
            if key not in images:
                failures.append(Unusable(path, failed[key], sample))
                continue
            rows[sample], names = images[key]
            reused += key not in done.made
            for name in names.split():
                corrections[name] = corrections.get(name, 0) + 1
        notes = tuple(self.notes)
        return Built(rows, digests, failures, corrections, done.decoded, done.derived, reused, notes)

    @contextmanager
    def _locked(self, lock: FileLock | None = None, timeout: float = -1) -> Iterator[None]:
        try:
            with (lock or self._lock).acquire(timeout=timeout):
                yield
        except Timeout:
            raise
        except (OSError, sqlite3.Error) as error:
            # What is wrong with an image's file is a reason of that image: what comes up to here is the store's.
            if _is_full(error):
                raise self._disk_full() from error
            raise DataError(
                f"The image store cannot be written: {getattr(error, 'strerror', None) or error}.",
                where=str(self.folder),
                fix="Set another cache, or delete the folder: it is made again.",
            ) from error

    def _repair(self) -> None:
        """Makes file and index agree; only under the lock."""
        try:
            self._index.create()
        except sqlite3.OperationalError as error:
            raise DataError(f"The image store cannot be opened: {error}.", where=str(self.folder)) from error
        except sqlite3.DatabaseError:
            self._index.remove()
            self._bin.unlink(missing_ok=True)  # unlinked, not cut: who has mapped the old file keeps it
            self._index.create()
            self.notes.append("the index of the image store was damaged: all images are made again")
        self._repair_tail()

    def _repair_tail(self) -> None:
        size = self._bin.stat().st_size if self._bin.exists() else 0
        whole, count = size // self.pipeline.nbytes, self._index.count()
        if whole < count:
            lost = self._index.drop_from(whole)
            self.notes.append(f"images.bin was too short: {lost} images are made again")
            count = whole
        if size > count * self.pipeline.nbytes:
            os.truncate(self._bin, count * self.pipeline.nbytes)  # the uncommitted tail of a killed build

    def _disk_full(self, need: int | None = None) -> DataError:
        free = f"{shutil.disk_usage(self.folder).free / 1e6:,.1f} MB are free"
        return DataError(
            f"The disk is full: {'' if need is None else f'the image store needs {need / 1e6:,.1f} MB, '}{free}.",
            where=str(self.folder),
            fix="Free some space or set another cache; what was made is kept.",
        )


def _is_full(error: Exception) -> bool:
    return error.errno in FULL if isinstance(error, OSError) else "is full" in str(error)


def _variants(corruption: Corruption | None) -> tuple[str, ...]:
    """Variants whose failures count, the one wanted last: what is derived from clean records fails with them."""
    if corruption is None:
        return ("",)
    return ("", corruption.key()) if corruption.domain == "image" else (corruption.key(),)


def _folder_name(key: str) -> str:
    """The key itself where it makes a plain folder name, otherwise its digest."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", key):
        return key
    return hashlib.sha256(key.encode()).hexdigest()[:32]
