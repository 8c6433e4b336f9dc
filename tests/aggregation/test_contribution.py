"""FedCE's contribution by hand, and against the aggregator that NVIDIA FLARE ships."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from medfed.aggregation.averaging import weighted_mean
from medfed.aggregation.contribution import coefficients, gram, leave_one_out_cosines, minus_model


def test_two_clients_by_hand():
    """u_1 = (1, 0), u_2 = (1, 1): each is compared with the other one; cos 45 degrees, whatever the coefficients."""
    products = torch.tensor([[1.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    for c in ([0.5, 0.5], [0.9, 0.1]):
        assert leave_one_out_cosines(products, torch.tensor(c)).tolist() == pytest.approx([math.sqrt(0.5)] * 2)


def test_three_clients_by_hand():
    """u = (1, 0), (0, 1), (1, 1), c = (0.2, 0.2, 0.6).

    Without 1: 0.2 (0, 1) + 0.6 (1, 1) = (0.6, 0.8), cos 0.6; without 2 the mirror image; without 3: (0.2, 0.2), cos 1.
    """
    u = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    found = leave_one_out_cosines(u @ u.T, torch.tensor([0.2, 0.2, 0.6]))
    assert found.tolist() == pytest.approx([0.6, 0.6, 1.0])


def test_the_client_at_right_angles_to_all_others_gains():
    u = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.9, 0.0], [0.0, 1.0]], dtype=torch.float64)
    cosines = leave_one_out_cosines(u @ u.T, torch.full((4,), 0.25))
    novelty = dict(zip("abcd", (1 - cosines).tolist()))
    weights = coefficients(novelty, dict.fromkeys("abcd", 0.5))
    assert weights["d"] == max(weights.values())
    assert weights["d"] > 0.25 > weights["a"]


def test_no_direction_is_no_similarity():
    u = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    # The sum of the other two vanishes for the first; the second sees only the third, and the third the second.
    found = leave_one_out_cosines(u @ u.T, torch.full((3,), 1 / 3))
    assert found.tolist() == [0.0, -1.0, -1.0]
    assert leave_one_out_cosines(torch.zeros(3, 3), torch.ones(3)).tolist() == [0.0, 0.0, 0.0]
    assert leave_one_out_cosines(torch.ones(1, 1), torch.ones(1)).tolist() == [0.0]


def test_inner_products_over_several_tensors_and_blocks():
    rng = np.random.default_rng(0)
    shapes = {"big": (70000,), "small": (3, 2), "other": (4,)}

    def draw():
        return {n: torch.from_numpy(rng.normal(size=s)) for n, s in shapes.items()}

    start, states = draw(), {c: draw() for c in "ab"}
    rows = [np.concatenate([(states[c][n] - start[n]).numpy().ravel() for n in ("big", "small")]) for c in "ab"]
    found = gram(states, start, ["big", "small"]).numpy()
    assert found == pytest.approx(np.array(rows) @ np.array(rows).T)


def test_shares_are_added_or_multiplied():
    novelty, need = {"a": 1.0, "b": 3.0}, {"a": 0.5, "b": 0.5}
    assert coefficients(novelty, need, "plus") == pytest.approx({"a": 0.375, "b": 0.625})
    assert coefficients(novelty, need, "times") == pytest.approx({"a": 0.25, "b": 0.75})


@pytest.mark.parametrize("mode", ["plus", "times"])
@pytest.mark.parametrize("floor", [0.0, 1e-6])
def test_nothing_to_tell_apart_gives_equal_weights(mode, floor):
    assert coefficients({"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0}, mode, floor) == {"a": 0.5, "b": 0.5}
    assert coefficients({"a": 0.4}, {"a": 0.2}, mode, floor) == {"a": 1.0}
    crossed = coefficients({"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 0.0}, mode, floor)
    assert crossed == pytest.approx({"a": 0.5, "b": 0.5})


def test_model_without_a_client_is_that_of_the_others():
    states = {
        c: {"w": torch.tensor([v, 2 * v]), "var": torch.tensor([v])} for c, v in {"a": 1.0, "b": 4.0, "c": 9.0}.items()
    }
    weights = [0.2, 0.3, 0.5]
    whole = weighted_mean(list(states.values()), weights)
    found = minus_model(whole, {"w": states["b"]["w"]}, 0.3)
    others = weighted_mean([states["a"], states["c"]], [0.2, 0.5])
    assert found["w"].tolist() == pytest.approx(others["w"].tolist())
    assert found["var"] is whole["var"]
    with pytest.raises(ValueError, match="below 1"):
        minus_model(whole, states["b"], 1.0)
    assert torch.equal(minus_model(whole, {"w": states["b"]["w"]}, 0.0)["w"], whole["w"])


def test_variance_of_the_arithmetic_would_be_negative():
    """Why buffers are left alone: a client with a large variance, taken out of a model that it hardly formed."""
    model, own = {"running_var": torch.tensor([1.0])}, {"running_var": torch.tensor([9.0])}
    assert minus_model(model, own, 0.4)["running_var"].item() < 0


@pytest.mark.parametrize("mode", ["plus", "times"])
def test_three_rounds_are_those_of_nvidia_flare(mode):
    pytest.importorskip("nvflare")
    from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
    from nvflare.app_opt.pt.fedce import FedCEModelAggregator

    rng = np.random.default_rng(5)
    clients = ["a", "b", "c", "d"]
    official = FedCEModelAggregator(mode=mode, trainable_param_names=["w", "v"])
    weights, cosines = dict.fromkeys(clients, 0.25), {c: [] for c in clients}
    for _ in range(3):
        start = {n: torch.from_numpy(rng.normal(size=s)) for n, s in {"w": (5, 3), "v": (4,), "buffer": (2,)}.items()}
        states = {c: {n: t + torch.from_numpy(rng.normal(0.2, 1, t.shape)) for n, t in start.items()} for c in clients}
        need = dict(zip(clients, rng.uniform(0, 1, 4)))
        for c in clients:
            update = FLModel(
                params={n: (t - start[n]).numpy() for n, t in states[c].items()},
                params_type=ParamsType.DIFF,
                meta={"client_name": c, "fedce_minus_val": need[c]},
            )
            official.accept_model(update)
        theirs = official.aggregate_model()
        official.reset_stats()

        found = leave_one_out_cosines(gram(states, start, ["w", "v"]), torch.tensor(list(weights.values())))
        for c, value in zip(clients, found.tolist()):
            cosines[c].append(value)
        weights = coefficients({c: 1 - np.mean(v) for c, v in cosines.items()}, need, mode)
        assert weights == pytest.approx(theirs.meta["fedce_coef"], rel=1e-5)
        mean = weighted_mean(list(states.values()), list(weights.values()))
        for n, t in mean.items():
            assert (t - start[n]).numpy() == pytest.approx(np.asarray(theirs.params[n]), rel=1e-4, abs=1e-6)


def test_minus_model_is_that_of_nvidia_flare():
    pytest.importorskip("nvflare")
    from nvflare.app_opt.pt.fedce import PTFedCEHelper

    torch.manual_seed(0)
    network, own = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3).state_dict()
    theirs = PTFedCEHelper.make_minus_model(network, own, 0.3).state_dict()
    found = minus_model(network.state_dict(), own, 0.3)
    for name, tensor in theirs.items():
        assert torch.allclose(found[name], tensor, rtol=1e-5, atol=1e-7)
