"""The proximal term and distillation: gradients by hand, values against NumPy, and what must not change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from test_local import dataset, snapshot, trainer
from torch import nn

from medfed.errors import ConfigError
from medfed.training.losses import logit_adjustment_offsets
from medfed.training.objectives import ClassificationObjective, DistillationObjective, ProximalObjective
from medfed.training.steps import SharpnessAwareStep


class Net(nn.Module):
    """Convolution, BatchNorm, dropout, a linear layer."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, dtype=dtype)
        self.norm = nn.BatchNorm2d(4, dtype=dtype)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3, dtype=dtype)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.conv(x)))).mean((2, 3)))


@pytest.fixture
def nets():
    """A network, and another one whose statistics are not those of the start."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        student, teacher = Net(), Net()
        teacher(torch.randn(32, 1, 6, 6, dtype=torch.float64) * 2 + 1)
    return student, {k: t.clone() for k, t in teacher.state_dict().items()}


def batch_of(n=8, seed=1, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randn(n, 1, 6, 6, generator=g, dtype=dtype),
        "label": torch.randint(0, 3, (n,), generator=g),
        "index": torch.arange(n) + 10,
    }


def nothing(network, batch):
    return sum(p.sum() for p in network.parameters()) * 0.0


# The proximal term.


def test_proximal_value_and_gradient_by_hand():
    network = nn.Linear(2, 1, dtype=torch.float64)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[1.0, -2.0]]))
        network.bias.fill_(3.0)
    anchor = {"weight": torch.tensor([[0.5, 0.0]], dtype=torch.float64), "bias": torch.tensor([1.0]).double()}
    objective = ProximalObjective(nothing, anchor, mu=0.2)
    loss = objective(network, {})
    assert loss.item() == pytest.approx(0.1 * (0.25 + 4 + 4))
    loss.backward()
    assert network.weight.grad.tolist() == [pytest.approx([0.2 * 0.5, 0.2 * -2])]
    assert network.bias.grad.tolist() == pytest.approx([0.2 * 2])


def test_proximal_gradients_of_several_steps_do_not_share_memory():
    network = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    anchor = {"weight": torch.zeros(1, 1, dtype=torch.float64)}
    objective = ProximalObjective(lambda n, b: torch.zeros((), dtype=torch.float64), anchor, mu=1.0)
    kept = []
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            network.weight.fill_(value)
        network.weight.grad = None
        objective(network, {}).backward()
        kept.append(network.weight.grad)
    assert [g.item() for g in kept] == [1.0, 2.0, 3.0]


def test_proximal_gradient_passes_a_numerical_check(nets):
    network, teacher = nets
    network.eval()
    objective = ProximalObjective(ClassificationObjective(), teacher, mu=0.7)
    batch = batch_of()
    objective(network, batch).backward()
    for p in network.parameters():
        place = np.unravel_index(int(p.grad.abs().argmax()), p.shape)
        values = []
        for step in (1e-5, -2e-5):
            with torch.no_grad():
                p[place] += step
                values.append(float(objective(network, batch)))
        with torch.no_grad():
            p[place] += 1e-5
        assert float(p.grad[place]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5, abs=1e-8)


def test_proximal_term_leaves_statistics_and_frozen_parameters_out(nets):
    network, _ = nets
    anchor = {k: t.clone() for k, t in network.state_dict().items()}
    network.conv.weight.requires_grad_(False)
    with torch.no_grad():
        network.conv.weight += 100
        network.norm.running_mean += 100
        network.head.bias += 2
    assert ProximalObjective(nothing, anchor, 1.0)(network, {}).item() == pytest.approx(0.5 * 3 * 4)


def test_proximal_anchor_may_be_the_live_state_of_the_start():
    network = nn.Linear(1, 1, bias=False)
    objective = ProximalObjective(nothing, network.state_dict(), 1.0)
    objective(network, {})
    with torch.no_grad():
        network.weight += 2
    assert objective(network, {}).item() == pytest.approx(2.0)


def test_proximal_mu_zero_is_the_base_itself(nets):
    network, _ = nets
    network.eval()
    base, batch = ClassificationObjective(), batch_of()
    assert torch.equal(ProximalObjective(base, {}, 0.0)(network, batch), base(network, batch))


@pytest.mark.parametrize("mu", [-0.1, float("nan")])
def test_proximal_refuses_bad_weights(mu):
    with pytest.raises(ConfigError, match="mu"):
        ProximalObjective(nothing, {}, mu)


def test_proximal_refuses_an_anchor_of_another_form(nets):
    network, teacher = nets
    del teacher["head.bias"]
    with pytest.raises(ConfigError, match=r"head\.bias"):
        ProximalObjective(nothing, teacher, 1.0)(network, batch_of())


def test_proximal_under_a_sharpness_aware_step():
    """With no loss but the term, SAM's gradient at w + rho (w - a)/||w - a|| is mu (1 + rho/||w - a||) (w - a)."""
    sgd = {"optimizer": {"_target_": "torch.optim.SGD", "params": [], "lr": 0.1}}
    t = trainer(bundle=sgd)
    start = snapshot(t)
    names = [k for k, _ in t.network.named_parameters()]
    anchor = {k: start[k] - 0.5 for k in names}
    length = 0.5 * sum(start[k].numel() for k in names) ** 0.5
    objective = ProximalObjective(nothing, anchor, 2.0)
    step = SharpnessAwareStep(rho=0.3, alpha=0.0)
    t.fit(dataset(4), seed_parts=(0,), objective=objective, step=step, batch_size=4)
    for k in names:
        assert torch.allclose(start[k] - t.state()[k], torch.tensor(0.1 * 2.0 * (1 + 0.3 / length) * 0.5), atol=1e-5)


