"""Agnostic federated learning on the real trainer, against gradient descent and projection in NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from fairness_oracle import CLIENTS, adam, close, killed_and_resumed, loss_of, offsets_of, orders, pixels, theta_of
from test_fedism_oracle import LinearSoftmax
from test_methods_degenerate import MULTI, faulty, multilabel_clients
from tiny_federation import Federation, client_data, distance, three_clients

from medfed.errors import ConfigError
from medfed.federation.state import same_state
from medfed.methods.agnostic_fl import METHOD
from medfed.methods.registry import resolve_method
from medfed.seeding import torch_generator


def nearest_on_simplex(v):
    """By brute force over the sets of positive entries."""
    best, least = None, np.inf
    for r in range(1, len(v) + 1):
        for support in map(list, itertools.combinations(range(len(v)), r)):
            w = np.zeros(len(v))
            w[support] = v[support] - (v[support].sum() - 1) / r
            if w.min() >= 0 and ((w - v) ** 2).sum() < least:
                best, least = w, ((w - v) ** 2).sum()
    return best


def batch_of(round, client, samples, size=4):
    order = torch.randperm(samples, generator=torch_generator(0, "gradient", round, client))
    return order[:size].numpy()


@pytest.mark.parametrize(
    ("rate", "ascent", "average", "la"),
    [(0.2, 0.3, True, True), (0.5, 0.0, True, True), (0.2, 5.0, False, True), (0.2, 0.3, True, False)],
)
def test_four_rounds_are_those_of_the_equations(rate, ascent, average, la):
    data = three_clients()
    section = {
        "name": "agnostic_fl",
        "learning_rate": rate,
        "ascent_rate": ascent,
        "logit_adjustment": la,
        **({} if average else {"average": False}),
    }
    ours = Federation(section, data, rounds=4).run()
    theta, weights, iterates = theta_of(ours.initial), np.full(3, 1 / 3), []
    for round in (1, 2, 3, 4):
        losses, gradients = [], []
        for name in CLIENTS:
            y = data[name].labels.numpy()
            batch = batch_of(round, name, len(y))
            offsets = offsets_of(y) if la else np.zeros(3)
            loss, gradient = LinearSoftmax.loss_and_gradient(theta, pixels(data[name])[batch], y[batch], offsets)
            losses.append(loss)
            gradients.append(gradient)
        assert ours.column("weight", round) == pytest.approx(dict(zip(CLIENTS, weights)), abs=1e-6)
        assert ours.column("loss", round) == pytest.approx(dict(zip(CLIENTS, losses)), rel=1e-6)
        theta = theta - rate * sum(w * g for w, g in zip(weights, gradients))
        iterates.append(theta)
        weights = nearest_on_simplex(weights + ascent * np.array(losses))
        assert close(ours.models[round - 1], np.mean(iterates, axis=0) if average else theta)
    assert ("iterate" in ours.server.notes) is average
    if ascent == 5.0:
        assert 0.0 in ours.column("weight", 4).values()


def test_epochs_of_local_training_with_agnostic_weights():
    data = three_clients()
    ours = Federation({"name": "agnostic_fl", "work": "epochs", "ascent_rate": 0.2}, data).run()
    theta, weights = theta_of(ours.initial), np.full(3, 1 / 3)
    for round in (1, 2, 3):
        losses = np.array([loss_of(theta, data[c]) for c in CLIENTS])
        models = [
            adam(theta, data[c], orders(0, round, c, len(data[c]), 1), offsets_of(data[c].labels.numpy()))
            for c in CLIENTS
        ]
        theta = sum(w * m for w, m in zip(weights, models))
        weights = nearest_on_simplex(weights + 0.2 * losses)
        assert close(ours.models[round - 1], theta)
        assert ours.column("received_loss", round) == pytest.approx(dict(zip(CLIENTS, losses)), rel=1e-6)
    assert "iterate" not in ours.server.notes


def test_the_released_form_takes_the_worst_clients_model():
    data = three_clients()
    ours = Federation({"name": "agnostic_fl", "form": "as_released"}, data).run()
    theta, chosen = theta_of(ours.initial), []
    for round in (1, 2, 3):
        losses = {c: loss_of(theta, data[c]) for c in CLIENTS}
        worst = max(losses, key=losses.get)
        y = data[worst].labels.numpy()
        theta = adam(theta, data[worst], orders(0, round, worst, len(y), 1), offsets_of(y))
        assert close(ours.models[round - 1], theta)
        assert ours.column("weight", round) == {c: float(c == worst) for c in CLIENTS}
        assert ours.records[round - 1]["admitted"] == [worst]
        chosen.append(worst)
    assert ours.server.notes == {}


def test_a_whole_batch_and_one_that_is_larger_than_the_data():
    whole = Federation({"name": "agnostic_fl", "batch_size": 1000}, three_clients(), rounds=1).run()
    assert whole.column("samples", 1) == {"c0": 11, "c1": 6, "c2": 9}
    assert whole.column("steps", 1) == {"c0": 1, "c1": 1, "c2": 1}
    assert Federation("agnostic_fl", three_clients(), rounds=1).run().column("samples", 1) == dict.fromkeys(CLIENTS, 4)


@pytest.mark.parametrize("section", [{}, {"work": "epochs"}, {"form": "as_released"}])
def test_one_client_and_equal_clients(section):
    alone = Federation({"name": "agnostic_fl", **section}, {"only": client_data([0, 0, 0], 1)}, rounds=2).run()
    assert alone.column("weight", 2) == {"only": 1.0}
    twins = dict.fromkeys(("a", "b"), client_data([0, 1, 2, 1], 2))
    done = Federation({"name": "agnostic_fl", "batch_size": 4, **section}, twins, rounds=2).run()
    if section.get("form") == "as_released":
        assert done.column("weight", 1) == {"a": 1.0, "b": 0.0}  # a tie goes to the first
    else:
        assert done.column("weight", 2) == pytest.approx({"a": 0.5, "b": 0.5})


def test_only_some_clients_and_weights_that_all_vanish():
    """One client gets all weight at once; rounds without it go on with equal weights instead of standing still."""
    data = {f"c{i}": client_data([0, 1, 2, 1, 0], i) for i in range(4)}
    section = {"name": "agnostic_fl", "ascent_rate": 1000.0, "learning_rate": 0.1}
    done = Federation(section, data, rounds=6, fraction=0.5).run()
    assert all(len(r["admitted"]) == 2 and not r["warnings"] for r in done.records)
    assert any(sorted(done.column("weight", t).values()) == [0.0, 1.0] for t in range(1, 7))
    kept = done.server.notes["weights"].values
    assert sum(kept.values()) == pytest.approx(1.0)
    assert set(kept) == set(data)


def test_batch_norm_statistics_come_along_and_stay_positive():
    section = {"name": "agnostic_fl", "learning_rate": 0.1}
    done = Federation(section, three_clients(), network="Normed").run()
    assert not torch.equal(done.models[0]["norm.running_mean"], done.initial["norm.running_mean"])
    assert all((m["norm.running_var"] > 0).all() for m in done.models)
    assert done.models[-1]["norm.num_batches_tracked"].item() == 3


@pytest.mark.parametrize("how", ["crash", "nan"])
def test_client_that_fails_is_left_out(how):
    done = Federation(faulty(METHOD, "gradient", how), three_clients(), rounds=2).run()
    assert done.records[0]["admitted"] == ["c0", "c2"]
    assert done.column("weight", 1) == pytest.approx({"c0": 0.5, "c2": 0.5})
    assert set(done.column("weight", 2)) == set(CLIENTS)


def test_with_nobody_left_the_model_stays():
    method = METHOD
    for client in CLIENTS:
        method = faulty(method, "gradient", "crash", client, rounds=(2,))
    done = Federation(method, three_clients()).run()
    assert same_state(done.models[1], done.models[0])
    assert not same_state(done.models[2], done.models[1])
    assert done.server.notes["iterate"].values == {"rounds": 2}


@pytest.mark.parametrize("section", [{"salt": True}, {"work": "epochs"}])
def test_killed_run_goes_on_bitwise(section, tmp_path):
    killed_and_resumed({"name": "agnostic_fl", "learning_rate": 0.1, **section}, tmp_path, 2)


def test_several_labels_and_salt():
    section = {"name": "agnostic_fl", "learning_rate": 0.5, "average": False}
    plain = Federation(section, multilabel_clients(), bundle_changes=MULTI, rounds=6).run()
    assert sum(plain.column("loss", 6).values()) < sum(plain.column("loss", 1).values())
    sharp = Federation({**section, "salt": {"rho": 0.2}}, multilabel_clients(), bundle_changes=MULTI, rounds=6).run()
    assert distance(plain.models[-1], sharp.models[-1]) > 1e-6


def test_settings():
    _, settings = resolve_method({"name": "agnostic_fl"})
    assert (settings.ascent_rate, settings.averaged, settings.request(1, 1)["learning_rate"]) == (0.01, True, 0.01)
    _, settings = resolve_method({"name": "agnostic_fl", "form": "as_released", "local_epochs": 2})
    assert (settings.request(1, 1)["learning_rate"], settings.request(1, 1)["epochs"]) == (None, 2)
    for section in ({"ascent_rate": -1}, {"work": "both"}, {"batch_size": 0}, {"form": "afl"}):
        with pytest.raises(ConfigError, match=next(iter(section))):
            resolve_method({"name": "agnostic_fl", **section})
