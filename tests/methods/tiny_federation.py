"""Federations of tiny networks on the real trainer, with methods by name: what the tests of this folder share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from medfed.data.arrays import ArrayDataset
from medfed.data.cohort import Task
from medfed.engines.host import ClientHost
from medfed.engines.local import LocalEngine
from medfed.engines.pool import PoolEngine
from medfed.federation.loop import run_rounds
from medfed.federation.messages import State
from medfed.federation.method import Method
from medfed.federation.server import Server, Workbench
from medfed.federation.state import ServerState, load_state, save_state
from medfed.methods.registry import resolve_method
from medfed.training.bundle import TrainingBundle
from medfed.training.local import LocalTrainer

SIDE = 4
PIXELS = SIDE * SIDE


class Softmax(nn.Module):
    """A linear classifier in float64, so that an independent calculation can be compared digit by digit."""

    dtype = torch.float64

    def __init__(self, num_classes: int = 3):
        super().__init__()
        self.head = nn.Linear(PIXELS, num_classes, dtype=self.dtype)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images.flatten(1).to(self.dtype))


class Normed(nn.Module):
    """Two linear layers in float64 with BatchNorm between them."""

    def __init__(self, num_classes: int = 3, width: int = 5):
        super().__init__()
        self.first = nn.Linear(PIXELS, width, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(width, dtype=torch.float64)
        self.head = nn.Linear(width, num_classes, dtype=torch.float64)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.first(images.flatten(1).double()))))


def bundle(network: str = "Softmax", **changes: Any) -> TrainingBundle:
    classes = changes.setdefault("classes", ["a", "b", "c"])
    return TrainingBundle.load(
        "oct_bscan_classification",
        {
            "network_def": {"_target_": f"{__name__}.{network}", "num_classes": len(classes)},
            "in_channels": 1,
            "image_size": [SIDE, SIDE],
            "batch_size": 4,
            "learning_rate": 0.01,
            "augment::flip": 0.0,
            **changes,
        },
    )


def images_of(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 1, SIDE, SIDE), dtype=np.uint8)


def client_data(labels: list[Any], seed: int, contrast: float = 1.0) -> ArrayDataset:
    """Random images of a client with the labels given; a contrast of 0 makes them all grey."""
    images = images_of(len(labels), seed)
    images = (128 + contrast * (images.astype(float) - 128)).clip(0, 255).astype(np.uint8)
    given = np.asarray(labels)
    kind = torch.float32 if given.ndim == 2 else torch.int64
    return ArrayDataset(images, np.arange(len(labels)), torch.as_tensor(given).to(kind))


def three_clients() -> dict[str, ArrayDataset]:
    """Clients of different size; the second lacks a class, the third has one sample more than fits a batch."""
    return {
        "c0": client_data([0, 1, 2, 0, 1, 2, 2, 2, 1, 0, 0], seed=1),
        "c1": client_data([0, 1, 1, 0, 1, 1], seed=2, contrast=0.5),
        "c2": client_data([2, 2, 1, 0, 2, 1, 2, 0, 1], seed=3),
    }


class Federation:
    """One run of a method over clients that exist in memory only.

    Args:
        method: name of a method or its ``method`` section, or a method itself.
        data: the clients.
        network: name of a network of this module.
        rounds: rounds of the run.
        folder: where checkpoint and client memories are kept; a run that is there already goes on.
        workers: worker processes; 1 trains in this one.
        bundle_changes: overrides of the bundle.
        public: images that everybody may see.
        **options: of the server.
    """

    def __init__(
        self,
        method: str | Mapping[str, Any] | Method,
        data: Mapping[str, ArrayDataset],
        *,
        network: str = "Softmax",
        rounds: int = 3,
        folder: Path | None = None,
        workers: int = 1,
        bundle_changes: Mapping[str, Any] | None = None,
        public: ArrayDataset | None = None,
        **options: Any,
    ):
        if isinstance(method, Method):
            self.method, self.settings = method, method.settings()
        else:
            section = {"name": method} if isinstance(method, str) else method
            self.method, self.settings = resolve_method(section)
        self.bundle = bundle(network, **(bundle_changes or {}))
        self.task = Task(self.bundle.task, self.bundle.classes)
        seed = options.get("seed", 0)

        def host() -> ClientHost:
            trainer = LocalTrainer(self.bundle, device="cpu", threads=1)
            clients = folder / "clients" if folder else None
            return ClientHost(
                tuple(data),
                self.method.tasks,
                self.task,
                data.__getitem__,
                trainer,
                folder=clients,
                seed=seed,
                public=public,
            )

        engine = LocalEngine(host()) if workers == 1 else PoolEngine(tuple(data), host, workers=workers)
        self.initial = {k: t.clone() for k, t in self.bundle.build_network(seed=7).state_dict().items()}
        state = (load_state(folder / "checkpoint") if folder else None) or ServerState(dict(self.initial))
        if folder:
            options.setdefault("save", lambda s: save_state(s, folder / "checkpoint"))
        if public is not None:
            options["public"] = Workbench(public, LocalTrainer(self.bundle, device="cpu", threads=1))
        self.server = Server(engine, state, self.task, rounds=rounds, **options)
        self.models: list[State] = []
        self.records: list[dict[str, Any]] = []

    def run(self) -> Federation:
        """Runs to the last round; ``models[t]`` is the global model after round t + 1."""

        def evaluate(server: Server) -> dict[str, Any]:
            self.models.append({k: t.clone() for k, t in server.model.items()})
            return {}

        try:
            run_rounds(self.method, self.settings, self.server, evaluate=evaluate, append=self.records.append)
        finally:
            self.server.engine.close()
        return self

    def column(self, name: str, round: int) -> dict[str, Any]:
        """A value of every client in the record of a round, from 1."""
        return {c: v[name] for c, v in self.records[round - 1]["clients"].items() if name in v}


def distance(one: State, other: State) -> float:
    """Largest absolute difference of two state dicts."""
    assert one.keys() == other.keys()
    return max(float((one[k].double() - other[k].double()).abs().max()) for k in one)
