"""``site.yaml``: what only the site itself knows, in the ``local`` folder of its kit. Never sent."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from medfed.config import CohortSection, explain
from medfed.data.cohort import Cohort, Task
from medfed.engines.nvflare.held_out import SiteData, Tells, keep_apart, parted
from medfed.errors import ConfigError, DataError
from medfed.yaml_file import read_yaml

if TYPE_CHECKING:
    from medfed.engines.nvflare.plan import SitePlan
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
        overrides: bundle keys that this site changes for itself (how its images are prepared and augmented, batch size,
            paths); what all have agreed on cannot be changed.
        tell_overrides: the server is told the names of these keys.
        evaluation: what the server is told of the model on this site's held-out share: ``nothing``, ``counts`` (right
            and wrong by class, sums, areas under curves), or besides a ``histogram`` of its scores.
        cache: folder of the prepared images; below the site's workspace by default.
        max_message_mb: largest message that this site accepts or sends, where it is less than was agreed, in MB.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    cohort: CohortSection | None = None
    share: str | None = None
    bundle: str | None = None
    allow: tuple[str, ...] = ()
    overrides: dict[str, Any] = Field(default_factory=dict)
    tell_overrides: bool = False
    evaluation: Tells = "counts"
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


def own_data(settings: SiteSettings, plan: SitePlan, client: str, bundle: TrainingBundle, cache: Path) -> SiteData:
    """The site's images, prepared with its bundle, with its labels in the job's classes.

    Samples that the reader marks as a test set, and all others of these patients, are kept apart to measure the model
    on; where it marks none, the agreed share of whole patients is. Patients with an identical picture count as one.

    Args:
        settings: the site's own.
        plan: what all agreed on; the site derives no classes.
        client: the site's name.
        bundle: the site's bundle.
        cache: folder of the image store.

    Raises:
        MedfedError: nothing usable, or a class that the job does not know.
    """
    from medfed.data.arrays import ArrayDataset
    from medfed.data.store import ImageStore
    from medfed.experiment import read_section, united, usable

    assert settings.cohort is not None
    task = Task(plan.task, plan.classes)
    cohort = read_section(settings.cohort)
    store = ImageStore.open(Path(os.path.expanduser(settings.cache or cache)), bundle.pipeline())
    built = store.ensure(cohort)
    cohort = usable(cohort, built.failures, built.corrections)
    cohort = in_classes(united(cohort, dict(built.rows), store.images), task)
    patients = cohort.table["patient"]
    marked = patients.isin(patients[cohort.table["split"] == "test"]).to_numpy()
    if len(cohort) - marked.sum() < 2:
        raise DataError(f"{len(cohort) - marked.sum()} training images are too few.", where=cohort.name)
    labels = torch.tensor(cohort.labels).to(torch.int64 if task.kind == "multiclass" else torch.float32)
    numbers: dict[str, int] = {}
    groups = np.asarray([numbers.setdefault(p, len(numbers)) for p in patients], np.int64)
    data = ArrayDataset(store.images, built.rows_of(cohort.table["sample"]), labels, groups)
    if marked.any():
        return parted(data, marked)
    return keep_apart(data, task.num_classes, plan.held_out, plan.held_out_seed, client)


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
