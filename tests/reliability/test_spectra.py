import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_spectra import Planted, corrupted

from medfed.errors import DataError
from medfed.reliability import spectra
from medfed.reliability.spectra import balanced, class_directions, descriptors, right_singular, similarity
from medfed.seeding import torch_generator

SHAPES = [(30, 90), (90, 30), (40, 40), (1, 12), (12, 1)]


def matrix(n, d, values, seed=0):
    """A matrix with the given singular values, and its right singular vectors."""
    g = torch_generator("matrix", n, d, seed)
    u = torch.linalg.qr(torch.randn(n, len(values), generator=g, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(d, len(values), generator=g, dtype=torch.float64)).Q
    values = torch.as_tensor(values, dtype=torch.float64)
    return (u * values) @ v.T, v


def off(one, other):
    """Sine of the angle between corresponding columns."""
    other = other * torch.sign((one * other).sum(0))
    return torch.linalg.vector_norm(one - other, dim=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_decomposition_of_torch(shape, dtype):
    rows = torch.rand(shape, generator=torch_generator("rows", *shape)).to(dtype)
    values, vectors = right_singular(rows)
    _, want, right = torch.linalg.svd(rows.double(), full_matrices=False)
    assert values.dtype == vectors.dtype == torch.float64
    assert torch.allclose(values, want, rtol=0, atol=1e-13 * float(want[0]))
    assert off(vectors, right.T).max() < 1e-10


@pytest.mark.parametrize("shape", [(30, 90), (90, 30), (40, 40)])
@pytest.mark.parametrize("weakest", [1e-2, 1e-4, 1e-6])
def test_weak_directions_are_as_accurate_as_promised(shape, weakest):
    planted = torch.logspace(0, math.log10(weakest), 20, dtype=torch.float64)
    rows, vectors = matrix(*shape, planted)
    found, directions = right_singular(rows)
    assert len(found) == 20
    gaps = (planted[:, None].square() - planted.square()).abs().fill_diagonal_(math.inf)
    bound = 50 * spectra.EPS * planted[0] ** 2 / gaps.amin(1)
    assert (off(directions, vectors) < bound + 1e-14).all()
    assert ((found - planted).abs() < 50 * spectra.EPS * planted[0] + planted * bound.square()).all()
    assert torch.allclose(directions.T @ directions, torch.eye(20, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("shape", [(30, 60), (60, 30)])
def test_the_cut_lies_where_the_docstring_says(shape):
    cut = math.sqrt(60 * spectra.EPS)
    rows, _ = matrix(*shape, [1.0, 3 * cut, cut / 3])
    assert len(right_singular(rows)[0]) == 2


@pytest.mark.parametrize("shape", [(30, 60), (60, 30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rank_of_a_rank_deficient_matrix(shape, dtype):
    rows, planted = matrix(*shape, [5.0, 4.0, 3.0, 2.0])
    values, vectors = right_singular(rows.to(dtype))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    assert torch.allclose(values, torch.tensor([5.0, 4, 3, 2], dtype=torch.float64), atol=tolerance)
    assert off(vectors, planted).max() < 5 * tolerance


@pytest.mark.parametrize("rows", [torch.zeros(4, 3), torch.zeros(0, 3)])
def test_nothing_has_no_direction(rows):
    values, vectors = right_singular(rows)
    assert values.shape == (0,)
    assert vectors.shape == (3, 0)


def test_rank_limits_what_is_returned():
    rows = torch.rand(8, 5, generator=torch_generator("limit"))
    values, vectors = right_singular(rows)
    for rank in (0, 1, 3, 99):
        some, columns = right_singular(rows, rank)
        assert torch.allclose(some, values[:rank], rtol=1e-12)
        assert torch.allclose(columns, vectors[:, :rank], atol=1e-12)


@pytest.mark.parametrize("power", [-900, -200, 200, 900])
def test_size_of_the_features_does_not_matter(power):
    rows, _ = matrix(6, 9, [3.0, 2.0, 1.0])
    values, vectors = right_singular(rows)
    scaled, same = right_singular(rows * 2.0**power)
    assert torch.equal(scaled, values * 2.0**power)
    assert torch.equal(same, vectors)


@pytest.mark.parametrize(
    ("rows", "want"),
    [
        ([[-3.0, 0.0]], [-1.0, 0.0]),  # along the rows, though the sum of the entries is negative
        ([[3.0, -4.0], [3.0, -4.0]], [0.6, -0.8]),
        ([[1.0, 2.0], [-1.0, -2.0]], [1 / 5**0.5, 2 / 5**0.5]),  # mean zero: positive sum
        ([[-0.8, 0.6, 0.6], [0.8, -0.6, -0.6]], [-0.8 / 1.36**0.5, 0.6 / 1.36**0.5, 0.6 / 1.36**0.5]),
        ([[-1.0, 1.0], [1.0, -1.0]], [0.5**0.5, -(0.5**0.5)]),  # sum zero too: first largest entry positive
    ],
)
def test_sign(rows, want):
    _, vectors = right_singular(torch.tensor(rows))
    assert torch.allclose(vectors[:, 0], torch.tensor(want, dtype=torch.float64), atol=1e-12)


def test_non_negative_features_have_a_non_negative_direction():
    rows = torch.rand(50, 20, generator=torch_generator("relu"))
    assert (right_singular(rows, 1)[1] > 0).all()


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), times=st.integers(2, 4), n=st.integers(2, 12), d=st.integers(2, 12))
def test_repeating_and_reordering_rows_changes_no_direction(seed, times, n, d):
    g = torch_generator("rows", seed)
    rows = torch.randn(n, d, generator=g, dtype=torch.float64) + 0.5
    values, vectors = right_singular(rows)
    gap = (values[:-1] - values[1:]).min() / values[0] if len(values) > 1 else 1.0
    if gap < 1e-3:
        return
    again = rows.repeat_interleave(times, 0)[torch.randperm(n * times, generator=g)]
    larger, same = right_singular(again)
    assert torch.allclose(larger[: len(values)], values * times**0.5, rtol=1e-9)
    assert torch.allclose(same[:, : len(values)], vectors, atol=1e-7)


def test_same_bits_again_and_same_numbers_with_other_threads():
    rows = torch.rand(60, 80, generator=torch_generator("bits"))
    values, vectors = right_singular(rows)
    assert all(torch.equal(a, b) for a, b in zip(right_singular(rows.clone()), (values, vectors)))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        others = right_singular(rows)
    finally:
        torch.set_num_threads(threads)
    assert torch.allclose(others[0], values, rtol=1e-12)
    assert torch.allclose(others[1], vectors, atol=1e-10)


def test_dependent_columns_still_give_an_orthonormal_basis():
    basis, lengths = spectra._orthonormal(torch.tensor([[2.0, 2.0], [0.0, 0.0]], dtype=torch.float64))
    assert torch.allclose(basis.T @ basis, torch.eye(2, dtype=torch.float64))
    assert lengths.tolist() == [2.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_features_that_are_not_finite_are_refused(bad):
    rows = torch.ones(3, 2)
    rows[1, 1] = bad
    with pytest.raises(DataError, match="1 of 6 numbers are not finite"):
        right_singular(rows)
    with pytest.raises(DataError):
        class_directions(rows, torch.zeros(3, dtype=torch.int64), 1)


@pytest.mark.parametrize("rows", [torch.ones(3), torch.ones(3, 2, dtype=torch.int64)])
def test_features_must_be_a_matrix_of_floating_numbers(rows):
    with pytest.raises(ValueError, match="floating"):
        right_singular(rows)


def test_directions_of_the_classes():
    features = torch.tensor([[2.0, 0], [1, 0], [0, 3], [0, 1], [5, 5], [0, 0], [0, 0]])
    labels = torch.tensor([0, 0, 2, 2, 3, 4, 4])
    found = class_directions(features, labels, 6)
    assert sorted(found) == [0, 2]  # 3 has one sample, 4 only zeros, 1 and 5 none
    assert torch.allclose(found[0], torch.tensor([1.0, 0], dtype=torch.float64))
    assert torch.allclose(found[2], torch.tensor([0, 1.0], dtype=torch.float64))
    assert sorted(class_directions(features, labels, 6, min_samples=1)) == [0, 2, 3]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (torch.tensor([0, 1]), "2 labels"),
        (torch.tensor([0, 1, 2]), "from 0 to 2 for 2 classes"),
        (torch.tensor([0, 1, -1]), "from -1 to 1"),
        (torch.tensor([0.0, 1, 1]), "integers"),
        (torch.ones(3, 2, dtype=torch.int64), "integers"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels, words):
    with pytest.raises(ValueError, match=words):
        class_directions(torch.ones(3, 4), labels, 2)


def test_balanced_loader_keeps_every_sample_and_evens_the_classes():
    labels = torch.tensor([4, 1, 1, 1, 1, 4, 2])
    chosen = balanced(labels, torch_generator("balance"))
    assert chosen.dtype == torch.int64
    assert torch.bincount(labels[chosen]).tolist() == [0, 4, 4, 0, 4]  # class 0 and 3 are not invented
    assert set(chosen.tolist()) == set(range(7))
    assert sorted(chosen[:4].tolist()) == [1, 2, 3, 4]  # the largest class: each once
    assert torch.equal(chosen, balanced(labels, torch_generator("balance")))
    assert balanced(labels[:0], torch_generator("balance")).shape == (0,)


def test_balancing_changes_a_direction_only_by_sampling_error():
    planted = Planted()
    labels = torch.tensor([0] * 40 + [1] * 200)
    features = planted.features(labels, 0, noise=1.0)
    chosen = balanced(labels, torch_generator("direction"))
    before, after = (class_directions(features[i], labels[i], 4)[0] for i in (slice(None), chosen))
    assert float(before @ after) > 0.995


def test_similarity_by_hand():
    directions = {0: torch.tensor([1.0, 0]), 2: torch.tensor([3.0, 4.0]), 3: torch.tensor([-1.0, 0])}
    found = similarity(directions, 4)
    nan = math.nan
    want = [[1, nan, 0.6, -1], [nan] * 4, [0.6, nan, 1, -0.6], [-1, nan, -0.6, 1]]
    np.testing.assert_allclose(found, want, atol=1e-7)
    assert torch.isnan(similarity({}, 3)).all()


def test_descriptors_by_hand():
    found = descriptors(similarity({0: torch.tensor([1.0, 0]), 2: torch.tensor([0.6, 0.8])}, 3))
    assert found.pairs == 2
    assert (found.mean, found.energy, found.maximum) == pytest.approx((0.6, 0.36, 0.6))
    nan = math.nan
    signed = torch.tensor([[1, 0.5, -0.9], [0.5, 1, 0.1], [-0.9, 0.1, 1.0]])
    found = descriptors(signed)
    assert (found.mean, found.energy, found.maximum) == pytest.approx((-0.1, (0.25 + 0.81 + 0.01) / 3, 0.5))
    found = descriptors(signed, absolute=True)
    assert (found.mean, found.energy, found.maximum) == pytest.approx((0.5, 1.07 / 3, 0.9))
    assert found.pairs == 6
    for empty in (torch.tensor([[1.0, nan], [nan, nan]]), torch.full((3, 3), nan), torch.ones(1, 1)):
        found = descriptors(empty)
        assert found.pairs == 0
        assert math.isnan(found.mean)
        assert math.isnan(found.energy)
        assert math.isnan(found.maximum)


def test_similarity_of_two_mixed_classes_by_trigonometry():
    """Two places at an angle t; a share of each class is the other: the direction turns by f, tan 2f as below."""
    angle, n = math.radians(70), 20
    places = torch.tensor([[1.0, 0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64)
    truth = torch.tensor([0, 1]).repeat_interleave(n)
    found = []
    for wrong in range(n // 2 + 1):
        labels = truth.clone()
        labels[:wrong], labels[n : n + wrong] = 1, 0
        s = descriptors(similarity(class_directions(places[truth], labels, 2), 2))
        share = wrong / n
        turned = 0.5 * math.atan2(share * math.sin(2 * angle), 1 - share + share * math.cos(2 * angle))
        assert s.mean == pytest.approx(math.cos(angle - 2 * turned), abs=1e-10)
        found.append(s.mean)
    assert found == sorted(found)
    assert found[0] == pytest.approx(math.cos(angle))
    assert found[-1] == pytest.approx(1)


@pytest.mark.parametrize("noise", [0.05, 1.0])
def test_all_three_descriptors_rise_with_the_corruption(noise):
    planted = Planted()
    truth = torch.arange(4).repeat_interleave(60)
    features = planted.features(truth, 1, noise)
    rates = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    found = [descriptors(similarity(class_directions(features, corrupted(truth, r, 4, 0), 4), 4)) for r in rates]
    for name in ("mean", "energy", "maximum"):
        numbers = [getattr(d, name) for d in found]
        assert numbers == sorted(numbers)
        assert numbers[-1] > numbers[0] + 0.2
    assert found[0].mean == pytest.approx(6**2 / (6**2 + 8**2), abs=0.02)
