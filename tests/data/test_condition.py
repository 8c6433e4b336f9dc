"""Conditions: what a client may know, the hash, the files, what cannot be met."""

from __future__ import annotations

import gc
import json
import types

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from medfed.data.cohort import Cohort, Task
from medfed.data.condition import ConditionSpec, Truth, generate, load
from medfed.errors import ConfigError, DataError, MedfedError

TASK = Task("multiclass", ("nevus", "melanoma", "keratosis"))
NOISE = {"kind": "gaussian_noise", "severity": 3}


def cohort(prefix="a", n=120, task=TASK, clients=None, per_patient=2, labels=None):
    ids = [f"{prefix}{i:03d}" for i in range(n)]
    if labels is None and task.kind == "multiclass":
        labels = np.arange(n) // per_patient % task.num_classes
    elif labels is None:
        labels = np.random.default_rng(1).integers(0, 2, (n, task.num_classes)).astype(np.float32)
    table = pd.DataFrame(
        {
            "sample": ids,
            "path": [f"/data/{i}.png" for i in ids],
            "frame": 0,
            "patient": [f"{prefix}p{i // per_patient}" for i in range(n)],
            "client": clients if clients is not None else "",
            "split": "",
        }
    )
    return Cohort(task, table, labels)


def spec(corruption=NOISE, seed=0, **partition):
    return ConditionSpec(
        seed=seed,
        partition={"clients": 5, "corrupted": 1, "min_samples": 4, **partition},
        corruption=corruption,
    )


TRAIN, TEST = cohort(), cohort("t", 40)


def test_views_hold_every_sample_once_and_no_patient_twice():
    condition = generate(TRAIN, TEST, spec())
    assert condition.clients == tuple(f"client_0{k}" for k in range(5))
    views = [condition.view(c) for c in condition.clients]
    assert sorted(s for v in views for s in v.samples) == list(TRAIN.table["sample"])
    label_of = dict(zip(TRAIN.table["sample"], TRAIN.labels))
    patient_of = dict(zip(TRAIN.table["sample"], TRAIN.table["patient"]))
    for view in views:
        assert list(view.samples) == sorted(view.samples)
        assert len(view) >= 4
        assert view.labels.tolist() == [label_of[s] for s in view.samples]
    owners = [{patient_of[s] for s in v.samples} for v in views]
    assert sum(map(len, owners)) == 60
    assert condition.truth.corrupted == ("client_04",)


def reachable(start):
    """Every object that can be reached from one, short of modules, classes and functions."""
    seen, queue = {}, [start]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, (type, types.ModuleType, types.FunctionType)):
            continue
        seen[id(item)] = item
        queue += gc.get_referents(item)
        queue += [getattr(item, "base", None)]
    return list(seen.values())


@pytest.mark.parametrize("task", [TASK, Task("multilabel", ("a", "b", "c"))])
def test_no_truth_can_be_reached_from_a_view(task):
    condition = generate(cohort(task=task), cohort("t", 40, task), spec())
    # True labels that differ from the observed ones, as label noise would make them.
    condition.truth.labels[:] = 1 - condition.truth.labels if task.kind == "multilabel" else 2
    for name in condition.clients:
        view = condition.view(name)
        found = reachable(view)
        assert any(item is view.labels for item in found)  # the walk does see arrays
        assert not any(isinstance(item, (Truth, ConditionSpec, type(condition))) for item in found)
        arrays = [item for item in found if isinstance(item, np.ndarray)]
        assert [a.shape[0] for a in arrays] == [len(view)]
        assert not any(np.shares_memory(a, condition.truth.labels) for a in arrays)
        assert not np.array_equal(view.labels, condition.truth.of_client(name)[1])
        texts = {item for item in found if isinstance(item, str)}
        assert texts <= {*view.samples, name, "name", "samples", "labels"}
        with pytest.raises(ValueError, match="read-only"):
            view.labels[0] = 0


def test_the_walk_would_find_a_leak():
    condition = generate(TRAIN, TEST, spec())
    view = condition.view("client_00")
    object.__setattr__(view, "sneaky", {"a": [condition.truth]})
    assert any(isinstance(item, Truth) for item in reachable(view))


def test_the_hash_is_the_same_for_the_same_content():
    reference = generate(TRAIN, TEST, spec())
    shuffled = TRAIN.select(np.random.default_rng(1).permutation(len(TRAIN)))
    moved = cohort()
    moved.table["path"] = "elsewhere/" + moved.table["sample"]
    for train in (TRAIN, shuffled, moved):
        assert generate(train, TEST, spec()).hash == reference.hash
    assert len(reference.hash) == 64


