"""FedELC: gradients against autograd, both stages against NumPy, labels at the client, and its edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from noise_oracle import adam, along, complete, entropy_gradient, followed, mean_of, numeric, ones, softmax, theta_of
from planted import memories
from scipy.stats import entropy
from test_fednoro import distance_of, mirrored, numpy_losses, numpy_train, six_clients, voted
from tiny_federation import Federation, client_data

from medfed.errors import ConfigError
from medfed.federation.messages import Message
from medfed.federation.state import same_state
from medfed.methods.fedelc import LabelCorrection, correction_loss, label_gradient, merged, train_by_status
from medfed.methods.registry import resolve_method
from medfed.seeding import torch_generator

SECTION = {"name": "fedelc", "warmup": 1, "local_epochs": 2, "label_rate": 20.0}


def numpy_loss(z, u, y, alpha, beta):
    p, known = softmax(z), softmax(u)
    classes = z.shape[1]
    apart = np.array([entropy(a, b) for a, b in zip(p, known)]).mean() / classes
    observed = -np.log(known[np.arange(len(y)), y]).mean()
    return apart + alpha * observed + beta * entropy(p, axis=1).mean() / classes


def test_loss_and_both_gradients():
    generator = np.random.default_rng(1)
    z, u = generator.normal(0, 2, (2, 6, 3))
    y = generator.integers(0, 3, 6)
    scores = torch.tensor(z, requires_grad=True)
    logits = torch.tensor(u, requires_grad=True)
    loss = correction_loss(scores, logits, torch.tensor(y), 0.5, 0.2)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(numpy_loss(z, u, y, 0.5, 0.2), rel=1e-12)
    assert np.allclose(scores.grad, numeric(lambda at: numpy_loss(at, u, y, 0.5, 0.2), z), atol=1e-8)
    ours = label_gradient(scores.detach(), torch.tensor(u), torch.tensor(y), 0.5)
    assert torch.allclose(ours, logits.grad, atol=1e-12)


def test_label_logits_take_one_step_an_epoch_and_skipped_batches_none():
    labels, logits = torch.tensor([0, 1, 2, 0]), 10.0 * torch.eye(3)[[0, 1, 2, 0]]
    correction = LabelCorrection(labels, logits, 0.5, 0.2, rate=4.0)
    scores = torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 5.0], [3.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    for rows, skipped in (([2, 0], False), ([1, 3], True)):
        batch = {"image": scores[rows], "label": labels[rows], "index": torch.tensor(rows)}
        correction(lambda x: x, batch)
        assert torch.equal(correction.logits, logits)
        correction.after(batch, {"skipped": skipped})
    p, y = softmax(scores.numpy()), softmax(logits.numpy())
    step = 4.0 * ((y - p) / 3 + 0.5 * (y - np.eye(3)[labels])) / 2
    want = logits.numpy() - step * np.array([1, 0, 1, 0])[:, None]
    assert np.allclose(correction.logits, want, atol=1e-6)


def test_merged_labels_are_ten_times_the_mean_of_both_opinions():
    got = merged(torch.tensor([[0.0, 0.0]]), torch.tensor([[np.log(3.0), 0.0]]), 10.0)
    assert got.tolist() == [pytest.approx([6.25, 3.75])]


def numpy_corrected(
    theta, client, name, round, u, *, epochs, alpha=0.5, beta=0.2, rate=20.0, scale=10.0, batches=followed
):
    """Local training of a noisy client: the model and its label logits after the merge."""
    x, y = ones(client), client.labels.numpy()
    state = {"u": u.copy(), "g": np.zeros_like(u), "seen": 0}
    epoch = sum(len(batch) for batch in batches(client, name, round, 1))

    def gradient(local, batch):
        if state["seen"] == epoch:
            state["u"], state["g"], state["seen"] = state["u"] - rate * state["g"], np.zeros_like(u), 0
        now = state["u"][batch]
        p, known = softmax(x[batch] @ local.T), softmax(now)
        state["g"][batch] = ((p.sum(axis=1, keepdims=True) * known - p) / 3 + alpha * (known - np.eye(3)[y[batch]])) / (
            len(batch)
        )
        state["seen"] += len(batch)
        # KL(p || y) + beta H(p) = -sum p log y + (beta - 1) H(p)
        toward = along(p, -np.log(known)) + (beta - 1) * entropy_gradient(p)
        return toward.T @ x[batch] / len(batch) / 3

    local = adam(theta, batches(client, name, round, epochs), gradient)
    u = state["u"] - rate * state["g"]
    return local, scale * (softmax(u) + softmax(x @ local.T)) / 2


@pytest.mark.parametrize("daagg", [True, False])
def test_both_stages_are_those_of_the_equations(daagg, tmp_path):
    data = six_clients()
    done = Federation({**SECTION, "daagg": daagg}, data, rounds=3, folder=tmp_path).run()
    theta, sizes = theta_of(done.initial), {c: len(d) for c, d in data.items()}
    theta = mean_of({c: numpy_train(theta, d, c, 1, epochs=2) for c, d in data.items()}, sizes)
    assert np.abs(theta_of(done.models[0]) - theta).max() < 1e-6
    names = list(data)
    noisy = [names[k] for k in voted(np.array([numpy_losses(theta, d) for d in data.values()]))]
    assert {c for c, s in done.column("status", 2).items() if s == "noisy"} == set(noisy)
    labels = {c: 10.0 * np.eye(3)[data[c].labels.numpy()] for c in noisy}
    for round in (2, 3):
        models = {}
        for c, d in data.items():
            if c in noisy:
                models[c], labels[c] = numpy_corrected(theta, d, c, round, labels[c], epochs=2)
            else:
                models[c] = numpy_train(theta, d, c, round, epochs=2)
        apart = {c: min(distance_of(models[c], models[j]) for j in names if j not in noisy) for c in noisy}
        far = {c: np.exp(-apart[c] / max(apart.values())) if daagg and c in noisy else 1.0 for c in names}
        theta = mean_of(models, {c: sizes[c] * far[c] for c in names})
        assert np.abs(theta_of(done.models[round - 1]) - theta).max() < 5e-5
        assert done.column("edited", round) == {
            c: int((labels[c].argmax(axis=1) != data[c].labels.numpy()).sum()) for c in noisy
        }
    kept = memories(done, tmp_path)
    assert {c for c in kept if "labels" in kept[c]} == set(noisy)
    for c in noisy:
        assert np.abs(kept[c]["label_logits"].numpy() - labels[c]).max() < 1e-3
        assert kept[c]["labels"].dtype == torch.int64
        assert np.array_equal(kept[c]["labels"].numpy(), labels[c].argmax(axis=1))


def test_client_has_an_audit_list_of_the_labels_that_changed(tmp_path):
    from medfed.report.audit import work_list
    from medfed.report.audit_signals import Evidence

    data = six_clients()
    done = Federation({**SECTION, "label_rate": 2000.0}, data, rounds=4, folder=tmp_path).run()
    kept = memories(done, tmp_path)
    edited = done.column("edited", 4)
    assert sum(edited.values()) > 0
    for c, count in edited.items():
        evidence = Evidence.of(kept[c])
        assert evidence is not None
        names = [f"s{i}" for i in range(len(data[c]))]
        files = {s: (s, 0) for s in names}
        found = work_list(names, data[c].labels.numpy(), ("a", "b", "c"), evidence, files)
        assert len(found) == found.changed == count


def test_edges(tmp_path):
    """Clients that are alike, one client alone, a class that is absent, partial participation, workers."""
    alike = {f"c{k}": client_data([0, 1, 1, 0, 1], seed=3) for k in range(3)}
    done = Federation(SECTION, alike, network="Normed", rounds=2).run()
    assert set(done.column("status", 2).values()) == {"clean"}
    assert done.column("edited", 2) == {}
    alone = Federation(SECTION, {"only": client_data([0, 1, 2, 0, 1], seed=4)}, rounds=2).run()
    assert alone.column("weight", 2) == {"only": 1.0}
    options = {"network": "Normed", "rounds": 4, "fraction": 0.5}
    one = Federation(SECTION, six_clients(), **options).run()
    two = Federation(SECTION, six_clients(), workers=2, folder=tmp_path, **options).run()
    assert all(same_state(a, b) for a, b in zip(one.models, two.models, strict=True))
    assert all(len(done.column("weight", t)) == 3 for t, done in ((t, one) for t in (1, 2, 3, 4)))


def test_nobody_judged_clean_is_averaging_of_corrected_clients(tmp_path):
    from medfed.federation.state import ServerState, save_state

    data = six_clients()
    start = Federation(SECTION, data).initial
    status = dict.fromkeys(data, "noisy")
    note = Message(values={"status": status, "posterior": {}, "note": ""})
    save_state(ServerState(start, round=1, notes={"verdict": note}), tmp_path / "checkpoint")
    done = Federation(SECTION, data, rounds=2, folder=tmp_path).run()
    assert set(done.column("edited", 1)) == set(data)
    total = sum(len(d) for d in data.values())
    assert done.column("weight", 1) == pytest.approx({c: len(d) / total for c, d in data.items()})


def test_settings():
    _, settings = resolve_method({"name": "fedelc"})
    assert (settings.warmup, settings.scale, settings.alpha, settings.beta) == (20, 10.0, 0.5, 0.2)
    assert (settings.local_epochs, settings.logit_adjustment, settings.label_rate) == (5, True, 1000.0)
    with pytest.raises(ConfigError, match="warm-up of 20 rounds leaves none of 3"):
        Federation("fedelc", six_clients()).run()


# The released form.


def numpy_clean(theta, client, name, round, *, epochs):
    """Logit-adjusted local training on complete batches."""
    x, y = ones(client), client.labels.numpy()
    counts = np.bincount(y, minlength=3)
    offsets = np.log(np.maximum(counts / counts.sum(), 1e-12))

    def gradient(local, batch):
        return (softmax(x[batch] @ local.T + offsets) - np.eye(3)[y[batch]]).T @ x[batch] / len(batch)

    return adam(theta, complete(client, name, round, epochs), gradient)


def test_released_form_drops_incomplete_batches_and_sees_augmented_images(tmp_path):
    """Both stages of clients with 13 to 18 samples and, at one, with fewer than a batch of 4.

    Every image is mirrored in training; in the released form also where clients are judged and labels merged.
    """
    data = {**six_clients(), "c6": client_data([0, 1, 2], seed=8)}
    section, changes = {**SECTION, "form": "as_released"}, {"augment::flip": 1.0}
    done = Federation(section, data, rounds=3, folder=tmp_path, bundle_changes=changes).run()
    seen = {c: mirrored(d) for c, d in data.items()}
    theta, sizes, names = theta_of(done.initial), {c: len(d) for c, d in data.items()}, list(data)
    theta = mean_of({c: numpy_clean(theta, d, c, 1, epochs=2) for c, d in seen.items()}, sizes)
    assert np.abs(theta_of(done.models[0]) - theta).max() < 1e-6
    assert done.column("steps", 1) == {c: 2 * max(len(d) // 4, 1) for c, d in data.items()}
    table = np.array([numpy_losses(theta, d) for d in seen.values()])
    assert done.column("class_loss", 2) == pytest.approx(dict(zip(names, np.nanmean(table, axis=1))), rel=1e-5)
    noisy = [names[k] for k in voted(table)]
    assert {c for c, s in done.column("status", 2).items() if s == "noisy"} == set(noisy)
    labels = {c: 10.0 * np.eye(3)[data[c].labels.numpy()] for c in noisy}
    for round in (2, 3):
        models = {c: numpy_clean(theta, d, c, round, epochs=2) for c, d in seen.items() if c not in noisy}
        for c in noisy:
            models[c], labels[c] = numpy_corrected(theta, seen[c], c, round, labels[c], epochs=2, batches=complete)
        apart = {c: min(distance_of(models[c], models[j]) for j in names if j not in noisy) for c in noisy}
        far = {c: np.exp(-apart[c] / max(apart.values())) if c in noisy else 1.0 for c in names}
        theta = mean_of(models, {c: sizes[c] * far[c] for c in names})
        assert np.abs(theta_of(done.models[round - 1]) - theta).max() < 5e-5
    kept = memories(done, tmp_path)
    assert noisy
    for c in noisy:
        assert np.abs(kept[c]["label_logits"].numpy() - labels[c]).max() < 1e-3


def asked(form, client, model, **changes):
    """Label logits of a noisy client after one round, and its reply."""
    _, settings = resolve_method({**SECTION, "form": form, **changes})
    reply = train_by_status(client, Message.of({**settings.second_stage(), "status": "noisy"}, model=model))
    return client.memory["label_logits"].numpy(), reply


@pytest.mark.parametrize("form", ["published", "as_released"])
def test_merge_takes_the_statistics_of_batches_in_the_released_form_alone(form):
    """Labels that do not learn, so that what the merge adds is the network's prediction alone."""
    data = {"c0": client_data([0, 1, 2, 0, 1, 2, 2, 1, 0, 1], seed=4)}
    done = Federation(SECTION, data, network="Normed")
    client = done.server.engine.host.client("c0")
    client.round = 1
    found, reply = asked(form, client, done.initial, label_rate=0.0)
    state = {k: t.numpy() for k, t in reply.group("model").items()}
    h = ones(data["c0"])[:, :-1] @ state["first.weight"].T + state["first.bias"]
    want = np.empty_like(found)
    order = torch.randperm(10, generator=torch_generator("shuffle", 0, 1, "c0", "merge")).numpy()
    for rows in (order[:4], order[4:8], order[8:]):
        mean, variance = state["norm.running_mean"], state["norm.running_var"]
        if form == "as_released":
            mean, variance = h[rows].mean(axis=0), h[rows].var(axis=0)
        normal = (h[rows] - mean) / np.sqrt(variance + 1e-5) * state["norm.weight"] + state["norm.bias"]
        told = np.maximum(normal, 0) @ state["head.weight"].T + state["head.bias"]
        want[rows] = 10 * (softmax(10.0 * np.eye(3)[data["c0"].labels[rows]]) + softmax(told)) / 2
    assert np.allclose(found, want, atol=1e-5)


def test_labels_of_dropped_samples_do_not_learn_in_that_epoch():
    """One epoch of two batches of ten samples: two labels stay, the others move."""
    data = {"c0": client_data([0, 1, 2, 0, 1, 2, 2, 1, 0, 1], seed=4)}
    done = Federation(SECTION, data)
    client = done.server.engine.host.client("c0")
    client.round = 1
    one, reply = asked("as_released", client, done.initial, local_epochs=1, label_rate=2000.0)
    del client.memory["label_logits"]
    still, _ = asked("as_released", client, done.initial, local_epochs=1, label_rate=0.0)
    order = torch.randperm(10, generator=torch_generator("shuffle", 0, 1, "c0")).numpy()
    assert reply.values["steps"] == 2
    assert sorted(np.flatnonzero(np.abs(one - still).max(axis=1) > 1e-3)) == sorted(order[:8])
