from __future__ import annotations

import math

import numpy as np
import pytest
from fake_labels import judge
from fake_runs import fill, record
from test_html import Page, check_self_contained

from medfed.report import figures, reliability, reliability_figures
from medfed.report.html import write_report
from medfed.report.reliability import STATUS, checkpoints, identification, noisy_clients, similarities
from medfed.report.reliability_page import confusion_table, relabelling_table, similarity_tables, verdict_table
from medfed.report.runs import load_run


def judged(number, status, **columns):
    """A record in which clients were judged; ``columns`` are by name and then by client."""
    r = record(number)
    r["clients"] = {c: {"samples": 10, "status": s} | {k: v[c] for k, v in columns.items()} for c, s in status.items()}
    return r


def truth(r, noisy):
    r["evaluation"]["identification"] = {
        "accuracy": 0.75,
        "noisy_recall": None,
        "clients": {c: {"noisy": c in noisy} for c in r["clients"]},
    }
    return r


FOUR = {"a": "clean", "b": "noisy", "c": "noisy", "d": "undetermined"}


def test_the_newest_verdict_counts_and_changes_are_kept(make):
    p = {"a": 0.9, "b": 0.2, "c": 0.4, "d": None}
    records = [judged(1, FOUR, p_clean=p), record(2), judged(3, FOUR | {"c": "clean"}, p_clean=p | {"c": 0.7})]
    found = identification(load_run(make("run", records)))
    assert found.rounds == (1, 3)
    assert found.of("clean") == ["a", "c"]
    assert found.clients["c"].history == ((1, "noisy"), (3, "clean"))
    assert found.clients["c"].p_clean == 0.7
    assert math.isnan(found.clients["d"].p_clean)
    table = verdict_table(found)
    assert table["header"] == ["p(clean)", "earlier"]
    assert table["rows"][2] == ("c", "clean", None, False, ["0.700", "noisy in round 1"])
    assert table["rows"][3][-1] == ["–", "–"]


def test_without_a_verdict_there_is_nothing(make):
    run = load_run(make("run", [record(1), judged(2, {"a": "suspicious"})]))
    assert identification(run) is None
    assert checkpoints(run) == []
    assert relabelling_table([]) is None


def test_confusion_by_hand(make):
    found = identification(load_run(make("run", [truth(judged(1, FOUR), {"b", "d"})])))
    assert found.noisy == {"b", "d"}
    assert found.confusion() == {"clean": [1, 1, 0], "noisy": [0, 1, 1]}
    assert [found.wrong(c) for c in "abcd"] == [False, False, True, False]  # no verdict is no wrong verdict
    rows = dict(confusion_table(found))
    assert rows["clean"] == [(1, 0.5, True), (1, 0.5, False), (0, 0.0, False)]
    assert rows["noisy"] == [(0, 0.0, False), (1, 0.5, True), (1, 0.5, False)]


def test_nobody_knows_the_truth_unless_evaluation_recorded_it(make):
    run = load_run(make("run", [judged(1, FOUR)]))
    found = identification(run)
    assert noisy_clients(run) is None
    assert found.confusion() is None
    assert confusion_table(found) is None
    assert verdict_table(found)["rows"][0][2:4] == (None, False)
    clean = load_run(make("clean", [truth(judged(1, FOUR), set())]))
    assert noisy_clients(clean) == frozenset()  # known, and none


def test_evidence_is_what_stands_beside_a_verdict_alone(make):
    four = dict.fromkeys("abcd")
    columns = {"loss": dict.fromkeys("abcd", 1.0), "odd": {"a": 0.5, "b": 0.25, "c": None, "d": 0.75}}
    columns |= {"odd_error": {**four, "a": 0.125}, "count": dict.fromkeys("abcd", 3)}
    later = record(2)
    later["clients"]["client_00"]["radius"] = 0.5
    first = judged(1, FOUR, radius=dict.fromkeys("abcd", 0.1), **columns)
    found = identification(load_run(make("run", [first, later])))
    assert found.evidence == ("odd", "odd_error", "count")
    table = verdict_table(found)
    assert table["header"] == ["odd", "count"]
    assert [row[-1] for row in table["rows"]] == [["0.500 ± 0.125", "3"], ["0.250", "3"], ["–", "3"], ["0.750", "3"]]


def relabelled(number, edited, shares=None, flag=True):
    r = record(number)
    r["server"] = {"relabelled": flag} if flag is not None else {}
    for client, n in edited.items():
        r["clients"][client]["edited"] = n
    if shares:
        r["evaluation"]["relabelling"] = shares
    return r


