"""Federations whose features, noisy clients and true labels are known exactly.

Images are vectors around one point a class; the network is linear, so that its pooled features are the normalised
images whatever was trained. All features share a common part, as features after a ReLU do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from tiny_federation import PIXELS, SIDE, Federation

from medfed.data.arrays import ArrayDataset

CLASSES = ("a", "b", "c")
NOISY = ("c2", "c3", "c4", "c5")


@dataclass
class Planted:
    """Clients with observed labels, and the truth that no method sees."""

    data: dict[str, ArrayDataset]
    true: dict[str, np.ndarray]

    def features(self, client: str) -> np.ndarray:
        """What the classifier of ``tiny_federation.Softmax`` sees, float64 ``[N, 16]``."""
        data = self.data[client]
        images = data.images[data.rows].reshape(len(data), -1).astype(np.float64) / 255
        return (images - 0.5) / 0.5

    def observed(self, client: str) -> np.ndarray:
        return self.data[client].labels.numpy()


def images_of(true: np.ndarray, generator: np.random.Generator, classes: int = 3) -> np.ndarray:
    """One image a label: a common level, brighter in the block of its class, with a little noise."""
    width = PIXELS // classes
    level = np.full((len(true), PIXELS), 175.0)
    for i, c in enumerate(true):
        level[i, c * width : (c + 1) * width] += 55.0
    level += generator.normal(0, 4, level.shape)
    return level.clip(0, 255).round().astype(np.uint8).reshape(-1, 1, SIDE, SIDE)


def planted(
    counts: dict[str, tuple[int, ...]] | None = None,
    noisy: tuple[str, ...] = NOISY,
    rate: float = 0.4,
    seed: int = 0,
) -> Planted:
    """Six clients, the last four with symmetric noise in every class, unless told otherwise.

    Args:
        counts: samples of each class by client.
        noisy: clients with noise.
        rate: share of each class that gets another label.
        seed: of images and noise.
    """
    counts = counts or {f"c{k}": (12 + k, 15 - k, 10 + k % 2) for k in range(6)}
    classes = max(len(n) for n in counts.values())
    data, truth = {}, {}
    for k, (client, sizes) in enumerate(sorted(counts.items())):
        generator = np.random.default_rng([seed, k])
        true = np.repeat(np.arange(len(sizes)), sizes)
        generator.shuffle(true)
        observed = true.copy()
        if client in noisy:
            for c in range(classes):
                own = np.flatnonzero(true == c)
                for i in generator.permutation(own)[: int(rate * len(own))]:
                    observed[i] = generator.choice([o for o in range(classes) if o != c])
        images = images_of(true, generator, classes)
        data[client] = ArrayDataset(images, np.arange(len(true)), torch.from_numpy(observed))
        truth[client] = true
    return Planted(data, truth)


def federation(method, data, **options) -> Federation:
    """A run over planted data; the network's classes are those of the data."""
    classes = options.pop("classes", CLASSES)
    return Federation(method, data, bundle_changes={"classes": list(classes)}, **options)


def memories(done: Federation, folder) -> dict[str, dict]:
    """What every client keeps after a run."""
    from medfed.federation.memory import ClientMemory, client_folder

    out = {}
    for client in done.server.clients:
        memory = ClientMemory(folder / "clients" / client_folder(client))
        memory.open(done.server.state.step + 1, done.server.state.step)
        out[client] = dict(memory)
    return out


def watch(done: Federation) -> list[tuple[str, object, object]]:
    """Notes every request of a federation: task, message and replies."""
    seen: list[tuple[str, object, object]] = []
    ask = done.server.ask

    def noting(task, message, **options):
        replies = ask(task, message, **options)
        seen.append((task, {"message": message, **options}, replies))
        return replies

    done.server.ask = noting
    return seen
