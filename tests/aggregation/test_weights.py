"""Weight rules worked out by hand, and the degenerate cases of algorithms' acceptance checks."""

from __future__ import annotations

import pytest

from medfed.aggregation.weights import by_samples, by_sharpness, moving_average, normalised


def test_samples():
    assert by_samples({"a": 1, "b": 3}) == {"a": 0.25, "b": 0.75}


def test_sharpness_squares_at_q_two():
    # s = (0.2, 0.3, 0.5); squares 0.04, 0.09, 0.25, sum 0.38
    weights = by_sharpness({"a": 2.0, "b": 3.0, "c": 5.0}, q=2.0)
    assert weights["a"] == pytest.approx(0.04 / 0.38)
    assert weights["b"] == pytest.approx(0.09 / 0.38)
    assert weights["c"] == pytest.approx(0.25 / 0.38)


def test_sharpness_at_q_one_is_proportional_and_scale_free():
    small = by_sharpness({"a": 2e-6, "b": 3e-6, "c": 4e-6}, q=1.0)
    assert [small[c] for c in "abc"] == pytest.approx([2 / 9, 3 / 9, 4 / 9])


def test_q_zero_and_equal_sharpness_give_equal_weights():
    assert by_sharpness({"a": 1.0, "b": 9.0}, q=0.0) == {"a": 0.5, "b": 0.5}
    assert by_sharpness({"a": 0.7, "b": 0.7}, q=2.0) == pytest.approx({"a": 0.5, "b": 0.5})


def test_flat_or_negative_sharpness_is_floored_not_lost():
    assert by_sharpness({"a": 0.0, "b": -1.0}, q=2.0) == pytest.approx({"a": 0.5, "b": 0.5})
    assert by_sharpness({"a": 0.0, "b": 1.0}, q=2.0)["b"] == pytest.approx(1.0)


def test_moving_average():
    assert moving_average({"a": 0.2, "b": 0.8}, None, 0.5) == {"a": 0.2, "b": 0.8}
    mixed = moving_average({"a": 0.2, "b": 0.8}, {"a": 0.6, "b": 0.4}, beta=0.75)
    assert mixed == pytest.approx({"a": 0.3, "b": 0.7})


def test_beta_one_switches_the_average_off():
    assert moving_average({"a": 0.2, "b": 0.8}, {"a": 0.9, "b": 0.1}, 1.0) == pytest.approx({"a": 0.2, "b": 0.8})


def test_client_that_missed_earlier_rounds_enters_with_its_new_weight():
    mixed = moving_average({"a": 0.5, "new": 0.5}, {"a": 0.1, "gone": 0.9}, 0.5)
    # a: 0.3, new: 0.5, scaled to one
    assert mixed == pytest.approx({"a": 0.375, "new": 0.625})


def test_normalised_over_those_admitted():
    assert normalised({"a": 0.2, "b": 0.3, "c": 0.5}, ["a", "b"]) == pytest.approx({"a": 0.4, "b": 0.6})


@pytest.mark.parametrize("q", [0.0, 2.0, 50.0, 1e6])
@pytest.mark.parametrize("values", [[1e-300, 0.0], [1e308, 1e308, 1e308], [0.05] * 20, [1e-9, 1e300], [7.0]])
def test_sharpness_of_any_size_and_any_q_give_weights(values, q):
    weights = by_sharpness({f"c{i}": s for i, s in enumerate(values)}, q)
    assert sum(weights.values()) == pytest.approx(1.0)
    assert min(weights.values()) >= 0


def test_sharpness_near_the_floor_by_hand():
    # s = (0.5e-9, 0.5, 0.5); with 1e-10 added, 0.6e-9 against 1
    weights = by_sharpness({"a": 4e-9, "b": 4.0, "c": 4.0}, q=1.0)
    assert weights["a"] == pytest.approx(0.6e-9, rel=1e-6)
