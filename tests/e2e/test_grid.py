"""Grids: which cells there are, restarts, resumed and failed cells, processes, tables of what exists, bad files."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from experiments import changed
from filelock import FileLock
from grids import grid_file, ran
from rich.console import Console
from typer.testing import CliRunner

from medfed.cli import app, main
from medfed.errors import ConfigError, DataError
from medfed.grid import Bench, Event, check_same, copy_the_rest, run_grid, standing, wait_until_free, with_method
from medfed.grid_file import digest, expand, load_grid
from medfed.grid_screen import GridScreen, span, time_left
from medfed.grid_workers import end_with_parent, seeing, share
from medfed.methods.registry import resolve_method
from medfed.report.grid import grid_tables, write_grid_report
from medfed.report.grid_cells import load_cells

NOISE = "condition.label_noise.rate"
GRIDS = Path(__file__).parents[2] / "configs" / "grids"


# --- which cells


def test_axes_are_multiplied_and_numbers_among_them_found():
    found, numbers = expand(
        {
            "condition.partition.alpha": [2.0, 0.5],
            "noise": [
                {"label": "flips", "condition.label_noise.kind": "symmetric"},
                {"label": "pairs", "condition.label_noise.kind": "asymmetric", "condition.label_noise.map": {"a": "b"}},
            ],
        },
        "test",
    )
    assert found == {
        "alpha 2.0, flips": {"condition.partition.alpha": 2.0, "condition.label_noise.kind": "symmetric"},
        "alpha 2.0, pairs": {
            "condition.partition.alpha": 2.0,
            "condition.label_noise.kind": "asymmetric",
            "condition.label_noise.map": {"a": "b"},
        },
        "alpha 0.5, flips": {"condition.partition.alpha": 0.5, "condition.label_noise.kind": "symmetric"},
        "alpha 0.5, pairs": {
            "condition.partition.alpha": 0.5,
            "condition.label_noise.kind": "asymmetric",
            "condition.label_noise.map": {"a": "b"},
        },
    }
    assert numbers == ("condition.partition.alpha",)


def test_listed_conditions_have_labels_and_none_is_one_condition():
    listed, numbers = expand([{"label": "x", NOISE: 0.2}, {NOISE: 0.4}], "test")
    assert (list(listed), numbers) == (["x", "rate 0.4"], (NOISE,))
    assert expand([], "test") == ({"": {}}, ())


def test_cells_of_a_group_stand_together_and_have_the_seed_of_their_condition(tmp_path, one):
    conditions = {"condition.partition.alpha": [2.0, 0.5]}
    methods = ["fedavg", {"name": "fedavg", "label": "salt", "salt": True}]
    grid = load_grid(grid_file(tmp_path, one, methods=methods, conditions=conditions, seeds=[3, 4]))
    assert [(c.condition, c.method, c.seed) for c in grid.cells] == [
        (f"alpha {a}", m, s) for a in (2.0, 0.5) for s in (3, 4) for m in ("fedavg", "salt")
    ]
    assert {(c.seed, c.experiment.condition.seed) for c in grid.cells} == {(3, 3), (4, 4)}
    assert [c.experiment.condition.partition.alpha for c in grid.cells] == [2.0] * 4 + [0.5] * 4
    assert len({c.folder for c in grid.cells}) == 8


def test_the_digest_is_of_what_is_computed_and_not_of_where(tmp_path, one):
    cell = load_grid(grid_file(tmp_path, one)).cells[0].experiment
    here = {
        "output": Path("x"),
        "cache": None,
        "engine": cell.engine.model_copy(update={"workers": 2, "device": "cpu"}),
    }
    assert digest(cell.model_copy(update=here)) == digest(cell)
    for other in ({"rounds": 2}, {"seed": 1}, {"engine": cell.engine.model_copy(update={"amp": True})}):
        assert digest(cell.model_copy(update=other)) != digest(cell)


def test_a_base_file_is_relative_to_the_grid_and_changes_and_sets_apply(tmp_path, one):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(one))
    file = grid_file(tmp_path, one, base="base.yaml", changes={"rounds": 7, "evaluation.last": 2})
    experiment = load_grid(file, ["rounds=8", f"output={tmp_path / 'other'}"]).cells[0].experiment
    assert (experiment.rounds, experiment.evaluation.last) == (8, 2)
    assert experiment.output == tmp_path / "other" / "g"


def test_a_default_of_another_version_makes_another_cell(tmp_path, one, monkeypatch):
    """A grid that goes on after an upgrade must not take runs with other settings for its own."""
    from medfed.methods import fedprox

    file = grid_file(tmp_path, one, methods=["fedavg", "fedprox"])
    before = [c.folder for c in load_grid(file).cells]

    class Settings(fedprox.METHOD.settings):
        mu: float = 0.4

    monkeypatch.setattr(fedprox, "METHOD", replace(fedprox.METHOD, settings=Settings))
    after = [c.folder for c in load_grid(file).cells]
    assert [one == other for one, other in zip(before, after, strict=True)] == [
        "fedavg" in folder.name for folder in before
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"method": ["fedavg"]}, "unknown key 'method'. Did you mean 'methods'?"),
        ({"methods": []}, "'methods'"),
        ({"methods": ["fedavk"]}, "there is no method 'fedavk'. Did you mean 'fedavg'?"),
        ({"methods": [{"name": "fedism", "qq": 2}]}, "qq"),
        ({"methods": ["fedavg", "fedavg"]}, "two methods are called 'fedavg'"),
        ({"methods": ["fedavg", {"name": "fedavg", "label": "again"}]}, "are the same experiment"),
        ({"methods": ["fedprox", {"name": "fedprox", "mu": 0.2, "label": "explicit"}]}, "are the same experiment"),
        ({"methods": ["rhfl"]}, "rhfl needs public images"),
        ({"methods": ["fedavg", {"name": "fedlsr"}], "changes": {"cohort.task": "multilabel"}}, "not admit multilabel"),
        ({"methods": [{"name": "fedavg", "condition": {"test_fraction": 0.5}}]}, "unknown key 'condition'"),
        ({"methods": [{"name": "fedavg", "rounds": 3}]}, "unknown key 'rounds'"),
        ({"conditions": [{"seed": 3}]}, "a condition cannot change 'seed'"),
        ({"conditions": [{"label": "a", NOISE: 0.2}, {"label": "a", NOISE: 0.4}]}, "two conditions are called 'a'"),
        ({"seeds": [1, 1]}, "a seed is given twice"),
        ({"seeds": 3}, "should be a list"),
        ({"devices": ["gpu0"]}, "'gpu0' is no device"),
        ({"baseline": "fedsim"}, "'fedsim' is no method here. Did you mean 'fedism'?"),
        ({"conditions": [{"condition.partition.alhpa": 1}]}, "Did you mean 'alpha'?"),
        ({"conditions": {"condition.partition.alpha": []}}, "has no value"),
        ({"conditions": [{"method.q": 1}]}, "a condition cannot change 'method'"),
        ({"conditions": [{"rounds.x": 1}]}, "'rounds' is not a section"),
        ({"base": "none.yaml"}, "there is no such file"),
    ],
)
def test_a_bad_file_is_refused_before_anything_starts(tmp_path, one, content, message):
    with pytest.raises(ConfigError) as error:
        load_grid(grid_file(tmp_path, one, **content))
    assert message in str(error.value)
    assert not Path(one["output"]).exists()


def test_images_that_are_not_there_are_missed_before_anything_starts(tmp_path, one):
    with pytest.raises(DataError, match="no such folder"):
        load_grid(grid_file(tmp_path, one), ["cohort.root=/nowhere"])


@pytest.mark.parametrize(
    ("name", "cells", "axes"),
    [
        ("fedism_ich", 21 * 3 * 3, ["condition.partition.corrupted"]),
        ("fedism_isic", 21 * 3 * 3, ["condition.partition.corrupted"]),
        ("quality_parts_small", 19 * 3, []),
        ("oct_fedsir_kermany", 16 * 3 * (1 + 7 + 6) * 3, ["condition.partition.alpha", NOISE]),
        ("quality_small", 10 * 2 * 3, ["condition.partition.corrupted"]),
        ("noise_small", 12 * 2 * (1 + 3 + 3) * 3, ["condition.partition.alpha", NOISE]),
        ("noise_derm", 8 * 3 * 3, []),
        ("ablation_small", 9 * 2 * 3, []),
        ("both_small", 6 * 5 * 3, []),
        ("public_small", 4 * 3 * 3, []),
    ],
)
def test_the_grids_that_come_with_medfed_are_valid(tmp_path, name, cells, axes):
    grid = load_grid(GRIDS / f"{name}.yaml", [f"cohort.root={tmp_path}", "overrides.weights=null"])
    assert len(grid.cells) == cells
    assert list(grid.axes) == axes


def test_every_grid_that_comes_with_medfed_is_counted_above():
    counted = test_the_grids_that_come_with_medfed_are_valid.pytestmark[0].args[1]
    assert sorted(name for name, *_ in counted) == sorted(p.stem for p in GRIDS.glob("*.yaml"))


@pytest.mark.parametrize("name", sorted(p.stem for p in GRIDS.glob("*.yaml")))
def test_methods_of_a_grid_that_comes_with_medfed_train_equally_long(tmp_path, name):
    """Defaults of one and of five epochs a round are no comparison. RHFL's default is a whole number of its own."""
    grid = load_grid(GRIDS / f"{name}.yaml", [f"cohort.root={tmp_path}", "overrides.weights=null"])
    epochs = {c.method: getattr(resolve_method(c.experiment.method)[1], "local_epochs", None) for c in grid.cells}
    assert {e for method, e in epochs.items() if not method.startswith("rhfl") or e is not None} == {1}, epochs


