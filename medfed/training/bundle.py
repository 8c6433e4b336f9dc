"""A MONAI bundle as the description of what one client trains.

``configs/train.yaml`` holds everything; ``python -m monai.bundle run`` runs it alone, and :class:`TrainingBundle` hands
its parts to a federation.  Expressions (``$...``) in a bundle are code: run only bundles that you trust.  Nothing of a
bundle is evaluated before its overrides are checked.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import json
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from medfed.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch
    from torch import nn

    from medfed.data.store_build import Pipeline

SEPARATOR = "::"
REQUIRED = (
    *("task", "classes", "in_channels", "image_size", "network_def", "load", "prepare", "augment", "normalize"),
    *("batch_size", "learning_rate", "optimizer", "step"),
)
# What differs between machines and not between experiments.
LOCAL_KEYS = ("bundle_root", "dataset_dir", "model_dir", "output_dir", "device")
# Raised when decoding or preparation give other pixels for the same settings.
PIPELINE_VERSION = 2
_TASKS = ("multiclass", "multilabel")


def bundle_folders() -> list[Path]:
    """Where bundles that ship with medfed lie: beside the package in a checkout, else in the installation's share.

    The share of an installation is below the prefix of Python or, after ``pip install --user`` or ``--target``, below
    the user's base or beside the package.
    """
    beside = Path(__file__).parents[2]
    bases: list[str | Path] = [sysconfig.get_path("data"), sys.prefix, site.getuserbase(), beside]
    shares = dict.fromkeys(Path(base) / "share" / "medfed" / "bundles" for base in bases)
    return [beside / "bundles", *shares]


def find_bundle(root: str | Path) -> Path:
    """The folder of a bundle.

    Args:
        root: a folder with ``configs/train.yaml``, or the name of a bundle that ships with medfed.

    Raises:
        ConfigError: there is no such bundle.
    """
    given = Path(root).expanduser()
    for folder in (given, *(base / given for base in bundle_folders() if len(given.parts) == 1)):
        if (folder / "configs" / "train.yaml").is_file():
            return folder
    known = sorted({p.parents[1].name for base in bundle_folders() for p in base.glob("*/configs/train.yaml")})
    raise ConfigError(
        "there is no bundle with that name, and no folder with configs/train.yaml there.",
        where=str(root),
        fix=nearest(given.name, known),
    )


@dataclass
class TrainingBundle:
    """A bundle with its overrides applied; see :meth:`load`.

    Args:
        root: its folder.
        config: the content of ``configs/train.yaml`` with the overrides, not evaluated.
    """

    root: Path
    config: dict[str, Any]
    _parsers: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, root: str | Path, overrides: Mapping[str, Any] | None = None) -> TrainingBundle:
        """Reads a bundle and applies overrides.

        Args:
            root: folder, or name of a bundle that ships with medfed.
            overrides: values by key, with ``::`` between levels: ``{"batch_size": 16, "network_def::name":
                "resnet18"}``.  A key must exist, or be an argument of the component that it stands in.

        Raises:
            ConfigError: no such bundle, unreadable YAML, a required key missing, an unknown override, or a value of
                the wrong kind.
        """
        folder = find_bundle(root)
        config = read_config(folder / "configs" / "train.yaml")
        for key, value in (overrides or {}).items():
            _override(config, key, value, where=folder.name)
        config["bundle_root"] = folder.as_posix()
        validate_config(config, where=folder.name)
        bundle = cls(folder, config)
        for key in overrides or {}:
            bundle._check_argument(key)
        return bundle

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the network's outputs."""
        return tuple(str(c) for c in self.config["classes"])

    @property
    def task(self) -> str:
        """``multiclass`` or ``multilabel``."""
        return self.config["task"]

    @property
    def batch_size(self) -> int:
        """Images a training step."""
        return self.config["batch_size"]

    @property
    def learning_rate(self) -> float:
        """The optimiser's learning rate."""
        return float(self.config["learning_rate"])

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape ``(C, h, w)`` of a prepared image."""
        height, width = self.config["image_size"]
        return self.config["in_channels"], height, width

    @functools.cached_property
    def augment(self) -> Callable[[torch.Tensor, torch.Generator], torch.Tensor] | None:
        """``augment(images, generator) -> images``; None where the bundle has none."""
        return self._parsed("augment")

    @functools.cached_property
    def normalize(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """``normalize(images) -> images``."""
        return self._parsed("normalize")

    @functools.cached_property
    def step(self) -> Callable[[Any, Any], dict[str, Any]]:
        """The ``iteration_update`` of the bundle."""
        return self._parsed("step")

    def build_network(self, seed: int = 0) -> nn.Module:
        """A new network, initialised from ``seed``, whatever ``network_def`` says of a seed."""
        from medfed.training.rng import seeded

        make = self._parsed("network_def", {**self.config["network_def"], "_mode_": "callable"})
        with seeded(seed):
            return make(seed=seed) if "seed" in inspect.signature(make).parameters else make()

    def make_optimizer(
        self, params: Iterable[Any], learning_rate: float | None = None, weight_decay: float | None = None
    ) -> torch.optim.Optimizer:
        """A new optimiser, without memory of earlier steps.

        Args:
            params: the parameters.
            learning_rate: replaces the bundle's.
            weight_decay: replaces the bundle's.
        """
        if "optimizer" not in self._parsers:
            arguments = {k: v for k, v in self.config["optimizer"].items() if k != "params"}
            self._parsers["optimizer"] = self._parsed("optimizer", {**arguments, "_mode_": "callable"})
        wanted = {"lr": learning_rate, "weight_decay": weight_decay}
        return self._parsers["optimizer"](params, **{k: v for k, v in wanted.items() if v is not None})

    def preparation(self) -> list[str]:
        """Top-level keys that decide how files become prepared images."""
        return _closure(self.config, ("load", "prepare"))

    def pipeline(self) -> Pipeline:
        """How files become prepared images, with a key that changes when any setting of it does."""
        from medfed.data.store_build import Pipeline

        used = {key: self.config[key] for key in self.preparation()}
        return Pipeline(
            load=self._parsed("load"),
            prepare=self._parsed("prepare"),
            key=_digest({"version": PIPELINE_VERSION, "config": used}),
            shape=self.image_shape,
            dtype="uint8",
        )

    def resolved(self) -> dict[str, Any]:
        """The configuration with its overrides, as plain values, for the record."""
        return copy.deepcopy(self.config)

    def content_hash(self) -> str:
        """SHA-256 of the configuration, but for paths and device."""
        return _digest({k: v for k, v in self.config.items() if k not in LOCAL_KEYS})

    def _parsed(self, key: str, replacement: Any = None) -> Any:
        """The evaluated content of one key, with that key replaced first where a replacement is given."""
        from monai.bundle import ConfigParser

        config = copy.deepcopy(self.config)
        if replacement is not None:
            config[key] = replacement
        try:
            return ConfigParser(config).get_parsed_content(key)
        except ConfigError:
            raise
        except Exception as error:
            cause = error.__cause__ or error
            if isinstance(cause, ConfigError):
                raise cause from None
            raise ConfigError(
                f"'{key}' cannot be set up: {type(cause).__name__}: {cause}",
                where=self.root.name,
                fix="Check that key in configs/train.yaml and its overrides.",
            ) from error

    def _check_argument(self, key: str) -> None:
        """Refuses an override that names no argument of the component it stands in."""
        parent, _, name = key.rpartition(SEPARATOR)
        component = _at(self.config, parent) if parent else None
        if not isinstance(component, Mapping) or "_target_" not in component or name.startswith("_"):
            return
        from monai.bundle import ConfigComponent
        from monai.utils import optional_import

        target = ConfigComponent(component).resolve_module_name()
        if not isinstance(target, str) or target.startswith(("$", "@")):
            return
        module, _, attribute = target.rpartition(".")
        found, exists = optional_import(module, name=attribute)
        if not exists:
            raise ConfigError(
                f"there is no '{target}'.", where=f"{parent}{SEPARATOR}_target_", fix="Check its spelling."
            )
        parameters = inspect.signature(found).parameters
        if name not in parameters and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            raise ConfigError(f"'{name}' is no argument of {target}.", where=key, fix=nearest(name, parameters))


def read_config(path: Path) -> dict[str, Any]:
    """Reads a configuration file (YAML, of which JSON is a part); nothing in it is evaluated.

    Raises:
        ConfigError: it cannot be read, is not YAML, or is no mapping.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(f"not valid YAML{line}.", where=str(path), fix="Mend that line.") from None
    if not isinstance(config, dict):
        raise ConfigError("is not a mapping of keys to values.", where=str(path))
    return config


