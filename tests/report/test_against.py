from __future__ import annotations

import csv
import io
import json
import math
import re

import pytest
import yaml
from fake_runs import record
from rich.console import Console
from test_html import Page, check_self_contained

from medfed.errors import MedfedError
from medfed.report.against import against, candidates
from medfed.report.against_figures import against_figure, against_plot
from medfed.report.compare import compare
from medfed.report.html import experiment_page
from medfed.report.runs import load_run

KEY = "condition.label_noise.rate"


def one(make, method, seed, rate, level, *, kind="symmetric", alpha=0.5, apply=True, settings=None, noise=True):
    """A run of one round with an accuracy of its own; its condition follows from what describes it."""
    r = record(1)
    r["evaluation"] = {"clean": {"accuracy": level, "f1_macro": level - 0.1}}
    name = f"{method}-{kind}-{alpha}-{rate}-{apply}-{noise}-{seed}-{(settings or {}).get('period', '')}"
    folder = make(
        name,
        [r],
        method=method,
        seed=seed,
        method_settings=settings or {},
        condition_hash=f"{seed} {alpha} {kind} {rate}" if apply and noise else f"{seed} {alpha} true",
        partition_hash=f"{seed} {alpha}",
        mislabelled={"client_01": 5} if apply and noise else {},
    )
    label_noise = {"kind": kind, "rate": rate, "map": {"MEL": "NV"} if kind == "asymmetric" else None, "apply": apply}
    condition = {"seed": seed, "partition": {"alpha": alpha}, "label_noise": label_noise if noise else None}
    experiment = {"cohort": {"root": f"at/{seed}"}, "condition": condition, "method": method, "rounds": 1, "seed": seed}
    (folder / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    return load_run(folder)


@pytest.fixture
def runs(make):
    found = []
    for seed, shift in ((0, -0.01), (1, 0.01)):
        for rate in (0.9, 0.4):
            found.append(one(make, "fedavg", seed, rate, 1 - rate + shift))
            found.append(one(make, "fedsir", seed, rate, 1 - rate / 2))
    return found


def means(panel, method):
    return [(x, pytest.approx(c.mean), c.std) for x, c in panel.line(method, "accuracy", "clean")]


def test_each_value_is_a_paired_comparison_of_its_own(runs):
    result = against(runs, KEY)
    (panel,) = result.panels
    assert panel.title == ""
    assert list(panel.points) == [0.4, 0.9]
    # seeds at +- 0.01: the sample deviation is 0.01 times the root of 2
    spread = pytest.approx(0.01 * math.sqrt(2))
    assert [(x, c.mean, c.std) for x, c in panel.line("fedavg", "accuracy", "clean")] == [
        (0.4, pytest.approx(0.6), spread),
        (0.9, pytest.approx(0.1), spread),
    ]
    cell = panel.cell(0.9, "fedsir", "accuracy", "clean")
    assert cell.differences == pytest.approx({0: 0.55 - 0.09, 1: 0.55 - 0.11})
    assert result.metrics == ["accuracy", "f1_macro"]
    assert result.label == "label noise rate"
    assert all(c.paired for c in panel.points.values())


def test_what_else_differs_makes_panels(make, runs):
    more = [one(make, "fedavg", s, 0.4, 0.5, kind="asymmetric", alpha=a) for s in (0, 1) for a in (2.0, 10.0)]
    result = against([*runs, *more], KEY)
    # the class map follows from the kind of noise, and roots of the cohort make no panel
    assert [p.title for p in result.panels] == ["asymmetric, alpha 2", "asymmetric, alpha 10", "symmetric, alpha 0.5"]
    assert [list(p.points) for p in result.panels] == [[0.4], [0.4], [0.4, 0.9]]
    assert result.panels[0].line("fedsir", "accuracy", "clean") == []


@pytest.mark.parametrize("noise", [True, False])
def test_a_reference_on_true_labels_stands_at_every_value(make, runs, noise):
    references = [one(make, "fedavg", s, 0.4, 0.95, apply=False, noise=noise) for s in (0, 1)]
    other = [one(make, "fedavg", s, 0.4, 0.2, alpha=2.0) for s in (0, 1)]
    result = against([*runs, *other, *references], KEY)
    assert result.methods == ["fedavg", "fedavg (true labels)", "fedsir"]
    first, second = result.panels
    assert (first.title, second.title) == ("alpha 0.5", "alpha 2")
    line = [(x, c.mean, c.rank) for x, c in first.line("fedavg (true labels)", "accuracy", "clean")]
    assert line == [(0.4, pytest.approx(0.95), None), (0.9, pytest.approx(0.95), None)]
    assert second.line("fedavg (true labels)", "accuracy", "clean") == []  # of another partition
    assert first.cell(0.9, "fedsir", "accuracy", "clean").rank == 1
    assert first.cell(0.9, "fedavg (true labels)", "accuracy", "clean").differences == pytest.approx(
        {0: 0.95 - 0.09, 1: 0.95 - 0.11}
    )


def test_a_reference_given_once_for_each_value_counts_once(make, runs):
    references = [one(make, "fedavg", 0, rate, 0.95, apply=False) for rate in (0.4, 0.9)]
    (panel,) = against([*runs, *references], KEY).panels
    assert [len(c.per_run) for _, c in panel.line("fedavg (true labels)", "accuracy", "clean")] == [1, 1]


def test_a_setting_of_the_method_leaves_its_label(make):
    runs = [one(make, "fedsir", 0, 0.4, 0.5 + p / 100, settings={"period": p, "kd": True}) for p in (20, 5)]
    runs.append(one(make, "fedavg", 0, 0.4, 0.4))
    result = against(runs, "method.period", baseline="fedavg")
    (panel,) = result.panels
    assert result.methods == ["fedsir", "fedavg"]
    assert [(x, c.mean) for x, c in panel.line("fedsir", "accuracy", "clean")] == [(5, 0.55), (20, 0.7)]
    assert [x for x, _ in panel.line("fedavg", "accuracy", "clean")] == [5, 20]  # has no such setting: a level line


def test_a_missing_baseline_is_said(make, runs):
    result = against([r for r in runs if (r.method, "-0.9-" in r.folder) != ("fedavg", True)], KEY, baseline="fedavg")
    assert result.baseline == "fedavg"
    assert f"no run of fedavg at {KEY} 0.9: differences there are to fedsir" in result.notes


def test_an_unpaired_group_is_named(make, runs):
    twice = load_run(make("again", [record(1)], method="fedavg", condition_hash="other"))
    (twice.path / "experiment.yaml").write_text((runs[0].path / "experiment.yaml").read_text())
    with pytest.raises(MedfedError, match=rf"at {KEY} 0.9: the runs are not paired.*again"):
        against([*runs, twice], KEY)
    result = against([*runs, twice], KEY, allow_unpaired=True)
    assert any(n.startswith(f"at {KEY} 0.9: not paired") for n in result.notes)


def test_wrong_keys_are_answered(runs):
    assert candidates(runs) == [KEY]
    with pytest.raises(MedfedError, match=f"no run has a number condition.rate. What differs between the runs: {KEY}"):
        against(runs, "condition.rate")
    with pytest.raises(MedfedError, match=r"no run has a number condition.label_noise.kind"):
        against(runs, "condition.label_noise.kind")
    with pytest.raises(MedfedError, match="no run to compare"):
        against([], KEY)
    with pytest.raises(MedfedError, match=f"--against {KEY}"):
        compare(runs)


def test_a_number_that_a_run_lacks_is_named(make, runs):
    bare = load_run(make("bare", [record(1)]))
    (bare.path / "experiment.yaml").write_text("condition: {seed: 0}\n")
    with pytest.raises(MedfedError, match=r"condition.partition.alpha is not given in bare"):
        against([*runs, bare], "condition.partition.alpha")


def test_the_terminal_has_80_characters(make, runs):
    runs += [one(make, "fedsir", s, r, 0.5, settings={"period": 5}) for s in (0, 1) for r in (0.1, 0.2, 0.3, 0.6)]
    console = Console(width=80, file=io.StringIO(), highlight=False)
    against(runs, KEY).render(console)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("60.00 ± 1.41" in line for line in lines)
    assert any("+45.00 ± 1.41" in line for line in lines)


def test_exports_hold_the_same_numbers(runs):
    result = against(runs, KEY)
    rows = [r for r in csv.DictReader(io.StringIO(result.to_csv())) if r["column"] == "clean"]
    assert {(r[KEY], r["method"]): float(r["mean"]) for r in rows if r["metric"] == "accuracy"} == {
        ("0.4", "fedavg"): 60.0,
        ("0.4", "fedsir"): 80.0,
        ("0.9", "fedavg"): 10.0,
        ("0.9", "fedsir"): 55.0,
    }
    groups = json.loads(result.to_json())["groups"]
    assert [(g["panel"], g["value"], g["paired"]) for g in groups] == [("", 0.4, True), ("", 0.9, True)]
    assert "| fedavg | *60.00 ± 1.41* | *10.00 ± 1.41* |" in result.to_markdown()
    assert r"\underline{60.00 $\pm$ 1.41} & \underline{10.00 $\pm$ 1.41}" in result.to_latex()


def test_the_figure_has_a_panel_each_and_a_line_a_method(make, runs, tmp_path):
    more = [one(make, "fedavg", s, r, 0.5, alpha=2.0) for s in (0, 1) for r in (0.4, 0.9)]
    result = against([*runs, *more], KEY)
    figure = against_figure(result, [("accuracy", "clean")])
    assert [a.get_title(loc="left") for a in figure.axes] == ["alpha 0.5", "alpha 2"]
    drawn = [{c.get_label(): c for c in a.containers} for a in figure.axes]
    assert [list(d) for d in drawn] == [["fedavg", "fedsir"], ["fedavg"]]
    assert drawn[0]["fedavg"].lines[0].get_ydata() == pytest.approx([60, 10])
    assert drawn[0]["fedavg"].lines[0].get_xdata() == pytest.approx([0.4, 0.9], abs=0.01)
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["fedavg", "fedsir"]
    assert against_plot(result, tmp_path / "new/noise.png").stat().st_size > 10_000


def test_one_value_and_many_methods_can_be_drawn(make):
    runs = [one(make, f"method_{k}", 0, 0.4, k / 20) for k in range(12)]
    figure = against_figure(against(runs, KEY))
    assert len(figure.axes[0].containers) == 12


def test_the_page(make, runs, tmp_path):
    more = [one(make, "<b>odd</b> & $x$", 0, 0.4, 0.5)]
    text = experiment_page([*runs, *more], tmp_path / "page.html", number=KEY, title="Noise").read_text()
    page = Page(text)
    check_self_contained(text, page)
    assert "3 methods against label noise rate (condition.label_noise.rate): 9 runs in 2 groups" in page.text
    assert page.row("fedavg") == ["fedavg", "60.00 ± 1.41", "10.00 ± 1.41"]
    assert page.row("<b>odd</b> & $x$") == ["<b>odd</b> & $x$", "50.00", "–"]
    assert "<b>odd</b>" not in text


def test_page_has_no_columns_in_which_nothing_was_measured(runs, tmp_path):
    text = experiment_page(runs, tmp_path / "page.html", number=KEY).read_text(encoding="utf-8")
    words = re.sub(r"<path[^>]*>|var\(--[^)]*\)", "", text.partition("</style>")[2]).lower()
    assert "clean" in words
    assert not re.search("corrupted|average|worst|gap", words)
