"""Wrong labels: which of a client's labels change, and into what.

Annotators err in different ways: at random (symmetric), by confusing certain classes (asymmetric), or by a grade
(ordinal). All of them are one thing here: *targets*, which say for each class the classes that it may be mistaken
for. At a client with rate eta, exactly ``floor(eta * n)`` of its ``n`` samples of each class change, as in
OCT-FedSIR (2026); the true class is never a target, so that eta is the rate of wrong labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from medfed.errors import ConfigError, nearest

Targets = tuple[tuple[int, ...], ...]
"""By class: the classes that its samples may be labelled with instead; none where its labels stay."""

WHERE = "condition.label_noise"


def symmetric(num_classes: int) -> Targets:
    """Every other class alike.

    Raises:
        ConfigError: there is no other class.
    """
    _needs_two(num_classes)
    return tuple(tuple(c for c in range(num_classes) if c != own) for own in range(num_classes))


def ordinal(num_classes: int, direction: str = "both") -> Targets:
    """The neighbours in the order of the classes.

    Args:
        num_classes: number of classes.
        direction: ``up`` (the next class alone; labels of the last stay), ``down`` (the one before; labels of the
            first stay) or ``both`` (either, with equal chance; the first and the last class have one neighbour).

    Raises:
        ConfigError: there is no neighbour.
    """
    _needs_two(num_classes)
    steps = {"up": (1,), "down": (-1,), "both": (-1, 1)}[direction]
    return tuple(tuple(c + s for s in steps if 0 <= c + s < num_classes) for c in range(num_classes))


def asymmetric(classes: Sequence[str], mapping: Mapping[str, str | Sequence[str]]) -> Targets:
    """A class map: what each class is mistaken for.

    Args:
        classes: class names in the order of the labels.
        mapping: by class one other class, or several of equal chance. Labels of classes that are not in it stay, so
            that a map may run in one direction only.

    Raises:
        ConfigError: an unknown class, a class mistaken for itself or for nothing, a target twice, or an empty map.
    """
    if not mapping:
        raise ConfigError("the class map is empty.", where=f"{WHERE}.map", fix="Say which class becomes which.")
    targets: list[tuple[int, ...]] = [()] * len(classes)
    for source, given in mapping.items():
        names = [given] if isinstance(given, str) else list(given)
        for name in (source, *names):
            if name not in classes:
                raise ConfigError(f"there is no class {name!r}.", where=f"{WHERE}.map", fix=nearest(name, classes))
        if not names:
            raise ConfigError(
                f"{source!r} becomes nothing.", where=f"{WHERE}.map", fix="Leave it out, or name a class."
            )
        if source in names:
            raise ConfigError(
                f"{source!r} becomes itself, which is no error.",
                where=f"{WHERE}.map",
                fix="Name another class; the rate is that of wrong labels.",
            )
        if len(set(names)) < len(names):
            raise ConfigError(f"{source!r} has a target twice.", where=f"{WHERE}.map", fix="Name each class once.")
        targets[classes.index(source)] = tuple(classes.index(name) for name in names)
    return tuple(targets)


def changes(count: int, rate: float) -> int:
    """``floor(rate * count)``, where 0.3 of 10 is 3 although ``0.3 * 10`` may be a little less in binary."""
    return min(count, math.floor(rate * count + 1e-9))


def flip(labels: np.ndarray, targets: Targets, rate: float, rng: np.random.Generator) -> np.ndarray:
    """The labels of one client with its share of wrong ones.

    In each class a random order of its samples is drawn, and a target for every sample; the first
    ``floor(rate * n)`` change. With the same generator a higher rate therefore changes the same samples in the same
    way, and further ones.

    Args:
        labels: class indices ``[N]``.
        targets: what each class may become.
        rate: share of wrong labels in each class that has a target, 0 to 1.
        rng: draws order and targets.

    Returns:
        New labels ``[N]``.
    """
    noisy = labels.copy()
    for own, others in enumerate(targets):
        rows = rng.permutation(np.flatnonzero(labels == own))
        if others:
            became = rng.choice(np.asarray(others, dtype=labels.dtype), len(rows))
            count = changes(len(rows), rate)
            noisy[rows[:count]] = became[:count]
    return noisy


def cover(counts: np.ndarray, least: int, order: Sequence[int]) -> list[int]:
    """A small set of clients that together hold at least so many samples of every class.

    Greedy: always the client that adds most to what is still lacking (samples of a class count up to ``least``).

    Args:
        counts: samples ``[K, C]`` by client and class.
        least: samples that each class needs.
        order: all clients; of those that add the same, the first in this order is taken.

    Returns:
        The clients, in the order in which they were chosen; all needed ones, where not even all are enough.
    """
    held, left = np.zeros(counts.shape[1], dtype=np.int64), list(order)
    chosen: list[int] = []
    while left and (held < least).any():
        gains = [(np.minimum(held + counts[k], least) - np.minimum(held, least)).sum() for k in left]
        if not max(gains):
            break
        chosen.append(int(left.pop(int(np.argmax(gains)))))
        held += counts[chosen[-1]]
    return chosen


def _needs_two(num_classes: int) -> None:
    if num_classes < 2:
        raise ConfigError("a label of the only class cannot be wrong.", where=WHERE, fix="Use a cohort of two classes.")
