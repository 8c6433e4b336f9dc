"""``medfed demo`` from nothing to two reports, in small; and ``configs/demo.yaml`` is what it writes."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from medfed import demonstration
from medfed.config import validate
from medfed.console import Screen
from medfed.data import demo
from medfed.demonstration import DEMOS, demo_experiment, demonstrate
from medfed.errors import ConfigError
from medfed.experiment import corruption_of
from medfed.methods.registry import resolve_method

ROOT = Path(__file__).parents[2]


def test_demo_leaves_two_paired_runs_and_a_comparison(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    demo.make_demo_cohort(tmp_path / "images-derm", "derm", patients=40, seed=0)
    small = {"image_size": [16, 16], "network_def::block_inplanes": [8, 8, 8, 8]}
    whole = demonstration.demo_experiment

    def shrunk(*args):
        data = whole(*args)
        data["overrides"] |= small
        data["condition"]["partition"] |= {"clients": 3, "corrupted": 1}
        return {**data, "engine": {"workers": 1, "threads": 1}, "tracking": {"enabled": False}}

    monkeypatch.setattr(demonstration, "demo_experiment", shrunk)
    out = io.StringIO()
    runs = demonstrate("derm", tmp_path, 2, Screen(Console(file=out, width=80)))
    assert [run.name.split("-s0-")[0] for run in runs] == ["demo-derm-fedavg", "demo-derm-fedism"]
    for file in ("comparison.html", "comparison.png", "derm.yaml"):
        assert (tmp_path / file).stat().st_size > 0
    text = out.getvalue()
    assert "round 2/2" in text
    assert "made up" in text
    assert "not paired" not in text
    validate(yaml.safe_load((tmp_path / "derm.yaml").read_text()), "derm.yaml")


@pytest.mark.parametrize("there", ["nothing", "an empty folder"])
def test_images_of_a_demo_that_was_stopped_are_made_anew(tmp_path, monkeypatch, there):
    """Half a cohort would be trained on as if it were the whole one."""

    def stop(*_, **__):
        raise KeyboardInterrupt

    def saved(path, *args, **options):
        count.append(path)
        return stop() if len(count) == 30 else genuine(path, *args, **options)

    def files(folder):
        return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*.jpeg")}

    genuine, count, screen = demo._save_jpeg, [], Screen(Console(file=io.StringIO()))
    images = tmp_path / "images-oct"
    monkeypatch.setattr("medfed.running.start", stop)
    monkeypatch.setitem(DEMOS, "oct", replace(DEMOS["oct"], patients=12))
    whole = files(demo.make_demo_cohort(tmp_path / "whole", "oct", patients=12, seed=0))
    monkeypatch.setattr(demo, "_save_jpeg", saved)
    if there == "an empty folder":
        images.mkdir()
    for expected in ({}, whole, whole):
        with contextlib.suppress(KeyboardInterrupt):
            demonstrate("oct", tmp_path, 1, screen)
        assert files(images) == expected
    assert len(count) == 30 + len(whole)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["images-oct", "whole"]


@pytest.mark.parametrize("kind", DEMOS)
def test_every_demo_is_a_valid_experiment(kind, tmp_path):
    experiment = validate(demo_experiment(kind, tmp_path), kind)
    resolve_method(experiment.method)
    assert corruption_of(experiment) is not None


def test_unknown_demo_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'derm'"):
        demo_experiment("dermo", Path("x"))


def test_demo_file_in_configs_is_what_the_command_writes():
    assert yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text()) == demo_experiment("derm", Path("demo"))
