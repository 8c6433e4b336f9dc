from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from fake_runs import record

from medfed.errors import MedfedError
from medfed.report.runs import load_run, quantity


def test_series_has_nan_where_not_defined_and_where_not_recorded(make):
    records = [record(1, clean=0.25), record(2, clean=None), record(3, clean=0.75)]
    records.append({**record(4), "evaluation": {}})
    rounds, values = load_run(make("run", records)).series("clean/balanced_accuracy")
    assert rounds.tolist() == [1, 2, 3, 4]
    np.testing.assert_array_equal(values, [0.25, math.nan, 0.75, math.nan])


def test_final_is_the_mean_of_the_last_five(make):
    run = load_run(make("run", [record(t, clean=t / 10) for t in range(1, 8)]))
    final = run.final("clean/balanced_accuracy")
    assert final.value == pytest.approx((0.3 + 0.4 + 0.5 + 0.6 + 0.7) / 5)
    assert (final.defined, final.rounds, final.complete) == (5, (3, 4, 5, 6, 7), True)


def test_final_leaves_out_undefined_rounds_and_counts_them(make):
    values = [0.9, 0.1, None, 0.3, None, 0.5]
    final = load_run(make("run", [record(t, v) for t, v in enumerate(values, 1)])).final("clean/balanced_accuracy")
    assert final.value == pytest.approx((0.1 + 0.3 + 0.5) / 3)
    assert (final.defined, len(final.rounds), final.complete) == (3, 5, False)


def test_rounds_without_evaluation_do_not_use_up_the_window(make):
    records = [record(t, clean=t / 100) if t % 2 == 0 else {**record(t), "evaluation": {}} for t in range(1, 13)]
    final = load_run(make("run", records)).final("clean/balanced_accuracy")
    assert final.rounds == (4, 6, 8, 10, 12)
    assert final.value == pytest.approx(0.08)


def test_final_of_what_was_never_defined_or_never_recorded(make):
    run = load_run(make("run", [record(1, clean=None), record(2, clean=None)]))
    never = run.final("clean/balanced_accuracy")
    assert (never.value, never.defined, never.rounds) == (None, 0, (1, 2))
    absent = run.final("clean/kappa")
    assert (absent.value, absent.defined, absent.rounds, absent.complete) == (None, 0, (), False)


def test_final_refuses_a_window_of_nothing(make):
    with pytest.raises(ValueError, match="at least 1"):
        load_run(make("run", [record(1)])).final("clean/balanced_accuracy", last=0)


def test_average_and_gap_are_taken_within_the_round(make):
    run = load_run(make("run", [record(1, 0.6, 0.2), record(2, None, 0.3), record(3, 0.8, 0.5)]))
    np.testing.assert_allclose(run.series("average/balanced_accuracy")[1], [0.4, math.nan, 0.65])
    np.testing.assert_allclose(run.series("gap/balanced_accuracy")[1], [0.4, math.nan, 0.3])
    assert run.final("gap/balanced_accuracy").defined == 2


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("balanced_accuracy", {"a": 0.4, "b": 0.1, "c": 0.7}, 0.1),
        ("nll", {"a": 0.4, "b": 0.1, "c": 0.7}, 0.7),
        ("calibration_error", {"a": 0.4, "b": 0.1}, 0.4),
        ("balanced_accuracy", {"a": None, "b": 0.3}, 0.3),
        ("balanced_accuracy", {"a": None, "b": None}, math.nan),
        ("balanced_accuracy", {}, None),
    ],
)
def test_worst_client_is_the_worst_of_those_defined(name, values, expected):
    value = quantity(
        {"round": 1, "evaluation": {"clients": {c: {name: v} for c, v in values.items()}}}, f"worst/{name}"
    )
    assert value is expected if expected is None else value == pytest.approx(expected, nan_ok=True)


def test_values_of_clients_seconds_bytes_and_server():
    r = record(1, server={"beta": 0.5})
    r["clients"]["ward/3"] = {"loss": 2.5}
    assert quantity(r, "client/client_01/sharpness") == 0.04
    assert quantity(r, "client/ward/3/loss") == 2.5
    assert quantity(r, "client_evaluation/client_01/balanced_accuracy") == 0.2
    assert quantity(r, "seconds/clients") == 2.0
    assert quantity(r, "bytes/up") == 2_100_000
    assert quantity(r, "server/beta") == 0.5
    assert quantity(r, "client/nobody/loss") is None


