"""FairFed on the real trainer: weights by hand, both forms, and what happens at 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fairness_oracle import CLIENTS, adam, close, killed_and_resumed, offsets_of, orders, pixels, theta_of
from test_methods_degenerate import MULTI, faulty, multilabel_clients
from tiny_federation import Federation, client_data, distance, three_clients

from medfed.errors import ConfigError
from medfed.federation.state import same_state
from medfed.methods.fairfed import METHOD
from medfed.methods.registry import resolve_method


def accuracy_of(theta, data, balanced):
    x = np.hstack([pixels(data), np.ones((len(data), 1))])
    y, said = data.labels.numpy(), (x @ theta.T).argmax(axis=1)
    if not balanced:
        return (y == said).mean()
    return np.mean([(said[y == c] == c).mean() for c in np.unique(y)])


@pytest.mark.parametrize("form", ["published", "as_released"])
@pytest.mark.parametrize("beta", [0.3, 2.0])
def test_four_rounds_are_those_of_the_equations(form, beta):
    data = three_clients()
    ours = Federation({"name": "fairfed", "form": form, "beta": beta, "learning_rate": 0.1}, data, rounds=4).run()
    theta, sizes = theta_of(ours.initial), np.array([len(data[c]) for c in CLIENTS])
    share = sizes / sizes.sum()
    weights = share.copy()
    for round in (1, 2, 3, 4):
        scores = np.array([accuracy_of(theta, data[c], form == "as_released") for c in CLIENTS])
        gaps = scores * (1 - share) if form == "as_released" else np.abs(scores - (share * scores).sum())
        if form == "published" or round > 1:
            weights = np.maximum(weights - beta * (gaps - gaps.mean()), 0)
            weights = weights / weights.sum()
        assert ours.column("received_accuracy", round) == pytest.approx(dict(zip(CLIENTS, scores)))
        assert ours.column("gap", round) == pytest.approx(dict(zip(CLIENTS, gaps)))
        assert ours.column("weight", round) == pytest.approx(dict(zip(CLIENTS, weights)))
        models = []
        for c in CLIENTS:
            batches = orders(0, round, c, len(data[c]), 1)
            offsets = offsets_of(data[c].labels.numpy())
            models.append(adam(theta, data[c], batches, offsets, rate=0.1))
        theta = sum(w * m for w, m in zip(weights, models))
        assert close(ours.models[round - 1], theta, 1e-5)
        assert ours.records[round - 1]["server"]["overall_accuracy"] == pytest.approx((share * scores).sum())


def told(accuracies):
    """FairFed whose clients claim these accuracies."""
    from dataclasses import replace

    from medfed.federation.messages import Message

    def accuracy(client, message):
        return Message.of({"samples": client.num_samples, "received_accuracy": accuracies[client.name]})

    return replace(METHOD, tasks={**METHOD.tasks, "accuracy": accuracy})


def run_told(accuracies, data, form="published", beta=1.0, **options):
    done = Federation(told(accuracies), data, **options)
    done.settings = METHOD.settings(form=form, beta=beta)
    return done.run()


def test_the_client_served_worst_loses_weight_and_gains_it_in_the_released_form():
    """N = 11, 6, 9. By hand for accuracies 0.8, 0.9, 0.3; beta small enough that nothing is clipped."""
    accuracies = {"c0": 0.8, "c1": 0.9, "c2": 0.3}
    overall = (11 * 0.8 + 6 * 0.9 + 9 * 0.3) / 26  # 0.65
    correct = run_told(accuracies, three_clients(), beta=0.3, rounds=2)
    gaps = [abs(a - overall) for a in accuracies.values()]
    expected = 9 / 26 - 0.3 * (gaps[2] - sum(gaps) / 3)
    assert overall == pytest.approx(0.65)
    assert correct.column("weight", 1)["c2"] == pytest.approx(expected)
    assert expected < 9 / 26
    released = run_told(accuracies, three_clients(), "as_released", beta=0.3, rounds=2)
    assert released.column("weight", 1) == pytest.approx({"c0": 11 / 26, "c1": 6 / 26, "c2": 9 / 26})
    gaps = [0.8 * 15 / 26, 0.9 * 20 / 26, 0.3 * 17 / 26]
    assert released.column("weight", 2)["c2"] == pytest.approx(9 / 26 - 0.3 * (gaps[2] - sum(gaps) / 3))
    assert released.column("weight", 2)["c2"] > 9 / 26


def test_weights_of_zero_keep_batch_norm_sound():
    """With beta 5 a client falls to 0; negative weights would turn variances negative."""
    done = run_told({"c0": 0.9, "c1": 0.8, "c2": 0.1}, three_clients(), beta=5.0, network="Normed")
    assert done.column("weight", 2)["c2"] == 0.0
    assert sum(done.column("weight", 2).values()) == pytest.approx(1.0)
    assert all((m["norm.running_var"] > 0).all() for m in done.models)


def test_equal_accuracies_are_fedavg():
    done = run_told(dict.fromkeys(CLIENTS, 0.4), three_clients(), network="Normed")
    same = Federation("fedavg", three_clients(), network="Normed").run()
    assert max(distance(a, b) for a, b in zip(done.models, same.models)) < 1e-12


@pytest.mark.parametrize("form", ["published", "as_released"])
def test_one_client_and_one_class(form):
    alone = Federation({"name": "fairfed", "form": form}, {"only": client_data([2] * 5, 1)}, rounds=3).run()
    assert alone.column("weight", 3) == {"only": 1.0}


def test_part_of_the_clients_share_what_they_had():
    data = {f"c{i}": client_data([0, 1, 2, 1, 0], i) for i in range(4)}
    claims = {"c0": 0.9, "c1": 0.5, "c2": 0.3, "c3": 0.7}
    done = run_told(claims, data, beta=0.1, fraction=0.5, rounds=8)
    kept = done.server.notes["weights"].values
    assert set(kept) == set(data)
    assert sum(kept.values()) == pytest.approx(1.0)
    assert all(sum(done.column("weight", t).values()) == pytest.approx(1.0) for t in range(1, 9))


@pytest.mark.parametrize("task", ["accuracy", "train"])
def test_client_that_fails_and_nobody_left(task):
    done = Federation(faulty(METHOD, task, "crash"), three_clients(), rounds=2).run()
    assert done.records[0]["admitted"] == ["c0", "c2"]
    assert sum(done.column("weight", 1).values()) == pytest.approx(1.0)
    assert set(done.column("weight", 2)) == set(CLIENTS)
    method = METHOD
    for client in CLIENTS:
        method = faulty(method, task, "crash", client)
    done = Federation(method, three_clients(), rounds=2).run()
    assert same_state(done.models[0], done.initial)
    assert not same_state(done.models[1], done.initial)


@pytest.mark.parametrize("form", ["published", "as_released"])
def test_killed_run_goes_on_bitwise(form, tmp_path):
    killed_and_resumed({"name": "fairfed", "form": form, "beta": 0.3}, tmp_path, 2)


def test_several_labels_and_salt():
    section = {"name": "fairfed", "metric": "balanced_accuracy", "salt": {"rho": 0.1}}
    done = Federation(section, multilabel_clients(), bundle_changes=MULTI, rounds=3).run()
    assert all(0 <= a <= 1 for a in done.column("received_accuracy", 1).values())
    assert all(torch.isfinite(t).all() for t in done.models[-1].values())


def test_settings():
    assert resolve_method({"name": "fairfed"})[1].metric == "accuracy"
    assert resolve_method({"name": "fairfed", "form": "as_released"})[1].metric == "balanced_accuracy"
    assert resolve_method({"name": "fairfed", "form": "as_released", "metric": "accuracy"})[1].metric == "accuracy"
    for section in ({"beta": -1}, {"metric": "auc"}, {"form": "two_sided"}):
        with pytest.raises(ConfigError, match=next(iter(section))):
            resolve_method({"name": "fairfed", **section})
