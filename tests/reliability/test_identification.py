import json
import math

import numpy as np
import pytest
import torch
from planted_spectra import Planted, corrupted

from medfed.errors import DataError
from medfed.reliability import identification
from medfed.reliability.identification import Verdict, published, vote_by_loss
from medfed.reliability.references import class_reference, consensus
from medfed.reliability.relabelling import agreement, relabel, scores
from medfed.reliability.spectra import Descriptors, class_directions, descriptors, similarity

NAN = math.nan
ALONE = Descriptors(NAN, NAN, NAN, 0)


def pair(cosine):
    """The descriptors of a client with two classes."""
    return Descriptors(cosine, cosine**2, cosine, 2)


def many(clean, noisy, seed=0):
    """Clean clients near (0.9, 0.92), noisy ones near (0.97, 0.98), without overlap."""
    rng = np.random.default_rng(seed)
    found = {}
    for k in range(clean + noisy):
        mean = (0.90 if k < clean else 0.97) + rng.uniform(-0.005, 0.005)
        found[f"{'clean' if k < clean else 'noisy'}_{k}"] = Descriptors(
            mean, mean**2 + rng.uniform(0, 1e-4), mean + rng.uniform(0.01, 0.02), 12
        )
    return found


def named(verdict):
    return all(c.startswith(s) for c, s in verdict.status.items())


@pytest.mark.parametrize(
    ("clean", "noisy", "use_maximum"),
    [(3, 27, True), (3, 7, True), (3, 7, False), (5, 5, True), (8, 2, False), (1, 4, True)],
)
def test_separate_groups_are_found(clean, noisy, use_maximum):
    verdict = published(many(clean, noisy), use_maximum=use_maximum, starts=5)
    assert named(verdict)
    assert len(verdict.clean) == clean
    assert verdict.note == ""
    assert all((p > 0.5) == (verdict.status[c] == "clean") for c, p in verdict.posterior.items())


def test_decision_depends_neither_on_the_order_of_the_clients_nor_on_the_day():
    found = many(4, 6)
    first = published(found)
    assert published(found) == first
    assert published(dict(reversed(found.items()))) == first
    rng = np.random.default_rng(3)
    mixed = {f"{k:02}": Descriptors(*rng.normal(size=3), 12) for k in range(16)}
    turned = [published(dict(sorted(mixed.items(), key=lambda item: rng.random())), starts=1) for _ in range(4)]
    assert all(t == published(mixed, starts=1) for t in turned)


def test_a_narrow_band_is_standardised():
    """Directions of non-negative features are nearly parallel: all differences are below the regularisation."""
    found = {
        c: Descriptors(1 - (1 - d.mean) / 1000, 1 - (1 - d.energy) / 1000, 1 - (1 - d.maximum) / 1000, 12)
        for c, d in many(3, 7).items()
    }
    assert named(published(found))


def test_clients_with_one_class_have_no_part_in_the_mixture():
    found = many(3, 7)
    before = published(found)
    verdict = published({**found, "alone_1": ALONE, "alone_0": ALONE})
    assert verdict.undetermined == ("alone_0", "alone_1")
    assert verdict.clean == before.clean
    assert verdict.noisy == before.noisy
    assert math.isnan(verdict.posterior["alone_0"])
    assert "alone_0, alone_1" in verdict.note
    zeros = published({**found, "alone": Descriptors(0.0, 0.0, 0.0, 0)})
    assert zeros.undetermined == ("alone",)
    assert zeros.clean == before.clean
    broken = published({**found, "broken": Descriptors(NAN, 0.5, 0.5, 6)})
    assert broken.undetermined == ("broken",)
    assert broken.clean == before.clean


@pytest.mark.parametrize("count", [2, 3, 10])
def test_identical_clients_are_all_clean(count):
    verdict = published({str(k): pair(0.9 + 1e-14 * k) for k in range(count)})
    assert len(verdict.clean) == count
    assert "identical" in verdict.note


@pytest.mark.parametrize("others", [0, 2])
def test_one_client_alone_is_clean(others):
    verdict = published({"me": pair(0.9), **{f"alone_{k}": ALONE for k in range(others)}})
    assert verdict.clean == ("me",)
    assert math.isnan(verdict.posterior["me"])
    assert "fewer than two" in verdict.note
    assert len(verdict.undetermined) == others


