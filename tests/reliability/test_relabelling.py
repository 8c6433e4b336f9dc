import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_spectra import Planted, corrupted

from medfed.reliability.references import ClassReference, class_reference, consensus
from medfed.reliability.relabelling import agreement, relabel, scores

NAN = math.nan


def reference(direction, *residual):
    columns = torch.tensor(residual, dtype=torch.float64).reshape(len(residual), len(direction)).T
    return ClassReference(torch.tensor(direction, dtype=torch.float64), columns, 1)


def decide(representative, residual):
    return agreement(torch.tensor(representative), torch.tensor(residual)).tolist()


def test_scores_by_hand():
    features = torch.tensor([[3.0, 4, 12], [-3, 0, 0]])
    references = {
        0: reference([1, 0, 0], [0, 1, 0], [0, 0, 1]),
        2: reference([0, 1, 0], [1, 0, 0]),
        3: reference([0, 0, 1]),
    }
    along, across = scores(features, references, 4)
    np.testing.assert_allclose(along, [[3, NAN, 4, 12], [3, NAN, 0, 0]])
    np.testing.assert_allclose(across, [[math.sqrt(160 / 2), NAN, 3, NAN], [0, NAN, 3, NAN]])
    along, across = scores(features, references, 4, normalise=True)
    np.testing.assert_allclose(along[0], [3 / 13, NAN, 4 / 13, 12 / 13])
    np.testing.assert_allclose(across[0], [math.sqrt(80) / 13, NAN, 3 / 13, NAN])


def test_residual_score_does_not_depend_on_the_number_of_vectors():
    """A sample with the same projection on each vector scores the same for a class with one and with three."""
    references = {
        0: reference([1, 0, 0, 0], [0, 1, 0, 0]),
        1: reference([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]),
    }
    _, across = scores(torch.tensor([[9.0, 2, 2, 2]]), references, 2)
    assert across.tolist() == [[2, pytest.approx(2)]]


def test_scores_without_samples_or_references():
    for found in scores(torch.zeros(0, 3), {0: reference([1, 0, 0])}, 2):
        assert found.shape == (0, 2)
    for found in scores(torch.ones(2, 3), {}, 2):
        assert torch.isnan(found).all()


@pytest.mark.parametrize(
    ("representative", "residual", "want"),
    [
        ([3.0, 1, 2], [1.0, 2, 3], 0),
        ([3.0, 1, 2], [2.0, 1, 3], -1),  # the criteria disagree
        ([NAN, 1, 2], [NAN, 2, 1], 2),  # two of three classes are known
        ([NAN, NAN, 2], [NAN, NAN, 1], -1),  # nothing to compare with
        ([3.0, 1, 2], [NAN, 1, 2], -1),  # the best by direction has no residual: no change
        ([1.0, 3, 2], [NAN, 1, 2], 1),
        ([1.0, 3, 2], [NAN, 1, NAN], -1),
        ([NAN, NAN, NAN], [NAN, NAN, NAN], -1),
        ([0.0, 0, 0], [0.0, 0, 0], -1),  # a sample without features
        ([3.0, 3, 1], [1.0, 2, 3], -1),  # shared best
        ([3.0, 2, 1], [1.0, 1, 3], -1),
        ([3.0, 1, 1], [1.0, 2, 2], 0),  # a shared second is no matter
    ],
)
def test_agreement_by_hand(representative, residual, want):
    assert decide([representative], [residual]) == [want]


def test_agreement_of_nothing():
    assert decide([[1.0]], [[0.0]]) == [-1]
    assert agreement(torch.zeros(0, 3), torch.zeros(0, 3)).tolist() == []
    assert agreement(torch.zeros(0, 3), torch.zeros(0, 3)).dtype == torch.int64