# Distillation.


def numpy_loss(z, zt, y, m, weight, temperature, soften, mask=None, observed=None):
    """Mean over samples of w_i KL(p_T || p_S) + (1 - w_i) CE(z + m, y)."""
    log_t = log_softmax(zt / temperature, axis=1)
    log_s = log_softmax((z + m) / (temperature if soften else 1.0), axis=1)
    terms = np.exp(log_t) * (log_t - log_s)
    kl = (terms if observed is None else terms[:, observed]).sum(axis=1)
    ce = -log_softmax(z + m, axis=1)[np.arange(len(y)), y]
    w = np.full(len(y), weight) if mask is None else weight * np.asarray(mask, float)
    return (w * kl + (1 - w) * ce).mean()


def logits_of(network, state, images):
    """Logits in evaluation mode, of a copy."""
    copy = Net()
    copy.load_state_dict(state)
    with torch.no_grad():
        return copy.eval()(images).numpy()


@pytest.mark.parametrize("soften", [True, False])
@pytest.mark.parametrize(
    ("weight", "temperature", "counts"), [(0.3, 0.8, (5, 3, 2)), (1.0, 2.0, (1, 1, 1)), (0.7, 1.0, (6, 4, 0))]
)
def test_distillation_value_against_numpy(nets, soften, weight, temperature, counts):
    network, teacher = nets
    network.eval()
    batch, offsets = batch_of(), logit_adjustment_offsets(torch.tensor(counts, dtype=torch.float))
    if not counts[2]:
        batch["label"] = batch["label"].clamp_max(1)
    objective = DistillationObjective(
        ClassificationObjective("multiclass", offsets), teacher, weight, temperature, soften
    )
    z, zt = (logits_of(network, s, batch["image"]) for s in (network.state_dict(), teacher))
    expected = numpy_loss(z, zt, batch["label"].numpy(), offsets.numpy(), weight, temperature, soften)
    loss = objective(network, batch)
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    assert np.isfinite(expected)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters())


