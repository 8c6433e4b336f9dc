"""Memory of a federation: flat over rounds, and not larger with more clients."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "federation"))
from toy import make_server, round_of

from medfed.aggregation.averaging import RunningMean
from medfed.federation.messages import Message

MODEL = 1 << 16  # floats, a number that no other tensor has


def models_alive() -> int:
    """Models that the process holds. Its resident memory would be no measure: allocators and kernels keep pages."""
    gc.collect()
    dense = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.layout is torch.strided]  # others' too
    tensors = [t for t in dense if t.device.type == "cpu" and t.untyped_storage().nbytes() == 4 * MODEL]
    return len({t.untyped_storage().data_ptr() for t in tensors})


def rounds(clients: int, count: int) -> list[int]:
    """Models alive at the end of every round, its replies included."""
    server = make_server({f"c{i:02d}": i + 1 for i in range(clients)}, rounds=count)
    server.model = {"w": torch.zeros(MODEL)}
    alive = []

    def average(server):
        replies = server.ask("train", Message.of({}, model=server.model), mean="model")
        assert len(replies) == clients
        alive.append(models_alive())
        return replies

    for _ in range(count):
        server.model = round_of(server, average).mean["model"]
        server.state.round += 1
    return alive


def test_many_rounds_need_no_more_than_one():
    assert rounds(clients=4, count=12) == [rounds(clients=4, count=1)[0]] * 12


def test_forty_clients_need_no_more_than_four():
    assert rounds(clients=40, count=2) == rounds(clients=4, count=2)
    assert max(rounds(clients=4, count=2)) <= 4  # sent, mean, and the last client's own while it is added


def test_mean_is_the_accumulator_itself_and_a_new_one_begins_after_it():
    mean = RunningMean()
    mean.add({"w": torch.full((MODEL,), 2.0)}, 1.0)
    held = mean._sum["w"].data_ptr()
    first = mean.result()
    assert first["w"].data_ptr() == held
    mean.add({"w": torch.full((MODEL,), 6.0)}, 3.0)
    assert mean.result()["w"][0] == 6.0
    assert first["w"][0] == 2.0
