"""The condition: who holds what, and what is wrong with it.

A condition is generated once, hashed and stored; every method of a comparison runs on the same one.  What a
client may know (:class:`ClientView`: its sample ids and observed labels) is kept apart from the
:class:`Truth` (true labels, which clients are corrupted, the test set), which evaluation alone reads.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from medfed.data import label_noise
from medfed.data import partition as parts_of
from medfed.data.cohort import Cohort
from medfed.data.condition_spec import ConditionSpec, CorruptionSpec, LabelNoiseSpec, PartitionSpec, PublicSpec
from medfed.data.condition_store import NOBODY, ClientView, Condition, Truth, load
from medfed.data.splits import validation_part
from medfed.errors import ConfigError, DataError, nearest
from medfed.seeding import numpy_generator

__all__ = [
    "ClientView",
    "Condition",
    "ConditionSpec",
    "CorruptionSpec",
    "LabelNoiseSpec",
    "PartitionSpec",
    "PublicSpec",
    "Truth",
    "generate",
    "load",
]


def generate(train: Cohort, test: Cohort, spec: ConditionSpec, digests: Mapping[str, str] | None = None) -> Condition:
    """Generates a condition; the same cohorts, spec and version give the same one on every machine.

    Args:
        train: the samples that clients hold.
        test: the held-out samples; shared out over the clients by the classes that they train on, or by the
            client column where ``kind: given`` and the column is filled.
        spec: what to generate.
        digests: content digest of each sample, so that the hash also covers the pixels.

    Returns:
        The condition, with rows sorted by sample id: the order in which a cohort lists its files does not
        matter (except where ``shuffle: false`` asks for it).

    Raises:
        ConfigError: the spec cannot be met with this cohort.
        DataError: a sample in both cohorts, or samples without a client where ``kind: given``.
    """
    if train.task != test.task:
        raise DataError("The classes of training and test set differ.", where=train.name)
    both = set(train.table["sample"]) & set(test.table["sample"])
    if both:
        raise DataError(f"{len(both)} samples are in training and test set, first {min(both)!r}.", where=train.name)
    targets = spec.label_noise.targets(train.task) if spec.label_noise else ()
    how = spec.partition
    if how.shuffle or how.kind != "quality":
        train = train.select(np.argsort(train.table["sample"].to_numpy(dtype=str), kind="stable"))
    test = test.select(np.argsort(test.table["sample"].to_numpy(dtype=str), kind="stable"))
    train, public = _set_apart(train, spec)
    names, parts = _partition(train, test, spec)
    corrupted, noisy = corrupted_clients(names, spec), _noisy(names, parts, train, spec)
    owner = np.empty(len(train), dtype=np.int64)
    for k, rows in enumerate(parts):
        owner[rows] = k
    test_owner = _share_test(train, test, names, parts, spec)
    order = np.argsort(train.table["sample"].to_numpy(dtype=str), kind="stable")
    label_names = np.asarray(names, dtype=object)
    truth = Truth(
        samples=train.table["sample"].to_numpy(dtype=object)[order],
        clients=label_names[owner][order],
        labels=train.labels[order],
        corrupted=corrupted,
        test_samples=test.table["sample"].to_numpy(dtype=object),
        test_labels=test.labels,
        test_clients=label_names[test_owner],
        noisy=noisy,
    )
    return Condition(spec, train.task, names, _observed(truth, spec, targets), truth, dict(digests or {}), public)


def _set_apart(train: Cohort, spec: ConditionSpec) -> tuple[Cohort, tuple[str, ...]]:
    """The samples that clients hold, and the public ones: of every class about the same share, patients whole."""
    if spec.public is None:
        return train, ()
    patients = train.table["patient"].to_numpy(dtype=str)
    groups = np.unique(patients, return_inverse=True)[1] if spec.partition.group_by_patient else None
    generator = numpy_generator(spec.seed, "public images")
    public = validation_part(train.labels, groups, train.task.num_classes, spec.public.fraction, generator)
    names = train.table["sample"].to_numpy(dtype=str)[public]
    return train.select(np.flatnonzero(~public)), tuple(sorted(names.tolist()))


def _partition(train: Cohort, test: Cohort, spec: ConditionSpec) -> tuple[tuple[str, ...], list[np.ndarray]]:
    how = spec.partition
    if how.kind == "given":
        names, parts = parts_of.given_partition(train.table["client"].to_numpy(dtype=str))
        held = dict(zip(names, parts))
        # A client known from its test samples alone is a client without training samples, not nobody.
        names = tuple(sorted({*names, *(str(c) for c in test.table["client"] if str(c).strip())}))
        return names, [held.get(name, np.zeros(0, dtype=np.int64)) for name in names]
    rng = numpy_generator(spec.seed, "partition", how.kind)
    groups = train.table["patient"].to_numpy(dtype=str) if how.group_by_patient else None
    if how.kind == "quality":
        parts = parts_of.quality_partition(
            train.labels,
            how.clients,
            how.corrupted,
            how.alpha,
            rng,
            groups=groups,
            min_samples=how.min_samples,
            shuffle=how.shuffle,
        )
    else:
        parts = parts_of.dirichlet_partition(
            train.labels, how.clients, how.alpha, rng, groups=groups, min_samples=how.min_samples
        )
    return how.client_names(), parts


def corrupted_clients(names: tuple[str, ...], spec: ConditionSpec) -> tuple[str, ...]:
    """The clients whose images are corrupted: named, the last ones, or drawn.

    Raises:
        ConfigError: there are not so many clients or not of that name, or no corruption is given.
    """
    how = spec.partition
    named = how.corrupted_clients
    if named is not None:
        if how.kind == "quality":
            raise ConfigError(
                "With kind 'quality' the last clients are the corrupted ones.",
                where="partition.corrupted_clients",
                fix="Give partition.corrupted, or choose kind 'dirichlet'.",
            )
        for name in named:
            if name not in names:
                raise ConfigError(
                    f"There is no client {name!r}.",
                    where="partition.corrupted_clients",
                    fix=nearest(name, names),
                )
        if how.corrupted not in (0, len(set(named))):
            raise ConfigError(
                f"corrupted is {how.corrupted}, but {len(set(named))} clients are named.",
                where="partition.corrupted_clients",
                fix="Leave partition.corrupted out.",
            )
        chosen = tuple(sorted(set(named)))
    elif how.corrupted > len(names):
        raise ConfigError(
            f"{how.corrupted} corrupted clients of {len(names)}.",
            where="partition.corrupted",
            fix=f"Give a number from 0 to {len(names)}.",
        )
    elif how.kind == "quality":
        chosen = names[len(names) - how.corrupted :]
    else:
        drawn = numpy_generator(spec.seed, "corrupted clients").choice(len(names), how.corrupted, replace=False)
        chosen = tuple(names[k] for k in sorted(drawn))
    if chosen and spec.corruption is None:
        raise ConfigError(
            f"{len(chosen)} corrupted clients, but no corruption.",
            where="condition.corruption",
            fix="Say what corrupts them, e.g. {kind: gaussian_noise, severity: 3}.",
        )
    return chosen


def _noisy(names: tuple[str, ...], parts: list[np.ndarray], train: Cohort, spec: ConditionSpec) -> tuple[str, ...]:
    """The clients whose annotators err: named, or all but the clean ones."""
    noise = spec.label_noise
    if noise is None:
        return ()
    noise.check_clients(names)
    if noise.noisy_clients is not None:
        return tuple(sorted(set(noise.noisy_clients)))
    order = [int(k) for k in numpy_generator(spec.seed, "clean annotators").permutation(len(names))]
    clean: list[int] = []
    if noise.coverage is not None:
        counts = np.stack([np.bincount(train.labels[rows], minlength=train.task.num_classes) for rows in parts])
        clean = label_noise.cover(counts, noise.coverage, order)
        fix = "Lower the coverage, or ask for fewer clients."
        if (short := counts.sum(axis=0) < noise.coverage).any():
            name, held = train.task.classes[int(short.argmax())], int(counts.sum(axis=0)[short.argmax()])
            raise ConfigError(
                f"class {name} has {held} samples in all.", where="condition.label_noise.coverage", fix=fix
            )
        if len(clean) == len(names):
            raise ConfigError("all clients would be clean.", where="condition.label_noise.coverage", fix=fix)
    clean += [k for k in order if k not in clean][: max(0, (noise.clean or 0) - len(clean))]
    return tuple(name for k, name in enumerate(names) if k not in clean)


def _observed(truth: Truth, spec: ConditionSpec, targets: label_noise.Targets) -> np.ndarray:
    """The labels as clients have them; each noisy client's are drawn from its name and the seed alone."""
    observed, noise = truth.labels.copy(), spec.label_noise
    if noise is not None and noise.apply:
        for name in truth.noisy:
            rows = truth.rows.get(name, NOBODY)
            rng = numpy_generator(spec.seed, "label noise", name)
            observed[rows] = label_noise.flip(observed[rows], targets, noise.rate_of(name, spec.seed), rng)
    return observed


def _share_test(
    train: Cohort, test: Cohort, names: tuple[str, ...], parts: list[np.ndarray], spec: ConditionSpec
) -> np.ndarray:
    """The client of each test sample: its own column where given, otherwise by the classes trained on."""
    counts = train.class_counts()
    rows = train.task.num_classes + (train.task.kind == "multilabel")
    shares = parts_of.class_proportions(parts_of.strata(train.labels, counts), parts, rows)
    groups = test.table["patient"].to_numpy(dtype=str) if spec.partition.group_by_patient else None
    classes = parts_of.strata(test.labels, counts)
    owner = parts_of.share_test(classes, shares, numpy_generator(spec.seed, "test shares"), groups)
    if spec.partition.kind == "given":
        number = {name: k for k, name in enumerate(names)}
        given = np.array([number.get(str(c), -1) for c in test.table["client"]], dtype=np.int64)
        owner = np.where(given >= 0, given, owner)
    return owner
