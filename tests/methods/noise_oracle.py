"""What the NumPy oracles of the methods against label noise share: softmax, local Adam and means of models."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from test_fedism_oracle import BATCH, DECAY, LR, pixels, theta_of

from medfed.seeding import torch_generator

__all__ = [
    "adam",
    "along",
    "complete",
    "entropy_gradient",
    "followed",
    "mean_of",
    "numeric",
    "ones",
    "pixels",
    "softmax",
    "theta_of",
]


def softmax(z: np.ndarray) -> np.ndarray:
    z = np.exp(z - z.max(axis=1, keepdims=True))
    return z / z.sum(axis=1, keepdims=True)


def ones(data) -> np.ndarray:
    """Normalised images with a last column of ones, float64."""
    x = pixels(data).astype(np.float64)
    return np.hstack([x, np.ones((len(x), 1))])


def adam(theta, steps, gradient: Callable, decay: float = DECAY) -> np.ndarray:
    """Adam from theta with a new memory; ``gradient(local, step)`` for each step."""
    local, m, v = theta.copy(), np.zeros_like(theta), np.zeros_like(theta)
    for t, step in enumerate(steps, start=1):
        g = gradient(local, step) + decay * local
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        local = local - LR * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return local


def followed(data, name, round, epochs, purpose=()):
    """The batches of a client in a round, as indices; a last batch of one joins the one before."""
    generator, samples = torch_generator("shuffle", 0, round, name, *purpose), len(data)
    cuts = list(range(BATCH, samples, BATCH))
    if cuts and samples - cuts[-1] == 1:
        cuts.pop()
    for _ in range(epochs):
        yield from np.split(torch.randperm(samples, generator=generator).numpy(), cuts)


def complete(data, name, round, epochs, purpose=()):
    """The batches of a client that drops incomplete ones; all its samples where these are fewer than a batch."""
    generator, samples = torch_generator("shuffle", 0, round, name, *purpose), len(data)
    for _ in range(epochs):
        order = torch.randperm(samples, generator=generator).numpy()
        yield from order[: samples - samples % BATCH].reshape(-1, BATCH) if samples >= BATCH else [order]


def numeric(loss: Callable, theta: np.ndarray, h: float = 1e-6) -> np.ndarray:
    """Gradient by central differences."""
    out = np.zeros_like(theta)
    for at in np.ndindex(theta.shape):
        up, down = theta.copy(), theta.copy()
        up[at] += h
        down[at] -= h
        out[at] = (loss(up) - loss(down)) / (2 * h)
    return out


def along(p: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Gradient of ``sum_c p_c values_c`` by the logits of p."""
    return p * (values - (p * values).sum(axis=1, keepdims=True))


def entropy_gradient(p: np.ndarray) -> np.ndarray:
    """Gradient of the entropy of p by its logits."""
    return along(p, -np.log(p))


def mean_of(models, weights):
    return sum(weights[c] * models[c] for c in models) / sum(weights[c] for c in models)