@settings(max_examples=50)
@given(st.integers(0, 10**6))
def test_agreement_is_the_rule_of_the_paper(seed):
    rng = np.random.default_rng(seed)
    n, classes = rng.integers(1, 20), rng.integers(2, 6)
    representative, residual = rng.random((2, n, classes))
    missing = rng.random(classes) < 0.3
    representative[:, missing] = residual[:, missing] = NAN
    found = agreement(torch.tensor(representative), torch.tensor(residual)).numpy()
    if (~missing).sum() < 2:
        assert (found == -1).all()
        return
    first, second = np.nanargmax(representative, 1), np.nanargmin(residual, 1)
    assert (found == np.where(first == second, first, -1)).all()
    labels = torch.tensor(rng.integers(0, classes, n))
    after = relabel(labels, torch.tensor(found)).numpy()
    assert (after[first != second] == labels.numpy()[first != second]).all()
    assert not missing[found[found >= 0]].any()


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_length_and_sign_of_features_change_no_decision(seed):
    rng = np.random.default_rng(seed)
    features = torch.tensor(rng.normal(size=(15, 6)))
    frames = [np.linalg.qr(rng.normal(size=(6, 4)))[0] for _ in range(3)]
    references = {c: reference(f[:, 0].tolist(), *f[:, 1:].T.tolist()) for c, f in enumerate(frames)}
    plain = agreement(*scores(features, references, 3))
    lengths = torch.tensor(rng.uniform(0.1, 10, (15, 1))) * torch.tensor(rng.choice([-1.0, 1.0], (15, 1)))
    assert torch.equal(agreement(*scores(features * lengths, references, 3)), plain)
    assert torch.equal(agreement(*scores(features, references, 3, normalise=True)), plain)


def test_relabel():
    labels, proposals = torch.tensor([0, 1, 2, 2]), torch.tensor([-1, 0, 2, 1])
    assert relabel(labels, proposals).tolist() == [0, 0, 2, 1]
    assert relabel(labels, proposals, keep=[2]).tolist() == [0, 0, 2, 2]
    assert labels.tolist() == [0, 1, 2, 2]


def references_of(planted, classes, clients=3):
    parts = {}
    for c in classes:
        mine = [class_reference(planted.features(torch.full((25,), c), 10 * c + k)) for k in range(clients)]
        parts[c] = consensus(mine)
    return parts


@pytest.mark.parametrize("rate", [0.0, 0.4, 0.9])
def test_planted_classes_are_recovered_whatever_the_labels_say(rate):
    planted = Planted()
    truth = torch.arange(4).repeat_interleave(25)
    labels = corrupted(truth, rate, 4, 3)
    assert int((labels != truth).sum()) == 4 * int(25 * rate)
    features = planted.features(truth, 99)
    assert torch.equal(relabel(labels, agreement(*scores(features, references_of(planted, range(4)), 4))), truth)


def test_a_class_that_no_clean_client_has_is_never_proposed_and_can_be_kept():
    planted = Planted()
    truth = torch.arange(4).repeat_interleave(25)
    labels = corrupted(truth, 0.4, 4, 3)
    proposals = agreement(*scores(planted.features(truth, 98), references_of(planted, [0, 1, 2]), 4))
    assert torch.equal(proposals[truth < 3], truth[truth < 3])
    assert not (proposals == 3).any()
    kept = relabel(labels, proposals, keep=[3])
    assert torch.equal(kept[labels == 3], labels[labels == 3])
    rest = (labels != 3) & (truth < 3)
    assert torch.equal(kept[rest], truth[rest])


def test_identities_of_the_relabelling_rates():
    """Edits x precision = noise x recovery; what remains wrong = what was not recovered and what was spoilt."""
    planted = Planted()
    truth = torch.arange(4).repeat_interleave(30)
    labels = corrupted(truth, 0.5, 4, 5)
    features = planted.features(truth, 97, noise=3.0)
    after = relabel(labels, agreement(*scores(features, references_of(planted, range(4)), 4)))
    wrong, edited, right = labels != truth, after != labels, after == truth
    n = len(truth)
    assert int((edited & ~right).sum()) > 0  # hard enough for some errors
    assert int((wrong & right).sum()) > 0.5 * int(wrong.sum())
    noise, edits = int(wrong.sum()) / n, int(edited.sum()) / n
    recovery = int((wrong & right).sum()) / int(wrong.sum())
    precision = int((edited & right).sum()) / int(edited.sum())
    spoilt = int((~wrong & ~right).sum()) / int((~wrong).sum())
    assert edits * precision == pytest.approx(noise * recovery)
    assert int((~right).sum()) / n == pytest.approx(noise * (1 - recovery) + (1 - noise) * spoilt)
