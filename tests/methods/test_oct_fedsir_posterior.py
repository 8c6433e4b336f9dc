"""``relabelling: posterior`` in planted federations: who sends what, what changes, and what nobody can know."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from planted import NOISY, federation, memories, planted, watch

from medfed.errors import ConfigError
from medfed.federation.messages import Message, check_plain
from medfed.methods.registry import resolve_method
from medfed.methods.spectral import describe
from medfed.reliability.evidence import normalised

PLAIN = {"name": "oct_fedsir", "relabelling": "posterior", "period": 1, "stage_one": {"epochs": 1}}
CLEAN = ("c0", "c1")


def run(world, folder, tasks=None, **changes):
    options = {name: changes.pop(name) for name in ("rounds", "classes") if name in changes}
    method, settings = resolve_method({**PLAIN, **changes})
    method = replace(method, tasks={**method.tasks, **(tasks or {})})
    done = federation(method, world.data, folder=folder, **{"rounds": 2, **options})
    done.settings = settings
    seen = watch(done)
    return done.run(), seen, memories(done, folder)


@pytest.mark.parametrize("identification", ["published", "evidence"])
@pytest.mark.parametrize("name", ["oct_fedsir", "fedsir"])
def test_labels_are_repaired(name, identification, tmp_path):
    world = planted(rate=0.5)
    done, _, kept = run(world, tmp_path, name=name, identification=identification)
    for client in NOISY:
        targets, true, observed = kept[client]["labels"].numpy(), world.true[client], world.observed(client)
        wrong = observed != true
        assert (targets[wrong] == true[wrong]).mean() > 0.95
        assert (targets[~wrong] == true[~wrong]).all()
        assert done.column("edited", 2)[client] == (targets != observed).sum()
        assert done.column("proposed", 2)[client] == (targets != observed).sum()
        assert (kept[client]["audit_posterior"].argmax(dim=1) == kept[client]["labels"]).all()
    assert not any("labels" in kept[c] for c in CLEAN)
    assert all((kept[c]["audit_proposals"][-1].numpy() == world.true[c]).all() for c in CLEAN)


def test_messages_carry_moments_and_nothing_of_single_samples(tmp_path):
    world = planted()
    done, seen, _ = run(world, tmp_path)
    described = next(replies for task, _, replies in seen if task == "describe")
    assert described.clients == CLEAN
    for reply in described:
        x = normalised(torch.from_numpy(world.features(reply.client))).numpy()
        y = world.observed(reply.client)
        means = np.stack([x[y == c].mean(axis=0) for c in range(3)])
        moments = reply.group("moments")
        assert {name: tuple(t.shape) for name, t in moments.items()} == {
            "counts": (3,),
            "means": (3, 16),
            "scatter": (16 * 17 // 2,),
        }
        assert moments["means"].numpy() == pytest.approx(means, abs=1e-5)
        check_plain(dict(reply.values))
    asked = [(request["message"], replies) for task, request, replies in seen if task == "relabel"]
    noisy, clean = asked
    assert noisy[1].clients == NOISY
    assert clean[1].clients == CLEAN
    assert all(not reply.message.tensors for _, replies in asked for reply in replies)
    # What the server sends is the sum over both clients.
    both = np.concatenate([world.observed(c) for c in CLEAN])
    assert noisy[0].group("moments")["counts"].tolist() == np.bincount(both).tolist()
    assert [n for n, note in done.server.notes.items() if note.tensors] == ["reference"]


def test_published_rule_neither_asks_for_moments_nor_keeps_a_posterior(tmp_path):
    _, seen, kept = run(planted(), tmp_path, relabelling="published")
    assert not any("moments" in r.message.groups() for _, _, replies in seen for r in replies)
    assert not any("moments" in request["message"].groups() for _, request, _ in seen)
    assert not any("audit_posterior" in memory for memory in kept.values())


def test_class_that_no_clean_client_has_keeps_its_labels(tmp_path):
    counts = {"c0": (14, 14, 0), "c1": (15, 13, 0), **{f"c{k}": (12, 12, 12) for k in range(2, 6)}}
    world = planted(counts, noisy=NOISY, rate=0.4)
    _, _, kept = run(world, tmp_path)
    for client in NOISY:
        observed, labels = world.observed(client), kept[client]["labels"].numpy()
        assert ((labels == 2) == (observed == 2)).all()
        known = (observed != 2) & (world.true[client] != 2)
        assert (labels[known] == world.true[client][known]).mean() > 0.9


def test_client_with_one_class_is_corrected_only_where_asked(tmp_path):
    counts = {f"c{k}": (12, 12, 12) for k in range(6)} | {"c6": (0, 14, 0)}
    world = planted(counts, noisy=NOISY)
    _, _, kept = run(world, tmp_path / "a")
    assert "labels" not in kept["c6"]
    assert "audit_posterior" in kept["c6"]
    _, _, kept = run(world, tmp_path / "b", correct_undetermined=True)
    assert (kept["c6"]["labels"].numpy() == world.true["c6"]).all()


def test_two_classes(tmp_path):
    world = planted({f"c{k}": (16 + k, 18 - k) for k in range(6)}, noisy=NOISY, rate=0.4)
    _, _, kept = run(world, tmp_path, classes=("a", "b"))
    assert all((kept[c]["labels"].numpy() == world.true[c]).all() for c in NOISY)


def test_nobody_clean_changes_nothing(tmp_path):
    counts = {f"c{k}": tuple(10 + k if c == k % 3 else 0 for c in range(3)) for k in range(4)}
    done, seen, kept = run(planted(counts, noisy=()), tmp_path)
    assert "describe" not in [task for task, _, _ in seen]
    assert any("no client is judged clean" in w for r in done.records for w in r["warnings"])
    assert not any("labels" in memory for memory in kept.values())


@pytest.mark.parametrize(
    "fault",
    [
        {"moments/counts": torch.ones(7)},
        {"moments/means": torch.full((3, 16), torch.nan)},
        {"moments/means": torch.ones(3, 2)},
    ],
)
def test_moments_that_do_not_fit_leave_their_client_out(fault, tmp_path):
    def odd(client, message):
        reply = describe(client, message)
        return Message({**reply.tensors, **fault}, reply.values) if client.name == "c0" else reply

    counts = {f"c{k}": (12 + k, 15 - k, 10) for k in range(6)}
    world = planted(counts)
    done, _, kept = run(world, tmp_path, {"describe": odd}, rounds=2)
    record = done.records[1]
    said = [*record["warnings"], *(f"{r['client']}: {r['reason']}" for r in record["refused"])]
    assert any(w.startswith("c0") for w in said), said
    assert (kept["c3"]["labels"].numpy() == world.true["c3"]).all()


def test_nobody_sends_moments(tmp_path):
    def silent(client, message):
        reply = describe(client, message)
        kept = {k: t for k, t in reply.tensors.items() if not k.startswith("moments/")}
        return Message(kept, reply.values)

    done, _, kept = run(planted(), tmp_path, {"describe": silent})
    assert any("no clean client has sent moments" in w for w in done.records[1]["warnings"])
    assert not any("labels" in memory for memory in kept.values())


def test_unsure_samples_keep_their_labels(tmp_path):
    world = planted()
    _, _, kept = run(world, tmp_path, confidence=1.0)
    for client in NOISY:
        sure = kept[client]["audit_posterior"].max(dim=1).values >= 1
        assert ((kept[client]["audit_proposals"][-1] >= 0) <= sure).all()
        changed = kept[client]["labels"].numpy() != world.observed(client)
        assert (changed <= sure.numpy()).all()


@pytest.mark.parametrize(("changes", "idle"), [({}, "confidence"), ({"relabelling": "posterior"}, "keep_unknown")])
def test_settings_of_the_other_rule_are_idle(changes, idle):
    value = 0.5 if idle == "confidence" else True
    _, settings = resolve_method({"name": "oct_fedsir", **changes, idle: value})
    assert any(f"method.{idle}" in line for line in settings.check(21))
    _, settings = resolve_method({"name": "oct_fedsir", **changes})
    assert settings.check(21) == []


def test_unknown_rule_is_refused():
    with pytest.raises(ConfigError, match="relabelling"):
        resolve_method({"name": "oct_fedsir", "relabelling": "guess"})
