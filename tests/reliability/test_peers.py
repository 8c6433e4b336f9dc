"""Clients are compared with those whose images are of like quality."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from planted_evidence import CLASSES, DIMENSION, client

from medfed.federation.messages import check_plain
from medfed.reliability.evidence import evidence
from medfed.reliability.peers import distance, judge_among_peers, judged_by_others, peer_groups
from medfed.reliability.verdicts import judge, state_of
from medfed.seeding import torch_generator

BAD = ("c6", "c7", "c8", "c9")


def degraded(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Features of bad images: other axes, elsewhere, and with more noise."""
    g = torch_generator("degraded", seed)
    noise = torch.randn(x.shape, generator=g, dtype=torch.float64)
    level = torch.linspace(0, 4, DIMENSION, dtype=torch.float64)
    return (0.8 * x.flip(1) + level + 0.25 * noise).abs()


def federation(noisy: tuple[str, ...] = (), rate: float = 0.6, swap: bool = False, bad: tuple[str, ...] = BAD) -> dict:
    """Evidence of ten clients, c0 to c9."""
    sent = {}
    for k in range(10):
        name = f"c{k}"
        x, y = client(70 + 5 * k, rate if name in noisy else 0.0, seed=k, swap=swap)
        sent[name] = evidence(degraded(x, k) if name in bad else x, y, CLASSES)
    return sent


def test_distance_by_hand() -> None:
    """Means 3 apart in the first axis, variances 4 and 1 there and 0 in the other; 8 and 2 samples."""
    one = (8, np.array([1.0, 0.0]), np.diag([4.0, 0.0]))
    other = (2, np.array([4.0, 0.0]), np.diag([1.0, 0.0]))
    # (9 - 4/8 - 1/2) / sqrt(9 * (4 + 1) / 2)
    assert distance(one, other) == pytest.approx(8 / math.sqrt(22.5))
    assert distance(one, one) == 0.0


def test_clients_with_other_images_form_a_group_and_other_class_mixes_do_not() -> None:
    sent = federation()
    x, y = client(80, 0.0, seed=30)
    sent["d0"] = evidence(x[y == 0], y[y == 0], CLASSES)  # one class alone
    sent["d1"] = evidence(degraded(x, 3)[y < 2], y[y < 2], CLASSES)
    assert peer_groups(sent) == [["c0", "c1", "c2", "c3", "c4", "c5", "d0"], [*BAD, "d1"]]


def test_groups_do_not_depend_on_labels() -> None:
    sent = federation(noisy=("c0", "c1", "c7"), rate=0.9)
    assert peer_groups(sent) == peer_groups(federation())


def test_chains_of_near_clients_are_one_group() -> None:
    """Three clients of which the outer two are far from each other, and each near the one between them."""
    sent = {}
    for name, at in (("a", 0.0), ("z", 4.4), ("m", 2.2)):
        x = torch.randn(400, 6, generator=torch_generator("chain", name), dtype=torch.float64)
        x[:, 0] += at
        one = evidence(x, torch.arange(400) % 2, 2)
        total, second = x.sum(0).float(), (x.T @ x)[tuple(torch.triu_indices(6, 6))].float()
        sent[name] = type(one)(one.values, {**one.tensors, "evidence/total": total, "evidence/moment": second})
    assert peer_groups({k: sent[k] for k in "az"}) == [["a"], ["z"]]
    assert peer_groups(sent) == [["a", "m", "z"]]


@pytest.mark.parametrize("noisy", [(), ("c1", "c4", "c5")])
def test_with_images_of_one_quality_nothing_else_is_done(noisy: tuple[str, ...]) -> None:
    sent = federation(noisy, bad=())
    verdict, state = judge_among_peers(sent)
    usual, before = judge(sent)
    assert verdict == usual
    assert {**state, "peers": None, "within": None} == {**before, "peers": None, "within": None}
    again, state = judge_among_peers(sent, state)
    assert again == judge(sent, before)[0]


def test_bad_images_alone_accuse_nobody() -> None:
    verdict, state = judge_among_peers(federation())
    assert verdict.noisy == verdict.undetermined == ()
    assert "2 groups" in verdict.note
    assert state["peers"] == [[f"c{k}" for k in range(6)], list(BAD)]
    check_plain(state)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    "noisy", [("c0", "c1"), ("c6", "c7"), ("c0", "c1", "c2", "c7", "c8"), ("c1", "c6", "c8", "c9")]
)
def test_wrong_labels_are_found_under_either_quality(noisy: tuple[str, ...], swap: bool) -> None:
    verdict, state = judge_among_peers(federation(noisy, swap=swap, rate=0.5))
    assert verdict.noisy == noisy
    wrong = {c: s["wrong"] for c, s in state["shares"].items()}
    assert min(wrong[c] for c in noisy) > max(w for c, w in wrong.items() if c not in noisy)


