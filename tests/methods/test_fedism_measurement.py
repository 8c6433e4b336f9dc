"""What FedISM measures: plain or logit-adjusted loss, images as they are or augmented as in the released code."""

from __future__ import annotations

import numpy as np
import pytest
from test_methods_degenerate import MULTI, multilabel_clients
from tiny_federation import PIXELS, Federation, three_clients

from medfed.methods.registry import resolve_method
from medfed.training.sharpness import Radius

SALT_OFF = {"salt": False}
FLIPS = {"augment::flip": 0.5}


def sharpness_of(theta, data, rho, offsets):
    """The rise of the mean loss along its gradient, with the offsets of the clients' classes."""
    x = (data.images.reshape(len(data), PIXELS) / np.float32(255) - 0.5) / 0.5
    x, y = np.hstack([x, np.ones((len(x), 1))]), data.labels.numpy()

    def loss_and_gradient(at):
        z = x @ at.T + offsets
        if y.ndim == 2:
            return (np.logaddexp(0, z) - y * z).mean(), (1 / (1 + np.exp(-z)) - y).T @ x / y.size
        p = np.exp(z - z.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        rows = np.arange(len(y))
        return -np.log(p[rows, y]).mean(), (p - np.eye(z.shape[1])[y]).T @ x / len(y)

    loss, gradient = loss_and_gradient(theta)
    return loss_and_gradient(theta + rho * gradient / np.linalg.norm(gradient))[0] - loss, loss


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("adjusted", [False, True])
def test_measured_loss(several, adjusted):
    data = multilabel_clients() if several else three_clients()
    section = {"name": "fedism", **SALT_OFF, "measure": {"rho": 0.1}, "adjusted": adjusted}
    done = Federation(section, data, rounds=1, bundle_changes=MULTI if several else None).run()
    theta = np.hstack([done.initial["head.weight"].numpy(), done.initial["head.bias"].numpy()[:, None]])
    for name, client in data.items():
        labels = client.labels.numpy()
        share = labels.mean(axis=0) if several else np.bincount(labels, minlength=3) / len(labels)
        offsets = np.log(np.maximum(share, 1e-12)) - (np.log(np.maximum(1 - share, 1e-12)) if several else 0)
        sharp, loss = sharpness_of(theta, client, 0.1, offsets if adjusted else 0.0)
        assert done.column("sharpness", 1)[name] == pytest.approx(sharp, rel=1e-4)
        assert done.column("received_loss", 1)[name] == pytest.approx(loss, rel=1e-5)


def test_images_are_augmented_anew_in_the_released_form_alone():
    def run(**settings):
        return Federation({"name": "fedism", **settings}, three_clients(), rounds=1, bundle_changes=FLIPS).run()

    released, published = run(form="as_released"), run()
    trainer = released.server.engine.host.client("c0").trainer
    for name, client in three_clients().items():
        trainer.load(released.initial)
        expected = trainer.sharpness(client, Radius(0.05), augmented=(0, 1, name)).sharpness
        assert released.column("sharpness", 1)[name] == expected
        trainer.load(released.initial)
        assert published.column("sharpness", 1)[name] == trainer.sharpness(client, Radius(0.05)).sharpness
    assert released.column("sharpness", 1) != published.column("sharpness", 1)
    assert run(form="as_released", augmented=False).column("sharpness", 1) == published.column("sharpness", 1)


@pytest.mark.parametrize("name", ["fedism", "fedism_plus"])
def test_forms_are_defaults(name):
    settings = [resolve_method({"name": name, **given})[1] for given in ({}, {"form": "as_released"})]
    assert [s.augmented for s in settings] == [False, True]
    assert [s.adjusted for s in settings] == [False, False]