@pytest.mark.parametrize("evaluation", [None, {}, {"clean": None}, {"clean": {"balanced_accuracy": "high"}}])
def test_a_record_without_a_usable_evaluation_gives_nothing(evaluation):
    assert quantity({"round": 1, "evaluation": evaluation}, "clean/balanced_accuracy") is None


def test_a_torn_last_line_is_left_out_and_named(make):
    folder = make("run", [record(1), record(2)])
    with open(folder / "records.jsonl", "a") as file:
        file.write('{"round": 3, "evaluation": {"clean": {"balanc')
    run = load_run(folder)
    assert run.rounds == [1, 2]
    assert run.problems == ["records.jsonl line 3 is torn and was left out"]


def test_lines_that_are_no_records_are_named(make):
    folder = make("run", [record(1)])
    with open(folder / "records.jsonl", "ab") as file:
        file.write(b'[1, 2]\n{"round": "2"}\n{"round": true}\n\xff\xfe\n\n')
    run = load_run(folder)
    assert run.rounds == [1]
    assert [p.split()[2] for p in run.problems] == ["2", "3", "4", "5"]


def test_of_a_round_written_twice_the_later_counts_and_rounds_are_in_order(make):
    run = load_run(make("run", [record(2, 0.1), record(1, 0.2), record(2, 0.9)]))
    assert run.rounds == [1, 2]
    assert run.series("clean/balanced_accuracy")[1].tolist() == [0.2, 0.9]


def test_numbers_that_are_not_finite_are_not_defined(make):
    folder = make("run", [record(1)])
    text = json.dumps(record(2, clean=1.0)).replace('"balanced_accuracy": 1.0', '"balanced_accuracy": Infinity')
    with open(folder / "records.jsonl", "a") as file:
        file.write(text + "\n")
    assert load_run(folder).final("clean/balanced_accuracy").value == 0.5


def test_a_run_that_only_just_started(make):
    folder = make("run", [], rounds=10, status="running")
    (folder / "records.jsonl").unlink()
    run = load_run(folder)
    assert (run.records, run.rounds, run.finished, run.planned) == ([], [], False, 10)
    assert "records.jsonl is missing" in run.problems[0]


@pytest.mark.parametrize(
    ("status", "rounds", "finished"),
    [("completed", 2, True), ("finished", 2, True), ("completed", 3, False), ("running", 2, False)],
)
def test_finished_needs_the_status_and_all_rounds(make, status, rounds, finished):
    assert load_run(make("run", [record(1), record(2)], status=status, rounds=rounds)).finished is finished


def test_clients_are_those_planned_and_those_seen(make):
    run = load_run(make("run", [record(1)], clients=["client_00", "client_09"]))
    assert run.clients == ["client_00", "client_01", "client_09"]


def test_metrics_are_those_of_the_whole_test_set(make):
    r = record(1)
    r["evaluation"]["clean"] |= {"recall/MEL": 0.5, "samples": 100, "nll": None}
    assert load_run(make("run", [r])).metrics() == ["balanced_accuracy", "auc_ovo", "nll"]


def test_errors_name_what_is_missing(tmp_path: Path, make):
    with pytest.raises(MedfedError, match="no run directory here"):
        load_run(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MedfedError, match=r"run\.json and records\.jsonl missing"):
        load_run(tmp_path / "empty")
    folder = make("runs/one", [record(1)])
    with pytest.raises(MedfedError, match="Runs inside it: one"):
        load_run(tmp_path / "runs")
    with pytest.raises(MedfedError, match="Give the run's directory"):
        load_run(folder / "run.json")
    (folder / "run.json").write_text("{")
    with pytest.raises(MedfedError, match=r"run\.json cannot be read"):
        load_run(folder)
    (folder / "run.json").write_text("[]")
    with pytest.raises(MedfedError, match="does not hold an object"):
        load_run(folder)
