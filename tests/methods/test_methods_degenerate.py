"""Methods at the edges: one client, one class, clients that fail, drop out or are not drawn, other kinds of labels."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_federation import PIXELS, Federation, client_data, distance, images_of, three_clients

from medfed.data.arrays import ArrayDataset
from medfed.federation.messages import Message
from medfed.federation.state import load_state, same_state, save_state
from medfed.methods import fedavg, fedism

METHODS = ["fedavg", "fedism"]


def faulty(method, task, how, client="c1", rounds=(1,)):
    """A method one of whose clients fails at one task in some rounds."""
    sound = method.tasks[task]

    def unsound(who, message):
        if who.name != client or who.round not in rounds:
            return sound(who, message)
        if how == "crash":
            raise RuntimeError("broken")
        answer = sound(who, message)
        model = {k: t.clone() for k, t in answer.group("model").items()}
        model["head.bias"][0] = math.nan
        return Message.of(answer.values, model=model)

    return replace(method, tasks={**method.tasks, task: unsound})


def expected_weights(records, q=2.0, beta=0.5):
    """Eqs. 13 and 14 from the recorded sharpness, with the stated policy for clients that are missing.

    Weights are formed over who was measured, kept for who was not, and scaled over who was admitted in the end.
    """
    kept, out = {}, []
    for record in records:
        sharp = {c: v["sharpness"] for c, v in record["clients"].items() if "sharpness" in v}
        share = {c: (s / sum(sharp.values()) + 1e-10) ** q for c, s in sharp.items()}
        new = {c: s / sum(share.values()) for c, s in share.items()}
        mixed = {c: beta * w + (1 - beta) * kept.get(c, w) for c, w in new.items()} if kept else new
        mixed = {c: w / sum(mixed.values()) for c, w in mixed.items()}
        admitted = {c: mixed[c] for c in record["admitted"]}
        out.append({c: w / sum(admitted.values()) for c, w in admitted.items()})
        kept = {**kept, **mixed} if admitted else kept
    return out


@pytest.mark.parametrize("method", METHODS)
def test_one_client_is_local_training(method):
    data = {"only": three_clients()["c0"]}
    done = Federation(method, data, rounds=2).run()
    assert done.column("weight", 1) == done.column("weight", 2) == {"only": pytest.approx(1.0)}
    alone = Federation(method, data).server.engine.host.client("only")
    alone.round = 1
    fit = done.method.tasks["train"](
        alone, Message.of(done.settings.request(1, 2), model={k: t.clone() for k, t in done.initial.items()})
    )
    assert distance(fit.group("model"), done.models[0]) < 1e-12


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("network", ["Softmax", "Normed"])
def test_clients_of_one_class_have_finite_losses(method, network):
    data = {"c0": client_data([1] * 6, 1), "c1": client_data([0, 2] * 4, 2), "c2": client_data([0] * 5, 3)}
    done = Federation(method, data, network=network).run()
    assert [r["admitted"] for r in done.records] == [["c0", "c1", "c2"]] * 3
    # With all other classes ruled out by their prior, a client of one class has nothing to learn.
    assert done.column("loss", 1)["c0"] == pytest.approx(0.0, abs=1e-6)
    assert done.column("loss", 1)["c1"] > 0.1
    assert all(torch.isfinite(t).all() for t in done.models[-1].values() if t.is_floating_point())


@pytest.mark.parametrize("how", ["crash", "nan"])
@pytest.mark.parametrize("method", [fedavg.METHOD, fedism.METHOD])
def test_client_that_fails_in_training_is_as_if_it_had_not_been_asked(method, how):
    reason = "failed with RuntimeError" if how == "crash" else "'model/head.bias' holds NaN or infinite numbers"
    done = Federation(faulty(method, "train", how), three_clients()).run()
    assert done.records[0]["refused"] == [{"client": "c1", "reason": reason}]
    assert done.records[0]["admitted"] == ["c0", "c2"]
    assert sum(done.column("weight", 1).values()) == pytest.approx(1.0)
    assert set(done.column("weight", 1)) == {"c0", "c2"}
    assert done.records[1]["admitted"] == ["c0", "c1", "c2"]

    others = {c: d for c, d in three_clients().items() if c != "c1"}
    without = Federation(method.name, others).run()
    if method is fedavg.METHOD:
        assert distance(done.models[0], without.models[0]) < 1e-12
    else:
        for record, weights in zip(done.records, expected_weights(done.records)):
            assert {c: record["clients"][c]["weight"] for c in weights} == pytest.approx(weights)
        # What Eq. 13 gives to two clients is what three clients' weights give when scaled to these two.
        assert distance(done.models[0], without.models[0]) < 1e-8


def test_client_that_fails_in_the_measurement_is_not_trained():
    done = Federation(faulty(fedism.METHOD, "sharpness", "crash"), three_clients(), rounds=2).run()
    first = done.records[0]
    assert first["admitted"] == ["c0", "c2"]
    assert "c1" not in first["clients"]
    assert first["refused"] == [{"client": "c1", "reason": "failed with RuntimeError"}]
    for record, weights in zip(done.records, expected_weights(done.records)):
        assert {c: record["clients"][c]["weight"] for c in weights} == pytest.approx(weights)


@pytest.mark.parametrize(
    ("method", "task"), [(fedavg.METHOD, "train"), (fedism.METHOD, "train"), (fedism.METHOD, "sharpness")]
)
def test_with_nobody_left_the_previous_model_is_kept(method, task):
    for client in ("c0", "c1", "c2"):
        method = faulty(method, task, "crash", client, rounds=(1, 3))
    done = Federation(method, three_clients(), rounds=4).run()
    assert same_state(done.models[0], done.initial)
    assert not same_state(done.models[1], done.models[0])
    assert same_state(done.models[2], done.models[1])
    assert not same_state(done.models[3], done.models[2])
    for number in (1, 3):
        record = done.records[number - 1]
        assert record["admitted"] == []
        assert len(record["refused"]) == 3
        assert done.column("weight", number) == {}
        assert record["warnings"] == [f"{task}: quorum of 1 not reached (0 admitted); the previous model is kept"]
    if "sharpness" in method.tasks:
        for number, weights in zip((2, 4), expected_weights([done.records[1], done.records[3]])):
            assert done.column("weight", number) == pytest.approx(weights)


@pytest.mark.parametrize("method", METHODS)
def test_images_that_are_not_numbers_leave_their_client_out(method):
    data = three_clients()
    broken = images_of(6, 5).astype(np.float32) / 255
    broken[:] = np.nan
    data["c1"] = ArrayDataset(broken, np.arange(6), data["c1"].labels)
    done = Federation(method, data, network="Normed").run()
    assert [r["admitted"] for r in done.records] == [["c0", "c2"]] * 3
    value = "loss" if method == "fedavg" else "sharpness"
    assert any(value in r["reason"] and "not finite" in r["reason"] for r in done.records[0]["refused"])
    assert all(torch.isfinite(t).all() for t in done.models[-1].values() if t.is_floating_point())


def test_one_bad_image_costs_its_batches_and_not_its_client():
    data = three_clients()
    broken = images_of(6, 5).astype(np.float32) / 255
    broken[2] = np.nan
    data["c1"] = ArrayDataset(broken, np.arange(6), data["c1"].labels)
    done = Federation("fedavg", data).run()
    assert done.records[0]["admitted"] == ["c0", "c1", "c2"]
    assert done.column("skipped", 1) == {"c0": 0, "c1": 1, "c2": 0}
    assert done.column("steps", 1) == {"c0": 3, "c1": 1, "c2": 2}


@pytest.mark.parametrize("options", [{"fraction": 0.5}, {"dropout": 0.4}, {"fraction": 0.7, "dropout": 0.3}])
def test_fedism_keeps_the_weights_of_clients_that_miss_rounds(options):
    base = list(three_clients().values())
    data = {f"c{i}": base[i % 3] for i in range(6)}
    done = Federation("fedism", data, rounds=8, **options).run()
    assert len({tuple(r["admitted"]) for r in done.records}) > 2
    assert {c for r in done.records for c in r["admitted"]} == set(data)
    for record, weights in zip(done.records, expected_weights(done.records)):
        assert {c: record["clients"][c]["weight"] for c in weights} == pytest.approx(weights)
        assert sum(weights.values()) == pytest.approx(1.0) if weights else record["warnings"]
    assert set(done.server.notes["weights"].values) <= set(data)


def multilabel_clients():
    generator = np.random.default_rng(0)
    data = {f"c{i}": client_data(generator.integers(0, 2, (8, 3)).tolist(), 10 + i) for i in range(2)}
    data["c2"] = client_data([[0, 1, 1], [0, 0, 1], [0, 1, 1], [0, 0, 1]], 12)  # never and always
    return data


MULTI = {"task": "multilabel", "batch_size": 8}


@pytest.mark.parametrize("method", METHODS)
def test_multilabel_round_by_hand(method):
    """Binary cross-entropy shifted by the log-odds of each label; one batch, so that Adam takes one step."""
    data = multilabel_clients()
    salt = {"name": "fedism", "salt": {"alpha": 0.0, "rho": 0.1}} if method == "fedism" else method
    done = Federation(salt, data, bundle_changes=MULTI, rounds=1).run()
    theta = np.hstack([done.initial["head.weight"].numpy(), done.initial["head.bias"].numpy()[:, None]])

    def loss_and_gradient(at, x, y, offsets):
        z = x @ at.T + offsets
        loss = (np.logaddexp(0, z) - y * z).mean()
        return loss, (1 / (1 + np.exp(-z)) - y).T @ x / y.size

    sharp, models = {}, {}
    for name, client in data.items():
        x = (client.images.reshape(len(client), PIXELS) / np.float32(255) - 0.5) / 0.5
        x, y = np.hstack([x, np.ones((len(x), 1))]), client.labels.numpy().astype(float)
        loss, gradient = loss_and_gradient(theta, x, y, 0.0)
        up = loss_and_gradient(theta + 0.1 * gradient / np.linalg.norm(gradient), x, y, 0.0)[0]
        sharp[name] = up - loss
        share = y.mean(axis=0)
        offsets = np.log(np.maximum(share, 1e-12)) - np.log(np.maximum(1 - share, 1e-12))
        _, gradient = loss_and_gradient(theta, x, y, offsets)
        if method == "fedism":
            moved = theta + 0.1 * gradient / np.linalg.norm(gradient)
            _, gradient = loss_and_gradient(moved, x, y, offsets)
        gradient = gradient + 5e-4 * theta
        models[name] = theta - 0.01 * gradient / (np.abs(gradient) + 1e-8)
    if method == "fedism":
        assert done.column("sharpness", 1) == pytest.approx(sharp, rel=1e-5)
        weights = {c: s**2 / sum(t**2 for t in sharp.values()) for c, s in sharp.items()}
    else:
        weights = {"c0": 0.4, "c1": 0.4, "c2": 0.2}
    assert done.column("weight", 1) == pytest.approx(weights, rel=1e-5)
    expected = sum(weights[c] * models[c] for c in data)
    found = np.hstack([done.models[0]["head.weight"].numpy(), done.models[0]["head.bias"].numpy()[:, None]])
    assert np.abs(found - expected).max() < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_multilabel_and_binary_tasks_over_rounds(method):
    for changes, data in (
        (MULTI, multilabel_clients()),
        ({"classes": ["benign", "malign"]}, {c: client_data([0, 1, 1, 0, i, 1], i) for i, c in enumerate("ab")}),
    ):
        done = Federation(method, data, network="Normed", bundle_changes=changes, rounds=6).run()
        assert all(r["refused"] == [] for r in done.records)
        assert sum(done.column("loss", 6).values()) < sum(done.column("loss", 1).values())


def test_integer_buffers_come_from_the_first_client_that_counted():
    done = Federation(faulty(fedism.METHOD, "train", "crash", "c0"), three_clients(), network="Normed", rounds=1).run()
    counter = done.models[0]["norm.num_batches_tracked"]
    assert (counter.dtype, counter.item()) == (torch.int64, 2)  # c1 has six images in batches of four


@pytest.mark.parametrize("method", ["fedavg", "fedism", "fedism_plus"])
def test_any_number_of_workers_gives_bitwise_the_same(method):
    one = Federation(method, three_clients(), network="Normed").run()
    two = Federation(method, three_clients(), network="Normed", workers=2).run()
    assert all(same_state(a, b) for a, b in zip(one.models, two.models))
    assert [r["clients"] for r in one.records] == [r["clients"] for r in two.records]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("killed_after", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_resumed_fedism_has_its_weights_and_goes_on_bitwise(tmp_path, killed_after, workers):
    options = {"network": "Normed", "rounds": 4, "dropout": 0.3, "seed": 4}
    whole = Federation("fedism", three_clients(), **options).run()

    def save(state):
        save_state(state, tmp_path / "checkpoint")
        if state.round == killed_after:
            raise Killed

    first = Federation("fedism", three_clients(), folder=tmp_path, save=save, workers=workers, **options)
    with pytest.raises(Killed):
        first.run()
    kept = load_state(tmp_path / "checkpoint")
    assert kept.round == killed_after
    assert set(kept.notes["weights"].values) <= {"c0", "c1", "c2"}
    second = Federation("fedism", three_clients(), folder=tmp_path, workers=workers, **options).run()
    models = [*first.models, *second.models]
    assert all(same_state(a, b) for a, b in zip(models, whole.models, strict=True))
    records = [{**r, "seconds": 0} for r in [*first.records, *second.records]]
    assert records == [{**r, "seconds": 0} for r in whole.records]
