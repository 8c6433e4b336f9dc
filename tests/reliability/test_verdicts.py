from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from planted_evidence import CLASSES, client

from medfed.federation.messages import Message, check_plain
from medfed.reliability.evidence import Evidence, evidence
from medfed.reliability.grouping import two_groups
from medfed.reliability.shares import on_simplex
from medfed.reliability.verdicts import judge


def federation(rates: list[float], seed: int = 0, samples: int = 60, swap: bool = False) -> dict[str, Evidence]:
    return {
        f"c{k:02d}": evidence(*client(samples, rate, 1000 * seed + k, swap), CLASSES) for k, rate in enumerate(rates)
    }


def noisy(rates: list[float]) -> tuple[str, ...]:
    return tuple(f"c{k:02d}" for k, rate in enumerate(rates) if rate > 0)


@pytest.mark.parametrize("rate", [0.4, 0.6, 0.9])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("clean", [3, 7])
def test_planted_noise_is_found(rate: float, swap: bool, clean: int) -> None:
    rates = [0.0] * clean + [rate] * (10 - clean)
    for seed in range(3):
        verdict, _ = judge(federation(rates, seed, swap=swap))
        assert verdict.noisy == noisy(rates), verdict.note
        assert len(verdict.clean) == clean


def test_nobody_is_accused_where_all_are_clean() -> None:
    for seed in range(25):
        verdict, _ = judge(federation([0.0] * 10, 100 + seed))
        assert not verdict.noisy
        assert not verdict.undetermined
        assert "nobody is accused" in verdict.note


def test_a_single_noisy_client_is_found() -> None:
    verdict, _ = judge(federation([0.0] * 9 + [0.6], 3))
    assert verdict.noisy == ("c09",)


def test_a_nearly_complete_swap_by_the_majority_is_told_from_the_truth() -> None:
    rates = [0.0, 0.0, 0.0, *[0.9] * 7]
    verdict, state = judge(federation(rates, 5, swap=True))
    assert verdict.clean == ("c00", "c01", "c02")
    assert sorted(map(tuple, state["renamed"])) == [(0, 1), (2, 3)]
    assert "swapped" in verdict.note


def test_estimated_shares_follow_the_true_ones() -> None:
    rates = [0.0, 0.0, 0.0, 0.2, 0.4, 0.6, 0.8, 0.0]
    _, state = judge(federation(rates, 6, samples=200))
    raw = np.array([state["shares"][f"c{k:02d}"]["raw"] for k in range(8)])
    assert np.corrcoef(raw, rates)[0, 1] > 0.99


def test_labels_drawn_everywhere_make_nobody_clean() -> None:
    drawn = {f"c{k}": evidence(*client(60, 0.75, 40 + k), CLASSES) for k in range(6)}
    verdict, _ = judge(drawn)
    assert not verdict.clean
    assert "better than chance" in verdict.note


def test_order_of_clients_does_not_matter() -> None:
    sent = federation([0.0, 0.0, 0.5, 0.5, 0.0, 0.3], 7)
    one, two = judge(sent), judge(dict(reversed(sent.items())))
    assert one[0] == two[0]
    assert one[1] == two[1]


def test_names_of_classes_do_not_matter() -> None:
    rates = [0.0, 0.0, 0.0, 0.0, 0.5, 0.5]
    names = torch.tensor([2, 0, 3, 1])
    plain, renamed = {}, {}
    for k, rate in enumerate(rates):
        x, y = client(60, rate, 700 + k)
        plain[f"c{k}"], renamed[f"c{k}"] = evidence(x, y, CLASSES), evidence(x, names[y], CLASSES)
    one, two = judge(plain)[1]["shares"], judge(renamed)[1]["shares"]
    for name in one:
        assert one[name]["raw"] == pytest.approx(two[name]["raw"], abs=1e-5)


def test_clients_of_one_class_are_judged_by_the_others() -> None:
    sent = federation([0.0] * 5 + [0.5] * 3, 8)
    x, y = client(80, 0.0, 91)
    sent["right"] = evidence(x[y == 2], y[y == 2], CLASSES)
    sent["wrong"] = evidence(x[y == 2], torch.full((20,), 1), CLASSES)
    assert "separability" not in sent["right"].values
    verdict, _ = judge(sent)
    assert verdict.status["right"] == "clean"
    assert verdict.status["wrong"] == "noisy"


