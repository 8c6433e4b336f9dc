"""Sharpness mathematics against values worked out by hand and against pytorch_optimizer."""

import math

import pytest
import torch
from torch import nn

from medfed.errors import ConfigError
from medfed.training.sharpness import (
    Radius,
    dataset_sharpness,
    global_norm,
    gsam_gradient,
    inner_product,
    perturbation,
    rho_schedule,
    warm_up,
)


def test_norm_and_inner_product_run_over_all_tensors():
    a = [torch.tensor([1.0, 2.0]), torch.tensor([[2.0]])]
    b = [torch.tensor([0.5, 1.0]), torch.tensor([[-1.0]])]
    assert global_norm(a).item() == pytest.approx(3.0)
    assert inner_product(a, b).item() == pytest.approx(0.5 + 2.0 - 2.0)


def test_inner_product_of_channels_last_tensors_pairs_equal_elements():
    a, b = torch.rand(2, 3, 4, 5), torch.rand(2, 3, 4, 5)
    mixed = inner_product([a.to(memory_format=torch.channels_last)], [b])
    assert mixed.item() == pytest.approx((a * b).sum().item(), rel=1e-5)


def test_sam_perturbation_by_hand():
    step = perturbation([torch.tensor([3.0]), torch.tensor([0.0, 4.0])], rho=0.5)
    assert step[0].tolist() == pytest.approx([0.3])
    assert step[1].tolist() == pytest.approx([0.0, 0.4])


def test_zero_gradient_gives_no_perturbation():
    assert perturbation([torch.zeros(3)], rho=1.0)[0].tolist() == [0, 0, 0]


def test_asam_perturbation_by_hand():
    # T g = (2*3, 1*(-8)) = (6, -8), norm 10; eps = rho * T^2 g / 10 = 0.5 * (12, -8) / 10
    step = perturbation([torch.tensor([3.0, -8.0])], 0.5, [torch.tensor([-2.0, 1.0])])
    assert step[0].tolist() == pytest.approx([0.6, -0.4])


def test_asam_perturbation_is_invariant_to_rescaling_of_layers():
    # f depends on w1*w2 only; scaling w1 by 10 and w2 by 1/10 scales their gradients inversely.
    w, g = [torch.tensor([2.0]), torch.tensor([3.0])], [torch.tensor([0.5]), torch.tensor([1.5])]
    w2, g2 = [w[0] * 10, w[1] / 10], [g[0] / 10, g[1] * 10]
    one, two = perturbation(g, 0.1, w), perturbation(g2, 0.1, w2)
    assert [(e / x).item() for e, x in zip(one, w)] == pytest.approx([(e / x).item() for e, x in zip(two, w2)])


def test_gsam_in_two_dimensions_by_hand():
    # g_p along x: the part of g orthogonal to it is (0, 4); direction = (2, 0) - 0.1 * (0, 4)
    out = gsam_gradient([torch.tensor([3.0, 4.0])], [torch.tensor([2.0, 0.0])], alpha=0.1)
    assert out[0].tolist() == pytest.approx([2.0, -0.4], abs=1e-6)


def test_gsam_over_several_tensors_uses_one_orthogonal_projection():
    # g = (1, 1, 0), g_p = (0, 1, 1): cos = 1/2, g_perp = g - g_p/2 = (1, .5, -.5)
    out = gsam_gradient(
        [torch.tensor([1.0]), torch.tensor([1.0, 0.0])], [torch.tensor([0.0]), torch.tensor([1.0, 1.0])], alpha=0.2
    )
    assert torch.cat(out).tolist() == pytest.approx([-0.2, 0.9, 1.1], abs=1e-6)


def test_gsam_without_alpha_is_the_perturbed_gradient_itself():
    gp = torch.rand(5)
    assert gsam_gradient([torch.rand(5)], [gp], alpha=0)[0] is gp


def test_gsam_of_parallel_gradients_has_no_orthogonal_part():
    out = gsam_gradient([torch.tensor([2.0, 4.0])], [torch.tensor([1.0, 2.0])], alpha=5.0)
    assert out[0].tolist() == pytest.approx([1.0, 2.0], abs=1e-5)


def test_gsam_is_homogeneous():
    g, gp = [torch.rand(7) - 0.5], [torch.rand(7) - 0.5]
    once = gsam_gradient(g, gp, 0.3)[0] * 1024
    scaled = gsam_gradient([g[0] * 1024], [gp[0] * 1024], 0.3)[0]
    assert torch.allclose(once, scaled, rtol=1e-5)


@pytest.mark.parametrize(("round", "expected"), [(1, 0.05 * math.sqrt(0.01)), (25, 0.025), (100, 0.05)])
def test_fedism_plus_radius(round, expected):
    assert rho_schedule(0.05, round, 100, 0.5) == pytest.approx(expected)


def test_radius_schedules_at_their_ends():
    assert rho_schedule(0.05, 3, 10, power=0) == 0.05
    assert [warm_up(0.4, r, 4) for r in (1, 2, 4, 9)] == pytest.approx([0.1, 0.2, 0.4, 0.4])
    assert warm_up(0.4, 1, 0) == 0.4
    with pytest.raises(ValueError, match="round"):
        rho_schedule(0.05, 0, 10)


def test_radius_rules():
    w, g = [torch.tensor([3.0, 4.0])], [torch.tensor([0.0, 2.0])]
    assert Radius(0.5).perturbation(g, w)[0].tolist() == pytest.approx([0, 0.5])
    assert Radius(0.1, "relative").perturbation(g, w)[0].tolist() == pytest.approx([0, 0.5])
    assert Radius(0.5, "adaptive").perturbation(g, w)[0].tolist() == pytest.approx([0, 2.0])


