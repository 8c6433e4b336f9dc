"""FedLSR: its loss against SciPy's divergences, whole rounds against NumPy, and its edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from noise_oracle import adam, followed, mean_of, numeric, ones, softmax, theta_of
from scipy.spatial.distance import jensenshannon
from scipy.special import log_softmax
from scipy.stats import entropy
from tiny_federation import SIDE, Federation, client_data, three_clients

from medfed.errors import ConfigError
from medfed.federation.state import same_state
from medfed.methods.fedlsr import FedLSRSettings, SecondView, SelfRegularised, self_regularised
from medfed.methods.registry import resolve_method
from medfed.seeding import numpy_generator, torch_generator
from medfed.training.objectives import ClassificationObjective

STILL = {"degrees": 0, "translate": 0, "flip": 0.5, "contrast": 0.2, "brightness": 0.3}


def numpy_loss(z1, z2, a1, a2, y, share, gamma, sharpen, power, weight, released):
    mixed = share * softmax(a1) + (1 - share) * softmax(a2)
    sharp = mixed**power / (mixed**power).sum(axis=1, keepdims=True)
    q, r = softmax(sharpen * z1), softmax(sharpen * z2)
    rows = np.arange(len(y))
    if released:
        ce = -log_softmax(sharp, axis=1)[rows, y].mean()
        q, r = np.maximum(q, 1e-6), np.maximum(r, 1e-6)
        m = (q + r) / 2
        js = ((q * np.log(q / m)).mean() + (r * np.log(r / m)).mean()) / 2
        h = entropy(softmax(q), axis=1).mean()
    else:
        ce = -np.log(sharp[rows, y]).mean()
        js = (jensenshannon(q, r, axis=1) ** 2).mean()
        h = (entropy(q, axis=1) + entropy(r, axis=1)).mean() / 2
    return ce + gamma * js + weight * h


@pytest.mark.parametrize("released", [False, True])
def test_loss_is_that_of_the_equations(released):
    generator = np.random.default_rng(0)
    z1, z2 = generator.normal(0, 2, (2, 7, 4))
    y = generator.integers(0, 4, 7)
    shift = np.array([0.0, -1.0, 0.5, 2.0])
    want = numpy_loss(z1, z2, z1 + shift, z2 + shift, y, 0.3, 0.4, 3.0, 2.0, 0.6, released)
    t1, t2, shifts = torch.tensor(z1), torch.tensor(z2), torch.tensor(shift)
    got = self_regularised(
        t1, t2, (t1 + shifts, t2 + shifts), torch.tensor(y), 0.3, gamma=0.4, entropy=0.6, released=released
    )
    assert float(got) == pytest.approx(want, rel=1e-12)


def test_two_equal_views_without_sharpening_are_cross_entropy():
    z, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])
    got = self_regularised(z, z, (z, z), y, 0.7, gamma=9.0, power=1.0)
    assert float(got) == pytest.approx(float(torch.nn.functional.cross_entropy(z, y)), rel=1e-6)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("released", [False, True])
def test_predictions_without_any_doubt_have_finite_gradients(share, released):
    z = torch.tensor([[200.0, -200.0, 0.0], [0.0, 0.0, 300.0]], requires_grad=True)
    loss = self_regularised(z, -z, (z, -z), torch.tensor([1, 0]), share, gamma=0.4, entropy=0.6, released=released)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(z.grad).all()


def flipped(images, seed, name, round, settings):
    """Second views of flips and intensities, batch by batch, from the same draws."""
    draws = torch_generator("second view", seed, round, name)

    def view(x):
        grid = x[:, :-1].reshape(-1, SIDE, SIDE)
        turned = torch.rand(len(x), 5, generator=draws).numpy()[:, 4] < settings["flip"]
        grid = np.where(turned[:, None, None], grid[:, :, ::-1], grid).reshape(len(x), -1)
        unit = torch.rand(len(x), 2, generator=draws).numpy() * 2 - 1
        middle, spread = grid.mean(axis=1, keepdims=True), grid.std(axis=1, keepdims=True)
        out = middle + (1 + settings["contrast"] * unit[:, :1]) * (grid - middle)
        out = out + settings["brightness"] * unit[:, 1:] * spread
        return np.hstack([out, np.ones((len(x), 1))])

    return view


def numpy_train(theta, client, name, round, gamma, la, released):
    x, y = ones(client), client.labels.numpy()
    counts = np.bincount(y, minlength=3)
    shift = np.log(np.maximum(counts / counts.sum(), 1e-12)) if la else np.zeros(3)
    view, mixing = flipped(x, 0, name, round, STILL), numpy_generator("mixing", 0, round, name)

    def gradient(local, batch):
        own, other, share = x[batch], view(x[batch]), mixing.beta(1.0, 1.0)

        def loss(at):
            z1, z2 = own @ at.T, other @ at.T
            weight = 0.6 if released else 0.0
            return numpy_loss(z1, z2, z1 + shift, z2 + shift, y[batch], share, gamma, 3.0, 2.0, weight, released)

        return numeric(loss, local)

    return adam(theta, followed(client, name, round, 1), gradient)


@pytest.mark.parametrize(("form", "la"), [("published", False), ("published", True), ("as_released", False)])
def test_rounds_are_those_of_the_equations(form, la):
    data = three_clients()
    section = {"name": "fedlsr", "form": form, "local_epochs": 1, "second_view": STILL, "warmup": 1.0}
    ours = Federation({**section, "logit_adjustment": la}, data, rounds=2).run()
    theta, sizes = theta_of(ours.initial), {c: len(d) for c, d in data.items()}
    for round in (1, 2):
        gamma, released = 0.4 * (round - 1) / 2, form == "as_released"
        models = {c: numpy_train(theta, d, c, round, gamma, la, released) for c, d in data.items()}
        theta = mean_of(models, sizes)
        assert np.abs(theta_of(ours.models[round - 1]) - theta).max() < 2e-5
        assert ours.records[round - 1]["server"]["gamma"] == pytest.approx(gamma)


def test_second_view_of_a_still_setting_is_the_image_and_darkness_comes_from_outside():
    batch = torch.rand(5, 2, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    base = ClassificationObjective("multiclass")
    still = dict.fromkeys(SecondView().model_dump(), 0.0)
    weights = FedLSRSettings().values(1, 2)
    same = SelfRegularised(base, {**weights, "second_view": still}, (0,)).second_view(batch)
    assert torch.allclose(same, batch, atol=1e-6)
    shifted = SelfRegularised(base, {**weights, "second_view": {**still, "translate": 0.5}}, (0,)).second_view(batch)
    low = batch.amin(dim=(2, 3))
    assert torch.allclose(shifted.amin(dim=(2, 3)), low, atol=1e-5)
    assert not torch.allclose(shifted, batch)


def test_weight_of_the_divergence_rises_over_the_warm_up():
    settings = FedLSRSettings()
    assert [settings.weight(t, 10) for t in (1, 2, 3, 10)] == pytest.approx([0.0, 0.2, 0.4, 0.4])
    assert FedLSRSettings(warmup=0).weight(1, 10) == 0.4


@pytest.mark.parametrize("form", ["published", "as_released"])
def test_edges(form):
    """One client, a class that is absent, clients that miss rounds; BatchNorm; workers."""
    section = {"name": "fedlsr", "form": form, "local_epochs": 1, "logit_adjustment": True}
    data = {**three_clients(), "c3": client_data([1] * 5, 9)}
    one = Federation(section, data, network="Normed", fraction=0.5).run()
    two = Federation(section, data, network="Normed", fraction=0.5, workers=2).run()
    assert all(same_state(a, b) for a, b in zip(one.models, two.models, strict=True))
    assert all(len(r["admitted"]) == 2 and not r["refused"] for r in one.records)
    alone = Federation(section, {"c0": data["c0"]}, rounds=1).run()
    assert alone.column("weight", 1) == {"c0": 1.0}


def test_settings_and_refusals():
    _, settings = resolve_method({"name": "fedlsr"})
    assert settings.values(1, 1)["entropy"] == 0.0
    assert resolve_method({"name": "fedlsr", "form": "as_released"})[1].values(1, 1)["entropy"] == 0.6
    with pytest.raises(ConfigError, match="form"):
        resolve_method({"name": "fedlsr", "form": "released"})
    with pytest.raises(ConfigError, match="degrees"):
        resolve_method({"name": "fedlsr", "second_view": {"degrees": 400}})
    method, _ = resolve_method({"name": "fedlsr"})
    assert method.task_kinds == ("multiclass",)  # experiments with other labels are refused before they start
