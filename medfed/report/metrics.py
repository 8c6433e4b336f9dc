"""What each metric is called, how it is written, and which direction is better."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

TEST_SETS = ("clean", "corrupted")
COLUMNS = ("clean", "corrupted", "average", "worst", "gap")
COLUMN_LABELS = {
    "clean": "clean",
    "corrupted": "corrupted",
    "average": "average",
    "worst": "worst client",
    "gap": "gap",
}
COLUMN_MEANINGS = {
    "clean": "on the clean test set",
    "corrupted": "on the corrupted test set",
    "average": "mean of clean and corrupted, taken each round",
    "worst": "the worst-off client, taken each round",
    "gap": "clean minus corrupted, taken each round; nearer to 0 is more even",
}


@dataclass(frozen=True)
class Metric:
    """How one metric is shown.

    Args:
        key: its name in the round record.
        label: its name for people.
        percent: recorded as a fraction, shown in percent.
        higher: more is better.
        short: one word for a line of progress.
    """

    key: str
    label: str
    percent: bool = True
    higher: bool = True
    short: str = ""

    @property
    def unit(self) -> str:
        """The unit of what is shown."""
        return "%" if self.percent else ""

    @property
    def axis(self) -> str:
        """Axis label with the unit."""
        return f"{self.label} (%)" if self.percent else self.label

    @property
    def direction(self) -> str:
        """``"higher is better"`` or ``"lower is better"``."""
        return "higher is better" if self.higher else "lower is better"

    def shown(self, value: float) -> float:
        """The number as shown: percent where the record holds a fraction."""
        return 100.0 * value if self.percent else value

    def text(self, value: float | None, *, signed: bool = False) -> str:
        """The number as text, two decimals in percent and four otherwise; ``n/a`` where it is not defined."""
        if value is None or not math.isfinite(value):
            return "n/a"
        digits = 2 if self.percent else 4
        shown = round(self.shown(value), digits) + 0.0  # + 0.0 turns -0.0 into 0.0
        return f"{shown:+.{digits}f}" if signed else f"{shown:.{digits}f}"

    def with_unit(self, value: float | None) -> str:
        """As :meth:`text`, with the unit."""
        text = self.text(value)
        return f"{text} {self.unit}" if self.unit and text != "n/a" else text


_KNOWN = {
    m.key: m
    for m in (
        Metric("balanced_accuracy", "Balanced accuracy", short="bacc"),
        Metric("accuracy", "Accuracy", short="acc"),
        Metric("auc_ovo", "AUC, one-vs-one", short="auc"),
        Metric("auc_ovr", "AUC, one-vs-rest", short="auc"),
        Metric("auc_macro", "AUC, mean over labels", short="auc"),
        Metric("average_precision", "Average precision", short="ap"),
        Metric("f1_macro", "F1, mean over classes", short="f1"),
        Metric("calibration_error", "Calibration error (ECE)", higher=False, short="ece"),
        Metric("nll", "Loss (nats)", percent=False, higher=False, short="loss"),
        Metric("log_loss", "Loss (nats)", percent=False, higher=False, short="loss"),
        Metric("weighted_log_loss", "Weighted loss (nats)", percent=False, higher=False, short="loss"),
        Metric("loss", "Loss (nats)", percent=False, higher=False, short="loss"),
    )
}

NAMES = frozenset(_KNOWN)
"""The metrics that evaluations record for a test set as a whole."""

FAMILIES = {
    "balanced accuracy": ("balanced_accuracy", "accuracy"),
    "AUC": ("auc_ovo", "auc_macro", "auc_ovr"),
    "F1": ("f1_macro",),
    "loss": ("nll", "log_loss", "weighted_log_loss", "loss"),
    "calibration": ("calibration_error",),
}
"""The curves of a report: of each family the first metric that was recorded."""


def metric(key: str) -> Metric:
    """How a metric is shown; one that is not known is shown as it was recorded."""
    if key in _KNOWN:
        return _KNOWN[key]
    lower = any(word in key for word in ("loss", "error", "brier"))
    return Metric(key, key.replace("_", " ").capitalize(), percent=False, higher=not lower, short=key)


def choose(recorded: Iterable[str], families: Iterable[str] = FAMILIES) -> list[str]:
    """The first recorded metric of each family, in the order of the families."""
    recorded = set(recorded)
    return [m for f in families if (m := next((k for k in FAMILIES[f] if k in recorded), None))]
