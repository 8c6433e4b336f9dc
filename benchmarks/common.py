"""What the benchmarks share: synthetic federations, hand-written loops, rounds timed in turn, memory and machine.

Both sides of a comparison run in one process, round by round in turn, so that a busy machine slows both.  Ratios are
of medians and of minima over the rounds; where both sides run in this process alone, CPU time is given too, which a
busy machine disturbs least.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from medfed.data.arrays import ArrayDataset, batch_slices
from medfed.data.cohort import Task
from medfed.engines.host import ClientHost
from medfed.engines.local import LocalEngine
from medfed.engines.pool import PoolEngine
from medfed.federation.server import Engine, Server
from medfed.federation.state import ServerState
from medfed.methods.registry import resolve_method
from medfed.seeding import torch_generator
from medfed.training.bundle import TrainingBundle
from medfed.training.local import LocalTrainer, resolve_device
from medfed.training.rng import seeded

State = dict[str, torch.Tensor]
MB = 1e6


@dataclass(frozen=True)
class Case:
    """A federation of synthetic images.

    Args:
        what: kind of images and network, for the table.
        network: ``network_def`` of the bundle.
        shape: of an image.
        clients: number of clients.
        samples: images a client.
        batch: images a step.
        classes: number of classes.
    """

    what: str
    network: Mapping[str, Any]
    shape: tuple[int, int, int]
    clients: int
    samples: int
    batch: int
    classes: int = 5

    @property
    def title(self) -> str:
        return f"{self.clients} x {self.samples} {self.what}"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"client_{k:03d}" for k in range(self.clients))

    @property
    def task(self) -> Task:
        return Task("multiclass", tuple(f"class {c}" for c in range(self.classes)))

    @functools.cached_property
    def images(self) -> np.ndarray:
        """All images, uint8 as the store keeps them."""
        return np.random.default_rng(0).integers(0, 256, (self.clients * self.samples, *self.shape), np.uint8)

    @functools.cached_property
    def labels(self) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(1).integers(0, self.classes, self.clients * self.samples))

    def rows(self, client: str) -> np.ndarray:
        k = self.names.index(client)
        return np.arange(k * self.samples, (k + 1) * self.samples)

    def data(self, client: str) -> ArrayDataset:
        rows = self.rows(client)
        return ArrayDataset(self.images, rows, self.labels[rows])

    @functools.cached_property
    def bundle(self) -> TrainingBundle:
        """A bundle that ships with medfed, with this case's network and sizes and without augmentation."""
        overrides = {
            "classes": list(self.task.classes),
            "in_channels": self.shape[0],
            "image_size": list(self.shape[1:]),
            "network_def": {**self.network, "num_classes": self.classes, "in_channels": self.shape[0]},
            "batch_size": self.batch,
            "augment": None,
            "normalize::mean": [0.5] * self.shape[0],
            "normalize::std": [0.25] * self.shape[0],
        }
        return TrainingBundle.load("isic_dermoscopy_classification", overrides)

    def build_network(self, seed: int = 0) -> nn.Module:
        """The network of the bundle, without reading a bundle."""
        arguments = {**self.network, "num_classes": self.classes, "in_channels": self.shape[0], "seed": seed}
        module, name = arguments.pop("_target_").rsplit(".", 1)
        with seeded(seed):
            return getattr(importlib.import_module(module), name)(**arguments)

    def initial(self) -> State:
        return {k: t.clone() for k, t in self.build_network().state_dict().items()}


def small_cnn(num_classes: int, in_channels: int = 1, seed: int = 0) -> nn.Module:
    """Two convolutions and two linear layers: 49 thousand parameters for 28x28 images."""
    return nn.Sequential(
        *(nn.Conv2d(in_channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 28), nn.ReLU(), nn.Linear(28, num_classes)),
    )


