"""OCT-FedSIR on planted federations, where noisy clients, corrupted labels and every number are known exactly."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from planted import NOISY, Planted, federation, memories, planted, watch
from tiny_federation import distance

from medfed.federation.state import same_state
from medfed.methods import oct_fedsir
from medfed.methods.registry import resolve_method

PERIOD, ROUNDS = 2, 5
CLEAN = ("c0", "c1")
PLAIN = {"name": "oct_fedsir", "period": PERIOD, "balanced": False, "stage_one": {"epochs": 1}}


def settings(**changes):
    return {**PLAIN, **changes}


@pytest.fixture(scope="module")
def world() -> Planted:
    return planted()


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    done = federation(settings(), world.data, folder=folder, rounds=ROUNDS)
    seen = watch(done)
    return done.run(), seen, memories(done, folder)


# An independent calculation, with dense matrices and LAPACK's decomposition.


def leading(rows: np.ndarray) -> np.ndarray:
    v = np.linalg.svd(rows, full_matrices=False)[2][0]
    return v if (rows @ v).mean() >= 0 else -v


def cosines(features: np.ndarray, labels: np.ndarray) -> list[float]:
    v = {c: leading(features[labels == c]) for c in np.unique(labels)}
    return [float(v[a] @ v[b]) for a in v for b in v if a != b]


def reference(features: np.ndarray, kappa: float = 10.0, residual: int = 12) -> tuple[np.ndarray, np.ndarray]:
    _, s, vt = np.linalg.svd(features, full_matrices=False)
    q = next(q for q in range(1, len(s) + 1) if s[:q].sum() >= kappa * s[q:].sum())
    return vt[0], vt[q : q + residual].T


def proposals(world: Planted, client: str, clean: tuple[str, ...] = CLEAN, classes: int = 3) -> np.ndarray:
    """Eqs. 16 to 26 with d x d projectors."""
    z = world.features(client)
    aligned, avoided = np.empty((len(z), classes)), np.empty((len(z), classes))
    for c in range(classes):
        main, rest, total = 0.0, 0.0, 0
        for name in clean:
            rows = world.features(name)[world.observed(name) == c]
            v, V = reference(rows)
            main, rest, total = main + len(rows) * np.outer(v, v), rest + len(rows) * V @ V.T, total + len(rows)
        aligned[:, c] = np.abs(z @ np.linalg.eigh(main / total)[1][:, -1])
        avoided[:, c] = np.linalg.norm(z @ np.linalg.eigh(rest / total)[1][:, -12:], axis=1) / np.sqrt(12)
    first, second = aligned.argmax(1), avoided.argmin(1)
    return np.where(first == second, first, -1)


def models(replies) -> dict[str, np.ndarray]:
    """Every client's model of a round as one vector."""
    return {
        c: np.concatenate([t.double().numpy().ravel() for _, t in sorted(s.items())])
        for c, s in replies.states("model").items()
    }


def vector(state) -> np.ndarray:
    return np.concatenate([t.double().numpy().ravel() for _, t in sorted(state.items())])


# The numbers.


