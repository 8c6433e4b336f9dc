"""Every key of the experiment file as Markdown tables, from the models that validate it.

``python -m medfed.reference docs/configuration.md`` writes them anew below the mark in that file.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

MARK = "<!-- Below: python -m medfed.reference docs/configuration.md -->"
_BOUNDS = (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most"))


def page(text: str) -> str:
    """A page whose part below :data:`MARK` is written anew.

    Raises:
        ValueError: the page has no mark.
    """
    head, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"the page has no line {MARK}")
    return f"{head}{MARK}\n\n{tables()}"


def tables() -> str:
    """All tables: the experiment file section by section, then readers, then methods."""
    from medfed.config import Experiment
    from medfed.data.readers import READERS, get_reader
    from medfed.methods.registry import METHODS, get_method

    parts = [table("The experiment file", Experiment)]
    parts += [table(f"`{path}`", model) for path, model in sections(Experiment)]
    for name in READERS:
        parts.append(table(f"`cohort` with `reader: {name}`", get_reader(name).Options))
    nested: dict[type[BaseModel], dict[str, set[str]]] = {}
    for name in METHODS:
        settings = get_method(name).settings
        parts.append(table(f"`method` with `name: {name}`", settings))
        for path, model in sections(settings, "method."):
            nested.setdefault(model, {}).setdefault(f"`{path}`", set()).add(name)
    for model, paths in nested.items():
        users = sorted(set().union(*paths.values()))
        parts.append(table(f"{' and '.join(paths)} of {', '.join(users)}", model))
    return "\n".join(parts)


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """The nested models of a model by dotted path, in order of the fields."""
    for name, info in model.model_fields.items():
        for part in _flat(info.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield f"{prefix}{name}", part
                yield from sections(part, f"{prefix}{name}.")


def table(title: str, model: type[BaseModel]) -> str:
    """One model as a Markdown table, with its heading."""
    meaning = meanings(model)
    lines = [f"## {title}", "", "| key | values | default | meaning |", "|---|---|---|---|"]
    for name, info in model.model_fields.items():
        cells = (f"`{name}`", values(info), default(info), meaning.get(name, ""))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """What the ``Args`` sections of a model and its bases say of each field, as Markdown."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        doc = inspect.cleandoc(base.__dict__.get("__doc__") or "") if issubclass(base, BaseModel) else ""
        _, _, args = doc.partition("\nArgs:\n")
        block = re.split(r"\n\S", args)[0]
        for entry in re.split(r"\n(?= {4}\w+: )", f"\n{block}")[1:]:
            name, _, text = entry.strip().partition(": ")
            found[name] = _markdown(" ".join(text.split()))
    return found


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", lambda m: f"`{m[1].rpartition('.')[2]}`", text)
    text = text.replace("``", "`")
    return re.sub(r"\b(None|True|False)\b", lambda m: {"None": "`null`"}.get(m[1], f"`{m[1].lower()}`"), text)


def values(info: FieldInfo) -> str:
    """What a field admits, in words."""
    bounds = [f"{word} {getattr(m, key):g}" for m in info.metadata for key, word in _BOUNDS if hasattr(m, key)]
    kinds = list(dict.fromkeys(_kind(part) for part in _flat(info.annotation)))
    return ", ".join([" or ".join(kinds), *bounds])


def _flat(annotation: Any) -> Iterator[Any]:
    """The members of a union, without ``Annotated``."""
    if get_origin(annotation) is Annotated:
        yield from _flat(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _flat(part)
    else:
        yield annotation


def _kind(part: Any) -> str:
    if get_origin(part) is Literal:
        return " or ".join(f"`{v}`" for v in get_args(part))
    if isinstance(part, type) and issubclass(part, BaseModel):
        return "section"
    kinds = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text", Path: "path"}
    containers = {dict: "mapping", list: "list", tuple: "list"}
    return kinds.get(part) or containers.get(get_origin(part)) or "`null`"


def default(info: FieldInfo) -> str:
    """The default of a field, as it would be written in YAML."""
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        changed = value.model_dump(exclude_defaults=True)
        return f"`{changed}`" if changed else "the section's defaults"
    words = {None: "`null`", True: "`true`", False: "`false`"}
    return words[value] if value is None or isinstance(value, bool) else f"`{value}`"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(page(target.read_text(encoding="utf-8")), encoding="utf-8")
