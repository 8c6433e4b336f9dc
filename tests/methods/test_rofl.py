"""RoFL: its parts by hand, whole rounds against NumPy, and its edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from noise_oracle import adam, entropy_gradient, followed, ones, softmax, theta_of
from planted import memories
from scipy.spatial.distance import cosine
from scipy.stats import entropy
from test_fednoro import six_clients
from tiny_federation import Federation, client_data, three_clients

from medfed.errors import ConfigError
from medfed.federation.state import same_state
from medfed.methods.registry import resolve_method
from medfed.methods.rofl import RoFLSettings, centroid_loss, combined, moved, nearest, small_loss
from medfed.seeding import torch_generator

SECTION = {"name": "rofl", "local_epochs": 2, "noise_rate": 0.4, "gradual": 2, "pseudo_from": 1}


def test_centroids_move_by_the_square_of_their_agreement():
    centroids = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    features, labels = torch.tensor([[1.0, 1.0], [3.0, 3.0], [5.0, 0.0]]), torch.tensor([0, 0, 1])
    # Class 0: mean (2, 2), cosine sqrt(1/2); class 1: mean (5, 0), cosine 0; class 2 has no sample.
    assert torch.allclose(moved(centroids, features, labels), torch.tensor([[1.5, 1.0], [0.0, 2.0], [3.0, 3.0]]))


def test_server_weights_centroids_by_their_agreement_with_its_own():
    previous = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    one = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    two = torch.tensor([[0.0, 3.0], [-1.0, 0.0], [0.0, 0.0]])
    # Weights 1 and 0; 1 and -1, which have no positive sum; a class that nobody has.
    want = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert torch.allclose(combined(previous, [one, two]), want)
    first = combined(None, [one, two])
    assert torch.allclose(first, torch.tensor([[1.0, 1.5], [0.0, 0.0], [0.0, 0.0]]))


def test_choice_of_samples_and_nearest_centroid():
    losses = torch.tensor([3.0, 1.0, 2.0, 0.5, 4.0])
    assert small_loss(losses, 0.4).tolist() == [3, 1, 2]
    assert small_loss(losses, 0.0).tolist() == [3, 1, 2, 0, 4]
    assert small_loss(losses[:1], 0.9).tolist() == [0]
    centroids = torch.tensor([[9.0, 0.1], [0.0, 0.1], [0.0, 0.0]])
    assert nearest(torch.tensor([[1.0, 0.5], [1.0, 2.0]]), centroids).tolist() == [0, 1]


@pytest.mark.parametrize("released", [False, True])
def test_centroid_loss_draws_features_unless_they_are_cut_off_as_released(released):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(4, 3, generator=generator, dtype=torch.float64).requires_grad_()
    own = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    logits = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    near, target = torch.tensor([True, False, True, True]), torch.tensor([0, 1, 2, 3])
    loss = centroid_loss(logits, logits, features, own, near, target, 0.7, 0.8, released)
    p = softmax(logits.numpy())
    apart = ((features.detach() - own).square().sum(dim=1) * near).numpy()
    want = -np.log(p[np.arange(4), target]).mean() + 0.8 * entropy(p, axis=1).mean()
    assert float(loss.detach()) == pytest.approx(want + 0.7 * (apart.sum() if released else apart.mean()))
    if released:
        assert not loss.requires_grad
    else:
        loss.backward()
        assert torch.allclose(features.grad, 0.7 * 2 * (features.detach() - own) * near[:, None] / 4)


def unit(a, b):
    return 0.0 if not (a.any() and b.any()) else 1 - cosine(a, b)


def numpy_train(theta, client, name, round, centroids, *, left_out, use_model):
    x, y = ones(client), client.labels.numpy()
    features = x[:, :-1]
    if centroids is None:
        centroids = np.stack([features[y == c].mean(axis=0) if (y == c).any() else np.zeros(16) for c in range(3)])
    guess = (x @ theta.T).argmax(axis=1)
    state = {"f": centroids.copy(), "targets": y.copy()}

    def gradient(local, batch):
        z = x[batch] @ local.T
        losses = -np.log(softmax(z)[np.arange(len(batch)), y[batch]])
        small = batch[np.argsort(losses, kind="stable")[: max(1, int((1 - left_out) * len(batch) + 1e-9))]]
        near = np.array([np.argmax([unit(features[i], f) for f in state["f"]]) == y[i] for i in small])
        target = np.where(near, y[small], guess[small]) if use_model else y[small]
        state["targets"][batch] = y[batch]
        state["targets"][small] = target

        for c in np.unique(y[small]):
            mean = features[small][y[small] == c].mean(axis=0)
            s = unit(state["f"][c], mean) ** 2
            state["f"][c] = (1 - s) * state["f"][c] + s * mean
        p = softmax(x[small] @ local.T)
        return (p - np.eye(3)[target] + 0.8 * entropy_gradient(p)).T @ x[small] / len(small)

    local = adam(theta, followed(client, name, round, 2), gradient)
    return local, state["f"], state["targets"]


@pytest.mark.parametrize("form", ["published", "as_released"])
def test_rounds_are_those_of_the_equations(form, tmp_path):
    data = six_clients()
    done = Federation({**SECTION, "form": form}, data, rounds=2, folder=tmp_path).run()
    theta = theta_of(done.initial)
    server = None
    for round in (1, 2):
        told = {
            c: numpy_train(theta, d, c, round, server, left_out=0.4 * (round - 1), use_model=round == 2)
            for c, d in data.items()
        }
        theta = np.mean([t[0] for t in told.values()], axis=0)
        assert np.abs(theta_of(done.models[round - 1]) - theta).max() < 2e-5
        if server is None and form == "as_released":
            server = torch.randn(3, 16, generator=torch_generator(0, "centroids")).numpy()
        new = []
        for c in range(3):
            have = [t[1][c] for t in told.values()]
            weights = [float(f.any()) if server is None else unit(server[c], f) for f in have]
            mean = sum(w * f for w, f in zip(weights, have)) / sum(weights) if sum(weights) > 1e-8 else server[c]
            new.append(mean)
        server = np.stack(new)
        assert done.column("weight", round) == pytest.approx(dict.fromkeys(data, 1 / 6))
    found = done.server.notes["centroids"].tensors["centroids/class"].numpy()
    assert np.abs(found - server).max() < 1e-4
    kept = memories(done, tmp_path)
    assert done.column("edited", 1) == {}
    for c, (_, _, targets) in told.items():
        assert np.array_equal(kept[c]["labels"].numpy(), targets)
        assert done.column("edited", 2)[c] == (targets != data[c].labels.numpy()).sum()


def test_edges(tmp_path):
    """One client, one class, clients that drop out, BatchNorm, workers."""
    alone = Federation(SECTION, {"only": client_data([1] * 6, seed=4)}, rounds=3).run()
    assert alone.column("weight", 3) == {"only": 1.0}
    options = {"network": "Normed", "rounds": 4, "fraction": 0.7, "dropout": 0.3}
    data = {**three_clients(), "c3": client_data([1] * 5, 9)}
    one = Federation(SECTION, data, **options).run()
    two = Federation(SECTION, data, workers=2, folder=tmp_path, **options).run()
    assert all(same_state(a, b) for a, b in zip(one.models, two.models, strict=True))
    assert any(len(r["admitted"]) < 3 for r in one.records)
    assert torch.isfinite(one.server.notes["centroids"].tensors["centroids/class"]).all()


def test_schedules_and_settings():
    settings = RoFLSettings()
    told = [settings.values(t, 100) for t in (1, 2, 10, 11, 50)]
    assert [t["left_out"] for t in told] == pytest.approx([0.0, 0.2 / 9, 0.2, 0.2, 0.2])
    assert [t["pseudo"] for t in told] == [False, False, False, True, True]
    assert [t["centroid_weight"] for t in told] == pytest.approx([0.0, 0.1, 0.9, 1.0, 1.0])
    assert RoFLSettings(pseudo_from=0, gradual=0).values(1, 5)["centroid_weight"] == 1.0
    with pytest.raises(ConfigError, match="noise_rate"):
        resolve_method({"name": "rofl", "noise_rate": 1.0})
