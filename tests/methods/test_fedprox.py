"""FedProx on the real trainer: against the equations in NumPy, and at both ends of mu."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_fedism_oracle import CLIENTS, DECAY, LR, LinearSoftmax, orders, pixels, theta_of
from test_methods_degenerate import MULTI, multilabel_clients
from tiny_federation import Federation, distance, three_clients

from medfed.errors import ConfigError
from medfed.federation.state import same_state, save_state
from medfed.methods.registry import resolve_method


def numpy_round(theta, data, round, mu, la=True):
    """One round: gradient of the batch loss plus mu (w - w_t), Adam with coupled weight decay, weighted mean."""
    models = {}
    for name in CLIENTS:
        x, y = pixels(data[name]), data[name].labels.numpy()
        counts = np.bincount(y, minlength=3)
        offsets = np.log(np.maximum(counts / counts.sum(), 1e-12)) if la else np.zeros(3)
        local, m, v = theta.copy(), np.zeros_like(theta), np.zeros_like(theta)
        for t, batch in enumerate(orders(0, round, name, len(y), 1), start=1):
            _, g = LinearSoftmax.loss_and_gradient(local, x[batch], y[batch], offsets)
            g = g + mu * (local - theta) + DECAY * local
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            local = local - LR * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        models[name] = local
    sizes = {c: len(data[c]) for c in CLIENTS}
    return sum(sizes[c] * models[c] for c in CLIENTS) / sum(sizes.values())


@pytest.mark.parametrize(("mu", "la"), [(0.2, True), (5.0, True), (1.0, False)])
def test_three_rounds_are_those_of_the_equations(mu, la):
    data = three_clients()
    ours = Federation({"name": "fedprox", "mu": mu, "logit_adjustment": la}, data).run()
    theta = theta_of(ours.initial)
    for round in (1, 2, 3):
        theta = numpy_round(theta, data, round, mu, la)
        assert np.abs(theta_of(ours.models[round - 1]) - theta).max() < 1e-6
    without = Federation({"name": "fedavg", "logit_adjustment": la}, data).run()
    assert np.abs(theta_of(without.models[-1]) - theta).max() > 1e-4


@pytest.mark.parametrize("network", ["Softmax", "Normed"])
def test_mu_zero_is_fedavg_bit_by_bit(network):
    one = Federation({"name": "fedprox", "mu": 0}, three_clients(), network=network).run()
    two = Federation("fedavg", three_clients(), network=network).run()
    assert all(same_state(a, b) for a, b in zip(one.models, two.models, strict=True))
    assert [r["clients"] for r in one.records] == [r["clients"] for r in two.records]


def test_a_large_mu_keeps_the_weights_but_not_the_statistics():
    """Plain descent settles where mu ||w - w_t|| is the size of a gradient; without the term it goes on."""
    changes = {"optimizer": {"_target_": "torch.optim.SGD", "params": [], "lr": 1e-4}}
    done = {
        mu: Federation(
            {"name": "fedprox", "mu": mu, "local_epochs": 20},
            three_clients(),
            network="Normed",
            rounds=1,
            bundle_changes=changes,
        ).run()
        for mu in (0.0, 5e3)
    }

    def moved(mu, name):
        return float((done[mu].models[0][name] - done[mu].initial[name]).abs().max())

    for name in ("first.weight", "head.weight", "norm.weight"):
        assert 0 < moved(5e3, name) < 0.2 * moved(0.0, name)
    assert moved(5e3, "norm.running_mean") == pytest.approx(moved(0.0, "norm.running_mean"), rel=0.05)


def test_multilabel_is_trained_and_held_back():
    models = {}
    for mu in (0.0, 50.0):
        done = Federation({"name": "fedprox", "mu": mu}, multilabel_clients(), bundle_changes=MULTI, rounds=1).run()
        assert done.records[0]["admitted"] == ["c0", "c1", "c2"]
        models[mu] = done
    # One batch a client: at the received model the term has no gradient.
    assert distance(models[0.0].models[0], models[50.0].models[0]) < 1e-12
    two = {"name": "fedprox", "local_epochs": 2}
    held = Federation({**two, "mu": 50.0}, multilabel_clients(), bundle_changes=MULTI, rounds=1).run()
    free = Federation({**two, "mu": 0.0}, multilabel_clients(), bundle_changes=MULTI, rounds=1).run()
    assert distance(held.models[0], held.initial) < distance(free.models[0], free.initial)


def test_sharpness_aware_training_holds_too():
    section = {"name": "fedprox", "salt": {"rho": 0.1}}
    done = Federation({**section, "mu": 5.0}, three_clients(), network="Normed").run()
    other = Federation({**section, "mu": 0.0}, three_clients(), network="Normed").run()
    assert all(torch.isfinite(t).all() for t in done.models[-1].values())
    assert distance(done.models[-1], other.models[-1]) > 1e-6


class Killed(BaseException):
    pass


def test_killed_run_goes_on_bitwise(tmp_path):
    options = {"network": "Normed", "dropout": 0.3, "seed": 4}
    whole = Federation("fedprox", three_clients(), **options).run()

    def save(state):
        save_state(state, tmp_path / "checkpoint")
        if state.round == 2:
            raise Killed

    first = Federation("fedprox", three_clients(), folder=tmp_path, save=save, **options)
    with pytest.raises(Killed):
        first.run()
    second = Federation("fedprox", three_clients(), folder=tmp_path, workers=2, **options).run()
    models = [*first.models[:2], *second.models]
    assert all(same_state(a, b) for a, b in zip(models, whole.models, strict=True))


def test_settings():
    _, settings = resolve_method({"name": "fedprox"})
    assert settings.mu == 0.2
    with pytest.raises(ConfigError, match="mu"):
        resolve_method({"name": "fedprox", "mu": -0.1})
