"""What a site keeps apart, what it may tell of it, and what the server takes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from toy import make_server

from medfed.data.arrays import ArrayDataset
from medfed.data.cohort import Task
from medfed.engines.nvflare.held_out import HELD_OUT, NO_SHARE, keep_apart, measure, pack_figures, read_figures
from medfed.engines.nvflare.wire import pack, unpack
from medfed.federation.admission import check_reply
from medfed.federation.messages import Message, Refusal
from medfed.methods.registry import METHODS, resolve_method
from medfed.training.pooling import Figures

TASKS = [Task("multiclass", ("a", "b", "c")), Task("multilabel", ("a", "any"))]


def data_of(patients: list[int] | None, count: int = 12) -> ArrayDataset:
    images = np.zeros((count, 1, 2, 2), np.uint8)
    groups = None if patients is None else np.asarray(patients)
    return ArrayDataset(images, np.arange(count), torch.arange(count) % 3, groups)


def figures_of(task: Task, histogram: bool = True, seed: int = 0) -> Figures:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(10, task.num_classes))
    labels = rng.integers(0, 3, 10) if task.kind == "multiclass" else rng.integers(0, 2, (10, 2))
    return Figures.of(task, logits, labels, histogram)


def test_patients_stay_whole_and_the_choice_depends_on_seed_and_site_alone():
    patients = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    parts = {}
    for seed in range(12):
        made = keep_apart(data_of(patients), 3, 0.25, seed, "north")
        held, left = set(made.held_out.groups.tolist()), set(made.training.groups.tolist())
        assert not held & left
        assert sorted([*made.held_out.rows, *made.training.rows]) == list(range(12))
        assert len(held) == 1
        parts[seed] = made.held_out.rows.tolist()
    assert len({tuple(p) for p in parts.values()}) > 1
    assert parts[3] == keep_apart(data_of(patients), 3, 0.25, 3, "north").held_out.rows.tolist()


@pytest.mark.parametrize(("patients", "fraction"), [([7] * 12, 0.2), (list(range(12)), 0.0)])
def test_one_patient_alone_is_never_cut_in_two_and_a_share_of_nothing_is_none(patients, fraction):
    made = keep_apart(data_of(patients), 3, fraction, 0, "north")
    assert made.held_out is None
    assert len(made.training) == 12


def test_two_samples_are_left_to_train_on():
    assert keep_apart(data_of([0, 1], 2), 3, 0.5, 0, "x").held_out is None


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("histogram", [True, False])
def test_figures_come_back_from_the_wire_and_pass_the_door(task, histogram):
    sent = figures_of(task, histogram)
    message = unpack(pack(pack_figures(sent)))[1]
    assert check_reply(message, {}, (HELD_OUT,)) is None
    got = read_figures(task, message)
    assert np.array_equal(got.counts, sent.counts)
    assert np.array_equal(got.losses, sent.losses)
    assert np.array_equal(got.calibration, sent.calibration)
    assert (got.histogram is None) is not histogram
    assert got.metrics().values == sent.metrics().values
    json.dumps(dict(message.values))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"counts": [[1]]}, "counts of a wrong form"),
        ({"counts": "many"}, "no counts"),
        ({"counts": None}, "counts of a wrong form"),
        ({"non_finite": 0.5}, "not whole"),
        ({"losses": []}, "losses of a wrong form"),
        ({"losses": [-1.0] * 2}, "losses of a wrong form"),
        ({"areas": {"auc": 1}}, "no areas"),
        ({"areas": "high"}, "no areas"),
        ({HELD_OUT: 11}, "number of samples"),
    ],
)
def test_what_does_not_agree_with_itself_is_refused(task, change, words):
    message = pack_figures(figures_of(task))
    with pytest.raises(ValueError, match=words):
        read_figures(task, Message(message.tensors, {**message.values, **change}))


@pytest.mark.parametrize("task", TASKS)
def test_more_that_does_not_agree_is_refused(task):
    message, other = pack_figures(figures_of(task)), pack_figures(figures_of(task, seed=1))
    with pytest.raises(ValueError, match="histogram does not agree"):
        read_figures(task, Message(other.tensors, message.values))
    with pytest.raises(ValueError, match="between 0 and 1"):
        read_figures(task, Message({}, {**message.values, "areas": dict.fromkeys(message.values["areas"], 1.5)}))
    if task.kind == "multiclass":
        bins = [[1.0, 2.0, 0.5], *message.values["calibration"][1:]]
        with pytest.raises(ValueError, match="calibration does not agree"):
            read_figures(task, Message({}, {**message.values, "calibration": bins}))


def test_no_method_has_a_task_of_that_name():
    for name in METHODS:
        assert HELD_OUT not in resolve_method({"name": name})[0].tasks


class Sites:
    """An engine whose sites tell what they are given to tell."""

    def __init__(self, answers):
        self.answers, self.clients = answers, tuple(sorted(answers))

    def exchange(self, request, clients, patience):
        assert request.task == HELD_OUT
        for name in clients:
            yield name, self.answers[name]

    def close(self):
        """Nothing to end."""


def test_the_record_of_the_round_is_not_touched_by_its_evaluation():
    task = TASKS[0]
    answers = {
        "a": pack_figures(figures_of(task)),
        "b": Refusal("b", "is not connected"),
        "c": Message.of({HELD_OUT: 0}),
        "d": Message.of({"samples": 3}),
    }
    server = make_server(dict.fromkeys(answers, 1), engine=Sites(answers), rounds=1)
    server.task = task
    for _ in server.rounds():
        step, report = server.state.step, server.report()
        found = measure(server)
        assert server.state.step == step + 1
        assert (report.asked, report.admitted, report.refused, report.traffic.up, report.warnings) == (
            (),
            (),
            (),
            0,
            [],
        )
        server.state.round = 1
    assert found["warnings"] == [
        "held-out share of b: is not connected",
        "held-out share of d: held_out is missing",
        "held-out share of c: it tells of none",
    ]
    assert found["evaluation"]["pooled"]["sites"] == 1
    assert found["evaluation"]["pooled"]["bytes_up"] == answers["a"].nbytes()
    assert found["evaluation"]["worst_client"]["client"] == "a"


def test_where_nobody_tells_anything_the_record_says_that_nothing_is_evaluated():
    answers = {"a": Message.of({HELD_OUT: 0}), "b": Message.of({HELD_OUT: 0})}
    server = make_server(dict.fromkeys(answers, 1), engine=Sites(answers), rounds=1)
    for _ in server.rounds():
        assert measure(server)["warnings"][-1] == NO_SHARE
        server.report()
        server.state.round = 1
