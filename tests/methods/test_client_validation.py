"""What a client sets apart to validate on, and its score there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_methods_degenerate import MULTI, multilabel_clients
from tiny_federation import Federation, client_data, three_clients

from medfed.data.arrays import ArrayDataset
from medfed.data.splits import validation_part
from medfed.methods.validation import parts_of, score
from medfed.seeding import numpy_generator


def client(data, seed=0, **changes):
    done = Federation("fedavg", {"c0": data}, bundle_changes=changes, seed=seed)
    return done.server.engine.host.client("c0")


def grouped(data, groups):
    return ArrayDataset(data.images, data.rows, data.labels, np.asarray(groups))


def test_the_parts_are_all_and_apart_and_the_same_every_time():
    data = client_data([0, 1, 2] * 10, 1)
    one, two = parts_of(client(data), 0.2), parts_of(client(data), 0.2)
    assert sorted([*one.training.rows, *one.validation.rows]) == list(range(30))
    assert np.array_equal(one.validation.rows, two.validation.rows)
    assert torch.bincount(one.validation.labels).tolist() == [2, 2, 2]
    assert torch.equal(one.validation.labels, data.labels[torch.from_numpy(one.validation.rows)])
    other = parts_of(client(data, seed=1), 0.2)
    assert not np.array_equal(one.validation.rows, other.validation.rows)


def test_patients_stay_whole():
    groups = np.repeat(np.arange(10) * 7, 3)  # any numbers
    parts = parts_of(client(grouped(client_data([0, 1, 2] * 10, 1), groups)), 0.2)
    assert len(parts.validation) == 6
    assert set(parts.validation.groups) | set(parts.training.groups) == set(groups)
    assert not set(parts.validation.groups) & set(parts.training.groups)


def test_one_patient_is_split_by_sample():
    parts = parts_of(client(grouped(client_data([0, 1] * 10, 1), [3] * 20)), 0.2)
    assert (len(parts.training), len(parts.validation)) == (16, 4)


@pytest.mark.parametrize(("labels", "share"), [([0], 0.2), ([0, 1], 0.2), ([0, 1, 2] * 5, 0.0)])
def test_where_nothing_can_be_set_apart_the_training_data_serve_for_both(labels, share):
    parts = parts_of(client(client_data(labels, 1)), share)
    assert parts.training is parts.validation
    assert len(parts.training) == len(labels)


def test_a_patient_with_nearly_everything_is_trained_on():
    parts = parts_of(client(grouped(client_data([0, 1] * 10, 1), [0] * 18 + [1] * 2)), 0.2)
    assert (len(parts.training), len(parts.validation)) == (18, 2)


@pytest.mark.parametrize("samples", [3, 4, 7, 50])
@pytest.mark.parametrize("share", [0.01, 0.2, 0.5])
def test_something_is_set_apart_and_something_left(samples, share):
    labels = np.arange(samples) % 3
    apart = validation_part(labels, None, 3, share, numpy_generator(0))
    assert 0 < apart.sum() < samples
    assert abs(apart.sum() - share * samples) <= 1.5
    rows = np.stack([labels == 0, labels > 0], axis=1).astype(np.float32)
    assert 0 < validation_part(rows, np.arange(samples) // 2, 2, share, numpy_generator(0)).sum() < samples


def test_a_share_of_more_than_half_is_refused():
    with pytest.raises(ValueError, match="1/2"):
        validation_part(np.zeros(4, int), None, 2, 0.6, numpy_generator(0))


def test_groups_follow_the_samples():
    data = grouped(client_data([0, 1, 2, 0], 1), [5, 5, 6, 7])
    assert data.subset(np.array([3, 0])).groups.tolist() == [7, 5]
    assert data.with_labels(data.labels).groups.tolist() == [5, 5, 6, 7]
    with pytest.raises(ValueError, match="groups"):
        grouped(data, [1, 2])


class Says:
    """A trainer that predicts what it is told."""

    def __init__(self, logits):
        self.logits = torch.tensor(logits)

    def predict(self, data):
        return self.logits


def test_scores_by_hand():
    someone = client(client_data([0, 0, 0, 1], 1))
    someone.trainer = Says([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0]])
    assert score(someone, someone.data, "accuracy") == 0.75
    assert score(someone, someone.data) == pytest.approx((2 / 3 + 1) / 2)  # class 2 is not there
    someone.trainer = Says([[float("nan")] * 3] * 4)
    assert np.isnan(score(someone, someone.data))


def test_scores_of_several_labels_by_hand():
    data = multilabel_clients()["c2"]  # the first label never, the third always
    someone = client(data, **MULTI)
    assert data.labels.tolist() == [[0, 1, 1], [0, 0, 1], [0, 1, 1], [0, 0, 1]]
    someone.trainer = Says([[-1.0, 1, 1], [1, 1, 1], [-1, -1, 1], [-1, -1, -1]])
    # Second label: one of two positives, one of two negatives. All: 3 + 2 + 3 of 12.
    assert score(someone, data) == 0.5
    assert score(someone, data, "accuracy") == pytest.approx(8 / 12)
    never = data.with_labels(torch.zeros(4, 3))
    someone.trainer = Says([[-1.0, -1, -1]] * 3 + [[1.0, -1, -1]])
    assert score(someone, never) == pytest.approx(11 / 12)


def test_training_on_a_part_takes_its_own_samples_only():
    from medfed.federation.messages import Message
    from medfed.methods.local_training import fit_and_reply

    done = Federation("fedavg", three_clients())
    someone = done.server.engine.host.client("c0")
    someone.load(done.initial)
    reply = fit_and_reply(
        someone,
        Message.of(done.settings.request(1, 1)),
        values={"more": 1},
        data=someone.data.subset(np.arange(5)),
        batch_size=5,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
    )
    assert reply.values["samples"] == 5
    assert (reply.values["steps"], reply.values["more"]) == (1, 1)
    assert torch.equal(reply.group("model")["head.weight"], done.initial["head.weight"])


def test_a_client_knows_which_of_its_samples_are_of_one_patient():
    """By numbers of its own, not by the patients' names."""
    from types import SimpleNamespace

    from medfed.data.condition_store import ClientView
    from medfed.experiment import Prepared

    views = {
        "north": ClientView("north", ("s1", "s2", "s3"), np.array([0, 1, 0])),
        "south": ClientView("south", ("s4", "s5"), np.array([1, 1])),
    }
    patients = {"s1": "Q", "s2": "P", "s3": "Q", "s4": "R", "s5": "S"}
    prepared = SimpleNamespace(
        condition=SimpleNamespace(clients=("north", "south"), view=views.__getitem__),
        rows={s: i for i, s in enumerate(patients)},
        patients=patients,
        store=SimpleNamespace(images=np.zeros((5, 1, 4, 4), np.uint8)),
        _tensor=torch.tensor,
    )
    shards = Prepared.shards(prepared)
    assert shards("north").groups.tolist() == [0, 1, 0]
    assert shards("south").groups.tolist() == [0, 1]
