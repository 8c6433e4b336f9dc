"""A table of one's own: CSV with ``path,label[,patient][,client][,split][,frame]``, or a MONAI datalist in JSON.

Further accepted names: ``image``, ``file``, ``filename`` (path), ``patient_id`` (patient), ``site``, ``centre``,
``center`` (client).  Paths are relative to the table, or to ``images`` where given; backslashes are accepted.  Labels
are text.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel

from medfed.data.cohort import Cohort, Findings, Task, Unusable
from medfed.data.readers.common import (
    MISSING,
    SPLITS,
    Names,
    Progress,
    build_cohort,
    class_index,
    group_or_self,
    header_of,
    natural_order,
    read_table,
)
from medfed.data.readers.frames import Frames, expand
from medfed.data.readers.scan import scan
from medfed.errors import DataError, nearest

NAMES = {
    "path": ("path", "image", "file", "filename"),
    "label": ("label",),
    "patient": ("patient", "patient_id"),
    "client": ("client", "site", "centre", "center"),
    "split": ("split",),
    "frame": ("frame",),
}


class Options(BaseModel, extra="forbid"):
    """Options of the table reader.

    Args:
        table: the CSV or JSON file, where the root does not name it or hold just one.
        images: the folder that paths are relative to; default the folder of the table.
        classes: the class names in the order of the outputs; otherwise the labels that occur, sorted.
        label_columns: several columns of 0 and 1, one an output: a multi-label task.
        frames: which frames of a multi-frame file are samples, where the table has no ``frame``.
        cache: folder of the header index; default the user's cache folder.
    """

    table: Path | None = None
    images: Path | None = None
    classes: Names | None = None
    label_columns: Names | None = None
    frames: Frames = "all"
    cache: Path | None = None

    @property
    def kind(self) -> str:
        """Kind of the labels, before any is read."""
        return "multiclass" if self.label_columns is None else "multilabel"


def read(root: Path, options: Options, progress: Progress | None = None) -> Cohort:
    """Reads a table of paths and labels.

    Args:
        root: the table, or the folder that holds it.
        options: see :class:`Options`.
        progress: called with (headers read, headers to read).

    Raises:
        DataError: no table, missing columns, a label outside the map, an unknown split, or no file of the table.
    """
    findings = Findings()
    path = _find_table(Path(root).expanduser().absolute(), options.table)
    table = _read_datalist(path) if path.suffix.lower() == ".json" else read_table(path)
    rows = _named_columns(table, path, options.label_columns)
    rows["split"] = _splits(rows["split"], path)
    label_names = ["label"] if options.label_columns is None else options.label_columns
    rows = _complete(rows, label_names, findings)
    rows = _once(rows, findings)
    if rows.empty:
        raise DataError("The table has no row with a path and a label.", where=str(path))
    base = options.images.expanduser().absolute() if options.images else path.parent
    rows["file"] = [os.path.normpath(base / p) for p in rows["path"]]
    exists = np.array([os.path.isfile(f) for f in rows["file"]], dtype=bool)
    for file, name in zip(rows["file"][~exists], rows["path"][~exists]):
        findings.unusable.append(Unusable(file, "the file does not exist", name))
    if not exists.any():
        first = rows["file"].iloc[0]
        raise DataError(
            f"None of the {len(rows)} files of the table exists, first {first}.",
            where=str(path),
            fix="Paths are relative to the table; name another folder under options.images.",
        )
    task, labels = _labels(rows, options, findings, path)
    kept = np.flatnonzero(exists)
    entries = expand(
        [Path(rows["file"].iloc[k]) for k in kept],
        [rows["path"].iloc[k] for k in kept],
        options.frames,
        findings,
        index_name=str(path),
        given=_frames(rows["frame"].iloc[kept], path),
        cache=options.cache,
        progress=progress,
    )
    source = kept[[e.source for e in entries]] if entries else np.zeros(0, int)
    samples = [e.sample for e in entries]
    known = [p.strip() or e.patient for p, e in zip(rows["patient"].iloc[source], entries)]
    # Frames of one file belong together, even when nothing is known about the patient.
    alone = [rows["path"].iloc[k] for k in source]
    patients, unknown = group_or_self(known, alone)
    if unknown:
        findings.notes.append(f"{unknown} samples without a patient id: each file counts as its own patient")
    columns: dict[str, Sequence[Any]] = {
        "sample": samples,
        "path": [e.path for e in entries],
        "frame": [e.frame for e in entries],
        "patient": patients,
        "client": [c.strip() for c in rows["client"].iloc[source]],
        "split": list(rows["split"].iloc[source]),
    }
    return build_cohort("table", task, labels[source], findings, columns)


def _find_table(root: Path, named: Path | None) -> Path:
    if named is not None:
        path = named if named.is_absolute() else (root if root.is_dir() else root.parent) / named
        if not path.is_file():
            raise DataError("The table does not exist.", where=str(path))
        return path
    if root.is_file():
        return root
    files = scan(root)
    top = [p for p in files.others if p.parent == files.root]
    tables = [p for p in top if p.suffix.lower() == ".json" or set(NAMES["path"]) & {c.lower() for c in header_of(p)}]
    if len(tables) == 1:
        return tables[0]
    if tables:
        raise DataError(
            f"Several tables are here: {', '.join(p.name for p in tables)}.",
            where=str(root),
            fix="Name one under options.table.",
        )
    raise DataError("No table with a column 'path' (or a JSON datalist) was found.", where=str(root), fix=files.found())


def _read_datalist(path: Path) -> pd.DataFrame:
    """A MONAI datalist: lists of ``{"image": ..., "label": ...}`` under training, validation and test."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DataError(f"The datalist cannot be read: {error}.", where=str(path)) from error
    lists = (
        {k: v for k, v in content.items() if isinstance(v, list) and k in SPLITS} if isinstance(content, dict) else {}
    )
    if not lists:
        raise DataError("The datalist has no list under training, validation or test.", where=str(path))
    rows = []
    for split, items in lists.items():
        for item in items:
            item = {"image": item} if isinstance(item, str) else item
            if not isinstance(item, dict) or not isinstance(item.get("image"), str):
                raise DataError(
                    f"An entry under {split!r} is not of the form {{'image': path, 'label': ...}}.", where=str(path)
                )
            row = {str(k): "" if v is None else str(v) for k, v in item.items()}
            rows.append({**row, "split": split})
    return pd.DataFrame(rows, dtype=str).fillna("")