def relabelled():
    labels = TRAIN.labels.copy()
    labels[7] = (labels[7] + 1) % 3
    return cohort(labels=labels)


@pytest.mark.parametrize(
    "other",
    [
        lambda: generate(TRAIN, TEST, spec(seed=1)),
        lambda: generate(TRAIN, TEST, spec({**NOISE, "severity": 4})),
        lambda: generate(TRAIN, TEST, spec(alpha=0.1)),
        lambda: generate(TRAIN, TEST, spec(corrupted=2)),
        lambda: generate(relabelled(), TEST, spec()),
        lambda: generate(TRAIN, cohort("t", 38), spec()),
        lambda: generate(cohort("b"), TEST, spec()),
        lambda: generate(TRAIN, TEST, spec(), {"a000": "f00"}),
        lambda: generate(TRAIN, TEST, spec(), {"t000": "f00"}),
    ],
)
def test_the_hash_changes_with_what_matters(other):
    assert other().hash != generate(TRAIN, TEST, spec()).hash


def test_the_seed_counts_where_it_decides_nothing_else():
    def given(seed):
        test = cohort("t", 4, clients=["north", "007", "7", "7"])
        return generate(cohort(clients=given_clients()), test, spec(None, seed, kind="given", corrupted=0))

    assert given(0).hash == given(0).hash != given(1).hash


def test_order_matters_only_where_asked_for():
    turned = TRAIN.select(np.arange(len(TRAIN))[::-1])
    assert generate(turned, TEST, spec(shuffle=False)).hash != generate(TRAIN, TEST, spec(shuffle=False)).hash


@pytest.mark.parametrize("task", [TASK, Task("multilabel", ("a", "b", "c"))])
def test_saved_and_loaded_is_the_same(tmp_path, task):
    condition = generate(cohort(task=task), cohort("t", 40, task), spec(), {"a003": "abc", "t001": "def"})
    condition.observed[3] = condition.observed[4]  # observed and true labels are two things
    again = load(condition.save(tmp_path / "c"))
    assert again.hash == condition.hash
    assert again.spec == condition.spec
    assert again.task == condition.task
    assert again.digests == {"a003": "abc", "t001": "def"}
    assert again.warnings == condition.warnings
    pd.testing.assert_frame_equal(again.summary(), condition.summary())
    for name in condition.clients:
        first, second = condition.view(name), again.view(name)
        assert first.samples == second.samples
        np.testing.assert_array_equal(first.labels, second.labels)
        assert first.labels.dtype == second.labels.dtype
        np.testing.assert_array_equal(condition.truth.of_client(name)[1], again.truth.of_client(name)[1])
        assert condition.truth.test_of(name)[0] == again.truth.test_of(name)[0]
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "clients.parquet",
        "condition.json",
        "test.parquet",
        "truth.parquet",
    ]


@pytest.mark.parametrize(
    ("file", "column", "value"),
    [("clients.parquet", "observed", 2), ("truth.parquet", "label", 2), ("test.parquet", "client", "x")],
)
def test_an_altered_table_is_named(tmp_path, file, column, value):
    folder = generate(TRAIN, TEST, spec()).save(tmp_path)
    table = pd.read_parquet(folder / file)
    table.loc[0, column] = value
    table.to_parquet(folder / file)
    with pytest.raises(DataError, match=f"{file} was altered"):
        load(folder)


