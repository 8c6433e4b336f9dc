"""Files to samples: each frame of a multi-frame file is a sample of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from medfed.data.cohort import Findings, Unusable
from medfed.data.decode import Undecodable
from medfed.data.readers import heyex
from medfed.data.readers.common import Progress
from medfed.data.readers.scan import ONE_FRAME_SUFFIXES, suffix_of

Frames = Literal["first", "all", "middle"]


@dataclass(frozen=True)
class Entry:
    """One frame of one file; ``source`` is the position of the file in the list that was given."""

    source: int
    sample: str
    path: str
    frame: int
    patient: str


def choose(frames: Frames, count: int) -> list[int]:
    """The frames taken of a file with ``count`` frames; the middle of an even number is the upper one."""
    if frames == "all":
        return list(range(count))
    return [0 if frames == "first" else count // 2]


def expand(
    paths: Sequence[Path],
    names: Sequence[str],
    frames: Frames,
    findings: Findings,
    *,
    index_name: str,
    given: Sequence[int | None] | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> list[Entry]:
    """Lists the samples of files.

    PNG, JPEG and BMP have one frame and are not opened here; of all others the header is read.  A HEYEX XML export is
    a volume whose frames are the pictures beside it.

    Args:
        paths: the files.
        names: the sample id of each file; ``#<frame>`` is added for files with several frames.
        frames: which frames to take.
        findings: gets files that are no images, and how many frames were left aside.
        index_name: name of the header index.
        given: the one frame that a table asks for, by file; None where it does not say.
        cache: folder of the header index.
        progress: called with (headers read, headers to read).

    Returns:
        The samples in the order of the files, with the patient id of the header or of a HEYEX export beside the file
        (empty where there is none).
    """
    exports = _exports(paths, names, findings)
    headers = [p for p in paths if suffix_of(p.name) not in (*ONE_FRAME_SUFFIXES, ".xml")]
    rows = {}
    if headers:
        from medfed.data.header_index import index_headers

        table = index_headers(headers, cache=cache, name=index_name, progress=progress)
        rows = {row.path: row for row in table.itertuples(index=False)}
    entries: list[Entry] = []
    beside = heyex.Beside()
    aside = several = 0
    for source, (path, name) in enumerate(zip(paths, names)):
        row, export, asked = rows.get(str(path)), exports.get(source), given[source] if given else None
        if export is None and suffix_of(path.name) == ".xml":
            continue  # unusable
        count, patient = (row.frames, row.patient_id.strip()) if row else (1, "")
        if export:
            count, patient = len(export.bscans), export.patient
        if row and row.reason:
            findings.unusable.append(Unusable(str(path), row.reason, name))
            continue
        if asked is not None and not 0 <= asked < count:
            reason = f"frame {asked} is asked for, but the file has {count} (counted from 0)"
            findings.unusable.append(Unusable(str(path), reason, name))
            continue
        chosen = choose(frames, count) if asked is None else [asked]
        several += count > 1
        aside += (count - len(chosen)) if asked is None else 0
        for frame in chosen:
            sample = f"{name}#{frame}" if count > 1 else name
            if export:
                entries.append(Entry(source, sample, str(export.bscans[frame]), 0, patient))
            else:
                entries.append(Entry(source, sample, str(path), frame, patient or beside.patient(path)))
    if several:
        findings.notes.append(f"{several} files with several frames; {aside} frames left aside (frames: {frames})")
    return entries


def _exports(paths: Sequence[Path], names: Sequence[str], findings: Findings) -> dict[int, heyex.Export]:
    """The HEYEX exports among the files, by position; what is wrong with one goes into the findings."""
    found: dict[int, heyex.Export] = {}
    for source, (path, name) in enumerate(zip(paths, names)):
        if suffix_of(path.name) != ".xml":
            continue
        if not heyex.is_export(path):
            findings.unusable.append(Unusable(str(path), "not a HEYEX XML export", name))
            continue
        try:
            found[source] = export = heyex.read_export(path)
        except Undecodable as error:
            findings.unusable.append(Unusable(str(path), error.reason, name))
            continue
        reason = "named by the HEYEX export, but not beside it"
        findings.unusable += [Unusable(str(path.parent / image), reason) for image in export.missing]
    return found
