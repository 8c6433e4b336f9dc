"""Two rounds of FedMerit on real B-scans: bad images at some clients, wrong labels at some."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from planted import memories
from test_oct_fedsir_real import NOISY, federation, hospitals  # noqa: F401 (a fixture)

from medfed.data.arrays import ArrayDataset
from medfed.data.corruption import Corruption

BAD = ("hospital_1", "hospital_4")


@pytest.fixture(scope="module")
def both(hospitals):  # noqa: F811
    """The hospitals of OCT-FedSIR's test, two of them with images of FedISM's severity 3."""
    data, weights = hospitals
    worse = {}
    for name in BAD:
        noise = Corruption("gaussian_noise", 3, seed=1)
        own = data[name]
        made = [noise.apply(own.images[row].astype(np.float32) / 255, f"{name} {row}") for row in own.rows]
        images = (np.stack(made) * 255).round().astype(np.uint8)
        worse[name] = ArrayDataset(images, np.arange(len(own)), own.labels)
    return {**data, **worse}, weights


def test_two_rounds_on_real_images(both, tmp_path):
    done = federation(both, tmp_path, name="fedmerit", salt={"rho": 0.005}).run()
    data, _ = both
    groups = done.server.notes["evidence"].values["peers"]
    assert groups == [sorted(set(data) - set(BAD)), sorted(BAD)]
    # Labels of which three quarters are wrong cannot be predicted, and bad images alone do not make it so.
    told = done.column("separability", 1)
    assert min(told[c] for c in told if c not in NOISY) > max(told[c] for c in NOISY)
    assert set(done.server.notes["needs"].values) <= {g[0] for g in groups}
    for number in (1, 2):
        record = done.records[number - 1]
        assert record["refused"] == []
        assert sum(done.column("weight", number).values()) == pytest.approx(1)
        assert all(math.isfinite(v["loss"]) for v in record["clients"].values())
    for name, memory in memories(done, tmp_path).items():
        if "labels" in memory:
            changed = int((memory["labels"] != data[name].labels).sum())
            assert done.column("edited", 2)[name] == changed
    assert json.dumps(done.records)
