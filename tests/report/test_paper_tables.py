"""The papers' tables from grids whose numbers are known: layouts, means, spreads, ranks, missing cells, LaTeX, CSV."""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from pathlib import Path

import pytest
from fake_grid import images, labels, make_grid, method
from typer.testing import CliRunner

from medfed.cli import app
from medfed.errors import MedfedError
from medfed.grid import write_content
from medfed.grid_file import load_grid
from medfed.report.grid import grid_tables, write_grid_report
from medfed.report.grid_cells import load_cells
from medfed.report.paper.charts import matrices
from medfed.report.paper.figures import against_rate, exponent, ratio_of_corrupted
from medfed.report.paper.layouts import layouts, to_csv
from medfed.report.paper.sheets import Line, Sheet, Written, sheet, to_latex, to_markdown
from medfed.report.paper.significance import difference_sheet, families, rank_sheet, rows
from medfed.report.paper.whole import papers
from medfed.report.plots import line_style, marked_style, svg

SALT = {"salt": {"rho": 0.05, "alpha": 0.1}}
FAIR = {
    "FedAvg": method("fedavg"),
    "FedGA": method("fedga", form="as_released"),
    "FedAvg + SALT": method("fedavg", **SALT),
    "FedGA + SALT": method("fedga", form="as_released", **SALT),
    "FedISM": method("fedism", q=2.0, **SALT),
    "FedISM q=1": method("fedism", q=1.0, **SALT),
    "SAGA": method("fedism", salt=None),
}
LEVEL = {"FedAvg": 0.5, "FedGA": 0.6, "FedAvg + SALT": 0.55, "FedGA + SALT": 0.65, "FedISM": 0.7, "FedISM q=1": 0.68}
NOISY = {
    "fedavg": method("fedavg"),
    "fedprox": method("fedprox"),
    "pruning": method("pruning"),
    "oct_fedsir": method("oct_fedsir"),
    "no relabelling": method("oct_fedsir", relabel=False),
}
TOP = {"fedavg": 0.9, "fedprox": 0.8, "pruning": 0.95, "oct_fedsir": 0.98, "no relabelling": 0.7}
RATES = {"symmetric": (0.4, 0.8), "asymmetric": (0.4,)}


def fair(condition, label, seed, round_):
    """Clean falls with the ratio; a seed adds a hundredth, a round a thousandth."""
    value = LEVEL.get(label, 0.52) + 0.01 * seed + 0.001 * round_ - (0.1 if "6" in condition else 0.0)
    return {
        "clean": {"balanced_accuracy": value, "auc_ovo": 0.9},
        "corrupted": {"balanced_accuracy": value - 0.2, "auc_ovo": 0.8},
    }


@pytest.fixture
def fedism(tmp_path):
    conditions = {f"corrupted {k}": images(k) for k in (4, 6)}
    return lambda **how: load_cells(make_grid(tmp_path / "g", FAIR, conditions, fair, **how))


def noisy_conditions(alphas=(2.0, 0.1)):
    found = {f"true, {a:g}": labels(alpha=a, apply=False) for a in alphas}
    return found | {
        f"{kind} {rate:g}, {a:g}": labels(kind, rate, a) for a in alphas for kind in RATES for rate in RATES[kind]
    }


def noisy(condition, label, seed, round_):
    """Accuracy loses a tenth for each of: asymmetric noise, a rate of 0.8, a concentration of 0.1."""
    value = TOP[label] + 0.01 * seed
    if not condition.startswith("true"):
        value -= 0.1 * (condition.startswith("asym") + ("0.8" in condition) + (condition.endswith(", 0.1")))
    found = {"clean": {"accuracy": value, "f1_macro": value - 0.05}}
    if label in ("oct_fedsir", "pruning"):
        found["identification"] = {"clean_f1": 1.0 if label == "oct_fedsir" else 0.5, "accuracy": 0.75}
    if label == "oct_fedsir":
        shares = {"edit_rate": 0.5, "recovery": 0.8, "correction_precision": 0.9, "false_correction_rate": 0.03}
        found["relabelling"] = {**shares, "residual_noise": 0.1 * round_}
    return found


@pytest.fixture
def oct(tmp_path):
    return lambda **how: load_cells(make_grid(tmp_path / "g", NOISY, noisy_conditions(), noisy, **how))


