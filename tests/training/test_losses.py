"""Losses against hand calculation and torch's own."""

import math

import pytest
import torch
import torch.nn.functional as F

from medfed.errors import ConfigError
from medfed.training.losses import (
    binary_cross_entropy,
    cross_entropy,
    log_odds_offsets,
    logit_adjustment_offsets,
    per_sample_binary_cross_entropy,
    per_sample_cross_entropy,
)
from medfed.training.objectives import ClassificationObjective


def test_offsets_are_log_frequencies():
    offsets = logit_adjustment_offsets(torch.tensor([1, 3, 4]))
    assert offsets.tolist() == pytest.approx([math.log(1 / 8), math.log(3 / 8), math.log(1 / 2)])
    assert logit_adjustment_offsets(torch.tensor([1, 3, 4]), tau=0).tolist() == [0, 0, 0]


def test_adjusted_loss_by_hand():
    # Equal logits: softmax of log pi is pi itself, so that the loss of class 0 is -log(1/4).
    offsets = logit_adjustment_offsets(torch.tensor([1, 3]))
    loss = cross_entropy(torch.tensor([[2.0, 2.0]]), torch.tensor([0]), offsets)
    assert loss.item() == pytest.approx(math.log(4))
    # z = (ln 3, 0): adjusted odds 3*1/4 : 1*3/4 = 1 : 1
    even = cross_entropy(torch.tensor([[math.log(3), 0.0]]), torch.tensor([1]), offsets)
    assert even.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("floor", [1e-12, 0.0])
def test_absent_class_leaves_the_cross_entropy_finite(floor):
    offsets = logit_adjustment_offsets(torch.tensor([5, 0, 5]), floor=floor)
    logits = torch.zeros(2, 3, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([0, 2]), offsets)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2), abs=1e-6)
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[:, 1].abs().max() < 1e-6
    assert torch.isinf(offsets[1]) == (floor == 0)


def test_absent_class_leaves_the_divergence_finite():
    offsets = logit_adjustment_offsets(torch.tensor([5, 0, 5]))
    teacher = torch.softmax(torch.tensor([[0.1, 2.0, 0.3]]), dim=1)
    divergence = F.kl_div(torch.log_softmax(torch.zeros(1, 3) + offsets, dim=1), teacher, reduction="batchmean")
    assert torch.isfinite(divergence)


def test_log_odds_by_hand():
    offsets = log_odds_offsets(torch.tensor([2.0, 0.0, 8.0]), samples=8)
    assert offsets[0].item() == pytest.approx(math.log(2 / 6))
    assert torch.isfinite(offsets).all()
    assert offsets[1] < -20
    assert offsets[2] > 20


def test_binary_loss_by_hand():
    # One label with probability sigmoid(0) = 1/2, one with sigmoid(ln 3) = 3/4.
    logits, labels = torch.tensor([[0.0, math.log(3)]]), torch.tensor([[1.0, 0.0]])
    expected = (math.log(2) + math.log(4)) / 2
    assert binary_cross_entropy(logits, labels).item() == pytest.approx(expected)
    assert binary_cross_entropy(logits, labels, reduction="sum").item() == pytest.approx(expected)
    shifted = binary_cross_entropy(logits, labels, torch.tensor([math.log(3), 0.0]))
    assert shifted.item() == pytest.approx((math.log(4 / 3) + math.log(4)) / 2)


def test_smoothing_as_in_torch():
    logits, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    expected = torch.nn.CrossEntropyLoss(label_smoothing=0.1)(logits, labels)
    assert cross_entropy(logits, labels, label_smoothing=0.1).item() == pytest.approx(expected.item())
    certain = binary_cross_entropy(torch.tensor([[50.0]]), torch.tensor([[1.0]]), label_smoothing=0.2)
    assert certain.item() == pytest.approx(0.1 * 50, rel=1e-5)


def test_half_precision_logits_are_summed_in_float32():
    loss = cross_entropy(torch.tensor([[11.0, 0.0]], dtype=torch.float16), torch.tensor([0]))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log1p(math.exp(-11)), rel=1e-2)


def test_per_sample_losses():
    logits, batch = torch.randn(3, 4), {"label": torch.tensor([0, 3, 1])}
    rows = per_sample_cross_entropy(lambda image: logits, {**batch, "image": None})
    assert rows.shape == (3,)
    assert rows.mean().item() == pytest.approx(F.cross_entropy(logits, batch["label"]).item())
    several = per_sample_binary_cross_entropy(lambda image: logits, {"image": None, "label": torch.ones(3, 4)})
    assert several.tolist() == pytest.approx(F.softplus(-logits).mean(dim=1).tolist())


@pytest.mark.parametrize("counts", [[0, 0], [-1, 2]])
def test_impossible_counts_are_refused(counts):
    with pytest.raises(ValueError, match="class counts"):
        logit_adjustment_offsets(torch.tensor(counts))


def test_impossible_positives_are_refused():
    with pytest.raises(ValueError, match="positives"):
        log_odds_offsets(torch.tensor([9.0]), samples=8)


def test_objective_is_the_adjusted_loss_of_the_batch():
    network = torch.nn.Linear(4, 3)
    batch = {"image": torch.rand(6, 4), "label": torch.tensor([0, 1, 2, 0, 1, 2])}
    offsets = torch.tensor([-1.0, 0.0, -2.0])
    expected = F.cross_entropy(network(batch["image"]) + offsets, batch["label"])
    assert torch.equal(ClassificationObjective("multiclass", offsets)(network, batch), expected)


def test_objective_refuses_what_it_cannot_do():
    with pytest.raises(ConfigError, match="Did you mean 'multilabel'"):
        ClassificationObjective("multilable")
    with pytest.raises(ConfigError, match="finite offsets"):
        ClassificationObjective("multiclass", torch.tensor([0.0, -math.inf]), label_smoothing=0.1)
