"""Odd but possible data, through a whole run: client names, identical pictures, changed beginnings."""

from __future__ import annotations

import json

import numpy as np
import pytest
from experiments import changed
from PIL import Image

from medfed.config import validate
from medfed.errors import DataError, FederationError
from medfed.experiment import load_bundle, prepare, read_section
from medfed.inspecting import pictures
from medfed.running import check_unchanged
from medfed.running import start as go

NAMES = ["St. Mary's/№1", "..", "A" * 300, "Ünïversität", "north", "North", "con", "a\\b"]


def pictures_in(folder, names, seed=0):
    random = np.random.default_rng(seed)
    for name in names:
        Image.fromarray(random.integers(0, 255, (20, 20), dtype=np.uint8)).save(folder / name)


def table_of(data, root, rows, **changes):
    """The experiment on a table of (path, label, patient, client, split)."""
    lines = ["path,label,patient,client,split", *(",".join(r) for r in rows)]
    (root / "table.csv").write_text("\n".join(lines), encoding="utf-8")
    base = {
        "cohort": {"reader": "table", "root": str(root / "table.csv")},
        "bundle": "oct_bscan_classification",
        "condition": {"partition": {"kind": "dirichlet", "clients": 2, "min_samples": 1}},
        "rounds": 1,
    }
    return validate(changed(changed(data, base), changes), "x")


def test_clients_of_any_name_keep_their_memory_in_folders_of_their_own(data, tmp_path):
    files = [f"{k}.png" for k in range(48)]
    pictures_in(tmp_path, files)
    rows = [
        (f, "ab"[k // 8 % 2], f"p{k}", f'"{NAMES[k % 8]}"', "test" if k >= 32 else "train") for k, f in enumerate(files)
    ]
    experiment = table_of(data, tmp_path, rows, condition__partition__kind="given", method="fedism")
    run = go(experiment)
    meta = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert sorted(meta["clients"]) == sorted(NAMES)
    assert any("'North' and 'north' differ in capitals or blanks alone" in w for w in meta["warnings"])
    record = json.loads((run / "records.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert sorted(record["admitted"]) == sorted(NAMES)
    assert not [p for p in run.rglob("memory-*") if p.parent.parent != run / "clients"]
    assert not [p for p in run.parent.rglob("memory-*") if run not in p.parents]
    assert (run / "report.html").read_text(encoding="utf-8").count("№1")


@pytest.mark.parametrize("unite", [True, False])
def test_patients_who_share_a_picture_stay_together(data, tmp_path, unite):
    firsts, copies = [f"a{k}.png" for k in range(12)], [f"b{k}.png" for k in range(12)]
    pictures_in(tmp_path, firsts)
    for one, two in zip(firsts, copies):
        (tmp_path / two).write_bytes((tmp_path / one).read_bytes())
    rows = [(f, "xy"[k % 2], f"p{i}", "", "") for i, (k, f) in enumerate([*enumerate(firsts), *enumerate(copies)])]
    prepared = prepare(table_of(data, tmp_path, rows, condition__unite_identical=unite))
    test = {s[1:] for s in prepared.condition.truth.test_samples}
    train = {s[1:] for s in prepared.condition.truth.samples}
    said = [n for n in prepared.findings.notes if "filed under more than one patient id" in n]
    if unite:
        assert not test & train
        assert said == [
            "12 pictures are filed under more than one patient id: these 24 patients count as 12 "
            "(condition.unite_identical)"
        ]
    else:
        assert test & train
        assert not said
        assert any("identical pictures are in both training and test set" in w for w in prepared.warnings)


def test_a_picture_that_shows_nothing_unites_nobody(data, tmp_path):
    files = [f"{k}.png" for k in range(12)]
    pictures_in(tmp_path, files)
    for k in range(12):
        Image.new("L", (20, 20)).save(tmp_path / f"black{k}.png")
    rows = [(f, "xy"[k % 2], f"p{k}", "", "") for k, f in enumerate(files)]
    rows += [(f"black{k}.png", "xy"[k % 2], f"p{k}", "", "") for k in range(12)]
    prepared = prepare(table_of(data, tmp_path, rows))
    assert not [n for n in prepared.findings.notes if "patient id" in n]
    assert not any("name no patient" in w for w in prepared.warnings)
    assert any("1 identical pictures carry different labels" in w for w in prepared.warnings)


def test_a_run_goes_on_only_from_what_it_began_with(data):
    prepared = prepare(validate(data, "x"))
    meta = {
        "data_hash": prepared.data_hash,
        "condition_hash": prepared.condition.hash,
        "bundle_hash": prepared.bundle.content_hash(),
        "initial_model_hash": prepared.initial_model_hash,
    }
    check_unchanged(prepared, meta, data["output"])
    for key in meta:
        with pytest.raises(FederationError, match=key):
            check_unchanged(prepared, {**meta, key: "0" * 64}, data["output"])


def test_the_initial_model_belongs_to_the_condition(data):
    of = {
        name: prepare(validate(changed(data, change), "x")).initial_model_hash
        for name, change in {
            "fedism": {},
            "fedavg": {"method": "fedavg"},
            "training seed": {"seed": 7, "condition__seed": 0},
            "condition seed": {"condition__seed": 7},
            "network": {"overrides__network_def::layers": [1, 1, 1, 2]},
        }.items()
    }
    assert of["fedism"] == of["fedavg"] == of["training seed"]
    assert len(set(of.values())) == 3


@pytest.mark.parametrize("domain", ["image", "hounsfield"])
def test_the_picture_sheet_shows_what_a_run_will_see(data, domain):
    experiment = validate(changed(data, {"condition__corruption__domain": domain}), "x")
    prepared = prepare(experiment)
    cohort = read_section(experiment.cohort)
    show = pictures(experiment, load_bundle(experiment, cohort.task).pipeline())
    table = cohort.table.set_index("sample")
    for sample in list(prepared.corrupted_rows)[:3]:
        path = cohort.paths()[table.index.get_loc(sample)]
        for shown, row in (("pipeline", prepared.clean_rows), ("corrupted", prepared.corrupted_rows)):
            seen = np.rint(show[shown](path, 0) * 255).astype(np.uint8)
            np.testing.assert_array_equal(seen, prepared.store.images[row[sample]])


def test_what_spoils_a_result_is_refused_or_said(data, tmp_path):
    files = [f"{k}.png" for k in range(16)]
    pictures_in(tmp_path, files)
    plain = [(f, "ab"[k % 2], "", "", "") for k, f in enumerate(files)]
    for rows, words in (
        ([(f, "a", *rest) for f, _, *rest in plain], "all of one class ('a')"),
        ([(*row[:4], "test") for row in plain], "no usable sample is in the train split"),
        (plain[:2], "too few to set apart a test part"),
    ):
        with pytest.raises(DataError) as caught:
            prepare(table_of(data, tmp_path, rows))
        assert words in str(caught.value)
    warnings = prepare(table_of(data, tmp_path, plain)).warnings
    assert any("16 of 16 samples name no patient" in w for w in warnings)
