"""Two rounds of OCT-FedSIR on real B-scans with a pretrained SqueezeNet, from the first descriptors to new targets."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from planted import memories
from tiny_federation import Federation

from medfed.data.arrays import ArrayDataset

CLASSES = ("CNV", "DME", "DRUSEN", "NORMAL")
WEIGHTS = "weights/squeezenet1_0_deepcompression_fp16.pth"
SIDE, PER_CLASS, CLIENTS = 48, 8, 5
NOISY = ("hospital_2", "hospital_3", "hospital_4")


@pytest.fixture(scope="module")
def hospitals(shared):
    """Five clients with 32 B-scans each; at three of them three labels of four are another class."""
    from medfed.data.decode import decode

    root = next(iter(sorted((shared / "data").rglob("CNV"))), None)
    if root is None or not (shared / WEIGHTS).is_file():
        pytest.skip("no OCT images in folders of classes, or no pretrained weights, are here")
    images, labels = [], []
    for c, name in enumerate(CLASSES):
        files = sorted(p for p in (root.parent / name).rglob("*") if p.suffix in (".jpeg", ".jpg", ".png"))
        for file in files[: CLIENTS * PER_CLASS]:
            pixels = torch.from_numpy(np.array(decode(file).pixels))[None, :1]
            small = torch.nn.functional.interpolate(pixels, (SIDE, SIDE), mode="area")[0]
            images.append(small.byte().expand(3, -1, -1).numpy())
            labels.append(c)
    images, labels = np.stack(images), np.array(labels)
    data = {}
    for k in range(CLIENTS):
        name = f"hospital_{k}"
        rows = np.arange(k, len(labels), CLIENTS)
        given = labels[rows].copy()
        if name in NOISY:
            wrong = np.arange(len(rows)) % 4 != 0
            given[wrong] = (given[wrong] + np.random.default_rng(k).integers(1, 4, wrong.sum())) % 4
        data[name] = ArrayDataset(images, rows, torch.from_numpy(given))
    return data, str(shared / WEIGHTS)


def federation(hospitals, folder=None, rounds=2, **changes):
    data, weights = hospitals
    network = {
        "_target_": "medfed.training.networks.build_network",
        "name": "squeezenet1_0",
        "num_classes": len(CLASSES),
        "in_channels": 3,
        "weights": weights,
    }
    section = {
        "name": "oct_fedsir",
        "period": 1,
        "stage_one": {"epochs": 1, "learning_rate": 1e-4},
        "learning_rate": 1e-4,
        **changes,
    }
    bundle = {"classes": list(CLASSES), "network_def": network, "in_channels": 3, "image_size": [SIDE, SIDE]}
    return Federation(section, data, folder=folder, rounds=rounds, bundle_changes={**bundle, "batch_size": 8})


def test_two_rounds_on_real_images(hospitals, tmp_path):
    data, _ = hospitals
    done = federation(hospitals, tmp_path).run()
    second = done.records[1]
    assert set(done.column("status", 1)) == set(data)
    assert set(done.column("status", 1).values()) == {"clean", "noisy"}
    # Features after a ReLU: signed cosines of directions with canonical signs are near 1, and differ.
    means = done.column("descriptor_mean", 1)
    assert all(0.5 < m < 1 for m in means.values())
    assert len(set(means.values())) == CLIENTS
    assert all(math.isfinite(v["loss"]) for v in second["clients"].values())
    assert second["server"]["relabelled"]
    assert sum(done.column("weight", 2).values()) == pytest.approx(1)
    kept = memories(done, tmp_path)
    for client, status in done.column("status", 1).items():
        memory = kept[client]
        assert memory["audit_proposals"].shape == (1, len(data[client]))
        assert ("labels" in memory) is (status == "noisy")
        if status == "noisy":
            changed = int((memory["labels"] != data[client].labels).sum())
            assert done.column("edited", 2)[client] == changed
    assert json.dumps(done.records)


def test_evidence_ranks_clean_above_noisy_before_any_training(hospitals):
    """Labels that are three quarters wrong cannot be told from the images."""
    done = federation(hospitals, rounds=1, identification="evidence", start="initial").run()
    told = done.column("separability", 1)
    assert min(told[c] for c in told if c not in NOISY) > max(told[c] for c in NOISY)
