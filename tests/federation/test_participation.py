"""Who is asked and who stays silent, and what two stretches of one round come to."""

from __future__ import annotations

import pytest

from medfed.federation.messages import Refusal
from medfed.federation.participation import dropped, sample_clients
from medfed.federation.report import RoundReport, Traffic

CLIENTS = tuple(f"c{i:02}" for i in range(20))


@pytest.mark.parametrize(("fraction", "count"), [(0.001, 1), (0.125, 3), (0.5, 10), (0.99, 20), (1.0, 20), (2.0, 20)])
def test_share_is_rounded_half_up_and_nobody_is_drawn_twice(fraction, count):
    for round in range(1, 30):
        drawn = sample_clients(CLIENTS, fraction, 0, round)
        assert len(drawn) == len(set(drawn)) == count
        assert list(drawn) == sorted(drawn)


def test_draw_does_not_depend_on_the_order_of_the_clients():
    for fraction in (0.3, 1.0):
        assert sample_clients(CLIENTS[::-1], fraction, 5, 2) == sample_clients(CLIENTS, fraction, 5, 2)
    assert sample_clients(CLIENTS, 0.3, 5, 2) != sample_clients(CLIENTS, 0.3, 6, 2)


def test_every_client_is_drawn_about_equally_often():
    counts = dict.fromkeys(CLIENTS, 0)
    for round in range(400):
        for client in sample_clients(CLIENTS, 0.25, 1, round):
            counts[client] += 1
    assert all(60 <= n <= 140 for n in counts.values())  # 100 expected, deviation 8.7


@pytest.mark.parametrize("probability", [0.1, 0.9])
def test_silence_has_its_probability(probability):
    share = sum(dropped("c", probability, 0, round) for round in range(1000)) / 1000
    assert share == pytest.approx(probability, abs=0.05)
    assert not any(dropped(c, 0.0, 0, 1) for c in CLIENTS)
    assert all(dropped(c, 1.0, 0, 1) for c in CLIENTS)


def test_two_stretches_of_a_round_add_up_and_survive_json():
    lost = Refusal("c9", "late")
    earlier = RoundReport(
        0, ("b", "c9"), ("b",), (lost,), {"b": {"x": 1, "y": 1}, "d": {"x": float("nan")}}, {"s": 1, "t": 1},
        Traffic(10, 20, 1), 1.5, ["early"],
    )  # fmt: skip
    earlier = RoundReport.from_plain(earlier.to_plain())
    now = RoundReport(1, ("a",), ("a",), (lost,), {"b": {"y": 2}}, {"t": 2}, Traffic(1, 2, 3), 0.5, ["late"])
    now.absorb(earlier)
    assert (now.round, now.asked, now.admitted, now.refused) == (1, ("a", "b", "c9"), ("a",), (lost,))
    assert now.clients == {"b": {"x": 1, "y": 2}, "d": {"x": None}}
    assert now.server == {"s": 1, "t": 2}
    assert now.traffic == Traffic(11, 22, 4)
    assert (now.seconds, now.warnings) == (2.0, ["late", "early"])
