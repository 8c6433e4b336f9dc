"""A small cohort of real DICOM files and an experiment on it that trains in seconds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from experiments import changed, environment, tiny_experiment
from grids import grid_file, ran


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    from medfed.data.demo import make_demo_cohort

    return make_demo_cohort(tmp_path_factory.mktemp("images") / "ct", "ct", patients=24, seed=3)


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def data(images, cache, tmp_path) -> dict[str, Any]:
    """The experiment as a mapping, to be changed by a test."""
    return tiny_experiment(images, cache, tmp_path / "runs")


@pytest.fixture
def start(data):
    """Runs the experiment, with changes by dotted key, in this process."""

    def run(**changes: Any) -> Path:
        from medfed.config import validate
        from medfed.running import start as go

        return go(validate(changed(data, changes), "test"))

    return run


@pytest.fixture
def command(data, tmp_path):
    """Runs ``medfed`` in a process of its own and returns it when it has ended."""

    def run(*args: str, **changes: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(prepare(*args, **changes), capture_output=True, text=True, env=environment(), timeout=200)

    def prepare(*args: str, **changes: Any) -> list[str]:
        file = tmp_path / "experiment.yaml"
        file.write_text(yaml.safe_dump(changed(data, changes)))
        return [sys.executable, "-m", "medfed", *(a.replace("FILE", str(file)) for a in args)]

    run.prepare = prepare  # type: ignore[attr-defined]
    return run


@pytest.fixture
def one(data):
    """One round of the tiny experiment."""
    return changed(data, {"rounds": 1, "evaluation": {"last": 1}})


@pytest.fixture(scope="session")
def finished(images, cache, tmp_path_factory):
    """A grid of two methods and two seeds that has run, with the events of it; tests copy it."""
    from medfed.grid_file import load_grid

    folder = tmp_path_factory.mktemp("grid")
    base = {**tiny_experiment(images, cache, folder / "runs"), "rounds": 1, "evaluation": {"last": 1}}
    file = grid_file(folder, base, seeds=[0, 1])
    return file, ran(load_grid(file))


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished grid, which a test may spoil."""
    from medfed.grid_file import load_grid

    file = tmp_path / "grid.yaml"
    content = yaml.safe_load(finished[0].read_text())
    file.write_text(yaml.safe_dump({**content, "output": str(tmp_path / "runs")}))
    shutil.copytree(finished[0].parent / "runs", tmp_path / "runs")
    return load_grid(file)
