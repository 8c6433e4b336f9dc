"""RHFL: losses and confidences by hand, rounds against NumPy, models that stay with their clients, and its edges."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from noise_oracle import adam, along, complete, followed, numeric, ones, softmax, theta_of
from planted import memories, watch
from test_fednoro import mirrored, six_clients
from tiny_federation import Federation, client_data, three_clients

from medfed.errors import DataError
from medfed.federation.messages import Message
from medfed.federation.state import same_state
from medfed.methods.registry import get_method, resolve_method
from medfed.methods.rhfl import confidences, symmetric
from medfed.seeding import torch_generator

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


def test_released_weights_take_the_quotient_of_a_negative_sum_too():
    got = confidences({"a": 2.0, "b": 4.0}, {"a": 1.0, "b": 3.0}, 0.5, released=True)
    # q = -1/2 and -1/4 with the sum -3/4, so that a = 1 + 1/3 and 1 + 1/6: who got worse counts more.
    assert got["a"] / got["b"] == pytest.approx(math.exp(1 / 6))
    still = confidences({"a": 2.0, "b": 2.0}, {"a": 2.0, "b": 2.0}, 0.5, released=True)
    assert still == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize("released", [False, True])
def test_a_sum_of_confidences_near_zero_gives_numbers(released):
    got = confidences({"a": 1.0, "b": 1.0}, {"a": 1.5, "b": 0.5 + 1e-9}, 0.5, released)
    assert got == pytest.approx({"a": 1.0, "b": 0.0})


def numpy_own(theta, data, name, round, epochs, purpose, batches=followed):
    x, y = ones(data), data.labels.numpy()
    hot = np.eye(3)[y]

    def gradient(local, batch):
        p = softmax(x[batch] @ local.T)
        toward = 0.1 * (p - hot[batch]) + along(p, -np.log(np.maximum(hot[batch], 1e-4)))
        return toward.T @ x[batch] / len(batch)

    return adam(theta, batches(data, name, round, epochs, (purpose,)), gradient)


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


# The released form.

RELEASED = {**SECTION, "form": "as_released"}


def numpy_batches(round, count=13):
    """The public images of each exchange; a last incomplete batch of 4 is dropped."""
    order = torch.randperm(count, generator=torch_generator(0, "public batches", round)).numpy()
    return order[: count - count % 4].reshape(-1, 4)


def test_released_rounds_are_those_of_the_code(tmp_path):
    """Exchanges by batch of images that are mirrored in training, of which each gets one step of a new optimiser."""
    data, shown = three_clients(), public(13)
    options = {"public": shown, "bundle_changes": {"augment::flip": 1.0}}
    done = Federation(RELEASED, data, rounds=3, folder=tmp_path, **options).run()
    seen, x = {c: mirrored(d) for c, d in data.items()}, ones(mirrored(shown))
    start, earlier = theta_of(done.initial), {}
    models = {c: numpy_own(start, d, c, 1, 1, "pretraining", complete) for c, d in seen.items()}
    for round in (1, 2, 3):
        losses = {c: numpy_loss(ones(d) @ models[c].T, d.labels.numpy()).mean() for c, d in seen.items()}
        weights = dict.fromkeys(data, 0.5)
        if earlier:
            q = {c: (earlier[c] - losses[c]) / losses[c] for c in data}
            raw = {c: np.exp(0.5 + 0.5 * q[c] / sum(q.values())) for c in data}
            weights = {c: r / sum(raw.values()) for c, r in raw.items()}
        earlier, followed_loss = losses, dict.fromkeys(data, 0.0)
        assert done.column("own_loss", round) == pytest.approx(losses, rel=1e-5)
        assert done.column("weight", round) == pytest.approx(weights, rel=1e-4)
        for rows in numpy_batches(round):
            told = {c: softmax(x[rows] @ models[c].T) for c in data}
            for c in data:
                target = sum(weights[j] * told[j] for j in data if j != c)
                followed_loss[c] -= (target * np.log(told[c])).sum() / 4 / 3

                def gradient(local, step, target=target, rows=rows):
                    p = softmax(x[rows] @ local.T)
                    return (target.sum(axis=1, keepdims=True) * p - target).T @ x[rows] / 4

                models[c] = adam(models[c], [None], gradient)
        epochs = {c: max(1, 13 // len(d)) for c, d in data.items()}
        for c, d in seen.items():
            models[c] = numpy_own(models[c], d, c, round, epochs[c], "own", complete)
        assert done.column("public_loss", round) == pytest.approx(followed_loss, rel=1e-5)
        assert done.column("steps", round) == {c: 3 + epochs[c] * (len(d) // 4) for c, d in data.items()}
    kept = memories(done, tmp_path)
    for c in data:
        found = np.hstack([kept[c]["model/head.weight"].numpy(), kept[c]["model/head.bias"].numpy()[:, None]])
        assert np.abs(found - models[c]).max() < 1e-4
        assert "public_predictions" not in kept[c]


def normed(state, x):
    """What the network with BatchNorm says with the statistics of the batch."""
    h = x[:, :-1] @ state["first.weight"].T + state["first.bias"]
    normal = (h - h.mean(axis=0)) / np.sqrt(h.var(axis=0) + 1e-5) * state["norm.weight"] + state["norm.bias"]
    return np.maximum(normal, 0) @ state["head.weight"].T + state["head.bias"]


def test_released_predictions_and_losses_have_the_statistics_of_their_batches(tmp_path):
    """And each public batch moves the running statistics once, though it is seen twice."""
    data = {"c0": client_data([0, 1, 2, 0, 1, 2, 2, 1, 0, 1], seed=4), "c1": client_data([0, 1, 2, 1], seed=5)}
    shown = public(13)
    section = {**RELEASED, "pretraining": 0, "local_epochs": 1}
    done = Federation(section, data, network="Normed", rounds=1, public=shown, folder=tmp_path)
    state, seen = {k: t.numpy() for k, t in done.initial.items()}, watch(done)
    done.run()
    first = next(replies for task, _, replies in seen if task == "predict")
    want = softmax(normed(state, ones(shown)[numpy_batches(1)[0]]))
    for reply in first:
        assert np.allclose(reply.group("public")["predictions"], want, atol=1e-6)
    x, y = ones(data["c0"]), data["c0"].labels.numpy()
    order = torch.randperm(10, generator=torch_generator("shuffle", 0, 1, "c0", "own loss")).numpy()
    losses = [numpy_loss(normed(state, x[rows]), y[rows]) for rows in (order[:4], order[4:8], order[8:])]
    assert done.column("own_loss", 1)["c0"] == pytest.approx(np.concatenate(losses).mean(), rel=1e-5)
    kept = memories(done, tmp_path)
    assert {c: int(kept[c]["model/norm.num_batches_tracked"]) for c in data} == {"c0": 3 + 2, "c1": 3 + 1}


def test_everybody_sees_the_same_augmented_images_and_steps_on_them():
    """Clients of one model say the same, and each follows what it said itself, times the others' weights."""
    section = {**RELEASED, "pretraining": 0}
    done = Federation(section, three_clients(), rounds=1, public=public(5), bundle_changes={"augment::flip": 0.5})
    seen = watch(done)
    done.run()
    said = [r.group("public")["predictions"].double() for r in seen[1][2]]
    assert len(said) == 3
    assert all(torch.equal(p, said[0]) for p in said)
    plain = softmax(ones(public(5))[numpy_batches(1, 5)[0]] @ theta_of(done.initial).T)
    assert not np.allclose(said[0], plain, atol=1e-3)
    own = float(-(said[0] * said[0].log()).sum(dim=1).mean())  # of the two others, each with weight 1/2
    assert done.column("public_loss", 1) == pytest.approx(dict.fromkeys(("c0", "c1", "c2"), own), rel=1e-5)


