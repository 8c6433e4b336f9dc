from __future__ import annotations

import csv
import io
import json
import math
import re

import pytest
from fake_runs import record
from rich.console import Console

from medfed.errors import MedfedError
from medfed.report.compare import compare, group_by_method
from medfed.report.runs import load_run
from medfed.report.tables import escape_latex, escape_markdown

# Each run has two rounds, 1 point below and above its level, so that a run's mean over the last two is its level.
FEDAVG = {0: (0.50, 0.30), 1: (0.52, 0.32), 2: (0.57, 0.40)}
FEDISM = {0: (0.49, 0.40), 1: (0.55, 0.42), 2: (0.58, 0.38)}


def two_rounds(clean, corrupted):
    return [record(1, clean - 0.01, corrupted - 0.01), record(2, clean + 0.01, corrupted + 0.01)]


@pytest.fixture
def runs(make):
    found = []
    for method, levels in (("fedavg", FEDAVG), ("fedism", FEDISM)):
        for seed, (clean, corrupted) in levels.items():
            found.append(load_run(make(f"{method}-{seed}", two_rounds(clean, corrupted), method=method, seed=seed)))
    return found


@pytest.fixture
def result(runs):
    return compare(runs, last=2)


def test_mean_and_sample_deviation_over_seeds(result):
    cell = result.cell("fedavg", "balanced_accuracy", "clean")
    assert cell.per_run == [(0, pytest.approx(0.50)), (1, pytest.approx(0.52)), (2, pytest.approx(0.57))]
    assert cell.mean == pytest.approx(0.53)
    # deviations -0.03, -0.01, +0.04: squares sum to 0.0026, divided by n - 1 = 2
    assert cell.std == pytest.approx(math.sqrt(0.0026 / 2))


def test_pooled_is_the_population_over_rounds_and_seeds(result):
    cell = result.cell("fedavg", "balanced_accuracy", "clean")
    assert sorted(cell.pooled) == pytest.approx([0.49, 0.51, 0.51, 0.53, 0.56, 0.58])
    assert cell.pooled_mean == pytest.approx(0.53)
    # between seeds 0.0026 / 3, within a seed 0.01 squared
    assert cell.pooled_std == pytest.approx(math.sqrt(0.0026 / 3 + 0.0001))


def test_average_worst_and_gap(result):
    assert result.cell("fedism", "balanced_accuracy", "average").mean == pytest.approx((0.445 + 0.485 + 0.48) / 3)
    assert result.cell("fedism", "balanced_accuracy", "gap").mean == pytest.approx((0.09 + 0.13 + 0.20) / 3)
    assert result.cell("fedism", "balanced_accuracy", "worst").mean == pytest.approx(0.2)
    assert result.cell("fedism", "auc_ovo", "corrupted").mean == pytest.approx(0.7)


def test_paired_differences_and_their_signs(result):
    clean = result.cell("fedism", "balanced_accuracy", "clean")
    assert clean.differences == pytest.approx({0: -0.01, 1: 0.03, 2: 0.01})
    assert clean.difference == pytest.approx(0.01)
    # deviations -0.02, 0.02, 0: squares sum to 0.0008, divided by 2
    assert clean.difference_std == pytest.approx(0.02)
    assert (clean.better, clean.same_sign) == (2, 2)
    gap = result.cell("fedism", "balanced_accuracy", "gap")
    assert gap.differences == pytest.approx({0: -0.11, 1: -0.07, 2: 0.03})
    assert gap.better == 2  # a smaller gap is better
    assert not result.cell("fedavg", "balanced_accuracy", "clean").differences


def test_best_and_second_best(result):
    assert result.cell("fedism", "balanced_accuracy", "clean").rank == 1
    assert result.cell("fedavg", "balanced_accuracy", "clean").rank == 2
    assert result.cell("fedism", "balanced_accuracy", "gap").rank == 1
    ties = [result.cell(m, "auc_ovo", "clean").rank for m in result.methods]
    assert ties == [1, 1]


