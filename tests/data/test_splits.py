"""Train and test parts that keep patients together."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medfed.data.cohort import Cohort, Task
from medfed.data.splits import split_cohort, straddling_patients, unite_patients
from medfed.errors import DataError


def make(patients, labels, splits=None, classes=("a", "b", "c")) -> Cohort:
    n = len(patients)
    table = pd.DataFrame(
        {
            "sample": [f"s{k}" for k in range(n)],
            "path": [f"/{k}" for k in range(n)],
            "frame": 0,
            "patient": patients,
            "client": "",
            "split": splits if splits is not None else [""] * n,
        }
    )
    return Cohort(Task("multiclass", classes), table, np.asarray(labels, dtype=np.int64))


def test_exact_proportions_where_each_sample_is_a_patient():
    labels = np.repeat([0, 1, 2], [100, 50, 10])
    cohort = split_cohort(make([f"p{k}" for k in range(160)], labels), 0.2, seed=3)
    test = (cohort.table["split"] == "test").to_numpy()
    assert np.bincount(labels[test]).tolist() == [20, 10, 2]
    assert set(cohort.table["split"]) == {"train", "test"}


def test_patients_stay_together_and_classes_are_near_their_share():
    rng = np.random.default_rng(0)
    patients, labels = [], []
    for k in range(200):
        size = int(rng.integers(1, 12))
        patients += [f"p{k}"] * size
        labels += rng.choice(3, size, p=(0.7, 0.2, 0.1)).tolist()
    cohort = split_cohort(make(patients, labels), 0.25, seed=1)
    assert straddling_patients(cohort).empty
    share = cohort.table["split"].eq("test").groupby(np.asarray(labels)).mean()
    assert share.to_numpy() == pytest.approx([0.25] * 3, abs=0.02)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=5, max_size=30),
    fraction=st.sampled_from([0.2, 0.3, 0.5, 0.75]),
    seed=st.integers(0, 5),
)
def test_no_patient_is_ever_on_both_sides_and_no_side_is_empty(sizes, fraction, seed):
    patients = [f"p{k}" for k, s in enumerate(sizes) for _ in range(s)]
    labels = [(k + i) % 3 for k, s in enumerate(sizes) for i in range(s)]
    split = split_cohort(make(patients, labels), fraction, seed).table
    assert split.groupby("patient")["split"].nunique().max() == 1
    assert set(split["split"]) == {"train", "test"}


def test_same_seed_same_split_other_seed_other_split():
    cohort = make([f"p{k}" for k in range(60)], [k % 3 for k in range(60)])
    first, again, other = (split_cohort(cohort, 0.2, s).table["split"].tolist() for s in (1, 1, 2))
    assert first == again != other


def test_given_test_samples_stay_and_undecided_ones_follow_their_patient():
    cohort = make(["1", "1", "2", "3"], [0, 0, 1, 2], ["test", "", "", "val"])
    assert split_cohort(cohort, 0.5, 0).table["split"].tolist() == ["test", "test", "train", "val"]


def test_test_part_is_drawn_from_train_where_the_layout_gives_no_test():
    cohort = make([f"p{k}" for k in range(10)], [0, 1] * 5, ["train"] * 8 + ["val"] * 2)
    split = split_cohort(cohort, 0.25, 0).table["split"].tolist()
    assert split[8:] == ["val", "val"]
    assert split.count("test") == 2


def test_too_few_patients_is_an_error_unless_not_grouped():
    cohort = make(["p"] * 10, [0, 1] * 5)
    with pytest.raises(DataError, match=r"1 patients are too few"):
        split_cohort(cohort, 0.2, 0)
    assert (split_cohort(cohort, 0.2, 0, group=False).table["split"] == "test").sum() == 2


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5])
def test_fraction_outside_its_range(fraction):
    with pytest.raises(ValueError, match="test_fraction"):
        split_cohort(make(["p"], [0]), fraction, 0)


def test_without_stratification_only_the_number_of_samples_counts():
    cohort = make([f"p{k}" for k in range(100)], [0] * 95 + [1] * 5)
    assert (split_cohort(cohort, 0.2, 0, stratify=False).table["split"] == "test").sum() == 20


def test_straddling_patients_are_listed():
    cohort = make(["1", "1", "2", "2", "3"], [0] * 5, ["train", "test", "train", "train", ""])
    found = straddling_patients(cohort)
    assert found.to_dict("records") == [{"patient": "1", "splits": "test+train", "samples": 2}]


def test_multilabel_rows_are_balanced_too():
    base = make([f"p{k}" for k in range(40)], [0] * 40)
    labels = np.zeros((40, 3), np.float32)
    labels[:10, 0], labels[5:15, 1] = 1, 1
    cohort = Cohort(Task("multilabel", ("a", "b", "c")), base.table, labels)
    test = (split_cohort(cohort, 0.2, 0).table["split"] == "test").to_numpy()
    assert labels[test].sum(axis=0).tolist() == [2, 2, 0]
    assert 7 <= test.sum() <= 9


def test_patients_who_share_a_picture_are_united_through_others():
    cohort = make_united(["d", "a", "b", "c", "b", "e", "f"])
    # a-b share picture 1, b-c share picture 2; d and e share a picture that shows nothing; f is alone.
    united, several, one = unite_patients(cohort, [None, 1, 1, 2, 2, None, 3])
    assert united.table["patient"].tolist() == ["d", "a", "a", "a", "a", "e", "f"]
    assert (several, one) == (3, 1)
    assert cohort.table["patient"].tolist()[2] == "b"


def test_uniting_does_not_depend_on_the_order_of_rows():
    pairs = [("p3", 1), ("p9", 1), ("p9", 2), ("p1", 2), ("p5", 3), ("p4", 3), ("p4", 4), ("p0", 5)]
    expected = {"p3": "p1", "p9": "p1", "p1": "p1", "p5": "p4", "p4": "p4", "p0": "p0"}
    for shift in range(len(pairs)):
        turned = pairs[shift:] + pairs[:shift]
        united, several, one = unite_patients(make_united([p for p, _ in turned]), [k for _, k in turned])
        assert dict(zip([p for p, _ in turned], united.table["patient"])) == expected
        assert (several, one) == (5, 2)


def make_united(patients):
    table = pd.DataFrame({"sample": [f"s{k}" for k in range(len(patients))], "patient": patients})
    table = table.assign(path="/x", frame=0, client="", split="")
    return Cohort(Task("multiclass", ("a",)), table, np.zeros(len(patients), np.int64))