def _override(config: dict[str, Any], key: str, value: Any, where: str) -> None:
    parts = key.replace("#", SEPARATOR).split(SEPARATOR)
    node = _at(config, SEPARATOR.join(parts[:-1])) if len(parts) > 1 else config
    last = parts[-1]
    if isinstance(node, dict) and (last in node or "_target_" in node):
        node[last] = copy.deepcopy(value)
    elif isinstance(node, list) and last.isdigit() and int(last) < len(node):
        node[int(last)] = copy.deepcopy(value)
    else:
        fix = nearest(key, _keys(config))
        if not fix.startswith("Did you mean"):
            fix = nearest(key, config)
        raise ConfigError(f"there is no key '{key}' to override.", where=where, fix=fix)


def _at(config: Any, key: str) -> Any:
    for part in key.split(SEPARATOR):
        if isinstance(config, Mapping):
            config = config.get(part)
        elif isinstance(config, list) and part.isdigit() and int(part) < len(config):
            config = config[int(part)]
        else:
            return None
    return config


def _keys(config: Any, prefix: str = "") -> Iterator[str]:
    items = config.items() if isinstance(config, Mapping) else enumerate(config) if isinstance(config, list) else ()
    for name, value in items:
        yield f"{prefix}{name}"
        yield from _keys(value, f"{prefix}{name}{SEPARATOR}")