def test_checkpoints_are_rounds_of_a_relabelling_not_those_after(make):
    shares = {"edit_rate": 0.2, "recovery": None, "residual_noise": 0.3, "edited": 7, "clients": {"client_01": {}}}
    after = relabelled(3, {}, shares | {"edited": 9}, flag=None)
    records = [record(1), relabelled(2, {"client_01": 6}, shares), after, relabelled(4, {}, None, flag=False)]
    found = checkpoints(load_run(make("run", records)))
    assert [(c.round, c.edited) for c in found] == [(2, 7)]
    assert math.isnan(found[0].pooled["recovery"])
    table = relabelling_table(found)
    assert [name for name, _ in table["header"]] == ["edit rate", "recovery", "residual noise"]
    assert table["pooled"] == [(2, 7, ["20.0", "–", "30.0"])]
    assert table["clients"] == [("client_01", ["–", "–", "–"])]


def test_without_truth_the_edit_rate_is_pooled_over_the_samples(make):
    # client_00 has 90 samples, client_01 has 30
    found = checkpoints(load_run(make("run", [relabelled(1, {"client_00": 9, "client_01": 15})])))
    assert found[0].edited == 24
    assert found[0].pooled == {"edit_rate": pytest.approx(24 / 120)}
    assert found[0].clients == {"client_00": {"edit_rate": 0.1}, "client_01": {"edit_rate": 0.5}}
    figure = reliability_figures.relabelling(found)
    assert len(figure.axes) == 1
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    np.testing.assert_allclose(lines["edit rate, pooled"].get_ydata(), [20])


def test_a_relabelling_that_nobody_measured_is_no_figure(make):
    found = checkpoints(load_run(make("run", [relabelled(1, {})])))
    assert [(c.round, c.edited) for c in found] == [(1, 0)]
    assert reliability_figures.relabelling(found) is None
    assert relabelling_table(found)["pooled"] == [(1, 0, [])]


def test_relabelling_curves_are_in_percent(tmp_path):
    run = load_run(judge(tmp_path / "run", rounds=8, every=4, clients=4, noisy=2))
    figure = reliability_figures.relabelling(checkpoints(run))
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    np.testing.assert_array_equal(lines["recovery"].get_xdata(), [4, 8])
    np.testing.assert_allclose(lines["recovery"].get_ydata(), [40, 80])
    np.testing.assert_allclose(lines["residual noise, pooled"].get_ydata(), [25, 10])
    np.testing.assert_allclose(lines["observed noise, pooled"].get_ydata(), [40, 40])


def test_distributions_have_a_mark_a_client_and_a_bar_at_the_median(make):
    mean = {"a": 0.1, "b": 0.5, "c": 0.9, "d": None}
    run = load_run(make("run", [truth(judged(1, FOUR, descriptor_mean=mean, observed_classes=mean), {"b"})]))
    figure = reliability_figures.distributions(identification(run))
    (axes,) = figure.axes
    assert axes.get_xlabel() == "mean cosine"
    assert [t.get_text() for t in axes.get_yticklabels()] == ["clean (1)", "noisy (2)", "undetermined (1)"]
    bars = {line.get_ydata()[0]: line.get_xdata()[0] for line in axes.lines if line.get_marker() == "|"}
    assert bars == {0: pytest.approx(0.1), 1: pytest.approx(0.7)}
    marks = {line.get_gid(): line for line in axes.lines if line.get_gid()}
    assert {k: m.get_xdata()[0] for k, m in marks.items()} == {"tip:a": 0.1, "tip:b": 0.5, "tip:c": 0.9}
    assert [marks[f"tip:{c}"].get_marker() for c in "abc"] == ["o", "D", "o"]  # the truth
    assert marks["tip:b"].get_color() == marks["tip:c"].get_color() != marks["tip:a"].get_color()  # the verdict
    rings = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert [r.get_xdata()[0] for r in rings] == [0.9]  # c is wrongly accused


def test_nothing_to_draw_of_bare_verdicts(make):
    found = identification(load_run(make("run", [judged(1, FOUR)])))
    assert reliability_figures.distributions(found) is None
    assert reliability_figures.descriptor_space(found) is None


def test_descriptor_space_shows_each_pair_and_whole_clients_only(make):
    columns = {
        "descriptor_mean": {"a": 0.1, "b": 0.5, "c": 0.9, "d": None},
        "descriptor_energy": {"a": 0.2, "b": 0.6, "c": 0.8, "d": 0.1},
        "descriptor_max": {"a": 0.3, "b": 0.7, "c": 0.95, "d": 0.1},
    }
    figure = reliability_figures.descriptor_space(identification(load_run(make("run", [judged(1, FOUR, **columns)]))))
    points = [{m.get_gid()[4:]: (m.get_xdata()[0], m.get_ydata()[0]) for m in axes.lines} for axes in figure.axes]
    assert points == [
        {"a": (0.1, 0.2), "b": (0.5, 0.6), "c": (0.9, 0.8)},
        {"a": (0.1, 0.3), "b": (0.5, 0.7), "c": (0.9, 0.95)},
        {"a": (0.2, 0.3), "b": (0.6, 0.7), "c": (0.8, 0.95)},
    ]


