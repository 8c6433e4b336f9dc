"""Making the records of an image store: one image, and many of them side by side.

One image is a pure function of its file, the pipeline and the corruption, so neither the number of workers
nor their order can change a record.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np

from medfed.data.corruption import Corruption, to_uint8
from medfed.orphans import own_output, when_orphaned

CHUNK = 8
SMALL = 16  # so few images are made in this process: starting workers would take longer
SLACK = 0.25  # how far interpolation may overshoot 0..1; beyond it the pipeline is at fault
CRASHED = "the decoder crashed"


@dataclass(frozen=True)
class Pipeline:
    """How a file becomes a record.

    Args:
        load: takes ``{"image": path, "frame": int, "sample": id}`` and returns a dictionary whose ``image``
            is float32 ``[C, H, W]`` in native units, with ``image_kind`` and ``image_corrections`` where
            known.
        prepare: takes that dictionary and returns it with ``image`` as float32 ``[C, h, w]`` in 0..1.
        key: text that changes whenever the result of ``load`` and ``prepare`` may change.
        shape: ``(C, h, w)``.
        dtype: ``uint8``, ``float16`` or ``float32``: how a record is kept.
    """

    load: Callable[[dict], dict]
    prepare: Callable[[dict], dict]
    key: str
    shape: tuple[int, int, int]
    dtype: Literal["uint8", "float16", "float32"] = "uint8"

    @property
    def nbytes(self) -> int:
        """Bytes of one record."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Job:
    """One record to make.

    Args:
        path: the file.
        frame: frame within the file.
        sample: id, for the pipeline's own use.
        digest: content digest of the file.
        clean_row: row of the clean record to corrupt, or -1 to decode the file.
    """

    path: str
    frame: int
    sample: str
    digest: str
    clean_row: int = -1

    @property
    def identity(self) -> str:
        """What freezes the corruption: the content, not the name."""
        return f"{self.digest}:{self.frame}"


@dataclass(frozen=True)
class Made:
    """A record, or why there is none.

    Args:
        pixels: the record's bytes; empty where it failed.
        corrections: what the decoder corrected.
        reason: why it failed.
        lasting: whether the same file would fail again (not so when memory or the disk failed).
    """

    pixels: bytes = b""
    corrections: tuple[str, ...] = ()
    reason: str = ""
    lasting: bool = True


@dataclass(frozen=True)
class Work:
    """What all jobs of a build share: pipeline, corruption and the clean records."""

    pipeline: Pipeline
    corruption: Corruption | None = None
    images: np.ndarray | None = None


def to_unit(record: np.ndarray) -> np.ndarray:
    """A record as float32 in 0..1."""
    unit = record.astype(np.float32)
    return unit / np.float32(255) if record.dtype == np.uint8 else unit


def to_record(unit: np.ndarray, dtype: str, *, truncate: bool = False) -> np.ndarray:
    """Pixels in 0..1 as they are kept.

    Args:
        unit: float32 of any shape; clipped to 0..1.
        dtype: of the record; ``uint8`` scales by 255.
        truncate: cut the fraction off instead of rounding, as FedISM's corrupted files were made.
    """
    return to_uint8(unit, truncate) if dtype == "uint8" else np.clip(unit, 0.0, 1.0).astype(dtype)


def make(work: Work, job: Job) -> Made:
    """Makes one record; whatever goes wrong with this one file becomes a reason, never an exception."""
    try:
        return _make(work, job)
    except Exception as error:
        cause = _cause(error)
        # A numbered OSError is the system's (disk, permission); without a number it is a decoder's own complaint.
        passing = isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno is not None)
        return Made(reason=_reason(cause), lasting=not passing)