def shown(cells, id: str, kind: str = "sample") -> Sheet:
    (found,) = [sheet(t, cells, kind) for t in layouts(cells).tables if t.id == id]
    return found


def grid_of(one: Sheet) -> dict[str, list[str]]:
    return {line.label: [c.text for c in line.cells] for line in one.lines}


# --- FedISM


def test_fedism_1_has_the_complete_methods_on_both_test_sets(fedism):
    one = shown(fedism(), "fedism-1-1")
    assert [line.label for line in one.lines] == ["FedAvg", "FedGA", "FedISM"]
    assert one.spans == [("Balanced accuracy (%)", 3), ("AUC, one-vs-one (%)", 3)]
    assert one.heads == ("clean", "corrupted", "average") * 2
    # Seeds 0, 1, 2 add 0, 1, 2 points, two rounds 0.1 and 0.2: mean 50 + 1 + 0.15, sample deviation 1 over seeds.
    assert grid_of(one)["FedAvg"][:3] == ["51.15 ± 1.00", "31.15 ± 1.00", "41.15 ± 1.00"]
    assert [[c.rank for c in line.cells[:2]] for line in one.lines] == [[None, None], [2, 2], [1, 1]]
    assert "mean of its last 2 rounds; mean ± sample standard deviation (n - 1) over seeds; 3 seeds" in one.caption
    assert "4 of 20 clients (20%) have corrupted images (corrupted 4)" in one.caption


def test_each_spread_is_named_and_is_what_it_says(fedism):
    cells = fedism()
    values = [50 + s + t / 10 for s in (0, 1, 2) for t in (1, 2)]
    for kind, spread, name in (
        ("population", statistics.pstdev([0, 1, 2]), "population standard deviation (n) over seeds"),
        ("pooled", statistics.pstdev(values), "over the last rounds of all seeds, pooled"),
    ):
        one = shown(cells, "fedism-1-1", kind)
        assert grid_of(one)["FedAvg"][0] == f"51.15 ± {spread:.2f}"
        assert name in one.caption
    (row,) = [
        r
        for r in csv.DictReader(io.StringIO(to_csv(layouts(cells).tables)))
        if (r["table"], r["row"], r["quantity"]) == ("fedism-1-1", "FedAvg", "clean/balanced_accuracy")
    ]
    assert float(row["mean"]) == pytest.approx(51.15)
    assert float(row["sample_std_over_seeds"]) == pytest.approx(1.0)
    assert float(row["population_std_over_seeds"]) == pytest.approx(statistics.pstdev([0, 1, 2]))
    assert float(row["pooled_population_std"]) == pytest.approx(statistics.pstdev(values))
    assert (row["pooled_values"], row["cells_counted"], row["cells"], row["rank"]) == ("6", "3", "3", "")


def test_fedism_2_is_of_parts_and_3_of_pairs(fedism):
    cells = fedism()
    assert [line.label for line in shown(cells, "fedism-2-1").lines] == [
        "neither (FedAvg)",
        "SALT alone (FedAvg + SALT)",
        "SAGA alone (SAGA)",
        "SALT and SAGA (FedISM)",
    ]
    assert [line.label for line in shown(cells, "fedism-3-2").lines] == [
        "FedAvg",
        "FedAvg + SALT",
        "FedGA",
        "FedGA + SALT",
    ]


def test_missing_cells_are_shown_counted_and_named_and_not_ranked(fedism):
    lost = [("corrupted 4", "FedISM", 2), *[("corrupted 6", "FedGA", s) for s in (0, 1, 2)]]
    cells = fedism(without=lost)
    first, second = shown(cells, "fedism-1-1"), shown(cells, "fedism-1-2")
    assert grid_of(first)["FedISM"][0] == "70.65 ± 0.71 (2/3)"
    assert [line.cells[0].rank for line in first.lines] == [2, 1, None]
    assert first.notes == ("1 of 9 cells have not finished: corrupted 4 · FedISM · seed 2",)
    assert grid_of(second)["FedGA"] == ["–"] * 6
    assert [line.cells[0].rank for line in second.lines] == [2, None, 1]
    assert ratio_of_corrupted(cells)[0].notes == ("4 of 18 cells have not finished; points are of those that have",)


