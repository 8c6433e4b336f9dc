"""Files of an earlier report: removed where the new one does not write them, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fake_grid import images, make_grid, method, write_predictions
from typer.testing import CliRunner

from medfed.cli import app
from medfed.report.grid import write_grid_report
from medfed.report.own_files import MANIFEST, OwnFiles

METHODS = {m: method(m.lower()) for m in ("FedAvg", "FedGA")}


def numbers(condition, label, seed, round_):
    """As the predictions have it, which are right for two of three classes."""
    return {"clean": {"balanced_accuracy": 2 / 3}}


def grid(tmp_path: Path, ratios=(4, 6), methods=METHODS) -> Path:
    """A grid over two ratios, with predictions, so that its report has every kind of file."""
    folder = tmp_path / "g"
    conditions = {f"corrupted {k}": images(k) for k in ratios}
    axes = ["condition.partition.corrupted"] if len(ratios) > 1 else []
    how = {"metrics": ["balanced_accuracy"], "axes": axes, "seeds": [0, 1]}
    if not folder.exists():
        make_grid(folder, methods, conditions, numbers, **how)
        truth = np.arange(40) % 3
        for run in folder.glob("*/run.json"):
            write_predictions(run.parent, [1, 2], truth, truth > 0, np.arange(40) // 2)
        return folder
    content = json.loads((folder / "grid.json").read_text())
    cells = [c for c in content["cells"] if c["condition"] in conditions and c["method"] in methods]
    changed = {"cells": cells, "axes": axes, "methods": methods, "conditions": conditions}
    (folder / "grid.json").write_text(json.dumps({**content, **changed}))
    return folder


def files(folder: Path) -> set[str]:
    """Files of the folder that are no run's and not the grid's own."""
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    return {n for n in found if "-s" not in n and n not in ("grid.json", MANIFEST)}


def test_a_report_leaves_what_it_wrote_and_nothing_of_the_one_before(tmp_path):
    folder, said = grid(tmp_path), []
    whole = {p.relative_to(folder).as_posix() for p in write_grid_report(folder, bootstrap=20, say=said.append)}
    gone = {
        "intervals.csv",
        "tests.csv",
        "paper.csv",
        "paper.md",
        "against-condition-partition-corrupted.csv",
        "figures/intervals-1.pdf",
        "figures/intervals-2.pdf",
        "figures/fedism-figure-4-1.pdf",
    }
    assert gone <= whole == files(folder)
    assert said == []
    for name in ("notes.csv", "figures/mine.pdf"):
        (folder / name).write_text("mine")
    grid(tmp_path, ratios=(4,), methods={"FedAvg": METHODS["FedAvg"]})
    new = {p.relative_to(folder).as_posix() for p in write_grid_report(folder, bootstrap=0, say=said.append)}
    assert whole - new == gone
    assert files(folder) == new | {"notes.csv", "figures/mine.pdf"}
    assert sorted(said) == sorted(f"Removed: {folder / n}, of an earlier report" for n in gone)
    (noted,) = json.loads((folder / MANIFEST).read_text())["reports"].values()
    assert set(noted) == new


def test_without_intervals_those_of_before_go_and_their_folder_too(tmp_path):
    folder = grid(tmp_path, ratios=(4,))
    write_grid_report(folder, bootstrap=20)
    assert {"intervals.csv", "figures/intervals-1.pdf"} <= files(folder)
    told = CliRunner().invoke(app, ["report", str(folder), "--bootstrap", "0"])
    assert told.exit_code == 0, told.output
    assert f"Removed: {folder / 'intervals.csv'}" in told.output.replace("\n", "")
    assert not {n for n in files(folder) if "intervals" in n}
    assert not (folder / "figures").exists()
    assert "tests.csv" in files(folder)


def reported(folder: Path, *names: str) -> list[Path]:
    """Writes files as a report would, with their names in them."""
    (folder / "figures").mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(name)
    return [folder / name for name in names]


def test_what_was_changed_since_or_lies_behind_a_link_stays(tmp_path):
    folder, other = tmp_path / "out", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    OwnFiles(folder).settle(reported(folder, "report.html", "tests.csv", "intervals.csv", "figures/a.pdf"))
    (folder / "tests.csv").write_text("with my remarks")
    (folder / "intervals.csv").unlink()
    (other / "i.csv").write_text("intervals.csv")
    (folder / "intervals.csv").symlink_to(other / "i.csv")
    (folder / "figures").rename(other / "figures")
    (folder / "figures").symlink_to(other / "figures")
    said = OwnFiles(folder).settle([folder / "report.html"])
    assert [line.split(":")[0] for line in said] == ["Left"] * 3
    assert (folder / "tests.csv").read_text() == "with my remarks"
    assert (other / "i.csv").is_file()
    assert (other / "figures" / "a.pdf").is_file()
    assert OwnFiles(folder).settle([folder / "report.html"]) == []


def test_reports_of_two_grids_in_one_folder_leave_each_other_alone(tmp_path):
    OwnFiles(tmp_path, "one").settle(reported(tmp_path, "report.html", "tests.csv", "against-q.csv"))
    assert OwnFiles(tmp_path, "two").settle(reported(tmp_path, "report.html", "intervals.csv")) == []
    assert (tmp_path / "tests.csv").is_file()
    (tmp_path / "tests.csv").rename(tmp_path / "theirs")  # a file of this name is the second one's from now on
    assert OwnFiles(tmp_path, "two").settle(reported(tmp_path, "report.html", "tests.csv")) != []
    said = OwnFiles(tmp_path, "one").settle(reported(tmp_path, "report.html"))
    assert [line.split(", ")[0].rsplit("/", 1)[-1] for line in said] == ["against-q.csv"]
    assert (tmp_path / "tests.csv").is_file()


def test_names_that_differ_in_case_alone_are_one_file(tmp_path):
    OwnFiles(tmp_path).settle(reported(tmp_path, "against-Q.csv"))
    kept = reported(tmp_path, "against-q.csv")
    assert OwnFiles(tmp_path).settle(kept) == []
    assert kept[0].is_file()


HASH = "2689367b205c16ce32ed4200942b8b8b1e262dfc70d9bc9fbc77c49699a4f1df"
"""sha256 of ``ok``."""


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[" * 100_000,
        "7",
        "[]",
        "{}",
        '{"files": {"tests.csv": "ok"}}',
        '{"reports": ["tests.csv"]}',
        '{"reports": {"": ["tests.csv"]}}',
        '{"reports": {"": {"tests.csv": 1}}}',
        *(
            json.dumps({"reports": {"": {"tests.csv": HASH, name: HASH}}})
            for name in (
                "../outside.csv",
                "/OUTSIDE",
                "figures/../../outside.csv",
                "figures/../tests.csv",
                "..\\outside.csv",
                "C:outside.csv",
                "grid.json",
                "run-s0/report.html",
                "figures",
                "",
                ".hidden.csv",
                "tests.csv\n",
            )
        ),
    ],
)
def test_a_manifest_that_no_report_wrote_removes_nothing_and_is_said(tmp_path, content):
    folder = tmp_path / "out"
    (folder / "run-s0").mkdir(parents=True)
    theirs = [folder / n for n in ("tests.csv", "grid.json", "run-s0/report.html", ".hidden.csv", "C:outside.csv")]
    theirs += [tmp_path / "outside.csv"]
    for path in theirs:
        path.write_text("ok")
    (folder / MANIFEST).write_text(content.replace("/OUTSIDE", (tmp_path / "outside.csv").as_posix()))
    own = OwnFiles(folder)
    assert own.problem.startswith(f"{MANIFEST} cannot be used (")
    assert own.settle(reported(folder, "report.html")) == [own.problem]
    assert [p.read_text() for p in theirs] == ["ok"] * len(theirs)
    assert OwnFiles(folder).problem == ""


def test_the_page_says_that_earlier_files_are_not_known(tmp_path):
    folder, said = grid(tmp_path, ratios=(4,)), []
    (folder / MANIFEST).write_text("{")
    page = write_grid_report(folder, bootstrap=0, say=said.append)[0].read_text()
    assert "files of earlier reports were left where they are" in page
    assert len(said) == 1
