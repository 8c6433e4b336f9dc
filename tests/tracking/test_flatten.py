"""Names and numbers as MLflow takes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medfed.tracking.flatten import flatten_record, slug

RECORD = {
    "round": 3,
    "time": 1.8e9,
    "seconds": {"total": 3.2, "clients": 2.6},
    "asked": ["a", "b"],
    "admitted": ["a"],
    "refused": [{"client": "b", "reason": "late"}],
    "bytes": {"down": 10, "up": 20},
    "server": {"q": 0.5, "name": "x", "nested": {"deep": True}, "lost": None},
    "clients": {"a": {"samples": 5, "loss": 1.5, "note": "text"}},
    "evaluation": {
        "clean": {"balanced_accuracy": 0.4, "auc_ovo": None, "recall/MEL": 0.25},
        "gap": {"balanced_accuracy": 0.1},
        "worst_client": {"balanced_accuracy": 0.2, "client": "b"},
        "clients": {"b": {"balanced_accuracy": 0.2, "auc_ovo": None}},
    },
    "warnings": ["x"],
}


def test_a_record_by_hand():
    server, clients = flatten_record(RECORD)
    assert server == {
        "clean/balanced_accuracy": 0.4,
        "clean/recall/MEL": 0.25,
        "gap/balanced_accuracy": 0.1,
        "worst_client/balanced_accuracy": 0.2,
        "server/q": 0.5,
        "server/nested/deep": 1.0,
        "seconds/total": 3.2,
        "seconds/clients": 2.6,
        "bytes/down": 10.0,
        "bytes/up": 20.0,
        "clients/asked": 2.0,
        "clients/admitted": 1.0,
        "clients/refused": 1.0,
        "warnings": 1.0,
    }
    assert clients == {
        "a": {"client/samples": 5.0, "client/loss": 1.5},
        "b": {"evaluation/balanced_accuracy": 0.2},
    }


def test_quality_of_labels_goes_to_the_federation_and_to_each_client():
    record = {
        "evaluation": {
            "identification": {"accuracy": 0.5, "noisy_f1": None, "clients": {"a": {"noisy": True, "correct": False}}},
            "relabelling": {"recovery": 0.4, "clients": {"b": {"recovery": 0.3, "correction_precision": None}}},
            "clients": {"b": {"recall/x": 0.1}},
        }
    }
    server, clients = flatten_record(record)
    assert server == {"identification/accuracy": 0.5, "relabelling/recovery": 0.4, "warnings": 0.0}
    assert clients == {
        "a": {"identification/noisy": 1.0, "identification/correct": 0.0},
        "b": {"relabelling/recovery": 0.3, "evaluation/recall/x": 0.1},
    }
    assert "clients" in record["evaluation"]["relabelling"]  # the record itself is left as it is


def test_a_bare_record():
    assert flatten_record({"round": 1}) == ({"warnings": 0.0}, {})
    assert flatten_record({"round": 1, "server": {"x": float("inf")}})[0] == {"warnings": 0.0}


@pytest.mark.parametrize("name", ["clean/recall/MEL", "a b:c-d.e_f", "Ä/ß"])
def test_good_names_stay(name):
    assert slug(name) == name


def test_names_that_would_collide_stay_apart():
    names = ["a@b", "a#b", "a_b", "St. Mary's/№1", "St. Mary_s/_1", "/a", "//a", "a//b", "..", ".", "../a", "a/", " "]
    long = ["x" * 300, "x" * 301]
    slugs = {slug(n) for n in [*names, *long]}
    assert len(slugs) == len(names) + 2


@given(st.text(min_size=1, max_size=400))
def test_every_name_is_taken_by_mlflow(name):
    from mlflow.utils.validation import _validate_metric_name

    got = slug(name)
    assert len(got) <= 250
    _validate_metric_name(got)