def test_a_fault_names_its_cell(tmp_path, one):
    conditions = [{"label": "odd", "condition.label_noise": {"kind": "symmetric", "rate": 2}}]
    with pytest.raises(ConfigError, match=r"grid\.yaml: odd, fedavg: .*rate"):
        load_grid(grid_file(tmp_path, one, conditions=conditions))


def test_a_bad_file_is_a_message_and_exit_code_2(tmp_path, one, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["medfed", "grid", str(grid_file(tmp_path, one, seeds=[]))])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "'seeds'" in capsys.readouterr().err


# --- running


def test_every_cell_runs_once_on_the_condition_of_its_seed(finished):
    file, events = finished
    assert [(e.kind, e.cell) for e in events] == [(k, i) for i in range(4) for k in ("start", "round", "done")]
    metas = [json.loads((c.folder / "run.json").read_text()) for c in load_grid(file).cells]
    assert [(m["method"], m["seed"]) for m in metas] == [("fedavg", 0), ("fedism", 0), ("fedavg", 1), ("fedism", 1)]
    hashes = [(m["condition_hash"], m["initial_model_hash"]) for m in metas]
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3]
    assert len({m["uid"] for m in metas}) == 4


def test_runs_name_their_cell_and_predictions_their_patients(finished):
    cell = load_grid(finished[0]).cells[1]
    meta = json.loads((cell.folder / "run.json").read_text())
    assert meta["grid"] == {"name": "g", "condition": "", "method": "fedism"}
    table = pd.read_parquet(cell.folder / "predictions" / "round-0001.parquet")
    patients = table.groupby("set")["patient"].agg(list)
    assert patients["clean"] == patients["corrupted"]
    assert 1 < len(set(patients["clean"])) < len(patients["clean"])  # several slices of one head