def torchvision_network(name: str) -> dict[str, Any]:
    """``network_def`` of one of torchvision's networks."""
    return {"_target_": "medfed.training.networks.build_network", "name": name}


SMALL = Case("images of 28x28, 49 k parameters", {"_target_": "common.small_cnn"}, (1, 28, 28), 200, 20, 10)
SQUEEZENET = Case("scans of 96x96, SqueezeNet", torchvision_network("squeezenet1_1"), (3, 96, 96), 10, 64, 16)
RESNET = Case("scan, ResNet-18 (11.2 M parameters)", torchvision_network("resnet18"), (3, 32, 32), 20, 1, 1)


@dataclass
class Federation:
    """medfed's side: a method's program over an engine; one call is one round."""

    case: Case
    server: Server
    engine: Engine
    program: Iterator[Any] = field(repr=False)

    @classmethod
    def of(
        cls,
        case: Case,
        method: Mapping[str, Any],
        *,
        device: str = "cpu",
        workers: int = 1,
        threads: int = 1,
        amp: bool = False,
        trainer: Callable[[], Any] | None = None,
        tasks: Mapping[str, Any] | None = None,
    ) -> Federation:
        """Builds it; with more than one worker this forks, so do it before this process computes."""
        chosen, settings = resolve_method(method)
        make = trainer or (lambda: LocalTrainer(case.bundle, device=device, threads=threads, amp=amp))

        def host() -> ClientHost:
            return ClientHost(case.names, tasks or chosen.tasks, case.task, case.data, make(), None, seed=0)

        initial = case.initial()
        size = sum(t.numel() * t.element_size() for t in initial.values())
        engine: Engine
        if workers == 1:
            engine = LocalEngine(host())
        else:
            engine = PoolEngine(case.names, host, workers=workers, threads=threads, model_bytes=size)
        server = Server(engine, ServerState(initial), case.task, rounds=10**6)
        return cls(case, server, engine, chosen.program(server, settings))

    def round(self) -> None:
        report = next(self.program)
        if report.refused:
            raise RuntimeError(f"refused: {report.refused[0]}")
        self.server.state.round = report.round

    @property
    def model(self) -> State:
        return self.server.model


