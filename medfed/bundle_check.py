"""Whether a bundle may be run here: read as text and compared with lists, never executed.

``medfed bundle check`` shows the result; a client of a federation calls :func:`check_bundle` before it lets anything
else touch a bundle, with the hash that the federation has agreed on.
"""

from __future__ import annotations

import ast
import configparser
import hashlib
import json
import locale
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from medfed.bundle_grammar import Fault, walk
from medfed.errors import ConfigError
from medfed.training.bundle import LOCAL_KEYS, find_bundle, read_config, validate_config
from medfed.yaml_file import repeated_keys

METADATA = "configs/metadata.json"
TRAIN = "configs/train.yaml"
SCHEMA = "bundle_metadata.json"
_CONFIGS = (".json", ".yaml", ".yml")
# What Python would import or unpickle from the bundle's folder, which MONAI puts on the search path, and what makes it
# an installed package: entry points are loaded and called, and tell of versions that are not there. Ends of names, not
# suffixes: ``.dist-info`` alone is a package too, and so is ``EGG-INFO`` where the folder's own name ends in ``.egg``.
_CODE = (
    *(".py", ".pyc", ".pyd", ".pyw", ".so", ".dll", ".dylib", ".pkl", ".pickle", ".pth", ".egg", ".whl", ".zip"),
    *(".dist-info", ".egg-info", "egg-info"),
)
_LOGGING_CLASSES = ("StreamHandler", "NullHandler", "logging.StreamHandler", "logging.NullHandler")
_LOGGING_TEXT = ("format", "datefmt")
# Whatever else a version of Python knows may be evaluated too, as ``defaults`` of a formatter is since 3.12.
_LOGGING_KEYS = frozenset(
    (
        *_LOGGING_TEXT,
        "keys",
        "level",
        "handlers",
        "formatter",
        "class",
        "args",
        "kwargs",
        "qualname",
        "propagate",
        "style",
    )
)
# Of all configurations together: a generous bound for what is written by hand, and what is read before it is refused.
_MOST_BYTES = 250_000


@dataclass(frozen=True)
class Checked:
    """A bundle that holds nothing it may not hold.

    Args:
        folder: the bundle.
        hash: sha256 over its configuration files.
        version: of the bundle, by its metadata.
        files: what the hash covers, below the folder.
    """

    folder: Path
    hash: str
    version: str
    files: tuple[str, ...]


class BundleRefused(ConfigError):
    """A bundle that must not be run here.

    Args:
        folder: the bundle.
        faults: everything that was found.
    """

    def __init__(self, folder: Path, faults: Collection[Fault]):
        self.faults = tuple(faults)
        lines = [f"\n  {fault}" for fault in self.faults[:20]]
        more = [f"\n  and {len(self.faults) - 20} more"] if len(self.faults) > 20 else []
        super().__init__(f"the bundle is refused.{''.join([*lines, *more])}", where=folder.name)


def check_bundle(
    folder: str | Path,
    expected_hash: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    allow: Collection[str] = (),
) -> Checked:
    """Refuses a bundle that holds code, or is not the one that was agreed on.

    Args:
        folder: the bundle, or the name of one that ships with medfed.
        expected_hash: the hash agreed on, as :func:`bundle_hash` gives it; not compared where None.
        overrides: values by key as in an experiment file; held to the same rules.
        allow: further full names that a ``_target_`` may have, which this site trusts.

    Raises:
        BundleRefused: with every fault found.
        ConfigError: there is no such bundle.
    """
    root = find_bundle(folder)
    # What cannot be read safely (a link to a device, a pipe, gigabytes) is not read at all.
    if file_faults := list(_file_faults(root)):
        raise BundleRefused(root, file_faults)
    faults = list(_faults(root, allow))
    faults += walk(dict(overrides or {}), "overrides", allow, paths=(*LOCAL_KEYS, "weights"))
    found = bundle_hash(root)
    if expected_hash is not None and not re.fullmatch("[0-9a-f]{64}", expected_hash.lower()):
        faults.append(Fault("hash", "the hash agreed on is none of 64 hexadecimal digits.", "Give all of it."))
    elif expected_hash is not None and found != expected_hash.lower():
        what = f"it is {found[:12]}, but {expected_hash[:12]} was agreed on."
        faults.append(Fault("hash", what, "Install the same version of the bundle as the others, unchanged."))
    if faults:
        raise BundleRefused(root, faults)
    return Checked(root, found, str(_metadata(root)["version"]), tuple(_below(root, f) for f in config_files(root)))