def test_who_sends_no_mean_is_undetermined() -> None:
    sent = federation([0.0] * 4 + [0.6] * 2, 9)
    sent["tiny"] = evidence(torch.rand(3, 24), torch.arange(3), CLASSES)
    verdict, state = judge(sent)
    assert verdict.undetermined == ("tiny",)
    assert math.isnan(verdict.posterior["tiny"])
    assert state["shares"]["tiny"]["wrong"] is None


@pytest.mark.parametrize("clients", [0, 1])
def test_fewer_than_two_clients(clients: int) -> None:
    verdict, state = judge(federation([0.0] * clients))
    assert verdict.clean == tuple(f"c{k:02d}" for k in range(clients))
    assert "nobody to differ from" in verdict.note
    check_plain(state)


def test_two_clients() -> None:
    verdict, _ = judge(federation([0.0, 0.0], 10))
    assert not verdict.noisy


def test_identical_clients_are_clean() -> None:
    one = evidence(*client(60, 0.0, 1), CLASSES)
    verdict, _ = judge({f"c{k}": one for k in range(5)})
    assert len(verdict.clean) == 5


def test_constant_features_accuse_nobody() -> None:
    sent = {f"c{k}": evidence(torch.ones(20, 24), torch.arange(20) % CLASSES, CLASSES) for k in range(4)}
    verdict, _ = judge(sent)
    assert not verdict.noisy


def test_the_state_is_plain_and_survives_json() -> None:
    sent = federation([0.0, 0.0, 0.0, 0.5], 11)
    messages = {name: Message(e.tensors, {**e.values, "samples": 60}) for name, e in sent.items()}
    first, state = judge(messages)
    assert first == judge(sent)[0]
    check_plain(state)
    again = json.loads(json.dumps(state))
    assert judge(messages, again) == judge(messages, state)


def test_evidence_of_rounds_is_averaged() -> None:
    sent = federation([0.0, 0.0, 0.0, 0.0, 0.5, 0.5], 12)
    _, first = judge(sent)
    verdict, second = judge(sent, first)
    # The same evidence again is no further evidence.
    for name, share in second["shares"].items():
        assert share["raw"] == pytest.approx(first["shares"][name]["raw"])
        assert share["error"] == pytest.approx(first["shares"][name]["error"])
        assert share["calls"] == 2
    assert verdict.noisy == ("c04", "c05")


def test_a_verdict_is_revised() -> None:
    _, state = judge(federation([0.0, 0.0, 0.0, 0.0, 0.5, 0.0], 13))
    verdict, _ = judge(federation([0.0] * 6, 14), state)
    later, _ = judge(federation([0.0] * 4 + [0.5, 0.5], 15))
    assert verdict.status["c05"] == "clean"
    assert later.status["c05"] == "noisy"


def test_points_on_the_simplex_by_hand() -> None:
    points = np.array([[0.2, 0.3, 0.5], [2.0, 0.0, 0.0], [0.7, 0.7, -0.4]])
    np.testing.assert_allclose(on_simplex(points), [[0.2, 0.3, 0.5], [1, 0, 0], [0.5, 0.5, 0]], atol=1e-12)


def test_two_groups_are_split_and_one_is_not() -> None:
    errors = np.full(10, 0.04)
    apart = two_groups(np.array([0.3, 0.32, 0.28, 0.6, 0.62, 0.58, 0.61, 0.59, 0.6, 0.57]), errors)
    assert apart.split
    assert apart.centre == pytest.approx(0.3, abs=0.02)
    np.testing.assert_array_equal(apart.clean > 0.5, [True] * 3 + [False] * 7)
    together = two_groups(0.3 + 0.04 * np.array([-1.5, -1, -0.6, -0.3, 0, 0.1, 0.4, 0.7, 1.1, 1.4]), errors)
    assert not together.split
    assert (together.clean == 1).all()


def test_a_large_error_keeps_a_client_from_being_accused() -> None:
    values = np.array([0.3, 0.31, 0.29, 0.3, 0.6, 0.61, 0.59, 0.6, 0.45])
    small, large = np.full(9, 0.03), np.full(9, 0.03)
    large[8] = 0.5
    sure, unsure = two_groups(values, small).clean[8], two_groups(values, large).clean[8]
    assert abs(unsure - 0.5) < 0.2
    assert abs(sure - 0.5) >= abs(unsure - 0.5) - 0.05


def test_no_client_and_one() -> None:
    assert len(two_groups(np.zeros(0), np.zeros(0)).clean) == 0
    assert two_groups(np.array([0.5]), np.array([0.1])).clean.tolist() == [1.0]
