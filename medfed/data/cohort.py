"""The cohort: a table of samples with labels, patients and, where given, clients and splits.

A reader turns one public layout into a :class:`Cohort`; everything after that sees only the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from medfed.errors import DataError

COLUMNS = ("sample", "path", "frame", "patient", "client", "split")


@dataclass(frozen=True)
class Task:
    """What is predicted.

    Args:
        kind: ``"multiclass"`` (one class a sample, softmax) or ``"multilabel"`` (several at once, sigmoid).
        classes: the class names, in the order of the network's outputs.  One map for the whole federation, never
            derived from what one client happens to hold.
    """

    kind: Literal["multiclass", "multilabel"]
    classes: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        """Number of network outputs."""
        return len(self.classes)


@dataclass(frozen=True)
class Unusable:
    """A file or table row that cannot be used, and why."""

    path: str
    reason: str
    sample: str = ""


@dataclass
class Findings:
    """What was found on the way from files to samples: nothing is skipped without a line here.

    Args:
        unusable: every file or row left out, with the reason.
        corrections: how often each correction was applied, by name (e.g. ``"monochrome1_inverted"``).
        notes: remarks on the data as a whole, for people (e.g. ``"4 duplicated RSNA ids dropped"``).
    """

    unusable: list[Unusable] = field(default_factory=list)
    corrections: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def count(self, correction: str, times: int = 1) -> None:
        """Counts one correction by name."""
        self.corrections[correction] = self.corrections.get(correction, 0) + times


@dataclass(frozen=True)
class Cohort:
    """A table of samples and their labels.

    Args:
        task: classes and kind of labels.
        table: one row a sample with the columns of :data:`COLUMNS`, all text except ``frame``.  ``sample`` is
            unique; ``path`` is absolute; ``frame`` is the index within a multi-frame file (0 otherwise);
            ``patient`` groups samples that must not be split (the sample's own id where nothing is known);
            ``client`` and ``split`` (``train``, ``val``, ``test``) are empty where the layout does not say.
        labels: int64 class indices ``[N]`` (multiclass) or float32 zeros and ones ``[N, C]`` (multilabel).
        findings: what the reader left out or corrected.
        name: short name of the data set.
    """

    task: Task
    table: pd.DataFrame
    labels: np.ndarray
    findings: Findings = field(default_factory=Findings)
    name: str = "cohort"

    def __post_init__(self) -> None:
        missing = [c for c in COLUMNS if c not in self.table.columns]
        if missing:
            raise ValueError(f"cohort table lacks the columns {missing}")
        if len(self.table) != len(self.labels):
            raise ValueError(f"{len(self.table)} rows but {len(self.labels)} labels")
        twice = self.table["sample"][self.table["sample"].duplicated()]
        if len(twice):
            raise DataError(f"{len(twice)} sample ids occur more than once, first {twice.iloc[0]!r}.", where=self.name)
        if self.task.kind == "multiclass" and len(self.labels):
            low, high = int(self.labels.min()), int(self.labels.max())
            if low < 0 or high >= self.task.num_classes:
                raise DataError(
                    f"labels run from {low} to {high}, but there are {self.task.num_classes} classes.",
                    where=self.name,
                )

    def __len__(self) -> int:
        return len(self.table)

    def select(self, rows: np.ndarray | Iterable[int]) -> Cohort:
        """The cohort of some rows, by position (int) or mask (bool); findings are kept."""
        rows = np.asarray(rows if isinstance(rows, np.ndarray) else list(rows))
        table = self.table[rows] if rows.dtype == bool else self.table.iloc[rows]
        return replace(self, table=table.reset_index(drop=True), labels=self.labels[rows])

    def where(self, keep: Callable[[pd.DataFrame], pd.Series]) -> Cohort:
        """The cohort of the rows for which ``keep(table)`` is true."""
        return self.select(np.asarray(keep(self.table), dtype=bool))

    def paths(self) -> list[Path]:
        """The file of each sample, in row order."""
        return [Path(p) for p in self.table["path"]]

    def class_counts(self) -> np.ndarray:
        """Samples per class ``[C]`` (positives per label where multilabel)."""
        if self.task.kind == "multilabel":
            return self.labels.sum(axis=0).astype(np.int64)
        return np.bincount(self.labels, minlength=self.task.num_classes)
