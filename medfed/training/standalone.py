"""Parts of a bundle that runs alone, without a federation: its images, loss, metrics and handlers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ignite.engine import Engine, Events
from ignite.exceptions import NotComputableError
from ignite.metrics import Metric
from torch import nn

from medfed.data.cohort import Cohort, Task
from medfed.errors import ConfigError, DataError
from medfed.training.losses import (
    generalized_cross_entropy,
    log_odds_offsets,
    logit_adjustment_offsets,
)
from medfed.training.metrics import metrics_for
from medfed.training.results import result_folder


def training_items(
    reader: str, root: str | Path, classes: Sequence[str], test_fraction: float = 0.0, **options: Any
) -> list[dict[str, Any]]:
    """Reads a public layout for a MONAI data set.

    Args:
        reader: name of the layout, e.g. ``kermany``.
        root: its folder.
        classes: the bundle's classes, in the order of the outputs; the layout must have the same.
        test_fraction: share of the patients that is kept back for :func:`evaluation_items` where the layout marks no
            test samples; the same patients every time.
        **options: the reader's own options.

    Returns:
        One dict a training sample with ``image`` (path), ``frame`` and ``label``; what belongs to a validation or test
        split is left out.

    Raises:
        DataError: other classes, or no training sample.
    """
    return _items(_read(reader, root, classes, test_fraction, options), ("", "train"), "training", root)


def evaluation_items(
    reader: str, root: str | Path, classes: Sequence[str], test_fraction: float = 0.2, **options: Any
) -> list[dict[str, Any]]:
    """The test samples of a public layout, or those that :func:`training_items` keeps back; arguments as there."""
    return _items(_read(reader, root, classes, test_fraction, options), ("test",), "test", root)


def _read(
    reader: str, root: str | Path, classes: Sequence[str], test_fraction: float, options: Mapping[str, Any]
) -> Cohort:
    from medfed.data.readers import get_reader
    from medfed.data.splits import split_cohort

    module = get_reader(reader)
    cohort = module.read(Path(root), module.Options(**options))
    if list(cohort.task.classes) != [str(c) for c in classes]:
        raise DataError(
            f"these data have the classes {', '.join(cohort.task.classes)}, the bundle has {', '.join(classes)}.",
            where=str(root),
            fix="Override 'classes' of the bundle with those of the data.",
        )
    if test_fraction and not (cohort.table["split"] == "test").any():
        try:
            cohort = split_cohort(cohort, test_fraction=test_fraction)
        except DataError as error:
            fix = "Choose another 'test_fraction'; with 0 all of these data are trained on."
            raise DataError(error.what, where=str(root), fix=fix) from None
    return cohort


def _items(cohort: Cohort, splits: Sequence[str], kind: str, root: str | Path) -> list[dict[str, Any]]:
    cohort = cohort.where(lambda table: table["split"].isin(splits))
    if not len(cohort):
        fix = "Let the layout mark them, or give 'test_fraction' as in training." if kind == "test" else None
        raise DataError(f"there is no {kind} sample.", where=str(root), fix=fix)
    labels = cohort.labels.astype("float32" if cohort.task.kind == "multilabel" else "int64")
    table = cohort.table
    return [
        {"image": path, "frame": int(frame), "label": label}
        for path, frame, label in zip(table["path"], table["frame"], labels)
    ]


def class_counts(items: Sequence[Mapping[str, Any]], num_classes: int) -> list[int]:
    """Samples of each class (positives of each label where there are several) among training items."""
    labels = np.asarray([item["label"] for item in items])
    if labels.ndim == 2:
        return labels.sum(axis=0).astype(int).tolist()
    return np.bincount(labels.astype(int), minlength=num_classes).tolist()


class NoiseRobustLoss(nn.Module):
    """Logit-adjusted generalised cross-entropy: robust to wrong and to rare labels.

    See :func:`medfed.training.losses.generalized_cross_entropy`; the offsets are those of logit adjustment, as the
    noise-robust methods train with.  With ``q`` 0 it is logit-adjusted cross-entropy, with ``tau`` 0 as well plain
    cross-entropy.

    Args:
        counts: samples of each class (or positives of each label) in the training data.
        samples: number of training samples; needed where labels are independent.
        task: ``multiclass`` or ``multilabel``.
        tau: strength of the logit adjustment.
        q: between 0 (cross-entropy) and 1 (mean absolute error, the most robust and the slowest to fit).

    Raises:
        ConfigError: a value out of its range.
    """

    offsets: torch.Tensor

    def __init__(
        self, counts: Sequence[int], samples: int = 0, task: str = "multiclass", tau: float = 1.0, q: float = 0.7
    ):
        super().__init__()
        if not 0 <= q <= 1 or tau < 0:
            raise ConfigError(f"q must be between 0 and 1 and tau not negative, got {q} and {tau}.", where="loss")
        self.q, self.multilabel = q, task == "multilabel"
        given = torch.as_tensor(counts)
        offsets = log_odds_offsets(given, samples, tau) if self.multilabel else logit_adjustment_offsets(given, tau)
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch: logits ``[B, C]``, labels ``[B]`` or ``[B, C]``."""
        offsets = self.offsets.to(logits.device)
        return generalized_cross_entropy(logits, labels, self.q, offsets, multilabel=self.multilabel)


