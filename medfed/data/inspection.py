"""What a cohort holds, and what is wrong with it, before a run."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from medfed.data.cohort import Cohort, Findings, Unusable
from medfed.data.decode import DecodeOptions, Undecodable, decode
from medfed.data.duplicates import difference_hash, exact_duplicates, near_duplicates, thumbnail
from medfed.data.header_index import index_headers
from medfed.data.sheet import Pipeline, picture_sheet, plain_pipeline
from medfed.data.splits import straddling_patients
from medfed.seeding import numpy_generator
from medfed.spreadsheet import inert_table

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import Console

# A slice whose values vary less than this share of their range shows nothing.
BLANK_DEVIATION = 0.01
IMBALANCE = 20.0
PAIR_COLUMNS = (
    "kind", "sample_a", "sample_b", "label_a", "label_b", "split_a", "split_b", "patient_a", "patient_b",
)  # fmt: skip

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Problem:
    """One thing to look at: an ``error`` spoils the results of a run, a ``warning`` may."""

    severity: Literal["error", "warning"]
    text: str


@dataclass(frozen=True)
class Inspection:
    """What was found.

    Args:
        cohort: what was inspected; its findings include the files found unusable here.
        counts: samples per ``class``, ``split`` and ``client``.
        sizes: files by height x width.
        modalities: files by DICOM modality, or format.
        photometrics: DICOM files by photometric interpretation.
        duplicates: pairs of equal (``exact``) or nearly equal (``near``) images, columns ``PAIR_COLUMNS``.
        straddling: patients in several splits, see :func:`medfed.data.splits.straddling_patients`.
        blank: samples that show next to nothing.
        decoded: how many samples were decoded.
        problems: what to look at, errors first.
        sheet: the picture sheet.
    """

    cohort: Cohort
    counts: pd.DataFrame
    sizes: Counter[str]
    modalities: Counter[str]
    photometrics: Counter[str]
    duplicates: pd.DataFrame
    straddling: pd.DataFrame
    blank: list[str]
    decoded: int
    problems: list[Problem] = field(default_factory=list)
    sheet: Image | None = None

    @property
    def usable(self) -> bool:
        """Whether no problem is an error."""
        return all(p.severity != "error" for p in self.problems)

    def summary(self) -> dict[str, Any]:
        """All numbers as plain values, without ids or paths."""
        per_patient = self.cohort.table.groupby("patient").size()
        spread = per_patient if len(per_patient) else pd.Series([0])
        reasons = Counter(u.reason for u in self.cohort.findings.unusable)
        kinds = self.duplicates["kind"].value_counts()
        return {
            "name": self.cohort.name,
            "task": self.cohort.task.kind,
            "classes": list(self.cohort.task.classes),
            "samples": len(self.cohort),
            "decoded": self.decoded,
            "patients": len(per_patient),
            "samples_per_patient": {
                "min": int(spread.min()),
                "median": float(spread.median()),
                "max": int(spread.max()),
            },
            "counts": self.counts.to_dict("records"),
            "sizes": dict(self.sizes.most_common()),
            "modalities": dict(self.modalities.most_common()),
            "photometrics": dict(self.photometrics.most_common()),
            "unusable": dict(reasons.most_common()),
            "corrections": dict(sorted(self.cohort.findings.corrections.items())),
            "duplicates": {str(k): int(v) for k, v in kinds.items()},
            "straddling_patients": len(self.straddling),
            "blank": len(self.blank),
            "notes": list(self.cohort.findings.notes),
            "problems": [{"severity": p.severity, "text": p.text} for p in self.problems],
        }

    def write(self, out: Path) -> None:
        """Writes ``summary.json``, ``unusable.csv``, ``duplicates.csv``, ``straddling.csv`` and ``sheet.png``.

        The tables hold paths and ids: they are for the eyes of this site.
        """
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.summary(), indent=2, ensure_ascii=False)
        (out / "summary.json").write_text(text + "\n", encoding="utf-8")
        rows = [(u.path, u.reason, u.sample) for u in self.cohort.findings.unusable]
        tables = {
            "unusable.csv": pd.DataFrame(rows, columns=["path", "reason", "sample"]),
            "duplicates.csv": self.duplicates,
            "straddling.csv": self.straddling,
        }
        for name, table in tables.items():
            inert_table(table).to_csv(out / name, index=False)
        if self.sheet is not None:
            self.sheet.save(out / "sheet.png")

    def render(self, console: Console) -> None:
        """Prints tables and problems."""
        from rich.table import Table

        summary = self.summary()
        splits = list(dict.fromkeys(self.counts["split"]))
        table = Table("class", title=f"{self.cohort.name}: samples", title_justify="left")
        for split in splits:
            table.add_column(split or "no split", justify="right")
        for name in self.cohort.task.classes:
            rows = self.counts[self.counts["class"] == name]
            table.add_row(name, *(f"{rows.loc[rows['split'] == s, 'samples'].sum():,}" for s in splits))
        console.print(table)
        facts = Table(show_header=False, title="what was found", title_justify="left")
        spread = summary["samples_per_patient"]
        facts.add_row("samples", f"{summary['samples']:,} ({self.decoded:,} of them decoded)")
        each = f"{spread['min']} to {spread['max']}, median {spread['median']:g}"
        facts.add_row("patients", f"{summary['patients']:,} ({each} samples each)")
        for title, key in (
            ("sizes", "sizes"), ("modalities", "modalities"), ("photometric", "photometrics"),
            ("corrections", "corrections"), ("unusable", "unusable"), ("duplicates", "duplicates"),
        ):  # fmt: skip
            if summary[key]:
                items = list(summary[key].items())
                more = f" and {len(items) - 6} more" if len(items) > 6 else ""
                facts.add_row(title, ", ".join(f"{k} {n:,}x" for k, n in items[:6]) + more)
        console.print(facts)
        for note in summary["notes"]:
            console.print(f"note: {note}", markup=False)
        for problem in self.problems:
            style = "bold red" if problem.severity == "error" else "yellow"
            console.print(f"{problem.severity}: {problem.text}", style=style, markup=False)


def inspect_cohort(
    cohort: Cohort,
    *,
    pipeline: Pipeline | None = None,
    corrupted: Pipeline | None = None,
    out: Path | None = None,
    max_decode: int | None = None,
    decode_options: DecodeOptions | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Inspects a cohort: counts, files, duplicates, patients, and a picture sheet.

    Args:
        cohort: what a reader found; it is not changed.
        pipeline: file and frame to what the network sees, float32 ``[C, h, w]`` in 0..1, for the picture sheet.
        corrupted: the same with corruption, drawn under the clean samples.
        out: folder for the tables and the sheet.
        max_decode: decode so many samples at most, drawn at random; default all.
        decode_options: those of the run, so that corrections are counted as they will be made.
        cache: folder of the header index; default the user's cache folder.
        progress: called with (what, done, total).

    Returns:
        The inspection.
    """
    headers = index_headers(
        list(dict.fromkeys(cohort.table["path"])),
        cache=cache,
        name=f"inspect {cohort.name}",
        progress=None if progress is None else lambda done, total: progress("headers", done, total),
    ).set_index("path")
    broken = headers["reason"].to_dict()
    usable_rows = np.flatnonzero([not broken[p] for p in cohort.table["path"]])
    rows = usable_rows
    if max_decode is not None and max_decode < len(rows):
        rows = np.sort(numpy_generator(0, "inspection").choice(rows, max_decode, replace=False))
    looks = _look_at(cohort, rows, decode_options, progress)
    findings = _extended(cohort, {p: r for p, r in broken.items() if r}, looks)
    seen = [look for look in looks if not look.reason]
    blank = [cohort.table["sample"].iloc[look.row] for look in seen if look.blank]
    windows = {look.row for look in seen if look.hounsfield}
    cohort = replace(cohort, findings=findings)
    good = np.array([look.row for look in seen], dtype=int)
    sheet, faults = picture_sheet(cohort, good, pipeline or plain_pipeline, corrupted, windows=windows)
    fine = headers[headers["reason"] == ""]
    inspection = Inspection(
        cohort=cohort,
        counts=_counts(cohort),
        sizes=Counter(f"{h}x{w}" for h, w in zip(fine["height"], fine["width"])),
        modalities=Counter(m or kind for m, kind in zip(fine["modality"], fine["kind"])),
        photometrics=Counter(p for p in fine["photometric"] if p),
        duplicates=_duplicates(cohort, seen),
        straddling=straddling_patients(cohort),
        blank=blank,
        decoded=len(seen),
        sheet=sheet,
    )
    inspection = replace(inspection, problems=_problems(inspection, faults))
    if out is not None:
        inspection.write(out)
    return inspection


