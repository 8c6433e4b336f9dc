"""The mean evaluation of models that belong to clients."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from medfed.data.cohort import Task
from medfed.training.evaluation import Evaluator, averaged

TASK = Task("multiclass", ("a", "b"))


class Set(SimpleNamespace):
    def __len__(self):
        return len(self.labels)


def evaluator(labels=(0, 0, 1, 1), worse=(0, 1, 1, 1)):
    sets = {"clean": Set(labels=np.array(labels)), "corrupted": Set(labels=np.array(worse))}
    return Evaluator(TASK, sets, {"c0": ("clean", np.array([0, 2])), "c1": ("corrupted", np.array([0, 1]))})


def of(answers, **options):
    """The evaluation of a model that gives these classes, whatever the set."""
    return evaluator(**options).evaluate(lambda _: np.eye(2)[list(answers)] * 4.0)


def test_metrics_are_means_over_the_models_and_shares_those_of_their_own():
    one, two = of([0, 0, 1, 1]), of([0, 1, 1, 0])
    both = averaged({"c1": two, "c0": one})
    assert both.evaluation["clean"]["balanced_accuracy"] == pytest.approx((1.0 + 0.5) / 2)
    corrupted = [p.evaluation["corrupted"]["balanced_accuracy"] for p in (one, two)]
    assert both.evaluation["corrupted"]["balanced_accuracy"] == pytest.approx(sum(corrupted) / 2)
    assert both.evaluation["gap"]["accuracy"] == pytest.approx(
        both.evaluation["clean"]["accuracy"] - both.evaluation["corrupted"]["accuracy"]
    )
    assert both.evaluation["clients"] == {
        "c0": one.evaluation["clients"]["c0"],
        "c1": two.evaluation["clients"]["c1"],
    }
    lowest = min(c["balanced_accuracy"] for c in both.evaluation["clients"].values())
    assert both.evaluation["worst_client"]["balanced_accuracy"] == lowest
    assert both.evaluation["clean"]["support/a"] == 2
    p = np.exp(4) / (np.exp(4) + 1)
    want = np.log([[p, 1 - p], [0.5, 0.5], [1 - p, p], [0.5, 0.5]])
    assert np.allclose(both.logits["clean"], want)


def test_alone_is_as_it_was_but_for_logits():
    one = of([0, 1, 1, 1])
    same = averaged({"c0": one})
    assert same.evaluation["clean"] == one.evaluation["clean"]
    assert set(same.evaluation["clients"]) == {"c0"}


def test_what_is_undefined_for_every_model_stays_so_with_its_reason():
    options = {"labels": (0, 0, 0, 0), "worse": (0, 1, 1, 1)}
    one, two = of([0, 0, 1, 1], **options), of([0, 1, 1, 0], **options)
    both = averaged({"c0": one, "c1": two})
    assert both.evaluation["clean"]["auc_ovo"] is None
    assert both.undefined["clean/auc_ovo"] == one.undefined["clean/auc_ovo"]
    assert both.warnings == [f"{c}: {w}" for c, part in (("c0", one), ("c1", two)) for w in part.warnings]
