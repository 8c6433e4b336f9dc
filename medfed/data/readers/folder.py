"""Class folders: ``root/<class>/...`` or ``root/{train,val,test}/<class>/...``, images of any supported kind.

HEYEX XML exports among them count as volumes of the pictures beside them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, field_validator

from medfed.data.cohort import Cohort, Findings, Task, Unusable
from medfed.data.readers.common import SPLITS, Names, Progress, build_cohort, group_or_self, natural_order
from medfed.data.readers.frames import Entry, Frames, expand
from medfed.data.readers.heyex import gather
from medfed.data.readers.scan import Scan, scan
from medfed.errors import DataError, nearest


class Options(BaseModel, extra="forbid"):
    """Options of the class-folder reader.

    Args:
        classes: the class names in the order of the outputs.  Fix them in a federation: a site that lacks a class
            would otherwise number the classes differently.
        patient_pattern: regular expression searched in the path below the root (forward slashes); its first group
            is the patient id.
        frames: which frames of a multi-frame file are samples.
        cache: folder of the header index; default the user's cache folder.
    """

    classes: Names | None = None
    patient_pattern: str | None = None
    frames: Frames = "all"
    cache: Path | None = None

    @field_validator("patient_pattern")
    @classmethod
    def _has_group(cls, pattern: str | None) -> str | None:
        if pattern is None:
            return None
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        if groups < 1:
            raise ValueError("needs one group in parentheses, which is the patient id")
        return pattern


def read(root: Path, options: Options, progress: Progress | None = None) -> Cohort:
    """Reads a tree of class folders.

    Args:
        root: the folder with the class folders, or with ``train``, ``val``, ``test`` above them.
        options: see :class:`Options`.
        progress: called with (headers read, headers to read).

    Raises:
        DataError: no class folders with images, or a folder outside the given classes.
    """
    findings = Findings()
    files = scan(root)
    files.report(findings)
    with_splits = any(SPLITS.get(f.lower()) in ("train", "test") for f in files.folders if "/" not in f)
    paths, names, folders, splits = [], [], [], []
    for path in gather(files, findings):
        name = files.relative(path)
        parts = name.split("/")
        split = SPLITS.get(parts[0].lower(), "") if with_splits and len(parts) > 1 else ""
        if with_splits and not split:
            findings.unusable.append(Unusable(str(path), "outside the folders train, val and test"))
        elif len(parts) < (3 if with_splits else 2):
            findings.unusable.append(Unusable(str(path), "not in a class folder"))
        else:
            paths.append(path)
            names.append(name)
            folders.append(parts[1 if with_splits else 0].strip())
            splits.append(split)
    if not paths:
        raise DataError(
            "No images in class folders; root/<class>/image or root/train/<class>/image is expected.",
            where=str(files.root),
            fix=files.found(),
        )
    classes = _classes(folders, options.classes, files, with_splits, findings)
    entries = expand(
        paths, names, options.frames, findings, index_name=str(files.root), cache=options.cache, progress=progress
    )
    samples = [e.sample for e in entries]
    patients, alone = group_or_self(_patients(entries, names, options.patient_pattern), samples)
    if alone:
        findings.notes.append(f"{alone} samples without a patient id: each counts as its own patient")
    index = {name: k for k, name in enumerate(classes)}
    labels = np.array([index[folders[e.source]] for e in entries], dtype=np.int64)
    columns: dict[str, Sequence[Any]] = {
        "sample": samples,
        "path": [e.path for e in entries],
        "frame": [e.frame for e in entries],
        "patient": patients,
        "split": [splits[e.source] for e in entries],
    }
    return build_cohort("folder", Task("multiclass", tuple(classes)), labels, findings, columns)


def _classes(
    folders: Sequence[str], given: Sequence[str] | None, files: Scan, with_splits: bool, findings: Findings
) -> list[str]:
    present = set(folders)
    if given is None:
        classes = natural_order(present)
        findings.notes.append(f"classes taken from the folders: {', '.join(classes)} (fix them with options.classes)")
        depth = 1 if with_splits else 0
        parts = [f.split("/") for f in files.folders if f != "." and f.count("/") == depth]
        at_depth = {p[-1].strip() for p in parts if not with_splits or p[0].lower() in SPLITS}
        if empty := sorted(at_depth - present):
            findings.notes.append(f"folders without images are no classes: {', '.join(empty)}")
        return classes
    for name in natural_order(present - set(given)):
        raise DataError(f"The folder {name!r} is none of the classes.", where=str(files.root), fix=nearest(name, given))
    if absent := [c for c in given if c not in present]:
        findings.notes.append(f"classes without images here: {', '.join(absent)}")
    return list(given)


def _patients(entries: Sequence[Entry], names: Sequence[str], pattern: str | None) -> list[str]:
    """Patient ids from the pattern where one is given, otherwise from the headers (multi-frame: one file)."""
    if pattern is None:
        # Frames of one file belong together, even when nothing is known about the patient.
        return [
            e.patient or (names[e.source] if "#" in e.sample.removeprefix(names[e.source]) else "") for e in entries
        ]
    search = re.compile(pattern).search
    matches = [search(names[e.source]) for e in entries]
    return [(m[1] or "") if m else "" for m in matches]
