"""What the paper does not speak of: absent classes, absent clients, nobody clean, nobody noisy, strange replies."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from planted import NOISY, federation, memories, planted, watch
from tiny_federation import distance

from medfed.federation.messages import Message
from medfed.methods import stage_one
from medfed.methods.registry import resolve_method
from medfed.reliability.identification import Verdict

PLAIN = {"name": "oct_fedsir", "period": 1, "stage_one": {"epochs": 1}}
METHODS = [{**PLAIN}, {**PLAIN, "identification": "evidence"}, {**PLAIN, "name": "fedsir"}]


def altered(section, **tasks):
    """The method of a section with other client tasks, and its settings."""
    method, settings = resolve_method(section)
    return replace(method, tasks={**method.tasks, **tasks}), settings


def run(section, data, tasks=None, **options):
    method, settings = altered(section, **(tasks or {}))
    done = federation(method, data, **options)
    done.settings = settings
    return done, watch(done)


def everywhere(records):
    return [w for r in records for w in r["warnings"]]


@pytest.mark.parametrize("section", [METHODS[0], METHODS[2]], ids=lambda s: s["name"])
def test_client_with_one_class_is_undetermined_and_disturbs_nobody(section, tmp_path):
    counts = {f"c{k}": (12, 12, 12) for k in range(6)} | {"c6": (0, 14, 0)}
    world = planted(counts, noisy=NOISY)
    done, _ = run(section, world.data, folder=tmp_path, rounds=2)
    done.run()
    status = done.column("status", 1)
    assert status.pop("c6") == "undetermined"
    assert {c for c, s in status.items() if s == "noisy"} == set(NOISY)
    assert done.records[0]["server"]["undetermined_clients"] == 1
    assert done.column("p_clean", 1)["c6"] is None
    kept = memories(done, tmp_path)
    # Its labels are not touched, though it gets proposals for its own list; asked to, they are corrected as well.
    assert "labels" not in kept["c6"]
    assert "audit_proposals" in kept["c6"]
    assert "edited" not in done.records[1]["clients"]["c6"]
    again, _ = run({**section, "correct_undetermined": True}, world.data, folder=tmp_path / "b", rounds=2)
    again.run()
    assert (memories(again, tmp_path / "b")["c6"]["labels"].numpy() == world.true["c6"]).all()
    assert json.dumps(done.records)


def test_evidence_accuses_no_client_with_one_class():
    counts = {f"c{k}": (12, 12, 12) for k in range(6)} | {"c6": (0, 14, 0)}
    done, _ = run(METHODS[1], planted(counts, noisy=NOISY).data, rounds=1)
    assert done.run().column("status", 1)["c6"] in ("clean", "undetermined")


@pytest.mark.parametrize("keep", [False, True])
def test_class_that_no_clean_client_has_is_never_proposed(keep, tmp_path):
    counts = {"c0": (14, 14, 0), "c1": (15, 13, 0), **{f"c{k}": (12, 12, 12) for k in range(2, 6)}}
    world = planted(counts, noisy=NOISY, rate=0.4)
    done, _ = run({**PLAIN, "keep_unknown": keep}, world.data, folder=tmp_path, rounds=2)
    done.run()
    assert {c for c, s in done.column("status", 1).items() if s == "clean"} == {"c0", "c1"}
    assert done.records[1]["server"]["referenced_classes"] == 2
    for client in NOISY:
        memory = memories(done, tmp_path)[client]
        observed, labels = world.observed(client), memory["labels"].numpy()
        assert not (memory["audit_proposals"].numpy() == 2).any()
        assert not ((labels == 2) & (observed != 2)).any()
        assert torch.isnan(memory["audit_representative"][:, 2]).all()
        if keep:
            assert (labels[observed == 2] == 2).all()
        else:
            assert (labels[observed == 2] != 2).any()


def test_class_with_too_few_samples_for_a_residual_basis_receives_nothing(tmp_path):
    counts = {"c0": (14, 14, 1), "c1": (15, 13, 1), **{f"c{k}": (12, 12, 12) for k in range(2, 6)}}
    world = planted(counts, noisy=NOISY)
    done, seen = run({**PLAIN, "kappa": 1.0}, world.data, folder=tmp_path, rounds=2)
    # One sample: its direction is the whole spectrum.
    done.run()
    parts = next(r for task, _, r in seen if task == "describe")
    assert all("2/direction" in r.group("references") for r in parts)
    assert not any("2/residual" in r.group("references") for r in parts)
    for client in NOISY:
        assert not (memories(done, tmp_path)[client]["audit_proposals"].numpy() == 2).any()
    assert done.column("edited", 2)["c2"] > 0


@pytest.mark.parametrize("section", METHODS, ids=lambda s: s.get("identification", s["name"]))
def test_two_classes(section, tmp_path):
    counts = {f"c{k}": (16 + k, 18 - k) for k in range(6)}
    world = planted(counts, noisy=NOISY, rate=0.4)
    done, _ = run(section, world.data, folder=tmp_path, rounds=2, classes=("a", "b"))
    done.run()
    assert {c for c, s in done.column("status", 1).items() if s == "noisy"} == set(NOISY)
    for client in NOISY:
        assert (memories(done, tmp_path)[client]["labels"].numpy() == world.true[client]).all()


def test_nobody_clean_goes_on_as_federated_averaging_with_a_warning(tmp_path):
    """Every client has one class: nothing can be judged, nothing is repaired."""
    counts = {f"c{k}": tuple(10 + k if c == k % 3 else 0 for c in range(3)) for k in range(4)}
    world = planted(counts, noisy=())
    done, seen = run(PLAIN, world.data, folder=tmp_path, rounds=3)
    done.run()
    assert [task for task, _, _ in seen] == ["identify", "train", "train", "train"]
    assert all(r["server"]["teacher_weight"] == 0 for r in done.records)
    n = {c: len(d) for c, d in world.data.items()}
    assert done.column("weight", 3) == pytest.approx({c: k / sum(n.values()) for c, k in n.items()})
    assert any("no client is judged clean" in w for w in done.records[0]["warnings"])
    assert any("no label is changed" in w for w in done.records[1]["warnings"])
    assert not any("labels" in m for m in memories(done, tmp_path).values())
    assert "reference" not in done.server.notes


def test_nobody_clean_is_federated_averaging_to_the_last_digits():
    """With the floor that FedAvg has for classes that a client lacks, instead of a least count of 1."""
    counts = {f"c{k}": tuple(10 + k if c == k % 3 else 0 for c in range(3)) for k in range(4)}
    world = planted(counts, noisy=())
    done, _ = run({**PLAIN, "least_count": 0}, world.data, rounds=2)
    average = federation("fedavg", world.data, rounds=2).run()
    assert distance(done.run().models[-1], average.models[-1]) < 1e-12


def test_nobody_noisy(tmp_path):
    """Identical clients are all clean: the rounds are federated averaging, and nothing is relabelled."""
    one = planted({"c0": (8, 9, 10)}, noisy=()).data["c0"]
    done, _ = run(
        {**PLAIN, "start": "initial", "balanced": False}, {f"c{k}": one for k in range(3)}, folder=tmp_path, rounds=2
    )
    done.run()
    assert set(done.column("status", 1).values()) == {"clean"}
    average = federation("fedavg", {f"c{k}": one for k in range(3)}, rounds=2).run()
    assert distance(done.models[-1], average.models[-1]) < 1e-12
    assert done.records[1]["server"]["relabelled"]
    assert done.column("edited", 2) == {}
    assert all(m["audit_proposals"].shape == (1, 27) for m in memories(done, tmp_path).values())


def test_models_that_do_not_differ_have_no_distance():
    """A learning rate so small that every model is the received one to the last bit of what matters."""
    world = planted()
    done, _ = run({**PLAIN, "learning_rate": 1e-300}, world.data, rounds=1)
    done.run()
    n = {c: len(d) for c, d in world.data.items()}
    assert set(done.column("distance", 1).values()) == {0.0}
    assert done.column("weight", 1) == pytest.approx({c: k / sum(n.values()) for c, k in n.items()})


@pytest.mark.parametrize("identification", ["published", "evidence"])
def test_client_that_was_silent_is_judged_at_the_next_checkpoint(identification, tmp_path):
    def shy(client, message):
        if client.name in ("c1", "c4") and client.round == 0:
            raise RuntimeError("asleep")
        return stage_one.identify(client, message)

    world = planted()
    section = {**PLAIN, "identification": identification}
    done, seen = run(section, world.data, {"identify": shy}, folder=tmp_path, rounds=3)
    done.run()
    first, second = done.column("status", 1), done.column("status", 2)
    assert (first["c1"], first["c4"], first["c0"]) == ("undetermined", "undetermined", "clean")
    assert (second["c1"], second["c4"], second["c0"]) == ("clean", "noisy", "clean")
    assert {c for c, s in second.items() if s == "noisy"} == set(NOISY)
    assert done.server.notes["verdict"].values["status"] == second
    assert done.server.notes["verdict"].values["round"] == (3 if identification == "evidence" else 2)
    assert (memories(done, tmp_path)["c4"]["labels"].numpy() == world.true["c4"]).all()
    assert done.server.notes["reference"].values["samples"].keys() == {"c0", "c1"}
    assert "initial" not in done.server.notes
    if identification == "published":
        assert [sorted(r.clients) for task, _, r in seen if task == "identify"] == [
            ["c0", "c2", "c3", "c5"],
            ["c1", "c4"],
        ]


@pytest.mark.parametrize("later", ["clean", "undetermined"])
def test_verdict_that_is_revised_gives_the_client_its_labels_back(later, tmp_path, monkeypatch):
    """A client is judged noisy at first and otherwise at the second checkpoint: its targets are as observed again."""
    from medfed.reliability import verdicts

    world, calls = planted(), []

    def judge(evidence, previous):
        calls.append(dict(previous or {}))
        status = {c: "noisy" if c in NOISY else "clean" for c in evidence}
        status["c1"] = "noisy" if len(calls) < 3 else later
        return Verdict(status, dict.fromkeys(status, 0.5)), {"calls": len(calls), "shares": {}}

    monkeypatch.setattr(verdicts, "judge", judge)
    section = {**PLAIN, "identification": "evidence"}
    kept = {}
    for rounds in (2, 3):
        done, _ = run(section, world.data, folder=tmp_path, rounds=rounds)
        done.run()
        kept[rounds] = memories(done, tmp_path)["c1"]
    # The run that went on after two rounds: identification and first checkpoint, then the second one.
    assert calls == [{}, {"calls": 1, "shares": {}}, {"calls": 2, "shares": {}}]
    assert done.records[-1]["clients"]["c1"]["status"] == later
    assert done.server.notes["verdict"].values["status"]["c1"] == later
    assert "labels" in kept[2]
    assert "labels" not in kept[3]
    # A client that is not clean any more has no share in the reference; one that has become clean has.
    assert set(done.server.notes["reference"].values["samples"]) == ({"c0", "c1"} if later == "clean" else {"c0"})


@pytest.mark.parametrize("absent", [("c0",), ("c0", "c2", "c4"), tuple(f"c{k}" for k in range(6))], ids=len)
def test_who_sends_no_evidence_at_a_checkpoint_keeps_its_verdict(absent):
    """With half of the clients away all verdicts stay: two noisy clients alone would look alike, and so clean."""

    def shy(client, message):
        if client.name in absent and client.round == 2:
            raise RuntimeError("asleep")
        return stage_one.review(client, message)

    section = {**PLAIN, "identification": "evidence"}
    done, seen = run(section, planted().data, {"review": shy}, rounds=3)
    done.run()
    right = {f"c{k}": "noisy" if f"c{k}" in NOISY else "clean" for k in range(6)}
    verdict = done.server.notes["verdict"].values
    assert verdict["status"] == right
    kept = [w for r in done.records for w in r["warnings"] if "the verdict stays" in w]
    assert len(kept) == (0 if len(absent) < 3 else 1)
    assert done.server.notes["evidence"].values["shares"].keys() == right.keys()
    told = done.records[1]["clients"]
    assert "status" not in told.get("c0", {}) if len(absent) >= 3 else told["c0"]["status"] == "clean"
    assert [len(r.clients) for task, _, r in seen if task == "review"] == [6 - len(absent), 6]


def test_clean_client_that_is_absent_keeps_its_share_in_the_reference():
    world = planted({f"c{k}": (12 + k, 15 - k, 10 + 2 * k) for k in range(6)})

    def shy(client, message):
        if client.name == "c1" and client.round == 2:
            raise RuntimeError("asleep")
        return train(client, message)

    from medfed.methods.oct_fedsir import train

    done, seen = run({**PLAIN, "relabel": False}, world.data, {"train": shy}, rounds=2)
    done.run()
    first, second = (r.states("model") for task, _, r in seen if task == "train")
    n0, n1 = len(world.data["c0"]), len(world.data["c1"])
    before = {k: (n0 * first["c0"][k] + n1 * first["c1"][k]) / (n0 + n1) for k in first["c0"]}
    expected = {k: (n0 * second["c0"][k] + n1 * before[k]) / (n0 + n1) for k in before}
    assert "c1" not in second
    assert distance(done.server.notes["reference"].group("model"), expected) < 1e-12


@pytest.mark.parametrize(("fraction", "dropout"), [(0.5, 0.0), (1.0, 0.4)])
def test_partial_participation_and_dropouts(fraction, dropout, tmp_path):
    world = planted()
    done, _ = run(PLAIN, world.data, folder=tmp_path, rounds=5, fraction=fraction, dropout=dropout, seed=3)
    done.run()
    assert len(done.records) == 5
    assert {c for c, s in done.server.notes["verdict"].values["status"].items() if s == "noisy"} <= set(NOISY)
    assert all(np.isfinite(t.numpy()).all() for t in done.models[-1].values())
    for record in done.records:
        weights = [v["weight"] for v in record["clients"].values() if "weight" in v]
        assert not weights or sum(weights) == pytest.approx(1)


@pytest.mark.parametrize(
    "fault",
    [
        {"references/0/direction": torch.ones(7)},
        {"references/0/direction": torch.ones(16, 2)},
        {"references/9/direction": torch.ones(16), "references/9/residual": torch.ones(16, 1)},
        {"references/x/direction": torch.ones(16)},
        {"references/0/residual": torch.ones(3, 3)},
    ],
)
def test_references_that_do_not_fit_leave_their_client_out(fault, tmp_path):
    from medfed.methods.spectral import describe

    def odd(client, message):
        reply = describe(client, message)
        if client.name != "c0":
            return reply
        counts = {**reply.values["counts"], **{n.split("/")[1]: 5 for n in fault}}
        return Message({**reply.tensors, **fault}, {**reply.values, "counts": counts})

    world = planted()
    done, _ = run(PLAIN, world.data, {"describe": odd}, folder=tmp_path, rounds=2)
    done.run()
    assert any(w.startswith("c0: class references") for w in done.records[1]["warnings"])
    assert (memories(done, tmp_path)["c3"]["labels"].numpy() == world.true["c3"]).all()


def test_checkpoint_without_references_changes_nothing(tmp_path):
    def broken(client, message):
        raise RuntimeError("no memory left")

    done, _ = run(PLAIN, planted().data, {"describe": broken}, folder=tmp_path, rounds=2)
    done.run()
    assert any("no label is changed" in w for w in done.records[1]["warnings"])
    assert not done.records[1]["server"]["relabelled"]
    assert not any("labels" in m for m in memories(done, tmp_path).values())


def test_several_labels_an_image_are_refused():
    assert resolve_method(PLAIN)[0].task_kinds == ("multiclass",)