def test_similarity_is_of_the_most_certain_clients(tmp_path):
    folder = judge(tmp_path / "run", rounds=2, clients=5, noisy=2, rename=lambda c: f"Ward {c}")
    run = load_run(folder)
    found = identification(run)
    chosen = similarities(run, found)
    assert [status for status, _, _ in chosen] == ["clean", "noisy"]
    p = {c: found.clients[c].p_clean for c in found.clients}
    assert chosen[0][1] == max(found.of("clean"), key=p.get)
    assert chosen[1][1] == min(found.of("noisy"), key=p.get)
    tables = similarity_tables(run, found)
    off = np.concatenate([m[~np.eye(7, dtype=bool)] for _, _, m in chosen])
    assert (tables["low"], tables["high"]) == (f"{np.nanmin(off):.2f}", f"{np.nanmax(off):.2f}")
    _, _, rows = tables["tables"][0]
    name, cells = rows[0]
    assert (name, cells[0]) == ("MEL", ("1.00", None))
    assert cells[-1] == ("–", None)  # a class that the client does not hold
    shades = [s for _, _, rows in tables["tables"] for _, cells in rows for _, s in cells if s is not None]
    assert (min(shades), max(shades)) == (0.0, 1.0)


def test_clients_without_memory_are_passed_by(tmp_path):
    folder = judge(tmp_path / "run", rounds=2, clients=4, noisy=1, memories=False)
    run = load_run(folder)
    assert similarity_tables(run, identification(run)) is None
    (folder / "clients/client_03").mkdir(parents=True)
    (folder / "clients/client_03/memory-00000001.safetensors").write_bytes(b"torn")
    assert similarity_tables(run, identification(run)) is None
    assert run.problems == ["the memory of client_03 cannot be read (SafetensorError)"]


def test_traffic_marks_identification_and_relabelling(tmp_path):
    run = load_run(judge(tmp_path / "run", rounds=8, every=4, clients=3, noisy=1))
    marks = reliability.marks(run)
    assert marks == {"identification": [1], "relabelling": [4, 8]}
    figure = figures.traffic(run, marks)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    np.testing.assert_array_equal(lines["relabelling"].get_xdata(), [4, 8])
    _, top = figure.axes[0].get_ylim()
    assert max(line.get_ydata().max() for line in lines.values()) < top
    assert figures.traffic(run).axes[0].lines[:] == []


@pytest.mark.parametrize("clients", [2, 40])
def test_the_page_of_a_judged_run(tmp_path, clients):
    odd = "Ward <b>7</b> & $x_1$"
    folder = judge(
        tmp_path / "run",
        rounds=6,
        every=3,
        clients=clients,
        noisy=1,
        rename=lambda c: odd if c.endswith("01") else c,
    )
    text = write_report(folder).read_text()
    page = Page(text)
    check_self_contained(text, page)
    assert "Reliability of labels" in page.text
    assert f"Judged in round 1 (identification: published): {clients - 1} clean, 1 noisy, 0 undetermined." in page.text
    assert f"1 of {clients} clients holds wrong labels" in page.text
    assert page.row("truly clean") == ["truly clean", str(clients - 1), "0", "0"]
    assert page.row("truly noisy") == ["truly noisy", "0", "1", "0"]
    # recorded by the factory: edits 30 %, recovery 80 %, precision 90 % at the last checkpoint
    assert page.row("6") == ["6", "40", "30.0", "80.0", "90.0", "5.0", "10.0", "40.0"]
    assert "accuracy 100.0 %, noisy recall –;" in page.text
    assert "<b>7</b>" not in text
    assert [r for r in page.rows if r and r[0] == odd and r[1] in STATUS]
    assert "identification in round 1, relabelling in rounds 3, 6." in page.text


def test_the_page_of_a_real_federation_claims_no_truth(tmp_path):
    page = Page(write_report(judge(tmp_path / "run", rounds=4, clients=3, noisy=1, truth=False)).read_text())
    assert "hold wrong labels" not in page.text
    assert "truly" not in page.text
    assert ["round", "targets edited", "edit rate"] in page.rows


def test_other_methods_have_no_such_section(tmp_path):
    page = Page(write_report(fill(tmp_path / "run", rounds=2, clients=2, corrupted=1)).read_text())
    assert "Reliability of labels" not in page.text
