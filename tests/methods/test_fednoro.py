"""FedNoRo on the real trainer against a second implementation in NumPy and scikit-learn, and at its edges."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_fedism_oracle import DECAY, LR, LinearSoftmax, orders, pixels, theta_of
from tiny_federation import PIXELS, SIDE, Federation, client_data, three_clients

from medfed.data.arrays import ArrayDataset
from medfed.errors import ConfigError
from medfed.federation.messages import Message
from medfed.federation.server import Patience
from medfed.federation.state import load_state, same_state, save_state
from medfed.methods import fednoro
from medfed.methods.noise_aware import ramp_up, train_noise_aware
from medfed.methods.registry import resolve_method
from medfed.reliability.identification import Verdict

NOISY = ("c4", "c5")


def six_clients(flipped=NOISY, classes=3):
    """Clients whose images show their true class; those ``flipped`` have most labels turned. The second lacks one."""
    generator = np.random.default_rng(5)
    patterns = generator.integers(0, 256, (classes, 1, SIDE, SIDE))
    data = {}
    for k in range(6):
        true = generator.permutation(np.arange(13 + k) % (2 if k == 1 else classes))
        noise = generator.integers(0, 256, (len(true), 1, SIDE, SIDE))
        images = (0.75 * patterns[true] + 0.25 * noise).astype(np.uint8)
        turned = (generator.random(len(true)) < 0.8) & (f"c{k}" in flipped)
        labels = np.where(turned, (true + 1) % classes, true)
        data[f"c{k}"] = ArrayDataset(images, np.arange(len(true)), torch.from_numpy(labels))
    return data


SECTION = {"name": "fednoro", "warmup": 2, "local_epochs": 2, "ramp_begin": 2, "ramp_end": 4}


class ShortSettings(fednoro.FedNoRoSettings):
    """Defaults as of ``SECTION``, for methods that are not found by name."""

    warmup: int = 2
    local_epochs: int = 2
    ramp_begin: int | None = 2
    ramp_end: int = 4


SHORT = replace(fednoro.METHOD, settings=ShortSettings)


# A second implementation.


def softmax(z):
    z = np.exp(z - z.max(axis=1, keepdims=True))
    return z / z.sum(axis=1, keepdims=True)


def numpy_train(theta, client, name, round, *, epochs, taught=None):
    """Local Adam; ``taught`` is (weight, temperature, soften, floor of the counts) of a client that is not clean."""
    x, y = pixels(client), client.labels.numpy()
    x1 = np.hstack([x, np.ones((len(x), 1))])
    counts = np.bincount(y, minlength=len(theta)).astype(float)
    prior = np.maximum(counts, taught[3]) if taught else counts
    offsets = np.log(np.maximum(prior / prior.sum(), 1e-12))
    counted = counts > 0 if taught and not taught[3] else np.ones(len(counts), bool)
    local, m, v = theta.copy(), np.zeros_like(theta), np.zeros_like(theta)
    for t, batch in enumerate(orders(0, round, name, len(y), epochs), start=1):
        _, g = LinearSoftmax.loss_and_gradient(local, x[batch], y[batch], offsets)
        if taught:
            weight, temperature, soften, _ = taught
            scale = temperature if soften else 1.0
            followed = softmax(x1[batch] @ theta.T / temperature) * counted
            student = softmax((x1[batch] @ local.T + offsets) / scale)
            # d/dz of -sum_c p_T(c) log p_S(c), over the classes that count
            toward = (student * followed.sum(axis=1, keepdims=True) - followed) / scale
            g = weight * toward.T @ x1[batch] / len(batch) + (1 - weight) * g
        g = g + DECAY * local
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        local = local - LR * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return local


def numpy_losses(theta, client):
    """Mean loss of each class, NaN where the client has none."""
    x, y = pixels(client), client.labels.numpy()
    out = np.full(len(theta), np.nan)
    for c in np.unique(y):
        out[c] = LinearSoftmax.loss_and_gradient(theta, x[y == c], y[y == c], np.zeros(len(theta)))[0]
    return out


def voted(table):
    """Indices of the noisy rows by nine mixtures."""
    from sklearn.mixture import GaussianMixture

    table = np.where(np.isnan(table), np.nanmin(table, axis=0), table)
    table = (table - table.min(axis=0)) / (table.max(axis=0) - table.min(axis=0))
    votes = []
    for seed in range(9):
        mixture = GaussianMixture(2, random_state=seed).fit(table)
        worse = mixture.means_.sum(axis=1).argmax()
        votes.append(tuple(np.flatnonzero(mixture.predict(table) == worse)))
    return Counter(votes).most_common(1)[0][0]


def mean_of(models, weights):
    return sum(weights[c] * models[c] for c in models) / sum(weights[c] for c in models)


def distance_of(one, other):
    """Weights and bias of the linear classifier are two tensors."""
    apart = one - other
    return np.linalg.norm(apart[:, :-1]) + np.linalg.norm(apart[:, -1])


CASES = {
    "as released": {},
    "student softened": {"soften_student": True, "temperature": 2.0},
    "absent classes count once": {"least_count": 1},
    "without DaAgg": {"daagg": False},
    "strong teacher from the start": {"teacher_weight": 1.0, "ramp_begin": 0, "ramp_end": 0},
}


@pytest.mark.parametrize("case", CASES)
def test_both_stages_are_those_of_the_equations(case):
    data = six_clients()
    section = {**SECTION, **CASES[case]}
    ours = Federation(section, data, rounds=5).run()
    theta, sizes = theta_of(ours.initial), {c: len(d) for c, d in data.items()}
    for round in (1, 2):
        models = {c: numpy_train(theta, d, c, round, epochs=2) for c, d in data.items()}
        theta = mean_of(models, sizes)
        assert np.abs(theta_of(ours.models[round - 1]) - theta).max() < 1e-6
        assert ours.column("weight", round) == pytest.approx({c: n / sum(sizes.values()) for c, n in sizes.items()})

    table = np.stack([numpy_losses(theta, data[c]) for c in sorted(data)])
    noisy = {sorted(data)[i] for i in voted(table)}
    assert noisy == set(NOISY)
    assert ours.column("status", 3) == {c: "noisy" if c in noisy else "clean" for c in data}
    assert ours.column("class_loss", 3) == pytest.approx(dict(zip(sorted(data), np.nanmean(table, axis=1))), rel=1e-5)
    assert ours.column("observed_classes", 3) == {**dict.fromkeys(data, 3), "c1": 2}

    for round in (3, 4, 5):
        rising = 0.8 * math.exp(-5 * (1 - (round - 1 - 2) / 2) ** 2)  # t = 2, 3, 4 with b = 2 and e = 4
        weight = 1.0 if case == "strong teacher from the start" else rising
        taught = (weight, section.get("temperature", 0.8), "soften_student" in section, section.get("least_count", 0))
        models = {
            c: numpy_train(theta, d, c, round, epochs=2, taught=taught if c in noisy else None) for c, d in data.items()
        }
        if case == "absent classes count once":  # in the prior of a clean client too
            models["c1"] = numpy_train(theta, data["c1"], "c1", round, epochs=2, taught=(0.0, 1.0, False, 1))
        apart = {c: min(distance_of(models[c], models[j]) for j in set(data) - noisy) for c in data}
        raw = {c: sizes[c] * np.exp(-apart[c] / max(apart.values())) for c in data}
        weights = sizes if case == "without DaAgg" else raw
        theta = mean_of(models, weights)
        shares = {c: w / sum(weights.values()) for c, w in weights.items()}
        assert ours.column("weight", round) == pytest.approx(shares, rel=1e-6)
        assert np.abs(theta_of(ours.models[round - 1]) - theta).max() < 1e-6
        assert ours.records[round - 1]["server"]["teacher_weight"] == pytest.approx(weight)
        if case != "without DaAgg":
            assert ours.column("distance", round) == pytest.approx(apart, rel=1e-5, abs=1e-12)


# The record, and what is kept.


def test_record_and_notes_of_the_verdict():
    done = Federation(SECTION, six_clients(), rounds=4).run()
    third = done.records[2]
    assert third["server"]["clean_clients"] == 4
    assert (third["server"]["noisy_clients"], third["server"]["undetermined_clients"]) == (2, 0)
    assert set(done.column("p_clean", 3)) == set(six_clients())
    assert all(0 <= p <= 1 for p in done.column("p_clean", 3).values())
    for other in (1, 2, 4):
        assert done.column("status", other) == {}
        assert "clean_clients" not in done.records[other - 1]["server"]
    note = done.server.notes["verdict"].values
    assert (note["identification"], note["round"]) == ("class losses", 3)
    assert Verdict.from_plain(note).noisy == NOISY
    model = sum(t.numel() * t.element_size() for t in done.initial.values())
    # The model goes down twice, to be judged and to be trained; losses are plain values.
    assert third["bytes"] == {"down": 12 * model, "up": 6 * model}
    assert json.dumps(done.records)


def test_stage_one_is_fedavg_with_logit_adjustment():
    data = six_clients()
    one = Federation({**SECTION, "warmup": 3}, data, rounds=4).run()
    two = Federation({"name": "fedavg", "local_epochs": 2}, data, rounds=3).run()
    assert all(same_state(a, b) for a, b in zip(one.models[:3], two.models, strict=True))


def test_class_losses_task_by_hand():
    data = {"only": client_data([0, 2, 2, 2], seed=1)}
    done = Federation("fednoro", data)
    reply = fednoro.class_losses(done.server.engine.host.client("only"), Message.of({}, model=done.initial))
    expected = numpy_losses(theta_of(done.initial), data["only"])
    assert reply.values["class_losses"][1] is None
    assert [reply.values["class_losses"][c] for c in (0, 2)] == pytest.approx(expected[[0, 2]], rel=1e-5)
    assert (reply.values["samples"], reply.values["observed_classes"]) == (4, 2)
    assert reply.values["class_loss"] == pytest.approx(np.nanmean(expected), rel=1e-5)
    assert reply.tensors == {}


@pytest.mark.parametrize(("begin", "end"), [(10, 49), (2, 49), (0, 1)])
def test_ramp(begin, end):
    assert ramp_up(1, begin, end) == ramp_up(begin + 1, begin, end) == pytest.approx(math.exp(-5))
    assert ramp_up(end + 1, begin, end) == ramp_up(end + 50, begin, end) == 1.0
    rising = [ramp_up(t, begin, end) for t in range(begin + 1, end + 2)]
    assert rising == sorted(set(rising))


def test_ramp_by_hand_and_without_room():
    assert ramp_up(31, 10, 50) == pytest.approx(math.exp(-5 * 0.25))
    assert ramp_up(1, 5, 5) == ramp_up(1, 9, 5) == 1.0
    settings = resolve_method({"name": "fednoro"})[1]
    assert settings.weight(11) == pytest.approx(0.8 * math.exp(-5))
    assert settings.weight(50) == settings.weight(100) == 0.8


# Who is judged how.


def judging(monkeypatch, status):
    def vote(losses, clients, seeds=range(9)):
        return Verdict({c: status.get(c, "clean") for c in clients}, dict.fromkeys(clients, 0.5))

    monkeypatch.setattr("medfed.reliability.identification.vote_by_loss", vote)


def test_all_clean_is_fedavg(monkeypatch):
    judging(monkeypatch, {})
    data = six_clients()
    # Plain loss: the priors of the two stages differ only for absent classes, by rounding at the least.
    section = {**SECTION, "logit_adjustment": False}
    one = Federation(section, data, rounds=4).run()
    two = Federation({"name": "fedavg", "local_epochs": 2, "logit_adjustment": False}, data, rounds=4).run()
    assert all(same_state(a, b) for a, b in zip(one.models, two.models, strict=True))
    assert all(one.column("distance", round) == {} for round in (1, 2, 3, 4))


def test_all_noisy_follow_the_teacher_with_weights_of_sample_counts(monkeypatch):
    data = six_clients()
    judging(monkeypatch, dict.fromkeys(data, "noisy"))
    done = Federation({**SECTION, "ramp_end": 0}, data, rounds=4).run()
    sizes = {c: len(d) for c, d in data.items()}
    assert done.column("weight", 4) == pytest.approx({c: n / sum(sizes.values()) for c, n in sizes.items()})
    assert done.records[2]["server"]["clean_clients"] == 0
    assert done.records[2]["warnings"] == ["no client is judged clean: models are averaged by sample counts"]
    theta = theta_of(done.models[2])
    taught = (0.8, 0.8, False, 0)
    models = {c: numpy_train(theta, d, c, 4, epochs=2, taught=taught) for c, d in data.items()}
    assert np.abs(theta_of(done.models[3]) - mean_of(models, sizes)).max() < 1e-6


def test_one_client_is_clean_and_trains_as_in_fedavg():
    data = {"c0": three_clients()["c0"]}
    one = Federation(SECTION, data, rounds=4).run()
    two = Federation({"name": "fedavg", "local_epochs": 2}, data, rounds=4).run()
    assert one.column("status", 3) == {"c0": "clean"}
    assert one.column("p_clean", 3) == {"c0": None}
    assert any("fewer than two clients" in w for w in one.records[2]["warnings"])
    assert all(same_state(a, b) for a, b in zip(one.models, two.models, strict=True))
    assert json.dumps(one.records)


def test_clients_of_one_class_train_to_finite_models():
    data = {**six_clients(), "c6": client_data([1] * 5, 8), "c7": client_data([2] * 6, 9)}
    for network in ("Softmax", "Normed"):
        done = Federation({**SECTION, "ramp_end": 0}, data, network=network, rounds=5).run()
        assert all(r["refused"] == [] for r in done.records)
        assert done.column("observed_classes", 3)["c6"] == 1
        assert sum(done.column("skipped", 5).values()) == 0
        assert all(torch.isfinite(t).all() for t in done.models[-1].values() if t.is_floating_point())


# Clients that are missing.


def failing(task, clients, rounds):
    sound = fednoro.METHOD.tasks[task]

    def unsound(client, message):
        if client.name in clients and client.round in rounds:
            raise RuntimeError("broken")
        return sound(client, message)

    return replace(SHORT, tasks={**SHORT.tasks, task: unsound})


def test_client_that_does_not_answer_at_the_identification_is_undetermined_and_taught():
    data = six_clients()
    told = {}

    def spying(client, message):
        told.setdefault(client.round, {})[client.name] = message.values["status"]
        return train_noise_aware(client, message)

    method = failing("class_losses", {"c0"}, {3})
    method = replace(method, tasks={**method.tasks, "train_by_status": spying})
    done = Federation(method, data, rounds=4).run()
    third = done.records[2]
    assert third["clients"]["c0"]["status"] == "undetermined"
    assert third["clients"]["c0"]["p_clean"] is None
    assert third["server"]["undetermined_clients"] == 1
    assert {"client": "c0", "reason": "failed with RuntimeError"} in third["refused"]
    assert third["admitted"] == sorted(data)
    assert told[3] == told[4] == done.column("status", 3)
    assert done.column("distance", 4)["c0"] > 0
    assert done.server.notes["verdict"].values["posterior"]["c0"] is None


def test_identification_without_quorum_is_made_in_the_next_round():
    data = six_clients()
    method = failing("class_losses", {"c0", "c1"}, {3})
    done = Federation(method, data, rounds=5, patience=Patience(quorum=5)).run()
    assert done.records[2]["warnings"] == [
        "class_losses: quorum of 5 not reached (4 admitted); the previous model is kept"
    ]
    assert done.column("status", 3) == {}
    assert "teacher_weight" not in done.records[2]["server"]
    assert done.records[2]["admitted"] == sorted(data)
    assert set(done.column("status", 4)) == set(data)
    assert done.column("status", 5) == {}
    assert done.server.notes["verdict"].values["round"] == 4
    assert "teacher_weight" in done.records[3]["server"]


def test_round_without_quorum_keeps_the_model():
    data = six_clients()
    done = Federation(failing("train_by_status", set(data), {4}), data, rounds=5).run()
    assert same_state(done.models[3], done.models[2])
    assert done.records[3]["admitted"] == []
    assert done.column("weight", 4) == {}
    assert not same_state(done.models[4], done.models[3])


def test_client_that_fails_in_the_second_stage_leaves_the_others_at_work():
    data = six_clients()
    done = Federation(failing("train_by_status", {"c0"}, {4}), data, rounds=5).run()
    assert done.records[3]["admitted"] == [c for c in sorted(data) if c != "c0"]
    assert sum(done.column("weight", 4).values()) == pytest.approx(1.0)
    assert "c0" in done.column("weight", 5)


@pytest.mark.parametrize("losses", [None, [1.0], [1.0, "x", 2.0], "abc", [True, 1.0, 2.0]])
def test_reply_that_holds_no_losses_leaves_its_client_undetermined(losses):
    def odd(client, message):
        reply = fednoro.class_losses(client, message)
        return Message.of({**reply.values, "class_losses": losses}) if client.name == "c2" else reply

    method = replace(SHORT, tasks={**SHORT.tasks, "class_losses": odd})
    done = Federation(method, six_clients(), rounds=3).run()
    assert done.column("status", 3)["c2"] == "undetermined"
    assert done.records[2]["server"]["undetermined_clients"] == 1


def test_partial_participation_judges_everyone_and_trains_some():
    done = Federation(SECTION, six_clients(), rounds=8, fraction=0.5).run()
    assert len(done.column("status", 3)) == 6
    assert all(len(r["admitted"]) == 3 for r in done.records)
    for round in range(3, 9):
        weights = done.column("weight", round)
        assert set(weights) == set(done.records[round - 1]["admitted"])
        assert sum(weights.values()) == pytest.approx(1.0)


# Stages, settings, resume.


def test_warm_up_must_leave_a_round():
    for rounds in (1, 2):
        with pytest.raises(ConfigError, match="warm-up of 2 rounds leaves none"):
            Federation(SECTION, six_clients(), rounds=rounds).run()


def test_defaults_are_those_of_the_released_code():
    settings = resolve_method({"name": "fednoro"})[1]
    assert (settings.warmup, settings.local_epochs, settings.temperature) == (10, 5, 0.8)
    assert (settings.teacher_weight, settings.ramp_begin, settings.ramp_end) == (0.8, None, 49)
    assert (settings.soften_student, settings.least_count, settings.daagg) == (False, 0.0, True)
    for bad in ({"warmup": 0}, {"teacher_weight": 1.1}, {"temperature": 0}, {"least_count": -1}, {"salt": True}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            resolve_method({"name": "fednoro", **bad})


class Killed(BaseException):
    pass


OPTIONS = {"network": "Normed", "rounds": 5, "dropout": 0.2, "seed": 3}


@pytest.fixture(scope="module")
def whole():
    return Federation(SECTION, six_clients(), **OPTIONS).run()


KILLS = [*(("save", n) for n in (1, 2, 3, 5)), ("task", "class_losses"), ("task", "train_by_status")]


@pytest.mark.parametrize(("kill", "workers"), [*((k, 1) for k in KILLS), (KILLS[2], 2), (KILLS[5], 2)])
def test_killed_in_any_stage_goes_on_bitwise(whole, tmp_path, kill, workers):
    """The third checkpoint is that of the identification, before the first round by status."""
    saves = []

    def save(state):
        save_state(state, tmp_path / "checkpoint")
        saves.append(1)
        if kill == ("save", len(saves)):
            raise Killed

    first = Federation(SECTION, six_clients(), folder=tmp_path, workers=workers, save=save, **OPTIONS)
    ask = first.server.ask

    def dying(task, *args, **options):
        replies = ask(task, *args, **options)
        if kill == ("task", task):
            raise Killed
        return replies

    first.server.ask = dying
    with pytest.raises(Killed):
        first.run()
    done = load_state(tmp_path / "checkpoint").round
    assert done < 5
    second = Federation(SECTION, six_clients(), folder=tmp_path, workers=workers, **OPTIONS).run()
    models = [*first.models[:done], *second.models]
    assert all(same_state(a, b) for a, b in zip(models, whole.models, strict=True))
    records = [{**r, "seconds": 0} for r in [*first.records[:done], *second.records]]
    assert records == [{**r, "seconds": 0} for r in whole.records]
    assert second.server.notes["verdict"] == whole.server.notes["verdict"]


def test_resume_after_an_identification_that_failed(tmp_path):
    options = {"rounds": 5, "patience": Patience(quorum=5)}
    method = failing("class_losses", {"c0", "c1"}, {3})
    expected = Federation(method, six_clients(), **options).run()
    for number in (3, 4, 5):  # the failed attempt, its round, the attempt that succeeds
        folder, saves = tmp_path / str(number), []

        def save(state, folder=folder, saves=saves, number=number):
            save_state(state, folder / "checkpoint")
            saves.append(1)
            if len(saves) == number:
                raise Killed

        first = Federation(method, six_clients(), folder=folder, save=save, **options)
        with pytest.raises(Killed):
            first.run()
        second = Federation(method, six_clients(), folder=folder, **options).run()
        done = len(expected.records) - len(second.records)
        records = [{**r, "seconds": 0} for r in [*first.records[:done], *second.records]]
        assert records == [{**r, "seconds": 0} for r in expected.records]
        assert same_state(second.models[-1], expected.models[-1])


# Training by status.


def client_of(**memory):
    done = Federation("fednoro", {"c0": client_data(LABELS, seed=4)})
    client = done.server.engine.host.client("c0")
    client.round = 1
    for name, value in memory.items():
        client.memory[name] = value
    return done, client


def values(**changes):
    return {
        **{"status": "noisy", "weight": 0.5, "temperature": 0.8, "soften_student": False, "epochs": 1},
        **{"learning_rate": None, "logit_adjustment": True, "least_count": 0},
        **changes,
    }


LABELS = [0, 1, 2, 0, 1, 2, 2, 2, 1, 0, 0]


def test_corrected_labels_are_trained_by_those_who_are_not_clean():
    """With the prior of the observed labels."""
    corrected = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 0, 0, 0])
    done, client = client_of(labels=corrected)
    for status in ("noisy", "undetermined", "clean"):
        trained = train_noise_aware(client, Message.of(values(status=status, weight=0.0), model=done.initial))
        data = client.data if status == "clean" else client.data.with_labels(corrected)
        theta, x, y = theta_of(done.initial), pixels(client.data), data.labels.numpy()
        offsets = np.log(np.bincount(LABELS) / len(LABELS))
        m, v = np.zeros((3, PIXELS + 1)), np.zeros((3, PIXELS + 1))
        for t, batch in enumerate(orders(0, 1, "c0", len(y), 1), start=1):
            g = LinearSoftmax.loss_and_gradient(theta, x[batch], y[batch], offsets)[1] + DECAY * theta
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            theta = theta - LR * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        assert np.abs(theta_of(trained.group("model")) - theta).max() < 1e-6


def test_samples_with_an_agreed_class_do_not_follow_the_teacher():
    """FedSIR: with every sample agreed it is training without a teacher; with none, or before, with it."""
    n = len(LABELS)
    rows = {"agreed": torch.zeros(1, n).long(), "none": torch.cat([torch.zeros(1, n), -torch.ones(1, n)]).long()}
    models = {}
    for name, memory in {"before": {}, **{k: {"audit_proposals": v} for k, v in rows.items()}}.items():
        for distil in ("all", "disagree"):
            done, client = client_of(**memory)
            told = values(distil_on=distil)
            models[name, distil] = train_noise_aware(client, Message.of(told, model=done.initial)).group("model")
    done, client = client_of()
    plain = train_noise_aware(client, Message.of(values(status="clean"), model=done.initial)).group("model")
    assert same_state(models["agreed", "disagree"], plain)
    for key in models.keys() - {("agreed", "disagree")}:
        assert same_state(models[key], models["before", "all"])
    assert not same_state(models["before", "all"], plain)