def test_a_cell_is_the_run_that_medfed_run_makes(finished, start, one):
    cell = load_grid(finished[0]).cells[1]  # its condition was prepared for the cell before it
    alone = start(rounds=1, evaluation={"last": 1}, method="fedism", seed=0)
    assert (alone / "model.safetensors").read_bytes() == (cell.folder / "model.safetensors").read_bytes()


def test_a_restart_runs_nothing_again_and_a_new_method_alone(copied):
    before = [(c.folder / "run.json").read_bytes() for c in copied.cells]
    assert ran(copied) == []
    assert [(c.folder / "run.json").read_bytes() for c in copied.cells] == before


def test_a_killed_cell_goes_on_and_one_that_was_never_begun_begins(copied):
    killed, gone = copied.cells[1], copied.cells[2]
    model = (killed.folder / "model.safetensors").read_bytes()
    meta = json.loads((killed.folder / "run.json").read_text())
    (killed.folder / "run.json").write_text(json.dumps({**meta, "status": "running"}))
    (killed.folder / "model.safetensors").unlink()
    (gone.folder / "run.json").unlink()
    assert [standing(c)[0] for c in copied.cells] == ["done", "to be resumed", "new", "done"]
    events = ran(copied)
    assert [(e.kind, e.cell, e.round) for e in events] == [
        ("start", 1, 1),
        ("done", 1, 0),
        ("start", 2, 0),
        ("round", 2, 1),
        ("done", 2, 0),
    ]
    assert (killed.folder / "model.safetensors").read_bytes() == model
    assert json.loads((killed.folder / "run.json").read_text())["uid"] == meta["uid"]


