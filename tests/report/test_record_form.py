"""Lines of JSON of another form than a round record's: left out and named, wherever records are read."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from fake_grid import images, make_grid, method
from fake_runs import record, write_run
from rich.console import Console

from medfed.errors import MedfedError
from medfed.report.compare import compare
from medfed.report.grid import write_grid_report
from medfed.report.grid_cells import load_cells
from medfed.report.html import environment, write_report
from medfed.report.page import comparison_view
from medfed.report.record_form import Relabelling, RunFacts, Shares, fault
from medfed.report.reliability import RELABELLING
from medfed.report.runs import load_run
from medfed.report.summary import summary_table

WRONG = {
    "[]": "it is not an object",
    "7": "it is not an object",
    "null": "it is not an object",
    '"round"': "it is not an object",
    "{}": "round is missing",
    '{"round": "x"}': "round is not a whole number from 1 to 1000000",
    '{"round": 3.0}': "round is not a whole number from 1 to 1000000",
    '{"round": 0}': "round is not a whole number from 1 to 1000000",
    '{"round": 10000000000000}': "round is not a whole number from 1 to 1000000",
}
PARTS = [
    ({"clients": [1]}, "clients is not an object"),
    ({"clients": {"client_00": [1]}}, "clients/client_00 is not an object"),
    ({"clients": {"client_00": {"samples": "many"}}}, "clients/client_00/samples is not a number"),
    ({"clients": {"client_00": {"edited": [2]}}}, "clients/client_00/edited is not a number"),
    ({"evaluation": 3}, "evaluation is not an object"),
    ({"evaluation": [1]}, "evaluation is not an object"),
    ({"evaluation": {"clean": [0.5]}}, "evaluation/clean is not an object"),
    ({"evaluation": {"clients": [1]}}, "evaluation/clients is not an object"),
    ({"evaluation": {"identification": 1}}, "evaluation/identification is not an object"),
    ({"evaluation": {"identification": {"clients": 1}}}, "evaluation/identification/clients is not an object"),
    ({"evaluation": {"relabelling": {"residual_noise": "x"}}}, "evaluation/relabelling/residual_noise is not a number"),
    ({"evaluation": {"relabelling": {"clients": [1]}}}, "evaluation/relabelling/clients is not an object"),
    ({"asked": 3}, "asked is not a list"),
    ({"asked": [["client_00"]]}, "asked/0 is not text"),
    ({"admitted": {"client_00": 1}}, "admitted is not a list"),
    ({"refused": ["client_00"]}, "refused/0 is not an object"),
    ({"refused": 1}, "refused is not a list"),
    ({"warnings": 1}, "warnings is not a list"),
    ({"undefined": ["clean/auc"]}, "undefined is not an object"),
    ({"seconds": 3}, "seconds is not an object"),
    ({"bytes": 3}, "bytes is not an object"),
    ({"server": "ok"}, "server is not an object"),
]
WRONG |= {json.dumps(record(3) | part): why for part, why in PARTS}
ODD = [
    {"evaluation": None, "clients": None, "server": None, "asked": None, "refused": None, "undefined": None},
    {"evaluation": {"clean": None, "corrupted": {"balanced_accuracy": "high"}, "clients": {"client_00": None}}},
    {"evaluation": {"clean": {"balanced_accuracy": 10**400, "recall/MEL": [1]}, "relabelling": {"edited": None}}},
    {"clients": {"client_00": {"loss": "low", "status": ["clean"], "edited": None}, "client_01": None}},
    {"clients": {"client_00": {"status": "noisy", "edited": 3}}, "server": {"relabelled": True}},
    {"seconds": {"total": "long"}, "bytes": {"down": None}, "warnings": [3], "refused": [{"client": 3}], "more": [1]},
]
"""Records that lack numbers and can be read."""


def with_line(folder: Path, *lines: str) -> Path:
    with open(folder / "records.jsonl", "a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    return folder


@pytest.mark.parametrize("line", WRONG)
def test_a_line_of_another_form_is_left_out_and_named(make, line):
    run = load_run(with_line(make("run", [record(1), record(2)], rounds=3), line, json.dumps(record(4))))
    assert run.rounds == [1, 2, 4]
    assert run.problems == [f"records.jsonl line 3 is not a round record ({WRONG[line]}) and was left out"]


def test_a_line_that_is_too_deep_is_torn(make):
    run = load_run(with_line(make("run", [record(1)]), '{"round": 2, "server": ' + "[" * 200_000))
    assert run.problems == ["records.jsonl line 2 is torn and was left out"]


def test_the_page_of_a_run_names_every_such_line(make, tmp_path):
    folder = with_line(make("run", [record(1), record(2)], rounds=3), *WRONG)
    page = write_report(folder, tmp_path / "report.html").read_text()
    for number, why in enumerate(WRONG.values(), start=3):
        assert f"records.jsonl line {number} is not a round record ({why}) and was left out" in page
    Console(file=io.StringIO()).print(summary_table(load_run(folder)))


def test_a_comparison_names_them(make):
    one = with_line(make("a", [record(1), record(2)], method="fedavg"), *WRONG)
    other = make("b", [record(1), record(2)], method="fedism")
    result = compare([load_run(one), load_run(other)])
    said = "a (records.jsonl line 3 is not a round record (it is not an object) and was left out; "
    assert [n for n in result.notes if "line" in n] == [
        f"not read as a whole: {said}{load_run(one).problems[1]} and {len(WRONG) - 2} more)"
    ]
    assert environment().get_template("experiment.html").render(comparison_view(result, "t"))


def test_a_grid_names_them(tmp_path):
    def numbers(*_):
        return {"clean": {"balanced_accuracy": 0.5}}

    methods = {m: method(m) for m in ("fedavg", "fedprox")}
    folder = make_grid(tmp_path / "g", methods, {"": images()}, numbers, seeds=[0], metrics=["balanced_accuracy"])
    torn = folder / "fedavg-s0" / "records.jsonl"
    lines = torn.read_text().splitlines()
    torn.write_text(f"{lines[0]}\n{json.dumps(json.loads(lines[1]) | {'clients': [1]})}\n")
    cell = load_cells(folder).by_place["", "fedavg", 0]
    said = "records.jsonl line 2 is not a round record (clients is not an object) and was left out"
    assert (cell.standing, cell.reason) == ("not finished", f"completed, 1 of 2 rounds recorded; {said}")
    page = write_grid_report(folder, tmp_path / "out", bootstrap=0)[0].read_text()
    assert f"not read as a whole: fedavg-s0 ({said})" in page


@pytest.mark.parametrize("more", ODD, ids=range(len(ODD)))
def test_a_record_that_lacks_numbers_is_read_and_shown(tmp_path, more):
    folder = write_run(tmp_path / "run", [record(1), record(2) | more])
    assert load_run(folder).rounds == [1, 2]
    assert load_run(folder).problems == []
    write_report(folder, tmp_path / "report.html")
    compare([load_run(folder)])


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"seed": [0]}, "seed is not a number"),
        ({"rounds": "three"}, "rounds is not a number"),
        ({"clients": 3}, "clients is not a list"),
        ({"classes": {"MEL": 0}}, "classes is not a list"),
        ({"method_settings": [1]}, "method_settings is not an object"),
        ({"condition_hash": {}}, "condition_hash is not text"),
        ({"warnings": "few"}, "warnings is not a list"),
    ],
)
def test_a_run_whose_facts_have_another_form_is_refused(make, facts, why):
    with pytest.raises(MedfedError, match=rf"run\.json is not that of a run: {why}\. Restore the file"):
        load_run(make("run", [record(1)], **facts))


def test_the_shares_of_a_relabelling_are_all_checked():
    assert set(Shares.model_fields) == set(RELABELLING)
    for name in (*RELABELLING, "edited"):
        assert fault(Relabelling, {name: "x"}) == f"{name} is not a number"
        assert fault(Relabelling, {name: None}) == ""
    assert fault(RunFacts, {}) == ""
