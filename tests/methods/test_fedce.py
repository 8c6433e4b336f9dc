"""FedCE on the real trainer, against its equations in NumPy: novelty, the model without a client, both forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fairness_oracle import CLIENTS, adam, close, killed_and_resumed, offsets_of, orders, pixels, theta_of
from test_methods_degenerate import MULTI, faulty, multilabel_clients
from tiny_federation import Federation, client_data, three_clients

from medfed.data.arrays import ArrayDataset
from medfed.errors import ConfigError
from medfed.federation.messages import Message
from medfed.federation.state import same_state
from medfed.methods.fedce import METHOD
from medfed.methods.registry import resolve_method
from medfed.methods.validation import parts_of


def balanced(theta, data):
    x = np.hstack([pixels(data), np.ones((len(data), 1))])
    y, said = data.labels.numpy(), (x @ theta.T).argmax(axis=1)
    return np.mean([(said[y == c] == c).mean() for c in np.unique(y)])


def shares(values, floor):
    values = np.maximum(values, floor)
    return values / values.sum()


def numpy_rounds(initial, split, data, rounds, *, times, floor, averaged, rate):
    """Yields novelty, need, weights and the new model of each round."""
    theta, c = initial, np.full(3, 1 / 3)
    cosines, scores, drawn, previous = [], [np.zeros(3)], [], None
    for round in range(1, rounds + 1):
        if previous is not None:
            minus = [(theta - c[k] * previous[k]) / (1 - c[k]) for k in range(3)]
            scores.append(np.array([balanced(minus[k], split[n].validation) for k, n in enumerate(CLIENTS)]))
        previous = [
            adam(
                theta,
                split[n].training,
                orders(0, round, n, len(split[n].training), 1),
                offsets_of(data[n].labels.numpy()),
                rate,
            )
            for n in CLIENTS
        ]
        u = [(p - theta).ravel() for p in previous]
        whole = sum(a * b for a, b in zip(c, u))
        rest = [whole - c[k] * u[k] for k in range(3)]
        cosines.append([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(u, rest)])
        novelty, need = 1 - np.mean(cosines, axis=0), 1 - np.mean(scores, axis=0)
        one, two = shares(novelty, floor), shares(need, floor)
        drawn.append(shares(one * two if times else one + two, floor))
        c = np.mean(drawn, axis=0) if averaged else drawn[-1]
        theta = sum(a * p for a, p in zip(c, previous))
        yield novelty, need, c, theta


CASES = {
    "published": ({}, {"times": False, "floor": 1e-6, "averaged": False}),
    "times": ({"mode": "times"}, {"times": True, "floor": 1e-6, "averaged": False}),
    "as released": ({"form": "as_released"}, {"times": True, "floor": 0.0, "averaged": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_four_rounds_are_those_of_the_equations(case):
    section, oracle = CASES[case]
    data = three_clients()
    ours = Federation({"name": "fedce", "learning_rate": 0.05, **section}, data, rounds=4)
    split = {n: parts_of(ours.server.engine.host.client(n), ours.settings.validation) for n in CLIENTS}
    if case == "as released":
        assert all(p.training is p.validation for p in split.values())
    else:
        assert all(0 < len(p.validation) < len(p.training) for p in split.values())
    ours.run()
    expected = numpy_rounds(theta_of(ours.initial), split, data, 4, rate=0.05, **oracle)
    for round, (novelty, need, c, theta) in enumerate(expected, start=1):
        assert ours.column("novelty", round) == pytest.approx(dict(zip(CLIENTS, novelty)), abs=1e-6)
        assert ours.column("need", round) == pytest.approx(dict(zip(CLIENTS, need)), abs=1e-9)
        assert ours.column("weight", round) == pytest.approx(dict(zip(CLIENTS, c)), abs=1e-6)
        assert close(ours.models[round - 1], theta, 1e-5)
    assert ours.column("minus_score", 1) == {}
    assert set(ours.column("minus_score", 2)) == set(CLIENTS)


def test_the_client_with_other_images_gains():
    """Three clients agree, the fourth has the labels the other way round: its coefficient rises above a quarter."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (2, 1, 4, 4), dtype=np.uint8)

    def holding(labels):
        return ArrayDataset(image, np.tile([0, 1], 6), torch.tensor(labels * 6))

    data = {**{f"c{i}": holding([0, 1]) for i in range(3)}, "odd": holding([1, 2])}
    done = Federation({"name": "fedce", "learning_rate": 0.02}, data, rounds=4).run()
    weights = [done.column("weight", t)["odd"] for t in (1, 2, 3, 4)]
    assert all(w > 0.3 for w in weights)
    assert done.column("novelty", 4)["odd"] > max(v for c, v in done.column("novelty", 4).items() if c != "odd")


def test_two_clients_have_the_same_novelty():
    data = {c: d for c, d in three_clients().items() if c != "c2"}
    done = Federation("fedce", data, network="Normed").run()
    for round in (1, 2, 3):
        one, two = done.column("novelty", round).values()
        assert one == pytest.approx(two, abs=1e-9)


def test_one_client_has_no_rest_and_one_class_is_no_trouble():
    done = Federation("fedce", {"only": three_clients()["c0"]}).run()
    assert [done.column("weight", t) for t in (1, 2, 3)] == [{"only": 1.0}] * 3
    assert all(done.column("minus_score", t) == {} for t in (1, 2, 3))
    data = {"c0": client_data([1] * 6, 1), "c1": client_data([0, 2] * 4, 2), "c2": client_data([0] * 5, 3)}
    done = Federation("fedce", data, network="Normed").run()
    assert [r["admitted"] for r in done.records] == [["c0", "c1", "c2"]] * 3
    assert all(torch.isfinite(t).all() for t in done.models[-1].values() if t.is_floating_point())


