"""Memory of a federation: flat over rounds, and not larger with more clients."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "federation"))
from toy import make_server, round_of

from medfed.aggregation.averaging import RunningMean
from medfed.federation.messages import Message

psutil = pytest.importorskip("psutil")
MODEL = 1 << 20  # floats: 4 MB


def resident() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 1e6


def rounds(clients: int, count: int) -> tuple[float, float]:
    """Resident MB after a quarter of the rounds and after the last."""
    server = make_server({f"c{i:02d}": i + 1 for i in range(clients)}, rounds=count)
    server.model = {"w": torch.zeros(MODEL)}
    early = 0.0

    def average(server):
        return server.ask("train", Message.of({}, model=server.model), mean="model")

    for i in range(count):
        server.model = round_of(server, average).mean["model"]
        server.state.round += 1
        if i == count // 4:
            early = resident()
    return early, resident()


def test_thirty_rounds_need_no_more_than_eight():
    early, late = rounds(clients=4, count=30)
    assert late - early < 16  # one model kept a round would be 88 MB


def test_forty_clients_need_no_more_than_four():
    few = rounds(clients=4, count=4)[1]
    many = rounds(clients=40, count=4)[1]
    assert many - few < 24  # one model kept a client would be 144 MB


def test_mean_is_the_accumulator_itself_and_a_new_one_begins_after_it():
    mean = RunningMean()
    mean.add({"w": torch.full((MODEL,), 2.0)}, 1.0)
    held = mean._sum["w"].data_ptr()
    first = mean.result()
    assert first["w"].data_ptr() == held
    mean.add({"w": torch.full((MODEL,), 6.0)}, 3.0)
    assert mean.result()["w"][0] == 6.0
    assert first["w"][0] == 2.0
