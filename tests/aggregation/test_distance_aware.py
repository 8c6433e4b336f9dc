"""DaAgg by hand, against NumPy, and at its edges (algorithms' acceptance check 8)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from medfed.aggregation.weights import by_samples, discounted, distance_aware, distances


def state(*numbers, **more):
    a, b = numbers
    return {"a": torch.tensor(a), "b": torch.tensor([b]), **more}


# Two tensors: norms are taken tensor by tensor, so that (3, 4) and 12 make 5 + 12 and not 13.
STATES = {
    "c0": state([0.0, 0.0], 0.0),
    "c1": state([3.0, 4.0], 12.0),
    "c2": state([0.0, 1.0], 0.0),
    "c3": state([3.0, 5.0], 12.0),
}


def test_distance_is_the_sum_of_norms_to_the_nearest_clean_model():
    assert distances(STATES, {"c0"}) == {"c0": 0, "c1": 17, "c2": 1, "c3": pytest.approx(math.sqrt(34) + 12)}
    assert distances(STATES, {"c0", "c1"}) == {"c0": 0, "c1": 0, "c2": 1, "c3": 1}


def test_weights_by_hand():
    samples = {"c0": 10, "c1": 20, "c2": 30, "c3": 40}
    weights = distance_aware({c: STATES[c] for c in ("c0", "c1", "c2")}, samples, ["c0"])
    raw = {"c0": 10.0, "c1": 20 * math.exp(-1), "c2": 30 * math.exp(-1 / 17)}
    assert weights == pytest.approx({c: w / sum(raw.values()) for c, w in raw.items()})


def test_clean_ratio_is_kept_and_the_farthest_has_one_e_th():
    samples = {"c0": 10, "c1": 30, "c2": 10, "c3": 10}
    for scale in (1e-12, 1.0, 1e12):
        states = {c: {k: t.double() * scale for k, t in s.items()} for c, s in STATES.items()}
        states["c2"]["b"] += 5 * scale
        weights = distance_aware(states, samples, {"c0", "c1"})
        assert weights["c1"] / weights["c0"] == pytest.approx(3)
        assert weights["c2"] / weights["c0"] == pytest.approx(math.exp(-1))
        assert sum(weights.values()) == pytest.approx(1)


def test_statistics_count_and_counters_do_not():
    one = {"w": torch.zeros(3), "running_var": torch.ones(2), "num_batches_tracked": torch.tensor(4)}
    two = {"w": torch.zeros(3), "running_var": torch.tensor([1.0, 3.0]), "num_batches_tracked": torch.tensor(400)}
    assert distances({"a": one, "b": two}, ["a"]) == {"a": 0, "b": 2}


@pytest.mark.parametrize("clean", [(), ("elsewhere",), ("c0", "c1", "c2", "c3")])
def test_without_clean_or_without_noisy_models_it_is_fedavg(clean):
    samples = {"c0": 1, "c1": 2, "c2": 3, "c3": 4}
    assert distances(STATES, clean) == dict.fromkeys(STATES, 0.0)
    assert distance_aware(STATES, samples, clean) == pytest.approx(by_samples(samples))


def test_all_models_the_same_is_fedavg():
    same = dict.fromkeys(("c0", "c1"), STATES["c1"])
    assert distance_aware(same, {"c0": 1, "c1": 3}, ["c0"]) == {"c0": 0.25, "c1": 0.75}


def test_one_client():
    assert distance_aware({"c0": STATES["c0"]}, {"c0": 7}, []) == {"c0": 1.0}


def test_half_precision_and_large_numbers_stay_finite():
    large = {"a": {"w": torch.zeros(4, dtype=torch.float16)}, "b": {"w": torch.full((4,), 6e4, dtype=torch.float16)}}
    assert distances(large, ["a"])["b"] == pytest.approx(2 * 6e4, rel=1e-3)
    large = {"a": {"w": torch.zeros(4)}, "b": {"w": torch.full((4,), 1e30)}}
    assert distances(large, ["a"])["b"] == pytest.approx(2e30, rel=1e-6)
    assert distance_aware(large, {"a": 1, "b": 1}, ["a"])["b"] == pytest.approx(math.exp(-1) / (1 + math.exp(-1)))


def test_nothing_to_average_is_an_error():
    with pytest.raises(ValueError, match="zero"):
        distance_aware({}, {}, [])
    with pytest.raises(ValueError, match="zero"):
        discounted({"a": 0}, {"a": 0.0})


def test_against_numpy_on_random_models():
    generator = np.random.default_rng(0)
    shapes = {"conv": (4, 3, 3, 3), "bias": (4,), "mean": (), "large": (300, 301), "empty": (0,)}
    names = [f"c{i}" for i in range(6)]
    arrays = {c: {k: generator.normal(size=s) * (1 + i) for k, s in shapes.items()} for i, c in enumerate(names)}
    states = {c: {k: torch.from_numpy(np.asarray(a)) for k, a in s.items()} for c, s in arrays.items()}
    samples = {c: int(n) for c, n in zip(names, generator.integers(5, 200, 6))}
    clean = {"c1", "c4"}
    d = {}
    for c in names:
        ways = [sum(np.sqrt(((arrays[c][k] - arrays[j][k]) ** 2).sum()) for k in shapes) for j in clean]
        d[c] = 0.0 if c in clean else min(ways)
    raw = {c: samples[c] * np.exp(-d[c] / max(d.values())) for c in names}
    assert distances(states, clean) == pytest.approx(d)
    assert distance_aware(states, samples, clean) == pytest.approx({c: w / sum(raw.values()) for c, w in raw.items()})


def test_memory_format_does_not_matter():
    one = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    other = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    last = {"a": {"w": one.to(memory_format=torch.channels_last)}, "b": {"w": other}}
    assert distances(last, ["a"])["b"] == pytest.approx(float((one - other).double().norm()))
