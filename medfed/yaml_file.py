"""YAML files as people write them: a mapping in which every key stands once, or one message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from medfed.errors import ConfigError

MERGE = "tag:yaml.org,2002:merge"
"""Tag of the key ``<<``, which may stand in a mapping more than once."""


def repeated_keys(text: str) -> list[tuple[str, int]]:
    """Keys that a YAML text holds twice in one mapping, with the line of the second one; parsers take either.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    found = []
    waiting = [yaml.compose(text, Loader=yaml.SafeLoader)]
    visited: set[int] = set()  # an anchor may stand in many places, also within itself
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in visited:
            continue
        visited.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                    if key.value in keys:
                        found.append((key.value, key.start_mark.line + 1))
                    keys.add(key.value)
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
    return found


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML mapping.

    Raises:
        ConfigError: the file is missing, is not YAML, holds a key twice or is not a mapping; says the line.
    """
    if not path.is_file():
        raise ConfigError("there is no such file.", where=str(path), fix="Give the path of a YAML file.")
    try:
        text = path.read_text(encoding="utf-8")
        data, repeated = yaml.safe_load(text), repeated_keys(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise ConfigError(f"not valid YAML{line}: {problem}.", where=str(path), fix="Mend that line.") from None
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text.", where=str(path), fix="Save it as UTF-8.") from None
    if not isinstance(data, dict):
        raise ConfigError("is not a mapping of keys to values.", where=str(path), fix="See configs/ for examples.")
    if repeated:
        key, at = repeated[0]
        raise ConfigError(f"the key '{key}' stands there twice, again in line {at}.", where=str(path), fix="Keep one.")
    return data
