"""Rules of fair aggregation by hand: simplex projection, AFL's ascent, q-FedAvg, FairFed and FedGA."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medfed.aggregation.averaging import toward, weighted_mean
from medfed.aggregation.fair import (
    ascended,
    by_loss,
    fairfed_gaps,
    initial_weights,
    lowered_by_gap,
    project_to_simplex,
    q_fair_share,
    raised_by_gap,
)

THIRDS = dict.fromkeys("abc", 1 / 3)


# Simplex.


@pytest.mark.parametrize(
    ("point", "nearest"),
    [
        ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),
        ([1.0, 1.0, 1.0], [1 / 3, 1 / 3, 1 / 3]),
        ([0.5, 0.9], [0.3, 0.7]),  # both lose 0.2
        ([2.0, 0.0, 0.0], [1.0, 0.0, 0.0]),
        ([0.9, 0.5, -0.3], [0.7, 0.3, 0.0]),  # the third drops out, the others lose 0.2
        ([-5.0], [1.0]),
        ([-1.0, -2.0], [1.0, 0.0]),
    ],
)
def test_projection_by_hand(point, nearest):
    found = project_to_simplex({f"c{i}": v for i, v in enumerate(point)})
    assert list(found.values()) == pytest.approx(nearest)


@settings(max_examples=50)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=5))
def test_projection_is_the_best_over_all_supports(point):
    """Brute force: for every set of positive entries the minimiser is a common shift; the best that fits wins."""
    v, best, least = np.array(point), None, math.inf
    for r in range(1, len(v) + 1):
        for support in map(list, itertools.combinations(range(len(v)), r)):
            w = np.zeros(len(v))
            w[support] = v[support] - (v[support].sum() - 1) / r
            if (w >= -1e-12).all() and ((w - v) ** 2).sum() < least:
                best, least = w, ((w - v) ** 2).sum()
    found = np.array(list(project_to_simplex({f"c{i}": x for i, x in enumerate(point)}).values()))
    assert found.sum() == pytest.approx(1.0)
    assert found.min() >= 0
    assert ((found - v) ** 2).sum() == pytest.approx(least, abs=1e-9)
    assert best is not None


def test_ascent_by_hand():
    # (1/3 + 0.1, 1/3 + 0.2, 1/3 + 0.6) less 0.3 each
    found = ascended(THIRDS, {"a": 1.0, "b": 2.0, "c": 6.0}, 0.1)
    assert found == pytest.approx({"a": 1 / 3 - 0.2, "b": 1 / 3 - 0.1, "c": 1 / 3 + 0.3})
    assert ascended(THIRDS, {"a": 2.0, "b": 2.0, "c": 2.0}, 0.5) == pytest.approx(THIRDS)
    assert ascended(THIRDS, {"a": 9.0}, 0.0) == pytest.approx(THIRDS)
    assert ascended({"a": 1.0}, {"a": 3.0}, 1.0) == {"a": 1.0}
    assert ascended(THIRDS, {"c": 1e6}, 1.0) == {"a": 0.0, "b": 0.0, "c": 1.0}


def test_clients_of_whom_nothing_is_known_only_pay_for_the_others():
    # c rises by 0.3 and all pay 0.1
    assert ascended(THIRDS, {"c": 3.0}, 0.1) == pytest.approx({"a": 1 / 3 - 0.1, "b": 1 / 3 - 0.1, "c": 1 / 3 + 0.2})


# q-FedAvg.


def flower(received, models, losses, q, rate):
    """Flower's ``aggregate_qffl`` restated: updates times 1/rate, deltas F^q g, h = q F^(q-1) |g|^2 + F^q / rate."""
    gradients = [(received - m) / rate for m in models]
    deltas = [(f + 1e-10) ** q * g for f, g in zip(losses, gradients)]
    h = [q * (f + 1e-10) ** (q - 1) * (g @ g) + (f + 1e-10) ** q / rate for f, g in zip(losses, gradients)]
    return received - sum(deltas) / sum(h)


def ours(received, models, losses, q, rate):
    names = [f"c{i}" for i in range(len(models))]
    by_name = dict(zip(names, losses))
    squares = {n: float(((received - m) ** 2).sum()) for n, m in zip(names, models)}
    mean = weighted_mean([{"w": torch.from_numpy(m)} for m in models], list(by_loss(by_name, q).values()))
    share = q_fair_share(by_name, squares, q, 1 / rate)
    return toward({"w": torch.from_numpy(received)}, mean, share)["w"].numpy()


