"""FedNed: uncertainty and inverted predictions by hand, rounds against NumPy, and its edges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from noise_oracle import adam, followed, mean_of, ones, softmax, theta_of
from planted import memories, watch
from scipy.stats import entropy
from test_fednoro import six_clients
from test_rhfl import public
from tiny_federation import Federation, client_data, three_clients

from medfed.errors import ConfigError, DataError
from medfed.federation.messages import Message
from medfed.federation.state import ServerState, same_state, save_state
from medfed.methods.fedned import dropout_entropy, inverted
from medfed.methods.registry import resolve_method
from medfed.seeding import torch_generator

SECTION = {
    "name": "fedned", "warmup": 1, "local_epochs": 1, "uncertainty": 1.0, "confidence": 0.4, "images": 8, "steps": 5,
}  # fmt: skip
PUBLIC = public(12)


def test_entropy_of_the_mean_prediction_under_dropout():
    generator = np.random.default_rng(0)
    h, w, b = generator.normal(size=(6, 5)), generator.normal(size=(3, 5)), generator.normal(size=3)
    draws = torch_generator("x")
    mean = np.zeros((6, 3))
    for _ in range(4):
        kept = torch.rand((6, 5), generator=draws).numpy() >= 0.3
        mean += softmax(h * kept / 0.7 @ w.T + b) / 4
    tensors = [torch.tensor(a) for a in (h, w, b)]
    assert dropout_entropy(*tensors, 0.3, 4, torch_generator("x")) == pytest.approx(
        entropy(mean, axis=1).sum(), rel=1e-6
    )
    certain = dropout_entropy(tensors[0], 1e4 * tensors[1], tensors[2], 0.0, 1, torch_generator("x"))
    assert certain == pytest.approx(0.0, abs=1e-9)


def test_inverted_predictions_are_least_where_a_teacher_is_most_certain():
    got = inverted(torch.tensor([[4.0, 1.0, 2.0]]), 2.0)
    assert np.allclose(got, softmax(np.array([[1 / 8, 1 / 2, 1 / 4]])))
    assert torch.isfinite(inverted(torch.zeros(2, 3), 2.0)).all()
    assert inverted(torch.tensor([[-0.0, 1e-30, 5.0]]), 1.0).argmax() in (0, 1)


def numpy_train(theta, x, y, name, round, purpose=()):
    classes = np.eye(3)
    batches = followed(y, name, round, 1, purpose)
    return adam(theta, batches, lambda at, b: (softmax(x[b] @ at.T) - classes[y[b]]).T @ x[b] / len(b))


def numpy_uncertainty(theta, name, round):
    rows = torch.randperm(12, generator=torch_generator(0, "judged images", round)).numpy()[:8]
    h = ones(PUBLIC)[rows, :-1]
    draws, mean = torch_generator(0, "dropped features", round, name), np.zeros((8, 3))
    for _ in range(10):
        kept = torch.rand(h.shape, generator=draws).numpy() >= 0.3
        mean += softmax(h * kept / 0.7 @ theta[:, :-1].T + theta[:, -1]) / 10
    return entropy(mean, axis=1).sum()


def numpy_distil(theta, teachers, round):
    x = ones(PUBLIC)
    target = np.mean([softmax(1 / (x @ t.T) / 2.0) for t in teachers], axis=0)
    draws = torch_generator(0, "distilled images", round)
    drawn = np.concatenate([torch.randperm(12, generator=draws).numpy()[:8] for _ in range(5)])
    shuffled = torch.randperm(40, generator=torch_generator("shuffle", 0, round, "negative distillation")).numpy()

    def gradient(at, part):
        rows = drawn[part]
        return (softmax(x[rows] @ at.T / 2) - target[rows]).T @ x[rows] / 2 / len(rows)

    return adam(theta, np.split(shuffled, 5), gradient, decay=0.002)


@pytest.mark.parametrize("form", ["published", "as_released"])
def test_rounds_are_those_of_the_equations(form, tmp_path):
    released, data = form == "as_released", six_clients()
    done = Federation({**SECTION, "form": form}, data, rounds=3, public=PUBLIC, folder=tmp_path).run()
    theta, sizes, listed = theta_of(done.initial), {c: len(d) for c, d in data.items()}, set()
    own = {c: (ones(d), d.labels.numpy()) for c, d in data.items()}
    theta = mean_of({c: numpy_train(theta, *own[c], c, 1) for c in data}, sizes)
    for round in (2, 3):
        candidates, teachers = {}, {}
        for c, (x, y) in own.items():
            candidates[c] = teachers[c] = numpy_train(theta, x, y, c, round)
            if c in listed:
                p = softmax(x @ theta.T / 2)
                sure = p.max(axis=1) >= 0.4
                start = theta
                if sure.sum() > 1:
                    start = numpy_train(theta, x[sure], p.argmax(axis=1)[sure], c, round, ("second",))
                candidates[c] = start
                if released:
                    candidates[c] = teachers[c] = numpy_train(start, x, y, c, round)
                assert done.column("confident", round)[c] == sure.sum()
        share = {c: numpy_uncertainty(t, c, round) for c, t in candidates.items()}
        share = {c: u * 6 / sum(share.values()) for c, u in share.items()}
        assert done.column("uncertainty", round) == pytest.approx(share, rel=1e-4)
        good = [c for c in data if share[c] <= 1.0]
        assert done.column("weight", round) == pytest.approx({c: sizes[c] / sum(sizes[g] for g in good) for c in good})
        listed |= set(data) - set(good)
        assert {c for c, s in done.column("status", round).items() if s == "noisy"} == listed
        theta = mean_of({c: candidates[c] for c in good}, sizes)
        if not released:
            theta = numpy_distil(theta, [teachers[c] for c in listed], round)
        assert np.abs(theta_of(done.models[round - 1]) - theta).max() < 1e-4
    assert listed
    assert done.records[2]["server"]["bad_teachers"] == len(listed)
    kept = memories(done, tmp_path)
    assert {c for c in kept if "labels" in kept[c]} == set(done.column("edited", 3))


def test_all_uncertain_alike_is_averaging_and_nobody_is_noisy():
    section = {**SECTION, "uncertainty": 5.0}
    done = Federation(section, three_clients(), rounds=2, public=PUBLIC).run()
    assert set(done.column("status", 2).values()) == {"clean"}
    assert done.records[1]["server"]["bad_teachers"] == 0
    plain = Federation({"name": "fedavg", "logit_adjustment": False}, three_clients(), rounds=2).run()
    assert np.abs(theta_of(done.models[1]) - theta_of(plain.models[1])).max() < 1e-12


def test_edges(tmp_path):
    """One client, all noisy, clients that drop out, BatchNorm, workers; the server needs public images."""
    alone = Federation(SECTION, {"only": client_data([0, 1, 2, 0, 1], seed=4)}, rounds=3, public=PUBLIC).run()
    assert alone.column("status", 3) == {"only": "clean"}
    data = six_clients()
    start = Federation(SECTION, data).initial
    note = Message(values={"status": dict.fromkeys(data, "noisy")})
    save_state(ServerState(start, round=1, notes={"verdict": note}), tmp_path / "all" / "checkpoint")
    done = Federation(SECTION, data, rounds=2, public=PUBLIC, folder=tmp_path / "all").run()
    assert set(done.column("status", 1).values()) == {"noisy"}
    assert done.records[0]["server"]["bad_teachers"] == 6
    assert sum(done.column("weight", 1).values()) == pytest.approx(1.0)
    options = {"network": "Normed", "rounds": 4, "fraction": 0.7, "dropout": 0.2, "public": PUBLIC}
    for form in ("published", "as_released"):
        one = Federation({**SECTION, "form": form}, data, **options).run()
        two = Federation({**SECTION, "form": form}, data, workers=2, folder=tmp_path / form, **options).run()
        assert all(same_state(a, b) for a, b in zip(one.models, two.models, strict=True))
    with pytest.raises(DataError, match="no public images at the server"):
        Federation(SECTION, three_clients(), rounds=2).run()


def overflowing(method, clients):
    """A method in which the predictions of some clients' models are no numbers, though their weights are."""
    sound = method.tasks["train_judged"]

    def unsound(client, message):
        answer = sound(client, message)
        if client.name not in clients:
            return answer
        state = {k: torch.full_like(t, 1e308) for k, t in answer.group("model").items()}
        state["head.weight"][0] *= -1
        return Message.of(answer.values, model=state)

    return replace(method, tasks={**method.tasks, "train_judged": unsound})


