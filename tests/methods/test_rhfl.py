"""RHFL: losses and confidences by hand, rounds against NumPy, models that stay with their clients, and its edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from noise_oracle import adam, along, followed, numeric, ones, softmax, theta_of
from planted import memories, watch
from test_fednoro import six_clients
from tiny_federation import Federation, client_data, three_clients

from medfed.federation.state import same_state
from medfed.methods.registry import get_method
from medfed.methods.rhfl import confidences, symmetric

SECTION = {"name": "rhfl", "pretraining": 1}


def public(count=10):
    data = client_data([0] * count, seed=77)
    return data.with_labels(torch.full((count,), -1))


def numpy_loss(z, y):
    p = softmax(z)
    rows = np.arange(len(y))
    hot = np.maximum(np.eye(z.shape[1])[y], 1e-4)
    return 0.1 * -np.log(p[rows, y]) - (np.maximum(p, 1e-7) * np.log(hot)).sum(axis=1)


def test_symmetric_cross_entropy():
    z, y = np.random.default_rng(0).normal(0, 3, (6, 4)), np.array([0, 1, 2, 3, 0, 1])
    got = symmetric(torch.tensor(z), torch.tensor(y), 0.1, 1.0)
    assert np.allclose(got, numpy_loss(z, y))
    want = numeric(lambda at: numpy_loss(at, y).sum(), z)
    scores = torch.tensor(z, requires_grad=True)
    symmetric(scores, torch.tensor(y), 0.1, 1.0).sum().backward()
    assert np.allclose(scores.grad, want, atol=1e-7)
    # Reverse cross-entropy is -log(1e-4) times the probability of the other classes.
    reverse = symmetric(torch.tensor(z), torch.tensor(y), 0.0, 1.0).numpy()
    assert np.allclose(reverse, -math.log(1e-4) * (1 - softmax(z)[np.arange(6), y]))


def test_confidence_by_hand():
    assert confidences({"a": 1.0, "b": 2.0, "c": 3.0}, {}, 0.5) == dict.fromkeys("abc", 0.5)
    got = confidences({"a": 1.0, "b": 2.0}, {"a": 1.5, "b": 2.5}, 0.5)
    # q = 1/2 and 1/4, so that a = 1 + 1/3 and 1 + 1/6.
    assert got["a"] / got["b"] == pytest.approx(math.exp(1 / 6))
    assert sum(got.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("now", [{"a": 2.0, "b": 3.0}, {"a": 1.0, "b": 2.0}, {"a": 0.0, "b": 2.0}])
def test_losses_that_do_not_fall_listen_to_all_alike(now):
    assert confidences(now, {"a": 1.0, "b": 2.0}, 0.5) == pytest.approx({"a": 0.5, "b": 0.5})


def test_a_client_without_earlier_loss_has_no_confidence_of_its_own():
    got = confidences({"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 2.0}, 0.5)
    assert got["b"] == got["c"] < got["a"]
    assert confidences({"a": 1.0}, {"a": 2.0}, 0.5) == {"a": 1.0}


def numpy_own(theta, data, name, round, epochs, purpose):
    x, y = ones(data), data.labels.numpy()
    hot = np.eye(3)[y]

    def gradient(local, batch):
        p = softmax(x[batch] @ local.T)
        toward = 0.1 * (p - hot[batch]) + along(p, -np.log(np.maximum(hot[batch], 1e-4)))
        return toward.T @ x[batch] / len(batch)

    return adam(theta, followed(data, name, round, epochs, (purpose,)), gradient)


def test_rounds_are_those_of_the_equations(tmp_path):
    data, shown = three_clients(), public(13)
    done = Federation(SECTION, data, rounds=3, public=shown, folder=tmp_path).run()
    start = theta_of(done.initial)
    models = {c: numpy_own(start, d, c, 1, 1, "pretraining") for c, d in data.items()}
    x, earlier = ones(shown), {}
    for round in (1, 2, 3):
        told = {c: softmax(x @ models[c].T) for c in data}
        losses = {c: numpy_loss(ones(d) @ models[c].T, d.labels.numpy()).mean() for c, d in data.items()}
        if earlier:
            q = {c: (earlier[c] - losses[c]) / losses[c] for c in data}
            assert sum(q.values()) > 0
            raw = {c: np.exp(0.5 + 0.5 * q[c] / sum(q.values())) for c in data}
            weights = {c: r / sum(raw.values()) for c, r in raw.items()}
        else:
            weights = dict.fromkeys(data, 0.5)
        assert done.column("own_loss", round) == pytest.approx(losses, rel=1e-5)
        assert done.column("weight", round) == pytest.approx(weights, rel=1e-4)
        earlier = losses
        for c, d in data.items():
            others = {j: told[j] for j in data if j != c}

            def gradient(local, batch, others=others, weights=weights):
                p = softmax(x[batch] @ local.T)
                # d/dz of sum_j W_j KL(p_j || p): sum_j W_j (p - p_j)
                toward = sum(weights[j] * (p - others[j][batch]) for j in others)
                return toward.T @ x[batch] / len(batch)

            local = adam(models[c], followed(shown, c, round, 1, ("public",)), gradient)
            models[c] = numpy_own(local, d, c, round, max(1, 13 // len(d)), "own")
    kept = memories(done, tmp_path)
    for c in data:
        found = np.hstack([kept[c]["model/head.weight"].numpy(), kept[c]["model/head.bias"].numpy()[:, None]])
        assert np.abs(found - models[c]).max() < 1e-4
    assert all(same_state(m, done.initial) for m in done.models)


def test_no_model_leaves_a_client_and_none_is_told_what_a_single_other_one_predicts():
    done = Federation(SECTION, three_clients(), rounds=2, public=public())
    seen = watch(done)
    done.run()
    model = sum(t.numel() for t in done.initial.values())
    for task, asked, replies in seen:
        assert all("model" not in r.message.groups() for r in replies)
        if task == "train":
            assert asked["message"].groups() == ["public"]
            assert asked["message"].tensors["public/total"].shape == (10, 3)
    assert done.records[1]["bytes"]["up"] == 3 * 10 * 3 * 4
    assert done.records[0]["bytes"]["down"] == 3 * (model * 8 + 10 * 3 * 4)


def test_edges(tmp_path):
    """One client, clients that join later or drop out, no pre-training, workers."""
    alone = Federation(SECTION, {"only": client_data([0, 1, 2, 0, 1], seed=4)}, rounds=2, public=public()).run()
    assert alone.column("weight", 2) == {"only": 1.0}
    options = {"network": "Normed", "rounds": 4, "fraction": 0.5, "dropout": 0.2, "seed": 2, "public": public()}
    section = {**SECTION, "pretraining": 0, "local_epochs": 1, "logit_adjustment": True}
    one = Federation(section, six_clients(), folder=tmp_path / "one", **options).run()
    two = Federation(section, six_clients(), folder=tmp_path / "two", workers=2, **options).run()
    assert [r["clients"] for r in one.records] == [r["clients"] for r in two.records]
    mine, theirs = memories(one, tmp_path / "one"), memories(two, tmp_path / "two")
    for c in mine:
        assert mine[c].keys() == theirs[c].keys()
        assert all(torch.equal(mine[c][n], theirs[c][n]) for n in mine[c] if n.startswith("model/"))
    assert len(one.server.notes["begun"].values["clients"]) > 3


def test_without_public_images_every_client_says_so():
    done = Federation(SECTION, three_clients(), rounds=1).run()
    assert {r["reason"] for r in done.records[0]["refused"]} == {
        "failed with DataError: there are no public images here."
    }
    method = get_method("rhfl")
    assert method.public
    assert method.personal
