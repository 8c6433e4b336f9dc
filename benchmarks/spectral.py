"""Spectral identification and relabelling against plain singular value decompositions and against training.

A tenth of the clients is clean, the four classes have equal shares, and the features have a spectrum that falls like
that of pooled features.  Identification: directions and descriptors of all clients, and the mixture.  Relabelling:
references at the clean clients, their consensus, scores and proposals at the others.  Training is one local epoch of
SqueezeNet on images of 64x64, measured here (``--round-seconds`` gives another time); so is a pass that takes the
features of all images, of which identification and a checkpoint need one each.  On the CPU all times are those of the
processor, which a busy machine disturbs least.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import SQUEEZENET, Federation, Timing, arguments, in_turn, machine, smaller, table
from torch import Tensor

from medfed.reliability.identification import published
from medfed.reliability.references import class_reference, consensus
from medfed.reliability.relabelling import agreement, scores
from medfed.reliability.spectra import Descriptors, class_directions, descriptors, similarity
from medfed.seeding import torch_generator

CLASSES, BETWEEN = 4, 20
CASES = ((30, 100, 512), (10, 100, 512), (10, 1000, 512), (10, 1000, 1024), (2, 4000, 512))


@dataclass
class Features:
    """Non-negative features of clients whose labels are right at the first tenth of them."""

    clients: int
    samples: int
    dimension: int
    device: str

    def __post_init__(self) -> None:
        g = torch_generator("spectral", self.clients, self.samples, self.dimension)
        mix = torch.randn(64, self.dimension, generator=g) / torch.arange(1, 65)[:, None] ** 0.5
        places = torch.randn(CLASSES, self.dimension, generator=g)
        self.clean = max(1, self.clients // 10)
        self.parts: list[tuple[Tensor, Tensor]] = []
        self.found: dict[str, Descriptors] = {}
        for k in range(self.clients):
            truth = torch.arange(self.samples) % CLASSES
            inner = torch.randn(self.samples, 64, generator=g)
            noise = 0.05 * torch.randn(self.samples, self.dimension, generator=g)
            features = torch.relu(places[truth] + inner @ mix + noise)
            labels = truth.clone()
            wrong = torch.rand(self.samples, generator=g) < (0.5 if k >= self.clean else 0)
            labels[wrong] = (labels[wrong] + 1) % CLASSES
            self.parts.append((features.to(self.device), labels))
        self.describe()

    def describe(self) -> None:
        for k, (features, labels) in enumerate(self.parts):
            self.found[str(k)] = descriptors(similarity(class_directions(features, labels, CLASSES), CLASSES))

    def judge(self) -> None:
        published(self.found)

    def repair(self) -> None:
        clean, noisy = self.parts[: self.clean], self.parts[self.clean :]
        agreed = {}
        for c in range(CLASSES):
            mine = [class_reference(features[(labels == c).to(features.device)]) for features, labels in clean]
            agreed[c] = consensus([part for part in mine if part is not None])
        for features, _ in noisy:
            agreement(*scores(features, agreed, CLASSES)).cpu()

    def plain(self, full: bool) -> Callable[[], None]:
        """The decompositions alone: of all classes, and once more of those of the clean clients."""

        def decompose() -> None:
            for features, labels in [*self.parts, *self.parts[: self.clean]]:
                for c in range(CLASSES):
                    rows = features[(labels == c).to(features.device)]
                    torch.linalg.svd(rows.double(), full_matrices=full)

        return decompose


def training(device: str, threads: int) -> tuple[float, float]:
    """Seconds per image: of one local epoch, and of a pass that only takes features."""
    case = smaller(SQUEEZENET, what="images of 64x64, SqueezeNet", shape=(3, 64, 64), clients=1, samples=128)
    ours = Federation.of(case, {"name": "fedavg"}, device=device, threads=threads)
    network = case.build_network().to(device).eval()
    images = torch.from_numpy(case.images).to(device).float().div_(255)

    @torch.inference_mode()
    def forward() -> None:
        for batch in images.split(64):
            network(batch)

    times = in_turn({"epoch": ours.round, "pass": forward}, 3)
    return seconds(times["epoch"], device) / case.samples, seconds(times["pass"], device) / case.samples


def seconds(timing: Timing, device: str) -> float:
    return min(timing.cpu if device == "cpu" else timing.wall)


def main() -> None:
    options = arguments(__doc__, rounds=3, threads=1, **{"round-seconds": 0.0})
    torch.set_num_threads(options.threads)
    epoch, look = training(options.device, options.threads)
    rows = []
    for clients, samples, dimension in CASES:
        case = Features(clients, samples, dimension, options.device)
        sides = {
            "descriptors": case.describe,
            "mixture": case.judge,
            "relabelling": case.repair,
            "thin": case.plain(full=False),
            "full": case.plain(full=True),
        }
        timed = in_turn(sides, options.rounds, quiet=options.quiet)
        took = {name: seconds(timing, options.device) for name, timing in timed.items()}
        ours = took["descriptors"] + took["mixture"] + took["relabelling"]
        a_round = options.round_seconds or epoch * clients * samples
        passes = 2 * look * clients * samples
        shares = [ours / a_round, ours / a_round / BETWEEN, (ours + passes) / a_round / BETWEEN]
        rows.append([f"{clients} x {samples}, d = {dimension}", *took.values(), a_round, *(f"{x:.2%}" for x in shares)])
    columns = ["clients x samples", "descriptors, s", "mixture, s", "relabelling, s", "thin SVDs, s", "full SVDs, s"]
    table([*columns, "a round, s", "share of a round", f"of {BETWEEN} rounds", "with both passes"], rows)
    print(machine())


if __name__ == "__main__":
    main()