@pytest.mark.parametrize("clients", [("c1",), ("c0", "c1", "c2")])
def test_models_whose_predictions_are_no_numbers_are_the_most_uncertain(clients):
    method, settings = resolve_method({**SECTION, "uncertainty": 3.0})
    unsound = replace(overflowing(method, clients), settings=lambda: settings)
    done = Federation(unsound, three_clients(), rounds=2, public=PUBLIC).run()
    told = done.column("uncertainty", 2)
    assert {c for c, u in told.items() if u is None} == set(clients)
    if len(clients) == 1:
        assert done.column("status", 2) == {"c0": "clean", "c1": "noisy", "c2": "clean"}
        assert set(done.column("weight", 2)) == {"c0", "c2"}
        assert all(torch.isfinite(t).all() for t in done.models[1].values())
    else:  # nothing tells them apart
        assert set(done.column("status", 2).values()) == {"clean"}


def test_only_clients_judged_noisy_send_a_second_model():
    done = Federation(SECTION, six_clients(), rounds=3, public=PUBLIC)
    seen = watch(done)
    done.run()
    status = done.column("status", 2)
    last = next(replies for task, asked, replies in reversed(seen) if task == "train_judged")
    assert {r.client for r in last if "second" in r.message.groups()} == {c for c, s in status.items() if s == "noisy"}


def test_settings():
    _, settings = resolve_method({"name": "fedned"})
    assert (settings.warmup, settings.uncertainty, settings.dropout, settings.passes) == (10, 1.2, 0.3, 10)
    assert (settings.steps, settings.temperature, settings.confidence) == (100, 2.0, 0.95)
    assert settings.check(20) == []
    idle = resolve_method({"name": "fedned", "distil": False, "steps": 3})[1].check(20)
    assert idle == ["no effect with method.distil: false: method.steps"]
    with pytest.raises(ConfigError, match="warm-up of 10 rounds leaves none"):
        settings.check(10)
    with pytest.raises(ConfigError, match="uncertainty"):
        resolve_method({"name": "fedned", "uncertainty": 0.5})