def test_a_run_that_is_not_at_its_end_does_not_count(fedism, tmp_path):
    cells = fedism()
    run = tmp_path / "g" / "corrupted_4-FedGA-s1"
    meta = json.loads((run / "run.json").read_text())
    for status, standing in (("running", "not finished"), ("failed", "failed")):
        (run / "run.json").write_text(json.dumps({**meta, "status": status, "error": "no memory"}))
        cells = load_cells(tmp_path / "g")
        cell = cells.by_place["corrupted 4", "FedGA", 1]
        assert cell.standing == standing
        assert cell.reason == ("no memory" if status == "failed" else "running, 2 of 2 rounds recorded")
        assert grid_of(shown(cells, "fedism-1-1"))["FedGA"][0].endswith("(2/3)")
    assert cells.counts() == {"done": 41, "failed": 1}


def test_fedism_figures_are_of_the_ratio_and_of_q(fedism):
    charts = {c.id: c for c in papers(fedism(), 0, "sample").charts}
    assert list(charts) == ["fedism-figure-4-1", "fedism-figure-5-1", "fedism-figure-5-2"]
    axes = charts["fedism-figure-4-1"].figure.axes
    assert [a.get_title("left") for a in axes[:2]] == ["clean images", "corrupted images"]
    (line,) = [c.lines[0] for c in axes[0].containers if abs(c.lines[0].get_ydata()[0] - 71.15) < 1e-9]
    assert line.get_ydata() == pytest.approx([71.15, 61.15])  # FedISM with 4 and 6 of 20
    assert line.get_xdata() == pytest.approx([0.2, 0.3], abs=0.01)
    q = charts["fedism-figure-5-1"].figure.axes[0]
    assert q.containers[0].lines[0].get_ydata() == pytest.approx([69.15, 71.15])  # q = 1 and 2
    levels = [line.get_ydata()[0] for line in q.lines if len(set(line.get_ydata())) == 1 and len(line.get_ydata()) == 2]
    assert sorted(levels)[:1] == pytest.approx([51.15])
    assert "FedAvg and FedGA" in charts["fedism-figure-5-1"].caption


# --- OCT-FedSIR


def test_oct_fedsir_1_averages_conditions_and_sets_references_apart(oct):
    cells = oct()
    one = shown(cells, "oct-fedsir-1")
    assert one.heads == ("symmetric", "asymmetric", "overall")
    assert one.spans == [("kermany", 2), ("", 1)]
    assert [(line.label, line.reference) for line in one.lines] == [
        ("fedavg", False),
        ("fedprox", False),
        ("oct_fedsir", False),
        ("pruning", True),
        ("fedavg (all labels true)", True),
    ]
    # fedavg: 91 - 10 for a rate of 0.8, - 10 for a concentration of 0.1: symmetric 91, 81, 81, 71; asymmetric 81, 71.
    assert grid_of(one)["fedavg"] == ["81.00 ± 1.00", "76.00 ± 1.00", f"{(91 + 81 * 3 + 71 * 2) / 6:.2f} ± 1.00"]
    assert grid_of(one)["fedavg (all labels true)"] == ["91.00 ± 1.00"] * 3
    assert [line.cells[0].rank for line in one.lines] == [2, None, 1, None, None]
    assert "mean over 6 conditions" in one.caption
    assert grid_of(shown(cells, "oct-fedsir-1-f1"))["fedavg"][0] == "76.00 ± 1.00"


def test_pooling_is_not_for_means_over_conditions(oct):
    assert "sample standard deviation (n - 1)" in shown(oct(), "oct-fedsir-1", "pooled").caption


def test_oct_fedsir_2_3_and_4(oct):
    cells = oct()
    assert grid_of(shown(cells, "oct-fedsir-2")) == {
        "pruning": ["50.00 ± 0.00"] * 3,
        "oct_fedsir": ["100.00 ± 0.00"] * 3,
    }
    third = shown(cells, "oct-fedsir-3")
    assert third.heads == (
        "Edit rate (%)",
        "Recovery (%)",
        "Correction precision (%)",
        "False-correction rate (%)",
        "Residual noise (%)",
    )
    assert [(name, len(lines)) for name, lines in third.grouped] == [
        ("symmetric noise (mean rate 60%)", 1),
        ("asymmetric noise (mean rate 40%)", 1),
    ]
    # The newest targets count, those of round 2.
    assert [c.text for c in third.lines[0].cells] == [
        f"{v} ± 0.00" for v in ("50.00", "80.00", "90.00", "3.00", "20.00")
    ]
    fourth = grid_of(shown(cells, "oct-fedsir-4"))
    assert fourth["oct_fedsir (full)"][:2] == [f"{(99 + 89 * 3 + 79 * 2) / 6:.2f} ± 1.00", ""]
    assert fourth["w/o relabelling (no relabelling)"][:2] == [
        f"{(71 + 61 * 3 + 51 * 2) / 6:.2f} ± 1.00",
        "-28.00 ± 0.00",
    ]