def test_labels_of_a_group_that_nobody_can_predict_are_undetermined() -> None:
    """The images may be too bad for anything, or all labels be wrong."""
    verdict, _ = judge_among_peers(federation(noisy=BAD, rate=0.75))
    assert verdict.clean == tuple(f"c{k}" for k in range(6))
    assert verdict.undetermined == BAD


def test_labels_that_nobody_can_predict_leave_all_undetermined() -> None:
    everybody = tuple(f"c{k}" for k in range(10))
    verdict, _ = judge_among_peers(federation(noisy=everybody, rate=0.75))
    assert verdict.clean == ()


def test_groups_stay_and_evidence_is_pooled() -> None:
    noisy = ("c0", "c7")
    first, state = judge_among_peers(federation(noisy))
    # Later features do not show the quality any more.
    later = federation(noisy, bad=())
    second, after = judge_among_peers(later, state)
    assert after["peers"] == state["peers"]
    assert first.noisy == second.noisy == noisy
    assert {s["calls"] for s in after["shares"].values()} == {2}
    assert {s["calls"] for inner in after["within"].values() for s in inner["shares"].values()} == {2}
    absent = {c: e for c, e in later.items() if c not in ("c7", "c3")}
    third, after = judge_among_peers(absent, state)
    assert set(third.status) == set(absent)
    assert after["peers"] == state["peers"]


def test_a_client_that_comes_later_has_peers_of_its_own_kind() -> None:
    everybody = federation(("c1",))
    _, state = judge_among_peers({c: e for c, e in everybody.items() if c not in ("c5", "c9")})
    verdict, state = judge_among_peers(everybody, state)
    assert state["peers"] == [[f"c{k}" for k in range(6)], list(BAD)]
    assert verdict.noisy == ("c1",)


def test_few_clients() -> None:
    assert judge_among_peers({})[0].status == {}
    x, y = client(60, 0.0, seed=1)
    good, bad = evidence(x, y, CLASSES), evidence(degraded(x, 1), y, CLASSES)
    assert judge_among_peers({"a": good})[0].status == {"a": "clean"}
    assert judge_among_peers({"a": good, "b": bad})[0].status == {"a": "clean", "b": "clean"}
    silent = evidence(x[:1], y[:1], CLASSES)  # too few samples for a mean
    told = judge_among_peers({"a": good, "b": bad, "c": silent})
    assert told[0].status == {"a": "clean", "b": "clean", "c": "undetermined"}
    assert told[1]["peers"] == [["a"], ["b"]]
    # One class each: no predictability, and nobody to compare with in the second group.
    one = {"a": evidence(x[y == 0], y[y == 0], CLASSES), "b": evidence(degraded(x, 1)[y == 1], y[y == 1], CLASSES)}
    assert set(judge_among_peers(one)[0].status.values()) == {"undetermined"}


def test_small_groups_need_less_evidence_where_noisy_clients_are_known() -> None:
    """Centres at 0 and 0.5, and Bayes' rule with even odds by hand."""
    names = ["a", "b", "c", "d", "x", "y", "z"]
    raw = np.array([0.0, 0.1, -0.1, 0.5, 0.3, 0.6, -0.2])
    alone = {"a": 0.9, "b": 0.99, "c": 1.0, "d": 0.0}
    found = judged_by_others(names, raw, np.full(7, 0.2), alone)
    odds = (0.2**2 - 0.3**2) / (2 * 0.04)
    assert found["x"] == pytest.approx(1 / (1 + math.exp(-odds)))
    # Beyond a centre counts as at it.
    assert found["y"] == pytest.approx(1 / (1 + math.exp(0.25 / 0.08)))
    assert found["z"] == pytest.approx(1 / (1 + math.exp(-0.25 / 0.08)))
    assert set(found) == {"x", "y", "z"}
    assert judged_by_others(names, raw, np.full(7, 0.2), {"a": 1.0, "b": 1.0}) == {}


def test_share_of_wrong_labels_is_read_between_right_labels_and_labels_drawn_at_random() -> None:
    """Raw values of 0.3 and 0.75 are those of right labels and of labels of four classes drawn at random."""
    raw, error, calls = np.array([0.3, 0.5, 0.9, 0.2, 1.5]), np.full(5, 0.1), np.ones(5, dtype=int)
    state = state_of(list("abcdef"), list("abcde"), raw, error, calls, (0.3, 0.75), 0.75, ())
    found = {name: share["wrong"] for name, share in state["shares"].items()}
    # 0.75 * (raw - 0.3) / 0.45, between 0 and 1
    assert found == {"a": 0.0, "b": pytest.approx(1 / 3), "c": pytest.approx(1.0), "d": 0.0, "e": 1.0, "f": None}


def test_share_of_wrong_labels_is_near_the_truth() -> None:
    noisy = ("c0", "c3", "c7")
    _, state = judge_among_peers(federation(noisy, rate=0.5))
    assert all(abs(state["shares"][c]["wrong"] - (0.5 if c in noisy else 0.0)) < 0.25 for c in state["shares"])