def test_a_failure_is_isolated_and_listed_with_its_reason(copied, monkeypatch):
    for index in (0, 1):
        (copied.cells[index].folder / "run.json").unlink()

    def faulty(self, cell, others, listener):
        if cell.method == "fedavg":
            raise RuntimeError("out of luck")

    monkeypatch.setattr(Bench, "run", faulty)
    console = Console(file=io.StringIO(), width=200)
    with GridScreen(copied, console=console) as screen:
        run_grid(copied, screen.tell)
    screen.finish()
    assert screen.state == ["failed", "done", "done", "done"]
    shown = console.file.getvalue()
    assert "4 cells, 2 done already" in shown
    assert "[3/4] fedavg · seed 0: FAILED: RuntimeError: out of luck" in shown
    assert "3 of 4 cells done, 1 failed\n  fedavg · seed 0: RuntimeError: out of luck" in shown
    assert "out of luck" in next((copied.folder / "errors").iterdir()).read_text()
    failed = load_cells(copied.folder).cells[0]
    assert (failed.standing, failed.reason.split(" (")[0]) == ("failed", "RuntimeError: out of luck")
    monkeypatch.undo()
    ran(copied)
    assert load_cells(copied.folder).counts() == {"done": 4}  # a reason does not outlive its failure


def test_the_command_exits_with_1_when_a_cell_fails_and_with_0_when_none_does(copied, tmp_path, monkeypatch):
    command = ["grid", str(tmp_path / "grid.yaml")]
    fine = CliRunner().invoke(app, command)
    assert fine.exit_code == 0, fine.output
    assert "4 of 4 cells done, 0 failed" in fine.output
    assert "balanced accuracy" in fine.output.lower()
    (copied.cells[0].folder / "run.json").unlink()
    listed = CliRunner().invoke(app, [*command, "--dry-run"], env={"COLUMNS": "200"})
    assert listed.exit_code == 0
    assert "1 new, 3 done" in listed.output
    monkeypatch.setattr(Bench, "run", lambda *_: (_ for _ in ()).throw(ConfigError("no.")))
    assert CliRunner().invoke(app, command).exit_code == 1