def test_distillation_of_some_samples_and_of_observed_classes(nets):
    network, teacher = nets
    network.eval()
    batch = batch_of()
    mask = torch.zeros(40, dtype=torch.bool)
    mask[[11, 12, 15, 30]] = True
    z, zt = (logits_of(network, s, batch["image"]) for s in (network.state_dict(), teacher))
    base, y = ClassificationObjective(), batch["label"].numpy()
    some = DistillationObjective(base, teacher, 0.4, 0.8, True, mask=mask)(network, batch)
    chosen = [False, True, True, False, False, True, False, False]
    assert some.item() == pytest.approx(numpy_loss(z, zt, y, 0.0, 0.4, 0.8, True, mask=chosen))
    none = DistillationObjective(base, teacher, 0.4, mask=torch.zeros(40, dtype=torch.bool))(network, batch)
    assert torch.equal(none, base(network, batch))
    observed = torch.tensor([True, False, True])
    part = DistillationObjective(base, teacher, 0.4, 0.8, False, observed=observed)(network, batch)
    assert part.item() == pytest.approx(numpy_loss(z, zt, y, 0.0, 0.4, 0.8, False, observed=observed.numpy()))


def test_class_left_out_gets_no_gradient_from_the_teacher(nets):
    """An absent class with the floor of its prior would otherwise be pushed up without end."""
    network, teacher = nets
    offsets = logit_adjustment_offsets(torch.tensor([4.0, 4.0, 0.0]))
    base = ClassificationObjective("multiclass", offsets)
    for observed, pushed in ((torch.tensor([True, True, False]), False), (None, True)):
        network.zero_grad()
        DistillationObjective(base, teacher, 1.0, observed=observed)(network.eval(), batch_of()).backward()
        assert (abs(float(network.head.bias.grad[2])) > 0.05) is pushed


def test_gradient_at_a_teacher_like_the_student_is_that_of_the_labels_alone(nets):
    """KL(p || p) is at its minimum."""
    network, _ = nets
    network.eval()
    own = {k: t.clone() for k, t in network.state_dict().items()}
    base, batch = ClassificationObjective(), batch_of()
    DistillationObjective(base, own, 0.6, 0.8)(network, batch).backward()
    mixed = [p.grad.clone() for p in network.parameters()]
    network.zero_grad()
    base(network, batch).backward()
    for a, p in zip(mixed, network.parameters()):
        assert torch.allclose(a, 0.4 * p.grad, atol=1e-12)


def test_teacher_is_in_evaluation_mode_and_leaves_no_trace(nets):
    """Student statistics, random numbers, modes and the teacher's own tensors are as without a teacher."""
    network, teacher = nets
    kept = {k: t.clone() for k, t in teacher.items()}
    before = {k: t.clone() for k, t in network.state_dict().items()}
    network.train()
    network.drop.eval()
    modes = [m.training for m in network.modules()]
    batch = batch_of()
    seen = []
    handle = network.drop.register_forward_hook(lambda *_: seen.append([m.training for m in network.modules()]))
    states = []
    for objective in (ClassificationObjective(), DistillationObjective(ClassificationObjective(), teacher, 0.5)):
        network.load_state_dict(before)
        network.drop.train()
        torch.manual_seed(3)
        objective(network, batch)
        states.append(({k: t.clone() for k, t in network.state_dict().items()}, torch.rand(1)))
    handle.remove()
    (plain, drawn), (taught, drawn_too) = states
    assert all(torch.equal(plain[k], taught[k]) for k in plain)
    assert torch.equal(drawn, drawn_too)
    assert seen[1] == [False] * len(modes)
    assert seen[2] == [True] * len(modes)
    assert all(torch.equal(kept[k], teacher[k]) for k in kept)
    assert all(t.grad is None for t in teacher.values())


def test_modules_at_rest_stay_at_rest(nets):
    network, teacher = nets
    network.train()
    network.norm.eval()
    DistillationObjective(ClassificationObjective(), teacher, 0.5)(network, batch_of())
    assert [m.training for m in (network, network.conv, network.norm, network.drop)] == [True, True, False, True]


def test_teacher_that_fails_gives_modes_back(nets):
    network, teacher = nets
    with pytest.raises(RuntimeError):
        DistillationObjective(ClassificationObjective(), teacher, 0.5)(
            network.train(), {**batch_of(), "image": torch.zeros(8, 2, 6, 6, dtype=torch.float64)}
        )
    assert all(m.training for m in network.modules())