def test_descriptors_are_those_of_an_independent_calculation(world, whole):
    done, _, kept = whole
    for client in world.data:
        expected = np.array(cosines(world.features(client), world.observed(client)))
        record = done.records[0]["clients"][client]
        assert record["observed_classes"] == 3
        assert record["descriptor_mean"] == pytest.approx(expected.mean(), abs=1e-6)
        assert record["descriptor_energy"] == pytest.approx((expected**2).mean(), abs=1e-6)
        assert record["descriptor_max"] == pytest.approx(expected.max(), abs=1e-6)
        matrix = kept[client]["similarity"].numpy()
        assert matrix[~np.eye(3, dtype=bool)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("identification", ["published", "evidence"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_noisy_clients_are_found_and_their_labels_repaired(identification, seed, tmp_path):
    world = planted(seed=seed)
    name = {"name": "oct_fedsir", "identification": identification, "period": 1}
    done = federation(name, world.data, folder=tmp_path, rounds=2).run()
    status = done.column("status", 1)
    assert {c for c, s in status.items() if s == "noisy"} == set(NOISY)
    assert {c for c, s in status.items() if s == "clean"} == set(CLEAN)
    assert done.records[0]["server"]["clean_clients"] == 2
    assert all((p > 0.5) == (status[c] == "clean") for c, p in done.column("p_clean", 1).items())
    kept = memories(done, tmp_path)
    for client in NOISY:
        targets, true, observed = kept[client]["labels"].numpy(), world.true[client], world.observed(client)
        wrong = observed != true
        assert wrong.sum() >= 12
        assert (targets[wrong] == true[wrong]).mean() > 0.95
        assert not (targets[~wrong] != true[~wrong]).any()
        assert done.column("edited", 2)[client] == (targets != observed).sum()
    assert not any("labels" in kept[c] for c in CLEAN)


def test_proposals_and_targets_are_those_of_an_independent_calculation(world, whole):
    _, _, kept = whole
    for client in world.data:
        expected = proposals(world, client)
        assert (kept[client]["audit_proposals"].numpy() == expected).all()
        assert kept[client]["audit_rounds"] == [3, 5]
        if client in NOISY:
            targets = np.where(expected >= 0, expected, world.observed(client))
            assert (kept[client]["labels"].numpy() == targets).all()
    # One column more than the descriptors: two criteria for every class, and the leave-one-out evidence.
    assert kept["c0"]["audit_representative"].shape == kept["c0"]["audit_residual"].shape == (37, 3)
    assert kept["c0"]["audit_loo_label"].shape == kept["c0"]["audit_loo_margin"].shape == (37,)


def test_global_and_reference_model_are_those_of_an_independent_calculation(world, whole):
    done, seen, _ = whole
    rounds = [r for task, _, r in seen if task == "train"]
    assert len(rounds) == ROUNDS
    n = {c: len(d) for c, d in world.data.items()}
    for t, replies in enumerate(rounds):
        theta = models(replies)
        d = {}
        for c, state in replies.states("model").items():
            others = [replies.states("model")[j] for j in CLEAN]
            d[c] = min(sum(np.linalg.norm((state[k] - o[k]).numpy()) for k in state) for o in others)
        assert d["c0"] == d["c1"] == 0
        raw = {c: n[c] * np.exp(-d[c] / max(d.values())) for c in n}
        weights = {c: w / sum(raw.values()) for c, w in raw.items()}
        assert done.column("weight", t + 1) == pytest.approx(weights)
        assert vector(done.models[t]) == pytest.approx(sum(weights[c] * theta[c] for c in n))
    clean = sum(n[c] * theta[c] for c in CLEAN) / sum(n[c] for c in CLEAN)
    assert vector(done.server.notes["reference"].group("model")) == pytest.approx(clean)


def test_training_begins_from_the_mean_of_the_clean_models_of_stage_one(world):
    done = federation(settings(), world.data, rounds=1)
    seen = watch(done)
    done.run()
    assert [task for task, _, _ in seen] == ["identify", "stage_one", "train"]
    _, request, replies = seen[1]
    assert replies.clients == CLEAN
    assert request["message"].tensors == {}
    begun = seen[2][1]["message"].group("model")
    assert distance(begun, done.initial) > 1e-4
    # What Stage I does alone: the same training with the same seeds, without a federation around it.
    apart = federation(settings(start="initial"), world.data, rounds=1)
    watched = watch(apart)
    apart.run()
    assert [task for task, _, _ in watched] == ["identify", "train"]
    assert same_state(watched[1][1]["message"].group("model"), apart.initial)


def test_evidence_asks_clean_clients_alone_to_train_before_the_rounds(world, tmp_path):
    done = federation(settings(identification="evidence"), world.data, folder=tmp_path, rounds=1)
    seen = watch(done)
    done.run()
    published = federation(settings(), world.data, rounds=1)
    other = watch(published)
    published.run()
    # Trained in a later request, yet the same models: randomness knows the purpose, not the order of requests.
    assert same_state(seen[1][2].mean["model"], other[1][2].mean["model"])
    assert seen[1][2].clients == CLEAN
    first = seen[0][2]
    assert not any("model" in r.message.groups() for r in first)
    assert not any("descriptor_mean" in r.values for r in first)
    assert "audit_loo_margin" in memories(done, tmp_path)["c3"]


# What moves.


def test_messages_carry_what_the_paper_sends(world, whole):
    done, seen, _ = whole
    tasks = [task for task, _, _ in seen]
    assert tasks == [
        *("identify", "stage_one", "train", "train"),
        *("describe", "relabel", "relabel", "train", "train"),
        *("describe", "relabel", "relabel", "train"),
    ]
    model = sum(t.numel() * t.element_size() for t in done.initial.values())
    described = seen[0][2]
    assert all(not r.message.tensors for r in described)
    told = {"samples", "observed_classes", "descriptor_mean", "descriptor_energy", "descriptor_max"}
    assert all(set(r.values) == told for r in described)
    parts = seen[4][2]
    assert parts.clients == CLEAN
    for reply in parts:
        assert {len(t) for t in reply.message.tensors.values()} == {16}
        assert len(reply.message.tensors) == 6
        # d floats and at most 12 d floats a class.
        assert reply.message.nbytes() <= 3 * 13 * 16 * 4
        counts = np.bincount(world.observed(reply.client), minlength=3)
        assert reply.values["counts"] == {str(c): n for c, n in enumerate(counts)}
    assert seen[5][2].clients == NOISY
    assert all(not r.message.tensors for r in seen[5][2])
    # Clean clients hold their features already and are sent the common references alone.
    assert seen[6][2].clients == CLEAN
    assert set(seen[6][1]["message"].groups()) == {"consensus"}
    assert all(set(r.values) == {"samples"} for r in seen[6][2])
    assert done.records[1]["bytes"] == {"down": 6 * model, "up": 6 * model}
    up = sum(r.message.nbytes() for r in parts)
    assert done.records[2]["bytes"]["up"] == 6 * model + up
    plain = json.dumps([dict(note.values) for note in done.server.notes.values()])
    assert "labels" not in plain
    assert json.dumps(done.records)


def test_server_keeps_two_models_and_clients_no_features(world, whole):
    done, _, kept = whole
    with_tensors = [name for name, note in done.server.notes.items() if note.tensors]
    assert with_tensors == ["reference"]
    assert not any(k.startswith("stage_one/") or k == "features" for memory in kept.values() for k in memory)


# Switches.


@pytest.mark.parametrize(
    ("changes", "tasks"),
    [
        ({"relabel": False}, {"identify", "stage_one", "train"}),
        ({"audit": "noisy"}, {"identify", "stage_one", "describe", "relabel", "train"}),
        ({"start": "initial"}, {"identify", "describe", "relabel", "train"}),
        ({"identification": "evidence", "relabel": False}, {"identify", "stage_one", "review", "train"}),
    ],
)
def test_a_switch_leaves_its_requests_out(world, tmp_path, changes, tasks):
    done = federation(settings(**changes), world.data, folder=tmp_path, rounds=3)
    seen = watch(done)
    done.run()
    assert {task for task, _, _ in seen} == tasks
    kept = memories(done, tmp_path)
    assert ("labels" in kept["c3"]) is ("relabel" in tasks)
    assert ("audit_proposals" in kept["c0"]) is ("relabel" in tasks and changes.get("audit") != "noisy")


@pytest.mark.parametrize(
    ("changes", "weight"),
    [
        ({}, 2 / 6),
        ({"teacher_weight": 0.7}, 0.7),
        ({"distillation": False}, 0.0),
        ({"distillation": False, "teacher_weight": 0.7}, 0.0),
    ],
)
def test_weight_of_the_teacher(world, changes, weight):
    done = federation(settings(**changes), world.data, rounds=1)
    seen = watch(done)
    done.run()
    assert seen[-1][1]["message"].values["weight"] == pytest.approx(weight)
    assert done.records[0]["server"]["teacher_weight"] == pytest.approx(weight)
    assert seen[-1][1]["each"]["c0"] == {"status": "clean"}
    assert seen[-1][1]["each"]["c4"] == {"status": "noisy"}


def test_without_daagg_weights_are_sample_counts_and_the_reference_is_the_same(world):
    aware, plain = (federation(settings(daagg=daagg), world.data, rounds=1) for daagg in (True, False))
    aware.run(), plain.run()
    n = {c: len(d) for c, d in world.data.items()}
    assert plain.column("weight", 1) == pytest.approx({c: k / sum(n.values()) for c, k in n.items()})
    assert plain.column("distance", 1) == {}
    references = [f.server.notes["reference"].group("model") for f in (aware, plain)]
    assert distance(*references) < 1e-12
    assert distance(aware.models[0], plain.models[0]) > 1e-6


def test_balancing_leaves_planted_directions_nearly_where_they_were(world):
    unbalanced, even = (federation(settings(balanced=b), world.data, rounds=1).run() for b in (False, True))
    for c, mean in unbalanced.column("descriptor_mean", 1).items():
        assert even.column("descriptor_mean", 1)[c] == pytest.approx(mean, abs=0.05)
    assert unbalanced.column("descriptor_mean", 1) != even.column("descriptor_mean", 1)


def test_maximum_is_sent_only_where_it_is_used(world):
    done = federation(settings(maximum=False), world.data, rounds=1).run()
    assert done.column("descriptor_max", 1) == {}
    assert done.records[0]["server"]["clean_clients"] == 2


def test_targets_can_be_changed_from_the_current_ones(world, tmp_path):
    """With references that agree on nothing at the second checkpoint, the targets of the first stay or go."""
    kept = {}
    for base in ("observed", "current"):

        def silent(client, message):
            if client.round == 5:
                blank = {k: torch.zeros_like(t) for k, t in message.tensors.items() if "residual" in k}
                message = replace(message, tensors={**message.tensors, **blank})
            return oct_fedsir.relabel(client, message)

        method, chosen = resolve_method(settings(relabel_from=base))
        method = replace(method, tasks={**method.tasks, "relabel": silent})
        done = federation(method, world.data, folder=tmp_path / base, rounds=ROUNDS)
        done.settings = chosen
        kept[base] = memories(done.run(), tmp_path / base)
    assert (kept["observed"]["c3"]["audit_proposals"][1] == -1).all()
    assert (kept["observed"]["c3"]["labels"].numpy() == world.observed("c3")).all()
    assert (kept["current"]["c3"]["labels"].numpy() == world.true["c3"]).all()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"period": 0}, "period"),
        ({"identification": "guess"}, "identification"),
        ({"teacher_weight": 1.5}, "teacher_weight"),
        ({"temperature": 0}, "temperature"),
        ({"stage_one": {"epochs": 0}}, "epochs"),
        ({"stage_one": {"lr": 1}}, "lr"),
        ({"kapa": 10}, "kappa"),
        ({"start": "mean"}, "start"),
    ],
)
def test_what_is_wrong_is_named(changes, told):
    from medfed.errors import ConfigError

    with pytest.raises(ConfigError, match=told):
        resolve_method({"name": "oct_fedsir", **changes})


def test_defaults_of_what_the_paper_omits():
    _, s = resolve_method({"name": "oct_fedsir"})
    assert s.stage_one.model_dump() == {
        "epochs": 5,
        "learning_rate": 5e-5,
        "weight_decay": 5e-2,
        "logit_adjustment": None,
    }
    assert (s.period, s.temperature, s.start, s.kappa, s.residual) == (20, 0.8, "clean", 10, 12)
    assert [r for r in range(1, 101) if s.due(r)] == [21, 41, 61, 81]