@dataclass(frozen=True)
class _Look:
    """What one decoded sample showed."""

    row: int
    reason: str = ""
    corrections: tuple[str, ...] = ()
    hounsfield: bool = False
    blank: bool = False
    hash: int = 0
    thumbnail: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))


def _look_at(cohort: Cohort, rows: np.ndarray, options: DecodeOptions | None, progress: Progress | None) -> list[_Look]:
    paths, frames = cohort.table["path"], cohort.table["frame"]
    looks: list[_Look] = []
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        # In batches, so that results do not wait in memory for a caller that is slow.
        for batch in np.array_split(rows, max(len(rows) // 256, 1)):
            looks += pool.map(lambda r: _look(int(r), Path(paths.iloc[r]), int(frames.iloc[r]), options), batch)
            if progress:
                progress("images", len(looks), len(rows))
    return looks


def _look(row: int, path: Path, frame: int, options: DecodeOptions | None) -> _Look:
    try:
        decoded = decode(path, frame, options)
    except Undecodable as error:
        return _Look(row, reason=error.reason)
    hounsfield = decoded.kind == "hounsfield"
    low, high = (-100.0, 300.0) if hounsfield else decoded.value_range
    grey = np.clip(decoded.pixels.mean(axis=0), low, high)
    blank = float(grey.std()) < BLANK_DEVIATION * (high - low)
    return _Look(row, "", decoded.corrections, hounsfield, blank, difference_hash(grey), thumbnail(grey))


def _extended(cohort: Cohort, broken: dict[str, str], looks: list[_Look]) -> Findings:
    """The reader's findings and those made here."""
    old = cohort.findings
    table = cohort.table
    bad = table[table["path"].isin(broken)]
    unusable = [Unusable(p, broken[p], s) for p, s in zip(bad["path"], bad["sample"])]
    found = Findings(list(old.unusable) + unusable, dict(old.corrections), list(old.notes))
    for look in looks:
        if look.reason:
            row = table.iloc[look.row]
            found.unusable.append(Unusable(row["path"], look.reason, row["sample"]))
        for name in look.corrections:
            found.count(name)
    return found


def _counts(cohort: Cohort) -> pd.DataFrame:
    parts = []
    for k, name in enumerate(cohort.task.classes):
        member = cohort.labels[:, k] > 0 if cohort.labels.ndim == 2 else cohort.labels == k
        sizes = cohort.table[member].groupby(["split", "client"]).size().rename("samples").reset_index()
        parts.append(sizes.assign(**{"class": name}))
    return pd.concat(parts, ignore_index=True)[["class", "split", "client", "samples"]]


def label_texts(cohort: Cohort) -> list[str]:
    """The label of each sample as text; several labels joined by ``+``."""
    classes = cohort.task.classes
    if cohort.task.kind == "multiclass":
        return [classes[k] for k in cohort.labels]
    return ["+".join(c for c, v in zip(classes, row) if v) for row in cohort.labels]


def _duplicates(cohort: Cohort, seen: list[_Look]) -> pd.DataFrame:
    """Pairs; exact ones are named against the first of their group, near ones within a patient are left out."""
    table = cohort.table
    twins = exact_duplicates(list(table["path"]))
    first: dict[tuple[int, int], int] = {}
    group: dict[int, tuple[int, int]] = {}
    pairs: list[tuple[str, int, int]] = []
    for row, (path, frame) in enumerate(zip(table["path"], table["frame"])):
        if path in twins:
            group[row] = key = (twins[path], int(frame))
            if key in first:
                pairs.append(("exact", first[key], row))
            else:
                first[key] = row
    clear = [look for look in seen if not look.blank]
    if clear:
        hashes = np.array([look.hash for look in clear], dtype=np.uint64)
        patients = table["patient"].to_numpy()
        for i, j in near_duplicates(hashes, np.stack([look.thumbnail for look in clear])):
            a, b = clear[i].row, clear[j].row
            same_bytes = a in group and group[a] == group.get(b)
            if not same_bytes and patients[a] != patients[b]:
                pairs.append(("near", a, b))
    labels = label_texts(cohort)
    rows = [
        (kind, *(column[r] for column in (table["sample"], labels, table["split"], table["patient"]) for r in (a, b)))
        for kind, a, b in pairs
    ]
    return pd.DataFrame(rows, columns=list(PAIR_COLUMNS))


def _problems(found: Inspection, faults: list[str]) -> list[Problem]:
    """What to look at, errors first."""
    cohort, pairs = found.cohort, found.duplicates
    errors: list[str] = []
    warnings = list(faults)
    if not found.decoded:
        errors.append("none of the samples can be decoded" if len(cohort) else "there is no sample")
    train = cohort.table["split"] != "test"
    counts = cohort.class_counts()
    in_train = cohort.select(train.to_numpy()).class_counts()
    for name, total, here in zip(cohort.task.classes, counts, in_train):
        if not total:
            warnings.append(f"the class {name!r} has no sample")
        elif not here:
            errors.append(f"the class {name!r} occurs in test alone")
    if (counts > 0).sum() == 1 and cohort.task.kind == "multiclass":
        errors.append("there is one class only, so that nothing can be learnt")
    if len(found.straddling):
        errors.append(f"{len(found.straddling)} patients lie in several splits (straddling.csv)")
    across = (pairs["split_a"] != pairs["split_b"]) & (pairs["split_a"] != "") & (pairs["split_b"] != "")
    other_label = pairs["label_a"] != pairs["label_b"]
    for kind, what, severity in (("exact", "identical", errors), ("near", "nearly identical", warnings)):
        of_kind = pairs["kind"] == kind
        if n := int((of_kind & across).sum()):
            severity.append(f"{n} pairs of {what} images lie across splits (duplicates.csv)")
        if n := int((of_kind & other_label).sum()):
            warnings.append(f"{n} pairs of {what} images have different labels (duplicates.csv)")
        if n := int((of_kind & (pairs["patient_a"] != pairs["patient_b"])).sum()):
            warnings.append(f"{n} pairs of {what} images are filed under different patients (duplicates.csv)")
        if n := int((of_kind & ~across & ~other_label & (pairs["patient_a"] == pairs["patient_b"])).sum()):
            warnings.append(f"{n} further pairs of {what} images (duplicates.csv)")
    present = counts[counts > 0]
    if len(present) > 1 and present.max() > IMBALANCE * present.min():
        warnings.append(f"the largest class is {present.max() / present.min():.0f} times the smallest")
    if unusable := len(cohort.findings.unusable):
        warnings.append(f"{unusable} files or rows cannot be used (unusable.csv)")
    if found.blank:
        warnings.append(f"{len(found.blank)} samples show next to nothing (constant or nearly so)")
    if wrapped := cohort.findings.corrections.get("rsna_12bit_wrap_suspected"):
        warnings.append(f"{wrapped} CT slices may have wrapped at 12 bits; look at them and consider fix_12bit_wrap")
    if len(cohort) > 1 and cohort.table["patient"].nunique() == 1:
        warnings.append("all samples carry one patient id")
    return [Problem("error", e) for e in errors] + [Problem("warning", w) for w in warnings]