@pytest.mark.parametrize("q", [0.0, 0.001, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("rate", [0.001, 0.01, 1.0])
def test_q_fedavg_is_flowers_formula(q, rate):
    rng = np.random.default_rng(3)
    received = rng.normal(size=7)
    models = [received + 0.1 * rng.normal(size=7) for _ in range(4)]
    losses = [0.2, 1.5, 0.9, 0.05]
    assert ours(received, models, losses, q, rate) == pytest.approx(
        flower(received, models, losses, q, rate), abs=1e-12
    )


def test_q_fedavg_by_hand():
    """L = 1, q = 1, F = (1, 3), w = 0, w_k = 1 and 2: D = -1 and -6, h = 1 + 1 and 4 + 3; w' = 7/9."""
    zero, models = np.zeros(1), [np.ones(1), np.full(1, 2.0)]
    assert ours(zero, models, [1.0, 3.0], 1.0, 1.0) == pytest.approx([7 / 9])


def test_q_zero_is_the_plain_mean_of_models():
    assert q_fair_share({"a": 1.0, "b": 9.0}, {"a": 4.0, "b": 5.0}, 0.0, 100.0) == 1.0
    assert by_loss({"a": 1.0, "b": 9.0}, 0.0) == {"a": 0.5, "b": 0.5}


def test_losses_of_zero_and_large_q_are_no_trouble():
    weights = by_loss({"a": 0.0, "b": 1e-3, "c": 2.0}, 300.0)
    assert weights == pytest.approx({"a": 0.0, "b": 0.0, "c": 1.0})
    assert by_loss({"a": 0.0, "b": 0.0}, 5.0) == {"a": 0.5, "b": 0.5}
    assert 0 <= q_fair_share({"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 1.0}, 5.0, 100.0) < 1e-9
    assert q_fair_share({"a": 0.0}, {"a": 0.0}, 5.0, 100.0) == 1.0


# FairFed.

SAMPLES = {"a": 50, "b": 30, "c": 20}


def test_fairfed_forms_move_the_worst_client_in_opposite_directions():
    """By hand, N = 50, 30, 20 and accuracies 0.8, 0.9, 0.3.

    Correct: the accuracy of all is 0.4 + 0.27 + 0.06 = 0.73; gaps 0.07, 0.17, 0.43, mean 0.67/3.
    Released: gaps 0.8 * 0.5, 0.9 * 0.7, 0.3 * 0.8 = 0.4, 0.63, 0.24, mean 1.27/3.
    """
    scores = {"a": 0.8, "b": 0.9, "c": 0.3}
    start = {"a": 0.5, "b": 0.3, "c": 0.2}
    gaps, overall = fairfed_gaps(scores, SAMPLES)
    assert overall == pytest.approx(0.73)
    assert gaps == pytest.approx({"a": 0.07, "b": 0.17, "c": 0.43})
    correct = lowered_by_gap(start, gaps, 0.5)
    expected = {
        "a": 0.5 - 0.5 * (0.07 - 0.67 / 3),
        "b": 0.3 - 0.5 * (0.17 - 0.67 / 3),
        "c": 0.2 - 0.5 * (0.43 - 0.67 / 3),
    }
    assert correct == pytest.approx(expected)
    assert correct["c"] < start["c"]

    gaps, overall = fairfed_gaps(scores, SAMPLES, two_sided=False)
    assert overall == pytest.approx(0.73)
    assert gaps == pytest.approx({"a": 0.4, "b": 0.63, "c": 0.24})
    released = lowered_by_gap(start, gaps, 0.5)
    assert released["c"] == pytest.approx(0.2 - 0.5 * (0.24 - 1.27 / 3))
    assert released["c"] > start["c"]
    assert math.fsum(correct.values()) == pytest.approx(1.0)
    assert math.fsum(released.values()) == pytest.approx(1.0)


def test_weights_below_zero_are_none_and_recover():
    # gaps 0, 0, 0.9: the third loses 0.6 of 0.2; 0.8, 0.6 and 0 are scaled to one
    weights = lowered_by_gap({"a": 0.5, "b": 0.3, "c": 0.2}, {"a": 0.0, "b": 0.0, "c": 0.9}, 1.0)
    assert weights == pytest.approx({"a": 0.8 / 1.4, "b": 0.6 / 1.4, "c": 0.0})
    again = lowered_by_gap(weights, {"a": 0.3, "b": 0.0, "c": 0.0}, 1.0)
    assert again["c"] > 0.05


def test_equal_gaps_one_client_and_nobody_change_nothing():
    start = {"a": 0.5, "b": 0.3, "c": 0.2}
    assert lowered_by_gap(start, {"a": 0.4, "b": 0.4, "c": 0.4}, 5.0) == pytest.approx(start)
    assert lowered_by_gap({"a": 1.0}, {"a": 0.7}, 5.0) == {"a": 1.0}
    assert lowered_by_gap(start, {}, 5.0) == start


def test_absent_clients_keep_their_weight_and_those_present_their_sum():
    start = {"a": 0.5, "b": 0.3, "c": 0.2}
    moved = lowered_by_gap(start, {"a": 0.2, "c": 0.0}, 1.0)
    assert moved == pytest.approx({"a": 0.4, "b": 0.3, "c": 0.3})


def test_weights_of_clients_that_are_new():
    assert initial_weights(SAMPLES, {}, "abc") == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2})
    # four clients, two of them seen: as if all had 40 samples
    assert initial_weights({"a": 60, "b": 20}, {}, "abcd") == pytest.approx({"a": 60 / 160, "b": 20 / 160})
    assert initial_weights({"a": 60, "b": 20}, {"a": 0.7}, "abcd") == pytest.approx({"a": 0.7, "b": 0.125})
    assert initial_weights({}, {"a": 0.7}, "ab") == {"a": 0.7}


# FedGA.


def test_adjustment_by_hand():
    """Gaps 0.1, 0.2, 0.6, mean 0.3: -0.2, -0.1, 0.3; the largest gains the step, whole."""
    found = raised_by_gap(THIRDS, {"a": 0.1, "b": 0.2, "c": 0.6}, 0.06)
    assert found == pytest.approx({"a": 1 / 3 - 0.04, "b": 1 / 3 - 0.02, "c": 1 / 3 + 0.06})


def test_adjustment_that_is_not_centred():
    """As in the official code: 1/3 + 0.01, 0.02 and 0.06, scaled by 1 / 1.09."""
    found = raised_by_gap(THIRDS, {"a": 0.1, "b": 0.2, "c": 0.6}, 0.06, centred=False)
    expected = {"a": (1 / 3 + 0.01) / 1.09, "b": (1 / 3 + 0.02) / 1.09, "c": (1 / 3 + 0.06) / 1.09}
    assert found == pytest.approx(expected)


def test_adjustment_stays_between_zero_and_one():
    # -1, 0, 1 times 0.8 on thirds: 0, 1/3 and 1 (clipped), scaled
    found = raised_by_gap(THIRDS, {"a": -1.0, "b": 0.0, "c": 1.0}, 0.8)
    assert found == pytest.approx({"a": 0.0, "b": 0.25, "c": 0.75})


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("gaps", [{}, {"a": 0.0, "b": 0.0, "c": 0.0}, {"a": 0.0}])
def test_adjustment_without_any_gap(gaps, centred):
    assert raised_by_gap(THIRDS, gaps, 0.1, centred) == THIRDS


def test_equal_gaps_change_nothing_though_their_mean_is_rounded():
    assert raised_by_gap(THIRDS, {"a": 0.1, "b": 0.1, "c": 0.1}, 0.1) == THIRDS
    assert raised_by_gap({"a": 1.0}, {"a": 0.4}, 0.1) == {"a": 1.0}
    assert raised_by_gap(THIRDS, {"a": 0.1, "b": 0.1, "c": 0.1}, 0.1, centred=False) == pytest.approx(THIRDS)


def test_a_share_of_the_way():
    start = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3), "h": torch.tensor([1.0], dtype=torch.float16)}
    end = {"w": torch.tensor([3.0, 0.0]), "n": torch.tensor(7), "h": torch.tensor([2.0], dtype=torch.float16)}
    found = toward(start, end, 0.25)
    assert found["w"].tolist() == [1.5, 1.5]
    assert (found["n"].item(), found["n"].dtype) == (7, torch.int64)
    assert (found["h"].item(), found["h"].dtype) == (1.25, torch.float16)
    assert toward(start, end, 0.0)["w"].tolist() == [1.0, 2.0]
    whole = toward(start, end, 1.0)
    assert torch.equal(whole["w"], end["w"])
    assert whole["w"].data_ptr() != end["w"].data_ptr()
