"""``medfed inspect``: what a cohort holds, before a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medfed.config import CohortSection, Experiment, apply_sets, load_experiment
from medfed.data.inspection import Inspection, inspect_cohort
from medfed.errors import DataError
from medfed.experiment import corruption_of, load_bundle, read_section

if TYPE_CHECKING:
    from medfed.console import Screen
    from medfed.data.store import Pipeline

Show = Callable[[Path, int], np.ndarray]


def inspect(source: Path, reader: str, out: Path, sets: list[str], screen: Screen, limit: int | None) -> Inspection:
    """Inspects the cohort of an experiment file, or a folder or table of images.

    With an experiment file the picture sheet shows what the network will see, and below it the same corrupted.

    Args:
        source: an experiment file, or a folder or table.
        reader: reader of a folder or table.
        out: where tables and picture sheet go.
        sets: ``key=value`` changes; of an experiment, or of the reader's options.
        screen: shows what is going on.
        limit: decode at most so many samples.
    """
    shows: dict[str, Any] = {}
    if source.suffix.lower() in (".yaml", ".yml"):
        experiment = load_experiment(source, sets)
        cohort = read_section(experiment.cohort)
        shows = pictures(experiment, load_bundle(experiment, cohort.task).pipeline())
    else:
        if not source.exists():
            raise DataError("there is no such folder or file.", where=str(source), fix="Check the path.")
        section = {"reader": reader, "root": str(source), **apply_sets({}, sets)}
        cohort = read_section(CohortSection.model_validate(section))
    with screen:
        found = inspect_cohort(cohort, out=out, max_decode=limit, progress=screen.progress, **shows)
    found.render(screen.console)
    screen.say(f"Written to {out}: sheet.png, summary.json, unusable.csv, duplicates.csv, straddling.csv")
    return found


def pictures(experiment: Experiment, pipeline: Pipeline) -> dict[str, Show]:
    """Functions that show a file as the network will see it: clean, and corrupted where there is a corruption."""

    def through(corruption: Any) -> Show:
        def show(path: Path, frame: int) -> np.ndarray:
            item = pipeline.load({"image": str(path), "frame": frame, "sample": path.name})
            if corruption is not None and corruption.domain == "hounsfield":
                item = {**item, "image": corruption.apply(np.asarray(item["image"]), f"{path.name}#{frame}")}
            image = np.asarray(pipeline.prepare(item)["image"], np.float32)
            if corruption is not None and corruption.domain == "image":
                image = corruption.apply(image, f"{path.name}#{frame}")
            return image

        return show

    corruption = corruption_of(experiment)
    shown = {"pipeline": through(None)}
    return shown if corruption is None else {**shown, "corrupted": through(corruption)}