def test_oct_fedsir_s_has_rates_in_columns_and_concentrations_in_groups(oct):
    one = shown(oct(), "oct-fedsir-s1")
    assert one.heads == ("40%", "80%")
    assert [name for name, _ in one.grouped] == ["α = 2", "α = 0.1"]
    (low,) = [line for line in one.lines if (line.group, line.label) == ("α = 0.1", "oct_fedsir")]
    assert [c.text for c in low.cells] == ["89.00 ± 1.00", "79.00 ± 1.00"]
    assert [c.rank for c in low.cells] == [1, 1]
    assert "symmetric noise" in one.caption


def test_oct_fedsir_figures_are_of_rates(oct):
    charts = {c.id: c for c in papers(oct(), 0, "sample").charts}
    assert list(charts) == [
        "oct-fedsir-figure-symmetric",
        "oct-fedsir-figure-symmetric-accuracy",
    ]  # one rate asymmetric
    figure = charts["oct-fedsir-figure-symmetric-accuracy"].figure
    assert [a.get_title("left") for a in figure.axes] == ["α = 2", "α = 0.1"]
    assert figure.axes[0].containers[0].lines[0].get_ydata() == pytest.approx([91.0, 81.0])
    assert "fedavg (all labels true)" in [t.get_text() for t in figure.legends[0].texts]


# --- recognition


def test_what_does_not_apply_is_named_with_its_reason(fedism, oct, tmp_path):
    absent = papers(fedism(), 0, "sample").absent
    assert len(absent) == 8
    assert {why for name, why in absent.items() if name.startswith("OCT")} == {"no condition has wrong labels"}
    shorter = {m: NOISY[m] for m in ("fedavg", "fedprox")}
    cells = load_cells(make_grid(tmp_path / "h", shorter, {"": labels()}, noisy, seeds=[0]))
    found = papers(cells, 0, "sample")
    assert [t.id for t in found.layouts.tables] == [
        "oct-fedsir-1",
        "oct-fedsir-1-f1",
        "oct-fedsir-s1",
        "oct-fedsir-s1-f1",
    ]
    assert found.absent["FedISM, Table 1: methods on clean and corrupted images"] == (
        "no condition has clients with corrupted images"
    )
    assert found.absent["OCT-FedSIR, Table 2: identification of clients"] == "no finished run has judged its clients"
    assert "several rates" in found.absent["OCT-FedSIR, Figures 3 and 4: curves over the noise rate"]


def test_two_data_sets_stand_side_by_side(tmp_path):
    conditions = {
        "one": labels(**{"cohort.root": "a/one"}),
        "two": labels(**{"cohort.root": "a/two"}),
        "lesions": labels(**{"cohort.reader": "isic"}),
    }
    cells = load_cells(make_grid(tmp_path / "g", {"fedavg": NOISY["fedavg"]}, conditions, noisy, seeds=[0]))
    one = shown(cells, "oct-fedsir-1")
    assert sorted(name for name, _ in one.spans) == ["", "isic", "kermany one", "kermany two"]


def test_a_grid_of_before_its_facts_were_written_down_is_read_from_its_runs(fedism, tmp_path):
    wanted = to_csv(layouts(fedism()).tables)
    file = tmp_path / "g" / "grid.json"
    content = json.loads(file.read_text())
    del content["methods"], content["conditions"]
    file.write_text(json.dumps(content))
    assert to_csv(layouts(load_cells(tmp_path / "g")).tables) == wanted


