"""Optimiser steps inside a MONAI trainer, against pytorch_optimizer and by hand."""

import copy
import logging
import math

import pytest
import torch
from monai.engines import SupervisedTrainer
from torch import nn

from medfed.errors import ConfigError
from medfed.training.sharpness import gsam_gradient, perturbation
from medfed.training.steps import PlainStep, SharpnessAwareStep, Snapshot


def network(batch_norm: bool = False, dropout: float = 0.0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(12, 8)]
        if batch_norm:
            layers.append(nn.BatchNorm1d(8))
        return nn.Sequential(*layers, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def batches(n: int = 4, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [
        {"image": torch.randn(6, 1, 3, 4, generator=g), "label": torch.randint(3, (6,), generator=g)} for _ in range(n)
    ]


def run(net: nn.Module, step, data, optimizer=None, **options) -> SupervisedTrainer:
    trainer = SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=1,
        train_data_loader=data,
        network=net,
        optimizer=optimizer or torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        loss_function=nn.CrossEntropyLoss(),
        iteration_update=step,
        **options,
    )
    trainer.logger.setLevel(logging.WARNING)
    trainer.run()
    return trainer


def same(one: nn.Module, two: nn.Module) -> bool:
    states = one.state_dict(), two.state_dict()
    return all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def test_plain_step_equals_monais_own():
    ours, theirs = network(True), network(True)
    run(ours, PlainStep(), batches())
    run(theirs, None, batches())
    assert same(ours, theirs)


def test_plain_step_output_serves_monai_handlers():
    trainer = run(network(), PlainStep(), batches(1), decollate=False)
    assert {"image", "label", "pred", "loss", "skipped"} <= trainer.state.output.keys()
    assert trainer.state.output["pred"].shape == (6, 3)


def test_steps_survive_decollation():
    for step in (PlainStep(), SharpnessAwareStep()):
        output = run(network(), step, batches(1), decollate=True).state.output
        assert len(output) == 6


def test_sam_equals_pytorch_optimizer():
    from pytorch_optimizer import SAM

    ours, theirs = network(), network()
    run(ours, SharpnessAwareStep(rho=0.05, alpha=0.0), batches())
    optimizer = SAM(theirs.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
    for batch in batches():
        nn.functional.cross_entropy(theirs(batch["image"]), batch["label"]).backward()
        optimizer.first_step(zero_grad=True)
        nn.functional.cross_entropy(theirs(batch["image"]), batch["label"]).backward()
        optimizer.second_step(zero_grad=True)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(a, b, atol=1e-6)


def test_asam_equals_pytorch_optimizer():
    from pytorch_optimizer import SAM

    ours, theirs = network(), network()
    run(ours, SharpnessAwareStep(rho=0.5, alpha=0.0, radius="adaptive"), batches())
    optimizer = SAM(theirs.parameters(), torch.optim.SGD, rho=0.5, adaptive=True, lr=0.1, momentum=0.9)
    for batch in batches():
        nn.functional.cross_entropy(theirs(batch["image"]), batch["label"]).backward()
        optimizer.first_step(zero_grad=True)
        nn.functional.cross_entropy(theirs(batch["image"]), batch["label"]).backward()
        optimizer.second_step(zero_grad=True)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(a, b, atol=1e-6)


def test_gsam_equals_pytorch_optimizer():
    from pytorch_optimizer import GSAM
    from pytorch_optimizer.lr_scheduler import ProportionScheduler

    ours, theirs = network(), network()
    run(ours, SharpnessAwareStep(rho=0.05, alpha=0.1), batches(), torch.optim.Adam(ours.parameters(), lr=0.01))
    base = torch.optim.Adam(theirs.parameters(), lr=0.01)
    constant = torch.optim.lr_scheduler.ConstantLR(base, factor=1.0)
    rho = ProportionScheduler(constant, max_lr=0.01, min_lr=0.01, max_value=0.05, min_value=0.05)
    optimizer = GSAM(theirs.parameters(), base, theirs, rho_scheduler=rho, alpha=0.1)
    for batch in batches():
        optimizer.set_closure(nn.functional.cross_entropy, batch["image"], batch["label"])
        optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(a, b, atol=1e-5)


def test_gsam_step_by_the_equations():
    net, batch = network(), batches(1)[0]
    reference = copy.deepcopy(net)
    params = list(reference.parameters())

    def gradient() -> list[torch.Tensor]:
        loss = nn.functional.cross_entropy(reference(batch["image"]), batch["label"])
        return list(torch.autograd.grad(loss, params))

    g = gradient()
    at = [p.detach().clone() for p in params]
    with torch.no_grad():
        torch._foreach_add_(params, perturbation(g, 0.3))
    gp = gradient()
    expected = [w - 0.1 * d for w, d in zip(at, gsam_gradient(g, gp, 0.5))]
    run(net, SharpnessAwareStep(0.3, 0.5), [batch], torch.optim.SGD(net.parameters(), lr=0.1))
    assert all(torch.allclose(p, e, atol=1e-7) for p, e in zip(net.parameters(), expected))


@pytest.mark.parametrize("radius", ["constant", "relative", "adaptive", "bounded"])
def test_weights_are_put_back_bit_by_bit(radius):
    net = network(batch_norm=True)
    before = [p.detach().clone() for p in net.parameters()]
    run(net, SharpnessAwareStep(0.05, 0.1, radius), batches(), torch.optim.SGD(net.parameters(), lr=0.0))
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters()))


