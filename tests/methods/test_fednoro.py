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
from medfed.federation.messages import Message
from medfed.federation.state import same_state
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
    """FedSIR: with every sample agreed it is training without a teacher; with none, or before, with it.

    Proposals of a client that is not corrected, which only its own list is made of, change nothing.
    """
    n = len(LABELS)
    rows = {"agreed": torch.zeros(1, n).long(), "none": torch.cat([torch.zeros(1, n), -torch.ones(1, n)]).long()}
    models = {}
    kept = {k: {"audit_proposals": v, "labels": torch.tensor(LABELS)} for k, v in rows.items()}
    kept |= {"before": {}, "not corrected": {"audit_proposals": rows["agreed"]}}
    for name, memory in kept.items():
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


# The released form.

FORMS = ("published", "as_released")


def mirrored(client):
    """The client's images from right to left."""
    return ArrayDataset(client.images[..., ::-1].copy(), client.rows, client.labels)


@pytest.mark.parametrize("form", FORMS)
def test_released_losses_are_those_of_augmented_images(form):
    """Every image is flipped in training; the released form flips it where clients are judged too."""
    data = six_clients()
    done = Federation({**SECTION, "form": form}, data, rounds=3, bundle_changes={"augment::flip": 1.0}).run()
    seen = {c: mirrored(d) if form == "as_released" else d for c, d in data.items()}
    losses = {c: np.nanmean(numpy_losses(theta_of(done.models[1]), d)) for c, d in seen.items()}
    assert done.column("class_loss", 3) == pytest.approx(losses, rel=1e-5)


def test_released_losses_are_drawn_anew_for_each_client_and_are_the_same_again():
    data = {"a": client_data([0, 1, 2] * 5, 3), "b": client_data([0, 1, 2] * 5, 3)}
    done = Federation({**SECTION, "form": "as_released"}, data, bundle_changes={"augment::flip": 0.5})
    told = {}
    for name in ("a", "b", "a"):
        client = done.server.engine.host.client(name)
        reply = fednoro.class_losses(client, Message.of({"augmented": True}, model=done.initial))
        told.setdefault(name, []).append(reply.values["class_losses"])
    assert told["a"][0] == told["a"][1] != told["b"][0]


def test_both_forms_are_one_where_nothing_is_augmented():
    one, two = (Federation({**SECTION, "form": form}, six_clients(), rounds=4).run() for form in FORMS)
    assert all(same_state(a, b) for a, b in zip(one.models, two.models, strict=True))
    assert [r["clients"] for r in one.records] == [r["clients"] for r in two.records]