def test_nobody():
    assert published({}).status == {}
    verdict = published({"alone": ALONE})
    assert verdict.undetermined == ("alone",)
    assert verdict.clean == verdict.noisy == ()


def test_two_clients_that_differ_are_told_apart():
    verdict = published({"a": pair(0.9), "b": pair(0.8)})
    assert (verdict.clean, verdict.noisy) == (("b",), ("a",))


@pytest.mark.parametrize("use_maximum", [True, False])
def test_two_classes_only(use_maximum):
    """Mean and maximum are then one number and the energy its square: a singular covariance."""
    found = {f"{'clean' if s < 0.95 else 'noisy'}_{s}": pair(s) for s in (0.90, 0.905, 0.97, 0.972, 0.975)}
    assert named(published(found, use_maximum=use_maximum))


@pytest.mark.parametrize(("high", "want"), [(True, "noisy"), (False, "clean")])
def test_all_clients_in_one_component(monkeypatch, high, want):
    """No client clean, or none noisy: the verdict says so and invents nobody."""

    def one_component(points, seed, **settings):
        member = np.zeros((len(points), 2))
        member[:, 1 if high else 0] = 1
        return np.array([[-1.0, 0, 0], [1.0, 0, 0]]), member, True

    monkeypatch.setattr(identification, "_mixture", one_component)
    verdict = published(many(2, 2))
    assert set(verdict.status.values()) == {want}
    assert ("No client was judged clean" in verdict.note) == high


def test_lower_mean_similarity_is_clean_even_if_the_maximum_says_otherwise():
    clean = {f"clean_{k}": Descriptors(0.80 + 0.001 * k, 0.7, 0.99, 12) for k in range(3)}
    noisy = {f"noisy_{k}": Descriptors(0.90 + 0.001 * k, 0.8, 0.93, 12) for k in range(3)}
    assert named(published({**noisy, **clean}))


def test_a_mixture_that_does_not_converge_is_noted():
    rng = np.random.default_rng(1)
    found = {str(k): Descriptors(*rng.normal(size=3), 12) for k in range(30)}
    assert "did not converge" in published(found, starts=1, iterations=1).note


def test_verdict_as_plain_values():
    verdict = published({**many(2, 2), "alone": ALONE})
    text = json.dumps(verdict.to_plain(), allow_nan=False)
    back = Verdict.from_plain({**json.loads(text), "identification": "published", "round": 3})
    assert back.status == verdict.status
    assert back.note == verdict.note
    assert back.to_plain() == verdict.to_plain()
    with pytest.raises(ValueError, match="'good'"):
        Verdict({"a": "good"})


def test_planted_federation_from_features_to_repaired_labels():
    """8 clients, 3 of them clean, half of the labels of the others wrong: everything is found and repaired."""
    planted = Planted()
    truth = torch.arange(4).repeat_interleave(20)
    labels, features, sent = {}, {}, {}
    for k in range(8):
        name = f"{'clean' if k % 3 == 0 else 'noisy'}_{k}"
        labels[name] = truth if k % 3 == 0 else corrupted(truth, 0.5, 4, k)
        features[name] = planted.features(truth, k, noise=0.3)
        sent[name] = descriptors(similarity(class_directions(features[name], labels[name], 4), 4))
    verdict = published(sent)
    assert named(verdict)
    references = {c: consensus([class_reference(features[k][labels[k] == c]) for k in verdict.clean]) for c in range(4)}
    edits = 0
    for name in verdict.noisy:
        after = relabel(labels[name], agreement(*scores(features[name], references, 4)))
        assert torch.equal(after, truth)
        edits += int((after != labels[name]).sum())
    assert edits == 5 * 4 * 10


