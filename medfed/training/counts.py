"""Metrics that follow from counts alone, which several clients' counts add up to exactly.

A metric that is not defined is ``None`` with a reason, never NaN and never a silent 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from medfed.training.ranking import ratio


@dataclass(frozen=True)
class Metrics:
    """Values by name.

    Args:
        values: a finite number, or None where the metric is not defined.
        undefined: the reason, for every None of ``values``.
    """

    values: dict[str, float | None] = field(default_factory=dict)
    undefined: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float | None:
        return self.values[name]

    def put(self, name: str, value: float, reason: str = "the result is not a finite number") -> None:
        """Sets one value; one that is not finite becomes None for the given reason."""
        value = float(value)
        if math.isfinite(value):
            self.values[name] = value
        else:
            self.values[name], self.undefined[name] = None, reason

    def summary(self) -> dict[str, float | None]:
        """The values that are not of a single class."""
        return {name: value for name, value in self.values.items() if "/" not in name}


@dataclass(frozen=True)
class ConfusionCounts:
    """How often each class was taken for each other; counts of several clients add up.

    Args:
        matrix: int64 ``[C, C]``, rows are the true and columns the predicted classes.
    """

    matrix: np.ndarray

    @classmethod
    def of(cls, labels: np.ndarray, predictions: np.ndarray, num_classes: int) -> ConfusionCounts:
        """Counts class indices ``[N]`` against predicted class indices ``[N]``."""
        flat = np.asarray(labels, np.int64) * num_classes + np.asarray(predictions, np.int64)
        return cls(np.bincount(flat, minlength=num_classes**2).reshape(num_classes, num_classes))

    def __add__(self, other: ConfusionCounts) -> ConfusionCounts:
        if self.matrix.shape != other.matrix.shape:
            raise ValueError(f"counts of {len(self.matrix)} and of {len(other.matrix)} classes do not add up")
        return ConfusionCounts(self.matrix + other.matrix)

    @property
    def support(self) -> np.ndarray:
        """Samples of each class ``[C]``."""
        return self.matrix.sum(axis=1)

    def absent(self, classes: Sequence[str]) -> str | None:
        """Which classes are absent, as a reason; None where none is."""
        names = [repr(str(name)) for name, n in zip(classes, self.support, strict=True) if n == 0]
        if not names:
            return None
        return f"class {names[0]} is absent" if len(names) == 1 else f"classes {', '.join(names)} are absent"

    def metrics(self, classes: Sequence[str], *, per_class: bool = True) -> Metrics:
        """Accuracy, balanced accuracy and macro-F1, and the values of each class.

        Balanced accuracy is the mean recall over the classes that are present.  Macro-F1 is the mean over the classes
        that are present or predicted (a class predicted without ever being present scores 0).

        Args:
            classes: the class names ``[C]``.
            per_class: whether to add ``recall/``, ``precision/``, ``f1/`` and ``support/`` of each class.
        """
        hits, support, predicted = np.diag(self.matrix), self.support, self.matrix.sum(axis=0)
        recall, precision = ratio(hits, support), ratio(hits, predicted)
        f1 = ratio(2 * hits, support + predicted)
        out = Metrics()
        out.put("balanced_accuracy", mean_of_defined(recall), "no samples")
        out.put("accuracy", float(ratio(hits.sum(), support.sum())), "no samples")
        out.put("f1_macro", mean_of_defined(f1), "no samples")
        for c, name in enumerate(classes if per_class else ()):
            absent = f"class {name!r} is absent"
            out.put(f"recall/{name}", recall[c], absent)
            out.put(f"precision/{name}", precision[c], f"class {name!r} is never predicted")
            out.put(f"f1/{name}", f1[c], f"{absent} and never predicted")
            out.put(f"support/{name}", support[c])
        return out


@dataclass(frozen=True)
class LabelCounts:
    """How often each label was there and how often it was said to be; counts of several clients add up.

    Args:
        matrix: int64 ``[C, 2, 2]``: by label, rows are absent and present, columns said to be absent and present.
    """

    matrix: np.ndarray

    @classmethod
    def of(cls, truth: np.ndarray, predicted: np.ndarray) -> LabelCounts:
        """Counts labels ``[N, C]`` (bool) against predicted ones ``[N, C]`` (bool)."""
        sides = [[(t & s).sum(axis=0) for s in (~predicted, predicted)] for t in (~truth, truth)]
        return cls(np.moveaxis(np.asarray(sides, np.int64), 2, 0))

    def __add__(self, other: LabelCounts) -> LabelCounts:
        if self.matrix.shape != other.matrix.shape:
            raise ValueError(f"counts of {len(self.matrix)} and of {len(other.matrix)} labels do not add up")
        return LabelCounts(self.matrix + other.matrix)

    def lacking(self, classes: Sequence[str]) -> list[str]:
        """For each label why it has no area under a curve; empty where it has one."""
        reasons = []
        for name, (negatives, positives) in zip(classes, self.matrix.sum(axis=2).tolist(), strict=True):
            what = "absent" if positives == 0 else "present in every sample" if negatives == 0 else ""
            reasons.append(f"label {name!r} is {what}" if what else "")
        return reasons

    def metrics(self, classes: Sequence[str], *, per_class: bool = True) -> Metrics:
        """Balanced accuracy and macro-F1 over the labels for which they are defined, and the values of each label.

        Args:
            classes: the label names ``[C]``.
            per_class: whether to add ``balanced_accuracy/``, ``recall/``, ``precision/``, ``f1/`` and ``support/`` of
                each label.
        """
        (right_out, false), (missed, hits) = np.moveaxis(self.matrix, 0, 2)
        positives, chosen = hits + missed, hits + false
        recall, precision = ratio(hits, positives), ratio(hits, chosen)
        balanced = (recall + ratio(right_out, right_out + false)) / 2
        f1 = ratio(2 * hits, positives + chosen)
        lacking, out = self.lacking(classes), Metrics()
        out.put("balanced_accuracy", mean_of_defined(balanced), next(filter(None, lacking), "there is no label"))
        out.put("f1_macro", mean_of_defined(f1), "no label is present or predicted")
        for c, name in enumerate(classes if per_class else ()):
            absent = f"label {name!r} is absent"
            out.put(f"balanced_accuracy/{name}", balanced[c], lacking[c])
            out.put(f"recall/{name}", recall[c], absent)
            out.put(f"precision/{name}", precision[c], f"label {name!r} is never predicted")
            out.put(f"f1/{name}", f1[c], f"{absent} and never predicted")
            out.put(f"support/{name}", positives[c])
        return out


def mean_of_defined(values: np.ndarray) -> float:
    """The mean of the values that are not NaN; NaN where all are."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else math.nan