def test_a_method_of_the_same_kind_that_lacks_a_part_by_itself_is_no_ablation(tmp_path):
    methods = {m: NOISY[m] for m in ("fedavg", "oct_fedsir", "no relabelling")} | {"both": method("fedmerit")}
    assert methods["both"]["method.daagg"] is False
    numbers = lambda c, m, s, t: {"clean": {"accuracy": TOP.get(m, 0.5), "f1_macro": 0.5}}  # noqa: E731
    cells = load_cells(make_grid(tmp_path / "g", methods, {"": labels()}, numbers, seeds=[0]))
    assert list(grid_of(shown(cells, "oct-fedsir-1"))) == ["fedavg", "oct_fedsir", "both"]
    assert list(grid_of(shown(cells, "oct-fedsir-4"))) == ["oct_fedsir (full)", "w/o relabelling (no relabelling)"]


def test_an_ablation_does_not_say_twice_what_a_label_says_already(tmp_path):
    methods = {"full": NOISY["oct_fedsir"], "w/o relabelling": NOISY["no relabelling"]}
    numbers = lambda c, m, s, t: {"clean": {"accuracy": 0.5, "f1_macro": 0.5}}  # noqa: E731
    cells = load_cells(make_grid(tmp_path / "g", methods, {"": labels()}, numbers, seeds=[0]))
    assert list(grid_of(shown(cells, "oct-fedsir-4"))) == ["full", "w/o relabelling"]


def test_wrong_labels_and_corrupted_images_at_once(tmp_path):
    """A two by two: both papers' tables; images corrupted under true labels are a claim and no reference."""

    def condition(apply: bool, corrupted: bool) -> dict:
        facts = labels(apply=apply)
        if corrupted:
            del facts["condition.corruption"]
            facts |= {"condition.partition.corrupted": 6, "condition.corruption.kind": "gaussian_noise"}
        return facts

    pairs = {"neither": (False, False), "images": (False, True), "labels": (True, False), "both": (True, True)}
    conditions = {label: condition(*pair) for label, pair in pairs.items()}
    methods = {"fedavg": NOISY["fedavg"], "fedism": FAIR["FedISM"], "fedmerit": method("fedmerit")}

    def numbers(condition, label, seed, round_):
        found = {"balanced_accuracy": 0.5 + list(methods).index(label) / 10, "auc_ovo": 0.8, "accuracy": 0.6}
        return {"clean": found, **({"corrupted": found} if condition in ("images", "both") else {})}

    cells = load_cells(make_grid(tmp_path / "g", methods, conditions, numbers))
    found = {t.id: sheet(t, cells) for t in layouts(cells).tables}
    assert [line.label for line in found["fedism-1-2"].lines] == ["fedavg", "fedism", "fedmerit"]
    assert "(both)" in found["fedism-1-2"].caption
    assert [line.label for line in found["oct-fedsir-1"].lines] == [*methods, "fedavg (all labels true)"]
    assert found["oct-fedsir-s1"].notes == (
        "an entry is a mean over up to 2 conditions, which differ in something else",
    )
    one = next(f for f in families(cells) if f.key == "clean/accuracy")
    assert {c for c, _ in one.tests[0].differences} == {"images", "labels", "both"}


ONE = ["oct-fedsir-1", "oct-fedsir-1-f1", "oct-fedsir-2", "oct-fedsir-2-accuracy", "oct-fedsir-3"]


