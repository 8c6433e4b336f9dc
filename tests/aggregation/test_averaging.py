"""Averages against NumPy in float64, and their policy for buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.aggregation.averaging import RunningMean, weighted_mean


def states(count: int = 5) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "w": torch.randn(70_001, generator=generator),
            "deep": torch.randn(3, 4, 5, generator=generator).double(),
            "half": torch.randn(64, generator=generator).half(),
            "scalar": torch.randn((), generator=generator),
            "batches": torch.tensor(10 + i),
            "mask": torch.tensor([i == 0, True]),
            "empty": torch.zeros(0, 3),
        }
        for i in range(count)
    ]


WEIGHTS = [3.0, 0.0, 1.0, 7.5, 0.5]


def running(given, weights):
    mean = RunningMean()
    for state, weight in zip(given, weights):
        mean.add(state, weight)
    return mean.result()


@pytest.mark.parametrize("average", [weighted_mean, running])
def test_floats_are_the_weighted_mean(average):
    given = states()
    mean = average(given, WEIGHTS)
    for name, tolerance in {"w": 1e-6, "deep": 1e-14, "half": 2e-3, "scalar": 1e-6}.items():
        expected = np.average([s[name].double().numpy() for s in given], axis=0, weights=WEIGHTS)
        assert np.allclose(mean[name].double().numpy(), expected, rtol=tolerance, atol=tolerance), name
        assert mean[name].dtype == given[0][name].dtype
        assert mean[name].shape == given[0][name].shape


@pytest.mark.parametrize("average", [weighted_mean, running])
def test_integers_and_masks_come_from_the_first_client(average):
    mean = average(states(), WEIGHTS)
    assert mean["batches"].dtype == torch.int64
    assert mean["batches"].item() == 10
    assert mean["mask"].tolist() == [True, True]


@pytest.mark.parametrize("average", [weighted_mean, running])
def test_inputs_are_not_changed_and_not_shared(average):
    given = states(2)
    before = [{k: t.clone() for k, t in s.items()} for s in given]
    mean = average(given, [1.0, 0.0])
    for tensor in mean.values():
        if tensor.dtype != torch.bool:
            tensor.add_(1)
    assert all(torch.equal(s[k], b[k]) for s, b in zip(given, before) for k in s)


@pytest.mark.parametrize("average", [weighted_mean, running])
def test_half_precision_sums_do_not_overflow(average):
    big = [{"h": torch.full((3,), 60_000.0).half()} for _ in range(20)]
    assert average(big, [1000.0] * 20)["h"].tolist() == [60_000.0] * 3


@pytest.mark.parametrize("average", [weighted_mean, running])
@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e-46, 1e-40, 1e30, 1e39, 1e300])
def test_weights_of_any_size_give_the_same_mean(average, scale):
    """Powers of losses go far beyond float32, in which the models are summed."""
    given = states()
    mean, usual = average(given, [scale * w for w in (3, 0, 1, 7, 5)]), average(given, [3, 0, 1, 7, 5])
    for name in ("w", "deep", "half", "scalar"):
        assert torch.allclose(mean[name], usual[name], rtol=1e-3 if name == "half" else 1e-5, atol=1e-6), name


@pytest.mark.parametrize("weights", [[1e-300, 0.0, 2.0, 6.0], [2.0, 1e-300, 0.0, 6.0], [0.0, 1e-200, 1e-8, 3e-8]])
def test_weights_far_apart_leave_the_largest(weights):
    given = states(4)
    expected = np.average([s["w"].double().numpy() for s in given], axis=0, weights=weights)
    assert np.allclose(running(given, weights)["w"].numpy(), expected, rtol=1e-6, atol=1e-6)


def test_accumulator_starts_anew_each_round():
    """Two rounds of identical updates give the identical mean (a known fault elsewhere: a sum that is not reset)."""
    given = states(3)
    assert torch.equal(running(given, [1, 2, 3])["w"], running(given, [1, 2, 3])["w"])


@pytest.mark.parametrize("average", [weighted_mean, running])
@pytest.mark.parametrize("weights", [[0.0, 0.0], []])
def test_nothing_to_average_is_an_error(average, weights):
    with pytest.raises(ValueError, match=r"zero|0 states"):
        average(states(2)[: len(weights)], weights)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="2 states with 1 weights"):
        weighted_mean(states(2), [1.0])


def test_views_of_a_network_are_safe():
    network = torch.nn.Linear(3, 2)
    mean = RunningMean()
    mean.add(network.state_dict(), 1.0)
    with torch.no_grad():
        network.weight.add_(5.0)
    first = mean.result()["weight"]
    assert not first.requires_grad
    assert torch.allclose(first, network.weight.detach() - 5.0, atol=1e-6)
