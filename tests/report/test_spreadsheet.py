"""No CSV file that a person opens holds what a spreadsheet would run, however files, labels and patients are named."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from medfed.spreadsheet import inert, inert_table

DANGEROUS = (
    "=1+1",
    '=HYPERLINK("http://x";"y")',
    "+49 6221",
    "-2+3+cmd|' /C calc'!A0",
    "@SUM(1+1)",
    "\t=1",
    "\r=1",
    "＝1+1",
    "a;=1+1",
    "a\n=1",
)
HARMLESS = (
    "",
    "a",
    "ISIC_0024306",
    "Müller, Jürgen",
    'a "b"',
    "a=b",
    "c-d",
    "/data/=x",
    "1",
    "-1",
    "+2.5",
    "-1e-3",
    "–",
)


@pytest.mark.parametrize("text", DANGEROUS)
def test_what_looks_like_a_formula_becomes_text(text):
    made = inert(text)
    assert made != text
    assert bare(made) == bare(text)  # nothing else changes
    assert not runs(made)


@pytest.mark.parametrize("value", [*HARMLESS, 3, -0.5, None, True])
def test_everything_else_stays(value):
    assert inert(value) is value


def test_tables_keep_their_numbers():
    table = pd.DataFrame({"=a": ["=1", "b", None], "n": [-1.5, np.nan, 2.0], "k": [-1, 0, 1]})
    made = inert_table(table)
    assert made.columns.tolist() == ["'=a", "n", "k"]
    assert made["'=a"].tolist()[:2] == ["'=1", "b"]
    assert pd.isna(made["'=a"][2])
    pd.testing.assert_frame_equal(made[["n", "k"]], table[["n", "k"]])
    assert table.columns[0] == "=a"
    assert inert_table(table[:0]).columns.tolist() == ["'=a", "n", "k"]


def bare(text: str) -> str:
    return text.replace("'", "").replace("\r", " ")


def runs(cell: str) -> bool:
    """Whether a cell would be run, also where the semicolon splits cells."""
    for part in cell.replace("\n", ";").replace("\r", ";").replace("\t", ";").split(";"):
        if part.lstrip()[:1] in ("=", "+", "-", "@", "＝", "＋", "－", "＠"):
            try:
                float(part)
            except ValueError:
                return True
    return False


def audit(folder: Path) -> None:
    from medfed.report.audit import work_list
    from medfed.report.audit_page import write_csv
    from medfed.report.audit_signals import Evidence

    count = len(DANGEROUS)
    evidence = Evidence(left_out=np.ones(count, int), left_out_margin=np.linspace(0.1, 1, count))
    files = {s: (s, 0) for s in DANGEROUS}
    found = work_list(DANGEROUS, np.zeros(count, int), ("=malignant", "@benign"), evidence, files)
    write_csv(found.table, folder / "audit.csv")


def run_findings(folder: Path) -> None:
    from medfed.data.cohort import Findings, Unusable
    from medfed.experiment import write_findings

    write_findings(Findings(unusable=[Unusable(n, "damaged", n) for n in DANGEROUS]), folder)


def inspection(folder: Path) -> None:
    from medfed.data.cohort import Unusable
    from medfed.data.inspection import Inspection

    pairs = pd.DataFrame({"first": DANGEROUS, "second": DANGEROUS, "distance": 0})
    findings = SimpleNamespace(unusable=[Unusable(n, "damaged", n) for n in DANGEROUS])
    made = SimpleNamespace(
        cohort=SimpleNamespace(findings=findings), duplicates=pairs, straddling=pairs, sheet=None, summary=dict
    )
    Inspection.write(made, folder)


def predictions(folder: Path) -> None:
    from medfed.prediction_files import _table

    folder.mkdir()
    about = SimpleNamespace(model="=m", round=3, preprocessing="-p")
    _table(folder / "images.csv", ["file", "p_a"], [{"file": n, "p_a": -0.5} for n in DANGEROUS], about)


@pytest.mark.parametrize("write", [audit, run_findings, inspection, predictions])
def test_files_that_people_open(write, tmp_path):
    write(tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.csv"))
    assert files
    for file in files:
        with open(file, encoding="utf-8-sig", newline="") as text:
            rows = list(csv.reader(text))
        assert len(rows) == len(DANGEROUS) + 1
        assert [c for row in rows for c in row if runs(c)] == []
        assert {bare(n) for n in DANGEROUS} <= {bare(c) for row in rows for c in row}
