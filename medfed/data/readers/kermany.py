"""Kermany OCT2017: retinal OCT B-scans in four class folders.

Layout: ``OCT2017/{train,test,val}/{CNV,DME,DRUSEN,NORMAL}/CLASS-PATIENT-N.jpeg``, also nested, with a trailing
blank in ``OCT2017 ``, or without the split folders.  The patient is the **middle number alone**: the same person may
occur under several classes (CNV-7 and DME-7 are one patient) and, as published, in train and test
(Kermany et al., Cell 2018; overlap: TVST 2022, Tampu et al., Sci Data 2022).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel

from medfed.data.cohort import Cohort, Findings, Task, Unusable
from medfed.data.readers.common import SPLITS, Progress, build_cohort
from medfed.data.readers.scan import Scan, scan, stem_of
from medfed.errors import DataError

CLASSES = ("CNV", "DME", "DRUSEN", "NORMAL")
_NAME = re.compile(r"^(?P<label>[A-Za-z]+)-(?P<patient>[^-\s]+)-(?P<number>[^-]+)$")


class Options(BaseModel, extra="forbid"):
    """Options of the Kermany reader.

    Args:
        straddling: what to do with patients on both sides: take their images out of train, or keep them.
        val: the published validation folder has 8 images a class, too few to measure anything: merged into train,
            kept as its own split, or dropped.
    """

    straddling: Literal["drop_from_train", "keep"] = "drop_from_train"
    val: Literal["merge", "keep", "drop"] = "merge"


def read(root: Path, options: Options, progress: Progress | None = None) -> Cohort:
    """Reads OCT2017.

    Args:
        root: the folder that holds the tree, at any depth.
        options: see :class:`Options`.
        progress: not called, since no header is read here.

    Raises:
        DataError: there are no images in class folders of the four classes.
    """
    findings = Findings()
    files = scan(root)
    files.report(findings)
    rows = _rows(files, findings)
    if rows.empty:
        raise DataError(
            "No image lies in a folder named CNV, DME, DRUSEN or NORMAL (optionally below train, test, val).",
            where=str(files.root),
            fix=files.found(),
        )
    copies = int(rows["sample"].duplicated().sum())
    if copies:
        findings.notes.append(f"{copies} further copies of an image left out (same split, class and name)")
        rows = rows.drop_duplicates("sample")
    rows = _merge_val(rows, options.val, findings)
    rows = _straddling(rows, options.straddling, findings)
    mixed = int((rows.groupby("patient")["label"].nunique() > 1).sum())
    if mixed:
        findings.notes.append(f"{mixed} patients occur in several classes (one patient is the middle number alone)")
    columns = {c: list(rows[c]) for c in ("sample", "path", "patient", "split")}
    labels = rows["label"].to_numpy(dtype=np.int64)
    return build_cohort("kermany", Task("multiclass", CLASSES), labels, findings, columns)


def _rows(files: Scan, findings: Findings) -> pd.DataFrame:
    rows, unnamed, mismatched = [], 0, 0
    for path in files.images:
        folders = [part.strip() for part in ("", "", *files.relative(path).split("/")[:-1])]
        # The root itself may be the split folder, or even the class folder is given as deeper nesting.
        depth = next((k for k in range(len(folders) - 1, -1, -1) if folders[k].upper() in CLASSES), None)
        if depth is None:
            findings.unusable.append(Unusable(str(path), "not in a folder of one of the four classes"))
            continue
        folder, split = folders[depth].upper(), SPLITS.get(folders[depth - 1].lower(), "")
        stem = stem_of(path.name)
        match = _NAME.match(stem)
        sample = "/".join(part for part in (split, folder, stem) if part)
        unnamed += match is None
        mismatched += match is not None and match["label"].upper() != folder
        patient = match["patient"] if match else sample
        rows.append((sample, str(path), patient, split, CLASSES.index(folder)))
    if unnamed:
        findings.notes.append(f"{unnamed} files not named CLASS-PATIENT-N: each counts as its own patient")
    if mismatched:
        findings.notes.append(f"{mismatched} files whose name gives another class than their folder (folder used)")
    return pd.DataFrame(rows, columns=["sample", "path", "patient", "split", "label"])


def _merge_val(rows: pd.DataFrame, how: str, findings: Findings) -> pd.DataFrame:
    val = rows["split"] == "val"
    if how == "keep" or not val.any():
        return rows
    if how == "drop":
        findings.notes.append(f"{int(val.sum())} images of the validation folder left out, as asked")
        return rows[~val]
    findings.notes.append(f"{int(val.sum())} images of the validation folder merged into train")
    return rows.assign(split=rows["split"].where(~val, "train"))


def _straddling(rows: pd.DataFrame, how: str, findings: Findings) -> pd.DataFrame:
    held_out = set(rows.loc[rows["split"] == "test", "patient"])
    inside = (rows["split"] != "test") & rows["patient"].isin(held_out)
    if not inside.any():
        return rows
    patients = rows.loc[inside, "patient"].nunique()
    done = "left out" if how == "drop_from_train" else "kept, as asked"
    findings.notes.append(
        f"{patients} patients occur in train and test; their {int(inside.sum())} images outside test {done}"
    )
    return rows[~inside] if how == "drop_from_train" else rows
