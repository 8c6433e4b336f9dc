"""The grid file: methods x conditions x seeds of one base experiment, validated before anything starts."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, StrictInt, ValidationError, field_validator

from medfed.checks import check_method
from medfed.config import NAME, Experiment, Section, apply_change, apply_sets, explain, rooted, validate
from medfed.errors import ConfigError, DataError, MedfedError, nearest
from medfed.experiment import kind_of
from medfed.methods.registry import resolve_method
from medfed.report.metrics import NAMES
from medfed.rundir import META, RunFolder
from medfed.yaml_file import read_yaml

LABEL = "label"
WHERE_NOT_WHAT = (
    ("name",),
    ("output",),
    ("cache",),
    ("tracking",),
    ("engine", "device"),
    ("engine", "workers"),
    ("engine", "threads"),
    ("engine", "max_message_mb"),
    ("evaluation", "keep_predictions"),
)
"""Keys of an experiment that say where and how it runs; two cells that differ in these alone are the same."""


class GridFile(Section):
    """A grid: every method on every condition with every seed.

    Args:
        name: short name; the grid's folder below ``output``.
        base: the experiment that all cells share: a file, relative to the grid's, or the experiment itself.  Its
            method and seed do not count.
        changes: keys of the base to change in all cells, by dotted name.
        methods: names, or sections as an experiment's ``method``, each with an optional ``label``.
        conditions: a list of changes by dotted name, each with an optional ``label``; or axes, which are multiplied:
            by dotted name a list of values, by any other name a list of such changes.
        seeds: seeds of the training; also of the condition where the base does not set ``condition.seed``.
        devices: devices that cells run on side by side, e.g. ``[cuda:0, cuda:1]``; without it the base's
            ``engine.device``.
        baseline: label of the method that differences are taken against; by default the first.
        metrics: metrics of the tables; by default those of ``medfed compare``.
        output: folder of the grid's folder.
    """

    name: str = Field(pattern=NAME)
    base: Path | dict[str, Any]
    changes: dict[str, Any] = Field(default_factory=dict)
    methods: list[str | dict[str, Any]] = Field(min_length=1)
    conditions: list[dict[str, Any]] | dict[str, list[Any]] = Field(default_factory=list)
    seeds: list[StrictInt] = Field(default=[0], min_length=1)
    devices: list[str] = Field(default_factory=list)
    baseline: str | None = None
    metrics: list[str] | None = None
    output: Path = Path("runs")

    @field_validator("base", mode="before")
    @classmethod
    def _file_or_section(cls, value: Any) -> Any:
        if not isinstance(value, (str, Path, Mapping)):
            raise ValueError("should be the path of an experiment file, or the experiment itself")
        return value

    @field_validator("methods", mode="before")
    @classmethod
    def _names_or_sections(cls, value: Any) -> Any:
        if isinstance(value, list) and (bad := [v for v in value if not isinstance(v, (str, Mapping))]):
            raise ValueError(f"should be names or sections of methods, which {bad[0]!r} is not")
        return value

    @field_validator("conditions", mode="before")
    @classmethod
    def _changes_or_axes(cls, value: Any) -> Any:
        axes = isinstance(value, Mapping)
        if not axes and not isinstance(value, list):
            raise ValueError("should be a list of changes, or axes by name")
        parts = value.values() if axes else value
        if bad := [part for part in parts if not isinstance(part, list if axes else Mapping)]:
            raise ValueError(
                f"{bad[0]!r} should be a list of values"
                if axes
                else f"{bad[0]!r} should be a section of keys and values to change"
            )
        return value

    @field_validator("metrics")
    @classmethod
    def _recorded(cls, value: list[str] | None) -> list[str] | None:
        if bad := [name for name in value or () if name not in NAMES]:
            raise ValueError(f"'{bad[0]}' is no metric. {nearest(bad[0], NAMES)}")
        return value

    @field_validator("seeds")
    @classmethod
    def _different(cls, value: list[int]) -> list[int]:
        if len(set(value)) < len(value):
            raise ValueError("a seed is given twice")
        return value

    @field_validator("devices")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        if bad := [d for d in value if not re.fullmatch(r"cpu|cuda(:\d+)?", d)]:
            raise ValueError(f"'{bad[0]}' is no device: use cpu, cuda or cuda:N")
        return value


@dataclass(frozen=True)
class Cell:
    """One run of a grid.

    Args:
        condition: label of its condition.
        method: label of its method.
        seed: its seed.
        experiment: its resolved experiment.
        folder: the folder of its run, which is named after the digest of the experiment.
    """

    condition: str
    method: str
    seed: int
    experiment: Experiment
    folder: Path

    @property
    def name(self) -> str:
        """For people."""
        return " · ".join(filter(None, (self.condition, self.method, f"seed {self.seed}")))

    def tags(self) -> dict[str, str]:
        """What tells a cell from the others of its grid, for ``run.json`` and from there for MLflow."""
        return {"name": self.folder.parent.name, "condition": self.condition, "method": self.method}

    @property
    def group(self) -> tuple[str, int]:
        """Cells of one group differ in the method alone and share their condition."""
        return self.condition, self.seed


@dataclass(frozen=True)
class Grid:
    """A validated grid.

    Args:
        file: the grid file.
        folder: the grid's folder.
        cells: all cells; those of a group stand together.
        axes: dotted names of the numbers along which conditions lie.
    """

    file: GridFile
    folder: Path
    cells: tuple[Cell, ...]
    axes: tuple[str, ...]


def load_grid(path: Path, sets: Iterable[str] = ()) -> Grid:
    """Reads a grid file and validates every cell of it: experiment, method and settings.

    Args:
        path: the grid file.
        sets: ``key=value`` changes of the base experiment; ``output`` is the grid's.

    Raises:
        ConfigError: what is wrong and in which cell.
        DataError: a cohort's folder is not there.
    """
    data = read_yaml(path)
    try:
        file = GridFile.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n  ".join(explain(error, GridFile)), where=str(path)) from None
    experiment = _base(file, path)
    experiment["output"] = str(file.output)
    _refuse_own((*file.changes, *(text.split("=")[0].strip() for text in sets)), str(path))
    for key, value in file.changes.items():
        experiment = apply_change(experiment, key, value, f"{path}: changes")
    # What is asked for on the command line goes before what the files say.
    experiment = apply_sets(experiment, sets)
    # The runs of a grid stand in one MLflow experiment, where they can be compared.
    tracking = experiment.get("tracking") or {}
    if isinstance(tracking, Mapping):
        experiment["tracking"] = {"experiment": file.name, **tracking}
    folder = Path(str(experiment["output"])) / file.name
    conditions, axes = expand(file.conditions, str(path))
    methods = _methods(file.methods, str(path))
    if file.baseline is not None and file.baseline not in methods:
        raise ConfigError(
            f"'{file.baseline}' is no method here.", where=f"{path}: baseline", fix=nearest(file.baseline, methods)
        )
    cells = []
    for (condition, changes), seed in itertools.product(conditions.items(), file.seeds):
        here = experiment
        for key, value in changes.items():
            here = apply_change(here, key, value, f"{path}: conditions")
        for method, section in methods.items():
            where = f"{path}: " + ", ".join(filter(None, (condition, method)))
            whole = {**here, "method": section, "seed": seed, "output": str(folder)}
            try:
                cells.append(_cell(condition, method, validate(whole, where), folder))
            except ConfigError as error:
                raise ConfigError(str(error).removeprefix(f"{where}: "), where=where) from None
    _check_different(cells, str(path))
    return Grid(file, folder, tuple(cells), axes)


def _refuse_own(keys: Iterable[str], where: str) -> None:
    """Refuses changes of what a grid has keys of its own for: they would be overwritten without a word."""
    for key in keys:
        if key.split(".")[0] in ("method", "seed"):
            raise ConfigError(f"'{key}' cannot be changed in a grid.", where=where, fix="Use 'methods' and 'seeds'.")


def _base(file: GridFile, path: Path) -> dict[str, Any]:
    if isinstance(file.base, Path):
        source = path.parent / file.base
        return rooted(read_yaml(source), source.parent)
    return rooted(file.base, path.parent)


def _methods(given: Sequence[str | Mapping[str, Any]], where: str) -> dict[str, dict[str, Any]]:
    """Sections by label."""
    found: dict[str, dict[str, Any]] = {}
    for entry in given:
        section = {"name": entry} if isinstance(entry, str) else dict(entry)
        label = _label(section.pop(LABEL, section.get("name")), where)
        if label in found:
            raise ConfigError(f"two methods are called '{label}'.", where=where, fix="Give each a label of its own.")
        found[label] = section
    return found


def _label(given: Any, where: str) -> str:
    """A label as text; one that says nothing is refused."""
    if given is None or not str(given).strip():
        raise ConfigError("a label is empty.", where=where, fix="Write one, or leave the key 'label' out.")
    return str(given)


def expand(
    conditions: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]], where: str
) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Changes by label of the condition, and the keys whose values are numbers that differ.

    Args:
        conditions: a list of changes, or axes to be multiplied; see :class:`GridFile`.
        where: named in messages.

    Raises:
        ConfigError: an empty axis, an axis of names without keys, or a label given twice.
    """
    if isinstance(conditions, Mapping):
        axes = [_axis(name, values, where) for name, values in conditions.items()]
        _check_apart(axes, list(conditions), where)
        product = [
            (", ".join(label for label, _ in parts), {k: v for _, changes in parts for k, v in changes.items()})
            for parts in itertools.product(*axes)
        ]
    else:
        product = [_change(entry, where) for entry in conditions] or [("", {})]
    found: dict[str, dict[str, Any]] = {}
    for label, changes in product:
        if label in found:
            raise ConfigError(f"two conditions are called '{label}'.", where=where, fix="Give each a label of its own.")
        if taken := sorted({"method", "seed", "output"} & {k.split(".")[0] for k in changes}):
            raise ConfigError(f"a condition cannot change '{taken[0]}'.", where=where, fix="Use methods and seeds.")
        found[label] = changes
    keys = dict.fromkeys(k for changes in found.values() for k in changes)
    numbers = {k: {c[k] for c in found.values() if k in c and _is_number(c[k])} for k in keys}
    others = {k for k in keys for c in found.values() if k in c and c[k] is not None and not _is_number(c[k])}
    return found, tuple(k for k, values in numbers.items() if len(values) > 1 and k not in others)