def test_clients_that_learn_nothing_weigh_the_same():
    """Without an update there is no direction: novelty 1 for all, and equal shares."""
    changes = {"optimizer": {"_target_": "torch.optim.SGD", "params": [], "lr": 0.0}}
    twins = dict.fromkeys(("a", "b", "c"), client_data([0, 1, 2] * 2, 1))
    done = Federation({"name": "fedce", "validation": 0}, twins, bundle_changes=changes, rounds=2).run()
    assert done.column("novelty", 2) == dict.fromkeys("abc", 1.0)
    assert done.column("weight", 2) == pytest.approx(dict.fromkeys("abc", 1 / 3))


def test_the_model_without_a_client_keeps_buffers_and_a_client_its_memory(tmp_path):
    done = Federation("fedce", three_clients(), network="Normed", folder=tmp_path, rounds=2).run()
    memory = done.server.engine.host.client("c1").memory
    kept = {name.removeprefix("previous/") for name in memory if name.startswith("previous/")}
    assert kept == {k for k in done.initial if not k.startswith("norm.r") and "num_batches" not in k}
    assert memory["previous_round"] == 2
    assert all((m["norm.running_var"] > 0).all() for m in done.models)


def test_a_previous_model_of_another_round_is_not_taken_out():
    """A client whose last trained model is not in the received one says nothing of the model without it."""
    done = Federation("fedce", three_clients(), rounds=2).run()
    someone = done.server.engine.host.client("c0")
    model = {k: t.clone() for k, t in done.models[-1].items()}
    request = done.settings.request(3, 3)

    def told(**values):
        return METHOD.tasks["train"](someone, Message.of({**request, **values}, model=model)).values

    someone.round = 3
    assert "minus_score" in told(coefficient=0.4, since=2)  # and now its last model is that of round 3
    assert "minus_score" not in told(coefficient=0.4, since=2)
    assert "minus_score" not in told(coefficient=None, since=3)
    assert "minus_score" not in told(coefficient=1.0, since=3)
    assert "minus_score" in told(coefficient=0.0, since=3)


@pytest.mark.parametrize("form", ["published", "as_released"])
def test_clients_come_and_go(form):
    data = {f"c{i}": client_data([0, 1, 2, 1, 0, 2], i) for i in range(5)}
    done = Federation({"name": "fedce", "form": form}, data, rounds=8, fraction=0.6, dropout=0.2).run()
    assert len({tuple(r["admitted"]) for r in done.records}) > 2
    earlier = set()
    for t, record in enumerate(done.records, start=1):
        weights = done.column("weight", t)
        assert sum(weights.values()) == pytest.approx(1.0) if weights else record["warnings"]
        assert set(done.column("minus_score", t)) <= earlier
        earlier = set(record["admitted"]) or earlier
    history = done.server.notes["contribution"].values["history"]
    assert all(sums["scored"] <= sums["rounds"] for sums in history.values())


@pytest.mark.parametrize("how", ["crash", "nan"])
def test_client_that_fails_and_nobody_left(how):
    done = Federation(faulty(METHOD, "train", how, rounds=(2,)), three_clients()).run()
    assert done.records[1]["admitted"] == ["c0", "c2"]
    assert set(done.column("minus_score", 3)) == {"c0", "c2"}
    assert set(done.column("weight", 3)) == set(CLIENTS)
    method = METHOD
    for client in CLIENTS:
        method = faulty(method, "train", how, client, rounds=(2,))
    done = Federation(method, three_clients()).run()
    assert same_state(done.models[1], done.models[0])
    # Trained models that were refused replace the kept ones, so nobody can take its part out of the old model.
    assert len(done.column("minus_score", 3)) == (3 if how == "crash" else 0)


@pytest.mark.parametrize(("killed_after", "form"), [(1, "published"), (2, "as_released")])
def test_killed_run_goes_on_bitwise(killed_after, form, tmp_path):
    workers = 2 if killed_after == 1 else 1
    killed_and_resumed({"name": "fedce", "form": form, "salt": True}, tmp_path, killed_after, workers=workers)


def test_several_labels():
    done = Federation("fedce", multilabel_clients(), bundle_changes=MULTI).run()
    assert all(0 <= s <= 1 for s in done.column("minus_score", 3).values())
    assert sum(done.column("weight", 3).values()) == pytest.approx(1.0)


def test_settings():
    _, settings = resolve_method({"name": "fedce"})
    assert (settings.mode, settings.floor, settings.averaged, settings.validation) == ("plus", 1e-6, False, 0.2)
    _, settings = resolve_method({"name": "fedce", "form": "as_released"})
    assert (settings.mode, settings.floor, settings.averaged, settings.validation) == ("times", 0.0, True, 0.0)
    assert resolve_method({"name": "fedce", "form": "as_released", "validation": 0.1})[1].validation == 0.1
    for section in ({"mode": "sum"}, {"floor": -1}, {"validation": 0.6}, {"form": "nvflare"}):
        with pytest.raises(ConfigError, match=next(iter(section))):
            resolve_method({"name": "fedce", **section})
