from __future__ import annotations

import html
import re
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from fake_runs import record
from PIL import Image

from medfed.report import figures, plots
from medfed.report.compare import compare
from medfed.report.contents import Predictions
from medfed.report.runs import load_run


def lines_of(figure):
    return {line.get_label(): line for line in figure.axes[0].lines if not line.get_label().startswith("_")}


def test_metric_curves_are_in_percent_and_keep_gaps(make):
    run = load_run(make("run", [record(1, 0.2, 0.1), record(2, None, 0.2), record(3, 0.4, 0.3)]))
    lines = lines_of(figures.metric_curves(run, "balanced_accuracy", 5))
    np.testing.assert_allclose(lines["clean"].get_ydata(), [20, np.nan, 40])
    np.testing.assert_allclose(lines["corrupted"].get_ydata(), [10, 20, 30])
    np.testing.assert_allclose(lines["chance"].get_ydata(), 100 / 3)


def test_points_between_gaps_are_drawn_as_dots(make):
    run = load_run(make("run", [record(1, 0.2), record(2, None), record(3, 0.4), record(4, 0.5)]))
    dots = [x for x in figures.metric_curves(run, "balanced_accuracy", 5).axes[0].lines if x.get_marker() == "o"]
    assert [x.get_xdata().tolist() for x in dots] == [[1]]


def test_no_curve_of_what_was_never_defined(make):
    run = load_run(make("run", [record(1, None, None)]))
    assert figures.metric_curves(run, "balanced_accuracy", 5) is None
    assert figures.client_curves(run, "client/{client}/nothing", "x", None) is None


def test_client_curves_group_by_truth_with_the_median(make):
    r = record(1)
    r["clients"] = {f"client_{k:02d}": {"loss": v} for k, v in enumerate([1.0, 2.0, 9.0, 5.0])}
    run = load_run(make("run", [r], clients=[]))
    figure, bands = figures.client_curves(run, "client/{client}/loss", "loss", frozenset({"client_03"}))
    lines = lines_of(figure)
    assert lines["median clean client (3)"].get_ydata().tolist() == [2.0]
    assert lines["median corrupted client (1)"].get_ydata().tolist() == [5.0]
    assert not bands
    figure, _ = figures.client_curves(run, "client/{client}/loss", "loss", None)
    assert list(lines_of(figure)) == ["median client (4)"]


def test_many_points_become_bands(make, monkeypatch):
    monkeypatch.setattr(figures, "MOST_POINTS", 3)
    run = load_run(make("run", [record(1), record(2)]))
    figure, bands = figures.client_curves(run, "client/{client}/loss", "loss", None)
    assert bands
    assert len(figure.axes[0].lines) == 1


def test_client_state():
    r = {
        "asked": ["a", "b", "c", "d"],
        "admitted": ["a"],
        "refused": [
            {"client": "b", "reason": "loss is not finite"},
            {"client": "c", "reason": "did not answer (simulated dropout)"},
        ],
    }
    states = [figures.client_state(r, c) for c in "abcde"]
    assert states == ["admitted", "refused", "dropped out", "no answer", None]


def test_participation_joins_rounds_of_one_state(make):
    out = {"client": "client_01", "reason": "bad"}
    records = [record(t) for t in range(1, 6)]
    records[2] |= {"admitted": ["client_00"], "refused": [out]}
    figure = figures.participation(load_run(make("run", records)), frozenset({"client_01"}))
    # client_00: one bar; client_01: admitted twice, refused once
    assert sum(len(c.get_paths()) for c in figure.axes[0].collections) == 4


def test_reliability_bins_by_hand():
    p = np.array([[0.95, 0.05], [0.91, 0.09], [0.45, 0.55], [0.5, 0.5]])
    mean, share, count = figures.reliability_bins(Predictions(1, np.array([0, 1, 1, 0]), p))
    # 15 bins: 0.95 in (14/15, 1], 0.91 in (13/15, 14/15], 0.55 in (8/15, 9/15], 0.5 in (7/15, 8/15]
    assert np.flatnonzero(count).tolist() == [7, 8, 13, 14]
    assert mean[[7, 8, 13, 14]] == pytest.approx([0.5, 0.55, 0.91, 0.95])
    assert share[[7, 8, 13, 14]].tolist() == [1, 1, 0, 1]
    assert np.isnan(share[0])


def test_reliability_agrees_with_the_recorded_calibration_error():
    from medfed.training.metrics import calibration_error

    rng = np.random.default_rng(3)
    p = rng.dirichlet([1, 1, 1], 500)
    labels = rng.integers(0, 3, 500)
    mean, share, count = figures.reliability_bins(Predictions(1, labels, p))
    some = count > 0
    error = (count[some] / 500 * np.abs(mean[some] - share[some])).sum()
    assert error == pytest.approx(calibration_error(p.max(1), p.argmax(1) == labels))


def test_reliability_of_several_labels_uses_every_probability():
    p = np.array([[0.05, 0.95], [0.05, 0.95]])
    _, share, count = figures.reliability_bins(Predictions(1, np.array([[0, 1], [1, 1]]), p))
    assert (count[0], count[14]) == (2, 2)
    assert (share[0], share[14]) == (0.5, 1.0)


def test_timing_and_traffic_add_up(make):
    run = load_run(make("run", [record(1), record(2)]))
    tops = [s.get_data().values for s in figures.timing(run).axes[0].patches]
    np.testing.assert_allclose(tops, [[2, 2], [2.5, 2.5], [3, 3]])
    axes = figures.traffic(run).axes[0]
    np.testing.assert_allclose(axes.patches[-1].get_data().values, [4.1, 4.1])
    assert axes.get_ylabel() == "MB a round"
    bare = load_run(make("bare", [{"round": 1}]))
    assert figures.timing(bare) is figures.traffic(bare) is figures.participation(bare, None) is None


