"""NumPy halves of the fair methods: local training of a linear softmax, losses, runs that are killed."""

from __future__ import annotations

import numpy as np
import pytest
from test_fedism_oracle import CLIENTS, DECAY, LR, LinearSoftmax, orders, pixels, theta_of
from tiny_federation import Federation, three_clients

from medfed.federation.state import same_state, save_state

__all__ = [
    "CLIENTS",
    "adam",
    "close",
    "killed_and_resumed",
    "loss_of",
    "offsets_of",
    "orders",
    "pixels",
    "sgd",
    "theta_of",
]
PLAIN = np.zeros(3)


def offsets_of(labels):
    counts = np.bincount(labels, minlength=3)
    return np.log(np.maximum(counts / counts.sum(), 1e-12))


def loss_of(theta, data):
    """Mean plain cross-entropy."""
    return LinearSoftmax.loss_and_gradient(theta, pixels(data), data.labels.numpy(), PLAIN)[0]


def adam(theta, data, batches, offsets, rate=LR):
    local, m, v = theta.copy(), np.zeros_like(theta), np.zeros_like(theta)
    for t, batch in enumerate(batches, start=1):
        _, g = LinearSoftmax.loss_and_gradient(local, pixels(data)[batch], data.labels.numpy()[batch], offsets)
        g = g + DECAY * local
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        local = local - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return local


def sgd(theta, data, batches, offsets, rate):
    """The trained weights, and the loss of the first batch."""
    local, first = theta.copy(), None
    for batch in batches:
        loss, g = LinearSoftmax.loss_and_gradient(local, pixels(data)[batch], data.labels.numpy()[batch], offsets)
        first, local = loss if first is None else first, local - rate * g
    return local, first


def close(state, theta, tolerance=1e-6):
    return np.abs(theta_of(state) - theta).max() < tolerance


class Killed(BaseException):
    pass


def killed_and_resumed(method, folder, killed_after, data=three_clients, workers=1, **options):
    """Kills a run after a round, resumes it (in workers), and compares."""
    options = {"network": "Normed", "rounds": 4, "dropout": 0.3, "seed": 4, **options}
    whole = Federation(method, data(), **options).run()

    def save(state):
        save_state(state, folder / "checkpoint")
        if state.round == killed_after:
            raise Killed

    first = Federation(method, data(), folder=folder, save=save, **options)
    with pytest.raises(Killed):
        first.run()
    second = Federation(method, data(), folder=folder, workers=workers, **options).run()
    models = [*first.models, *second.models]
    assert all(same_state(a, b) for a, b in zip(models, whole.models, strict=True))
    records = [{**r, "seconds": 0} for r in [*first.records, *second.records]]
    assert records == [{**r, "seconds": 0} for r in whole.records]
    return whole