def test_lower_is_better_for_a_loss(make):
    def with_loss(level):
        r = record(1)
        r["evaluation"]["clean"]["nll"] = r["evaluation"]["corrupted"]["nll"] = level
        return [r]

    runs = [load_run(make(m, with_loss(v), method=m)) for m, v in (("a", 0.9), ("b", 1.2), ("c", 0.7))]
    result = compare(runs, metrics=["nll"])
    assert [result.cell(m, "nll", "clean").rank for m in "abc"] == [2, None, 1]
    assert [result.cell(m, "nll", "clean").better for m in "bc"] == [0, 1]


def test_the_gap_of_a_collapsed_model_takes_no_rank(make):
    flat = [record(1, 1 / 3, 1 / 3, warnings=["clean: the global model predicts 1 of 3 classes"])]
    runs = [
        load_run(make("a", [record(1, 0.6, 0.5)], method="a")),
        load_run(make("b", flat, method="b")),
        load_run(make("c", [record(1, 0.7, 0.3)], method="c")),
    ]
    result = compare(runs)
    ranks = {m: result.cell(m, "balanced_accuracy", "gap").rank for m in "abc"}
    assert ranks == {"a": 1, "b": None, "c": 2}
    assert any(n.startswith("collapsed") and ": b (clean: the global" in n for n in result.notes)


def test_one_run_has_no_spread_no_rank_no_difference(make):
    result = compare([load_run(make("one", two_rounds(0.5, 0.4)))])
    cell = result.cell("fedavg", "balanced_accuracy", "clean")
    assert (cell.mean, cell.std, cell.rank, cell.differences) == (pytest.approx(0.5), None, None, {})
    assert cell.pooled_std == pytest.approx(0.01)
    assert "50.00 |" in result.to_markdown()


def test_what_is_never_defined_is_said_not_guessed(make):
    runs = [
        load_run(make("a", [record(1, None, 0.3), record(2, None, 0.3)], method="a")),
        load_run(make("b", [record(1, 0.5), record(2, None)], method="b")),
    ]
    result = compare(runs)
    cell = result.cell("a", "balanced_accuracy", "clean")
    assert (cell.mean, cell.std, cell.pooled_std, cell.rank) == (None, None, None, None)
    assert "| n/a |" in result.to_markdown()
    who = "a (0 of 2 rounds), b (1 of 2 rounds)"
    assert f"Balanced accuracy, clean, average, gap: not always defined in 2 of 2 runs: {who}" in result.notes
    assert not result.cell("b", "balanced_accuracy", "clean").differences


def test_different_conditions_of_one_seed_are_refused_with_names(make):
    runs = [
        load_run(make("left", [record(1)], method="a", condition_hash="aaaaaaaaaaaaaaaa")),
        load_run(make("right", [record(1)], method="b", condition_hash="bbbbbbbbbbbbbbbb")),
    ]
    with pytest.raises(
        MedfedError, match=r"seed 0 .*left \(condition aaaaaaaaaaaa\), right \(condition bbbbbbbbbbbb\)"
    ):
        compare(runs)
    result = compare(runs, allow_unpaired=True)
    assert not result.paired
    assert not result.cell("b", "balanced_accuracy", "clean").differences
    assert result.notes[0].startswith("not paired")
    assert "difference" not in result.to_markdown().split("not paired")[0]


def test_different_initial_models_of_one_seed_are_refused_with_names(make):
    one, same, other = (
        load_run(make(m, [record(1)], method=m, initial_model_hash=digit * 64)) for m, digit in zip("abc", "112")
    )
    silent = load_run(make("d", [record(1)], method="d"))  # did not record it
    assert compare([one, same, silent]).paired
    with pytest.raises(MedfedError, match=r"initial models of a \(1{12}\), c \(2{12}\) are not the same"):
        compare([one, other])
    assert not compare([one, other], allow_unpaired=True).paired


