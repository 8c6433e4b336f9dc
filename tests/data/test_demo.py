"""The demo cohorts: real files, read back by the real readers, learnable and not trivial."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pydicom import dcmread
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from medfed.data.cohort import Cohort
from medfed.data.decode import decode
from medfed.data.demo import SLICES, make_demo_cohort
from medfed.data.readers import get_reader
from medfed.errors import ConfigError, DataError

PATIENTS = {"oct": 50, "ct": 60, "derm": 90}
READER = {"oct": "kermany", "ct": "rsna_ich", "derm": "isic"}


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("demo")
    return {kind: make_demo_cohort(base / kind, kind, patients=n, seed=5) for kind, n in PATIENTS.items()}


def read(kind: str, root: Path, cache: Path, **options) -> Cohort:
    module = get_reader(READER[kind])
    if kind == "ct":
        options["cache"] = cache
    return module.read(root, module.Options(**options))


@pytest.fixture(scope="module")
def cohorts(roots, tmp_path_factory) -> dict[str, Cohort]:
    cache = tmp_path_factory.mktemp("cache")
    return {kind: read(kind, root, cache) for kind, root in roots.items()}


@pytest.mark.parametrize("kind", PATIENTS)
def test_the_real_reader_reads_every_class_and_groups_patients(cohorts, kind):
    cohort = cohorts[kind]
    assert (cohort.class_counts() > 0).all()
    assert not cohort.findings.unusable
    assert cohort.table.groupby("patient").size().max() > 1
    assert cohort.table["patient"].nunique() >= PATIENTS[kind] * 0.9


def test_oct_has_train_and_test_with_separate_patients(cohorts):
    table = cohorts["oct"].table
    assert set(table["split"]) == {"train", "test"}
    assert table.groupby("patient")["split"].nunique().max() == 1


def test_ct_is_hounsfield_with_skull_brain_and_air(cohorts):
    table = cohorts["ct"].table
    decoded = decode(table["path"].iloc[0])
    assert decoded.kind == "hounsfield"
    pixels = decoded.pixels[0]
    assert pixels[0, 0] < -950
    assert pixels.max() > 700
    assert 25 < np.median(pixels[(pixels > 0) & (pixels < 100)]) < 50
    header = dcmread(table["path"].iloc[0])
    assert header.PatientID == table["patient"].iloc[0]
    assert header.StudyInstanceUID != header.SeriesInstanceUID


def test_ct_table_has_the_traps_of_the_public_one(roots, cohorts):
    table = pd.read_csv(roots["ct"] / "stage_2_train.csv")
    images = PATIENTS["ct"] * SLICES
    assert len(table) == 6 * (images + 4)
    notes = " | ".join(cohorts["ct"].findings.notes)
    assert "4 duplicated ids dropped" in notes
    left_out = re.search(r"(\d+) slices without haemorrhage and (\d+) slices with several", notes)
    assert min(int(left_out[1]), int(left_out[2])) > 0
    wide = table.drop_duplicates("ID")
    any_of = wide[wide["ID"].str.endswith("_any")]["Label"].sum()
    assert 0.25 * images < any_of < 0.8 * images


def test_derm_has_centres_and_downsampled_names(roots, tmp_path):
    cohort = read("derm", roots["derm"], tmp_path, client="centre")
    assert {"HAM", "BCN", "MSK"} <= set(cohort.table["client"])
    down = cohort.table["sample"].str.endswith("_downsampled")
    assert set(cohort.table["client"][down]) <= {"MSK", "unknown"}
    assert down.any()


@pytest.mark.parametrize("kind", PATIENTS)
def test_pixels_alone_do_better_than_chance_and_are_no_give_away(cohorts, kind):
    cohort = cohorts[kind]
    features = []
    for path in cohort.table["path"]:
        decoded = decode(path)
        grey = np.clip(decoded.pixels, 0, 80) if decoded.kind == "hounsfield" else decoded.pixels
        features.append(np.stack([_means(channel, 16) for channel in grey]).ravel())
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.03, max_iter=500))
    guess = cross_val_predict(
        model, np.array(features), cohort.labels, groups=cohort.table["patient"], cv=GroupKFold(3)
    )
    score = balanced_accuracy_score(cohort.labels, guess)
    assert 1.3 / cohort.task.num_classes < score < 0.98


def _means(picture: np.ndarray, size: int) -> np.ndarray:
    rows = np.stack([part.mean(axis=0) for part in np.array_split(picture, size, axis=0)])
    return np.stack([part.mean(axis=1) for part in np.array_split(rows, size, axis=1)], axis=1)


def digest(root: Path) -> dict[str, str]:
    files = [p for p in sorted(root.rglob("*")) if p.is_file()]
    return {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.parametrize(("kind", "patients"), [("oct", 4), ("ct", 5), ("derm", 8)])
def test_same_seed_same_files(tmp_path, kind, patients):
    first, again, other = (
        digest(make_demo_cohort(tmp_path / name, kind, patients=patients, seed=seed))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == again
    assert not set(first.values()) & set(other.values())


def test_bad_arguments(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'oct'"):
        make_demo_cohort(tmp_path, "octt", patients=10, seed=0)
    with pytest.raises(ConfigError, match="8 patients or more"):
        make_demo_cohort(tmp_path, "derm", patients=3, seed=0)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError, match="not empty"):
        make_demo_cohort(tmp_path, "oct", patients=4, seed=0)
