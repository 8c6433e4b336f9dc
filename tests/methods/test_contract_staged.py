"""OCT-FedSIR's shape on real OCT images, against the contract as it is: stages, kill and resume, worker processes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import staged
import torch
from tiny_federation import Federation

from medfed.data.arrays import ArrayDataset
from medfed.federation.memory import ClientMemory
from medfed.federation.state import load_state, same_state, save_state

ROUNDS = 5
PER_CLASS = 6
CHANGES = {
    "classes": ["CNV", "DME", "DRUSEN", "NORMAL"],
    "image_size": [24, 24],
    "batch_size": 8,
    "augment::flip": 0.5,
    "network_def": {
        "_target_": "medfed.training.networks.build_network",
        "name": "ResNet",
        "num_classes": 4,
        "in_channels": 1,
        "block": "basic",
        "layers": [1, 1, 1, 1],
        "block_inplanes": [4, 4, 8, 8],
        "conv1_t_size": 3,
    },
}


@pytest.fixture(scope="module")
def clients(shared):
    """Five clients of real B-scans, the last three with labels turned one class on for most of their images."""
    from medfed.data.decode import decode

    roots = sorted((shared / "data").rglob("CNV"))
    if not roots:
        pytest.skip("no OCT images in folders of classes are here")
    generator = np.random.default_rng(0)
    images, labels = [], []
    for c, name in enumerate(CHANGES["classes"]):
        files = sorted(p for p in (roots[0].parent / name).rglob("*") if p.suffix in (".jpeg", ".jpg", ".png"))
        for file in files[: 5 * PER_CLASS]:
            pixels = torch.from_numpy(np.array(decode(file).pixels))[None, :1]
            images.append(torch.nn.functional.interpolate(pixels, (24, 24), mode="area")[0].byte().numpy())
            labels.append(c)
    images, labels = np.stack(images), np.array(labels)
    data = {}
    for k in range(5):
        rows = np.arange(k, len(labels), 5)
        given = labels[rows].copy()
        if k > 1:
            turned = generator.random(len(rows)) < 0.7
            given[turned] = (given[turned] + 1) % 4
        data[f"hospital_{k}"] = ArrayDataset(images, rows, torch.from_numpy(given))
    return data


def federation(clients, folder=None, **options):
    return Federation(staged.METHOD, clients, folder=folder, rounds=ROUNDS, bundle_changes=CHANGES, **options)


@pytest.fixture(scope="module")
def whole(clients, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return federation(clients, folder).run(), folder


def test_record_tells_of_every_stage(whole):
    done, _ = whole
    assert [r["round"] for r in done.records] == [1, 2, 3, 4, 5]
    assert all(r["refused"] == [] and len(r["admitted"]) == 5 for r in done.records)
    first, second = done.records[:2]
    statuses = {v["status"] for v in first["clients"].values()}
    assert statuses == {"clean", "noisy"}
    assert all("similarity" in v and "loss" in v for v in first["clients"].values())
    noisy = {c for c, v in first["clients"].items() if v["status"] == "noisy"}
    assert set(done.column("edited", 2)) == set(done.column("edited", 4)) == noisy
    assert done.column("edited", 3) == {}
    assert {c for c, told in done.column("relabelled", 3).items() if told} == noisy
    model = sum(t.numel() * t.element_size() for t in done.initial.values())
    # Once to identify, once to train; at a checkpoint the reference goes to all in place of the identification.
    assert first["bytes"]["down"] == 10 * model
    assert second["bytes"]["down"] >= 10 * model
    assert first["bytes"]["up"] == 5 * model
    assert json.dumps(done.records)


def test_server_keeps_one_reference_whatever_the_number_of_clients(whole):
    done, folder = whole
    assert set(done.server.notes) == {"status", "reference"}
    one = sum(t.numel() * t.element_size() for t in done.initial.values())
    assert (folder / "checkpoint" / "state.safetensors").stat().st_size < 2.2 * one + 50_000


def test_corrected_labels_stay_with_the_noisy_clients(whole, clients):
    done, folder = whole
    status = done.server.notes["status"].values["status"]
    for client, kind in status.items():
        memory = ClientMemory(folder / "clients" / client)
        memory.open(done.server.state.step + 1, done.server.state.step)
        assert memory["known"] is True
        assert ("labels" in memory) is (kind == "noisy")
        if kind == "noisy":
            assert len(memory["labels"]) == len(clients[client])
    plain = json.dumps([dict(n.values) for n in done.server.notes.values()])
    assert "labels" not in plain


@pytest.mark.parametrize("workers", [2, 3])
def test_worker_processes_give_bitwise_the_same(whole, clients, tmp_path, workers):
    done = federation(clients, tmp_path, workers=workers).run()
    assert all(same_state(a, b) for a, b in zip(done.models, whole[0].models, strict=True))
    assert [r["clients"] for r in done.records] == [r["clients"] for r in whole[0].records]


class Killed(BaseException):
    pass


KILLS = [("save", 1), ("save", 3), ("task", "identify"), ("task", "relabel"), ("task", "train")]


@pytest.mark.parametrize(("kill", "workers"), [*((k, 1) for k in KILLS), (KILLS[1], 2), (KILLS[3], 2)])
def test_killed_between_or_within_stages_goes_on_bitwise(whole, clients, tmp_path, kill, workers):
    """Killed after a checkpoint (the first is that of the identification), or after a request that none covers."""
    saves = []

    def save(state):
        save_state(state, tmp_path / "checkpoint")
        saves.append(1)
        if kill == ("save", len(saves)):
            raise Killed

    first = federation(clients, tmp_path, workers=workers, save=save)
    ask = first.server.ask

    def failing(task, *args, **options):
        replies = ask(task, *args, **options)
        if kill == ("task", task) and first.server.round in (0, 2):
            raise Killed
        return replies

    first.server.ask = failing
    with pytest.raises(Killed):
        first.run()
    state = load_state(tmp_path / "checkpoint")
    done = state.round if state else 0
    assert done < ROUNDS
    second = federation(clients, tmp_path, workers=workers).run()
    reference = whole[0]
    assert all(same_state(a, b) for a, b in zip([*first.models[:done], *second.models], reference.models, strict=True))
    records = [{**r, "seconds": 0} for r in [*first.records[:done], *second.records]]
    assert records == [{**r, "seconds": 0} for r in reference.records]


def test_noisy_client_that_fails_leaves_the_others_at_work(clients):
    from dataclasses import replace

    def unsound(client, message):
        if client.name == "hospital_1" and client.round == 2:
            raise RuntimeError("broken")
        return staged.train(client, message)

    method = replace(staged.METHOD, tasks={**staged.METHOD.tasks, "train": unsound})
    done = Federation(method, clients, rounds=2, bundle_changes=CHANGES).run()
    assert done.records[1]["admitted"] == [c for c in sorted(clients) if c != "hospital_1"]
    assert sum(done.column("weight", 2).values()) == pytest.approx(1.0)