def test_unrecorded_conditions_cannot_be_paired(make):
    runs = [load_run(make(m, [record(1)], method=m, condition_hash=None)) for m in "ab"]
    with pytest.raises(MedfedError, match="no condition recorded"):
        compare(runs)


def noisy_run(make, name, **meta):
    return load_run(
        make(name, [record(1)], **{"partition_hash": "p", "mislabelled": 40, "condition_hash": "noisy", **meta})
    )


def test_a_reference_on_true_labels_is_compared_and_named(make):
    runs = [
        noisy_run(make, "wrong"),
        noisy_run(make, "true", mislabelled=0, condition_hash="all-clean"),
        noisy_run(make, "other", method="oct_fedsir"),
        load_run(make("old", [record(1)], method="fedprox", condition_hash="p")),  # of before label noise
    ]
    result = compare(runs)
    assert result.paired
    assert result.methods == ["fedavg", "fedavg (true labels)", "oct_fedsir", "fedprox (true labels)"]
    assert result.cell("fedavg (true labels)", "balanced_accuracy", "clean").differences == {0: 0.0}
    alone = compare([runs[1]])
    assert alone.methods == ["fedavg"]


def test_settings_and_true_labels_are_both_told(make):
    runs = [
        noisy_run(make, f"{q}-{wrong}", mislabelled=wrong, condition_hash=f"c{wrong}", method_settings={"q": q})
        for q in (1, 2)
        for wrong in (0, 9)
    ]
    assert compare(runs).methods == [
        "fedavg (q=1, true labels)",
        "fedavg (q=1)",
        "fedavg (q=2, true labels)",
        "fedavg (q=2)",
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"condition_hash": "more noise", "mislabelled": 60},
        {"condition_hash": "all-clean", "mislabelled": 0, "partition_hash": "q"},
        {"condition_hash": None, "mislabelled": 0},
    ],
)
def test_another_noise_or_partition_is_refused(make, other):
    runs = [noisy_run(make, "one"), noisy_run(make, "two", method="fedprox", **other)]
    with pytest.raises(MedfedError, match="with seed 0 the conditions of one"):
        compare(runs)


def test_two_noises_are_refused_also_beside_their_reference(make):
    runs = [
        noisy_run(make, "one"),
        noisy_run(make, "two", method="fedprox", condition_hash="more noise"),
        noisy_run(make, "true", mislabelled=0, condition_hash="p"),
    ]
    with pytest.raises(MedfedError, match="the conditions of one"):
        compare(runs)


def test_different_seeds_may_have_different_conditions(runs):
    hashes = {r.meta["condition_hash"] for r in runs}
    assert len(hashes) == 3
    assert compare(runs).paired


def test_a_seed_twice_is_refused(make):
    runs = [load_run(make(n, [record(1)])) for n in ("first", "again")]
    with pytest.raises(MedfedError, match=r"fedavg has seed 0 2 times \(first, again\)"):
        compare(runs)


def test_differences_use_the_seeds_in_common(runs):
    result = compare([r for r in runs if r.folder != "fedism-1"], last=2)
    assert list(result.cell("fedism", "balanced_accuracy", "clean").differences) == [0, 2]
    assert any("different seeds" in n and "fedism: 0, 2" in n for n in result.notes)


def test_unfinished_runs_and_unequal_lengths_are_noted(make):
    runs = [
        load_run(make("whole", [record(t) for t in range(1, 5)], method="a")),
        load_run(make("part", [record(1)], method="b", status="interrupted", rounds=4)),
    ]
    notes = compare(runs).notes
    assert "not finished: part (interrupted, 1 of 4 rounds)" in notes
    assert "runs have different lengths (1, 4 rounds)" in notes


def test_a_run_without_records_does_not_break_the_table(make):
    runs = [load_run(make("a", [record(1)], method="a")), load_run(make("b", [], method="b", rounds=3))]
    result = compare(runs)
    assert result.cell("b", "balanced_accuracy", "clean").mean is None
    result.render(Console(file=io.StringIO()))