def _axis(name: str, values: Sequence[Any], where: str) -> list[tuple[str, dict[str, Any]]]:
    if not values:
        raise ConfigError(f"the axis '{name}' has no value.", where=where, fix="Give it a list of values.")
    plain = name.split(".")[-1].split("::")[-1].replace("_", " ")
    found = []
    for value in values:
        if isinstance(value, Mapping) and (LABEL in value or any("." in str(k) for k in value)):
            found.append(_change(value, where))
        else:
            found.append((f"{plain} {value}" if _is_number(value) else str(value), {name: value}))
    return found


def _check_apart(axes: Sequence[Sequence[tuple[str, Mapping[str, Any]]]], names: Sequence[str], where: str) -> None:
    """Refuses two axes of which the later one overwrites what the earlier one sets."""
    earlier: dict[str, str] = {}
    for axis, name in zip(axes, names):
        own = {key for _, changes in axis for key in changes}
        for key, before in itertools.product(sorted(own), earlier):
            if key == before or before.startswith(f"{key}."):
                raise ConfigError(
                    f"the axis '{name}' changes '{key}' and so overwrites the axis '{earlier[before]}'.",
                    where=f"{where}: conditions",
                    fix="Let each axis change keys of its own.",
                )
        earlier |= dict.fromkeys(own, name)


