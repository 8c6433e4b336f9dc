"""Per-sample predictions as parquet, and which rounds of them stay on disk."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from medfed.training.metrics import binary_losses, log_softmax, sigmoid

if TYPE_CHECKING:
    from medfed.training.evaluation import Evaluation, Evaluator

SCORE = b"medfed.score"


def predictions_table(evaluator: Evaluator, evaluation: Evaluation) -> pd.DataFrame:
    """One row a sample and set.

    Args:
        evaluator: knows labels, sample ids and shares.
        evaluation: what it found.

    Returns:
        ``sample``, ``set``, ``client`` (the clients whose share holds the sample, joined by ``;``), ``patient`` (a
        number, equal for samples of one patient; only where patients are known), ``label`` and ``predicted`` (class
        indices) or ``label_<class>`` (multi-label), ``loss`` (nats; the mean over the labels where multi-label) and
        ``p_<class>`` (probabilities).  Loss and probabilities are NaN where a logit is not finite, and ``predicted``
        is then -1.
    """
    return pd.concat(
        [_table_of(evaluator, name, logits) for name, logits in evaluation.logits.items()], ignore_index=True
    )


def _table_of(evaluator: Evaluator, name: str, logits: np.ndarray) -> pd.DataFrame:
    classes, labels = evaluator.task.classes, evaluator.labels[name]
    usable = np.isfinite(logits).all(axis=1)
    safe = np.where(usable[:, None], logits, 0.0)
    columns: dict[str, object] = {
        "sample": evaluator.samples.get(name) or [str(i) for i in range(len(logits))],
        "set": name,
        "client": _owners(evaluator, name, len(logits)),
    }
    if name in evaluator.patients:
        columns["patient"] = evaluator.patients[name].astype(np.int32)
    if evaluator.task.kind == "multiclass":
        log_p = log_softmax(safe)
        p, loss = np.exp(log_p), -log_p[np.arange(len(labels)), labels]
        columns["label"] = labels.astype(np.int16)
        columns["predicted"] = np.where(usable, safe.argmax(axis=1), -1).astype(np.int16)
    else:
        p, loss = sigmoid(safe), binary_losses(safe, labels > 0.5).mean(axis=1)
        columns |= {f"label_{c}": labels[:, k].astype(np.int8) for k, c in enumerate(classes)}
    columns["loss"] = np.where(usable, loss, np.nan).astype(np.float32)
    columns |= {f"p_{c}": np.where(usable, p[:, k], np.nan).astype(np.float32) for k, c in enumerate(classes)}
    return pd.DataFrame(columns)


def _owners(evaluator: Evaluator, name: str, size: int) -> list[str]:
    owners: list[list[str]] = [[] for _ in range(size)]
    for client, (held, rows) in evaluator.shares.items():
        if held == name:
            for row in np.unique(rows):
                owners[row].append(client)
    return [";".join(o) for o in owners]


def write_table(table: pd.DataFrame, path: Path, score: float | None = None) -> Path:
    """Writes a table as parquet, atomically.

    Args:
        table: what to write.
        path: the file; its folder is made.
        score: how good the round was, kept in the file's metadata.

    Raises:
        OSError: the disk is full or cannot be written; a file that stood there before is intact.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = pa.Table.from_pandas(table, preserve_index=False)
    if score is not None:
        data = data.replace_schema_metadata({**(data.schema.metadata or {}), SCORE: repr(float(score)).encode()})
    new = path.with_suffix(".writing")
    try:
        pq.write_table(data, new, compression="zstd")
        with open(new, "rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    return path


@dataclass(frozen=True)
class PredictionFiles:
    """The prediction files of a run, of which only some rounds are kept.

    Args:
        folder: ``predictions/`` of the run.
        keep_last: newest rounds to keep.
        keep_every: also keep every so many rounds; 0 for none.
        keep_best: also keep the round with the best score.
    """

    folder: Path
    keep_last: int = 5
    keep_every: int = 0
    keep_best: bool = True

    def path(self, round_: int) -> Path:
        """The file of a round."""
        return self.folder / f"round-{round_:04d}.parquet"

    def rounds(self) -> list[int]:
        """The rounds on disk, ascending."""
        found = (re.fullmatch(r"round-(\d+)\.parquet", p.name) for p in self.folder.glob("round-*.parquet"))
        return sorted(int(m[1]) for m in found if m)

    def write(self, round_: int, table: pd.DataFrame, score: float | None = None) -> Path:
        """Writes the predictions of a round, then deletes the rounds that need not be kept.

        Args:
            round_: the round.
            table: see :func:`predictions_table`.
            score: higher is better, e.g. the balanced accuracy; None never counts as best.
        """
        path = write_table(table, self.path(round_), score)
        self.prune()
        return path

    def prune(self) -> None:
        """Deletes the rounds that are neither new, nor at the stated interval, nor the best."""
        rounds = self.rounds()
        keep = set(rounds[-self.keep_last :] if self.keep_last else [])
        keep |= {r for r in rounds if self.keep_every and r % self.keep_every == 0}
        if self.keep_best:
            scores = {r: s for r in rounds if (s := self._score(r)) is not None}
            # of equal scores the earliest: it stays where it is while later rounds tie with it
            keep |= {min(r for r, s in scores.items() if s == max(scores.values()))} if scores else set()
        for r in rounds:
            if r not in keep:
                self.path(r).unlink(missing_ok=True)

    def truncate_after(self, round_: int) -> None:
        """Deletes rounds after ``round_``, for a resume."""
        for r in self.rounds():
            if r > round_:
                self.path(r).unlink(missing_ok=True)

    def _score(self, round_: int) -> float | None:
        text = (pq.read_schema(self.path(round_)).metadata or {}).get(SCORE)
        return float(text) if text is not None else None