@pytest.mark.parametrize("key", ["seed", "clients", "hash"])
def test_an_altered_header_is_named(tmp_path, key):
    folder = generate(TRAIN, TEST, spec()).save(tmp_path)
    content = json.loads((folder / "condition.json").read_text())
    content[key] = {"seed": 9, "clients": [*content["clients"], "client_99"], "hash": "0"}[key]
    if key == "seed":
        content["spec"]["seed"] = 9
    (folder / "condition.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"condition\.json was altered"):
        load(folder)


def test_missing_and_garbled_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"condition\.json, .* is missing"):
        load(tmp_path)
    folder = generate(TRAIN, TEST, spec()).save(tmp_path)
    (folder / "condition.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        load(folder)
    generate(TRAIN, TEST, spec()).save(tmp_path)
    (folder / "truth.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot be read"):
        load(folder)
    (folder / "truth.parquet").unlink()
    with pytest.raises(DataError, match=r"truth\.parquet is missing"):
        load(folder)


def test_a_failed_save_leaves_the_old_one(tmp_path, monkeypatch):
    old = generate(TRAIN, TEST, spec())
    old.save(tmp_path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    with pytest.raises(OSError, match="No space"):
        generate(TRAIN, TEST, spec(seed=1)).save(tmp_path)
    monkeypatch.undo()
    assert load(tmp_path).hash == old.hash
    assert len(list(tmp_path.iterdir())) == 4


def given_clients():
    return ["north"] * 60 + ["007"] * 59 + ["7"]


def test_given_clients_are_kept_with_their_test_samples():
    test = cohort("t", 6, clients=["north", "north", "7", "007", "late", ""])
    condition = generate(cohort(clients=given_clients()), test, spec(kind="given", corrupted=2))
    assert condition.clients == ("007", "7", "late", "north")
    assert len(condition.view("north")) == 60
    assert len(condition.view("late")) == 0
    assert condition.truth.test_clients[:5].tolist() == ["north", "north", "7", "007", "late"]
    assert condition.truth.test_clients[5] in {"007", "7", "north"}
    assert len(condition.truth.corrupted) == 2
    text = "\n".join(condition.warnings)
    assert "late has no training samples" in text
    assert "7 holds one class only" in text
    assert "7 has 1 training samples, fewer than 4" in text


def test_corrupted_clients_are_drawn_or_named():
    drawn = {generate(TRAIN, TEST, spec(kind="dirichlet", seed=s)).truth.corrupted for s in range(12)}
    assert len(drawn) > 1
    assert all(len(c) == 1 for c in drawn)
    named = spec(kind="dirichlet", corrupted=0, corrupted_clients=["client_03", "client_01"])
    assert generate(TRAIN, TEST, named).truth.corrupted == ("client_01", "client_03")


def test_summary_and_warnings_by_hand():
    clients = ["a"] * 4 + ["b"] * 2
    labels = np.array([0, 0, 0, 1, 1, 1])
    train = cohort(n=6, clients=clients, labels=labels, per_patient=1)
    test = cohort("t", 2, clients=["a", "a"], labels=np.array([0, 1]), per_patient=1)
    condition = generate(train, test, spec(kind="given", corrupted_clients=["b"], corrupted=0, min_samples=1))
    table = condition.summary()
    assert list(table.columns) == ["samples", "test_samples", "corrupted", "empty_classes", *TASK.classes]
    assert table.loc["a"].tolist() == [4, 2, False, 1, 3, 1, 0]
    assert table.loc["b"].tolist() == [2, 0, True, 2, 0, 2, 0]
    assert condition.warnings == (
        "b holds one class only (melanoma)",
        "b has no share of the test set",
        "3 of 6 (client, class) cells are empty: a/keratosis, b/nevus, b/keratosis",
        "class keratosis is absent from training",
        "class keratosis is absent from the test set",
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: spec(None), "1 corrupted clients, but no corruption"),
        (lambda: spec(clients=61), "61 clients, 60 patients"),
        (lambda: spec(kind="dirichlet", corrupted=9), "9 corrupted clients of 5"),
        (lambda: spec(kind="dirichlet", corrupted_clients=["client_4"]), "Did you mean 'client_04'"),
        (lambda: spec(kind="dirichlet", corrupted=2, corrupted_clients=["client_04"]), "1 clients are named"),
        (lambda: spec(corrupted_clients=["client_04"]), "the last clients are the corrupted ones"),
        (lambda: spec(kind="given"), "120 of 120 samples name no client"),
    ],
)
def test_what_cannot_be_met_is_said(make, message):
    with pytest.raises(MedfedError, match=message):
        generate(TRAIN, TEST, make())


def test_train_and_test_must_fit_together():
    with pytest.raises(DataError, match="120 samples are in training and test set, first 'a000'"):
        generate(TRAIN, TRAIN, spec())
    with pytest.raises(DataError, match="classes of training and test set differ"):
        generate(TRAIN, cohort("t", task=Task("multiclass", ("x", "y", "z"))), spec())


def test_unknown_client_and_unknown_keys():
    with pytest.raises(ConfigError, match="client_99"):
        generate(TRAIN, TEST, spec()).view("client_99")
    with pytest.raises(ValidationError, match="alhpa"):
        spec(alhpa=1.0)
