"""Parts of a bundle that runs alone: the noise-robust loss by hand, metrics over a whole evaluation."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from ignite.exceptions import NotComputableError

from medfed.errors import ConfigError
from medfed.training.losses import generalized_cross_entropy
from medfed.training.standalone import FreshOptimizer, NoiseRobustLoss, PooledMetric, class_counts


def logits_of(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_generalized_cross_entropy_by_hand():
    logits, label = logits_of([0.25, 0.75]), torch.tensor([0])
    # (1 - 0.25^q) / q
    assert generalized_cross_entropy(logits, label, 0.5).item() == pytest.approx(1.0)
    assert generalized_cross_entropy(logits, label, 1.0).item() == pytest.approx(0.75)
    assert generalized_cross_entropy(logits, label, 0.0).item() == pytest.approx(math.log(4))
    assert generalized_cross_entropy(logits, label, 1e-6).item() == pytest.approx(math.log(4), abs=1e-5)
    both = logits_of([0.25, 0.75], [0.36, 0.64])
    # the mean of 1 and (1 - 0.6) / 0.5
    assert generalized_cross_entropy(both, torch.tensor([0, 0]), 0.5).item() == pytest.approx(0.9)


def test_several_labels_each_have_their_own_loss():
    logits = torch.tensor([[math.log(3), 0.0]])  # probabilities 3/4 and 1/2
    labels = torch.tensor([[0.0, 1.0]])  # probability of what was observed: 1/4 and 1/2
    expected = (1.0 + 2 * (1 - math.sqrt(0.5))) / 2
    assert generalized_cross_entropy(logits, labels, 0.5, multilabel=True).item() == pytest.approx(expected)


def test_gradient_is_that_of_cross_entropy_times_p_to_the_q():
    """Zhang and Sabuncu 2018, equation 7: a label that the model holds for wrong pulls less."""
    logits = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    (mine,) = torch.autograd.grad(generalized_cross_entropy(logits, labels, 0.7), logits)
    (plain,) = torch.autograd.grad(F.cross_entropy(logits, labels), logits)
    p = logits.detach().softmax(1)[torch.arange(6), labels]
    assert torch.allclose(mine, plain * p[:, None] ** 0.7)


def test_certain_and_impossible_labels_stay_finite():
    logits = torch.tensor([[200.0, -200.0]], requires_grad=True)
    for label, expected in ((0, 0.0), (1, 1 / 0.7)):
        loss = generalized_cross_entropy(logits, torch.tensor([label]), 0.7)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss.item() == pytest.approx(expected)
        assert bool(torch.isfinite(gradient).all())


def test_noise_robust_loss_is_adjusted_by_the_class_frequencies():
    loss = NoiseRobustLoss([3, 1], q=0.0)
    # equal logits and frequencies 3/4 and 1/4
    assert loss(torch.zeros(1, 2), torch.tensor([1])).item() == pytest.approx(math.log(4))
    plain = NoiseRobustLoss([3, 1], tau=0.0, q=0.0)
    logits, labels = torch.randn(5, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0, 1])
    assert torch.allclose(plain(logits, labels), F.cross_entropy(logits, labels))
    assert plain.state_dict() == {}  # nothing that a checkpoint would hold


def test_noise_robust_loss_of_several_labels():
    loss = NoiseRobustLoss([3, 1], samples=4, task="multilabel", q=0.0)
    # odds 3 and 1/3: probabilities 3/4 and 1/4 where the logits say nothing
    found = loss(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])).item()
    assert found == pytest.approx(math.log(4 / 3))


@pytest.mark.parametrize("given", [{"q": 1.1}, {"q": -0.1}, {"tau": -1.0}])
def test_noise_robust_loss_refuses(given):
    with pytest.raises(ConfigError, match="q must be between 0 and 1"):
        NoiseRobustLoss([1, 1], **given)


def test_class_counts():
    assert class_counts([{"label": 0}, {"label": 2}, {"label": 2}], 4) == [1, 0, 2, 0]
    assert class_counts([{"label": torch.tensor([1.0, 0.0])}, {"label": torch.tensor([1.0, 1.0])}], 2) == [2, 1]


def test_metric_is_over_all_batches():
    metric = PooledMetric("balanced_accuracy", ["a", "b"])
    one = {"pred": torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]), "label": torch.tensor([0, 0, 1])}
    other = {"pred": torch.tensor([[0.0, 1.0]]), "label": torch.tensor([1])}
    for output in (one, other):
        metric.iteration_completed(SimpleNamespace(state=SimpleNamespace(output=output)))
    # recall 2/2 of a and 1/2 of b; the mean over batches would be (1 + 0) / 2 and 1
    assert metric.compute() == pytest.approx(0.75)
    metric.reset()
    with pytest.raises(NotComputableError, match="no sample"):
        metric.compute()
    undefined = PooledMetric("auc_ovr", ["a", "b"])
    undefined.iteration_completed(SimpleNamespace(state=SimpleNamespace(output=other)))
    with pytest.raises(NotComputableError, match=r"auc_ovr is undefined: .*absent"):
        undefined.compute()


def test_optimizer_forgets():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state
    FreshOptimizer()(SimpleNamespace(optimizer=optimizer))
    assert not optimizer.state
