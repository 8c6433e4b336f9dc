from __future__ import annotations

import pytest
from fake_runs import record

from medfed.report.notices import collapse, in_rounds, notices, ranges, refusals
from medfed.report.runs import load_run


def texts(run, level=None):
    return [f"{n.text} ({n.detail})" for n in notices(run) if level in (None, n.level)]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([4], "4"), ([3, 1, 2, 7, 7], "1–3, 7"), ([1, 2, 4, 5], "1–2, 4–5")],
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text


def test_in_rounds():
    assert (in_rounds([4]), in_rounds([4, 5])) == ("round 4", "rounds 4–5")


def test_a_clean_finished_run_has_no_notice(make):
    assert notices(load_run(make("run", [record(1), record(2)]))) == []


@pytest.mark.parametrize(
    "text",
    [
        "clean: the global model predicts 1 of 7 classes",
        "corrupted: the global model gives 97% of the samples to 1 of 7 classes",
        "clean: the global model gives every sample the same scores",
    ],
)
def test_collapse_within_the_last_rounds_is_serious(make, text):
    run = load_run(make("run", [record(1), record(2, warnings=[text])]))
    assert collapse(run) == text
    assert any(text in t for t in texts(run, "serious"))


def test_collapse_that_was_overcome_or_other_warnings_are_not_serious(make):
    early = [record(1, warnings=["the global model predicts 1 of 7 classes"]), *[record(t) for t in range(2, 8)]]
    run = load_run(make("early", early))
    assert collapse(run) is None
    assert texts(run) == ["the global model predicts 1 of 7 classes (round 1)"]
    assert collapse(load_run(make("other", [record(1, warnings=["train: 2 of 3 replies"])]))) is None


def test_refused_clients_are_counted_by_reason(make):
    late = {"client": "client_01", "reason": "did not answer (simulated dropout)"}
    records = [
        record(1, refused=[late, {"client": "client_02", "reason": "did not answer (simulated dropout)"}]),
        record(2, refused=[late]),
        record(3, refused=[{"client": "client_00", "reason": "loss is not finite"}]),
    ]
    run = load_run(make("run", records))
    assert refusals(run)["client_01"] == {"did not answer (simulated dropout)": [1, 2]}
    assert texts(run) == [
        "2 clients were left out: did not answer (simulated dropout) (3 times, in rounds 1–2)",
        "client_00 was left out: loss is not finite (round 3)",
    ]


def test_undefined_metrics_are_grouped_by_reason(make):
    absent = "class 'DF' is absent"
    undefined = {"clean/auc_ovo": absent, "clean/auc_ovr": absent, "corrupted/auc_ovo": absent}
    undefined |= {f"clients/client_{k:02d}/auc_ovo": absent for k in range(2)}
    run = load_run(make("run", [record(1, undefined=undefined), record(2)]))
    assert texts(run) == [
        f"Not defined on the clean test set: auc_ovo, auc_ovr ({absent}). (round 1)",
        f"Not defined on the corrupted test set: auc_ovo ({absent}). (round 1)",
        f"auc_ovo is not defined for 2 clients, e.g. {absent}. (round 1)",
    ]


def test_unfinished_failed_and_empty_runs(make):
    stopped = load_run(make("stopped", [record(1)], status="interrupted", rounds=9))
    assert texts(stopped, "serious") == ["This run is not finished. (status: interrupted; 1 of 9 rounds recorded)"]
    failed = load_run(make("failed", [record(1)], status="failed", error="disk full"))
    assert "The run failed: disk full ()" in texts(failed, "serious")
    assert texts(load_run(make("new", [], status="new"))) == ["No round was recorded yet. (status: new)"]


def test_missing_rounds_and_unreadable_lines(make):
    folder = make("run", [record(1), record(4)], rounds=2)
    with open(folder / "records.jsonl", "a") as file:
        file.write("{")
    run = load_run(folder)
    assert "Some rounds have no record. (rounds 2–3)" in texts(run, "serious")
    assert "records.jsonl line 3 is torn and was left out ()" in texts(run, "note")


def test_what_was_known_before_the_run(make):
    run = load_run(make("run", [record(1)], warnings=["client_03 holds one class only (NV)"]))
    assert texts(run) == ["client_03 holds one class only (NV) (known before the first round)"]


def test_rounds_without_any_client_are_serious(make):
    out = [{"client": c, "reason": "bad"} for c in ("client_00", "client_01")]
    run = load_run(make("run", [record(1), record(2, admitted=[], refused=out)]))
    assert texts(run, "serious") == ["No client was admitted, so the model did not change. (round 2)"]
