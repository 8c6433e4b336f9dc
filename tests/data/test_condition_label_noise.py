"""Label noise in a condition: who is noisy, what changes, what does not, the hash, the files, bad input."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import yaml
from pydantic import ValidationError

from medfed.config import validate
from medfed.data.cohort import Cohort, Task
from medfed.data.condition import ConditionSpec, generate, load
from medfed.errors import ConfigError, DataError

CLASSES = ("CNV", "DME", "DRUSEN", "NORMAL")
TASK = Task("multiclass", CLASSES)
BLUR = {"kind": "gaussian_blur", "severity": 2}


def cohort(prefix="a", n=400, task=TASK, clients=None, labels=None):
    ids = [f"{prefix}{i:03d}" for i in range(n)]
    if labels is None and task.kind == "multiclass":
        labels = np.arange(n) % task.num_classes
    elif labels is None:
        labels = np.random.default_rng(1).integers(0, 2, (n, task.num_classes)).astype(np.float32)
    table = pd.DataFrame({"sample": ids, "path": ids, "patient": ids, "client": clients or "", "split": ""})
    table["frame"] = 0
    return Cohort(task, table, np.asarray(labels))


TRAIN, TEST = cohort(), cohort("t", 40)


def spec(noise=None, seed=0, corruption=None, **partition):
    partition = {"kind": "dirichlet", "clients": 10, "alpha": 2.0, "min_samples": 4, **partition}
    return ConditionSpec(seed=seed, partition=partition, corruption=corruption, label_noise=noise)


def make(noise=None, train=TRAIN, **options):
    return generate(train, TEST, spec(noise, **options))


SYM = {"rate": 0.4, "clean": 3}


def changed(condition, name):
    return condition.view(name).labels != condition.truth.of_client(name)[1]


def test_exactly_the_share_of_each_class_at_each_noisy_client():
    condition = make(SYM)
    assert len(condition.truth.noisy) == 7
    for name in condition.clients:
        true = condition.truth.of_client(name)[1]
        wrong = changed(condition, name)
        for c in range(4):
            wanted = int((true == c).sum()) * 2 // 5 if name in condition.truth.noisy else 0
            assert wrong[true == c].sum() == wanted
    assert condition.mislabelled == {n: int(changed(condition, n).sum()) for n in condition.truth.noisy}


def test_truth_test_set_and_partition_are_those_without_noise():
    noisy, plain = make(SYM), make()
    assert plain.truth.noisy == ()
    assert plain.mislabelled == {}
    for name in ("samples", "clients", "labels", "test_samples", "test_labels", "test_clients"):
        np.testing.assert_array_equal(getattr(noisy.truth, name), getattr(plain.truth, name))
    assert np.array_equal(plain.observed, plain.truth.labels)


def test_the_noise_of_a_client_depends_on_nobody_else():
    three = make({"rate": 0.4, "noisy_clients": ["client_01", "client_04", "client_07"]})
    alone = make({"rate": 0.4, "noisy_clients": ["client_04"]})
    assert alone.truth.noisy == ("client_04",)
    assert np.array_equal(three.view("client_04").labels, alone.view("client_04").labels)
    assert changed(alone, "client_04").any()
    assert not changed(alone, "client_01").any()
    # Other samples at other clients do not matter either.
    sites = ["a"] * 200 + ["b"] * 200
    fewer = cohort(clients=sites).select(np.arange(300))
    of_a = [
        generate(t, TEST, spec({"rate": 0.5, "noisy_clients": ["a", "b"]}, kind="given")).view("a").labels
        for t in (cohort(clients=sites), fewer)
    ]
    assert np.array_equal(*of_a)


def test_equal_clients_get_unequal_noise():
    sites = ["a"] * 200 + ["b"] * 200  # both hold the classes in the same order
    condition = make({"rate": 0.5, "noisy_clients": ["a", "b"]}, cohort(clients=sites), kind="given")
    assert not np.array_equal(condition.view("a").labels, condition.view("b").labels)


def test_clean_clients_are_drawn_by_the_seed_and_more_of_them_are_a_superset():
    drawn = {make(SYM, seed=s).truth.noisy for s in range(8)}
    assert len(drawn) > 1
    assert all(len(n) == 7 for n in drawn)
    assert set(make({"rate": 0.4, "clean": 5}).truth.noisy) < set(make(SYM).truth.noisy)
    assert make({**SYM, "rate": 0.9}).truth.noisy == make(SYM).truth.noisy
    assert make({**SYM, "clean": 0}).truth.noisy == make(SYM).clients


def test_corrupted_and_noisy_clients_are_drawn_apart():
    one = make(SYM, corruption=BLUR, corrupted=4)
    assert one.truth.corrupted == make(corruption=BLUR, corrupted=4).truth.corrupted
    assert one.truth.noisy == make(SYM).truth.noisy
    kinds = set()
    for seed in range(6):
        truth = make(SYM, seed=seed, corruption=BLUR, corrupted=4).truth
        kinds |= {(n in truth.corrupted, n in truth.noisy) for n in make().clients}
    assert len(kinds) == 4
    with pytest.raises(ConfigError, match="4 corrupted clients, but no corruption"):
        make(SYM, corrupted=4)


def test_clean_clients_by_coverage():
    # b alone holds 20 of both classes; then a and c tie.
    sites = ["a"] * 30 + ["b"] * 50 + ["c"] * 30
    two = Task("multiclass", ("GA", "NGA"))
    labels = [0] * 25 + [1] * 5 + [0] * 20 + [1] * 30 + [0] * 5 + [1] * 25
    train = cohort(n=110, task=two, clients=sites, labels=labels)
    test = cohort("t", 10, two)

    def noisy(**keys):
        noise = {"rate": 0.5, "choose": "coverage", **keys}
        return generate(train, test, spec(noise, kind="given")).truth.noisy

    assert noisy(coverage=20) == ("a", "c")
    assert noisy(coverage=20, clean=1) == ("a", "c")
    assert noisy(coverage=25) in {("a",), ("c",)}  # after b, a and c both add 5 of GA
    assert len(noisy(coverage=20, clean=2)) == 1
    assert "b" not in noisy(coverage=20, clean=2)
    assert noisy(coverage=35) == ("c",)  # after b: a adds 15 of GA and 5 of NGA, c 5 of each


def test_asymmetric_goes_where_the_map_says():
    condition = make({"kind": "asymmetric", "map": {"CNV": "DME", "DME": "CNV"}, "rate": 0.6, "clean": 3})
    pairs = pd.crosstab(condition.truth.labels, condition.observed)
    assert pairs.loc[0, 1] > 0
    assert pairs.loc[1, 0] > 0
    assert pairs.loc[[2, 3], [2, 3]].to_numpy().sum() == 200 == pairs.loc[2, 2] + pairs.loc[3, 3]


def test_ordinal_moves_by_one_grade():
    condition = make({"kind": "ordinal", "rate": 0.5, "clean": 3, "direction": "up"})
    assert set((condition.observed - condition.truth.labels).tolist()) == {0, 1}
    assert not (condition.observed != condition.truth.labels)[condition.truth.labels == 3].any()


def test_every_client_draws_its_rate_from_a_range():
    condition = make({"rate": [0.2, 0.8], "clean": 3})
    rates = condition.summary().loc[list(condition.truth.noisy), "noise_rate"]
    assert rates.nunique() > 3
    assert rates.between(0.05, 0.8).all()
    alone = make({"rate": [0.2, 0.8], "noisy_clients": [condition.truth.noisy[0]]})
    name = condition.truth.noisy[0]
    assert np.array_equal(alone.view(name).labels, condition.view(name).labels)
    fixed = spec({"rate": [0.3, 0.3], "clean": 3}).label_noise
    assert fixed.rate_of("x", 0) == 0.3


def test_the_reference_has_the_names_and_the_true_labels():
    reference, noisy, plain = make({**SYM, "apply": False}), make(SYM), make()
    assert reference.truth.noisy == noisy.truth.noisy
    assert np.array_equal(reference.observed, reference.truth.labels)
    assert reference.mislabelled == {}
    assert reference.partition_hash == noisy.partition_hash == plain.partition_hash == plain.hash
    assert len({reference.hash, noisy.hash, plain.hash}) == 3


@pytest.mark.parametrize(
    "other",
    [
        {**SYM, "rate": 0.5},
        {**SYM, "clean": 4},
        {**SYM, "kind": "ordinal"},
        {"kind": "asymmetric", "map": {"CNV": "DME"}, "rate": 0.4, "clean": 3},
    ],
)
def test_the_hash_changes_with_the_noise_and_the_partition_hash_does_not(other):
    assert make(other).hash != make(SYM).hash
    assert make(other).partition_hash == make(SYM).partition_hash


def test_the_partition_hash_changes_with_all_else():
    labels = TRAIN.labels.copy()
    labels[7] = (labels[7] + 1) % 4
    others = [
        make(SYM, seed=1),
        make(SYM, alpha=0.5),
        make(SYM, corruption=BLUR, corrupted=2),
        make(SYM, cohort(labels=labels)),
        generate(TRAIN, cohort("t", 38), spec(SYM)),
    ]
    assert make(SYM).partition_hash not in {c.partition_hash for c in others}


def test_hashes_of_conditions_without_label_noise_are_what_they_were():
    # Written by the version before label noise existed.
    ids = [f"a{i:03d}" for i in range(120)]
    table = pd.DataFrame({"sample": ids, "path": ids, "frame": 0, "client": "", "split": ""})
    table["patient"] = [f"ap{i // 2}" for i in range(120)]
    task = Task("multiclass", ("nevus", "melanoma", "keratosis"))
    train = Cohort(task, table, np.arange(120) // 2 % 3)
    test_table = table.head(40).assign(
        sample=[f"t{i:03d}" for i in range(40)], patient=[f"tp{i // 2}" for i in range(40)]
    )
    test = Cohort(task, test_table, np.arange(40) // 2 % 3)
    first = ConditionSpec(
        partition={"clients": 5, "corrupted": 1, "min_samples": 4}, corruption={"kind": "gaussian_noise", "severity": 3}
    )
    second = ConditionSpec(seed=1, partition={"kind": "dirichlet", "clients": 5, "min_samples": 4})
    found = [generate(train, test, s).hash for s in (first, second)]
    assert found == [
        "0766e590f448b97595e66e32dfbf5a24f163a83859058cb036564a5c4d6ea772",
        "0cbb2b43a80fa34c4d53b5ae4c43d145c469927316eb49426e21527deb3ac260",
    ]


@pytest.mark.parametrize("noise", [SYM, {**SYM, "apply": False}, None])
def test_saved_and_loaded_is_the_same(tmp_path, noise):
    condition = make(noise)
    again = load(condition.save(tmp_path))
    assert again.hash == condition.hash
    assert again.partition_hash == condition.partition_hash
    assert again.spec == condition.spec
    assert again.truth.noisy == condition.truth.noisy
    assert again.mislabelled == condition.mislabelled
    assert again.warnings == condition.warnings
    np.testing.assert_array_equal(again.observed, condition.observed)
    np.testing.assert_array_equal(again.truth.labels, condition.truth.labels)
    pd.testing.assert_frame_equal(again.summary(), condition.summary())
    assert json.loads((tmp_path / "condition.json").read_text())["format"] == (1 if noise is None else 2)


def test_a_folder_of_the_first_format_still_loads(tmp_path):
    condition = make()
    file = condition.save(tmp_path) / "condition.json"
    content = json.loads(file.read_text())
    del content["spec"]["label_noise"]  # which that version did not know
    file.write_text(json.dumps(content))
    assert load(tmp_path).hash == condition.hash
    file.write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(DataError, match=r"Format 99 is not known here.*Update medfed"):
        load(tmp_path)


def test_an_altered_list_of_noisy_clients_is_noticed(tmp_path):
    file = make(SYM).save(tmp_path) / "condition.json"
    content = json.loads(file.read_text())
    content["noisy"] = content["noisy"][1:]
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"condition\.json was altered"):
        load(tmp_path)


def test_what_people_are_told():
    condition = make(SYM)
    total = sum(condition.mislabelled.values())
    line = f"Label noise (symmetric, rate 0.4): {total} of 400 labels at 7 of 10 clients are wrong"
    assert condition.label_noise_line() == line
    assert "not applied" in make({**SYM, "apply": False}).label_noise_line()
    assert make().label_noise_line() == ""
    assert "CNV < DME < DRUSEN < NORMAL" in make({**SYM, "kind": "ordinal"}).label_noise_line()
    table = condition.summary()
    assert list(table.columns) == [
        *("samples", "test_samples", "corrupted", "empty_classes", "noisy", "noise_rate"),
        *CLASSES,
    ]
    name = condition.truth.noisy[0]
    assert table.loc[name, "noise_rate"] == changed(condition, name).mean()
    assert table["noisy"].sum() == 7
    assert (table.loc[~table["noisy"], "noise_rate"] == 0).all()
    assert table[list(CLASSES)].sum(axis=1).tolist() == table["samples"].tolist()


def test_warnings_of_noise_in_name_only_and_of_classes_without_a_clean_client():
    labels = [0] * 10 + [1] * 10 + [2, 3]
    train = cohort(n=22, clients=["a"] * 10 + ["b"] * 12, labels=labels)
    noise = {"kind": "asymmetric", "map": {"DRUSEN": "NORMAL"}, "rate": 0.5, "noisy_clients": ["b"]}
    found = generate(train, TEST, spec(noise, kind="given")).warnings
    assert found[-4:] == (
        "the label noise changes no label at b: too few samples of these classes",
        "class DME is at no client with clean labels",
        "class DRUSEN is at no client with clean labels",
        "class NORMAL is at no client with clean labels",
    )
    assert not any("clean labels" in w for w in make({**SYM, "apply": False}).warnings)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        ({"rate": 1.1, "clean": 3}, "label_noise.rate: rates lie between 0 and 1"),
        ({"rate": -0.1, "clean": 3}, "rates lie between 0 and 1"),
        ({"rate": float("nan"), "clean": 3}, "rates lie between 0 and 1"),
        ({"rate": [0.6, 0.4], "clean": 3}, "the lower one first"),
        ({"rate": 0.4}, "label_noise.clean: the noisy clients are not given"),
        ({"rate": 0.4, "clean": 11}, "11 clean clients of 10"),
        ({"rate": 0.4, "clean": 10}, "no client is left to be noisy"),
        ({"rate": 0.4, "noisy_clients": []}, "no client is noisy"),
        ({"rate": 0.4, "noisy_clients": ["client_4"]}, "no client 'client_4'. Did you mean 'client_04'"),
        ({"rate": 0.4, "clean": 3, "noisy_clients": ["client_04"]}, "named and chosen"),
        ({"rate": 0.4, "kind": "asymmetric", "clean": 3}, "asymmetric noise needs a class map"),
        ({"rate": 0.4, "map": {"CNV": "DME"}, "clean": 3}, "symmetric noise has no class map"),
        ({"rate": 0.4, "kind": "asymmetric", "map": {}, "clean": 3}, "the class map is empty"),
        ({"rate": 0.4, "kind": "asymmetric", "map": {"CNW": "DME"}, "clean": 3}, "'CNW'. Did you mean 'CNV'"),
        ({"rate": 0.4, "kind": "asymmetric", "map": {"CNV": "CNV"}, "clean": 3}, "'CNV' becomes itself"),
        ({"rate": 0.4, "direction": "up", "clean": 3}, "symmetric noise has no direction"),
        ({"rate": 0.4, "choose": "coverage"}, "needs the samples of each class"),
        ({"rate": 0.4, "coverage": 5, "clean": 3}, "not chosen by coverage"),
        ({"rate": 0.4, "choose": "coverage", "coverage": 101}, "class CNV has 100 samples in all"),
        ({"rate": 0.4, "choose": "coverage", "coverage": 100}, "all clients would be clean"),
    ],
)
def test_what_cannot_be_meant_is_said(noise, message):
    with pytest.raises(ConfigError, match=message):
        make(noise)


def test_multilabel_cohorts_are_refused():
    task = Task("multilabel", CLASSES)
    with pytest.raises(ConfigError, match="label noise needs one label a sample"):
        generate(cohort(task=task), cohort("t", 40, task), spec(SYM))


@pytest.mark.parametrize("noise", [{"clean": 3}, {"rate": "much", "clean": 3}, {"rate": 0.4, "clen": 3}])
def test_missing_and_unknown_keys(noise):
    with pytest.raises(ValidationError):
        spec(noise)


def test_an_experiment_file_is_the_same_after_it_was_resolved():
    text = """
    name: x
    cohort: {reader: kermany, root: somewhere}
    condition:
      partition: {kind: dirichlet, clients: 10}
      label_noise: {kind: asymmetric, map: {0: 1, 1: [0, 2]}, rate: [0.2, 0.4], clean: 3}
    bundle: oct_bscan_classification
    method: fedavg
    """
    experiment = validate(yaml.safe_load(text), "test")
    assert experiment.condition.label_noise.map == {"0": "1", "1": ("0", "2")}
    assert validate(yaml.safe_load(experiment.dump()), "again") == experiment
    for rate in ("lots", "[0.1, 0.2, 0.3]", "[0.1, x]", "true", "null", "{low: 0.1}"):
        with pytest.raises(ConfigError, match=r"label_noise\.rate': is a number from 0 to 1, or \[low, high"):
            validate(yaml.safe_load(text.replace("[0.2, 0.4]", rate)), "test")
    wrong = text.replace("clean: 3", "claen: 3")
    with pytest.raises(ConfigError, match=r"condition\.label_noise\.claen.*'clean'"):
        validate(yaml.safe_load(wrong), "test")