class Bare:
    """The hand-written side: one network, tensors in memory, fresh Adam, weighted mean; one call is one round.

    It takes the same optimiser steps in the same order as medfed, so that both must end in the same model.
    """

    def __init__(self, case: Case, device: str = "cpu", amp: bool = False):
        self.case, self.device = case, torch.device(device)
        self.network = case.build_network().to(self.device)
        self.state = dict(self.network.state_dict())
        self.params = list(self.network.parameters())
        self.model = {k: t.clone() for k, t in self.state.items()}
        self.total = {k: torch.empty_like(t) for k, t in self.state.items()}
        images = torch.from_numpy(case.images).to(self.device)
        self.images = images.float().div_(255).sub_(0.5).div_(0.25)
        self.labels = case.labels.to(self.device)
        self.scaled = amp and self.device.type == "cuda"
        self.amp = amp
        self.count = 0

    def round(self) -> None:
        self.count += 1
        for k, name in enumerate(self.case.names):
            self.load()
            self.train(name)
            self.add(k, 1 / self.case.clients)
        self.model, self.total = self.total, self.model

    @torch.no_grad()
    def load(self) -> None:
        torch._foreach_copy_(list(self.state.values()), list(self.model.values()))

    @torch.no_grad()
    def add(self, k: int, weight: float) -> None:
        for name, tensor in self.state.items():
            if not tensor.is_floating_point():
                self.total[name].copy_(tensor)
            elif k == 0:
                torch.mul(tensor, weight, out=self.total[name])
            else:
                self.total[name].add_(tensor, alpha=weight)

    def batches(self, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        first = int(self.case.rows(name)[0])
        order = torch.randperm(self.case.samples, generator=torch_generator("shuffle", 0, self.count, name))
        order = (order + first).to(self.device)
        for part in batch_slices(self.case.samples, self.case.batch):
            rows = order[part]
            yield self.images[rows], self.labels[rows]

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not self.amp:
            return F.cross_entropy(self.network(images), labels)
        with torch.autocast(self.device.type, dtype=torch.float16 if self.scaled else torch.bfloat16):
            logits = self.network(images)
        return F.cross_entropy(logits.float(), labels)

    def train(self, name: str) -> None:
        self.network.train()
        adam = torch.optim.Adam(self.params, lr=3e-4, weight_decay=5e-4, fused=True)
        scaler = torch.amp.GradScaler(self.device.type, enabled=self.scaled)
        for images, labels in self.batches(name):
            adam.zero_grad()
            scaler.scale(self.loss(images, labels)).backward()
            scaler.step(adam)
            scaler.update()


class BareSharpnessAware(Bare):
    """The hand-written FedISM: sharpness of the received model, GSAM steps, weights by sharpness."""

    RHO, ALPHA, Q, BETA = 0.05, 0.1, 2.0, 0.5

    def __init__(self, case: Case, device: str = "cpu", amp: bool = False):
        super().__init__(case, device, amp)
        self.weights: list[float] | None = None

    def round(self) -> None:
        self.count += 1
        sharpness = []
        for name in self.case.names:
            self.load()
            sharpness.append(self.sharpness(name))
        now = [s**self.Q for s in sharpness]
        now = [w / sum(now) for w in now]
        if self.weights is not None:
            now = [self.BETA * w + (1 - self.BETA) * old for w, old in zip(now, self.weights)]
        self.weights = now
        for k, name in enumerate(self.case.names):
            self.load()
            self.train(name)
            self.add(k, now[k] / sum(now))
        self.model, self.total = self.total, self.model

    def sharpness(self, name: str, batch: int = 64) -> float:
        self.network.eval()
        rows = torch.from_numpy(self.case.rows(name)).to(self.device).split(batch)
        at = moved = 0.0
        for p in self.params:
            p.grad = None
        for part in rows:
            loss = F.cross_entropy(self.network(self.images[part]), self.labels[part], reduction="sum")
            loss.backward()
            at += float(loss.detach())
        with torch.no_grad():
            kept = [p.clone() for p in self.params]
            grads = [p.grad for p in self.params]
            torch._foreach_add_(self.params, torch._foreach_mul(grads, self.RHO / _norm(grads)))
            for part in rows:
                logits = self.network(self.images[part])
                moved += float(F.cross_entropy(logits, self.labels[part], reduction="sum"))
            torch._foreach_copy_(self.params, kept)
        return max((moved - at) / self.case.samples, 1e-10)

    def train(self, name: str) -> None:
        self.network.train()
        adam = torch.optim.Adam(self.params, lr=3e-4, weight_decay=5e-4, fused=True)
        norms = [m for m in self.network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        for images, labels in self.batches(name):
            adam.zero_grad()
            self.loss(images, labels).backward()
            first = [p.grad for p in self.params]
            with torch.no_grad():
                kept = [p.clone() for p in self.params]
                torch._foreach_add_(self.params, torch._foreach_mul(first, self.RHO / _norm(first)))
            adam.zero_grad()
            momenta = [m.momentum for m in norms]
            for m in norms:  # the second pass leaves the running statistics as they are
                m.momentum = 0.0
            self.loss(images, labels).backward()
            for m, momentum in zip(norms, momenta):
                m.momentum = momentum
            with torch.no_grad():
                torch._foreach_copy_(self.params, kept)
                second = [p.grad for p in self.params]
                one, two = _norm(first), _norm(second)
                cosine = sum(torch.dot(a.view(-1), b.view(-1)) for a, b in zip(first, second)) / (one * two)
                torch._foreach_mul_(second, 1 + self.ALPHA * cosine * one / two)
                torch._foreach_add_(second, first, alpha=-self.ALPHA)
            adam.step()


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


def difference_after_a_round(ours: Federation, hand: Any) -> float:
    """Runs a round on both sides: the largest difference of the two models, as a share of the largest number in them.

    Later, rounding errors grow by themselves.
    """
    ours.round()
    hand.round()
    one, other = ours.model, hand.model
    floats = [k for k in one if one[k].is_floating_point()]
    size = max(float(one[k].abs().max()) for k in floats)
    return max(float((one[k].cpu() - other[k].cpu()).abs().max()) for k in floats) / size


def in_turn(
    sides: Mapping[str, Callable[[], None]], rounds: int, warmup: int = 1, quiet: float = 0
) -> dict[str, Timing]:
    """Times some functions round by round in turn; who begins alternates.

    Args:
        sides: what is timed, by name.
        rounds: rounds that count.
        warmup: rounds before them.
        quiet: seconds to wait at most, before each round, until others use less than a tenth of a core.
    """
    order = list(sides)
    out = {name: Timing() for name in sides}
    for i in range(warmup + rounds):
        wait_until_quiet(quiet)
        for name in order if i % 2 else reversed(order):
            synchronise()
            others, cpu, wall = others_seconds(), time.process_time(), time.perf_counter()
            sides[name]()
            synchronise()
            if i >= warmup:
                out[name].wall.append(time.perf_counter() - wall)
                out[name].cpu.append(time.process_time() - cpu)
                out[name].others.append((others_seconds() - others) / out[name].wall[-1])
    return out


def others_seconds() -> float:
    """Processor seconds that all but this process and its children have used so far."""
    import psutil

    me = psutil.Process()
    own = sum(t.user + t.system for t in (p.cpu_times() for p in [me, *me.children(recursive=True)]))
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - own


def wait_until_quiet(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        before = others_seconds()
        time.sleep(0.3)
        if others_seconds() - before < 0.03:
            return


def synchronise() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@dataclass
class Timing:
    """Seconds of each round, by the clock and on the processor (this process only), and cores that others used."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    def over(self, base: Timing) -> dict[str, float]:
        """Ratios to another side: of medians and minima of the clock, and of the medians of CPU time."""
        return {
            "median": statistics.median(self.wall) / statistics.median(base.wall),
            "min": min(self.wall) / min(base.wall),
            "cpu": statistics.median(self.cpu) / max(statistics.median(base.cpu), 1e-9),
        }


def cores_of_others(times: Mapping[str, Timing]) -> float:
    """Cores that other programs used during the rounds, median."""
    return max(0.0, statistics.median(x for t in times.values() for x in t.others))


def table(columns: list[str], rows: list[list[Any]]) -> None:
    """Prints a Markdown table."""

    def text(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    cells = [columns, *([text(v) for v in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for i, row in enumerate(cells):
        print("| " + " | ".join(c.ljust(w) for c, w in zip(row, widths)) + " |")
        if i == 0:
            print("|" + "|".join("-" * (w + 2) for w in widths) + "|")


def machine() -> str:
    """What the figures depend on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return f"{os.cpu_count()} cores, {gpu}, torch {torch.__version__}; load average {load}"


def processes_mb(kind: str = "pss") -> float:
    """Memory of this process and all below it, MB: PSS (a shared page counts once in all), or RSS without it."""
    import psutil

    me = psutil.Process()
    total = 0
    for process in [me, *me.children(recursive=True)]:
        try:
            full = process.memory_full_info()
        except psutil.Error:
            continue
        total += getattr(full, kind, full.rss)
    return total / MB


def arguments(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Command-line options with defaults, and ``--device``."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--quiet", type=float, default=0, help="wait so many seconds at most for an idle machine")
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    found = parser.parse_args()
    found.device = str(resolve_device(found.device))
    return found


def smaller(case: Case, **changes: Any) -> Case:
    return replace(case, **changes)
