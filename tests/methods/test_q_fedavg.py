"""q-FedAvg on the real trainer, against its equations in NumPy and Flower's way to write them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fairness_oracle import CLIENTS, adam, close, killed_and_resumed, loss_of, offsets_of, orders, sgd, theta_of
from test_methods_degenerate import MULTI, faulty, multilabel_clients
from tiny_federation import Federation, client_data, distance, three_clients

from medfed.errors import ConfigError
from medfed.federation.state import same_state
from medfed.methods.q_fedavg import METHOD
from medfed.methods.registry import resolve_method


@pytest.mark.parametrize(
    ("q", "rate", "la"), [(1.0, 0.05, True), (0.0, 0.05, True), (5.0, 0.2, True), (0.5, 0.1, False)]
)
def test_three_rounds_are_flowers_formula(q, rate, la):
    data = three_clients()
    section = {"name": "q_fedavg", "q": q, "learning_rate": rate, "logit_adjustment": la}
    ours = Federation(section, data).run()
    theta = theta_of(ours.initial)
    for round in (1, 2, 3):
        losses, deltas, h = {}, [], []
        for name in CLIENTS:
            y = data[name].labels.numpy()
            offsets = offsets_of(y) if la else np.zeros(3)
            local, _ = sgd(theta, data[name], orders(0, round, name, len(y), 1), offsets, rate)
            losses[name] = loss_of(theta, data[name])
            f, gradient = losses[name] + 1e-10, (theta - local) / rate
            deltas.append(f**q * gradient)
            h.append(q * f ** (q - 1) * (gradient**2).sum() + f**q / rate)
        theta = theta - sum(deltas) / sum(h)
        assert close(ours.models[round - 1], theta)
        assert ours.column("received_loss", round) == pytest.approx(losses, rel=1e-6)
        powers = {c: (f + 1e-10) ** q for c, f in losses.items()}
        expected = {c: p / sum(powers.values()) for c, p in powers.items()}
        assert ours.column("weight", round) == pytest.approx(expected, rel=1e-6)
    assert (ours.records[-1]["server"]["step"] == 1.0) == (q == 0)


@pytest.mark.parametrize("q", [0.0, 1.0, 3.0])
def test_the_released_form_is_a_mean_with_powers_of_losses(q):
    data = three_clients()
    ours = Federation({"name": "q_fedavg", "form": "as_released", "q": q}, data).run()
    theta = theta_of(ours.initial)
    for round in (1, 2, 3):
        powers = {c: loss_of(theta, data[c]) ** q for c in CLIENTS}
        models = {
            c: adam(theta, data[c], orders(0, round, c, len(data[c]), 1), offsets_of(data[c].labels.numpy()))
            for c in CLIENTS
        }
        theta = sum(powers[c] * models[c] for c in CLIENTS) / sum(powers.values())
        assert close(ours.models[round - 1], theta)
    assert ours.records[-1]["server"]["step"] == 1.0


def test_the_forms_differ():
    forms = [Federation({"name": "q_fedavg", "form": f}, three_clients()).run() for f in ("published", "as_released")]
    assert distance(forms[0].models[0], forms[1].models[0]) > 1e-4


def test_lipschitz_and_the_bundles_optimizer():
    """A larger L shortens the step; with L near 0 the step is whole."""
    section = {"name": "q_fedavg", "optimizer": "bundle", "lipschitz": 1e-9}
    short = Federation({**section, "lipschitz": 1e4}, three_clients(), rounds=1).run()
    whole = Federation(section, three_clients(), rounds=1).run()
    released = Federation({"name": "q_fedavg", "form": "as_released"}, three_clients(), rounds=1).run()
    assert distance(whole.models[0], released.models[0]) < 1e-9
    assert distance(short.models[0], short.initial) < 0.1 * distance(whole.models[0], whole.initial)


@pytest.mark.parametrize("form", ["published", "as_released"])
def test_equal_clients_weigh_the_same(form):
    twins = dict.fromkeys(("c0", "c1", "c2", "c3"), three_clients()["c0"])
    done = Federation({"name": "q_fedavg", "form": form, "q": 3.0}, twins, rounds=2).run()
    assert done.column("weight", 2) == pytest.approx(dict.fromkeys(twins, 0.25))


def test_batch_norm_statistics_go_the_same_share_and_counters_are_whole_numbers():
    done = Federation({"name": "q_fedavg", "learning_rate": 0.1}, three_clients(), network="Normed").run()
    share = done.records[0]["server"]["step"]
    assert 0 < share < 1
    plain = Federation(
        {"name": "q_fedavg", "learning_rate": 0.1, "lipschitz": 1e-12}, three_clients(), network="Normed"
    )
    whole = plain.run().models[0]
    for name in ("norm.running_mean", "norm.running_var", "head.weight"):
        expected = done.initial[name] + share * (whole[name] - done.initial[name])
        assert torch.allclose(done.models[0][name], expected, atol=1e-9)
    assert done.models[0]["norm.num_batches_tracked"].dtype == torch.int64
    assert all((m["norm.running_var"] > 0).all() for m in done.models)


def test_one_client_one_class_and_a_client_that_fails():
    alone = Federation("q_fedavg", {"only": client_data([0] * 5, 1)}, rounds=2).run()
    assert alone.column("weight", 2) == {"only": 1.0}
    assert all(torch.isfinite(t).all() for t in alone.models[-1].values())
    for how in ("crash", "nan"):
        done = Federation(faulty(METHOD, "train", how), three_clients(), rounds=2).run()
        assert done.records[0]["admitted"] == ["c0", "c2"]
        assert sum(done.column("weight", 1).values()) == pytest.approx(1.0)
        assert set(done.column("weight", 1)) == {"c0", "c2"}


def test_with_nobody_left_the_model_stays():
    method = METHOD
    for client in ("c0", "c1", "c2"):
        method = faulty(method, "train", "crash", client)
    done = Federation(method, three_clients(), rounds=2).run()
    assert same_state(done.models[0], done.initial)
    assert done.column("weight", 1) == {}
    assert not same_state(done.models[1], done.initial)


def test_killed_run_goes_on_bitwise(tmp_path):
    killed_and_resumed({"name": "q_fedavg", "q": 2.0, "salt": True}, tmp_path, 2)


def test_several_labels_and_salt():
    section = {"name": "q_fedavg", "salt": {"rho": 0.1}, "learning_rate": 0.5}
    done = Federation(section, multilabel_clients(), bundle_changes=MULTI, rounds=6).run()
    assert sum(done.column("received_loss", 6).values()) < sum(done.column("received_loss", 1).values())
    other = Federation({**section, "salt": False}, multilabel_clients(), bundle_changes=MULTI, rounds=6).run()
    assert distance(done.models[-1], other.models[-1]) > 1e-6


def test_settings():
    _, settings = resolve_method({"name": "q_fedavg"})
    assert (settings.q, settings.optimizer, settings.rate) == (1.0, "sgd", 0.01)
    _, settings = resolve_method({"name": "q_fedavg", "form": "as_released"})
    assert (settings.q, settings.optimizer, settings.rate) == (1.0, "bundle", None)
    assert resolve_method({"name": "q_fedavg", "form": "as_released", "optimizer": "sgd"})[1].rate == 0.01
    for section, told in (
        ({"q": -1}, "q"),
        ({"q": 100}, "q"),
        ({"form": "released"}, "form"),
        ({"optimizer": "bundle"}, "lipschitz"),
        ({"lipschitz": 0}, "lipschitz"),
    ):
        with pytest.raises(ConfigError, match=told):
            resolve_method({"name": "q_fedavg", **section})


@pytest.mark.parametrize("form", ["published", "as_released"])
@pytest.mark.parametrize("loss", [0.0, 1e-4, 300.0])
def test_powers_of_losses_beyond_the_range_of_the_model(form, loss, monkeypatch):
    """At q = 20 a loss of 1e-4 weighs 1e-80 and one of 300 weighs 1e49, in a model of float32."""
    from medfed.methods import q_fedavg

    told = {"c0": loss, "c1": loss, "c2": loss / 2}
    monkeypatch.setattr(q_fedavg, "mean_loss", lambda client: told[client.name])
    monkeypatch.setattr("tiny_federation.Softmax.dtype", torch.float32)
    section = {"name": "q_fedavg", "form": form, "q": 20, "lipschitz": 1.0 if form == "published" else None}
    ours = Federation(section, three_clients(), rounds=1).run()
    assert ours.initial["head.weight"].dtype == torch.float32
    assert all(torch.isfinite(t).all() for t in ours.models[0].values())
    assert ours.records[0]["refused"] == []
    weights = ours.column("weight", 1)
    share = 1 / 3 if loss == 0 else 0.5
    assert weights == pytest.approx({"c0": share, "c1": share, "c2": 1 - 2 * share}, abs=1e-4)
