"""Reads a Dockerfile: instructions of each stage, and what a target inherits."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPOSE = ROOT / "docker" / "compose.yaml"


@dataclass
class Stage:
    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [value for key, value in self.instructions if key == word]


def stages(text: str) -> dict[str, Stage]:
    """Every stage by its name, in order."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    found: dict[str, Stage] = {}
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        word, _, value = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = value.partition(" AS ")
            found[name.strip()] = stage = Stage(name.strip(), base.strip())
        else:
            stage.instructions.append((word, value.strip()))
    return found


def lineage(name: str, known: dict[str, Stage]) -> list[Stage]:
    """The stage and the stages that it is built on, the first of them first."""
    chain = [known[name]]
    while chain[0].base in known:
        chain.insert(0, known[chain[0].base])
    return chain


def last(name: str, word: str, known: dict[str, Stage]) -> str | None:
    """The value of an instruction that is in force in a target."""
    values = [value for stage in lineage(name, known) for value in stage.all(word)]
    return values[-1] if values else None


def environment_of(name: str, known: dict[str, Stage]) -> dict[str, str]:
    values = [value for stage in lineage(name, known) for value in stage.all("ENV")]
    return dict(pair.split("=", 1) for value in values for pair in shlex.split(value))


def entry_point(name: str, known: dict[str, Stage]) -> list[str]:
    return json.loads(last(name, "ENTRYPOINT", known) or "[]")


def health_check(name: str, known: dict[str, Stage]) -> list[str]:
    value = last(name, "HEALTHCHECK", known) or ""
    return json.loads(re.search(r"CMD (\[.*\])", value)[1])  # type: ignore[index]


STAGES = stages(DOCKERFILE.read_text(encoding="utf-8"))
TARGETS = ("server", "site", "mlflow")
