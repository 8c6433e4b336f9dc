"""``site.yaml``: what only the site itself knows, in the ``local`` folder of its kit. Never sent."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from medfed.config import CohortSection, explain, read_yaml
from medfed.data.cohort import Cohort, Task
from medfed.errors import ConfigError, DataError

if TYPE_CHECKING:
    from medfed.data.arrays import ArrayDataset
    from medfed.training.bundle import TrainingBundle

SITE_FILE = "site.yaml"


class SiteSettings(BaseModel):
    """One site's own settings: either its images, or in a trial its share of a stored condition.

    Args:
        cohort: reader, root and the reader's options, as in an experiment file.
        share: the site's share of a trial, relative to this file.
        bundle: folder of the agreed bundle, where it is not one that ships with medfed.
        allow: further full names of what the bundle may use; see ``medfed bundle check``.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        threads: intra-op threads; ``auto`` takes the cores there are.
        cache: folder of the prepared images; below the site's workspace by default.
        max_message_mb: largest message that this site accepts or sends, where it is less than was agreed, in MB.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    cohort: CohortSection | None = None
    share: str | None = None
    bundle: str | None = None
    allow: tuple[str, ...] = ()
    device: str = "auto"
    threads: int | Literal["auto"] = "auto"
    cache: Path | None = None
    max_message_mb: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _one_source(self) -> SiteSettings:
        if (self.cohort is None) == (self.share is None):
            raise ValueError("needs either 'cohort' or, in a trial, 'share'")
        return self


def read_site(path: Path) -> SiteSettings:
    """Reads ``site.yaml``.

    Raises:
        ConfigError: it is missing or not valid.
    """
    try:
        return SiteSettings.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ConfigError("\n  ".join(explain(error, SiteSettings)), where=str(path)) from None


def own_data(settings: SiteSettings, task: Task, bundle: TrainingBundle, cache: Path) -> ArrayDataset:
    """The site's training images, prepared as agreed, with its labels in the job's classes.

    Samples that the reader marks as a test set are left out.

    Args:
        settings: the site's own.
        task: the job's classes; the site derives none.
        bundle: the agreed bundle.
        cache: folder of the image store.

    Raises:
        MedfedError: nothing usable, or a class that the job does not know.
    """
    from medfed.data.arrays import ArrayDataset
    from medfed.data.store import ImageStore
    from medfed.experiment import read_section, usable

    assert settings.cohort is not None
    cohort = read_section(settings.cohort)
    store = ImageStore.open(Path(os.path.expanduser(settings.cache or cache)), bundle.pipeline())
    built = store.ensure(cohort)
    cohort = usable(cohort, built.failures, built.corrections).where(lambda table: table["split"] != "test")
    if len(cohort) < 2:
        raise DataError(f"{len(cohort)} training images are too few.", where=cohort.name)
    cohort = in_classes(cohort, task)
    labels = torch.tensor(cohort.labels).to(torch.int64 if task.kind == "multiclass" else torch.float32)
    numbers: dict[str, int] = {}
    patients = [numbers.setdefault(p, len(numbers)) for p in cohort.table["patient"]]
    return ArrayDataset(store.images, built.rows_of(cohort.table["sample"]), labels, np.asarray(patients, np.int64))


def in_classes(cohort: Cohort, task: Task) -> Cohort:
    """The cohort with its labels as numbers of the job's classes, matched by name.

    Raises:
        DataError: another kind of labels; a class that the job does not know; a label of a multi-label task that the
            site does not have (unknown is not absent).
    """
    if cohort.task.kind != task.kind:
        raise DataError(f"its labels are {cohort.task.kind}, the job's are {task.kind}.", where=cohort.name)
    unknown = [c for c in cohort.task.classes if c not in task.classes]
    lacking = [c for c in task.classes if c not in cohort.task.classes] if task.kind == "multilabel" else []
    if unknown or lacking:
        what = "the job has no class" if unknown else "the site has no label"
        names = ", ".join(map(repr, unknown or lacking))
        raise DataError(f"{what} {names}.", where=cohort.name, fix=f"The job's classes: {', '.join(task.classes)}.")
    if task.kind == "multilabel":
        labels = cohort.labels[:, [cohort.task.classes.index(c) for c in task.classes]]
    else:
        labels = np.asarray([task.classes.index(c) for c in cohort.task.classes])[cohort.labels]
    return replace(cohort, task=task, labels=labels)
