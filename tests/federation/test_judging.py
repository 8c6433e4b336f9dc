"""What the record says of judged clients and corrected labels: by hand, after a restart, and cheaply."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from medfed import judging
from medfed.data.cohort import Cohort, Task
from medfed.data.condition import ConditionSpec, generate
from medfed.federation.memory import ClientMemory, client_folder, newest_memory, newest_version
from medfed.federation.messages import Message
from medfed.judging import AnnotationJudge, joined

SITES = ["North", "b", "c"]  # the first one has a folder of another name


def cohort(prefix, n, task, labels):
    ids = [f"{prefix}{i:02d}" for i in range(n)]
    table = pd.DataFrame({"sample": ids, "path": ids, "frame": 0, "patient": ids, "split": ""})
    table["client"] = [SITES[i // 10 % 3] for i in range(n)]
    return Cohort(task, table, labels)


def condition_of(noise, kind="multiclass"):
    task = Task(kind, ("x", "y"))
    labels = np.arange(30) % 2 if kind == "multiclass" else np.tile(np.eye(2, dtype=np.float32), (15, 1))
    spec = ConditionSpec(partition={"kind": "given", "min_samples": 1}, label_noise=noise)
    return generate(cohort("a", 30, task, labels), cohort("t", 6, task, labels[:6]), spec)


@pytest.fixture
def condition():
    """Two of the five labels of each class are wrong at North and at b; c is clean."""
    return condition_of({"rate": 0.4, "noisy_clients": ["North", "b"]})


def remember(folder, client, step, **items):
    memory = ClientMemory(folder / client_folder(client))
    memory.open(step, confirmed=0)
    for name, value in items.items():
        memory[name] = value
    memory.save(step)


def corrected(condition, client, right=0, wrong=0):
    """The observed labels of a client after so many wrong ones became right, and so many right ones wrong."""
    true, labels = condition.truth.of_client(client)[1], condition.view(client).labels.copy()
    is_wrong = np.flatnonzero(labels != true)
    is_right = np.flatnonzero(labels == true)
    labels[is_wrong[:right]] = true[is_wrong[:right]]
    labels[is_right[:wrong]] = 1 - true[is_right[:wrong]]
    return torch.tensor(labels)


def test_nothing_is_said_where_nobody_judges(condition, tmp_path):
    judge = AnnotationJudge(condition, tmp_path)
    assert judge.judge(None, 9) == {}
    remember(tmp_path, "b", 1, other=1)
    assert judge.judge(None, 9) == {}


def test_identification_by_hand(condition, tmp_path):
    status = {"North": "noisy", "b": "clean", "c": "undetermined"}
    found = AnnotationJudge(condition, tmp_path).judge(status, 9)
    measured = found["evaluation"]["identification"]
    assert (measured["accuracy"], measured["clean_precision"], measured["noisy_recall"]) == (1 / 3, 0.0, 1 / 2)
    assert measured["clients"] == {
        "North": {"noisy": True, "correct": True},
        "b": {"noisy": True, "correct": False},
        "c": {"noisy": False, "correct": False},
    }
    assert "relabelling" not in found["evaluation"]  # nobody has corrected anything yet
    assert found["undefined"] == {}


def test_false_accusations_are_told_where_no_label_is_wrong(tmp_path):
    for noise in (None, {"rate": 0.4, "noisy_clients": ["b"], "apply": False}):
        judge = AnnotationJudge(condition_of(noise), tmp_path)
        found = judge.judge({"North": "clean", "b": "noisy", "c": "clean"}, 1)
        measured = found["evaluation"]["identification"]
        assert (measured["accuracy"], measured["noisy"], measured["accused"]) == (2 / 3, 0, 1)
        assert measured["noisy_recall"] is None
        assert found["undefined"] == {"identification/noisy_recall": "no client is noisy"}


def test_relabelling_by_hand(condition, tmp_path):
    # North: 4 of 10 wrong, 3 made right and 1 right made wrong. b is judged noisy and has
    # corrected nothing; c is not selected.
    remember(tmp_path, "North", 3, labels=corrected(condition, "North", right=3, wrong=1))
    judge = AnnotationJudge(condition, tmp_path)
    found = judge.judge({"North": "noisy", "b": "noisy", "c": "undetermined"}, 3)["evaluation"]["relabelling"]
    assert list(found["clients"]) == ["North", "b"]
    north, other = found["clients"].values()
    assert (north["edited"], north["recovered"], north["false_edits"], north["remaining"]) == (4, 3, 1, 2)
    assert (north["recovery"], north["correction_precision"]) == (3 / 4, 3 / 4)
    assert (north["false_correction_rate"], north["residual_noise"]) == (1 / 6, 0.2)
    assert (other["edited"], other["noise_rate"], other["residual_noise"]) == (0, 0.4, 0.4)
    assert other["correction_precision"] is None
    assert (found["samples"], found["mislabelled"], found["edited"], found["remaining"]) == (20, 8, 4, 6)
    assert (found["recovery"], found["edit_rate"], found["residual_noise"]) == (3 / 8, 0.2, 0.3)


def test_labels_without_a_verdict_are_measured_too(condition, tmp_path):
    remember(tmp_path, "c", 2, labels=corrected(condition, "c", wrong=2))
    found = AnnotationJudge(condition, tmp_path).judge(None, 2)
    assert list(found["evaluation"]) == ["relabelling"]
    assert list(found["evaluation"]["relabelling"]["clients"]) == ["c"]
    assert found["evaluation"]["relabelling"]["false_correction_rate"] == 0.2
    assert found["undefined"] == {"relabelling/recovery": "no observed label is wrong"}


def test_what_a_killed_run_left_for_later_is_not_looked_at(condition, tmp_path):
    remember(tmp_path, "b", 3, labels=corrected(condition, "b", right=1))
    remember(tmp_path, "b", 8, labels=corrected(condition, "b", right=4))
    judge = AnnotationJudge(condition, tmp_path)
    edited = {s: judge.judge(None, s).get("evaluation", {}).get("relabelling", {}).get("edited") for s in (2, 3, 7, 8)}
    assert edited == {2: None, 3: 1, 7: 1, 8: 4}
    # The request is repeated after the restart, with another result.
    ClientMemory(tmp_path / "b").open(8, confirmed=3)
    remember(tmp_path, "b", 8, labels=corrected(condition, "b", right=2))
    assert judge.judge(None, 8)["evaluation"]["relabelling"]["edited"] == 2
    remember(tmp_path, "b", 9)  # writes nothing
    memory = ClientMemory(tmp_path / "b")
    memory.open(10, confirmed=8)
    del memory["labels"]
    memory.save(10)
    assert judge.judge(None, 10) == {}


def test_an_unchanged_memory_is_read_once(condition, tmp_path, monkeypatch):
    read = []

    def counted(folder, *rest):
        read.append(folder.name)
        return newest_memory(folder, *rest)

    monkeypatch.setattr(judging, "newest_memory", counted)
    remember(tmp_path, "b", 1, labels=corrected(condition, "b", right=1), features=torch.zeros(10, 4))
    judge = AnnotationJudge(condition, tmp_path)
    first = judge.judge(None, 1)
    assert all(judge.judge(None, step) == first for step in range(2, 6))
    assert read == ["b"]


@pytest.mark.parametrize(
    "labels", [torch.zeros(9, dtype=torch.int64), torch.zeros(10), torch.zeros(10, 2, dtype=torch.int64), "text"]
)
def test_labels_that_are_not_the_clients_are_told(condition, tmp_path, labels):
    remember(tmp_path, "b", 1, labels=labels)
    found = AnnotationJudge(condition, tmp_path).judge(None, 1)
    assert found["evaluation"] == {}
    assert found["warnings"] == ["b: its training labels do not fit its samples; they are not measured"]


def test_multilabel_clients_are_judged_and_not_relabelled(tmp_path):
    remember(tmp_path, "b", 1, labels=torch.zeros(10, 2))
    found = AnnotationJudge(condition_of(None, "multilabel"), tmp_path).judge({"b": "clean"}, 1)
    assert list(found["evaluation"]) == ["identification"]
    assert found["warnings"] == []


def test_the_verdict_and_the_step_are_the_servers(condition, tmp_path):
    remember(tmp_path, "b", 5, labels=corrected(condition, "b", right=1))
    judge = AnnotationJudge(condition, tmp_path)
    status = {"North": "noisy", "b": "noisy", "c": "clean"}
    notes = {"verdict": Message.of({"status": status, "posterior": {"b": None}, "note": "", "round": 1})}
    server = SimpleNamespace(notes=notes, state=SimpleNamespace(step=4))
    assert judge(server) == judge.judge(status, 4)
    assert list(judge(server)["evaluation"]) == ["identification"]
    server.state.step = 5
    assert list(judge(server)["evaluation"]) == ["identification", "relabelling"]
    server.notes = {}
    assert list(judge(server)["evaluation"]) == ["relabelling"]


def test_newest_memory(tmp_path):
    assert newest_memory(tmp_path / "nobody") == {}
    assert newest_version(tmp_path / "nobody") is None
    remember(tmp_path, "b", 2, n=1, t=torch.ones(2))
    remember(tmp_path, "b", 11, n=2)
    folder = tmp_path / "b"
    assert newest_memory(folder)["n"] == 2
    assert newest_memory(folder, 10)["n"] == newest_memory(folder, 2)["n"] == 1
    assert newest_memory(folder, 1) == {}
    assert list(newest_memory(folder, None, ["t"])) == ["t"]
    assert newest_memory(folder, None, ["n", "absent"]) == {"n": 2}
    assert [newest_version(folder, s)[0] for s in (None, 10)] == [11, 2]


def test_parts_of_a_record_are_joined():
    one = {"evaluation": {"clean": {}}, "undefined": {"a": "b"}, "warnings": ["x"]}
    two = {"evaluation": {"relabelling": {}}, "undefined": {}, "warnings": ["y"]}
    assert joined(one, two) == {
        "evaluation": {"clean": {}, "relabelling": {}},
        "undefined": {"a": "b"},
        "warnings": ["x", "y"],
    }
    assert joined(one, {}) == one
    assert joined({}, {}) == {}