def test_batch_norm_is_updated_in_the_first_pass_only():
    ours, plain = network(batch_norm=True), network(batch_norm=True)
    still = {"lr": 0.0}
    run(ours, SharpnessAwareStep(0.5, 0.1), batches(), torch.optim.SGD(ours.parameters(), **still))
    run(plain, PlainStep(), batches(), torch.optim.SGD(plain.parameters(), **still))
    assert ours[2].num_batches_tracked.item() == 4
    assert torch.equal(ours[2].running_mean, plain[2].running_mean)
    assert torch.equal(ours[2].running_var, plain[2].running_var)


def test_dropout_draws_anew_in_the_second_pass():
    net, masks = network(dropout=0.5), []
    net[3].register_forward_hook(lambda m, i, o: masks.append(o == 0))
    run(net, SharpnessAwareStep(), batches(1))
    assert not torch.equal(masks[0], masks[1])


@pytest.mark.parametrize("step", [PlainStep, SharpnessAwareStep])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_batch_is_skipped(step, poison, caplog):
    good, bad = batches(2), batches(1, seed=9)
    bad[0]["image"][0, 0, 0, 0] = poison
    clean, mixed = network(batch_norm=True), network(batch_norm=True)
    run(clean, step(), good)
    outputs = []
    instance = step()

    def watch(engine, batch):
        outputs.append(instance(engine, batch))
        return outputs[-1]

    with caplog.at_level(logging.WARNING, logger="medfed"):
        run(mixed, watch, [good[0], bad[0], good[1]], decollate=False)
    assert same(clean, mixed)
    assert [o["skipped"] for o in outputs] == [False, True, False]
    assert "step 2 skipped" in caplog.text


def test_a_poisoned_gradient_with_a_finite_loss_is_skipped():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * math.nan

    net = network()
    net.register_forward_hook(lambda m, i, o: Bad.apply(o))
    before = copy.deepcopy(net.state_dict())
    trainer = run(net, PlainStep(), batches(1), decollate=False)
    assert math.isfinite(trainer.state.output["loss"])
    assert trainer.state.output["skipped"]
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


def test_frozen_parameters_stay():
    net = network()
    net[1].requires_grad_(False)
    before = net[1].weight.clone()
    run(net, SharpnessAwareStep(), batches(), torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1))
    assert torch.equal(net[1].weight, before)
    assert net[1].weight.grad is None


@pytest.mark.filterwarnings("ignore:.*GradScaler.*")
def test_bfloat16_on_a_cpu_trains():
    for step in (PlainStep(), SharpnessAwareStep()):
        net = network(batch_norm=True)
        before = net[1].weight.clone()
        run(net, step, batches(), amp=True, amp_kwargs={"dtype": torch.bfloat16})
        assert not torch.equal(net[1].weight, before)
        assert net[1].weight.dtype == torch.float32


class HostScaler(torch.amp.GradScaler):
    """A gradient scaler that works without CUDA, standing in for MONAI's."""

    def __init__(self, init_scale: float):
        super().__init__("cpu", init_scale=init_scale, growth_interval=10**6)


@pytest.mark.parametrize("step", [PlainStep, SharpnessAwareStep, lambda: SharpnessAwareStep(0.5, radius="bounded")])
def test_a_gradient_scaler_changes_nothing_but_the_scale(step, monkeypatch):
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", lambda: HostScaler(2.0**12))
    scaled, plain = network(), network()
    run(scaled, step(), batches(), amp=True, amp_kwargs={"enabled": False})
    run(plain, step(), batches())
    for a, b in zip(scaled.parameters(), plain.parameters()):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("step", [PlainStep, SharpnessAwareStep])
def test_an_overflow_under_a_scaler_skips_the_step_and_lowers_the_scale(step, monkeypatch):
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", lambda: HostScaler(2.0**12))
    net, data = network(), batches(1)
    data[0]["image"] *= math.inf
    before = copy.deepcopy(net.state_dict())
    trainer = run(net, step(), data, amp=True, amp_kwargs={"enabled": False}, decollate=False)
    assert trainer.state.output["skipped"]
    assert trainer.scaler.get_scale() == 2.0**11
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


def test_gradient_accumulation_is_refused():
    with pytest.raises(ConfigError, match="accumulation_steps"):
        run(network(), SharpnessAwareStep(), batches(), accumulation_steps=2)


def test_a_frozen_network_is_refused():
    net = network().requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        run(net, PlainStep(), batches(), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))


@pytest.mark.parametrize(
    "wrong", [{"alpha": -0.1}, {"alpha": math.nan}, {"rho": 0.0}, {"radius": "fixed"}, {"share": 0.0}]
)
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(ConfigError):
        SharpnessAwareStep(**wrong)


def test_a_step_may_change_networks():
    step, one, two = SharpnessAwareStep(), network(), network()
    run(one, step, batches())
    run(two, step, batches())
    assert same(one, two)


def test_snapshot_restores_every_type():
    tensors = [torch.tensor([1.5, math.nan]), torch.tensor(3), torch.tensor([True])]
    kept = Snapshot(tensors)
    kept.save()
    for t in tensors:
        t.zero_()
    kept.restore()
    assert tensors[0][0] == 1.5
    assert math.isnan(tensors[0][1])
    assert tensors[1] == 3
    assert bool(tensors[2][0])
