from __future__ import annotations

import math

import pytest
import torch
from planted_evidence import CLASSES, client
from sklearn.linear_model import Ridge

from medfed.federation.messages import Message, check_plain, first_non_finite
from medfed.reliability.evidence import evidence, leave_one_out, normalised
from medfed.seeding import torch_generator


def _random(n: int, d: int, seed: int) -> torch.Tensor:
    return torch.randn(n, d, generator=torch_generator("evidence test", seed), dtype=torch.float64)


def _by_refitting(
    x: torch.Tensor, y: torch.Tensor, classes: int, ridge: float, groups: torch.Tensor | None = None
) -> torch.Tensor:
    """A fit a sample, without its group, with scikit-learn, at the weights and the penalty of all samples."""
    groups = torch.arange(len(y)) if groups is None else groups
    counts = torch.bincount(y, minlength=classes).double()
    weights = (len(y) / ((counts > 0).sum() * counts.clamp(min=1)))[y].double()
    centred = x - (weights @ x) / weights.sum()
    penalty = ridge * float((weights * (centred**2).sum(dim=1)).mean())
    targets = torch.nn.functional.one_hot(y, classes).double()
    rows = []
    for i in range(len(y)):
        kept = groups != groups[i]
        model = Ridge(alpha=penalty, solver="cholesky").fit(x[kept], targets[kept], sample_weight=weights[kept])
        rows.append(torch.tensor(model.predict(x[i : i + 1].numpy())[0]))
    return torch.stack(rows)


@pytest.mark.parametrize(("n", "d"), [(12, 30), (40, 5)])
@pytest.mark.parametrize("ridge", [0.05, 1.0])
def test_closed_form_is_refitting_without_each_sample(n: int, d: int, ridge: float) -> None:
    x, y = _random(n, d, n), torch.arange(n) % 3
    y[:4] = 0  # unequal classes
    expected = _by_refitting(x, y, 3, ridge)
    torch.testing.assert_close(leave_one_out(x, y, 3, ridge), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("n", "d"), [(12, 30), (40, 5)])
def test_closed_form_is_refitting_without_each_patient(n: int, d: int) -> None:
    """Patients of one to four images, whose labels may differ; one has all images of a class."""
    x, y = _random(n, d, n), torch.arange(n) % 3
    groups = torch.arange(n) % 5 * 7 - 3
    groups[:4] = torch.tensor([100, 200, 300, 400])
    y[5::10] = 3
    expected = _by_refitting(x, y, 4, 0.3, groups)
    torch.testing.assert_close(leave_one_out(x, y, 4, 0.3, groups), expected, rtol=1e-8, atol=1e-9)


def test_patients_of_one_image_are_images() -> None:
    x, y = _random(30, 8, 3), torch.arange(30) % 3
    groups = torch.randperm(30, generator=torch_generator("patients"))
    torch.testing.assert_close(leave_one_out(x, y, 3, groups=groups), leave_one_out(x, y, 3), rtol=1e-10, atol=1e-12)
    assert evidence(x, y, 3, groups=groups).values == pytest.approx(evidence(x, y, 3).values)


def test_images_of_one_patient_do_not_support_each_other() -> None:
    """Labels are drawn by patient, and images of a patient are alike: without patients they look predictable."""
    x = _random(20, 16, 5).repeat_interleave(4, dim=0) + 0.05 * _random(80, 16, 6)
    groups = torch.arange(20).repeat_interleave(4)
    for seed in range(4):
        y = torch.randint(0, 2, (20,), generator=torch_generator("by patient", seed)).repeat_interleave(4)
        assert evidence(x, y, 2).values["separability"] > 0.6
        told = evidence(x, y, 2, groups=groups).values
        assert abs(told["separability"]) < 3 * told["separability_error"]
        # 20 patients, not 80 images, are behind it.
        assert told["separability_error"] > 0.2


def test_classes_count_by_patients() -> None:
    x, y = _random(24, 6, 7), torch.arange(24) % 3
    groups = torch.arange(24)
    groups[y == 2] = 50
    told = evidence(x, y, 3, groups=groups)
    assert told.values["evidence_classes"] == 2
    assert (told.samples.predicted[y == 2] == -1).all()
    assert (told.samples.predicted[y != 2] >= 0).all()
    assert told.tensors["evidence/counts"].tolist() == [8, 8, 8]


def test_a_single_patient_says_nothing() -> None:
    x, y = _random(24, 6, 8), torch.arange(24) % 3
    assert leave_one_out(x, y, 3, groups=torch.zeros(24, dtype=torch.int64)).isnan().all()
    assert "separability" not in evidence(x, y, 3, groups=torch.zeros(24, dtype=torch.int64)).values


def test_unobserved_classes_have_no_score() -> None:
    scores = leave_one_out(_random(10, 4, 0), torch.arange(10) % 2 * 2, 4)
    assert scores[:, [1, 3]].isnan().all()
    assert scores[:, [0, 2]].isfinite().all()


def test_features_are_normalised_by_hand() -> None:
    x = normalised(torch.tensor([[9.0, -16.0], [0.0, 0.0]]))
    torch.testing.assert_close(x, torch.tensor([[0.6, -0.8], [0.0, 0.0]], dtype=torch.float64))


