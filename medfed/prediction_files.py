"""Predictions as files: one row an image, one row a study, as CSV and as JSON."""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from medfed.data.cohort import Task
from medfed.spreadsheet import inert
from medfed.training.metrics import log_softmax, sigmoid
from medfed.training.results import result_folder

if TYPE_CHECKING:
    from medfed.inference import About, Collector

Rule = Literal["max", "mean_logits"]
DONE, NOT_DONE = "processed", "not processed"
RULES = {
    "max": "the highest probability of each class among the images",
    "mean_logits": "the probabilities of the mean of the images' logits",
}


def probabilities(logits: np.ndarray, task: Task) -> np.ndarray:
    """Probabilities ``[N, C]`` of logits ``[N, C]``: softmax, or sigmoid where labels are independent."""
    return np.exp(log_softmax(logits)) if task.kind == "multiclass" else sigmoid(logits)


def study_probabilities(logits: np.ndarray, task: Task, rule: Rule) -> np.ndarray:
    """Probabilities ``[C]`` of a study by the logits ``[N, C]`` of its images.

    ``max`` takes the highest probability of each class: one slice is enough for a finding; the values of several
    classes then do not add up to 1.  ``mean_logits`` takes those of the mean logits: the images show one condition.
    """
    if rule == "max":
        return probabilities(logits, task).max(axis=0)
    return probabilities(logits.mean(axis=0, keepdims=True), task)[0]


def write_predictions(folder: Path, found: Collector, about: About) -> dict[str, Any]:
    """Writes ``images.csv``, ``studies.csv`` and ``predictions.json``.

    Args:
        folder: where to; made if absent, and files of an earlier call are replaced.
        found: logits and reasons.
        about: the model.

    Returns:
        What ``predictions.json`` holds.
    """
    images = [_image(found, k, about) for k in range(len(found.inputs))]
    studies = list(_studies(found, about))
    done = sum(row["status"] == DONE for row in images)
    content = {
        "bundle": about.bundle,
        "model": about.model,
        "round": about.round,
        "preprocessing": about.preprocessing,
        "task": about.task.kind,
        "classes": list(about.task.classes),
        "study_rule": {"name": about.study, "meaning": RULES[about.study]},
        "counts": {DONE: done, NOT_DONE: len(images) - done, "studies": len(studies)},
        "images": images,
        "studies": studies,
    }
    result_folder(folder)
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    scores = [f"p_{name}" for name in about.task.classes]
    names = ["file", "frame", "study", "series", "status", "reason", "predicted", *scores, "corrections"]
    study_names = ["study", "status", "reason", "images", "predicted", *scores, "rule"]
    with _at_once(folder, "images.csv", "studies.csv", "predictions.json") as (image_file, study_file, whole_file):
        _table(image_file, names, images, about)
        _table(study_file, study_names, studies, about)
        whole_file.write_text(text + "\n", encoding="utf-8")
    return content


@contextlib.contextmanager
def _at_once(folder: Path, *names: str) -> Iterator[list[Path]]:
    """Gives files to write, which take their names when all of them are on the disk."""
    drafts = [folder / f".{name}.writing" for name in names]
    try:
        yield drafts
        for draft in drafts:
            with open(draft, "rb+") as file:
                os.fsync(file.fileno())
        for draft, name in zip(drafts, names, strict=True):
            os.replace(draft, folder / name)
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)


def _image(found: Collector, k: int, about: About) -> dict[str, Any]:
    one, reason = found.inputs[k], found.reasons[k]
    row: dict[str, Any] = {"file": one.file, "frame": one.frame, "study": one.study, "series": one.series}
    row |= {"status": NOT_DONE if reason else DONE, "reason": f"{NOT_DONE}: {reason}" if reason else ""}
    if not reason:
        row |= _scores(probabilities(found.logits[k : k + 1], about.task)[0], about.task)
    return row | {"corrections": found.corrections[k]}


def _studies(found: Collector, about: About) -> Iterable[dict[str, Any]]:
    members: dict[str, list[int]] = {}
    for k, one in enumerate(found.inputs):
        if one.study:
            members.setdefault(one.study, []).append(k)
    for study, held in members.items():
        used = [k for k in held if not found.reasons[k]]
        row: dict[str, Any] = {"study": study, "images": len(used)}
        left_out = f"{len(held) - len(used)} of {len(held)} images not processed" if len(used) < len(held) else ""
        row |= {"status": DONE if used else NOT_DONE, "reason": left_out, "rule": about.study}
        if used:
            row |= _scores(study_probabilities(found.logits[used], about.task, about.study), about.task)
        yield row


def _scores(p: np.ndarray, task: Task) -> dict[str, Any]:
    if task.kind == "multiclass":
        predicted = task.classes[int(p.argmax())]
    else:
        predicted = ";".join(c for c, value in zip(task.classes, p) if value >= 0.5)
    return {"predicted": predicted, **{f"p_{c}": round(float(v), 6) for c, v in zip(task.classes, p)}}


def _table(path: Path, names: Sequence[str], rows: Iterable[dict[str, Any]], about: About) -> None:
    origin = {"model": about.model, "round": about.round, "preprocessing": about.preprocessing}
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*names, *origin], restval="", extrasaction="raise")
        writer.writeheader()
        writer.writerows({k: inert(v) for k, v in (row | origin).items()} for row in rows)