def _change(entry: Mapping[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    changes = {str(k): v for k, v in entry.items() if k != LABEL}
    default = ", ".join(f"{k.split('.')[-1].replace('_', ' ')} {v}" for k, v in changes.items())
    return (_label(entry[LABEL], where) if LABEL in entry else default), changes


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(condition: str, method: str, experiment: Experiment, folder: Path) -> Cell:
    """A cell whose method is there, has valid settings and is admitted, and whose images exist."""
    found, settings = resolve_method(experiment.method)
    settings.check(experiment.rounds)
    if experiment.cohort is None:
        raise ConfigError("names no cohort: a grid runs on images that are here.")
    check_method(experiment, found, kind_of(experiment.cohort))
    if not experiment.cohort.root.exists():
        raise DataError(
            "there is no such folder or file.",
            where=str(experiment.cohort.root),
            fix="Set cohort.root, e.g. with --set cohort.root=/path/to/data.",
        )
    key = digest(experiment)[:10]
    words = [slug(condition), slug(method), f"s{experiment.seed}", key]
    own = folder / "-".join(filter(None, words))
    return Cell(condition, method, experiment.seed, experiment, _earlier(own, "-".join(words[2:])) or own)


def _earlier(own: Path, end: str) -> Path | None:
    """The folder of the same experiment under another label, where there is no run under this one.

    A label is nothing but a label. What is not named as the run in it would have been named is no folder of a cell.

    Args:
        own: the folder under this label.
        end: seed and digest, with which the names of all these folders end.
    """
    if (own / META).is_file():
        return None
    found = []
    for folder in sorted(own.parent.glob(f"*{end}")):
        try:
            meta = RunFolder(folder).meta()
            named = "-".join(filter(None, (slug(meta["grid"]["condition"]), slug(meta["grid"]["method"]), end)))
        except (MedfedError, KeyError, TypeError):
            continue
        if folder.name == named:
            found.append((meta["status"] != "completed", folder))
    return min(found)[1] if found else None


def slug(text: str) -> str:
    """Text as a part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.=_]+", "_", text).strip("_.")[:48]


def digest(experiment: Experiment) -> str:
    """sha256 of what an experiment computes, whatever machine, folder and device it runs on.

    All settings of the method count, also those left at their defaults: a default that is another one in a later
    version makes another cell.
    """
    plain = experiment.model_dump(mode="json")
    method, settings = resolve_method(experiment.method)
    plain["method"] = {"name": method.name, **settings.model_dump(mode="json")}
    for *path, last in WHERE_NOT_WHAT:
        node = plain
        for part in path:
            node = node[part]
        node.pop(last, None)
    return hashlib.sha256(json.dumps(plain, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _check_different(cells: Sequence[Cell], where: str) -> None:
    seen: dict[str, Cell] = {}
    for cell in cells:
        key = digest(cell.experiment)
        if key in seen:
            raise ConfigError(
                f"'{seen[key].name}' and '{cell.name}' are the same experiment.",
                where=where,
                fix="Leave one out, or change what was to differ.",
            )
        seen[key] = cell
