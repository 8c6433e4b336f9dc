"""The experiment file: YAML, validated before anything starts.

An unknown key is answered with the nearest known one; ``--set key.sub=value`` changes any key; the resolved file is
saved with the run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from medfed.data.condition_spec import ConditionSpec
from medfed.errors import ConfigError, nearest
from medfed.tracking.settings import TrackingSettings
from medfed.yaml_file import read_yaml

KINDS = (
    dict.fromkeys(("model_type", "dict_type"), "should be a section of keys and values")
    | dict.fromkeys(("list_type", "tuple_type"), "should be a list, e.g. [a, b]")
    | {"int_type": "should be a whole number"}
)
"""What pydantic says in terms of Python, as a writer of YAML would say it."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,60}$"
"""What names of experiments and grids are made of."""
NAME_FAULT = (
    "should be the letters a to z and A to Z, digits, '.', '_' and '-' alone, begin with a letter or a digit and be no "
    "longer than 61"
)


class Section(BaseModel):
    """Base of all sections: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CohortSection(BaseModel):
    """Whose images: a reader, its root folder, and the reader's own options.

    Args:
        reader: name of a reader (``medfed inspect --help`` lists them).
        root: folder or file that the reader starts from; ``~`` and environment variables are expanded.
        options: every further key goes to the reader.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    reader: str
    root: Path

    @field_validator("root", mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return os.path.expanduser(os.path.expandvars(value)) if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        """The reader's own options."""
        return dict(self.model_extra or {})


class Participation(Section):
    """Who takes part in a round and how long the server waits.

    Args:
        fraction: share of the clients asked in a round, drawn anew each round.
        quorum: fewest admitted replies for a round to count; with fewer the previous model is kept.
        timeout: seconds the server waits at most, between machines; None waits for ever.
        grace: seconds it waits for the others once the quorum is there, between machines; None waits for all.
        dropout: simulation only: probability that an asked client does not answer in a round.
    """

    fraction: float = Field(1.0, gt=0, le=1)
    quorum: int = Field(1, ge=1)
    timeout: float | None = Field(None, gt=0)
    grace: float | None = Field(None, ge=0)
    dropout: float = Field(0.0, ge=0, lt=1)


class EngineSection(Section):
    """Where the federation runs.

    Args:
        kind: ``local``: in this process or in worker processes of this machine; ``nvflare``: over NVFlare, in its
            simulator with ``medfed run``, between hospitals with ``medfed nvflare``.
        workers: clients trained side by side; ``auto`` decides by the machine and the cost of a client (``nvflare``:
            one process for each client).
        threads: intra-op threads a worker; ``auto`` shares the cores out.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        amp: automatic mixed precision (float16 on CUDA, bfloat16 on a CPU).
        channels_last: memory format of the network; much faster for depthwise networks on some CPUs.
        compile: ``torch.compile`` of the network.
        max_message_mb: with ``nvflare``: largest message that server and sites accept, in MB.
    """

    kind: Literal["local", "nvflare"] = "local"
    workers: int | Literal["auto"] = "auto"
    threads: int | Literal["auto"] = "auto"
    device: str = "auto"
    amp: bool = False
    channels_last: bool = False
    compile: bool = False
    max_message_mb: float = Field(2048, gt=0)

    @field_validator("device")
    @classmethod
    def _known(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError("is no device: use auto, cpu, cuda or cuda:N")
        return value

    @field_validator("workers", "threads")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1, or 'auto'")
        return value


class SitesSection(Section):
    """Real hospitals, each with its own images, in place of a cohort that is shared out; see docs/deployment.md.

    Args:
        names: the sites, by the names of their startup kits.
        task: ``multiclass`` or ``multilabel``.
        classes: class names in the order of the network's outputs; no site derives its own.
        held_out: share of its samples, whole patients, that each site keeps apart and measures the global model on,
            where its data mark no test set; 0 for no evaluation at the sites.
    """

    names: list[str] = Field(min_length=1)
    task: Literal["multiclass", "multilabel"] = "multiclass"
    classes: list[str] = Field(min_length=2)
    held_out: float = Field(0.2, ge=0, le=0.5)

    @field_validator("names", "classes")
    @classmethod
    def _different(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError("must be different names")
        return value


class EvaluationSection(Section):
    """What is measured after a round.

    Args:
        every: rounds between evaluations; the last rounds (``last``) are always evaluated.
        batch_size: images a forward pass.
        last: rounds averaged for the final table (the paper averages the last five).
        keep_predictions: rounds of per-sample predictions kept on disk (the newest; those of the best round besides).
    """

    every: int = Field(1, ge=1)
    batch_size: int = Field(64, ge=1)
    last: int = Field(5, ge=1)
    keep_predictions: int = Field(5, ge=0)


class Experiment(Section):
    """One experiment: cohort, condition, bundle, method, engine.

    Args:
        name: short name, part of the run's folder.
        cohort: whose images; with ``sites`` the server's own test images, where it has any.
        sites: real hospitals with their own images; only for ``medfed nvflare export``.
        condition: split, partition, corruption: the setting that all methods of a comparison share.
        bundle: a MONAI bundle: name of one that ships with medfed, or a folder.
        overrides: bundle keys to change, e.g. ``{batch_size: 16, "network_def::name": resnet18}``.
        method: name, or mapping with ``name`` and the method's own settings.
        rounds: communication rounds.
        seed: seeds training; the condition has its own seed, which defaults to this one.
        participation: who takes part in a round and how long the server waits.
        engine: where and how fast the federation runs.
        evaluation: what is measured after a round.
        tracking: the copy of the records in MLflow.
        output: folder of the runs.
        cache: folder of the image store; holds prepared images, so treat it like the images themselves.  By default
            the environment variable ``MEDFED_CACHE``, else ``~/.cache/medfed``.
    """

    name: str = Field("experiment", pattern=NAME)
    cohort: CohortSection | None = None
    sites: SitesSection | None = None
    condition: ConditionSpec = Field(default_factory=ConditionSpec)
    bundle: str
    overrides: dict[str, Any] = Field(default_factory=dict)
    method: dict[str, Any]
    rounds: int = Field(10, ge=1)
    seed: int = Field(0, ge=0)
    participation: Participation = Field(default_factory=Participation)
    engine: EngineSection = Field(default_factory=EngineSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    tracking: TrackingSettings = Field(default_factory=TrackingSettings)
    output: Path = Path("runs")
    cache: Path | None = None

    @field_validator("method", mode="before")
    @classmethod
    def _method(cls, value: Any) -> Any:
        value = {"name": value} if isinstance(value, str) else value
        if isinstance(value, Mapping) and not isinstance(value.get("name"), str):
            raise ValueError("needs a 'name'")
        return value

    @model_validator(mode="before")
    @classmethod
    def _seed(cls, data: Any) -> Any:
        if isinstance(data, dict):
            condition = data.get("condition")
            condition = {} if condition is None else condition
            if isinstance(condition, dict) and condition.get("seed") is None:
                data = {**data, "condition": {**condition, "seed": data.get("seed", 0)}}
        return data

    @model_validator(mode="after")
    def _whose(self) -> Experiment:
        if self.cohort is None and self.sites is None:
            raise PydanticCustomError("missing_cohort", "'cohort' is missing")
        if self.sites is not None and self.engine.kind != "nvflare":
            raise ValueError("sites are reached with engine.kind nvflare only")
        return self

    @model_validator(mode="after")
    def _waiting(self) -> Experiment:
        part = self.participation
        if self.engine.kind == "local" and (part.timeout is not None or part.grace is not None):
            # How long a simulated client takes says nothing of a hospital, and would make results irreproducible.
            raise ValueError(
                "participation.timeout and grace have no meaning for the local engine, which waits for every client; "
                "simulate clients that do not answer with participation.dropout"
            )
        return self

    @property
    def cache_dir(self) -> Path:
        """The folder of the image store."""
        given = self.cache or os.environ.get("MEDFED_CACHE") or Path.home() / ".cache" / "medfed"
        return Path(os.path.expanduser(given))

    def dump(self) -> str:
        """The resolved experiment as YAML."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def apply_sets(data: dict[str, Any], sets: Iterable[str]) -> dict[str, Any]:
    """Applies ``key.sub=value`` changes; values are read as YAML. Returns a new mapping; see :func:`apply_change`."""
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"'{text}' is not key=value.", where="--set", fix="Write e.g. --set method.q=1.0")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"the value of '{key}' is not valid YAML.", where="--set", fix="Quote it.") from None
        data = apply_change(data, key, parsed, f"--set {key}")
    return data


def apply_change(data: Mapping[str, Any], key: str, value: Any, where: str) -> dict[str, Any]:
    """A new mapping in which one key has another value.

    Bundle keys hold ``::`` and may hold dots; below ``overrides`` the rest of the path is one key.

    Args:
        data: the experiment as read from YAML.
        key: dotted name.
        value: its new value.
        where: named in messages.

    Raises:
        ConfigError: a part of the path is no section.
    """
    data = dict(data)
    parts = key.split(".", 1) if key.startswith("overrides.") else key.split(".")
    node = data
    for part in parts[:-1]:
        child = node.get(part)
        if part == "method" and isinstance(child, str):
            child = {"name": child}
        if child is not None and not isinstance(child, dict):
            raise ConfigError(f"'{part}' is not a section.", where=where, fix="Check the key.")
        node[part] = dict(child or {})
        node = node[part]
    node[parts[-1]] = value
    return data


def validate(data: Mapping[str, Any], where: str) -> Experiment:
    """Validates an experiment.

    Args:
        data: the mapping as read from YAML.
        where: named in messages.

    Raises:
        ConfigError: one line a fault, with the nearest known key for an unknown one.
    """
    try:
        return Experiment.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n  ".join(explain(error, Experiment)), where=where) from None


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One sentence a fault of a validation error, with the nearest known key for an unknown one."""
    lines = []
    for fault in error.errors():
        path = [str(p) for p in fault["loc"]]
        key = ".".join(path) or "the file"
        if fault["type"] == "missing_cohort":
            lines.append("'cohort' is missing.")
        elif fault["type"] == "extra_forbidden":
            known = _fields_at(model, path[:-1])
            lines.append(f"unknown key '{key}'. {nearest(path[-1], known)}")
        elif fault["type"] == "missing":
            lines.append(f"'{key}' is missing.")
        else:
            what = KINDS.get(fault["type"], fault["msg"].removeprefix("Value error, "))
            what = NAME_FAULT if fault.get("ctx", {}).get("pattern") == NAME else what
            lines.append(f"'{key}': {what} (given: {fault['input']!r:.80}).")
    return lines


def _fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        info = model.model_fields.get(part)
        if info is None:
            continue
        candidates = [info.annotation, *getattr(info.annotation, "__args__", ())]
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if models:
            model = models[0]
    return list(model.model_fields)


def load_experiment(path: Path, sets: Iterable[str] = ()) -> Experiment:
    """Reads and validates an experiment file; relative ``cohort.root`` and ``bundle`` folders start at the file."""
    return validate(rooted(apply_sets(read_yaml(path), sets), path.parent), str(path))


def rooted(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """An experiment whose relative ``cohort.root`` starts at a folder, where it is not found from here."""
    cohort = data.get("cohort")
    if isinstance(cohort, dict) and isinstance(cohort.get("root"), str):
        root = Path(os.path.expanduser(os.path.expandvars(cohort["root"])))
        if not root.is_absolute() and not root.exists() and (folder / root).exists():
            return {**data, "cohort": {**cohort, "root": str((folder / root).resolve())}}
    return data
