"""Grids: what is refused before a cell starts, damaged runs, relabelled methods, an interrupt."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from experiments import changed
from grids import grid_file, ran
from typer.testing import CliRunner

import medfed.grid
from medfed.cli import app
from medfed.errors import ConfigError, MedfedError
from medfed.grid import Bench, check_cells, standing
from medfed.grid_file import load_grid
from medfed.report.grid import write_grid_report
from medfed.report.grid_cells import load_cells
from medfed.yaml_file import read_yaml

RATE = "condition.label_noise.rate"
NOISE = {"kind": "symmetric", "rate": 0.2, "clean": 2}


# --- what the file alone tells


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"changes": {"method.name": "fedism"}}, "'method.name' cannot be changed in a grid"),
        ({"changes": {"seed": 5}}, "'seed' cannot be changed in a grid"),
        ({"seeds": [True]}, "'seeds.0': should be a whole number (given: True)."),
        ({"seeds": ["1"]}, "'seeds.0': should be a whole number (given: '1')."),
        ({"methods": [{"name": "fedavg", "label": ""}]}, "a label is empty"),
        ({"methods": [{"name": "fedavg", "label": None}]}, "a label is empty"),
        ({"conditions": [{"label": " ", "condition.seed": 1}]}, "a label is empty"),
        ({"conditions": {"noise": [{"label": None, "condition.seed": 1}]}}, "a label is empty"),
        ({"metrics": ["acuracy"]}, "'acuracy' is no metric. Did you mean 'accuracy'?"),
        ({"changes": {"engine.device": "gpu"}}, "'engine.device': is no device: use auto, cpu, cuda or cuda:N"),
        ({"base": [1]}, "'base': should be the path of an experiment file, or the experiment itself (given: [1])."),
        ({"base": None}, "'base': should be the path"),
        ({"methods": [["fedavg"]]}, "'methods': should be names or sections of methods, which ['fedavg'] is not"),
        ({"methods": {"fedavg": {}}}, "'methods': should be a list"),
        ({"conditions": {RATE: 2.0}}, "'conditions': 2.0 should be a list of values"),
        ({"conditions": [3]}, "'conditions': 3 should be a section of keys and values to change"),
        ({"conditions": "none"}, "'conditions': should be a list of changes, or axes by name"),
        (
            {"conditions": {RATE: [0.2], "noise": [{"label": "a", "condition.seed": 1}, {"label": "b", RATE: 0.9}]}},
            f"the axis 'noise' changes '{RATE}' and so overwrites the axis '{RATE}'",
        ),
        (
            {"conditions": {"a": [{RATE: 0.2}, {RATE: 0.4}], "b": [{"label": "all", "condition.label_noise": NOISE}]}},
            "the axis 'b' changes 'condition.label_noise' and so overwrites the axis 'a'",
        ),
    ],
)
def test_what_would_be_ignored_or_misread_is_refused(tmp_path, one, content, message):
    with pytest.raises(ConfigError) as error:
        load_grid(grid_file(tmp_path, one, **content))
    assert message in str(error.value)
    assert not any(word in str(error.value) for word in ("list[", "dict[", "union", "is_instance"))  # for people


def test_a_section_may_be_an_axis_before_one_of_its_keys(tmp_path, one):
    axes = {"condition.label_noise": [NOISE, {**NOISE, "clean": 1}], RATE: [0.2, 0.4]}
    cells = load_grid(grid_file(tmp_path, one, methods=["fedavg"], conditions=axes)).cells
    found = [(c.experiment.condition.label_noise.clean, c.experiment.condition.label_noise.rate) for c in cells]
    assert found == [(2, 0.2), (2, 0.4), (1, 0.2), (1, 0.4)]


@pytest.mark.parametrize("key", ["method=fedavg", "method.name=fedavg", "seed=3"])
def test_the_command_line_cannot_change_what_the_grid_sets(tmp_path, one, key):
    with pytest.raises(ConfigError, match="cannot be changed in a grid"):
        load_grid(grid_file(tmp_path, one), [key])


@pytest.mark.parametrize(
    ("text", "line"),
    [("name: a\nmethods: [x]\nname: b\n", 3), ("name: a\ncondition:\n  seed: 1\n  seed: 2\n", 4)],
)
def test_a_key_that_stands_twice_is_refused_in_any_file(tmp_path, text, line):
    file = tmp_path / "twice.yaml"
    file.write_text(text)
    for command in (["grid", str(file)], ["run", str(file)]):
        told = CliRunner().invoke(app, command).exception
        assert isinstance(told, ConfigError)
        assert f"in line {line}" in str(told)
        assert "stands there twice" in str(told)


def test_a_merged_key_may_be_overridden(tmp_path, one):
    file = tmp_path / "grid.yaml"
    base = yaml.safe_dump(one, default_flow_style=True, width=10**6).strip()
    file.write_text(
        f"name: g\nbase: {base}\noutput: {one['output']}\n"
        "methods:\n  - &a {name: fedism, q: 1.0}\n  - {<<: *a, label: other, q: 3.0}\n"
    )
    assert [c.experiment.method["q"] for c in load_grid(file).cells] == [1.0, 3.0]


def test_two_merges_in_one_section_are_none_too_many(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("a: &a {x: 1}\nb: &b {y: 2}\nc:\n  <<: *a\n  <<: *b\n")
    assert read_yaml(file)["c"] == {"x": 1, "y": 2}


# --- what only the cohort tells


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"changes": {"bundle": "oct_bscan"}}, "there is no bundle with that name"),
        ({"changes": {"overrides.imagesize": [32, 32]}}, "imagesize"),
        ({"changes": {"overrides.weights": "/nowhere/weights.pt"}}, "/nowhere/weights.pt"),
        ({"changes": {"overrides.network_name": "ResNot"}}, "ResNot"),
        ({"changes": {"overrides.network_def::block_inplanes": [4, 8, -8, 8]}}, "RuntimeError: "),
        ({"changes": {"participation.quorum": 99}}, "a quorum of 99 can never be reached"),
        ({"changes": {"condition.partition.corrupted": 99}}, "99 corrupted clients of 4"),
        ({"changes": {"condition.corruption": None}}, "corruption"),
        (
            {
                "base": "subtype",
                "changes": {"condition.label_noise": {**NOISE, "kind": "asymmetric", "map": {"a": "b"}}},
            },
            "'a'",
        ),
    ],
)
@pytest.mark.parametrize("where", ["everywhere", "in the last condition"])
@pytest.mark.parametrize("command", [[], ["--dry-run"]])
def test_what_cannot_run_is_refused_before_any_cell_starts(tmp_path, one, content, message, where, command):
    if content.get("base") == "subtype":
        one = changed(one, {"cohort__task": "subtype"})
    content = {k: v for k, v in content.items() if k != "base"}
    if where == "in the last condition" and "changes" in content:
        content = {
            "conditions": [
                {"label": "fine", "condition.seed": 0},
                {"label": "odd", "condition.seed": 1, **content["changes"]},
            ]
        }
    file = grid_file(tmp_path, one, **content)
    told = CliRunner().invoke(app, ["grid", str(file), *command])
    assert isinstance(told.exception, MedfedError), told.output  # which `main` answers with exit code 2
    assert message in str(told.exception)
    if "conditions" in content:
        assert str(told.exception).startswith("odd · fedavg · seed 0: ")
    assert not list(Path(one["output"]).glob("g/*/run.json"))


def test_cells_that_are_done_are_not_looked_at_again(copied, monkeypatch):
    monkeypatch.setattr(medfed.grid, "read_section", lambda _: pytest.fail("the cohort was read"))
    check_cells(replace(copied, file=copied.file.model_copy(update={"devices": ["cuda:63"]})), slots=1)


@pytest.mark.parametrize(
    ("devices", "own", "slots", "missed"),
    [
        (["cpu", "cuda:63"], "cpu", 2, "cuda:63"),
        (["cpu", "cuda:63"], "cpu", 1, None),  # it is given to no cell
        (["cpu", "cuda:63"], "cuda:63", 1, None),  # the grid's go before the cells' own
        ([], "cuda:63", 1, "cuda:63"),
        ([], "cuda:63", None, None),  # planned here, run elsewhere
        (["cuda:63"], "cpu", None, None),
    ],
)
def test_only_devices_that_a_cell_is_given_must_be_here(tmp_path, one, devices, own, slots, missed):
    file = grid_file(tmp_path, one, devices=devices, changes={"engine.device": own})
    if missed is None:
        check_cells(load_grid(file), slots)
    else:
        with pytest.raises(ConfigError, match=f"no device '{missed}' here"):
            check_cells(load_grid(file), slots)


def test_a_group_whose_images_cannot_be_used_is_prepared_once(tmp_path, one, monkeypatch):
    calls = []

    def prepare(experiment):
        calls.append(experiment.seed)
        raise ConfigError("nothing to be done.")

    monkeypatch.setattr(medfed.grid, "prepare", prepare)
    events = ran(load_grid(grid_file(tmp_path, one, methods=["fedavg", "fedism", "fedprox"], seeds=[0, 1])))
    assert [e.reason for e in events if e.kind == "failed"] == ["nothing to be done."] * 6
    assert calls == [0, 1]


# --- damaged runs


def damage(folder: Path, how: str) -> None:
    name, _, content = how.partition(":")
    (folder / name).write_text(content)


DAMAGES = [
    *(f"run.json:{content}" for content in ("", "{bad", "[]", "{}", "null", '{"status": 3}')),
    *(f"records.jsonl:{content}" for content in ("", "garbage\n", '{"round": 1, "cli')),
]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_run_fails_alone_and_is_not_touched(copied, tmp_path, how):
    cell, folder = copied.cells[1], copied.cells[1].folder
    damage(folder, how)
    before = {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    assert [standing(c)[0] for c in copied.cells] == ["done", "damaged", "done", "done"]
    command = ["grid", str(tmp_path / "grid.yaml")]
    listed = CliRunner().invoke(app, [*command, "--dry-run"])
    assert (listed.exit_code, "3 done, 1 damaged" in listed.output) == (0, True)
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 1, told.output
    assert "3 of 4 cells done, 1 failed" in told.output
    reason = next(line for line in told.output.splitlines() if line.startswith(f"  {cell.name}: "))
    assert str(folder) in reason
    assert "remove the folder" in reason
    assert {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()} == before
    assert load_cells(copied.folder).counts() == {"done": 3, "failed": 1}


def test_a_damaged_run_that_is_removed_runs_again(copied):
    damage(copied.cells[1].folder, "run.json:{}")
    shutil.rmtree(copied.cells[1].folder)
    assert [e.kind for e in ran(copied)] == ["start", "round", "done"]


def test_another_cell_of_its_group_runs_beside_a_damaged_one(copied):
    damage(copied.cells[0].folder, "run.json:{bad")
    (copied.cells[1].folder / "run.json").unlink()
    assert [(e.kind, e.cell) for e in ran(copied) if e.kind != "round"] == [
        ("start", 0),
        ("failed", 0),
        ("start", 1),
        ("done", 1),
    ]


@pytest.mark.parametrize("content", ["", "{bad", "[]", "3"])
def test_a_damaged_list_of_failures_is_written_anew(copied, content):
    path = copied.folder / "failures.json"
    path.write_text(content)
    assert load_cells(copied.folder).counts() == {"done": 4}
    damage(copied.cells[1].folder, "run.json:{}")
    ran(copied)
    assert list(json.loads(path.read_text())) == [copied.cells[1].folder.name]
    page = write_grid_report(copied.folder)[0].read_text()
    assert "its run.json is damaged" in page
    assert "exact where there are at most 36 pairs" in page
    assert load_cells(copied.folder).cells[1].run is None  # its records are of nobody knows what


@pytest.mark.parametrize("content", [None, "", "garbage\n", "{}"])
def test_a_stopped_run_that_has_lost_records_does_not_go_on(copied, tmp_path, content):
    """Rounds that are done and not on record would be missing from every table for good."""
    cell = copied.cells[1]
    file, meta = cell.folder / "records.jsonl", json.loads((cell.folder / "run.json").read_text())
    (cell.folder / "run.json").write_text(json.dumps({**meta, "status": "interrupted"}))
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    failed = [e for e in ran(copied) if e.kind == "failed"]
    assert [e.cell for e in failed] == [1]
    assert "1 of the 1 rounds that are done are not on record" in failed[0].reason
    told = CliRunner().invoke(app, ["resume", str(cell.folder)])
    assert isinstance(told.exception, MedfedError)


def test_resuming_a_damaged_run_is_a_message(copied):
    damage(copied.cells[0].folder, "run.json:{bad")
    told = CliRunner().invoke(app, ["resume", str(copied.cells[0].folder)])
    assert isinstance(told.exception, ConfigError)
    assert "its run.json is damaged" in str(told.exception)


# --- labels


def test_another_label_is_no_other_run(copied, tmp_path):
    content = yaml.safe_load((tmp_path / "grid.yaml").read_text())
    renamed = [{"name": "fedavg", "label": "FedAvg (ours)"}, "fedism"]
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump({**content, "methods": renamed}))
    grid = load_grid(tmp_path / "grid.yaml")
    assert {c.folder for c in grid.cells} == {c.folder for c in copied.cells}
    assert ran(grid) == []
    cells = load_cells(grid.folder)
    assert [c.method for c in cells.cells] == ["FedAvg (ours)", "fedism"] * 2
    assert cells.counts() == {"done": 4}


def renamed(copied, tmp_path, label):
    content = yaml.safe_load((tmp_path / "grid.yaml").read_text())
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump({**content, "methods": [{"name": "fedavg", "label": label}]}))
    return load_grid(tmp_path / "grid.yaml").cells[0]


def test_a_label_without_latin_letters_is_found_again_too(copied, tmp_path):
    folder = copied.cells[0].folder
    plain = folder.with_name(folder.name.removeprefix("fedavg-"))
    meta = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**meta, "grid": {**meta["grid"], "method": "方法"}}))
    folder.rename(plain)
    assert renamed(copied, tmp_path, "Ours").folder == plain


def test_what_only_looks_like_the_folder_of_a_cell_is_none(copied, tmp_path):
    folder = copied.cells[0].folder
    end = folder.name.removeprefix("fedavg-")
    shutil.copytree(folder, folder.with_name(f"a-backup-{end}"))
    folder.with_name(f"a-note-{end}").write_text("")
    folder.with_name(f"an-empty-one-{end}").mkdir()
    assert renamed(copied, tmp_path, "Ours").folder == folder
    shutil.rmtree(folder)
    assert renamed(copied, tmp_path, "Ours").folder == folder.with_name(f"Ours-{end}")


def test_a_finished_run_goes_before_one_that_was_stopped(copied, tmp_path):
    folder = copied.cells[0].folder
    end = folder.name.removeprefix("fedavg-")
    other = folder.with_name(f"FedAvg-{end}")
    shutil.copytree(folder, other)
    meta = json.loads((other / "run.json").read_text())
    stopped = {**meta, "status": "interrupted", "grid": {**meta["grid"], "method": "FedAvg"}}
    (other / "run.json").write_text(json.dumps(stopped))
    folder.with_name(f"Ours-{end}").mkdir()  # begun and killed before its run.json
    assert renamed(copied, tmp_path, "Ours").folder == folder
    assert renamed(copied, tmp_path, "FedAvg").folder == other  # the label's own run


# --- an interrupt


def test_an_interrupted_grid_says_that_it_goes_on(copied, tmp_path, monkeypatch):
    (copied.cells[3].folder / "run.json").unlink()

    def interrupted(self, cell, others, listener):
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "run", interrupted)
    told = CliRunner().invoke(app, ["grid", str(tmp_path / "grid.yaml")])
    assert told.exit_code == 130
    assert "Stopped after 3 of 4 cells; run it again to go on." in told.output


def test_an_interrupted_command_says_so(data):
    program = "import medfed.cli as c, sys\ndef stop(*_, **__): raise KeyboardInterrupt\nc.app = stop\nc.main()\n"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (told.returncode, told.stderr) == (130, "medfed: stopped.\n")
