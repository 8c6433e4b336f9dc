from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser

import pandas as pd
import pytest
from fake_runs import fill, record

from medfed.errors import FederationError, MedfedError
from medfed.report.contents import (
    Predictions,
    client_table,
    condition_facts,
    configuration,
    corrupted_clients,
    last_predictions,
    left_out,
)
from medfed.report.html import experiment_page, write_report
from medfed.report.page import confusion, duration, when
from medfed.report.runs import load_run

VOID = {"meta", "br", "hr", "img", "link", "input", "col"}


class Page(HTMLParser):
    """Checks that tags nest, collects text, attributes and tables."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, k, v) for k, v in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, k, v) for k, v in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.words.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def row(self, start: str) -> list[str]:
        return next(r for r in self.rows if r and r[0] == start)


def check_self_contained(text: str, page: Page) -> None:
    for tag, name, value in page.attributes:
        if name in ("href", "src", "xlink:href", "action", "data", "poster", "srcset"):
            assert value.startswith("#"), (tag, name, value)
        assert not name.startswith("on"), (tag, name)
    assert "<script" not in text
    assert not re.search(r"@import|url\((?!#)", text)
    ids = [v for _, k, v in page.attributes if k == "id" and not re.fullmatch(r"[pmC][0-9a-fA-F_]+", v)]
    assert len(ids) == len(set(ids))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = fill(tmp_path_factory.mktemp("whole") / "fedism-seed0", method="fedism", method_settings={"q": 2.0})
    text = write_report(folder).read_text(encoding="utf-8")
    return folder, text, Page(text)


def test_page_is_self_contained_and_well_formed(whole):
    folder, text, page = whole
    assert (folder / "report.html").is_file()
    check_self_contained(text, page)
    assert [p.name for p in folder.glob(".report*")] == []


def test_every_figure_has_a_name_and_a_caption(whole):
    _, text, _ = whole
    assert len(re.findall(r'<svg role="img"[^>]*><title>[^<]+</title><desc>[^<]+</desc>', text)) == 13
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert len(captions) == 13
    assert all(re.search(r"better|flatter", c) for c in captions)


def test_header_and_final_numbers(whole):
    folder, _, page = whole
    for part in ("fedism, seed 0: 12 of 12 rounds, 6 clients, 7 classes", "2 min 5 s", "2026-03-01 10:00 UTC"):
        assert part in page.text
    run = load_run(folder)
    values = [r["evaluation"]["clean"]["balanced_accuracy"] for r in run.records[-5:]]
    assert page.row("Balanced accuracy (%)")[1].startswith(f"{100 * sum(values) / 5:.2f}round 12")
    recall = [r["evaluation"]["corrupted"]["recall/BCC"] for r in run.records[-5:]]
    assert page.row("BCC")[2] == f"{100 * sum(recall) / 5:.2f}"


def test_condition_and_what_was_left_out(whole):
    folder, text, page = whole
    labels = pd.read_parquet(folder / "condition/clients.parquet")
    expected = [str(((labels.client == "client_02") & (labels.observed == c)).sum()) for c in range(7)]
    assert page.row("client_02") == ["client_02", "96", *expected]
    assert len(re.findall(r'<tr class="corrupted"><th scope="row">client_0[45]', text)) == 2
    assert page.row("cannot be decoded") == ["cannot be decoded", "2"]
    assert page.row("monochrome1 inverted") == ["monochrome1 inverted", "3"]
    assert "secret" not in text


def test_configuration_and_how_to_go_on(whole):
    _, _, page = whole
    assert "medfed resume fedism-seed0" in page.text
    assert "medfed run fedism-seed0/experiment.yaml" in page.text
    assert "name: demo method: name: fedism q: 2.0 rounds: 12" in page.text


def test_untrusted_names_are_escaped(tmp_path):
    evil = '<script>alert("x")</script>'
    folder = fill(tmp_path / "run", rounds=3, clients=3, classes=("<b>A</b>", "B"), name=evil, method=evil)
    text = (folder / "records.jsonl").read_text().replace("client_01", "<script>1</script>")
    (folder / "records.jsonl").write_text(text)
    meta = json.loads((folder / "run.json").read_text())
    meta |= {"status": evil, "condition_hash": evil, "uid": evil, "error": evil, "versions": {evil: evil}}
    (folder / "run.json").write_text(json.dumps(meta))
    (folder / "experiment.yaml").write_text(f"name: {evil}\n")
    (folder / "findings/unusable.csv").write_text("path,reason,sample\na,<script>2</script>,b\n")
    page = write_report(folder).read_text(encoding="utf-8")
    check_self_contained(page, Page(page))
    assert "&lt;script&gt;1&lt;/script&gt;" in page
    assert "&lt;b&gt;A&lt;/b&gt;" in page
    assert "<b>A" not in page


def test_missing_pieces_are_said_not_fatal(tmp_path):
    folder = fill(tmp_path / "run", rounds=2, clients=2, corrupted=1)
    for name in ("condition", "findings", "predictions"):
        shutil.rmtree(folder / name)
    (folder / "experiment.yaml").unlink()
    text = Page(write_report(folder).read_text(encoding="utf-8")).text
    for what in (
        "What the condition was made from: not recorded",
        "Samples by client and class: not recorded",
        "Which clients are corrupted is not recorded",
        "Files left out: not recorded",
        "Corrections: not recorded",
        "Predictions of single samples: not recorded",
        "experiment.yaml: not recorded",
    ):
        assert what in text


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("condition/truth.parquet", {"corrupted"}),
        ("condition/clients.parquet", {"corrupted", "table"}),
        ("condition/condition.json", {"facts"}),
        ("findings/unusable.csv", {"reasons"}),
        ("findings/corrections.json", {"corrections"}),
        ("predictions/round-0001.parquet", {"predictions"}),
        ("experiment.yaml", {"config"}),
    ],
)
def test_each_missing_file_costs_only_what_it_holds(tmp_path, name, lost):
    folder = fill(tmp_path / "run", rounds=1, clients=2, corrupted=1)
    (folder / name).unlink()
    run = load_run(folder)
    found = {
        "corrupted": corrupted_clients(run),
        "table": client_table(run),
        "facts": condition_facts(run),
        "reasons": left_out(run).reasons,
        "corrections": left_out(run).corrections,
        "predictions": last_predictions(run),
        "config": configuration(run),
    }
    assert {k for k, v in found.items() if v is None} == lost


def test_columns_in_which_nothing_was_measured_are_left_out(make):
    records = [{"round": 1, "evaluation": {"clean": {"accuracy": 0.5}, "clients": {"a": {"accuracy": 0.25}}}}]
    page = Page(write_report(make("clean", records)).read_text(encoding="utf-8"))
    row = page.row("Accuracy (%)")
    assert row[1].startswith("50.00")
    assert row[2].startswith("25.00")
    # The name, two columns, and which direction is better.
    assert len(row) == 4


def test_a_bare_run_and_a_run_without_rounds(make):
    page = Page(write_report(make("bare", [{"round": 1}])).read_text(encoding="utf-8"))
    assert "Evaluation: not recorded" in page.text
    empty = make("empty", [], status="running", rounds=5, started=None, finished=None, versions=None, classes=None)
    page = Page(write_report(empty).read_text(encoding="utf-8"))
    assert "No round was recorded yet" in page.text
    least = make("least", [])
    (least / "run.json").write_text("{}")
    assert "unknown method" in Page(write_report(least).read_text(encoding="utf-8")).text


def test_unreadable_pieces_are_named(tmp_path):
    folder = fill(tmp_path / "run", rounds=2, clients=2)
    (folder / "condition/clients.parquet").write_bytes(b"PAR1 not really")
    (folder / "findings/corrections.json").write_text("[1]")
    (folder / "predictions/round-0009.parquet").write_bytes(b"")
    text = Page(write_report(folder).read_text(encoding="utf-8")).text
    for name in ("condition/clients.parquet", "findings/corrections.json", "predictions/round-0009.parquet"):
        assert f"{name} cannot be read" in text


def test_collapsed_unfinished_single_round_multilabel(tmp_path):
    folder = fill(
        tmp_path / "run",
        rounds=1,
        clients=2,
        classes=("any", "epidural"),
        multilabel=True,
        collapsed=True,
        status="interrupted",
    )
    text = write_report(folder, tmp_path / "elsewhere" / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    check_self_contained(text, page)
    assert "The model has collapsed (the global model predicts 1 of 2 classes)." in page.text
    assert "This run is not finished. (status: interrupted; 1 of 1 rounds recorded)" in page.text
    table = pd.read_parquet(folder / "predictions/round-0001.parquet").query("set == 'clean'")
    held, said = table["label_any"] == 1, table["p_any"] >= 0.5
    expected = [(held & said).sum(), (held & ~said).sum(), (~held & said).sum(), (~held & ~said).sum()]
    rows = [r for r in page.rows if r and r[0] == "any" and len(r) == 5]
    assert rows[0][1:] == [str(n) for n in expected]


def test_confusion_by_hand(make):
    run = load_run(make("run", []))
    p = [[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.1, 0.1, 0.8], [0.6, 0.3, 0.1]]
    import numpy as np

    rows = dict(confusion(run, Predictions(1, np.array([0, 0, 2, 0]), np.array(p), 0))["rows"])
    assert rows["MEL"] == [(2, pytest.approx(2 / 3)), (1, pytest.approx(1 / 3)), (0, 0.0)]
    assert rows["NV"] == [(0, 0.0)] * 3  # no such sample, and no division by zero
    assert rows["BCC"] == [(0, 0.0), (0, 0.0), (1, 1.0)]


def test_predictions_that_are_not_finite_are_counted_and_left_out(tmp_path):
    folder = fill(tmp_path / "run", rounds=1, clients=2)
    file = folder / "predictions/round-0001.parquet"
    table = pd.read_parquet(file)
    table.loc[table.index[:3], "p_NV"] = float("nan")
    table.to_parquet(file)
    found = last_predictions(load_run(folder))
    assert sum(p.unusable for p in found.values()) >= 3
    assert all(len(p.labels) + p.unusable == 200 for p in found.values())
    assert "samples without finite scores" in write_report(folder).read_text(encoding="utf-8")


def test_contents_of_a_run(tmp_path):
    folder = fill(tmp_path / "run", rounds=1, clients=4, corrupted=1)
    run = load_run(folder)
    assert corrupted_clients(run) == {"client_03"}
    assert client_table(run).samples.tolist() == [96] * 4
    assert left_out(run).reasons == {"cannot be decoded": 2, "no label": 1}
    run.meta["clients"].append("client_empty")
    assert client_table(run).counts[-1].sum() == 0
    run.meta["classes"] = ["another"]
    assert last_predictions(run) is None
    assert "lack the columns p_another" in run.problems[-1]


@pytest.mark.parametrize(
    ("started", "finished", "text"),
    [
        ("2026-03-01T10:00:00Z", "2026-03-01T13:05:09Z", "3 h 5 min"),
        (1000.0, 1012.5, "12.5 s"),
        ("2026-03-01T10:00:00+00:00", None, "6.0 s in recorded rounds"),
        ("yesterday", "today", "6.0 s in recorded rounds"),
        ("2026-03-01T10:00:00", "2026-03-01T10:00:07+00:00", "6.0 s in recorded rounds"),
    ],
)
def test_duration(make, started, finished, text):
    assert duration(load_run(make("run", [record(1), record(2)], started=started, finished=finished))) == text


def test_when():
    assert when("2026-03-01T12:00:00+02:00") == "2026-03-01 10:00 UTC"
    assert when("2026-03-01T12:00:00") == "2026-03-01 12:00"
    assert when(None) == when("soon") == when(1e30) == "not recorded"


def test_a_long_run_stays_below_two_megabytes(tmp_path):
    folder = fill(tmp_path / "run", rounds=300, clients=20, corrupted=4)
    assert write_report(folder).stat().st_size < 2_000_000


def test_a_page_that_cannot_be_written(make, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FederationError, match="cannot be written"):
        write_report(make("run", [record(1)]), tmp_path / "file" / "page.html")
    with pytest.raises(MedfedError, match="no run directory"):
        write_report(tmp_path / "nowhere")


def test_comparison_page(make, tmp_path):
    levels = {"fedavg": (0.50, 0.52), "<i>ism": (0.56, 0.56)}
    runs = [
        make(f"{m.strip('<i>')}-{s}", [record(1, v), record(2, v)], method=m, seed=s)
        for m, values in levels.items()
        for s, v in enumerate(values)
    ]
    text = experiment_page(runs, tmp_path / "page.html", title="A & B").read_text(encoding="utf-8")
    page = Page(text)
    check_self_contained(text, page)
    assert "<i>ism" not in text
    rows = [r for r in page.rows if r and r[0] == "<i>ism"]
    assert rows[0][1] == "56.00 ± 0.00"
    assert rows[2][1] == "+5.00 ± 1.41 (2/2)"  # differences 6 and 4: deviation sqrt(2)
    assert [r[2] for r in rows if len(r) == 7][:2] == ["+6.00", "+4.00"]
    assert '<td class="best">56.00' in text
    assert "paired by seed" in page.text


def test_comparison_page_of_one_run_and_of_unpaired_runs(make, tmp_path):
    one = make("one", [record(1)])
    other = make("other", [record(1)], method="b", condition_hash="other")
    Page(experiment_page([one], tmp_path / "one.html").read_text(encoding="utf-8"))
    with pytest.raises(MedfedError, match="not paired"):
        experiment_page([one, other], tmp_path / "two.html")
    page = experiment_page([load_run(one), other], tmp_path / "two.html", allow_unpaired=True)
    assert "not paired, so there are no differences" in Page(page.read_text(encoding="utf-8")).text