def test_right_labels_are_predictable_and_drawn_ones_are_not() -> None:
    x, y = client(80, 0.0, seed=1)
    right = evidence(x, y, CLASSES).values
    assert right["separability"] > 0.9
    drawn = torch.randint(0, CLASSES, (80,), generator=torch_generator("drawn"))
    chance = evidence(x, drawn, CLASSES).values
    assert abs(chance["separability"]) < 3 * chance["separability_error"]
    assert chance["contrast"] < 0.2 < right["contrast"]


def test_error_is_that_of_repeated_draws() -> None:
    found = [evidence(*client(60, 0.4, seed=s), CLASSES).values for s in range(40)]
    spread = torch.tensor([v["separability"] for v in found], dtype=torch.float64).std()
    claimed = sum(v["separability_error"] for v in found) / len(found)
    assert 0.5 < float(spread) / claimed < 1.7


def test_margins_point_at_wrong_labels() -> None:
    x, y = client(80, 0.0, seed=2)
    wrong = y.clone()
    wrong[:12] = (y[:12] + 1) % CLASSES
    samples = evidence(x, wrong, CLASSES).samples
    bad = torch.arange(80) < 12
    assert (samples.margin[bad] > 0).float().mean() > 0.8
    assert (samples.margin[~bad] < 0).float().mean() > 0.9
    assert (samples.predicted[bad] == y[bad]).float().mean() > 0.8
    assert samples.predicted.dtype == torch.int64
    assert samples.margin.dtype == torch.float32
    # The margin is positive just where the prediction is another class.
    assert torch.equal(samples.margin > 0, samples.predicted != wrong)


def test_order_of_samples_does_not_matter() -> None:
    x, y = client(50, 0.3, seed=3)
    order = torch.randperm(50, generator=torch_generator("order"))
    one, two = evidence(x, y, CLASSES), evidence(x[order], y[order], CLASSES)
    assert one.values == pytest.approx(two.values, rel=1e-9)
    torch.testing.assert_close(one.samples.margin[order], two.samples.margin)
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(tensor, two.tensors[name], rtol=1e-5, atol=1e-6)


def test_only_stated_and_finite_things_leave_the_client() -> None:
    x, y = client(50, 0.3, seed=4)
    found = evidence(x, y, CLASSES, dimension=8)
    check_plain(found.values)
    assert first_non_finite(found.values) is None
    assert set(found.values) == {
        "evidence_samples",
        "evidence_classes",
        "separability",
        "separability_error",
        "contrast",
    }
    shapes = {name: tuple(t.shape) for name, t in found.tensors.items()}
    assert shapes == {
        "evidence/counts": (CLASSES,),
        "evidence/means": (CLASSES, 8),
        "evidence/total": (8,),
        "evidence/moment": (36,),
    }
    assert Message(found.tensors, found.values).groups() == ["evidence"]


def test_moments_without_projection_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 4.0], [9.0, 16.0]])
    sent = evidence(x, torch.tensor([0, 0, 1, 0]), 3).tensors
    # Normalised: (1, 0), (0, 1), (0, 1), (0.6, 0.8).  Class 1 has one sample, whose mean would be the sample.
    torch.testing.assert_close(sent["evidence/counts"], torch.tensor([3.0, 0, 0]))
    torch.testing.assert_close(sent["evidence/means"], torch.tensor([[1.6 / 3, 0.6], [0, 0], [0, 0]]))
    torch.testing.assert_close(sent["evidence/total"], torch.tensor([1.6, 2.8]))
    torch.testing.assert_close(sent["evidence/moment"], torch.tensor([1.36, 0.48, 2.64]))


def test_one_class_has_no_separability() -> None:
    found = evidence(_random(9, 6, 5), torch.zeros(9).long(), 3)
    assert found.values == {"evidence_samples": 9, "evidence_classes": 1}
    assert (found.samples.predicted == -1).all()
    assert (found.samples.margin == 0).all()
    assert float(found.tensors["evidence/counts"][0]) == 9


def test_one_sample_a_class_sends_no_mean() -> None:
    found = evidence(_random(3, 6, 6), torch.arange(3), 3)
    assert found.values["evidence_classes"] == 0
    assert (found.tensors["evidence/counts"] == 0).all()
    assert (found.tensors["evidence/means"] == 0).all()


def test_constant_features_say_nothing() -> None:
    found = evidence(torch.ones(20, 7), torch.arange(20) % 2, 2)
    assert found.values["separability"] <= 0
    assert math.isfinite(found.values["contrast"])
    assert found.samples.margin.isfinite().all()


def test_rows_that_are_not_finite_are_left_out() -> None:
    x, y = client(40, 0.0, seed=7)
    damaged = torch.cat([torch.full((2, x.shape[1]), math.nan, dtype=x.dtype), x])
    found = evidence(damaged, torch.cat([torch.tensor([0, 1]), y]), CLASSES)
    plain = evidence(x, y, CLASSES)
    assert found.values == plain.values
    assert found.samples.predicted[:2].tolist() == [-1, -1]
    assert torch.equal(found.samples.margin[2:], plain.samples.margin)


def test_no_sample_at_all() -> None:
    found = evidence(torch.zeros(0, 5), torch.zeros(0).long(), 3)
    assert found.values == {"evidence_samples": 0, "evidence_classes": 0}
    assert len(found.samples.predicted) == 0