@pytest.mark.parametrize("form", ["published", "as_released"])
def test_losses_that_rise_are_rewarded_in_the_released_form_alone(form):
    done = Federation({**SECTION, "form": form}, three_clients(), rounds=1, public=public(5))
    earlier = {"c0": 0.1, "c1": 0.2, "c2": 0.3}
    done.server.notes["losses"] = Message(values=earlier)
    done.run()
    losses = done.column("own_loss", 1)
    q = {c: (earlier[c] - loss) / loss for c, loss in losses.items()}
    assert sum(q.values()) < 0
    raw = {c: math.exp(0.5 + (0.5 * q[c] / sum(q.values()) if form == "as_released" else 0.0)) for c in q}
    assert done.column("weight", 1) == pytest.approx({c: r / sum(raw.values()) for c, r in raw.items()})


def test_released_exchanges_say_no_more_than_the_published_ones():
    done = Federation(RELEASED, three_clients(), rounds=2, public=public(13))
    seen = watch(done)
    done.run()
    assert [task for task, _, _ in seen] == ["pretrain", *["predict", "train"] * 3, *["predict", "train"] * 3]
    assert all("model" not in r.message.groups() for _, _, replies in seen for r in replies)
    assert done.records[1]["bytes"] == {"up": 3 * 12 * 3 * 4, "down": 3 * 12 * 3 * 4}
    assert [sorted(r.values) for _, _, replies in seen[1:3] for r in replies][::3] == [
        ["own_loss", "samples"],
        ["public_loss", "samples", "skipped", "steps"],
    ]