def test_bounded_radius_holds_the_predicted_rise_to_a_share_of_the_loss():
    w, g = [torch.tensor([3.0, 4.0])], [torch.tensor([0.0, 20.0])]
    # 0.1 * 4 / 20 = 0.02 is less than 0.05: the predicted rise is 0.02 * 20 = 0.1 * 4.
    assert Radius(0.05, "bounded").perturbation(g, w, 4.0)[0].tolist() == pytest.approx([0, 0.02])
    assert Radius(0.05, "bounded").perturbation(g, w, 40.0)[0].tolist() == pytest.approx([0, 0.05])
    assert Radius(0.05, "bounded", share=0.2).perturbation(g, w, 4.0)[0].tolist() == pytest.approx([0, 0.04])
    with pytest.raises(ValueError, match="needs the loss"):
        Radius(0.05, "bounded").perturbation(g, w)


def test_bounded_sharpness_of_a_quadratic():
    # F = 4.5 and gradient norm 3: share 0.01 gives the radius 0.015.
    radius = Radius(0.05, "bounded", share=0.01)
    found = dataset_sharpness(
        Point(1.0, -2.0, 2.0), lambda: [{"label": torch.zeros(n)} for n in (2, 3)], radius, quadratic
    )
    assert found.sharpness == pytest.approx(0.015 * 3 + 0.015**2 / 2, rel=1e-9)


@pytest.mark.parametrize("rho", [0.0, -1.0, math.nan, math.inf])
def test_radius_must_be_positive(rho):
    with pytest.raises(ConfigError, match="positive"):
        Radius(rho)


def test_unknown_rule_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'relative'"):
        Radius(0.05, "relativ")


class Point(nn.Module):
    """A network that is its own parameter."""

    def __init__(self, *values: float):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(values, dtype=torch.float64))

    def forward(self, x):
        return self.theta


def quadratic(network, batch):
    return (0.5 * network(None).square().sum()).expand(len(batch["label"]))


@pytest.mark.parametrize("sizes", [[4], [1, 2, 5]])
def test_sharpness_of_a_quadratic_is_known(sizes):
    # F = ||theta||^2 / 2: moving by rho along theta gives rho ||theta|| + rho^2 / 2.
    network = Point(1.0, -2.0, 2.0)
    batches = [{"label": torch.zeros(n)} for n in sizes]
    found = dataset_sharpness(network, lambda: batches, 0.05, quadratic)
    assert found.sharpness == pytest.approx(0.05 * 3 + 0.05**2 / 2, rel=1e-12)
    assert found.loss == pytest.approx(4.5, rel=1e-12)
    assert found.gradient_norm == pytest.approx(3.0, rel=1e-12)
    assert found.samples == sum(sizes)


def test_sharpness_never_falls_below_its_floor():
    found = dataset_sharpness(
        Point(0.0, 0.0), lambda: [{"label": torch.zeros(2)}], 0.05, lambda n, b: 0 * quadratic(n, b)
    )
    assert found.sharpness == 1e-10


def test_sharpness_of_a_broken_network_is_not_a_number():
    found = dataset_sharpness(Point(math.nan), lambda: [{"label": torch.zeros(2)}], 0.05, quadratic)
    assert math.isnan(found.sharpness)


def test_sharpness_of_no_data_is_refused():
    with pytest.raises(ValueError, match="empty"):
        dataset_sharpness(Point(1.0), list, 0.05, quadratic)


def small_network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 3))


def test_sharpness_leaves_everything_as_it_was():
    network = small_network().train()
    network[1].eval()
    network[0].weight.grad = torch.ones_like(network[0].weight)
    network[4].bias.requires_grad_(False)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    batch = {"image": torch.rand(6, 1, 8, 8), "label": torch.tensor([0, 1, 2, 0, 1, 2])}
    first = dataset_sharpness(network, lambda: [batch], 0.05)
    second = dataset_sharpness(network, lambda: [batch], 0.05)
    assert first == second
    assert first.sharpness > 1e-10
    after = network.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert network.training
    assert not network[1].training
    assert network[4].weight.grad is None
    assert torch.equal(network[0].weight.grad, torch.ones_like(network[0].weight))


def test_sharpness_does_not_depend_on_the_batches():
    network = small_network()
    images, labels = torch.rand(12, 1, 8, 8), torch.arange(12) % 3
    cut = [
        dataset_sharpness(
            network, lambda n=n: [{"image": i, "label": y} for i, y in zip(images.split(n), labels.split(n))], 0.05
        )
        for n in (12, 5)
    ]
    assert cut[0].sharpness == pytest.approx(cut[1].sharpness, rel=1e-4)


def test_resampled_passes_each_see_their_own_batches():
    network, seen = Point(1.0), []

    def batches():
        seen.append(len(seen))
        return [{"label": torch.zeros(1), "scale": float(len(seen))}]

    found = dataset_sharpness(
        network, batches, 0.1, lambda n, b: b["scale"] * n(None).expand(len(b["label"])), resampled=True
    )
    # gradient pass scale 1, loss pass scale 2, perturbed pass scale 3 at theta = 1.1
    assert len(seen) == 3
    assert found.sharpness == pytest.approx(3 * 1.1 - 2 * 1.0)


def test_sharpness_after_an_error_leaves_the_weights():
    network, calls = Point(1.0), []

    def failing(net, batch):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("broken")
        return quadratic(net, batch)

    with pytest.raises(RuntimeError, match="broken"):
        dataset_sharpness(network, lambda: [{"label": torch.zeros(1)}], 0.5, failing)
    assert network.theta.tolist() == [1.0]
