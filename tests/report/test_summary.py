from __future__ import annotations

import io

import pytest
from fake_runs import record
from rich.console import Console

from medfed.report.metrics import choose, metric
from medfed.report.runs import load_run
from medfed.report.summary import legend, round_line, summary_table


def printed(table):
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return out.getvalue()


def row(text, label):
    line = next(x for x in text.splitlines() if label in x)
    words = line.split()
    return [" ".join(words[:-5]), *words[-5:]]


def test_summary_table_fits_80_characters(make):
    everything = record(1)
    for group in ("clean", "corrupted"):
        everything["evaluation"][group] |= {"f1_macro": 0.5, "nll": 1.23456, "calibration_error": 0.2}
    out = io.StringIO()
    Console(file=out, width=80).print(summary_table(load_run(make("run", [everything]))))
    text = out.getvalue()
    assert "…" not in text
    for name in ("worst client", "Calibration error (ECE) (%)", "F1, mean over classes (%)"):
        assert name in text


def test_summary_table_holds_the_means_of_the_last_five(make):
    text = printed(summary_table(load_run(make("run", [record(t, t / 10, t / 20) for t in range(1, 7)]))))
    # clean 0.2 to 0.6, corrupted half of that; the worst client is at 0.2 in every round
    assert row(text, "Balanced accuracy") == ["Balanced accuracy (%)", "40.00", "20.00", "30.00", "20.00", "20.00"]
    assert row(text, "AUC")[1:] == ["80.00", "70.00", "75.00", "n/a", "10.00"]
    assert "last 5 of 6" in text


def test_summary_table_of_a_run_without_corruption_has_no_empty_columns(make):
    bare = record(1)
    del bare["evaluation"]["corrupted"]
    text = printed(summary_table(load_run(make("run", [bare]))))
    assert "worst client" in text
    assert "corrupted" not in text
    assert "gap" not in text


def test_summary_table_says_what_is_not_whole(make):
    run = load_run(make("run", [record(1, 0.4), record(2, None)], rounds=8, status="running"))
    text = printed(summary_table(run))
    assert row(text, "Balanced accuracy")[1] == "40.00*"
    assert "not defined in all of them" in text
    assert "8 rounds were planned" in " ".join(text.split())


def test_summary_table_of_a_run_without_rounds_and_with_markup_in_its_name(make):
    text = printed(summary_table(load_run(make("run", [], name="[bold]x[/bold]"))))
    assert "[bold]x[/bold]" in text
    assert "last 0 of 0" in text


def test_round_line():
    line = round_line(record(3, 0.412, 0.3, warnings=["x", "y"]), planned=30)
    for part in (
        "round  3/30",
        "clean 41.20 %  corrupted 30.00 %  worst 20.00 %",
        "loss 1.250",
        "3.0 s",
    ):
        assert part in line
    assert "\n" not in line
    assert "clients" not in line  # all answered
    assert len(line) <= 80


def test_round_line_counts_who_answered_where_one_did_not():
    assert "1 of 2 clients" in round_line(record(3, admitted=["client_00"]), planned=30)


def test_legend_says_what_the_numbers_of_a_round_are():
    assert legend(record(1)).startswith("Balanced accuracy of the global model on the clean and the corrupted test set")
    bare = record(1)
    del bare["evaluation"]["corrupted"]
    assert "clean test set" in legend(bare)
    assert "corrupted" not in legend(bare)
    assert legend({"round": 1}) == "Loss: mean training loss of the clients."


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


def test_round_line_of_an_identification_and_of_a_relabelling():
    judged = record(1, 0.4)
    judged["server"] = {"clean_clients": 3, "noisy_clients": 6, "undetermined_clients": 1}
    assert "3 of 10 clients judged clean" in round_line(judged)
    changed = record(2, 0.4)
    changed["server"] = {"relabelled": True}
    changed["clients"] = {"a": {"edited": 4}, "b": {"edited": 3}, "c": {}}
    assert "7 targets changed" in round_line(changed)
    changed["evaluation"] = {**changed["evaluation"], "relabelling": {"noise_rate": 0.42, "residual_noise": 0.231}}
    assert "wrong labels 42.0 % -> 23.1 %" in round_line(changed)
    assert "judged" not in round_line(record(3, 0.4))