def validate_config(config: Mapping[str, Any], where: str) -> None:
    """Checks that the keys a federation uses are there and of the right kind; nothing is evaluated.

    Args:
        config: content of ``configs/train.yaml``.
        where: named in messages.

    Raises:
        ConfigError: a key is missing or holds a wrong value.
    """
    missing = [key for key in REQUIRED if key not in config]
    if missing:
        raise ConfigError(
            f"the bundle lacks {', '.join(missing)}.", where=where, fix="Add them to configs/train.yaml; see bundles/."
        )

    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value > 0

    def positive(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0

    def sides(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(map(whole, value))

    def names(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and len(value) > 0 and len(set(map(str, value))) == len(value)

    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "task": (lambda v: v in _TASKS, f"one of {', '.join(_TASKS)}"),
        "classes": (names, "a list of different names"),
        "in_channels": (whole, "a whole number of at least 1"),
        "image_size": (sides, "two whole numbers, [height, width]"),
        "batch_size": (whole, "a whole number of at least 1"),
        "learning_rate": (positive, "a positive number (in YAML write 3.0e-4, as 3e-4 is text)"),
    }
    for key, (holds, wanted) in rules.items():
        if not holds(config[key]):
            raise ConfigError(f"'{key}' must be {wanted}, got {config[key]!r}.", where=where)
    for key in ("network_def", "optimizer"):
        if not isinstance(config[key], Mapping) or "_target_" not in config[key]:
            raise ConfigError(f"'{key}' must be a component with a _target_.", where=where)


def _closure(config: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """Top-level keys that some keys refer to, directly or through others, and those keys themselves."""
    from monai.bundle import ReferenceResolver

    found: list[str] = []
    waiting = list(keys)
    while waiting:
        key = waiting.pop()
        if key in found or key not in config:
            continue
        found.append(key)
        references = ReferenceResolver.find_refs_in_config(config[key], id=key)
        waiting += [ref.split(SEPARATOR)[0] for ref in references]
    return sorted(found)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
