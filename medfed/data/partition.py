"""Who holds which sample: partitions of a labelled data set over clients.

Pure functions of labels, groups and a generator; each returns one sorted index array ``[n_k]`` a client, and
every sample belongs to exactly one client.  A *unit* is what cannot be split: a sample, or all samples of one
patient where ``groups`` is given; a unit counts as the class that most of its samples have (the rarer one
where two tie).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from medfed.errors import ConfigError, DataError

Groups = Sequence[str] | np.ndarray | None


@dataclass(frozen=True)
class _Units:
    """Indivisible units: class ``[U]``, number of samples ``[U]`` and the unit of each sample ``[N]``."""

    classes: np.ndarray
    sizes: np.ndarray
    of_sample: np.ndarray
    name: str

    def parts(self, owner: np.ndarray, clients: int) -> list[np.ndarray]:
        owners = owner[self.of_sample]
        return [np.flatnonzero(owners == k) for k in range(clients)]


def strata(labels: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """The class by which a sample is distributed.

    Args:
        labels: class indices ``[N]``, or zeros and ones ``[N, C]`` where several hold at once.
        counts: positives per label ``[C]`` by which rarity is judged; those of ``labels`` by default.  Give
            the training counts when distributing a test set.

    Returns:
        int64 ``[N]``.  Class indices come back unchanged.  Of several labels the rarest positive one counts
        (the first of equally rare ones), and a sample without any positive gets the index ``C``.
    """
    labels = np.asarray(labels)
    if labels.ndim == 1:
        return labels.astype(np.int64)
    positive = labels > 0
    counts = positive.sum(axis=0) if counts is None else np.asarray(counts)
    by_rarity = np.argsort(counts, kind="stable")
    rarest = by_rarity[positive[:, by_rarity].argmax(axis=1)]
    return np.where(positive.any(axis=1), rarest, labels.shape[1]).astype(np.int64)


def _units(labels: np.ndarray, groups: Groups) -> _Units:
    classes = strata(labels)
    if groups is None:
        return _Units(classes, np.ones(len(classes), dtype=np.int64), np.arange(len(classes)), "samples")
    if len(groups) != len(classes):
        raise ValueError(f"{len(groups)} groups for {len(classes)} labels")
    # Units are numbered by first appearance, so that "row order" means the same with groups as without.
    _, first, of_sample = np.unique(np.asarray(groups, dtype=str), return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    of_sample = rank[of_sample]
    num_classes = int(classes.max(initial=-1)) + 1
    votes = np.zeros((len(first), num_classes), dtype=np.int64)
    np.add.at(votes, (of_sample, classes), 1)
    by_rarity = np.argsort(votes.sum(axis=0), kind="stable")
    majority = by_rarity[votes[:, by_rarity].argmax(axis=1)] if num_classes else np.zeros(0, dtype=np.int64)
    return _Units(majority, votes.sum(axis=1), of_sample, "patients")


def _check(units: _Units, clients: int, alpha: float) -> None:
    if clients < 1:
        raise ConfigError(f"{clients} clients.", where="partition.clients", fix="Give at least one.")
    if not (alpha > 0 and np.isfinite(alpha)):
        raise ConfigError(f"{alpha} is not a Dirichlet parameter.", where="partition.alpha", fix="Give alpha > 0.")
    if clients > len(units.sizes):
        fix = "Use fewer clients"
        raise ConfigError(
            f"More clients than {units.name}: {clients} clients, {len(units.sizes)} {units.name}.",
            where="partition.clients",
            fix=f"{fix}, or set partition.group_by_patient to false." if units.name == "patients" else f"{fix}.",
        )


def _draw(
    units: _Units,
    members: np.ndarray,
    clients: int,
    alpha: float,
    minimum: int,
    rng: np.random.Generator,
    pool: str = "clients",
) -> np.ndarray:
    """Owners 0..clients-1 of the units ``members``: per class p ~ Dir(alpha), each unit ~ categorical(p)."""
    classes, sizes = units.classes[members], units.sizes[members]
    of_patients = f" of {len(members)} patients" if units.name == "patients" else ""
    if len(members) < clients or sizes.sum() < clients * minimum:
        raise ConfigError(
            f"{clients} {pool} of at least {minimum} samples each cannot be made from "
            f"{sizes.sum()} samples{of_patients}.",
            where="partition.min_samples",
            fix="Use fewer clients or a smaller min_samples.",
        )
    owner = np.empty(len(members), dtype=np.int64)
    for c in np.unique(classes):
        of_class = np.flatnonzero(classes == c)
        owner[of_class] = rng.choice(clients, size=len(of_class), p=rng.dirichlet(np.full(clients, alpha)))
    return _repair(owner, classes, sizes, clients, minimum)


def _repair(owner: np.ndarray, classes: np.ndarray, sizes: np.ndarray, clients: int, minimum: int) -> np.ndarray:
    """Moves units until every client has ``minimum`` samples; without chance, and only as many as needed.

    The neediest client receives one unit at a time.  Among the moves that lower the total shortage, the unit
    comes from the largest client, is of the class that the receiver has most of, and is the first of these.
    Every move lowers the shortage, so this ends.
    """
    owner = owner.copy()
    total = np.bincount(owner, weights=sizes, minlength=clients).astype(np.int64)
    while (shortage := np.maximum(minimum - total, 0)).any():
        receiver = int(shortage.argmax())
        relief = np.minimum(sizes, shortage[receiver])
        new_shortage = np.maximum(minimum - (total[owner] - sizes), 0) - shortage[owner]
        movable = np.flatnonzero((owner != receiver) & (relief > new_shortage))
        if not len(movable):
            raise ConfigError(
                f"{clients} clients cannot all have {minimum} samples without splitting a patient.",
                where="partition.min_samples",
                fix="Use fewer clients, a smaller min_samples or a larger alpha.",
            )
        held = np.bincount(classes[owner == receiver], minlength=int(classes.max()) + 1)
        best = movable[np.lexsort((movable, -held[classes[movable]], -total[owner[movable]]))[0]]
        total[owner[best]] -= sizes[best]
        total[receiver] += sizes[best]
        owner[best] = receiver
    return owner


def dirichlet_partition(
    labels: np.ndarray,
    num_clients: int,
    alpha: float,
    rng: np.random.Generator,
    *,
    groups: Groups = None,
    min_samples: int = 1,
) -> list[np.ndarray]:
    """Class-wise Dirichlet partition (Hsu et al. 2019, drawn per class as in FedISM and OCT-FedSIR).

    For each class p ~ Dir(alpha 1) over the clients, and each unit of that class goes to a client drawn from
    p. Where a client falls short of ``min_samples``, units move to it from the largest clients, preferably of
    classes that it already has.

    Args:
        labels: class indices ``[N]`` or zeros and ones ``[N, C]`` (then see :func:`strata`).
        num_clients: number of clients K.
        alpha: concentration; the smaller, the more the clients differ.
        rng: the only source of chance.
        groups: patient of each sample ``[N]``; a patient is never split.
        min_samples: samples that every client gets at least (one unit at least in any case).

    Returns:
        K sorted index arrays that cover 0..N-1 exactly once.

    Raises:
        ConfigError: no such partition exists (more clients than patients, too few samples).
    """
    units = _units(labels, groups)
    _check(units, num_clients, alpha)
    members = np.arange(len(units.classes))
    return units.parts(_draw(units, members, num_clients, alpha, max(min_samples, 1), rng), num_clients)


def quality_partition(
    labels: np.ndarray,
    num_clients: int,
    num_corrupted: int,
    alpha: float,
    rng: np.random.Generator,
    *,
    groups: Groups = None,
    min_samples: int = 1,
    shuffle: bool = True,
) -> list[np.ndarray]:
    """The partition of FedISM (IJCAI 2024): clean and corrupted clients jointly hold the same class mix.

    Of each class the first round((K - K_c) / K * n_c) samples form the clean pool and the rest the corrupted
    pool; inside each pool the class-wise Dirichlet partition is drawn.  Clients 0..K-K_c-1 are clean, the
    last K_c corrupted.  With patients, the cut falls between two patients, where it comes closest to that
    number of samples.

    Args:
        labels: class indices ``[N]`` or zeros and ones ``[N, C]`` (then see :func:`strata`).
        num_clients: number of clients K.
        num_corrupted: number of corrupted clients K_c.
        alpha: concentration.
        rng: the only source of chance.
        groups: patient of each sample ``[N]``; a patient is never split.
        min_samples: samples that every client gets at least; units move within a pool only.
        shuffle: False takes the samples of a class in the given order, as the paper's code does.

    Returns:
        K sorted index arrays that cover 0..N-1 exactly once.

    Raises:
        ConfigError: no such partition exists.
    """
    units = _units(labels, groups)
    _check(units, num_clients, alpha)
    if not 0 <= num_corrupted <= num_clients:
        raise ConfigError(
            f"{num_corrupted} corrupted clients of {num_clients}.",
            where="partition.corrupted",
            fix=f"Give a number from 0 to {num_clients}.",
        )
    clean = num_clients - num_corrupted
    in_clean = np.zeros(len(units.classes), dtype=bool)
    for c in np.unique(units.classes):
        of_class = np.flatnonzero(units.classes == c)
        if shuffle:
            of_class = rng.permutation(of_class)
        filled = np.concatenate([[0], np.cumsum(units.sizes[of_class])])
        target = round(int(filled[-1]) * clean / num_clients)
        in_clean[of_class[: int(np.abs(filled - target).argmin())]] = True
    owner = np.empty(len(units.classes), dtype=np.int64)
    minimum = max(min_samples, 1)
    if clean:
        pool = np.flatnonzero(in_clean)
        owner[pool] = _draw(units, pool, clean, alpha, minimum, rng, "clean clients")
    if num_corrupted:
        pool = np.flatnonzero(~in_clean)
        owner[pool] = clean + _draw(units, pool, num_corrupted, alpha, minimum, rng, "corrupted clients")
    return units.parts(owner, num_clients)


def given_partition(clients: Sequence[str] | np.ndarray) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """The partition that the data bring along.

    Args:
        clients: client of each sample ``[N]``, as text.

    Returns:
        The client names, sorted, and one sorted index array a client.

    Raises:
        DataError: samples without a client.
    """
    column = np.asarray(clients, dtype=str)
    blank = int((np.char.strip(column) == "").sum()) if len(column) else 0
    if blank or not len(column):
        raise DataError(
            f"{blank} of {len(column)} samples name no client.",
            where="client column",
            fix="Fill the column, or choose partition.kind 'dirichlet' or 'quality'.",
        )
    names, owner = np.unique(column, return_inverse=True)
    return tuple(str(n) for n in names), [np.flatnonzero(owner == k) for k in range(len(names))]


def class_proportions(classes: np.ndarray, parts: Sequence[np.ndarray], num_classes: int) -> np.ndarray:
    """The share of each class that each client holds.

    Args:
        classes: class indices ``[N]``, or what :func:`strata` gives.
        parts: index array of each client.
        num_classes: rows of the result (one more than the labels where several hold at once).

    Returns:
        ``[C, K]``, rows summing to one.  A class that nobody holds is shared in proportion to the clients'
        sizes.
    """
    counts = np.stack([np.bincount(classes[p], minlength=num_classes) for p in parts], axis=1).astype(float)
    held = counts.sum(axis=1, keepdims=True)
    by_size = np.broadcast_to(counts.sum(axis=0) / max(counts.sum(), 1.0), counts.shape)
    return np.where(held > 0, counts / np.maximum(held, 1.0), by_size)


def share_test(
    classes: np.ndarray, proportions: np.ndarray, rng: np.random.Generator, groups: Groups = None
) -> np.ndarray:
    """Shares test samples out over the clients by the class mix that they train on.

    Args:
        classes: class indices of the test samples ``[M]``, or what :func:`strata` gives with the training
            counts.
        proportions: ``[C, K]`` from :func:`class_proportions`.
        rng: the only source of chance.
        groups: patient of each test sample; a patient goes to one client.

    Returns:
        The client of each test sample, int64 ``[M]``.
    """
    units = _units(np.asarray(classes, dtype=np.int64), groups)
    owner = np.empty(len(units.classes), dtype=np.int64)
    for c in np.unique(units.classes):
        of_class = np.flatnonzero(units.classes == c)
        owner[of_class] = rng.choice(proportions.shape[1], size=len(of_class), p=proportions[c])
    return owner[units.of_sample]
