"""``medfed inspect``: what a cohort holds, before a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from medfed.config import CohortSection, Experiment, apply_sets, explain, load_experiment
from medfed.data.decode import DecodeOptions, Undecodable
from medfed.data.inspection import Inspection, inspect_cohort
from medfed.data.store_build import Job, Made, Work, make, to_record, to_unit
from medfed.data.store_files import file_digest
from medfed.errors import ConfigError, DataError
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
        with screen:
            cohort = read_section(experiment.cohort, screen.progress)
        if (noise := experiment.condition.label_noise) is not None:
            noise.targets(cohort.task)  # refuses what does not fit the classes
            screen.say(f"Label noise is to come: {noise.describe(cohort.task)}. Counts: medfed run --check")
        pipeline = load_bundle(experiment, cohort.task).pipeline()
        options = getattr(pipeline.load, "options", None)
        shows = {
            **pictures(experiment, pipeline),
            "decode_options": options if isinstance(options, DecodeOptions) else None,
        }
    else:
        if not source.exists():
            raise DataError("there is no such folder or file.", where=str(source), fix="Check the path.")
        section = {"reader": reader, "root": str(source), **apply_sets({}, sets)}
        try:
            with screen:
                cohort = read_section(CohortSection.model_validate(section), screen.progress)
        except ValidationError as error:
            raise ConfigError("; ".join(explain(error, CohortSection)), where="--set") from None
    with screen:
        found = inspect_cohort(cohort, out=out, max_decode=limit, progress=screen.progress, **shows)
    found.render(screen.console)
    screen.say(f"Written to {out}: sheet.png, summary.json, unusable.csv, duplicates.csv, straddling.csv")
    return found


def pictures(experiment: Experiment, pipeline: Pipeline) -> dict[str, Show]:
    """Functions that show a file as the network will see it: the very records of a run's image store.

    Returns:
        ``pipeline`` for clean images, and ``corrupted`` where the condition has a corruption.
    """
    corruption = corruption_of(experiment)

    def clean(path: Path, frame: int) -> np.ndarray:
        return _unit(pipeline, make(Work(pipeline), _job(path, frame)))

    def corrupted(path: Path, frame: int) -> np.ndarray:
        job = _job(path, frame)
        if corruption is not None and corruption.domain == "image":
            record = to_record(clean(path, frame), pipeline.dtype)
            return _unit(pipeline, make(Work(pipeline, corruption, record[None]), replace(job, clean_row=0)))
        return _unit(pipeline, make(Work(pipeline, corruption), job))

    return {"pipeline": clean} if corruption is None else {"pipeline": clean, "corrupted": corrupted}


def _job(path: Path, frame: int) -> Job:
    return Job(str(path), frame, path.name, file_digest(str(path)))


def _unit(pipeline: Pipeline, made: Made) -> np.ndarray:
    if not made.pixels:
        raise Undecodable(made.reason)
    return to_unit(np.frombuffer(made.pixels, pipeline.dtype).reshape(pipeline.shape))