def _named_columns(table: pd.DataFrame, path: Path, label_columns: Sequence[str] | None) -> pd.DataFrame:
    lower = {str(c).lower(): c for c in table.columns}
    rows, missing = {}, []
    for name, accepted in NAMES.items():
        column = next((lower[a] for a in accepted if a in lower), None)
        if column is not None:
            rows[name] = table[column]
        elif name == "path" or (name == "label" and label_columns is None):
            missing.append(name)
        else:
            rows[name] = pd.Series("", index=table.index, dtype="str")
    for name in label_columns or ():
        if name in table:
            rows[name] = table[name]
        else:
            missing.append(name)
    if missing:
        raise DataError(
            f"The table lacks the columns {', '.join(missing)}.",
            where=str(path),
            fix=f"Columns found: {', '.join(map(str, table.columns))}.",
        )
    if label_columns and (clash := set(label_columns) & set(NAMES) - {"label"}):
        raise DataError(f"{sorted(clash)[0]!r} cannot be a label column: it has a meaning of its own.", where=str(path))
    frame = pd.DataFrame(rows)
    paths = [p.strip().replace("\\", "/") for p in frame["path"]]
    frame["path"] = [posixpath.normpath(p) if p else "" for p in paths]
    return frame


def _splits(column: pd.Series, path: Path) -> list[str]:
    splits = []
    for row, value in enumerate(column):
        key = value.strip().lower()
        if key not in SPLITS:
            raise DataError(
                f"row {row + 2} has the split {value!r}.", where=str(path), fix=nearest(key, ("train", "val", "test"))
            )
        splits.append(SPLITS[key])
    return splits


def _complete(rows: pd.DataFrame, labels: Sequence[str], findings: Findings) -> pd.DataFrame:
    """Leaves out rows without a path or a label."""
    no_path = rows["path"] == ""
    findings.unusable += [Unusable("", f"row {row + 2} has no path") for row in rows.index[no_path]]
    no_label = (rows[list(labels)].apply(lambda c: c.str.strip()) == "").any(axis=1) & ~no_path
    findings.unusable += [Unusable("", "the row has no label", name) for name in rows["path"][no_label]]
    return rows[~(no_path | no_label)]


def _once(rows: pd.DataFrame, findings: Findings) -> pd.DataFrame:
    """Merges identical rows of one file and frame, and leaves contradictory ones out."""
    key = ["path", "frame"]
    unique = rows.drop_duplicates()
    clash = unique.duplicated(key, keep=False)
    if len(unique) < len(rows):
        findings.notes.append(f"{len(rows) - len(unique)} repeated rows dropped (identical)")
    for name in unique.loc[clash, "path"].unique():
        findings.unusable.append(Unusable("", "rows of this file contradict each other", str(name)))
    return unique[~clash].copy()


def _labels(rows: pd.DataFrame, options: Options, findings: Findings, path: Path) -> tuple[Task, np.ndarray]:
    if options.label_columns is not None:
        values = rows[options.label_columns].apply(pd.to_numeric, errors="coerce").to_numpy(dtype=np.float32)
        bad = ~np.isin(values, (0, 1))
        if bad.any():
            row, column = np.argwhere(bad)[0]
            name = options.label_columns[column]
            raise DataError(
                f"row {rows.index[row] + 2} has {rows[name].iloc[row]!r} in column {name!r}; 0 or 1 is expected.",
                where=str(path),
            )
        return Task("multilabel", tuple(options.label_columns)), values
    text = pd.Series([v.strip() for v in rows["label"]], index=rows.index)
    classes = options.classes or natural_order(text)
    if options.classes is None:
        findings.notes.append(f"classes taken from the labels: {', '.join(classes)} (fix them with options.classes)")
        if odd := [c for c in classes if c in MISSING]:
            findings.notes.append(f"{', '.join(odd)} counts as a class of its own, not as a missing label")
    # Rows that were left out keep their place in the count, so that the message names the row of the file.
    every = text.reindex(range(rows.index.max() + 1), fill_value=classes[0])
    return Task("multiclass", tuple(classes)), class_index(list(every), classes, str(path))[rows.index.to_numpy()]


def _frames(column: pd.Series, path: Path) -> list[int | None]:
    frames: list[int | None] = []
    for row, value in zip(column.index, column):
        text = value.strip()
        if text and not re.fullmatch("[0-9]{1,9}", text):
            raise DataError(f"row {row + 2} has the frame {value[:40]!r}; a whole number is expected.", where=str(path))
        frames.append(int(text) if text else None)
    return frames
