"""Weights of FedMerit, by hand."""

from __future__ import annotations

import pytest

from medfed.aggregation.weights import by_merit, needs_of_groups

GROUPS = [["a", "b", "c"], ["d", "e"], ["f"]]


def test_need_of_a_group_is_that_of_its_trusted_members_by_size():
    needs = {"a": 0.4, "b": 1.0, "c": 9.0, "d": 2.0, "e": 8.0}
    samples = {"a": 30, "b": 10, "c": 100, "d": 5, "e": 50}
    found = needs_of_groups(needs, samples, GROUPS, trusted={"a", "b", "d", "f"})
    # (30 * 0.4 + 10 * 1.0) / 40; e is not trusted, c neither; f was not measured.
    assert found == pytest.approx({"a": 0.55, "d": 2.0})


def test_need_that_nobody_can_be_trusted_with_is_at_most_the_greatest_of_the_others():
    samples = dict.fromkeys("abcdef", 10)
    needs = {"a": 0.5, "d": 3.0, "e": 5.0, "f": 0.1}
    assert needs_of_groups(needs, samples, GROUPS, {"a"}) == pytest.approx({"a": 0.5, "d": 0.5, "f": 0.1})
    # With nobody to be trusted at all there is no such limit: d and e have a mean of 4.
    assert needs_of_groups(needs, samples, GROUPS, set()) == pytest.approx({"a": 0.5, "d": 4.0, "f": 0.1})
    assert needs_of_groups({}, {}, GROUPS, {"a"}) == {}


def test_merit_by_hand():
    """Four classes: labels drawn at random are wrong in 3/4, so that 0.3 wrong leave 0.6 of the signal."""
    samples = {"a": 10, "b": 20, "c": 30, "d": 40}
    wrong = {"b": 0.3, "c": 0.9, "d": None}
    needs = {"a": 0.5, "b": 1.0, "c": 1.0, "d": 0.5}
    # 10 * 1/4, 20 * 0.6 * 1, nothing, 40 * 0.5 * 1/4
    raw = {"a": 2.5, "b": 12.0, "c": 0.0, "d": 5.0}
    expected = {c: w / 19.5 for c, w in raw.items()}
    assert by_merit(samples, wrong, needs, q=2.0, classes=4) == pytest.approx(expected)


def test_merit_without_doubts_or_needs_is_the_sample_count():
    samples = {"a": 10, "b": 30}
    even = {"a": 0.25, "b": 0.75}
    assert by_merit(samples, {}, {}, q=2.0, classes=4) == pytest.approx(even)
    assert by_merit(samples, {}, {"a": 0.1, "b": 7.0}, q=0.0, classes=4) == pytest.approx(even)
    assert by_merit(samples, {}, {"a": 0.0, "b": 0.0}, q=2.0, classes=4) == pytest.approx(even)


def test_labels_that_are_all_wrong_everywhere_do_not_make_all_weights_zero():
    samples, needs = {"a": 10, "b": 10}, {"a": 1.0, "b": 3.0}
    found = by_merit(samples, {"a": 1.0, "b": 0.75}, needs, q=1.0, classes=4)
    assert found == pytest.approx({"a": 0.25, "b": 0.75})
    assert by_merit(samples, {"a": 1.0}, {"a": 1.0, "b": 0.0}, q=1.0, classes=4) == pytest.approx({"a": 1.0, "b": 0.0})


def test_one_class_has_no_chance_level():
    assert by_merit({"a": 10, "b": 10}, {"b": 0.5}, {}, q=1.0, classes=1) == pytest.approx({"a": 2 / 3, "b": 1 / 3})
