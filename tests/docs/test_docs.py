"""The documentation says what is: keys, commands, links, corrections, and an example that runs."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel

from medfed import reference
from medfed.cli import app
from medfed.config import Experiment, apply_sets, validate
from medfed.data import corruption
from medfed.data.readers import READERS, get_reader
from medfed.errors import ConfigError
from medfed.methods import registry

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


def test_keys_of_the_experiment_file_are_documented_as_they_are():
    page = ROOT / "docs" / "configuration.md"
    text = page.read_text(encoding="utf-8")
    assert text == reference.page(text), "run: python -m medfed.reference docs/configuration.md"


def every_model() -> list[type[BaseModel]]:
    settings = [registry.get_method(m).settings for m in registry.METHODS]
    roots = [Experiment, *settings, *(get_reader(r).Options for r in READERS)]
    return [*roots, *(nested for root in roots for _, nested in reference.sections(root))]


@pytest.mark.parametrize("model", dict.fromkeys(every_model()), ids=lambda m: f"{m.__module__}.{m.__name__}")
def test_every_key_has_a_meaning_and_every_meaning_a_key(model):
    meaning = reference.meanings(model)
    assert set(model.model_fields) <= set(meaning)
    assert all(text.strip() for text in meaning.values())
    assert set(meaning) - set(model.model_fields) <= {"options"}  # of the cohort: every further key


def test_nested_sections_are_found():
    paths = [path for path, _ in reference.sections(Experiment)]
    assert {"cohort", "condition", "condition.partition", "condition.corruption", "tracking"} <= set(paths)


def test_values_and_defaults_as_written_in_yaml():
    class Sample(BaseModel):
        """A sample.

        Args:
            mode: how; None or
                ``fast``.
        """

        mode: str | None = None

    lines = reference.table("t", Sample).splitlines()
    assert lines[-1] == "| `mode` | text or `null` | `null` | how; `null` or `fast`. |"


def test_kinds_of_corruption_are_listed():
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    line = next(x for x in text.splitlines() if x.startswith("| `kind` | text | `gaussian_noise`"))
    assert [k for k in corruption.KINDS if f"`{k}`" not in line] == []


def test_every_correction_of_the_decoders_is_explained():
    found = set()
    for path in (ROOT / "medfed" / "data").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        found |= set(re.findall(r'corrections\.append\(\s*"(\w+)"', source))
        found |= set(re.findall(r'self\.correct\(d, key, "(\w+)"', source))
    assert len(found) > 20
    table = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "data.md").read_text(encoding="utf-8")))
    assert sorted(found - table) == []


def commands(page: Path) -> list[str]:
    """Every ``medfed ...`` line of the code blocks of a page."""
    lines = [x for _, body in BLOCK.findall(page.read_text(encoding="utf-8")) for x in body.splitlines()]
    return [x.partition(" #")[0].strip() for x in lines if x.startswith("medfed ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_are_accepted_by_the_command_line(page):
    group = typer.main.get_command(app)
    for line in commands(page):
        words = shlex.split(line)[1:]
        command = group.commands[words[0]]  # type: ignore[attr-defined]
        command.make_context(words[0], words[1:])
        sets = [words[k + 1] for k, word in enumerate(words) if word == "--set"]
        if words[0] == "run" and sets:
            base = {"cohort": {"reader": "isic", "root": "."}, "bundle": "b", "method": "fedism"}
            method = [f"method={words[k + 1]}" for k, word in enumerate(words) if word == "--method"][:1]
            registry.resolve_method(validate(apply_sets(base, [*method, *sets]), line).method)


def test_wrong_commands_would_be_noticed():
    command = typer.main.get_command(app).commands["compare"]  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="No such option"):
        command.make_context("compare", ["--pool", "run"])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_yaml_is_valid(page):
    for text in blocks(page, "yaml"):
        data = yaml.safe_load(text)
        if "cohort" in data and "bundle" in data:
            registry.resolve_method(validate(data, page.name).method)
        elif "overrides" in data:
            known = [load(data["overrides"], name) for name in ("rsna_ich_ct_classification",)]
            assert known


def load(overrides: dict[str, Any], name: str) -> Any:
    from medfed.training.bundle import TrainingBundle

    return TrainingBundle.load(name, overrides)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_lines_are_short_and_no_machine_is_named(page):
    text = page.read_text(encoding="utf-8")
    prose = [x for x in text.splitlines() if not x.startswith(("|", "    ", "!["))]
    assert max(map(len, prose)) <= 130
    absolute = re.findall(r"(?<![\w.:/~}>])/[a-z]+/[\w./-]*", text)
    inside = ("/data/", "/jobs/", "/kit/", "/mlflow/")  # where containers have their mounts: docker/
    assert [p for p in absolute if not p.startswith(("/dev/", "/path/", *inside))] == []


@pytest.fixture
def example(tmp_path, monkeypatch) -> str:
    """The method of writing-a-method.md, registered as the page says."""
    code, line = blocks(ROOT / "docs" / "writing-a-method.md", "python")
    (tmp_path / "lossavg.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    name, place = re.findall(r'"(\w+)": "medfed\.methods\.([\w:]+)"', line)[0]
    monkeypatch.setitem(registry.METHODS, name, place)
    importlib.invalidate_caches()
    yield name
    sys.modules.pop("lossavg", None)


def test_example_method_runs_and_weights_by_loss(example, tmp_path):
    from medfed.data.demo import make_demo_cohort
    from medfed.demonstration import demo_experiment
    from medfed.running import start

    images = make_demo_cohort(tmp_path / "images", "derm", patients=40, seed=1)
    data = demo_experiment("derm", tmp_path, rounds=2)
    data |= {"cohort": {"reader": "isic", "root": str(images)}, "method": {"name": example, "power": 2.0}}
    data["condition"] = {"partition": {"kind": "dirichlet", "clients": 3, "alpha": 10.0}}
    data["overrides"] |= {"image_size": [16, 16], "network_def::block_inplanes": [8, 8, 8, 8]}
    data |= {"engine": {"workers": 1, "threads": 1}, "tracking": {"enabled": False}}
    run = start(validate(data, "example"))
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    assert [r["round"] for r in records] == [1, 2]
    for record in records:
        squares = {c: v["received_loss"] ** 2 for c, v in record["clients"].items()}
        for client, values in record["clients"].items():
            assert values["weight"] == pytest.approx(squares[client] / sum(squares.values()))
    with pytest.raises(ConfigError, match="greater than or equal to 0"):
        registry.resolve_method({"name": example, "power": -1})
