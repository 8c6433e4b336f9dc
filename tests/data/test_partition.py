"""Partitions: exact cover, whole patients, minimum sizes, the class mix of FedISM's pools."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medfed.data.partition import (
    _repair,
    class_proportions,
    dirichlet_partition,
    given_partition,
    quality_partition,
    share_test,
    strata,
)
from medfed.errors import ConfigError, DataError

ICH_TRAIN = (438, 4101, 2597, 4291, 8571)  # class counts of FedISM's ICH training set


def rng(seed=0):
    return np.random.default_rng(seed)


@st.composite
def cohorts(draw):
    n = draw(st.integers(1, 80))
    labels = np.array(draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))
    patients = draw(st.none() | st.lists(st.sampled_from("abcdefghijklmnop"), min_size=n, max_size=n))
    return labels, patients


@settings(max_examples=150)
@given(
    cohorts(),
    st.integers(1, 6),
    st.integers(0, 6),
    st.sampled_from([0.05, 0.5, 1.0, 100.0]),
    st.integers(1, 6),
    st.integers(0, 99),
)
def test_every_partition_covers_once_keeps_patients_whole_and_gives_the_minimum(
    cohort, clients, corrupted, alpha, minimum, seed
):
    labels, patients = cohort
    corrupted = min(corrupted, clients)

    def draw(kind):
        if kind == "dirichlet":
            return dirichlet_partition(labels, clients, alpha, rng(seed), groups=patients, min_samples=minimum)
        return quality_partition(labels, clients, corrupted, alpha, rng(seed), groups=patients, min_samples=minimum)

    for kind in ("dirichlet", "quality"):
        try:
            parts = draw(kind)
        except ConfigError:
            if kind == "dirichlet" and patients is None:  # then the bound is exact
                assert len(labels) < clients * minimum
            continue
        assert len(parts) == clients
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
        assert all(len(p) >= minimum for p in parts)
        assert all((np.diff(p) > 0).all() for p in parts)
        if patients is not None:
            owners = [{patients[i] for i in p} for p in parts]
            assert sum(map(len, owners)) == len(set(patients))
        for first, second in zip(parts, draw(kind)):
            np.testing.assert_array_equal(first, second)


def test_pools_have_the_sizes_of_the_paper():
    # algorithms.md 2.5: 16 clean clients hold 15,999 and 4 corrupted ones 3,999 of 19,998 slices.
    labels = np.repeat(np.arange(5), ICH_TRAIN)
    parts = quality_partition(labels, 20, 4, 1.0, rng(2024))
    clean, corrupted = np.concatenate(parts[:16]), np.concatenate(parts[16:])
    assert (len(clean), len(corrupted)) == (15_999, 3_999)
    assert np.bincount(labels[clean]).tolist() == [350, 3281, 2078, 3433, 6857]  # round(0.8 n_c), by hand


def test_csv_order_puts_the_first_of_each_class_into_the_clean_pool():
    labels = np.array([0, 1, 0, 1, 0, 1, 0, 1, 1, 1])  # 4 of class 0, 6 of class 1; half of each is clean
    parts = quality_partition(labels, 2, 1, 1.0, rng(), shuffle=False)
    assert [p.tolist() for p in parts] == [[0, 1, 2, 3, 5], [4, 6, 7, 8, 9]]


def test_pools_keep_their_class_mix_with_patients():
    generator = rng(3)
    patient_class = generator.integers(0, 4, 400)
    slices = generator.integers(1, 6, 400)
    patients = np.repeat([f"p{i}" for i in range(400)], slices)
    labels = np.repeat(patient_class, slices)
    parts = quality_partition(labels, 20, 5, 1.0, rng(1), groups=patients)
    n = np.bincount(labels)
    in_clean = np.bincount(labels[np.concatenate(parts[:15])])
    # The cut lies between two patients of at most 5 slices: never farther than 2.5 from the rounded share.
    assert (np.abs(in_clean - 0.75 * n) <= 3).all()


def test_large_alpha_is_even_and_small_alpha_is_not():
    labels = np.repeat(np.arange(4), 2500)
    even = class_proportions(labels, dirichlet_partition(labels, 10, 1e6, rng()), 4)
    assert np.abs(even - 0.1).max() < 0.03  # binomial: 5 sigma = 5 sqrt(.1 * .9 / 2500)
    skewed = class_proportions(labels, dirichlet_partition(labels, 10, 0.05, rng()), 4)
    assert skewed.max(axis=1).min() > 0.3


def test_dirichlet_shares_have_the_moments_of_the_distribution():
    # Var of a Dir(a 1_K) component is (K-1) / (K^2 (K a + 1)): K=5, a=1 gives 4 / 150.
    labels = np.repeat(np.arange(400), 200)
    shares = class_proportions(labels, dirichlet_partition(labels, 5, 1.0, rng(5)), 400)
    binomial = np.mean(shares * (1 - shares)) / 200
    assert shares.var() - binomial == pytest.approx(4 / 150, rel=0.1)


def test_givers_only_give_and_no_more_than_needed():
    labels = np.array([0] * 50 + [1] * 50)
    for seed in range(30):
        bare = dirichlet_partition(labels, 4, 0.1, rng(seed))
        mended = dirichlet_partition(labels, 4, 0.1, rng(seed), min_samples=8)
        for before, after in zip(bare, mended):
            if len(before) > 8:
                assert set(after) <= set(before)
            else:
                assert set(before) <= set(after)
                assert len(after) == 8


@pytest.mark.parametrize(
    ("owner", "classes", "sizes", "minimum", "expected"),
    [
        # Client 1 holds class 0, so the first sample of class 0 comes from client 0, not the first of class 1.
        ([0, 0, 0, 0, 1], [1, 1, 0, 0, 0], [1] * 5, 2, [0, 0, 1, 0, 1]),
        # The larger client 2 gives, although client 0 has the class too.
        ([0, 0, 0, 2, 2, 2, 2, 1], [0] * 8, [1] * 8, 2, [0, 0, 0, 1, 2, 2, 2, 1]),
        # Patients of 4, 4, 1, 1 slices and two clients of at least 5: one large one over, one small one back.
        ([0, 0, 1, 1], [0] * 4, [4, 4, 1, 1], 5, [1, 0, 0, 1]),
    ],
)
def test_repair_by_hand(owner, classes, sizes, minimum, expected):
    clients = max(owner) + 1
    mended = _repair(np.array(owner), np.array(classes), np.array(sizes), clients, minimum)
    assert mended.tolist() == expected


def test_too_many_clients_for_the_patients_is_said():
    labels = np.zeros(60, dtype=int)
    patients = [f"p{i % 22}" for i in range(60)]
    with pytest.raises(ConfigError, match="30 clients, 22 patients"):
        dirichlet_partition(labels, 30, 1.0, rng(), groups=patients)
    with pytest.raises(ConfigError, match=r"10 clients of at least 8 samples each .* 60 samples\."):
        dirichlet_partition(labels, 10, 1.0, rng(), min_samples=8)


def test_one_giant_patient_cannot_feed_two_clients():
    with pytest.raises(ConfigError, match="without splitting a patient"):
        dirichlet_partition(np.zeros(21, dtype=int), 2, 1.0, rng(), groups=["a"] * 20 + ["b"], min_samples=8)


@pytest.mark.parametrize(("clients", "alpha"), [(0, 1.0), (3, 0.0), (3, -1.0), (3, float("nan"))])
def test_nonsense_is_refused(clients, alpha):
    with pytest.raises(ConfigError):
        dirichlet_partition(np.zeros(9, dtype=int), clients, alpha, rng())


def test_more_corrupted_than_clients_is_refused():
    with pytest.raises(ConfigError, match="5 corrupted clients of 4"):
        quality_partition(np.zeros(9, dtype=int), 4, 5, 1.0, rng())


def test_rarest_positive_decides():
    labels = np.array([[1, 1, 0], [1, 0, 0], [1, 0, 1], [0, 1, 1], [0, 0, 0], [1, 0, 1]])
    # positives: 4, 2, 3 -> label 1 is rarest, then 2, then 0
    assert strata(labels).tolist() == [1, 0, 2, 1, 3, 2]
    assert strata(labels, counts=np.array([1, 5, 9])).tolist() == [0, 0, 0, 1, 3, 0]
    parts = dirichlet_partition(labels, 2, 1.0, rng())
    assert sorted(np.concatenate(parts).tolist()) == list(range(6))


def test_given_clients():
    names, parts = given_partition(["north", "012", "north", "12"])
    assert names == ("012", "12", "north")
    assert [p.tolist() for p in parts] == [[1], [3], [0, 2]]
    with pytest.raises(DataError, match="1 of 2 samples name no client"):
        given_partition(["a", " "])


def test_proportions_by_hand():
    classes = np.array([0, 0, 0, 1])
    shares = class_proportions(classes, [np.array([0]), np.array([1, 2, 3])], 3)
    np.testing.assert_allclose(shares, [[1 / 3, 2 / 3], [0, 1], [1 / 4, 3 / 4]])


def test_test_samples_follow_the_training_shares():
    shares = np.array([[0.0, 1.0, 0.0], [0.5, 0.25, 0.25]])
    classes = np.repeat([0, 1], [100, 8000])
    owner = share_test(classes, shares, rng())
    assert (owner[:100] == 1).all()
    counts = np.bincount(owner[100:], minlength=3) / 8000
    np.testing.assert_allclose(counts, shares[1], atol=0.025)
    patients = np.repeat([f"p{i}" for i in range(2700)], 3)
    by_patient = share_test(classes, shares, rng(), groups=patients).reshape(-1, 3)
    assert (by_patient == by_patient[:, :1]).all()
