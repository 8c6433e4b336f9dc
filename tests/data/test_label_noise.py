"""Label noise: exact counts, the right targets, nothing that depends on anything else."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medfed.data.label_noise import asymmetric, changes, cover, flip, ordinal, symmetric
from medfed.errors import ConfigError

GRADES = ("none", "mild", "moderate", "severe")


def rng(seed=0):
    return np.random.default_rng(seed)


def test_targets_by_hand():
    assert symmetric(3) == ((1, 2), (0, 2), (0, 1))
    assert symmetric(2) == ((1,), (0,))
    assert ordinal(4) == ((1,), (0, 2), (1, 3), (2,))
    assert ordinal(4, "up") == ((1,), (2,), (3,), ())
    assert ordinal(4, "down") == ((), (0,), (1,), (2,))
    assert asymmetric(("CNV", "DME", "DRUSEN", "NORMAL"), {"CNV": "DME", "DRUSEN": ["NORMAL", "CNV"]}) == (
        (1,),
        (),
        (3, 0),
        (),
    )
    assert asymmetric(("GA", "NGA"), {"GA": "NGA"}) == ((1,), ())


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "class map is empty"),
        ({"mld": "none"}, "no class 'mld'. Did you mean 'mild'"),
        ({"mild": "sever"}, "no class 'sever'. Did you mean 'severe'"),
        ({"mild": ["none", "mild"]}, "'mild' becomes itself"),
        ({"mild": "mild"}, "'mild' becomes itself"),
        ({"mild": []}, "'mild' becomes nothing"),
        ({"mild": ["none", "none"]}, "'mild' has a target twice"),
    ],
)
def test_a_map_that_means_nothing_is_refused(mapping, message):
    with pytest.raises(ConfigError, match=f"condition.label_noise.map: .*{message}"):
        asymmetric(GRADES, mapping)


@pytest.mark.parametrize("make", [symmetric, ordinal])
def test_one_class_cannot_be_wrong(make):
    with pytest.raises(ConfigError, match="only class cannot be wrong"):
        make(1)


def test_the_floor_is_that_of_the_number_as_written():
    assert [changes(10, r / 10) for r in range(11)] == list(range(11))
    assert changes(10, 0.1 + 0.2) == 3
    assert changes(10, 0.7 - 0.4) == 3  # 0.29999999999999993
    assert [changes(9, 0.4), changes(2, 0.4), changes(3, 0.4), changes(0, 1.0)] == [3, 0, 1, 0]
    for percent in range(101):
        for count in (1, 7, 50, 99, 100, 1234):
            assert changes(count, percent / 100) == math.floor(Fraction(percent, 100) * count)


@settings(max_examples=60)
@given(
    labels=st.lists(st.integers(0, 3), max_size=60),
    percent=st.integers(0, 100),
    kind=st.sampled_from(["symmetric", "both", "up", "down", "map"]),
    seed=st.integers(0, 99),
)
def test_exactly_the_share_of_each_class_becomes_one_of_its_targets(labels, percent, kind, seed):
    if kind == "symmetric":
        targets = symmetric(4)
    elif kind == "map":
        targets = asymmetric(GRADES, {"none": ["mild", "severe"], "severe": "none"})
    else:
        targets = ordinal(4, kind)
    before = np.array(labels, dtype=np.int64)
    after = flip(before, targets, percent / 100, rng(seed))
    assert before.tolist() == labels  # the input is left alone
    assert after.dtype == before.dtype
    for own in range(4):
        rows = before == own
        moved = set(after[rows & (after != before)].tolist())
        assert moved <= set(targets[own]) - {own}
        wanted = math.floor(Fraction(percent, 100) * int(rows.sum())) if targets[own] else 0
        assert (after[rows] != own).sum() == wanted


def test_all_targets_and_all_samples_have_the_same_chance():
    labels = np.repeat([0, 1, 2], 10)
    drawn = np.stack([flip(labels, symmetric(3), 0.4, rng(s)) for s in range(2000)])
    changed = (drawn != labels).mean(axis=0)
    assert np.abs(changed - 0.4).max() < 5 * math.sqrt(0.24 / 2000)
    first = drawn[:, :10]
    assert abs((first == 1).sum() / (first != 0).sum() - 0.5) < 5 * math.sqrt(0.25 / 8000)


def test_a_higher_rate_adds_to_a_lower_one():
    labels = rng(1).integers(0, 4, 200)
    low, high = (flip(labels, symmetric(4), rate, rng(5)) for rate in (0.3, 0.6))
    changed = low != labels
    assert 0 < changed.sum() < (high != labels).sum()
    assert np.array_equal(low[changed], high[changed])


def test_the_same_generator_gives_the_same_labels_and_another_does_not():
    labels = rng(1).integers(0, 4, 200)
    assert np.array_equal(flip(labels, ordinal(4), 0.5, rng(1)), flip(labels, ordinal(4), 0.5, rng(1)))
    assert not np.array_equal(flip(labels, ordinal(4), 0.5, rng(1)), flip(labels, ordinal(4), 0.5, rng(2)))


def test_cover_takes_who_adds_most():
    # Needed: 10 of each class. Client 0 adds 10 + 0, client 1 adds 6 + 6, client 2 adds 0 + 10, client 3 adds 4 + 4.
    counts = np.array([[50, 0], [6, 6], [0, 30], [4, 4]])
    # 12 is most; then client 0 adds 4, client 2 adds 4, client 3 adds 8.
    assert cover(counts, 10, [0, 1, 2, 3]) == [1, 3]
    assert cover(counts, 10, [3, 2, 1, 0]) == [1, 3]
    # Of 20: client 0 and client 2 both add 20, the first in the order is taken, then the other.
    assert cover(counts, 20, [0, 1, 2, 3]) == [0, 2]
    assert cover(counts, 20, [2, 0, 1, 3]) == [2, 0]


def test_cover_takes_nobody_twice_and_ends_when_nothing_helps():
    counts = np.array([[5, 0], [5, 0]])
    assert sorted(cover(counts, 8, [1, 0])) == [0, 1]
    assert cover(np.zeros((3, 2), dtype=int), 1, [0, 1, 2]) == []
    assert counts.tolist() == [[5, 0], [5, 0]]