def test_svg_keeps_tick_labels_whole_and_has_a_name():
    figure, axes = plots.panel()
    axes.plot([0, 1], [0.0351234, 0.0402])
    axes.set_yticks([0.0351234, 0.0402], ["0.0351234", "0.0402"])
    text = plots.svg(figure, "A <title>", "What & why")
    assert ">0.0351234<" in text
    assert "<title>A &lt;title&gt;</title><desc>What &amp; why</desc>" in text
    assert 'role="img"' in text
    assert not re.search(r'<g id="', text)
    assert max(len(m.split(".")[1]) for d in re.findall(r' d="([^"]*)"', text) for m in re.findall(r"\d+\.\d+", d)) <= 2


def test_svg_is_the_same_each_time(make):
    run = load_run(make("run", [record(1), record(2)]))
    once, again = (plots.svg(figures.metric_curves(run, "balanced_accuracy", 5), "t", "d") for _ in range(2))
    assert once == again


def test_names_are_text_in_figures(make):
    r = record(1)
    name = '$\\frac{<b>&"'
    r["clients"] = {name: {"loss": 1.0}, "b": {"loss": 2.0}}
    run = load_run(make("run", [r, {**r, "round": 2}], clients=[]))
    figure, _ = figures.client_curves(run, "client/{client}/loss", "loss", None)
    text = plots.svg(figure, "t", "d")
    assert name in map(html.unescape, re.findall("<title>(.*?)</title>", text))
    assert "<b>" not in text
    plots.svg(figures.participation(load_run(make("two", [record(1, asked=["$\\frac{"])])), None), "t", "d")


def test_drawing_leaves_no_global_state(make):
    before = dict(matplotlib.rcParams)
    plots.svg(figures.metric_curves(load_run(make("run", [record(1)])), "balanced_accuracy", 5), "t", "d")
    assert dict(matplotlib.rcParams) == before


def test_comparison_curves_show_the_mean_over_seeds(make):
    runs = [load_run(make(f"r{s}", [record(t, (t + s) / 10) for t in (1, 2)], seed=s)) for s in (0, 2)]
    runs.append(load_run(make("short", [record(1, 0.3)], seed=4, rounds=2)))
    figure = plots.comparison_figure(compare(runs), ["balanced_accuracy"])
    mean = next(x for x in figure.axes[0].lines if x.get_label() == "fedavg")
    # round 1: 10, 30, 30; round 2 is not in every run and is left out of the mean
    assert mean.get_ydata().tolist() == pytest.approx([70 / 3])
    assert sum(x.get_lw() < 1 for x in figure.axes[0].lines) == 3


def test_comparison_plot_writes_a_picture(make, tmp_path):
    runs = [load_run(make(m, [record(1), record(2)], method=m, condition_hash=m)) for m in ("a", "b")]
    out = plots.comparison_plot(runs, tmp_path / "new" / "plot.png")
    assert Image.open(out).size[0] > 1000
    assert b"<svg" in plots.comparison_plot(runs, tmp_path / "plot.svg").read_bytes()


def test_difference_figure(make):
    levels = {"a": (0.5, 0.6), "b": (0.55, 0.58)}
    runs = [
        load_run(make(f"{m}{s}", [record(1, v)], method=m, seed=s))
        for m, vs in levels.items()
        for s, v in enumerate(vs)
    ]
    dots = plots.difference_figure(compare(runs), "balanced_accuracy").axes[0].lines[0]
    assert dots.get_xdata() == pytest.approx([5.0, -2.0])
    assert plots.difference_figure(compare(runs[:2]), "balanced_accuracy") is None


def test_long_names_leave_room_for_the_figure(make):
    """Names of 150 letters once took the whole width: Matplotlib gave up the layout, and axes had no width left."""
    clients = [f"{'department of radiology ' * 6}{i:03d}" for i in range(4)]
    methods = [f"fedism {'with another radius ' * 7}{i}" for i in range(3)]
    rounds = [record(r, asked=clients, admitted=clients) for r in (1, 2)]
    runs = [make(f"{m[-1]}-{s}", rounds, method=m, seed=s) for m in methods for s in (0, 1)]
    found = compare([load_run(r) for r in runs])
    drawn = [
        plots.comparison_figure(found),
        plots.difference_figure(found, "balanced_accuracy"),
        figures.participation(load_run(runs[0]), None),
    ]
    for figure in drawn:
        figure.draw_without_rendering()
        width, height = figure.get_size_inches() * figure.dpi
        for axes in figure.axes:
            box = axes.get_window_extent()
            assert box.width > 0.3 * width
            assert box.height > 0.3 * height
        assert all(text.get_window_extent().x1 <= width + 1 for k in figure.legends for text in k.get_texts())
    shown = [t.get_text() for t in drawn[2].axes[0].get_yticklabels()]
    assert {c[-3:] for c in clients} <= {t[-3:] for t in shown}


@pytest.mark.parametrize(
    ("name", "most", "expected"), [("abcdef", 6, "abcdef"), ("abcdefg", 6, "ab…efg"), ("abcdefgh", 5, "ab…gh")]
)
def test_a_fitted_name_keeps_both_ends(name, most, expected):
    assert plots.fitted(name, most) == expected


def test_matplotlib_is_not_imported_for_a_table():
    code = (
        "import sys, medfed.report.compare, medfed.report.summary, medfed.report.plots, medfed.report.html;"
        "sys.exit(any(m in sys.modules for m in ('matplotlib', 'pandas', 'torch', 'jinja2')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