def config_files(root: Path) -> list[Path]:
    """Every file under ``configs/``, sorted."""
    return sorted(p for p in (root / "configs").rglob("*") if p.is_file())


def bundle_hash(root: Path) -> str:
    """sha256 over names and content of the configuration files, the same on every system.

    Weights, documentation and results are not part of it.
    """
    total = hashlib.sha256()
    for path in config_files(root):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        total.update(f"{_below(root, path)}\0{len(content)}\0".encode(errors="surrogateescape") + content)
    return total.hexdigest()


def _below(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def _file_faults(root: Path) -> Iterator[Fault]:
    """Links, code and what is no file, anywhere in the bundle; nothing is opened."""
    closed: list[OSError] = []
    for folder, folders, files in os.walk(root, onerror=closed.append):
        for name in sorted((*folders, *files)):
            path = Path(folder, name)
            if path.is_symlink():
                yield Fault(_below(root, path), "it is a symbolic link.", "Put the file itself there.")
            elif not path.is_file() and not path.is_dir():
                yield Fault(_below(root, path), "it is neither a file nor a folder.", "Remove it.")
            elif name.lower().endswith(_CODE):
                yield Fault(_below(root, path), "it is code or may hold code.", "Install code as a package instead.")
    for error in closed:
        yield Fault(_below(root, Path(error.filename)), "it cannot be listed.", "Let this user read it.")
    configs = config_files(root)
    if sum(path.stat().st_size for path in configs) > _MOST_BYTES:
        what = f"its files are larger than {_MOST_BYTES} bytes together."
        yield Fault("configs", what, "Configurations are short text; put nothing else there.")
    for path in configs:
        if not os.access(path, os.R_OK):
            yield Fault(_below(root, path), "it cannot be read.", "Let this user read it.")


def _faults(root: Path, allow: Collection[str]) -> Iterator[Fault]:
    """What the configurations hold."""
    for path in config_files(root):
        name = _below(root, path)
        if _swallows(path.read_bytes()):
            what = f"in the encoding of this machine, {locale.getpreferredencoding(False)}, it is another text."
            yield Fault(name, what, "Write it in ASCII, or set PYTHONUTF8=1.")
        if path.suffix.lower() in _CONFIGS:
            yield from _config_faults(path, name, allow)
        elif path.name == "logging.conf":
            yield from _logging_faults(path, name)
        else:
            yield Fault(name, "it is no configuration.", f"Keep {', '.join(_CONFIGS)} and logging.conf there.")
    yield from _metadata_faults(root)


def _swallows(content: bytes) -> bool:
    """Whether MONAI and Python, which read in the encoding of the machine, lose a quote or a backslash to a letter."""
    here = content.decode(locale.getpreferredencoding(False), errors="replace")
    return here.encode("ascii", errors="ignore") != bytes(byte for byte in content if byte < 128)


def _config_faults(path: Path, name: str, allow: Collection[str]) -> Iterator[Fault]:
    try:
        config, repeated = _read_json(path) if path.suffix.lower() == ".json" else _read_yaml(path)
    except (ConfigError, yaml.YAMLError, ValueError, RecursionError) as error:
        yield Fault(name, error.what if isinstance(error, ConfigError) else "it cannot be read.", "Mend that file.")
        return
    if repeated:
        yield Fault(name, f"the key '{repeated[0]}' stands there twice.", "Keep one of them.")
    yield from walk(config, name, allow, paths=None if name == METADATA else ())
    if name == TRAIN:
        try:
            validate_config(config, where=name)
        except ConfigError as error:
            yield Fault(name, error.what, error.fix or "")


def _read_json(path: Path) -> tuple[Any, list[str]]:
    """The content, and the keys that one mapping holds twice: parsers differ in which of the two they take."""
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated.extend(_repeated(key for key, _ in items))
        return dict(items)

    return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=pairs), repeated