def test_ablations_of_one_method_are_not_taken_for_seeds(make):
    settings = {
        "both": {"q": 2.0, "saga": True, "salt": {"rho": 0.05, "radius": "absolute"}},
        "small": {"q": 2.0, "saga": True, "salt": {"rho": 0.005, "radius": "absolute"}},
        "saga": {"q": 2.0, "saga": True, "salt": None},
        "salt": {"q": 2.0, "saga": False, "salt": {"rho": 0.05, "radius": "absolute"}},
    }
    runs = [load_run(make(n, [record(1)], method="fedism", method_settings=s)) for n, s in settings.items()]
    assert list(group_by_method(runs)) == [
        "fedism (saga=True, salt.rho=0.05)",
        "fedism (saga=True, salt.rho=0.005)",
        "fedism (saga=True, no salt)",
        "fedism (saga=False, salt.rho=0.05)",
    ]
    on_off = [
        load_run(make(f"x{i}", [record(1)], method_settings={"salt": s})) for i, s in enumerate([None, {"rho": 1}])
    ]
    assert list(group_by_method(on_off)) == ["fedavg (no salt)", "fedavg (salt)"]


def test_baseline_by_name_and_unknown_baseline(runs):
    result = compare(runs, baseline="fedism", last=2)
    assert result.cell("fedavg", "balanced_accuracy", "clean").difference == pytest.approx(-0.01)
    with pytest.raises(MedfedError, match="Did you mean 'fedism'"):
        compare(runs, baseline="fedsim")


def test_unknown_metric_and_no_runs(runs):
    with pytest.raises(MedfedError, match="Did you mean 'balanced_accuracy'"):
        compare(runs, metrics=["balanced_acuracy"])
    with pytest.raises(MedfedError, match="no run to compare"):
        compare([])


def on_terminal(result, width, **options):
    out = io.StringIO()
    result.render(Console(file=out, width=width), **options)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_shows_two_short_tables_a_metric(result, width):
    text = on_terminal(result, width)
    assert "53.00 ± 3.61" in text  # sample deviation over seeds
    assert "+1.00 ± 2.00" in text
    assert "(2/3)" in text
    assert "3.11" not in text  # pooled population
    assert "population" not in text
    assert text.count("fedavg ") == 2  # no row of its own in the differences
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_columns_without_anything_are_left_out(make):
    def clean_alone(level):
        r = record(1, level)
        del r["evaluation"]["corrupted"]
        return [r]

    runs = [load_run(make(m, clean_alone(0.5), method=m)) for m in "ab"]
    text = on_terminal(compare(runs), 80)
    assert "clean" in text
    assert "worst client" in text
    for absent in ("corrupted", "average", "gap"):
        assert absent not in text


@pytest.mark.parametrize("form", ["csv", "markdown", "latex", "html"])
def test_no_form_of_a_comparison_has_columns_without_anything(make, form, tmp_path):
    from medfed.report.html import experiment_page

    def clean_alone(level):
        r = record(1, level)
        del r["evaluation"]["corrupted"]
        return [r]

    runs = [load_run(make(f"{m}{s}", clean_alone(0.5 + s / 10), method=m, seed=s)) for m in "ab" for s in (0, 1)]
    result = compare(runs)
    text = {
        "csv": result.to_csv,
        "markdown": result.to_markdown,
        "latex": result.to_latex,
        "html": lambda: experiment_page(runs, tmp_path / "page.html").read_text(encoding="utf-8"),
    }[form]()
    body = (text.partition("</style>")[2] or text).lower()
    assert "clean" in body
    assert "worst" in body
    for absent in ("corrupted", "average", "gap"):
        assert absent not in re.sub(r"<path[^>]*>|var\(--[^)]*\)", "", body)


def test_pooled_form_is_shown_when_asked_for(result):
    text = on_terminal(result, 80, pooled=True)
    assert "53.00 ± 3.11" in text
    assert "population standard deviation" in text
    assert "…" not in text


