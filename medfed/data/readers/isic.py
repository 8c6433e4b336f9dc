"""ISIC 2019 and HAM10000: dermoscopy images with lesion ids.

ISIC 2019: ``ISIC_2019_Training_Input/ISIC_x[_downsampled].jpg``, ``*_Training_GroundTruth.csv`` (one column a class,
one-hot), ``*_Training_Metadata.csv`` (``lesion_id``), likewise ``*_Test_*``.  HAM10000: ``HAM10000_metadata[.csv]`` or
``labels.csv`` with ``image_id,dx,lesion_id``, images in any folders.  ``_downsampled`` is part of the id.

Several images show one lesion: a lesion is the group that must not be split (Tschandl et al., Sci Data 2018).
Natural centres: the prefix of the lesion id (BCN, MSK, HAM), refined by HAM10000's ``dataset`` column
(as in FLamby's Fed-ISIC2019, du Terrail et al. 2022).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel

from medfed.data.cohort import Cohort, Findings, Task, Unusable
from medfed.data.readers.common import (
    MISSING,
    Progress,
    build_cohort,
    class_index,
    drop_repeated,
    group_or_self,
    header_of,
    match_files,
    read_table,
)
from medfed.data.readers.scan import Scan, scan
from medfed.errors import DataError

ISIC_CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
HAM_CLASSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")


class Options(BaseModel, extra="forbid"):
    """Options of the ISIC reader.

    Args:
        client: ``centre`` makes each centre a client; ``none`` leaves the partition to the condition.
        labels: the label table, where it is not found by itself.
        metadata: the metadata table, where it is not found by itself.
        images: the image folder, where it is not below the root.
    """

    client: Literal["none", "centre"] = "none"
    labels: Path | None = None
    metadata: Path | None = None
    images: Path | None = None


def read(root: Path, options: Options, progress: Progress | None = None) -> Cohort:
    """Reads ISIC 2019 or HAM10000, whichever label table is found (ISIC 2019 first).

    Args:
        root: the folder with tables and images, at any depth.
        options: see :class:`Options`.
        progress: not called, since no header is read here.

    Raises:
        DataError: no label table, an unknown class, no image, or no centre where centres are asked for.
    """
    findings = Findings()
    files = scan(root)
    images = files if options.images is None else scan(options.images)
    for one in {id(s): s for s in (files, images)}.values():
        one.report(findings)
    tables = [(p, header_of(p)) for p in ([options.labels] if options.labels else _tables(files))]
    one_hot = [p for p, header in tables if header[:1] == ["image"] and {"MEL", "NV"} <= set(header)]
    coded = [p for p, header in tables if {"image_id", "dx"} <= set(header)]
    if one_hot:
        rows, task = _one_hot(one_hot, findings)
        rows = _add_metadata(rows, files, options, findings)
    elif coded:
        rows, task = _coded(coded, findings)
    else:
        raise DataError(
            "No label table was found; ISIC_2019_Training_GroundTruth.csv (image,MEL,NV,...) or HAM10000_metadata.csv "
            "(image_id,dx,lesion_id) is expected.",
            where=str(options.labels or files.root),
            fix=files.found(),
        )
    found = match_files(list(rows["image"]), images.images, findings, lambda p: _unlabelled_test(p, images, rows))
    if not found:
        raise DataError("None of the images in the label table was found.", where=str(images.root), fix=images.found())
    rows = rows[rows["image"].isin(found)].reset_index(drop=True)
    samples = list(rows["image"])
    lesions, alone = group_or_self(rows["lesion"], samples)
    if alone:
        findings.notes.append(f"{alone} images without a lesion id: each counts as its own lesion")
    columns = {
        "sample": samples,
        "path": [str(found[i]) for i in samples],
        "patient": lesions,
        "client": _centres(rows, files, findings) if options.client == "centre" else [""] * len(rows),
        "split": list(rows["split"]) if (rows["split"] == "test").any() else [""] * len(rows),
    }
    return build_cohort("isic", task, rows["label"].to_numpy(np.int64), findings, columns)


def _tables(files: Scan) -> list[Path]:
    """Candidates for tables, those of a test set last."""
    tables = [p for p in files.others if p.suffix.lower() in (".csv", "", ".txt", ".tab")]
    return sorted(tables, key=lambda p: _split_of(p) == "test")


def _split_of(path: Path) -> str:
    return "test" if "test" in path.name.lower() else "train"


def _unlabelled_test(path: Path, images: Scan, rows: pd.DataFrame) -> bool:
    if (rows["split"] == "test").any():
        return False
    return any("test" in part.lower() for part in images.relative(path).split("/")[:-1])


def _one_hot(paths: list[Path], findings: Findings) -> tuple[pd.DataFrame, Task]:
    tables = [read_table(p).assign(split=_split_of(p), table=str(p)) for p in paths]
    classes = list(ISIC_CLASSES)
    if any("UNK" in t and (pd.to_numeric(t["UNK"], errors="coerce") > 0).any() for t in tables):
        classes.append("UNK")
        findings.notes.append("the class UNK is in use: 9 classes")
    parts = []
    for table, path in zip(tables, paths):
        absent = [c for c in classes if c not in table and c != "UNK"]
        if absent:
            raise DataError(f"The table lacks the classes {', '.join(absent)}.", where=str(path))
        table = drop_repeated(table, "image", findings, "image ids")
        values = table.reindex(columns=classes, fill_value="0").apply(pd.to_numeric, errors="coerce").to_numpy()
        good = np.isin(values, (0, 1)).all(axis=1) & (values.sum(axis=1) == 1)
        for image in table["image"][~good]:
            findings.unusable.append(Unusable("", "not exactly one class is marked for this row", str(image)))
        table = table[good].assign(label=values[good].argmax(axis=1))
        parts.append(table[["image", "label", "split"]])
    rows = pd.concat(parts, ignore_index=True)
    return _once(rows, findings).assign(lesion=""), Task("multiclass", tuple(classes))


def _coded(paths: list[Path], findings: Findings) -> tuple[pd.DataFrame, Task]:
    parts = []
    for path in paths:
        table = read_table(path)
        if "lesion_id" not in table:
            findings.notes.append(f"{path.name} has no lesion_id: images of one lesion may lie on both sides")
            table["lesion_id"] = ""
        table = drop_repeated(table, "image_id", findings, "image ids")
        label = class_index([d.strip().lower() for d in table["dx"]], HAM_CLASSES, str(path))
        part = {"image": table["image_id"], "label": label, "split": _split_of(path), "lesion": table["lesion_id"]}
        parts.append(pd.DataFrame(part))
    return _once(pd.concat(parts, ignore_index=True), findings), Task("multiclass", HAM_CLASSES)


def _once(rows: pd.DataFrame, findings: Findings) -> pd.DataFrame:
    """One row an image over all tables: copies of a table are merged, a contradiction is left out."""
    before = set(rows["image"])
    rows = drop_repeated(rows, "image", findings, "image ids over several tables")
    lost = before - set(rows["image"])
    if lost:
        findings.notes.append(f"{len(lost)} images with contradictory rows in several tables left out")
    return rows


def _add_metadata(rows: pd.DataFrame, files: Scan, options: Options, findings: Findings) -> pd.DataFrame:
    candidates = [options.metadata] if options.metadata else _tables(files)
    paths = [p for p in candidates if {"image", "lesion_id"} <= set(header_of(p))]
    if not paths:
        findings.notes.append("no metadata table with image,lesion_id: images of one lesion may lie on both sides")
        return rows
    lesion: dict[str, str] = {}
    for path in paths:
        table = read_table(path)
        lesion.update(zip(table["image"], table["lesion_id"]))
    return rows.assign(lesion=[lesion.get(i, "") for i in rows["image"]])


def _centres(rows: pd.DataFrame, files: Scan, findings: Findings) -> list[str]:
    dataset: dict[str, str] = {}
    for path in _tables(files):
        if {"image_id", "dataset"} <= set(header_of(path)):
            table = read_table(path)
            dataset.update(zip(table["image_id"], table["dataset"]))
    centres = []
    for image, lesion in zip(rows["image"], rows["lesion"]):
        # MSK lesions are numbered MSK4_...; the digits are a batch and no centre.
        prefix = re.match(r"[A-Za-z]+", lesion) if lesion not in MISSING else None
        centres.append(dataset.get(image) or (prefix[0] if prefix else "unknown"))
    unknown = centres.count("unknown")
    if unknown == len(centres):
        raise DataError(
            "No image tells its centre (neither lesion ids nor a dataset column).",
            where=str(files.root),
            fix="Use client: none.",
        )
    if unknown:
        findings.notes.append(f"{unknown} images tell no centre; they form the client 'unknown'")
    return centres