def test_fewer_images_than_a_batch_are_one_exchange_and_fewer_samples_one_batch():
    data = {"c0": client_data([0, 1, 2, 0, 1], seed=1), "c1": client_data([2, 0, 1], seed=2)}
    done = Federation(RELEASED, data, network="Normed", rounds=2, public=public(3)).run()
    assert done.records[1]["bytes"]["up"] == 2 * 3 * 3 * 4
    assert done.column("steps", 2) == {"c0": 1 + 1, "c1": 1 + 1}
    assert all(r["refused"] == [] for r in done.records)


def test_who_fails_in_an_exchange_sits_out_the_rest_of_the_round():
    method, settings = resolve_method(RELEASED)
    sound = method.tasks["predict"]

    def failing(client, message):
        if (client.name, client.round, message.values["exchange"]) == ("c1", 1, 1):
            raise RuntimeError("broken")
        return sound(client, message)

    broken = replace(method, tasks={**method.tasks, "predict": failing}, settings=lambda: settings)
    done = Federation(broken, three_clients(), rounds=2, public=public(13))
    seen = watch(done)
    done.run()
    clients = [[r.client for r in replies] for _, _, replies in seen]
    assert clients[1:7] == [["c0", "c1", "c2"]] * 2 + [["c0", "c2"]] * 4
    assert clients[7:] == [["c0", "c1", "c2"]] * 6
    assert done.column("steps", 1)["c1"] == 1
    assert "c1" not in done.column("loss", 1)
    assert [r["client"] for r in done.records[0]["refused"]] == ["c1"]


def test_released_form_at_its_edges(tmp_path):
    """One client, clients that join later or drop out, workers, no public images."""
    alone = Federation(RELEASED, {"only": client_data([0, 1, 2, 0, 1], seed=4)}, rounds=2, public=public()).run()
    assert alone.column("weight", 2) == {"only": 1.0}
    options = {"network": "Normed", "rounds": 4, "fraction": 0.5, "dropout": 0.2, "seed": 2, "public": public()}
    one = Federation(RELEASED, six_clients(), folder=tmp_path / "one", **options).run()
    two = Federation(RELEASED, six_clients(), folder=tmp_path / "two", workers=2, **options).run()
    assert [r["clients"] for r in one.records] == [r["clients"] for r in two.records]
    mine, theirs = memories(one, tmp_path / "one"), memories(two, tmp_path / "two")
    assert all(torch.equal(m[n], theirs[c][n]) for c, m in mine.items() for n in m if n.startswith("model/"))
    with pytest.raises(DataError, match="no public images at the server"):
        Federation(RELEASED, three_clients(), rounds=1).run()