def test_one_seed_has_no_table_of_differences(runs):
    result = compare([r for r in runs if r.seed == 0], last=2)
    assert result.cell("fedism", "balanced_accuracy", "clean").difference == pytest.approx(-0.01)
    text = on_terminal(result, 80)
    assert "difference" not in text
    assert "±" not in text
    assert "fedism" in text


def test_long_names_of_methods_are_shown_in_full(make):
    settings = [{"salt": {"radius": "bounded", "rho": 0.05}}, {"salt": {"radius": "constant", "rho": 0.005}}]
    runs = [
        load_run(make(f"{i}-{seed}", two_rounds(0.5, 0.4), method="fedism", method_settings=s, seed=seed))
        for i, s in enumerate(settings)
        for seed in range(3)
    ]
    result = compare(runs)
    lines = on_terminal(result, 80).splitlines()
    start = next(line for line in lines if "50.00" in line).index("50.00")
    first_column = "".join(line[:start] for line in lines).replace(" ", "")
    for method in result.methods:
        assert method.replace(" ", "") in first_column


def test_csv_gives_the_unit_and_empty_cells(result):
    rows = {(r["method"], r["metric"], r["column"]): r for r in csv.DictReader(io.StringIO(result.to_csv()))}
    assert len(rows) == 2 * 2 * 5
    row = rows["fedism", "balanced_accuracy", "clean"]
    assert row["unit"] == "%"
    assert float(row["mean"]) == pytest.approx(54.0)
    assert float(row["paired_difference"]) == pytest.approx(1.0)
    assert (row["seeds_better"], row["seeds_paired"], row["rank"]) == ("2", "3", "1")
    assert rows["fedavg", "balanced_accuracy", "clean"]["paired_difference"] == ""


def test_markdown_marks_best_and_second(result):
    line = next(x for x in result.to_markdown().splitlines() if x.startswith("| fedism"))
    assert line.split(" | ")[1] == "**54.00 ± 4.58**"
    line = next(x for x in result.to_markdown().splitlines() if x.startswith("| fedavg"))
    assert line.split(" | ")[1] == "*53.00 ± 3.61*"


def test_latex_is_booktabs_and_escaped(make):
    names = ["a_b & 100% $x$ #1", "c{d}~^\\"]
    runs = [load_run(make(f"r{i}", [record(1, 0.5 + i / 10)], method=n)) for i, n in enumerate(names)]
    text = compare(runs).to_latex()
    for part in ("\\toprule", "\\midrule", "\\bottomrule", "\\textbf{60.00}", "\\underline{50.00}"):
        assert part in text
    assert r"a\_b \& 100\% \$x\$ \#1" in text
    assert r"c\{d\}\textasciitilde{}\textasciicircum{}\textbackslash{}" in text
    assert text.count("\\begin{tabular}") == text.count("\\end{tabular}") == 6


def test_escapes():
    assert escape_latex("3 ± 1 < 5–7") == r"3 $\pm$ 1 \textless{} 5--7"
    assert escape_markdown("a|b_<script>") == r"a\|b\_&lt;script&gt;"


def test_json_holds_the_numbers_as_recorded(result):
    document = json.loads(result.to_json())
    cell = next(
        c
        for c in document["cells"]
        if (c["method"], c["metric"], c["column"]) == ("fedism", "balanced_accuracy", "gap")
    )
    assert cell["mean"] == pytest.approx(0.14)
    assert [d["seed"] for d in cell["paired_differences"]] == [0, 1, 2]
    assert document["runs"]["fedavg"] == ["fedavg-0", "fedavg-1", "fedavg-2"]
    assert document["baseline"] == "fedavg"


def test_runs_shorter_than_the_window_say_how_many_rounds_they_are_the_mean_of(runs):
    assert compare(runs, last=5).last == 2
    assert compare(runs, last=1).last == 1