@pytest.mark.parametrize(
    ("name", "tables", "figures"),
    [
        (
            "fedism_ich",
            [f"fedism-{n}-{k}" for n in (1, 2, 3) for k in (1, 2, 3)],
            ["4-1", "5-1", "5-2", "5-3"],
        ),
        ("quality_small", [f"fedism-{n}-{k}" for n in (1, 2, 3) for k in (1, 2)], ["4-1"]),
        (
            "oct_fedsir_kermany",
            [*ONE, "oct-fedsir-4", *[f"oct-fedsir-s{k}{mark}" for k in (1, 2) for mark in ("", "-f1")]],
            ["symmetric", "symmetric-accuracy", "asymmetric", "asymmetric-accuracy"],
        ),
        (
            "noise_small",
            [*ONE, *[f"oct-fedsir-s{k}{mark}" for k in (1, 2) for mark in ("", "-f1")]],
            ["symmetric", "symmetric-accuracy", "asymmetric", "asymmetric-accuracy"],
        ),
    ],
)
def test_the_grids_that_come_with_medfed_have_their_papers_layouts(tmp_path, name, tables, figures):
    grids = Path(__file__).parents[2] / "configs" / "grids"
    grid = load_grid(
        grids / f"{name}.yaml", [f"cohort.root={tmp_path}", "overrides.weights=null", f"output={tmp_path}"]
    )
    grid.folder.mkdir()
    write_content(grid)
    content = json.loads((grid.folder / "grid.json").read_text())

    def numbers(condition, label, seed, round_):
        found = fair(condition, label, seed, round_)
        found["clean"] |= {"accuracy": 0.5, "f1_macro": 0.5}
        if "fedsir" in label:
            found["identification"] = {"clean_f1": 1.0, "accuracy": 1.0}
            found["relabelling"] = {"edit_rate": 0.5, "recovery": 0.5}
        return found

    # Of several concentrations the first is enough.
    kept = {c: f for c, f in content["conditions"].items() if not c.startswith("alpha") or c.startswith("alpha 2.0")}
    cells = load_cells(make_grid(tmp_path / "g", content["methods"], kept, numbers, seeds=[0], rounds=1))
    assert [t.id for t in layouts(cells).tables] == tables
    found = [ratio_of_corrupted(cells), exponent(cells), against_rate(cells)]
    assert [c.id.partition("figure-")[2] for part in found if not isinstance(part, str) for c in part] == figures
    if name == "oct_fedsir_kermany":
        assert (
            "mean over 13 conditions" in shown(cells, "oct-fedsir-1").caption
        )  # 117 over concentrations and data sets
        assert [line.label for line in shown(cells, "oct-fedsir-4").lines] == [
            "oct_fedsir (full)",
            *[f"w/o {part} (oct_fedsir w/o {part})" for part in ("DaAgg", "LA", "KD", "relabelling")],
        ]


# --- tests of differences


def test_differences_are_tested_over_pairs_and_over_seeds(fedism):
    found = {f.key: f for f in families(fedism())}
    one = found["corrupted/balanced_accuracy"]
    assert (one.baseline, len(one.tests)) == ("FedAvg", 6)
    best = next(t for t in one.tests if t.method == "FedISM")
    # Six pairs (two conditions, three seeds), all of one sign: 2 of 64; three seeds: 2 of 8.
    assert len(best.differences) == best.better == 6
    assert best.p == pytest.approx(2 / 64)
    assert best.p_holm == pytest.approx(6 * 2 / 64)
    assert best.p_seeds == pytest.approx(2 / 8)
    assert best.p_t is None  # all differences are the same
    assert one.ranks.ranks[one.ranked.index("FedISM")] == 1.0
    table = difference_sheet(one)
    assert table.notes == (
        "with 6 pairs the smallest p that the sign-flip test can give is 0.031, after Holm's correction for 6 methods "
        "0.188: no difference can be told from chance at 0.05",
        "pairs of one seed share images and partition and are not independent; over 3 seeds alone the smallest p is "
        "0.250",
    )
    assert table.lines[-2].cells[0].text.startswith("+18.00")
    assert rank_sheet(one).lines[0].label == "FedISM"
    line = next(r for r in rows([one]) if r["method"] == "FedISM")
    assert (line["pairs"], line["p_sign_flip_smallest_possible"], line["mean_difference"]) == (6, 0.03125, 20.0)


def test_true_labels_are_no_part_of_the_tests_and_incomplete_methods_of_the_ranks(oct):
    cells = oct(without=[("symmetric 0.4, 2", "fedprox", 1)])
    one = next(f for f in families(cells) if f.key == "clean/accuracy")
    by = {t.method: t for t in one.tests}
    assert len(by["oct_fedsir"].differences) == 18
    assert len(by["fedprox"].differences) == 17
    assert one.unranked == ("fedprox",)
    assert "not ranked, for want of finished cells: fedprox" in rank_sheet(one).notes


def test_ranks_are_told_apart_only_where_friedmans_test_rejects(tmp_path):
    """Two blocks in which three methods stand in opposite order: mean ranks 2, whatever the critical difference."""
    numbers = lambda c, m, s, t: {"clean": {"accuracy": 0.5 + (1 - 2 * s) * list(TOP).index(m) / 10}}  # noqa: E731
    methods = {m: NOISY[m] for m in ("fedavg", "fedprox", "pruning")}
    cells = load_cells(make_grid(tmp_path / "g", methods, {"": labels()}, numbers, seeds=[0, 1], metrics=["accuracy"]))
    table = rank_sheet(families(cells)[0])
    assert [[c.text for c in line.cells] for line in table.lines] == [["2.00", "best"]] * 3
    assert table.notes == ("Friedman's test does not reject that all are alike, so no rank is told from another",)


