"""What the readers share: reading a table as text, matching ids with files, building the cohort."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import AfterValidator, Field

from medfed.data.cohort import COLUMNS, Cohort, Findings, Task, Unusable
from medfed.data.readers.scan import DICOM_SUFFIXES, stem_of, suffix_of
from medfed.errors import DataError, nearest

Progress = Callable[[int, int], None]


def _unique(names: list[str]) -> list[str]:
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ValueError(f"each name may occur once, but {', '.join(map(repr, twice))} is repeated")
    return names


Names = Annotated[list[str], Field(min_length=1), AfterValidator(_unique)]

SPLITS = {
    "": "", "train": "train", "training": "train", "test": "test", "testing": "test",
    "val": "val", "valid": "val", "validation": "val",
}  # fmt: skip
# Texts that mean "not given" in an id column.
MISSING = frozenset({"", "nan", "NaN", "NA", "N/A", "null", "None"})


def read_table(path: Path) -> pd.DataFrame:
    """Reads a CSV file with every value as text.

    Ids keep leading zeros and ``NA`` stays ``"NA"``.  A byte order mark, semicolons and tabs are accepted.

    Args:
        path: the file.

    Returns:
        The table; column names are stripped of blanks.

    Raises:
        DataError: the file is missing, empty, not text or not a table.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            header = file.readline()
        if not header.strip():
            raise DataError("The table is empty.", where=str(path), fix="Its first line must name the columns.")
        separator = max(",;\t", key=header.count)
        names = [n.strip() for n in next(csv.reader([header], delimiter=separator))]
        if twice := sorted({n for n in names if n and names.count(n) > 1}):
            raise DataError(f"The table has several columns named {', '.join(twice)}.", where=str(path))
        # The empty default keeps short rows as empty text rather than NaN; without further names pandas would take
        # the first columns of rows longer than the header for an index, and shift all others.
        names = [n or f"column {k + 1}" for k, n in enumerate(names)]
        further = [f"beyond column {len(names) + k}" for k in range(_width(path, separator) - len(names))]
        table = pd.read_csv(
            path,
            sep=separator,
            dtype=str,
            keep_default_na=False,
            encoding="utf-8-sig",
            header=0,
            names=names + further,
            index_col=False,
        ).fillna("")
    except OSError as error:
        raise DataError(f"The table cannot be read: {error.strerror}.", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise DataError("The table is not UTF-8 text.", where=str(path), fix="Save it as CSV UTF-8.") from error
    except (pd.errors.ParserError, csv.Error) as error:
        reason = str(error).strip().removeprefix("Error tokenizing data. C error: ")
        raise DataError(f"The table cannot be parsed: {reason}.", where=str(path)) from error
    if further and (overlong := (table[further] != "").any(axis=1)).any():
        raise DataError(
            f"row {int(overlong.argmax()) + 2} has more values than there are columns.",
            where=str(path),
            fix="Put values that hold the separator into quotes.",
        )
    return table[names]


def _width(path: Path, separator: str) -> int:
    """Number of values in the first row of a table that has any, header apart."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter=separator)
        next(rows, None)
        return len(next((row for row in rows if row), []))


def header_of(path: Path) -> list[str]:
    """The column names of a CSV file; empty where it is not text."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            line = file.readline(10_000)
    except (OSError, UnicodeDecodeError):
        return []
    return [name.strip().strip('"') for name in re.split(r"[,;\t]", line.strip())]


def require_columns(table: pd.DataFrame, needed: Iterable[str], where: Path) -> None:
    """Checks that a table has some columns.

    Raises:
        DataError: names the missing columns and those found.
    """
    missing = [name for name in needed if name not in table.columns]
    if missing:
        raise DataError(
            f"The table lacks the columns {', '.join(missing)}.",
            where=str(where),
            fix=f"Columns found: {', '.join(map(str, table.columns))}.",
        )


def drop_repeated(table: pd.DataFrame, key: str, findings: Findings, what: str) -> pd.DataFrame:
    """Drops repeated rows: identical ones are merged, contradictory ones left out altogether.

    Args:
        table: rows with an id.
        key: the id column.
        findings: gets a note on merged ids, and each contradictory id as unusable.
        what: what an id stands for, e.g. ``"image ids"``.
    """
    repeated = table.loc[table[key].duplicated(keep=False), key].unique()
    unique = table.drop_duplicates()
    again = unique.loc[unique[key].duplicated(keep=False), key].unique()
    merged = len(repeated) - len(again)
    if merged:
        findings.notes.append(f"{merged} duplicated {what} dropped (identical rows)")
    findings.unusable += [Unusable("", "rows of this id contradict each other", str(i)) for i in again]
    return unique[~unique[key].isin(again)].reset_index(drop=True)


def match_files(
    ids: Sequence[str], images: Sequence[Path], findings: Findings, expected_extra: Callable[[Path], bool]
) -> dict[str, Path]:
    """Finds the file of each id by its exact stem.

    Args:
        ids: ids of the label table.
        images: candidates.
        findings: gets ids without a file, files without an id, and a note on copies of a stem.
        expected_extra: true for files that need no row (e.g. in a test folder without labels); these are
            counted in a note.

    Returns:
        Id to file.  Of several files with one stem DICOM comes first, then the first by path.
    """
    wanted, extra = set(ids), []
    found: dict[str, Path] = {}
    copies = expected = 0
    for path in images:
        stem = stem_of(path.name)
        if stem not in wanted:
            if expected_extra(path):
                expected += 1
            else:
                extra.append(path)
        elif stem in found:
            copies += 1
            if suffix_of(path.name) in DICOM_SUFFIXES and suffix_of(found[stem].name) not in DICOM_SUFFIXES:
                found[stem] = path
        else:
            found[stem] = path
    missing = [i for i in ids if i not in found]
    findings.unusable += [Unusable("", "no file for this row of the label table", i) for i in missing]
    findings.unusable += [Unusable(str(p), "no row in the label table for this file") for p in extra]
    for count, text in (
        (len(missing), "label rows without a file"),
        (len(extra), "files without a label row"),
        (copies, "further copies of an image that was already found (same name) left out"),
        (expected, "files of an unlabelled test set left out"),
    ):
        if count:
            findings.notes.append(f"{count} {text}")
    return found


def class_index(labels: Sequence[str], classes: Sequence[str], where: str) -> np.ndarray:
    """Indices of text labels in the class map.

    Raises:
        DataError: names the first row (counted as in the file, the header is row 1) with a label outside the map.
    """
    index = {name: k for k, name in enumerate(classes)}
    codes = np.fromiter((index.get(v, -1) for v in labels), np.int64, len(labels))
    if (codes < 0).any():
        row = int(np.argmax(codes < 0))
        raise DataError(
            f"row {row + 2} has the label {labels[row]!r}, which is none of the classes.",
            where=where,
            fix=nearest(str(labels[row]), classes),
        )
    return codes


def natural_order(names: Iterable[str]) -> list[str]:
    """Class names sorted: by value where all are whole numbers (grades 0, 1, 2, 10), otherwise as text."""
    names = set(names)
    if all(re.fullmatch(r"-?\d+", n) for n in names):
        return sorted(names, key=lambda n: (int(n), n))
    return sorted(names)


def build_cohort(
    name: str, task: Task, labels: np.ndarray, findings: Findings, columns: Mapping[str, Sequence[Any]]
) -> Cohort:
    """Builds the cohort from columns; ``frame``, ``client`` and ``split`` may be left out.

    Raises:
        DataError: no sample is left; says the most frequent reasons.
    """
    count = len(labels)
    filled = {"frame": [0] * count, "client": [""] * count, "split": [""] * count, **columns}
    if not count:
        reasons = pd.Series([u.reason for u in findings.unusable], dtype=object).value_counts()
        said = "; ".join(f"{r} ({n}x)" for r, n in reasons.head(3).items())
        raise DataError("No usable sample is left.", where=name, fix=f"Reasons: {said}." if said else None)
    table = pd.DataFrame({c: filled[c] for c in COLUMNS})
    table = table.astype({c: ("int64" if c == "frame" else "str") for c in COLUMNS})
    return Cohort(task, table, labels, findings, name)


def group_or_self(groups: Iterable[str], samples: Sequence[str]) -> tuple[list[str], int]:
    """Group ids with the sample's own id where none is given, and how many had none."""
    given = [g.strip() for g in groups]
    return [s if g in MISSING else g for g, s in zip(given, samples)], sum(g in MISSING for g in given)