def test_fedsir_takes_absolute_cosines_and_no_maximum():
    """Signs scattered at random hide the order of the means; absolute cosines keep it."""
    rng = np.random.default_rng(0)
    found = {}
    for k in range(8):
        size = 0.6 if k < 4 else 0.9
        sign = rng.choice([-1.0, 1.0], 4)
        table = torch.tensor(np.outer(sign, sign) * size + np.diag(np.full(4, 1 - size)))
        table += 0.001 * k * torch.ones(4, 4)
        found[f"{'clean' if k < 4 else 'noisy'}_{k}"] = descriptors(table, absolute=True)
    assert named(published(found, use_maximum=False))


LOSSES = torch.tensor([[0.2, 0.3, NAN], [0.25, NAN, 0.2], [0.2, 0.35, 0.25], [1.2, 1.1, 0.9], [1.3, NAN, 1.0]])
FIVE = ["a", "b", "c", "d", "e"]


def test_vote_by_loss_finds_the_clients_with_large_losses():
    verdict = vote_by_loss(LOSSES, FIVE)
    assert verdict.noisy == ("d", "e")
    assert verdict.posterior == {"a": 1, "b": 1, "c": 1, "d": 0, "e": 0}
    assert vote_by_loss(LOSSES.flip(0), FIVE[::-1]) == verdict


def test_losses_are_scaled_class_by_class_with_the_minimum_for_the_missing(monkeypatch):
    seen = []

    def look(points, seed):
        seen.append(points)
        return np.array([[0.0], [1.0]]), np.eye(2)[[0, 0, 1]], True

    monkeypatch.setattr(identification, "_mixture", look)
    table = torch.tensor([[1.0, NAN, 5.0, NAN], [2.0, 10.0, 5.0, NAN], [5.0, 30.0, NAN, NAN]])
    vote_by_loss(table, ["a", "b", "c"], seeds=[0])
    np.testing.assert_allclose(seen[0], [[0, 0, 0, 0], [0.25, 0, 0, 0], [1, 1, 0, 0]])


def test_most_frequent_noisy_set_wins_and_shares_are_told(monkeypatch):
    """Seeds 0 and 3 accuse nobody but c, seed 1 accuses b and c, seed 2 gives the components the other way round."""
    second = {0: [0, 0, 1], 1: [0, 1, 1], 2: [1, 1, 0], 3: [0, 0, 1]}

    def fit(points, seed):
        means = np.array([[0.5, 0.0], [0.0, 1.0]])  # the sum decides, not the first class
        return means[::-1] if seed == 2 else means, np.eye(2)[second[seed]], True

    monkeypatch.setattr(identification, "_mixture", fit)
    verdict = vote_by_loss(torch.tensor([[1.0, 1], [2, 2], [3, 3]]), ["a", "b", "c"], seeds=range(4))
    assert verdict.noisy == ("c",)
    assert verdict.posterior == {"a": 1.0, "b": 0.75, "c": 0.0}
    assert "3 of 4" in verdict.note


@pytest.mark.parametrize(
    ("table", "clean", "undetermined"),
    [
        ([[0.5, 0.7], [0.5, 0.7], [0.5, 0.7]], 3, 0),
        ([[0.5, NAN], [0.5, NAN]], 2, 0),  # constant, and absent everywhere
        ([[0.5, 0.7], [NAN, NAN]], 1, 1),
        ([[NAN, NAN], [NAN, NAN]], 0, 2),
        ([[0.5, 0.7]], 1, 0),
    ],
)
def test_degenerate_losses(table, clean, undetermined):
    verdict = vote_by_loss(torch.tensor(table), FIVE[: len(table)])
    assert (len(verdict.clean), len(verdict.noisy), len(verdict.undetermined)) == (clean, 0, undetermined)
    assert verdict.note


def test_client_without_losses_has_no_part_in_the_vote():
    table = torch.cat([LOSSES, torch.full((1, 3), NAN)])
    verdict = vote_by_loss(table, [*FIVE, "empty"])
    assert verdict.undetermined == ("empty",)
    assert verdict.noisy == ("d", "e")


def test_faulty_losses_are_refused():
    with pytest.raises(DataError, match="infinite at b"):
        vote_by_loss(torch.tensor([[1.0], [math.inf]]), ["a", "b"])
    with pytest.raises(ValueError, match="for 1 clients"):
        vote_by_loss(torch.ones(2, 2), ["a"])