class FreshOptimizer:
    """Handler: the optimiser of a trainer forgets its momentum whenever it starts, as in a medfed federation.

    A stock client keeps one optimiser for all rounds, whose moments belong to weights that the server has replaced.
    """

    def attach(self, engine: Any) -> None:
        """Attaches itself to a trainer."""
        engine.add_event_handler(Events.STARTED, self)

    def __call__(self, engine: Any) -> None:
        """Clears the state of the optimiser."""
        engine.optimizer.state.clear()


class PooledMetric(Metric):
    """One of medfed's metrics over all samples of an evaluation, for MONAI's ``key_val_metric``.

    Args:
        name: e.g. ``balanced_accuracy``.
        classes: the class names.
        task: ``multiclass`` or ``multilabel``.
    """

    def __init__(self, name: str, classes: Sequence[str], task: str = "multiclass"):
        self.name = name
        self.task = Task(task, tuple(str(c) for c in classes))  # type: ignore[arg-type]
        super().__init__(output_transform=_scores)

    def reset(self) -> None:
        """Forgets all samples."""
        self._scores: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []

    def update(self, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Takes logits ``[B, C]`` and labels of a batch."""
        self._scores.append(output[0].detach().float().cpu().numpy())
        self._labels.append(output[1].detach().cpu().numpy())

    def all(self) -> Any:
        """All metrics of the samples so far, see :class:`medfed.training.metrics.Metrics`."""
        if not self._scores:
            raise NotComputableError("there was no sample")
        return metrics_for(self.task, np.concatenate(self._scores), np.concatenate(self._labels))

    def compute(self) -> float:
        """The metric; where it is undefined the evaluation ends with the reason."""
        found = self.all()
        value = found[self.name]
        if value is None:
            raise NotComputableError(f"{self.name} is undefined: {found.undefined[self.name]}")
        return value


class MetricsWriter(PooledMetric):
    """Handler: all metrics into ``metrics.json``, with the reason of each that is undefined.

    Those that are defined and not of one class also become metrics of the engine, where trackers and
    federations read them.

    Args:
        output_dir: folder of the file.
        classes: the class names.
        task: ``multiclass`` or ``multilabel``.
    """

    def __init__(self, output_dir: str | Path, classes: Sequence[str], task: str = "multiclass"):
        super().__init__("", classes, task)
        self.path = Path(output_dir) / "metrics.json"

    def attach(self, engine: Engine, *args: Any, **kwargs: Any) -> None:
        """Attaches itself to an evaluator."""
        engine.add_event_handler(Events.STARTED, self.start)
        engine.add_event_handler(Events.EPOCH_STARTED, self.reset)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.iteration_completed)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self.write)

    def start(self, engine: Engine) -> None:
        """Makes the folder: one that cannot be written is told before anything is computed."""
        result_folder(self.path.parent)

    def write(self, engine: Engine) -> None:
        """Writes the file."""
        found = self.all()
        engine.state.metrics.update({k: v for k, v in found.summary().items() if v is not None})
        text = json.dumps({"metrics": found.values, "undefined": found.undefined}, indent=1, ensure_ascii=False)
        self.path.write_text(text + "\n", encoding="utf-8")


def _scores(output: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return output["pred"], output["label"]
