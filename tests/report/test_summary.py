from __future__ import annotations

import io

import pytest
from fake_runs import record
from rich.console import Console

from medfed.report.metrics import choose, metric
from medfed.report.runs import load_run
from medfed.report.summary import round_line, summary_table


def printed(table):
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return out.getvalue()


def row(text, label):
    line = next(x for x in text.splitlines() if label in x)
    return [c.strip() for c in line.replace("┃", "│").split("│") if c.strip()]


def test_summary_table_holds_the_means_of_the_last_five(make):
    text = printed(summary_table(load_run(make("run", [record(t, t / 10, t / 20) for t in range(1, 7)]))))
    # clean 0.2 to 0.6, corrupted half of that; the worst client is at 0.2 in every round
    assert row(text, "Balanced accuracy") == ["Balanced accuracy (%)", "40.00", "20.00", "30.00", "20.00", "20.00"]
    assert row(text, "AUC")[1:] == ["80.00", "70.00", "75.00", "n/a", "10.00"]
    assert "last 5 of 6" in text


def test_summary_table_says_what_is_not_whole(make):
    run = load_run(make("run", [record(1, 0.4), record(2, None)], rounds=8, status="running"))
    text = printed(summary_table(run))
    assert row(text, "Balanced accuracy")[1] == "40.00*"
    assert "not defined in all of them" in text
    assert "8 rounds were planned" in text


def test_summary_table_of_a_run_without_rounds_and_with_markup_in_its_name(make):
    text = printed(summary_table(load_run(make("run", [], name="[bold]x[/bold]"))))
    assert "[bold]x[/bold]" in text
    assert "last 0 of 0" in text


def test_round_line():
    line = round_line(record(3, 0.412, 0.3, warnings=["x", "y"]), planned=30)
    for part in (
        "round  3/30",
        "bacc clean 41.20  corrupted 30.00  worst 20.00",
        "train loss 1.250",
        "2/2 clients",
        "3.0 s",
        "! 2 warnings",
    ):
        assert part in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "bare",
    [{"round": 1}, {"round": 1, "evaluation": None, "clients": None, "asked": None}, record(1, None, None)],
)
def test_round_line_of_what_is_missing(bare):
    assert round_line(bare).startswith("round   1")


def test_metric_text():
    assert metric("balanced_accuracy").text(0.86734) == "86.73"
    assert metric("balanced_accuracy").text(-0.00001, signed=True) == "+0.00"
    assert metric("nll").text(1.23456) == "1.2346"
    assert metric("nll").text(None) == metric("nll").text(float("nan")) == "n/a"
    assert metric("calibration_error").higher is False
    assert metric("my_loss").higher is False
    assert metric("kappa").label == "Kappa"


def test_choose_takes_the_first_recorded_of_each_family():
    assert choose(["auc_ovr", "auc_ovo", "log_loss", "kappa", "balanced_accuracy"]) == [
        "balanced_accuracy",
        "auc_ovo",
        "log_loss",
    ]