def test_one_method_is_not_tested(tmp_path):
    cells = load_cells(make_grid(tmp_path / "g", {"fedavg": NOISY["fedavg"]}, {"": labels()}, noisy))
    assert families(cells) == []


# --- outputs


def latex_rows(text: str) -> list[list[str]]:
    """Cells of every line of LaTeX that ends a row."""
    lines = [line.strip() for line in text.splitlines() if line.strip().endswith(r"\\")]
    return [re.split(r"(?<!\\)&", line.removesuffix(r"\\")) for line in lines]


def test_latex_is_whole(tmp_path):
    methods = {"a_b & 100%": method("fedavg"), "#2 {x} ~^\\$": method("fedprox"), "α–±": method("fedlsr")}
    conditions = {"true": labels(apply=False), "rate_0.4": labels(rate=0.4), "rate_0.8": labels(rate=0.8)}
    numbers = lambda c, m, s, t: {"clean": {"accuracy": 0.5 + s / 10 + len(m) / 100, "f1_macro": 0.5}}  # noqa: E731
    cells = load_cells(make_grid(tmp_path / "g", methods, conditions, numbers, without=[("rate_0.4", "α–±", 0)]))
    found = papers(cells, 0, "sample")
    text = to_latex([*found.sheets, *found.test_sheets])
    assert (
        text.isascii() or set(re.sub("[ -~\n]", "", "".join(x for x in text.splitlines(True) if x[0] != "%"))) == set()
    )
    body = [line for line in text.splitlines() if not line.startswith("%")]
    for opened in ("table", "tabular"):
        assert sum(line.count(f"\\begin{{{opened}}}") for line in body) == sum(
            line.count(f"\\end{{{opened}}}") for line in body
        )
    plain = re.sub(r"\\[\\{}&%$#_]", "", "\n".join(body))
    depth = 0
    for c in plain:
        depth += {"{": 1, "}": -1}.get(c, 0)
        assert depth >= 0
    assert depth == 0
    assert plain.count("$") % 2 == 0
    width = 0
    for line in body:
        if columns := re.search(r"\\begin\{tabular\}\{l(r+)\}", line):
            width = 1 + len(columns[1])
        if line.strip().endswith(r"\\"):
            spans = [int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", line)]
            assert len(re.split(r"(?<!\\)&", line)) + sum(spans) == width, line
    assert r"a\_b \& 100\%" in text
    assert r"\textbf{" in text
    assert r"\underline{" in text
    assert r"$\alpha$--$\pm$" in text


def test_markdown_is_whole():
    rows = (
        Line("a|b", (Written("70.0 ± 1.0", 1), Written("–")), "alpha_2"),
        Line("c", (Written("60.0", 2), Written("5.0", 1)), "alpha_2", reference=True),
    )
    spanned = Sheet("t", "Paper, Table 1", "mean <b>", "method", ("20%", "40%"), ("rate", "rate"), rows, ("one note",))
    plain = Sheet("u", "", "ranks", "method", ("rank",), ("",), (Line("c", (Written("2.00"),)),))
    assert to_markdown([spanned, plain]).splitlines() == [
        "Paper, Table 1: mean &lt;b&gt;",
        "",
        "| method | rate 20% | rate 40% |",
        "|---|---:|---:|",
        r"| *alpha\_2* | | |",
        r"| a\|b | **70.0 ± 1.0** | – |",
        "| c | *60.0* | **5.0** |",
        "",
        "- one note",
        "",
        "ranks",
        "",
        "| method | rank |",
        "|---|---:|",
        "| c | 2.00 |",
    ]
    assert to_markdown([]) == ""


def test_names_are_text_on_the_page(tmp_path):
    methods = {"<script>alert(1)</script>": method("fedavg"), "b": method("fedprox")}
    folder = make_grid(tmp_path / "g", methods, {"<b>": labels()}, lambda *_: {"clean": {"accuracy": 0.5}}, seeds=[0])
    page = write_grid_report(folder, tmp_path / "out", bootstrap=0)[0].read_text()
    assert "<script" not in page
    assert "<b>:" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"""(src|href)=["'](?!#)""", page)