def test_teacher_may_be_the_live_state_of_the_start(nets):
    """It is copied at the first batch: later steps do not move it."""
    network, _ = nets
    network.eval()
    batch = batch_of()
    objective = DistillationObjective(ClassificationObjective(), network.state_dict(), 1.0)
    assert objective(network, batch).item() == pytest.approx(0.0, abs=1e-12)
    with torch.no_grad():
        network.head.bias += torch.tensor([3.0, 0.0, -3.0])
    assert objective(network, batch).item() > 0.1


def test_weight_zero_is_the_base_bit_by_bit():
    base = ClassificationObjective("multiclass", logit_adjustment_offsets(torch.tensor([5.0, 3.0, 3.0])))
    one, two = trainer(), trainer()
    teacher = snapshot(one)
    first = one.fit(dataset(), seed_parts=(0, 1, "a"), objective=base)
    second = two.fit(dataset(), seed_parts=(0, 1, "a"), objective=DistillationObjective(base, teacher, 0.0))
    assert first == second
    assert all(torch.equal(one.state()[k], two.state()[k]) for k in one.state())


@pytest.mark.parametrize("options", [{}, {"amp": True}, {"channels_last": True}])
def test_training_with_a_teacher_draws_the_same_images_and_is_repeatable(options):
    one, two = trainer(**options), trainer(**options)
    start = snapshot(one)
    base = ClassificationObjective()
    images = []

    def spying(network, batch):
        images.append(batch["image"].clone())
        return base(network, batch)

    two.fit(dataset(), seed_parts=(0,), objective=spying)
    plain, images = images, []
    taught = DistillationObjective(base, start, 0.5, 0.8)

    def spying_too(network, batch):
        images.append(batch["image"].clone())
        return taught(network, batch)

    result = one.fit(dataset(), seed_parts=(0,), objective=spying_too)
    assert all(torch.equal(a, b) for a, b in zip(plain, images, strict=True))
    assert result.skipped == 0
    two.load(start)
    again = two.fit(dataset(), seed_parts=(0,), objective=DistillationObjective(base, start, 0.5, 0.8))
    assert again == result
    assert all(torch.equal(one.state()[k], two.state()[k]) for k in start)


def test_absent_classes_are_finite_in_single_precision():
    network = Net(torch.float32)
    teacher = {k: t.clone() for k, t in network.state_dict().items()}
    teacher["head.bias"] += torch.tensor([0.0, 0.0, 80.0])
    offsets = logit_adjustment_offsets(torch.tensor([9.0, 0.0, 0.0]))
    batch = {**batch_of(dtype=torch.float32), "label": torch.zeros(8, dtype=torch.long)}
    for soften in (True, False):
        base = ClassificationObjective("multiclass", offsets)
        loss = DistillationObjective(base, teacher, 0.5, 0.1, soften)(network, batch)
        assert torch.isfinite(loss)
        loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"weight": -0.1}, "between 0 and 1"),
        ({"weight": 1.1}, "between 0 and 1"),
        ({"weight": float("nan")}, "between 0 and 1"),
        ({"weight": 0.5, "temperature": 0.0}, "above 0"),
    ],
)
def test_what_is_out_of_range_is_told(options, told):
    with pytest.raises(ConfigError, match=told):
        DistillationObjective(ClassificationObjective(), {}, **options)


def test_other_kinds_of_labels_infinite_offsets_and_another_network_are_refused(nets):
    network, teacher = nets
    with pytest.raises(ConfigError, match="one label an image"):
        DistillationObjective(ClassificationObjective("multilabel"), {}, 0.5)
    infinite = logit_adjustment_offsets(torch.tensor([1.0, 0.0, 1.0]), floor=0)
    with pytest.raises(ConfigError, match="finite offsets"):
        DistillationObjective(ClassificationObjective("multiclass", infinite), {}, 0.5)
    teacher["norm.running_var"] = torch.ones(3)
    with pytest.raises(ConfigError, match=r"norm\.running_var"):
        DistillationObjective(ClassificationObjective(), teacher, 0.5)(network, batch_of())
