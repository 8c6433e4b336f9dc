"""Validation at the client: the part of its own data that it sets apart, and the score of a model on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from medfed.federation.client import Client
from medfed.methods.local_training import LocalTraining

if TYPE_CHECKING:
    from medfed.data.arrays import ArrayDataset

Score = Literal["balanced_accuracy", "accuracy"]


class ValidatedTraining(LocalTraining):
    """Settings of local training with a part of each client's data set apart.

    Args:
        validation: share of its samples that a client does not train on but validates on. The part is the same in every
            round, balanced by class as well as whole patients allow. 0 validates on the training data.
    """

    validation: float = Field(0.2, ge=0, le=0.5)


@dataclass(frozen=True)
class Parts:
    """What a client trains on and what it validates on; the same data where nothing could be set apart."""

    training: ArrayDataset
    validation: ArrayDataset


def parts_of(client: Client, share: float) -> Parts:
    """The parts of a client's data, from (seed, client) alone.

    Whole patients where the client has two or more of them, single samples otherwise. A client that would be left with
    fewer than two samples to train on sets nothing apart.

    Args:
        client: the client.
        share: wanted share of validation samples; 0 for none.
    """
    import numpy as np

    from medfed.data.splits import validation_part
    from medfed.seeding import numpy_generator

    data = client.data
    if share <= 0 or len(data) < 3:
        return Parts(data, data)
    generator = numpy_generator(client.seed, "validation", client.name)
    apart = validation_part(data.labels.numpy(), data.groups, client.task.num_classes, share, generator)
    if len(data) - apart.sum() < 2:
        return Parts(data, data)
    return Parts(data.subset(np.flatnonzero(~apart)), data.subset(np.flatnonzero(apart)))


def score(client: Client, data: ArrayDataset, metric: Score = "balanced_accuracy") -> float:
    """How well the resident network predicts some data of the client, 0 to 1, without augmentation.

    Balanced accuracy is the mean recall over the classes that are there. With several labels a sample each label is a
    problem of its own, and the mean over labels counts (balanced: over labels that have positives and negatives, or
    plain accuracy where no label has both).

    Args:
        client: the client; its network is in place.
        data: the samples.
        metric: ``balanced_accuracy`` or ``accuracy``.

    Returns:
        The score; NaN where a logit is not finite.
    """
    import numpy as np

    from medfed.training.metrics import ConfusionCounts

    logits, labels = client.trainer.predict(data).numpy(), data.labels.numpy()
    if not np.isfinite(logits).all():
        return float("nan")
    if labels.ndim == 1:
        counts = ConfusionCounts.of(labels, logits.argmax(axis=1), client.task.num_classes)
        found = counts.metrics(client.task.classes, per_class=False)[metric]
        return float("nan") if found is None else found
    truth, said = labels > 0.5, logits >= 0
    if metric == "balanced_accuracy":
        both = truth.any(axis=0) & ~truth.all(axis=0)
        recalls = [((truth == said) & truth)[:, c].sum() / truth[:, c].sum() for c in np.flatnonzero(both)]
        misses = [((truth == said) & ~truth)[:, c].sum() / (~truth[:, c]).sum() for c in np.flatnonzero(both)]
        if recalls:
            return float(np.mean([*recalls, *misses]))
    return float((truth == said).mean())
