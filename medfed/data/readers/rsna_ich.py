"""RSNA 2019 intracranial haemorrhage: head CT slices with six labels a slice.

Layouts: the Kaggle archive (``stage_2_train/ID_x.dcm`` with ``stage_2_train.csv``), its first stage
(``stage_1_train_images/``, ``stage_1_train.csv``), copies nested in further folders, and derived folders of PNG or
JPEG files with the same stems.  The table has ``ID,Label`` with six rows a slice (``ID_x_epidural,0``).

Patients stand in the DICOM headers alone; several studies may belong to one patient.  Source of the data:
Flanders et al., Radiology: AI 2020.  The single-label five-class task and its class order are those of
FedISM (Wu et al., IJCAI 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel, Field

from medfed.data.cohort import Cohort, Findings, Task, Unusable
from medfed.data.readers.common import (
    Progress,
    build_cohort,
    group_or_self,
    header_of,
    match_files,
    read_table,
    require_columns,
)
from medfed.data.readers.scan import Scan, scan, stem_of
from medfed.errors import DataError, nearest
from medfed.seeding import numpy_generator

SUBTYPES = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")
OUTPUTS = (*SUBTYPES, "any")


class Options(BaseModel, extra="forbid"):
    """Options of the RSNA reader.

    Args:
        task: ``subtype`` keeps slices with exactly one subtype (five classes); ``multilabel`` keeps all slices with
            six outputs, the last of which is ``any``.
        labels: the label table, where it is not found by itself.
        images: the image folder, where it is not below the root.
        subset: so many slices, drawn at random in the proportions of the classes (at least one a class).
        seed: of the subset.
        id_list: a text or CSV file with ids in its first column (or a column ``ID``/``image``); only these are read.
        group: patients from the headers, or every slice for itself (where the headers are lost or too slow).
        cache: folder of the header index; default the user's cache folder.
        threads: headers read at the same time.
    """

    task: Literal["subtype", "multilabel"] = "subtype"
    labels: Path | None = None
    images: Path | None = None
    subset: int | None = Field(None, ge=1)
    seed: int = 0
    id_list: Path | None = None
    group: Literal["patient", "slice"] = "patient"
    cache: Path | None = None
    threads: int = Field(8, ge=1)

    @property
    def kind(self) -> str:
        """Kind of the labels, before any is read."""
        return "multilabel" if self.task == "multilabel" else "multiclass"


def read(root: Path, options: Options, progress: Progress | None = None) -> Cohort:
    """Reads RSNA ICH.

    Args:
        root: the folder with the label table and the images, at any depth.
        options: see :class:`Options`.
        progress: called with (headers read, headers to read).

    Raises:
        DataError: no label table, no images, a table of another kind, or no usable slice.
    """
    findings = Findings()
    files = scan(root)
    table_path = options.labels or _find_table(files)
    ids, labels = read_labels(table_path, findings)
    images = files if options.images is None else scan(options.images)
    if not images.images:
        raise DataError("There are no images.", where=str(images.root), fix=images.found())
    for one in {id(s): s for s in (files, images)}.values():
        one.report(findings)
    keep = _listed(ids, options.id_list, findings)
    found = match_files(
        list(ids[keep]), images.images, findings, _expected_extra(images, set(ids), options.id_list is not None)
    )
    keep &= np.fromiter((i in found for i in ids), bool, len(ids))
    if options.task == "subtype":
        keep &= _one_subtype(labels, keep, findings)
    ids, labels = ids[keep], labels[keep]
    if options.subset is not None and options.subset < len(ids):
        rows = _subset(labels[:, :5] @ (2 ** np.arange(5)), options.subset, options.seed)
        findings.notes.append(f"a random subset of {len(rows)} of {len(ids)} slices, in class proportion")
        ids, labels = ids[rows], labels[rows]
    paths = [found[i] for i in ids]
    usable, patients = _patients(paths, ids, str(images.root), options, findings, progress)
    ids, labels = ids[usable], labels[usable]
    if options.task == "subtype":
        task, target = Task("multiclass", SUBTYPES), labels[:, :5].argmax(axis=1).astype(np.int64)
    else:
        task, target = Task("multilabel", OUTPUTS), labels.astype(np.float32)
    columns = {"sample": list(ids), "path": [str(p) for p, ok in zip(paths, usable) if ok], "patient": patients}
    return build_cohort("rsna_ich", task, target, findings, columns)


def read_labels(path: Path, findings: Findings) -> tuple[np.ndarray, np.ndarray]:
    """Reads the ``ID,Label`` table.

    Args:
        path: the CSV file.
        findings: gets duplicated, contradictory and incomplete ids.

    Returns:
        Ids ``[N]`` (text, in the order of the table) and labels ``[N, 6]`` of 0 and 1 in the order of ``OUTPUTS``.

    Raises:
        DataError: other columns, an unknown subtype, or labels other than 0 and 1.
    """
    table = read_table(path)
    require_columns(table, ("ID", "Label"), path)
    value = pd.to_numeric(table["Label"], errors="coerce").to_numpy()
    if (value == 0.5).any():
        raise DataError(
            "The labels are 0.5: this is the sample submission of the test set, which has no labels.",
            where=str(path),
            fix="Use stage_2_train.csv.",
        )
    bad = ~np.isin(value, (0, 1))
    if bad.any():
        row = int(np.argmax(bad))
        raise DataError(f"row {row + 2} has the label {table['Label'][row]!r}; 0 or 1 is expected.", where=str(path))
    image, output = _split_ids(table["ID"], path)
    codes, ids = pd.factorize(image)
    cells = pd.DataFrame({"image": codes, "output": output, "value": value.astype(np.int8)})
    repeated = cells.duplicated(["image", "output"], keep=False)
    cells = cells.drop_duplicates()
    clash = cells.loc[cells.duplicated(["image", "output"], keep=False), "image"].unique()
    merged = cells.loc[cells["image"].isin(codes[repeated.to_numpy()]), "image"].nunique() - len(clash)
    if merged:
        findings.notes.append(f"{merged} duplicated ids dropped ({int(repeated.sum())} rows take part)")
    wide = np.full((len(ids), len(OUTPUTS)), -1, np.int8)
    wide[cells["image"], cells["output"]] = cells["value"]
    contradictory = np.zeros(len(ids), bool)
    contradictory[clash] = True
    incomplete = (wide < 0).any(axis=1) & ~contradictory
    ids = np.asarray(ids, dtype=object)
    findings.unusable += [Unusable("", "label rows contradict each other", i) for i in ids[contradictory]]
    findings.unusable += [Unusable("", "fewer than six label rows", i) for i in ids[incomplete]]
    good = ~(contradictory | incomplete)
    ids, wide = ids[good], wide[good]
    odd = int((wide[:, 5] != wide[:, :5].max(axis=1, initial=0)).sum())
    if odd:
        findings.notes.append(f"{odd} slices where 'any' disagrees with the five subtypes (labels kept as given)")
    return ids, wide


def _split_ids(column: pd.Series, path: Path) -> tuple[pd.Series, np.ndarray]:
    """Cuts ``ID_x_subtype`` into the image id and the index of the output."""
    image, output = column.copy(), np.full(len(column), -1, np.int8)
    for k, name in enumerate(OUTPUTS):
        rows = column.str.endswith(f"_{name}").to_numpy(dtype=bool)
        image[rows] = column[rows].str.slice(0, -len(name) - 1)
        output[rows] = k
    if (output < 0).any():
        row = int(np.argmax(output < 0))
        name = column[row].rpartition("_")[2]
        raise DataError(
            f"row {row + 2} has the id {column[row]!r}, which does not end in a subtype.",
            where=str(path),
            fix=nearest(name, OUTPUTS),
        )
    return image, output


def _find_table(files: Scan) -> Path:
    tables = [p for p in files.others if p.suffix.lower() == ".csv" and {"ID", "Label"} <= set(header_of(p))]
    train = [p for p in tables if "sample_submission" not in p.name]
    for stage in ("stage_2", "stage_1", ""):
        for path in train:
            if stage in path.name:
                return path
    if tables:
        raise DataError(
            "There is only the sample submission, which has no labels.",
            where=str(tables[0]),
            fix="Put stage_2_train.csv beside it or name it under options.labels.",
        )
    raise DataError(
        "No label table was found; stage_2_train.csv with the columns ID,Label is expected.",
        where=str(files.root),
        fix=files.found(),
    )


def _listed(ids: np.ndarray, id_list: Path | None, findings: Findings) -> np.ndarray:
    if id_list is None:
        return np.ones(len(ids), bool)
    table = read_table(id_list)
    column = next((c for c in table.columns if c.lower() in ("id", "image", "image_id")), None)
    if column is None:
        # A plain list has no header: its first line is an id as well.
        values = [str(table.columns[0]), *table.iloc[:, 0]]
    else:
        values = list(table[column])
    wanted = {stem_of(v.strip()) for v in values if v.strip()}
    unknown = sorted(wanted - set(ids))
    findings.unusable += [Unusable("", "id of the list without a label row", i) for i in unknown]
    keep = np.fromiter((i in wanted for i in ids), bool, len(ids))
    findings.notes.append(f"{int(keep.sum())} of {len(ids)} slices are in {id_list.name}; {len(unknown)} unknown ids")
    return keep


def _expected_extra(images: Scan, labelled: set[str], listed: bool) -> Callable[[Path], bool]:
    def expected(path: Path) -> bool:
        folders = images.relative(path).lower().split("/")[:-1]
        in_test = any("test" in part for part in folders)
        return in_test or (listed and stem_of(path.name) in labelled)

    return expected


def _one_subtype(labels: np.ndarray, considered: np.ndarray, findings: Findings) -> np.ndarray:
    count = labels[:, :5].sum(axis=1)
    none, several = int((considered & (count == 0)).sum()), int((considered & (count > 1)).sum())
    findings.notes.append(
        f"task subtype: {none} slices without haemorrhage and {several} slices with several subtypes left out"
    )
    return count == 1


def _subset(strata: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Rows of a random subset, each stratum by its share (largest remainder) and at least once where it fits."""
    kinds, inverse, counts = np.unique(strata, return_inverse=True, return_counts=True)
    exact = counts * size / counts.sum()
    take = np.maximum(np.floor(exact).astype(int), 1)
    order = np.argsort(np.floor(exact) - exact, kind="stable")
    for k in np.resize(order, 2 * len(order)):
        take[k] += int(take.sum() < size and take[k] < counts[k])
    while take.sum() > size:
        take[np.argmax(take)] -= 1
    generator = numpy_generator(seed, "rsna subset")
    rows = [generator.permutation(np.flatnonzero(inverse == k))[: take[k]] for k in range(len(kinds))]
    return np.sort(np.concatenate(rows))


def _patients(
    paths: list[Path],
    ids: np.ndarray,
    index_name: str,
    options: Options,
    findings: Findings,
    progress: Progress | None,
) -> tuple[np.ndarray, list[str]]:
    if options.group == "slice":
        findings.notes.append("not grouped by patient, as asked: slices of one patient may lie on both sides")
        return np.ones(len(paths), bool), list(ids)
    from medfed.data.header_index import index_headers

    index = index_headers(paths, cache=options.cache, name=index_name, threads=options.threads, progress=progress)
    usable = (index["reason"] == "").to_numpy()
    for path, reason, sample in zip(index["path"][~usable], index["reason"][~usable], ids[~usable]):
        findings.unusable.append(Unusable(str(path), str(reason), str(sample)))
    index, kept = index[usable], list(ids[usable])
    study, _ = group_or_self(index["study_uid"], kept)
    patients, without_patient = group_or_self(index["patient_id"], study)
    if without_patient:
        by_study = without_patient - sum(p == s for p, s in zip(patients, kept))
        findings.notes.append(
            f"{without_patient} slices without a patient id: {by_study} grouped by study, "
            f"{without_patient - by_study} for themselves"
        )
    return usable, patients