def test_a_condition_that_has_changed_is_refused(copied):
    cell, other = copied.cells[0], copied.cells[1]
    prepared = Bench().prepare(cell)
    check_same(prepared, [other.folder, copied.folder / "not there"])
    meta = json.loads((other.folder / "run.json").read_text())
    (other.folder / "run.json").write_text(json.dumps({**meta, "condition_hash": "0" * 64}))
    (cell.folder / "run.json").unlink()
    (event,) = [e for e in ran(copied) if e.kind == "failed"]
    assert event.cell == 0
    assert "condition_hash differs" in event.reason


def test_a_method_on_what_was_prepared_for_another_has_its_own_settings_and_advice(copied):
    bench = Bench()
    first = bench.prepare(copied.cells[0])
    warned = replace(first, warnings=["common"])
    experiment = copied.cells[1].experiment
    second = with_method(warned, experiment)
    assert second.method.name == "fedism"
    assert type(second.settings) is not type(first.settings)
    assert second.warnings == [*second.settings.check(1), "common"]
    assert second.condition is first.condition
    assert bench.prepare(copied.cells[1]).store is first.store


def test_cells_run_in_processes_and_a_death_costs_one_cell(copied, monkeypatch):
    monkeypatch.setattr("medfed.grid_workers.START", "fork")  # starts at once
    for index in (0, 3):
        (copied.cells[index].folder / "run.json").unlink()
    killed = []

    def tell(event: Event) -> None:
        events.append(event)
        if event.kind == "start" and event.cell == 0 and not killed:
            killed.extend(multiprocessing.active_children())
            os.kill(killed[0].pid, signal.SIGKILL)

    events: list[Event] = []
    devices = copied.file.model_copy(update={"devices": ["cpu"]})
    run_grid(replace(copied, file=devices), tell)
    assert [(e.kind, e.cell) for e in events if e.kind != "round"] == [
        ("start", 0),
        ("failed", 0),
        ("start", 3),
        ("done", 3),
    ]
    assert "was ended by signal 9" in events[1].reason
    assert json.loads((copied.cells[3].folder / "run.json").read_text())["hardware"]["device"] == "cpu"


def test_a_process_of_a_grid_ends_with_the_one_that_started_it(tmp_path, monkeypatch):
    """Killed outright, that one can tell nobody; its cells would be found taken when the grid is started again."""
    monkeypatch.setattr("medfed.orphans.GLANCE", 0.1)
    context = multiprocessing.get_context("fork")
    begun, ended = tmp_path / "begun", tmp_path / "ended"

    def worker():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        end_with_parent()
        try:
            begun.touch()
            time.sleep(100)
        except KeyboardInterrupt:
            ended.touch()
        os._exit(0)

    def grid():
        context.Process(target=worker).start()
        time.sleep(100)

    def seen(path):
        until = time.monotonic() + 60
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.05)
        return path.exists()

    process = context.Process(target=grid)
    process.start()
    assert seen(begun)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert seen(ended)


def test_a_cell_waits_for_a_process_that_is_about_to_let_go_of_it(tmp_path):
    lock = FileLock(tmp_path / ".lock", thread_local=False)  # another thread lets go of it
    lock.acquire()
    timer = threading.Timer(0.3, lock.release)
    began = time.monotonic()
    timer.start()
    wait_until_free(tmp_path)
    assert time.monotonic() - began >= 0.2
    timer.join()
    with FileLock(tmp_path / ".lock").acquire(timeout=0):  # it did not keep the lock
        pass


@pytest.mark.slow
def test_two_processes_make_the_runs_of_one(copied):
    models = [(c.folder / "model.safetensors").read_bytes() for c in copied.cells]
    for cell in copied.cells:
        shutil.rmtree(cell.folder)
    events = ran(copied, parallel=2)
    assert sorted(e.cell for e in events if e.kind == "done") == [0, 1, 2, 3]
    assert [(c.folder / "model.safetensors").read_bytes() for c in copied.cells] == models


