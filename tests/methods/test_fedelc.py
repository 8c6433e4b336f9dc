"""FedELC: gradients against autograd, both stages against NumPy, labels at the client, and its edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from noise_oracle import adam, along, entropy_gradient, followed, mean_of, numeric, ones, softmax, theta_of
from planted import memories
from scipy.stats import entropy
from test_fednoro import distance_of, numpy_losses, numpy_train, six_clients, voted
from tiny_federation import Federation, client_data

from medfed.errors import ConfigError
from medfed.federation.state import same_state
from medfed.methods.fedelc import LabelCorrection, correction_loss, label_gradient, merged
from medfed.methods.registry import resolve_method

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


def numpy_corrected(theta, client, name, round, u, *, epochs, alpha=0.5, beta=0.2, rate=20.0, scale=10.0):
    """Local training of a noisy client: the model and its label logits after the merge."""
    x, y = ones(client), client.labels.numpy()
    state = {"u": u.copy(), "g": np.zeros_like(u), "seen": 0}

    def gradient(local, batch):
        if state["seen"] == len(y):
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

    local = adam(theta, followed(client, name, round, epochs), gradient)
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
    from medfed.federation.messages import Message
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
