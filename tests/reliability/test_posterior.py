"""The most probable class given features and label, where the right answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from medfed.reliability import posterior as module
from medfed.reliability.evidence import normalised, projected
from medfed.reliability.posterior import ClassMoments, class_moments, pooled, posterior, proposals


def planted(labels: np.ndarray, seed: int, spread: float = 0.4, width: int = 12) -> torch.Tensor:
    """Features around one point a class, on a common level."""
    g = np.random.default_rng(seed)
    points = np.random.default_rng(0).normal(0, 1, (8, width))
    return torch.from_numpy(4 + points[labels] + spread * g.normal(0, 1, (len(labels), width)))


def reference(classes: int = 3, samples: int = 40, spread: float = 0.4, seed: int = 1, width: int = 12) -> ClassMoments:
    labels = np.repeat(np.arange(classes), samples)
    return class_moments(planted(labels, seed, spread, width), torch.from_numpy(labels), classes)


def corrupted(true: np.ndarray, rate: float, kind: str, classes: int, seed: int = 5) -> np.ndarray:
    g = np.random.default_rng(seed)
    wrong = g.random(len(true)) < rate
    other = (true + 1) % classes if kind == "asymmetric" else (true + g.integers(1, classes, len(true))) % classes
    return np.where(wrong, other, true)


# Moments.


def test_moments_by_hand():
    """Rows of equal length with squares as entries: the signed root and the length are simple numbers."""
    features = torch.tensor([[9.0, 16.0], [16.0, 9.0], [0.0, 4.0], [25.0, 0.0], [math.nan, 1.0]])
    found = class_moments(features, torch.tensor([0, 0, 1, 2, 0]), 4)
    # [0.6, 0.8] and [0.8, 0.6]; the classes of one sample are not described.
    assert found.counts.tolist() == [2, 0, 0, 0]
    assert found.means.numpy() == pytest.approx(np.array([[0.7, 0.7], [0, 0], [0, 0], [0, 0]]))
    assert found.scatter.numpy() == pytest.approx(np.array([[0.02, -0.02], [-0.02, 0.02]]))


@pytest.mark.parametrize("width", [6, 200])
def test_pooled_moments_are_those_of_all_samples_together(width):
    g = np.random.default_rng(3)
    labels = g.integers(0, 3, 60)
    features = torch.from_numpy(g.random((60, width)) * 5)
    # The second client lacks a class.
    cut = np.array([0] * 20 + [1] * 20 + [2] * 20)
    labels[(cut == 1) & (labels == 2)] = 0
    parts = [class_moments(features[cut == k], torch.from_numpy(labels[cut == k]), 3) for k in range(3)]
    found = pooled(parts)
    x = projected(normalised(features)).numpy()
    means = np.stack([x[labels == c].mean(axis=0) for c in range(3)])
    assert found.counts.tolist() == np.bincount(labels, minlength=3).tolist()
    assert found.means.numpy() == pytest.approx(means)
    assert found.scatter.numpy() == pytest.approx((x - means[labels]).T @ (x - means[labels]))


def test_moments_go_through_a_message():
    one = reference()
    other = ClassMoments.of(one.to_tensors(), 3)
    assert all(t.dtype == torch.float32 for t in one.to_tensors().values())
    for name in ("counts", "means", "scatter"):
        assert getattr(other, name).numpy() == pytest.approx(getattr(one, name).numpy(), rel=1e-5, abs=1e-6)
    assert torch.equal(other.scatter, other.scatter.T)


@pytest.mark.parametrize(
    "fault",
    [
        {"counts": torch.ones(2)},
        {"counts": torch.tensor([1.0, -1.0, 3.0])},
        {"means": torch.ones(3)},
        {"means": torch.ones(3, 5)},
        {"means": torch.full((3, 12), math.nan)},
        {"scatter": torch.ones(12, 12)},
        {"scatter": -torch.ones(78)},
    ],
)
def test_moments_that_do_not_fit_are_refused(fault):
    with pytest.raises(ValueError):
        ClassMoments.of({**reference().to_tensors(), **fault}, 3)
    with pytest.raises(KeyError):
        ClassMoments.of({n: t for n, t in reference().to_tensors().items() if n not in fault}, 3)


def test_nothing_and_different_things_are_not_pooled():
    with pytest.raises(ValueError, match="no moments"):
        pooled([])
    with pytest.raises(ValueError, match="different"):
        pooled([reference(3), reference(4)])


# The posterior.


def test_posterior_of_few_samples_by_hand(monkeypatch):
    """One step, with numbers that can be followed: class means at 0.6/0.8 and 0.8/0.6, no scatter."""
    monkeypatch.setattr(module, "STEPS", 1)
    monkeypatch.setattr(module, "SHARPNESS", 1.0)
    moments = ClassMoments(
        torch.tensor([5.0, 5.0]).double(),
        torch.tensor([[0.6, 0.8], [0.8, 0.6]]).double(),
        # With 10 - 2 degrees of freedom: covariance 0.02, plus the mean eigenvalue 0.02.
        0.16 * torch.eye(2).double(),
    )
    features = torch.tensor([[9.0, 16.0], [16.0, 9.0], [9.0, 16.0]])
    found = posterior(features, torch.tensor([0, 0, 1]), moments)
    # Squared distance 0.08 in a metric of 1 / 0.04: 2. Prior of what an observed class is made of: 3/4 and 1/4.
    far = math.exp(-0.5 * 2)
    expected = [0.75 / (0.75 + 0.25 * far), 0.75 * far / (0.75 * far + 0.25), 0.25 / (0.25 + 0.75 * far)]
    assert found.probability[:, 0].tolist() == pytest.approx(expected)
    assert found.probability.sum(dim=1).tolist() == pytest.approx([1, 1, 1])
    joint = np.array([[0.75 + expected[0] + expected[1], 0.25 + expected[2]], [0, 0]])
    joint[1] = [3 - joint[0, 0], 2 - joint[0, 1]]
    assert found.joint.numpy() == pytest.approx(joint / 5)


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("rate", [0.2, 0.4, 0.6, 0.9])
def test_planted_classes_are_recovered_whatever_the_labels_say(kind, rate):
    true = np.repeat(np.arange(3), 20)
    observed = corrupted(true, rate, kind, 3)
    found = posterior(planted(true, 7), torch.from_numpy(observed), reference())
    targets = proposals(found.probability).numpy()
    assert (targets == true).mean() > 0.95
    kept = np.array([[((true == a) & (observed == b)).mean() for b in range(3)] for a in range(3)])
    assert np.abs(found.joint.numpy() - kept).max() < 0.05


def test_labels_and_features_together_are_better_than_either():
    """Classes that overlap: features alone err in some cases, labels in others."""
    by_label, by_features, both = 0, 0, 0
    for seed in range(10):
        true = np.repeat(np.arange(3), 20)
        observed = corrupted(true, 0.3, "asymmetric", 3, seed)
        features, moments = planted(true, 100 + seed, 5.0, 100), reference(spread=5.0, seed=seed, width=100)
        samples, means = module._white(projected(normalised(features)), moments)
        by_features += (torch.cdist(samples, means).numpy().argmin(axis=1) != true).sum()
        by_label += (observed != true).sum()
        both += (proposals(posterior(features, torch.from_numpy(observed), moments).probability).numpy() != true).sum()
    assert both < 0.95 * min(by_label, by_features)


def test_right_labels_stay():
    true = np.repeat(np.arange(4), 15)
    found = posterior(planted(true, 8), torch.from_numpy(true), reference(4))
    assert (proposals(found.probability).numpy() == true).all()
    assert found.joint.diagonal().sum() > 0.97


def test_images_that_look_different_everywhere_are_followed():
    """Another scanner shifts all features of the client; its labels, half of them right, tell where its classes are."""
    true = np.repeat(np.arange(3), 30)
    observed = corrupted(true, 0.4, "symmetric", 3)
    features = planted(true, 9)
    features[:, :4] += 1.5
    moments = reference(samples=10)
    samples, means = module._white(projected(normalised(features)), moments)
    fixed = (torch.cdist(samples, means).numpy().argmin(axis=1) != true).sum()
    found = posterior(features, torch.from_numpy(observed), moments)
    assert (proposals(found.probability).numpy() != true).sum() < fixed / 2


def test_two_classes_only():
    true = np.repeat(np.arange(2), 20)
    observed = corrupted(true, 0.4, "symmetric", 2)
    found = posterior(planted(true, 3), torch.from_numpy(observed), reference(2))
    assert (proposals(found.probability).numpy() == true).all()


@pytest.mark.parametrize("observed", [0, 1])
def test_client_of_one_class(observed):
    """All its labels are one class, its images another one: either is possible, and it ends with finite numbers."""
    true = np.full(12, 1)
    found = posterior(planted(true, 3), torch.full((12,), observed), reference())
    assert (proposals(found.probability).numpy() == 1).all()
    assert found.joint[:, 2 if observed == 0 else 0].sum() == 0


def test_class_that_no_reference_describes():
    moments = reference(3)
    moments = ClassMoments(moments.counts * torch.tensor([1, 1, 0]), moments.means, moments.scatter)
    true = np.repeat(np.arange(3), 10)
    observed = corrupted(true, 0.4, "symmetric", 3)
    found = posterior(planted(true, 6), torch.from_numpy(observed), moments)
    unknown = observed == 2
    assert torch.isnan(found.probability[unknown]).all()
    assert (proposals(found.probability)[unknown] == -1).all()
    assert (found.probability[~unknown][:, 2] == 0).all()
    assert (proposals(found.probability)[~unknown] >= 0).all()
    assert found.joint[2].sum() == found.joint[:, 2].sum() == 0


@pytest.mark.parametrize("classes", [0, 1])
def test_nothing_to_compare(classes):
    moments = reference(3)
    moments = ClassMoments(moments.counts * (torch.arange(3) < classes), moments.means, moments.scatter)
    found = posterior(planted(np.arange(3), 6), torch.tensor([0, 1, 2]), moments)
    assert torch.isnan(found.probability).all()
    assert found.joint.sum() == 0
    assert proposals(found.probability).tolist() == [-1, -1, -1]


def test_no_samples_and_no_finite_features():
    assert posterior(torch.zeros(0, 12), torch.zeros(0, dtype=torch.int64), reference()).probability.shape == (0, 3)
    features = planted(np.arange(3), 6)
    features[1, 0] = math.inf
    found = posterior(features, torch.tensor([0, 1, 2]), reference())
    assert torch.isnan(found.probability).all(dim=1).tolist() == [False, True, False]


def test_reference_without_scatter_gives_finite_numbers():
    moments = reference()
    moments = ClassMoments(moments.counts, moments.means, torch.zeros_like(moments.scatter))
    found = posterior(planted(np.arange(3), 6), torch.tensor([0, 2, 2]), moments)
    assert torch.isfinite(found.probability).all()
    assert proposals(found.probability).tolist() == [0, 1, 2]


def test_order_of_samples_and_scale_of_features_do_not_matter():
    true = np.repeat(np.arange(3), 9)
    observed = torch.from_numpy(corrupted(true, 0.4, "symmetric", 3))
    features = planted(true, 4)
    one = posterior(features, observed, reference())
    order = torch.from_numpy(np.random.default_rng(0).permutation(27))
    assert posterior(features[order], observed[order], reference()).probability.numpy() == pytest.approx(
        one.probability[order].numpy()
    )
    assert posterior(7 * features, observed, reference()).probability.numpy() == pytest.approx(one.probability.numpy())


def test_names_of_classes_do_not_matter():
    true = np.repeat(np.arange(3), 9)
    observed = corrupted(true, 0.4, "asymmetric", 3)
    moments, features, names = reference(), planted(true, 4), np.array([2, 0, 1])
    renamed = ClassMoments(moments.counts[np.argsort(names)], moments.means[np.argsort(names)], moments.scatter)
    one = posterior(features, torch.from_numpy(observed), moments)
    other = posterior(features, torch.from_numpy(names[observed]), renamed)
    assert other.probability[:, names].numpy() == pytest.approx(one.probability.numpy())


def test_samples_of_the_reference_are_judged_without_themselves(monkeypatch):
    """With the step of the means switched off by ``inside``, distances are those to means formed without the sample."""
    monkeypatch.setattr(module, "STEPS", 1)
    monkeypatch.setattr(module, "SHARPNESS", 0.3)
    true = np.repeat(np.arange(2), 4)
    features, labels = planted(true, 4), torch.from_numpy(true)
    moments = class_moments(features, labels, 2)
    found = posterior(features, labels, moments, inside=True)
    x = projected(normalised(features)).numpy()
    freedom = 6
    covariance = moments.scatter.numpy() / freedom
    inverse = np.linalg.inv(covariance + np.trace(covariance) / 12 * np.eye(12))
    for i in range(8):
        others = np.arange(8) != i
        apart = [x[i] - x[others & (true == c)].mean(axis=0) for c in range(2)]
        fit = [-0.5 * 0.3 * a @ inverse @ a for a in apart]
        fit = [f + math.log(0.75 if c == true[i] else 0.25) for c, f in enumerate(fit)]
        assert found.probability[i, 0] == pytest.approx(1 / (1 + math.exp(fit[1] - fit[0])))


@pytest.mark.parametrize(
    ("row", "confidence", "want"),
    [
        ([0.2, 0.7, 0.1], 0.0, 1),
        ([0.2, 0.7, 0.1], 0.7, 1),
        ([0.2, 0.7, 0.1], 0.71, -1),
        ([0.5, 0.5, 0.0], 0.0, -1),
        ([math.nan, math.nan, math.nan], 0.0, -1),
        ([1.0], 0.0, -1),
    ],
)
def test_proposals_by_hand(row, confidence, want):
    assert proposals(torch.tensor([row], dtype=torch.float64), confidence).tolist() == [want]
    assert proposals(torch.zeros(0, len(row))).shape == (0,)