def _make(work: Work, job: Job) -> Made:
    pipeline, corruption = work.pipeline, work.corruption
    if job.clean_row >= 0:
        assert corruption is not None
        assert work.images is not None
        unit = corruption.apply(to_unit(np.asarray(work.images[job.clean_row])), job.identity)
        corrections: tuple[str, ...] = ()
    else:
        data = pipeline.load({"image": job.path, "frame": job.frame, "sample": job.sample})
        if corruption is not None:
            if data.get("image_kind", "hounsfield") != "hounsfield":
                return Made(reason="corruption in Hounsfield units, but the file is not a CT slice")
            data = {**data, "image": _like(data["image"], corruption.apply(_array(data["image"]), job.identity))}
        prepared = pipeline.prepare(data)
        # Transforms of prepare may count corrections too; a prepare that drops the list leaves that of load.
        corrections = tuple(prepared.get("image_corrections", data.get("image_corrections")) or ())
        unit = _array(prepared["image"])
    if unit.shape != tuple(pipeline.shape):
        return Made(reason=f"prepared shape {unit.shape} instead of {tuple(pipeline.shape)}")
    low, high = float(unit.min()), float(unit.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        return Made(reason="NaN or infinite pixel values")
    if job.clean_row < 0 and (low < -SLACK or high > 1 + SLACK):
        return Made(reason=f"prepared values from {low:g} to {high:g} instead of 0 to 1")
    record = to_record(unit, pipeline.dtype, truncate=corruption is not None)
    return Made(record.tobytes(), corrections)


def _array(image: Any) -> np.ndarray:
    array = image.detach().cpu().numpy() if hasattr(image, "detach") else image
    return np.asarray(array, dtype=np.float32)


def _like(image: Any, pixels: np.ndarray) -> Any:
    """``pixels`` as a tensor with the image's own metadata, where the image is one."""
    if not hasattr(image, "detach"):
        return pixels
    changed = image.clone()
    changed[...] = changed.new_tensor(pixels)
    return changed


def _cause(error: BaseException) -> BaseException:
    """What a transform raised, under the layers that MONAI wraps around it."""
    while not hasattr(error, "reason") and error.__cause__ is not None:
        error = error.__cause__
    return error


def _reason(error: BaseException) -> str:
    told = (getattr(error, name, None) for name in ("reason", "strerror", "what"))
    text = next(filter(None, told), None) or str(error)
    return " ".join(str(text).split())[:300].removesuffix(".") or type(error).__name__


def auto_workers(workers: int | Literal["auto"]) -> int:
    """The number of workers: the processors that this process may use, where ``auto``."""
    if workers != "auto":
        return max(1, int(workers))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_all(work: Work, jobs: Sequence[Job], workers: int) -> Generator[Made, None, None]:
    """Makes many records side by side; yields them in the order of the jobs.

    Processes are forked where the platform allows it, so that a pipeline needs no pickling and imports
    nothing again; threads otherwise.  A file whose decoder takes its process down is found, named and left
    out.
    """
    if workers == 1 or len(jobs) <= SMALL:
        yield from (make(work, job) for job in jobs)
        return
    chunks = iter([jobs[i : i + CHUNK] for i in range(0, len(jobs), CHUNK)])
    pool, task = _pool(work, workers)
    pending: deque[tuple[Sequence[Job], Future]] = deque()
    try:
        # A bounded window: memory stays flat however many images there are.
        for chunk in islice(chunks, 3 * workers):
            pending.append((chunk, pool.submit(task, chunk)))
        while pending:
            chunk, future = pending[0]
            try:
                made = future.result()
            except BrokenProcessPool:
                suspects, pool_left = [c for c, _ in pending], pool
                pending.clear()
                pool_left.shutdown(wait=False, cancel_futures=True)
                yield from (_alone(work, job) for suspect in suspects for job in suspect)
                pool, task = _pool(work, workers)
                pending.extend((c, pool.submit(task, c)) for c in islice(chunks, 3 * workers))
                continue
            pending.popleft()
            yield from made
            for following in islice(chunks, 1):
                pending.append((following, pool.submit(task, following)))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _alone(work: Work, job: Job) -> Made:
    pool, task = _pool(work, 1)
    with pool:
        try:
            return pool.submit(task, [job]).result()[0]
        except BrokenProcessPool:
            # Not remembered: the system may have ended the process for want of memory.
            return Made(reason=CRASHED, lasting=False)


_WORK: Work | None = None


def _pool(work: Work, workers: int) -> tuple[Executor, Callable[[Sequence[Job]], list[Made]]]:
    forks = sys.platform == "linux" and not multiprocessing.current_process().daemon
    if not forks:
        return ThreadPoolExecutor(workers), partial(_many, work)
    fork = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(workers, fork, _start, (work, os.getpid())), _many_here


def _start(work: Work, parent: int) -> None:
    global _WORK
    _WORK = work
    own_output()
    when_orphaned(parent, lambda: os._exit(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # a forked OpenMP pool would hang; one thread needs none


def _many(work: Work, jobs: Sequence[Job]) -> list[Made]:
    return [make(work, job) for job in jobs]


def _many_here(jobs: Sequence[Job]) -> list[Made]:
    assert _WORK is not None
    return _many(_WORK, jobs)
