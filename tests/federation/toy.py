"""A federation small enough to work out by hand: clients whose "training" is simple arithmetic."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from medfed.data.cohort import Task
from medfed.engines.host import ClientHost
from medfed.engines.local import LocalEngine
from medfed.federation.client import Client
from medfed.federation.messages import Message
from medfed.federation.server import Server
from medfed.federation.state import ServerState

TASK = Task("multiclass", ("a", "b"))


class ToyData:
    """Stands in for a client's data set: a name and a sample count."""

    def __init__(self, name: str, samples: int):
        self.name, self.samples = name, samples
        self.labels = torch.zeros(samples, dtype=torch.long)

    def __len__(self) -> int:
        return self.samples


def initial_model() -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([1.0, 2.0]), "count": torch.tensor(3, dtype=torch.int64)}


def add_samples(client: Client, message: Message) -> Message:
    """Adds the client's sample count to every weight."""
    model = {k: t + client.num_samples if t.is_floating_point() else t + 1 for k, t in message.group("model").items()}
    return Message.of({"samples": client.num_samples, "loss": 0.5}, model=model)


def remember(client: Client, message: Message) -> Message:
    """Counts in the client's memory how often it was asked."""
    client.memory["asked"] = client.memory.get("asked", 0) + 1
    return Message.of({"samples": 1, "asked": client.memory["asked"]}, model=message.group("model"))


def crash(client: Client, message: Message) -> Message:
    if client.name == message.values["who"]:
        raise RuntimeError("secret/path/to/patient.dcm")
    return add_samples(client, message)


def die(client: Client, message: Message) -> Message:
    if client.name == message.values["who"]:
        os._exit(9)
    return add_samples(client, message)


def slow(client: Client, message: Message) -> Message:
    """The first clients take longest, so that answers arrive in the wrong order."""
    time.sleep(0.05 if client.name in ("c0", "c1") else 0.0)
    return add_samples(client, message)


def nap(client: Client, message: Message) -> Message:
    """Every client takes a while and computes nothing."""
    time.sleep(0.4)
    return add_samples(client, message)


def linger(client: Client, message: Message) -> Message:
    """Every client takes longer than anybody waits for a worker to end."""
    time.sleep(5)
    return add_samples(client, message)


def odd(client: Client, message: Message) -> Message:
    """Replies that must not be admitted, one kind a client."""
    model = {k: t.clone() for k, t in message.group("model").items()}
    values: dict[str, object] = {"samples": client.num_samples}
    kind = message.values["kinds"].get(client.name)
    if kind == "nan":
        model["w"][1] = float("nan")
    elif kind == "infinity":
        model["w"][0] = float("inf")
    elif kind == "missing":
        del model["w"]
    elif kind == "unexpected":
        model["extra"] = torch.zeros(1)
    elif kind == "shape":
        model["w"] = model["w"].reshape(1, 2)
    elif kind == "dtype":
        model["count"] = model["count"].float()
    elif kind == "no samples":
        values["samples"] = 0
    elif kind == "nan value":
        values["loss"] = float("nan")
    elif kind == "nan nested":
        values["per_class"] = {"a": [0.1, float("inf")]}
    return Message.of(values, model=model)


def measure(client: Client, message: Message) -> Message:
    """Sends a number and no tensors."""
    return Message.of({"samples": client.num_samples, "sharpness": 0.5 * client.num_samples})


TASKS = {
    "measure": measure,
    "train": add_samples,
    "remember": remember,
    "crash": crash,
    "die": die,
    "slow": slow,
    "nap": nap,
    "linger": linger,
    "odd": odd,
}


def make_host(sizes: dict[str, int], folder: Path | None = None) -> ClientHost:
    return ClientHost(
        tuple(sizes), TASKS, TASK, lambda name: ToyData(name, sizes[name]), trainer=None, folder=folder, seed=0
    )


def make_server(sizes: dict[str, int], folder: Path | None = None, engine=None, **options) -> Server:
    state = options.pop("state", None) or ServerState(initial_model())
    options.setdefault("rounds", 3)
    return Server(engine or LocalEngine(make_host(sizes, folder)), state, TASK, **options)


def round_of(server: Server, do: Callable[[Server], object]) -> object:
    """Runs one round of a server by hand."""
    for _ in server.rounds():
        return do(server)
    raise AssertionError("no round left")