def _read_yaml(path: Path) -> tuple[Any, list[str]]:
    """As :func:`_read_json`."""
    return read_config(path), [key for key, _ in repeated_keys(path.read_text(encoding="utf-8"))]


def _repeated(keys: Iterable[str]) -> list[str]:
    return [key for key, times in Counter(keys).items() if times > 1]


def _logging_faults(path: Path, name: str) -> Iterator[Fault]:
    """``logging.config`` evaluates ``class`` and ``args`` of a handler and imports classes of formatters.

    It does so after one key's text has been put into another's (``%(name)s``).
    """
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except (configparser.Error, UnicodeDecodeError):
        yield Fault(name, "it is no logging configuration.", "Mend that file, or leave it out.")
        return
    for section in (parser.default_section, *parser.sections()):
        for key, value in parser[section].items():
            if key == "class" and value not in _LOGGING_CLASSES:
                yield Fault(f"{name}: {section}", f"the class {value!r} is not allowed.", "Use StreamHandler.")
            if key not in _LOGGING_KEYS:
                yield Fault(f"{name}: {section}", f"the key {key!r} is not allowed.", "Leave it out.")
            elif "%" in value and key not in _LOGGING_TEXT:
                # %(name)s becomes the text of another key before it is evaluated: what is read here is not what runs.
                yield Fault(f"{name}: {section}", f"{key} refers to another key.", "Write it out.")
            if key in ("args", "kwargs") and not _literal(value):
                yield Fault(f"{name}: {section}", f"{key} is no plain value.", "Use (sys.stdout,).")


def _literal(text: str) -> bool:
    try:
        ast.literal_eval(re.sub(r"\bsys\.(?:stdout|stderr)\b", "0", text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _metadata(root: Path) -> dict[str, Any]:
    return json.loads((root / METADATA).read_text(encoding="utf-8"))


def metadata_schema() -> dict[str, Any]:
    """The JSON schema that ``metadata.json`` keeps to."""
    return json.loads(resources.files("medfed").joinpath("schemas", SCHEMA).read_text(encoding="utf-8"))


def _metadata_faults(root: Path) -> Iterator[Fault]:
    """Keys and versions."""
    try:
        metadata = _metadata(root)
    except OSError:
        yield Fault(METADATA, "it is missing.", "Add it; see bundles/.")
        return
    except (ValueError, RecursionError):
        yield Fault(METADATA, "it is not JSON.", "Mend that file.")
        return
    if not isinstance(metadata, dict):
        yield Fault(METADATA, "it is not a mapping of keys to values.")
        return
    missing = [key for key in metadata_schema()["required"] if key not in metadata]
    if missing:
        yield Fault(METADATA, f"it lacks {', '.join(missing)}.", "Add them; see bundles/.")
        return
    changelog = metadata["changelog"]
    if not isinstance(changelog, dict) or str(metadata["version"]) not in changelog:
        yield Fault(METADATA, f"version {metadata['version']} is not in the changelog.", "Add it there.")
    packages = metadata.get("required_packages_version") or {}
    if not isinstance(packages, dict):
        yield Fault(METADATA, "required_packages_version is no mapping of packages to versions.", "See bundles/.")
        return
    wanted = {
        "monai": metadata["monai_version"],
        "torch": metadata["pytorch_version"],
        "numpy": metadata["numpy_version"],
    }
    for package, least in {**wanted, **packages}.items():
        if isinstance(least, str) and re.match(r"\d", least):
            yield from _version_fault(str(package), least)
        else:
            yield Fault(METADATA, f"{least!r} is no version of {package}.", 'E.g. "1.6.1".')


def _version_fault(package: str, least: str) -> Iterator[Fault]:
    try:
        have = version(package)
    except (PackageNotFoundError, ValueError):
        yield Fault(METADATA, f"it needs {package} {least}, which is not installed.", f"pip install {package}.")
        return
    if _numbers(have) < _numbers(least):
        yield Fault(METADATA, f"it needs {package} {least}, here is {have}.", f"pip install --upgrade {package}.")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d{1,9}", text.partition("+")[0])[:3])
