"""Public images: set apart from the training samples, hashed, stored, and at no client."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pydantic import ValidationError
from test_condition import TEST, TRAIN, cohort, spec

from medfed.data.cohort import Task
from medfed.data.condition import ConditionSpec, generate, load
from medfed.errors import DataError


def with_public(fraction=0.2, **changes):
    return spec(**changes).model_copy(update={"public": ConditionSpec(public={"fraction": fraction}).public})


DIGESTS = {s: f"d{s}" for c in (TRAIN, TEST) for s in c.table["sample"]}


def test_public_images_are_whole_patients_of_all_classes_and_at_no_client():
    condition = generate(TRAIN, TEST, with_public(), DIGESTS)
    held = set(condition.truth.samples)
    assert held | set(condition.public) == set(TRAIN.table["sample"])
    assert not held & set(condition.public)
    assert len(condition.public) == 24
    patient = dict(zip(TRAIN.table["sample"], TRAIN.table["patient"]))
    assert not {patient[s] for s in held} & {patient[s] for s in condition.public}
    label = dict(zip(TRAIN.table["sample"], TRAIN.labels.tolist()))
    assert np.bincount([label[s] for s in condition.public]).tolist() == [8, 8, 8]
    assert list(condition.public) == sorted(condition.public)
    assert all(s not in condition.view(c).samples for c in condition.clients for s in condition.public)


def test_without_public_images_a_condition_is_what_it_was():
    plain = generate(TRAIN, TEST, spec(), DIGESTS)
    assert plain.public == ()
    assert "public" not in plain._header()
    assert plain.hash != generate(TRAIN, TEST, with_public(), DIGESTS).hash


def test_hash_covers_who_is_public_and_their_content_and_not_the_order_of_files():
    one = generate(TRAIN, TEST, with_public(), DIGESTS)
    assert one.hash == generate(TRAIN.select(np.arange(len(TRAIN))[::-1]), TEST, with_public(), DIGESTS).hash
    changed = {**DIGESTS, one.public[0]: "other"}
    assert one.hash != generate(TRAIN, TEST, with_public(), changed).hash
    assert one.public != generate(TRAIN, TEST, with_public(seed=1), DIGESTS).public


def test_stored_and_loaded(tmp_path):
    condition = generate(TRAIN, TEST, with_public(), DIGESTS)
    condition.save(tmp_path)
    again = load(tmp_path)
    assert again.public == condition.public
    assert again.hash == condition.hash
    content = json.loads((tmp_path / "condition.json").read_text())
    content["public"] = content["public"][1:]
    (tmp_path / "condition.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="altered"):
        load(tmp_path)


def test_multilabel_and_single_samples():
    task = Task("multilabel", ("a", "b"))
    many = cohort(task=task, per_patient=1)
    ungrouped = with_public(0.25, group_by_patient=False)
    condition = generate(many, cohort("t", 40, task=task), ungrouped)
    assert len(condition.public) == pytest.approx(30, abs=3)


@pytest.mark.parametrize("fraction", [0, 0.6, -0.1])
def test_fractions_that_are_none(fraction):
    with pytest.raises(ValidationError, match="fraction"):
        ConditionSpec(public={"fraction": fraction})
