"""Tests of differences and ranks: hand calculations, published tables, SciPy's own permutation test."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, permutation_test

from medfed.report.paper.statistics import (
    DRAWN,
    friedman,
    holm,
    paired_t,
    sign_flip,
    signed_rank,
    smallest_sign_flip,
)


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1, 2, 3], 2 / 8),  # only all plus and all minus reach 6
        ([1, 2, -4], 1.0),  # 1 + 2 - 4 = -1 is the nearest to 0 of the sums 7, 5, 3, 1 and their mirror images
        ([3, 1, -1], 6 / 8),  # sums 5, 3, 3, 1 and their mirror images: six reach 3
        ([2], 1.0),
        ([0, 0, 0], 1.0),
        ([0.1] * 3, 2 / 8),  # equal in the last bits or not
    ],
)
def test_sign_flips_by_hand(differences, p):
    assert sign_flip(differences) == pytest.approx(p)


def test_no_difference_has_no_p():
    assert sign_flip([]) is None
    assert signed_rank([0.0, 0.0]) is None
    assert paired_t([0.3]) is None
    assert paired_t([0.3, 0.3]) is None


@given(st.lists(st.floats(-1, 1).map(lambda x: round(x, 3)), min_size=2, max_size=7))
def test_sign_flips_are_those_of_scipy(differences):
    found = permutation_test(
        (np.array(differences),),
        lambda x, axis: x.mean(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
    )
    assert sign_flip(differences) == pytest.approx(min(1.0, found.pvalue), abs=1e-9)


@pytest.mark.parametrize("count", [1, 2, 3, 9, 12, 36])
def test_the_smallest_p_is_that_of_differences_of_one_sign(count):
    assert smallest_sign_flip(count) == pytest.approx(2 / 2**count)
    assert sign_flip([0.5] * count) == pytest.approx(smallest_sign_flip(count))


@pytest.mark.parametrize(("plus", "minus"), [(15, 5), (13, 8), (25, 11), (18, 18)])
def test_sign_flips_of_dozens_of_equal_differences_are_those_of_the_sign_test(plus, minus):
    p = binomtest(plus, plus + minus).pvalue
    assert sign_flip([0.1] * plus + [-0.1] * minus) == pytest.approx(p, rel=1e-9)


def test_many_differences_are_drawn_and_come_near_the_normal_distribution():
    differences = np.random.default_rng(1).normal(0.25, 1.0, 60)
    z = abs(differences.sum()) / math.sqrt((differences**2).sum())
    assert sign_flip(differences) == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.01)
    assert sign_flip([1.0] * 40) == 1 / (DRAWN + 1) == smallest_sign_flip(40)


def test_paired_t_by_hand():
    # mean 2, sd 1, t = 2 sqrt(3), 2 degrees of freedom: p = 1 - t / sqrt(t^2 + 2)
    t = 2 * math.sqrt(3)
    assert paired_t([1, 2, 3]) == pytest.approx(1 - t / math.sqrt(t**2 + 2))


def test_signed_rank_by_hand():
    assert signed_rank([1, 2, 3]) == pytest.approx(2 / 8)
    assert signed_rank([1, 2, -3]) == pytest.approx(1.0)  # ranks 1 + 2 against 3
    assert signed_rank([-1, 2, 3, 4]) == pytest.approx(4 / 16)  # sums of ranks of at most 1: 0 and 1, on two sides


def test_holm_by_hand():
    # Ordered 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1, never falling.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.4, 0.6]) == [1.0, 1.0, 1.0]
    assert holm([0.03, None, 0.01]) == [pytest.approx(0.03), None, pytest.approx(0.02)]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_keeps_order_and_lies_between_p_and_bonferroni(values):
    adjusted = holm(values)
    for p, q in zip(values, adjusted):
        assert p - 1e-12 <= q <= min(1.0, len(values) * p) + 1e-12
    assert [q for _, q in sorted(zip(values, adjusted))] == sorted(adjusted)


@pytest.mark.parametrize(("methods", "q"), [(3, 2.343), (4, 2.569), (5, 2.728), (6, 2.850), (10, 3.164)])
def test_critical_differences_are_those_of_the_published_table(methods, q):
    """Demsar 2006, table 5a."""
    found = friedman(np.random.default_rng(0).random((12, methods)))
    assert found is not None
    assert found.critical == pytest.approx(q * math.sqrt(methods * (methods + 1) / 72), abs=2e-3)


def test_friedman_by_hand():
    # Ranks of (a, b, c), more is better: 3 2 1, 3 2 1, 3 1 2, 3 2 1; sums 12, 7, 5.
    blocks = np.array([[1, 2, 3], [1, 2, 3], [1, 3, 2], [0, 1, 2]], float)
    found = friedman(blocks)
    assert found is not None
    assert found.ranks == pytest.approx([3.0, 7 / 4, 5 / 4])
    statistic = 12 / (4 * 3 * 4) * (12**2 + 7**2 + 5**2) - 3 * 4 * 4
    assert found.p == pytest.approx(math.exp(-statistic / 2))  # chi-squared with 2 degrees of freedom
    assert friedman(blocks, higher=False).ranks == pytest.approx([1.0, 9 / 4, 11 / 4])


def test_ranks_need_three_methods_and_two_blocks():
    assert friedman(np.ones((5, 2))) is None
    assert friedman(np.ones((1, 4))) is None
    same = friedman(np.ones((3, 4)))
    assert same is not None
    assert (same.p, same.ranks.tolist()) == (None, [2.5] * 4)