def test_figures_hold_shapes_and_no_pictures(tmp_path):
    """The page's policy lets no picture be loaded, not even one within the page."""
    values = [[1.0, 0.2], [float("nan"), 1.0]]
    drawn = svg(matrices([("one", values, ["a", "b"])]), "t", "d")
    assert "<image" not in drawn
    assert "0.20" in drawn
    assert "nan" not in drawn
    assert matrices([]) is None


def test_styles_of_32_methods_differ():
    assert len({str(line_style(k)) for k in range(32)}) == 32
    assert len({str({**marked_style(k), "color": 0, "ls": 0}) for k in range(16)}) == 16


@pytest.fixture
def small(tmp_path):
    """Three methods in one metric, for pages, which take their time to draw."""
    methods = {m: FAIR[m] for m in ("FedAvg", "FedGA", "FedISM")}
    conditions = {f"corrupted {k}": images(k) for k in (4, 6)}
    how = {"metrics": ["balanced_accuracy"], "axes": ["condition.partition.corrupted"]}
    return lambda **more: make_grid(tmp_path / "g", methods, conditions, fair, **how, **more)


def test_the_page_says_how_the_grid_stands(small, tmp_path):
    small(
        without=[("corrupted 4", "FedGA", 1)],
        failed={("corrupted 6", "FedISM", 2): "out of memory on the second card"},
    )
    written = write_grid_report(tmp_path / "g", tmp_path / "out", bootstrap=0)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "18 cells: 3 methods" in page
    assert "16 done, 1 failed, 1 not run" in page
    assert "out of memory on the second card" in page
    assert "FedISM, Table 1." in page
    assert "FedISM, Table 3: fairness methods with SALT: no method is there both with and without" in page
    assert "OCT-FedSIR, Table 4: parts switched off: no condition has wrong labels." in page
    names = {p.relative_to(tmp_path / "out").as_posix() for p in written}
    assert {
        "report.html",
        "paper.csv",
        "paper.tex",
        "tests.csv",
        "tables.csv",
        "figures/fedism-figure-4-1.pdf",
    } <= names
    assert "intervals.csv" not in names
    assert all(p.stat().st_size for p in written)
    assert not (tmp_path / "g" / "report.html").exists()


def test_the_command(small, tmp_path):
    small(seeds=[0, 1])
    told = CliRunner().invoke(
        app, ["report", str(tmp_path / "g"), "--out", str(tmp_path / "o"), "--bootstrap", "0", "--spread", "pooled"]
    )
    assert told.exit_code == 0, told.output
    assert "pooled" in (tmp_path / "o" / "paper.tex").read_text()
    assert CliRunner().invoke(app, ["report", str(tmp_path / "g"), "--spread", "median"]).exit_code == 2
    assert CliRunner().invoke(app, ["report", str(tmp_path / "g"), "--bootstrap", "-1"]).exit_code == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "grid.json cannot be read"),
        ("[]", "grid.json cannot be read"),
        ('{"name": "g", "cells": [{}]}', "grid.json cannot be read"),
        ('{"name": "g", "cells": []}', "the grid has no cell"),
        (
            '{"name": "g", "cells": [{"condition": "", "method": "m", "seed": 0, "folder": "x"}]}',
            "no round of this grid",
        ),
    ],
)
def test_a_folder_that_cannot_be_reported_is_a_message(tmp_path, content, message):
    (tmp_path / "grid.json").write_text(content)
    with pytest.raises(MedfedError, match=message):
        grid_tables(tmp_path)


def test_a_run_that_cannot_be_read_is_one_cell(fedism, tmp_path):
    fedism()
    (tmp_path / "g" / "corrupted_4-FedGA-s1" / "run.json").write_text("{")
    cell = load_cells(tmp_path / "g").by_place["corrupted 4", "FedGA", 1]
    assert (cell.standing, cell.run) == ("failed", None)
    assert "run.json cannot be read" in cell.reason


def test_options_of_grids_are_refused_for_runs(fedism, tmp_path, monkeypatch, capsys):
    from medfed.cli import main

    fedism()
    for argv, message in (
        ([str(tmp_path / "g" / "corrupted_4-FedGA-s1"), "--bootstrap", "9"], "is not the folder of a grid"),
        ([str(tmp_path / "nowhere")], "there is no run directory here"),
    ):
        monkeypatch.setattr("sys.argv", ["medfed", "report", *argv])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert message in capsys.readouterr().err
