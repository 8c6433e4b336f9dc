"""Train and test parts that keep each patient on one side."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from medfed.data.cohort import Cohort
from medfed.errors import DataError
from medfed.seeding import numpy_generator


def split_cohort(
    cohort: Cohort, test_fraction: float = 0.2, seed: int = 0, group: bool = True, stratify: bool = True
) -> Cohort:
    """Fills the split column, grouped by patient and stratified by class as well as whole patients allow.

    Splits that the layout gives stay.  Where it marks test samples, the undecided ones follow their patient, and
    become train otherwise.  Where it marks none, a test part is drawn from the undecided samples, or from train when
    there are none; ``val`` is left alone.

    Patients are taken one after another, largest first (equal ones in random order), and each goes where the class
    counts come closest to the wanted fraction: the greedy rule of scikit-learn's ``StratifiedGroupKFold``.

    Args:
        cohort: the samples.
        test_fraction: wanted share of test samples, between 0 and 1.
        seed: of the random order.
        group: keep patients together; otherwise each sample is on its own.
        stratify: balance every class; otherwise the number of samples alone.

    Returns:
        The same samples with every split filled.

    Raises:
        DataError: fewer patients than ``1 / test_fraction`` folds, so that no part of that size can be cut.
        ValueError: a fraction outside (0, 1).
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must lie between 0 and 1, not {test_fraction}")
    split = cohort.table["split"].to_numpy(dtype=object).copy()
    patient = cohort.table["patient"] if group else cohort.table["sample"]
    if (split == "test").any():
        held_out = set(patient[split == "test"])
        undecided = split == ""
        split[undecided] = ["test" if p in held_out else "train" for p in patient[undecided]]
    else:
        pool = np.flatnonzero(split == "" if (split == "").any() else split == "train")
        codes = pd.factorize(patient.iloc[pool])[0]
        weights = _targets(cohort)[pool] if stratify else np.ones((len(pool), 1))
        folds = math.floor(1 / min(test_fraction, 1 - test_fraction) + 1e-9)
        groups = int(codes.max(initial=-1)) + 1
        if groups < folds:
            raise DataError(
                f"{groups} {'patients' if group else 'samples'} are too few to set apart a test part of "
                f"{test_fraction:g}.",
                where=cohort.name,
                fix="Choose a larger test fraction (condition.test_fraction), or mark the test samples in the data.",
            )
        test = _greedy(codes, weights, test_fraction, numpy_generator(seed, "test split"))
        split[pool] = np.where(test, "test", "train")
    return replace(cohort, table=cohort.table.assign(split=pd.array(split, dtype="str")))


def validation_part(
    labels: np.ndarray,
    groups: np.ndarray | None,
    num_classes: int,
    fraction: float,
    generator: np.random.Generator,
) -> np.ndarray:
    """Which samples of one client are set apart to validate on, by the rule of :func:`split_cohort`.

    Patients stay whole where there are two or more of them; otherwise each sample is on its own.

    Args:
        labels: class indices ``[N]``, or zeros and ones ``[N, C]``.
        groups: the patient of each sample ``[N]``, as numbers; None where that is not known.
        num_classes: number of classes C.
        fraction: wanted share, between 0 and 1/2.
        generator: decides between patients of equal size.

    Returns:
        ``[N]``, true for the samples set apart: at least one, and at least one is left. All false where there are
        fewer than two samples.
    """
    if not 0 < fraction <= 0.5:
        raise ValueError(f"the fraction must lie between 0 and 1/2, not {fraction}")
    if len(labels) < 2:
        return np.zeros(len(labels), dtype=bool)
    codes = np.arange(len(labels)) if groups is None else np.unique(groups, return_inverse=True)[1].reshape(-1)
    if codes.max() == 0:
        codes = np.arange(len(labels))
    return _greedy(codes, _membership(labels, num_classes), fraction, generator)


def unite_patients(cohort: Cohort, identical: Sequence[Hashable]) -> tuple[Cohort, int, int]:
    """Makes one patient of those who share an identical picture, directly or through others.

    Public sets file the same picture under several patient ids (13 pairs in the OCT test set of Kermany et al.), so
    that a split by patient alone would leave it on both sides.

    Args:
        cohort: the samples.
        identical: one value a sample, equal where the pictures are; None where nothing may be concluded (a black
            slice is the same for everybody).

    Returns:
        The cohort, where a group carries the id of its first patient in text order; the number of patients who
        shared a picture, and how many they count as now.
    """
    patients = cohort.table["patient"].tolist()
    leader: dict[str, str] = {}

    def find(patient: str) -> str:
        while (above := leader.get(patient, patient)) != patient:
            leader[patient] = leader.get(above, above)
            patient = above
        return patient

    first: dict[Hashable, str] = {}
    for patient, picture in zip(patients, identical):
        if picture is None:
            continue
        a, b = find(patient), find(first.setdefault(picture, patient))
        if a != b:
            leader[max(a, b)] = min(a, b)
    led = {patient: find(patient) for patient in set(patients)}
    groups = {one for patient, one in led.items() if patient != one}
    united = sum(one in groups for one in led.values())
    table = cohort.table.assign(patient=pd.array([led[p] for p in patients], dtype="str"))
    return replace(cohort, table=table), united, len(groups)


def straddling_patients(cohort: Cohort) -> pd.DataFrame:
    """Patients whose samples lie in more than one split.

    Returns:
        One row a patient with ``patient``, ``splits`` (joined by ``+``) and ``samples``; empty splits do not count.
    """
    known = cohort.table[cohort.table["split"] != ""]
    parts = known.groupby("patient")["split"].agg(splits=lambda s: "+".join(sorted(set(s))), samples="size")
    return parts[parts["splits"].str.contains("+", regex=False)].reset_index()


def _targets(cohort: Cohort) -> np.ndarray:
    return _membership(cohort.labels, cohort.task.num_classes)


def _membership(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Class membership ``[N, C]``; multi-label rows without any positive get a column of their own."""
    if labels.ndim == 1:
        return np.eye(num_classes)[labels]
    return np.column_stack([labels, labels.sum(axis=1) == 0]).astype(float)


def _greedy(codes: np.ndarray, targets: np.ndarray, fraction: float, generator: np.random.Generator) -> np.ndarray:
    """Which samples ``[N]`` go to test; ``codes`` ``[N]`` are the groups, ``targets`` ``[N, C]`` what is balanced."""
    groups = int(codes.max()) + 1
    counts = np.stack([np.bincount(codes, t, groups) for t in targets.T], axis=1)
    # A rare class counts as much as a frequent one.
    counts = counts / np.maximum(counts.sum(axis=0), 1)
    order = generator.permutation(groups)
    order = order[np.argsort(-counts[order].sum(axis=1), kind="stable")]
    excess = np.zeros(counts.shape[1])
    chosen = np.zeros(groups, dtype=bool)
    for g in order:
        to_test, to_train = excess + (1 - fraction) * counts[g], excess - fraction * counts[g]
        chosen[g] = to_test @ to_test < to_train @ to_train
        excess = to_test if chosen[g] else to_train
    if not chosen.any():
        # Fractions below half a group: the smallest group is the closest there is.
        chosen[order[-1]] = True
    return chosen[codes]