def test_slots_share_the_cores_and_see_one_gpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    assert [share(slot, 2) for slot in range(2)] == [[0, 1], [2, 3]]  # as many each, so that all cells compute alike
    assert [share(slot, 5) for slot in range(5)] == [[0], [1], [2], [3], [4]]
    assert [share(slot, 7) for slot in (0, 6)] == [[0], [1]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    with seeing("cuda:1"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with seeing("cuda:1"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.slow
def test_mlflow_has_the_cells_in_one_experiment_and_what_a_killed_grid_did_not_copy(tmp_path, one):
    from mlflow import MlflowClient

    content = {
        "base": {**one, "tracking": {"enabled": True}},
        "methods": ["fedavg", {"name": "fedavg", "label": "A_1"}],
    }
    content["methods"][1]["learning_rate"] = 0.002
    grid = load_grid(
        grid_file(tmp_path, one, conditions=[{"label": "mild", "condition.corruption.severity": 1}], **content)
    )
    ran(grid)
    client = MlflowClient(f"sqlite:///{grid.folder / 'mlflow.db'}")
    found = client.get_experiment_by_name("g")

    def cells():
        return client.search_runs([found.experiment_id], "tags.`medfed.grid.name` = 'g'")

    assert {(r.data.tags["medfed.grid.method"], r.data.tags["medfed.grid.condition"]) for r in cells()} == {
        ("fedavg", "mild"),
        ("A_1", "mild"),
    }
    assert {r.data.tags["medfed.seed"] for r in cells()} == {"0"}
    assert copy_the_rest(grid) == []
    # As if the process had been killed after its last round, before it could say so.
    killed = next(r for r in cells() if r.data.tags["medfed.grid.method"] == "A_1")
    client.update_run(killed.info.run_id, status="RUNNING")
    file = grid.cells[1].folder / "tracking.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "closed": None, "wanted": None}))
    (said,) = copy_the_rest(grid)
    assert said.startswith("Copied to MLflow: mild-A_1-s0")
    assert {r.info.status for r in cells()} == {"FINISHED"}
    assert copy_the_rest(grid) == []


def test_the_experiment_of_mlflow_is_the_grids_unless_it_is_named(tmp_path, one):
    assert {c.experiment.tracking.experiment for c in load_grid(grid_file(tmp_path, one)).cells} == {"g"}
    named = load_grid(grid_file(tmp_path, one), ["tracking.experiment=mine"])
    assert {c.experiment.tracking.experiment for c in named.cells} == {"mine"}
    assert [c.folder for c in named.cells] == [c.folder for c in load_grid(grid_file(tmp_path, one)).cells]


# --- what is shown


def test_time_left_is_counted_in_rounds_of_each_method(tmp_path, one):
    cells = load_grid(grid_file(tmp_path, {**one, "rounds": 10}, seeds=[0, 1])).cells
    state, rounds = ["done", "running", "waiting", "waiting"], [10, 4, 0, 0]
    # fedism: 5 s a round, 6 + 10 rounds; fedavg: 2 s a round, 10 rounds.
    assert time_left(cells, state, rounds, {"fedavg": (10, 20.0), "fedism": (4, 20.0)}, 1) == 100
    assert time_left(cells, state, rounds, {"fedavg": (10, 20.0), "fedism": (4, 20.0)}, 2) == 50
    assert time_left(cells, state, rounds, {"fedavg": (10, 20.0)}, 1) == 52
    assert time_left(cells, state, rounds, {}, 1) is None
    assert [span(s) for s in (5, 600, 7260)] == ["5 s", "10 min", "2 h 01 min"]


def test_the_live_table_counts_by_condition_and_names_what_is_running(tmp_path, one):
    conditions = {"condition.partition.alpha": [2.0, 0.5]}
    grid = load_grid(grid_file(tmp_path, {**one, "rounds": 10}, conditions=conditions))
    now = [0.0]
    console = Console(file=io.StringIO(), width=120)
    screen = GridScreen(grid, console=console, clock=lambda: now[0])
    screen.tell(Event("start", 0))
    now[0] = 6.0
    screen.tell(Event("round", 0, 1))
    console.print(screen.table())
    shown = console.file.getvalue()
    assert "alpha 2.0 · fedavg · seed 0: round 1 of 10" in shown
    assert "about 4 min left" in shown  # 39 rounds of 6 s
    (row,) = [line.replace("│", " ").split() for line in shown.splitlines() if "alpha 0.5" in line]
    assert row == ["alpha", "0.5", "2"]


# --- tables


def test_tables_and_page_are_of_the_cells_that_exist(copied):
    shutil.rmtree(copied.cells[3].folder)
    found = grid_tables(copied.folder)
    assert found.notes == [f"1 of 4 cells have no round yet: {copied.cells[3].folder.name}"]
    assert {m: [r.seed for r in runs] for m, runs in found.conditions[""].runs.items()} == {
        "fedavg": [0, 1],
        "fedism": [0],
    }
    written = write_grid_report(copied.folder)
    names = ["report.html", "tables.csv", "tables.tex", "paper.csv", "paper.tex", "paper.md"]
    names += ["tests.csv", "intervals.csv"]
    assert [p.name for p in written if p.suffix != ".pdf"] == names
    page = written[0].read_text()
    assert "no round yet" in page
    assert "<script" not in page
    assert r"\toprule" in written[2].read_text()
    rows = list(csv.DictReader(io.StringIO(written[1].read_text())))
    assert {r["method"] for r in rows} == {"fedavg", "fedism"}
    record = json.loads((copied.cells[1].folder / "records.jsonl").read_text())
    (row,) = [r for r in rows if (r["method"], r["metric"], r["column"]) == ("fedism", "balanced_accuracy", "clean")]
    assert float(row["mean"]) == pytest.approx(100 * record["evaluation"]["clean"]["balanced_accuracy"])


def test_an_axis_of_numbers_has_its_own_tables(finished, tmp_path):
    """Two conditions, made of the two seeds' runs by changing what their files say."""
    folder = tmp_path / "g"
    shutil.copytree(finished[0].parent / "runs" / "g", folder)
    content = json.loads((folder / "grid.json").read_text())
    for cell in content["cells"]:
        alpha = 2.0 if cell["seed"] == 0 else 0.5
        cell["condition"] = f"alpha {alpha}"
        file = folder / cell["folder"] / "experiment.yaml"
        file.write_text(
            yaml.safe_dump(changed(yaml.safe_load(file.read_text()), {"condition__partition__alpha": alpha}))
        )
    key = "condition.partition.alpha"
    (folder / "grid.json").write_text(json.dumps({**content, "axes": [key], "metrics": ["balanced_accuracy"]}))
    found = grid_tables(folder)
    assert list(found.conditions) == ["alpha 2.0", "alpha 0.5"]
    assert [list(p.points) for p in found.axes[key].panels] == [[0.5, 2.0]]
    written = {p.name: p.read_text() for p in write_grid_report(folder) if p.suffix != ".pdf"}
    assert "Against partition alpha" in written["report.html"]
    assert f"panel,{key},method" in written["against-condition-partition-alpha.csv"]


def test_report_knows_a_grid_and_refuses_what_is_none(copied, tmp_path):
    told = CliRunner().invoke(app, ["report", str(copied.folder)])
    assert told.exit_code == 0
    assert str(copied.folder / "report.html") in told.output.replace("\n", "")
    for cell in copied.cells:
        shutil.rmtree(cell.folder)
    with pytest.raises(Exception, match="no round of this grid is done"):
        grid_tables(copied.folder)
    with pytest.raises(Exception, match="not the folder of a grid"):
        grid_tables(tmp_path)
