"""Averaging 20 ResNet-18 updates against reading the same bytes once.

Reading is ``tensor.sum()`` over every tensor of every update, on one thread and on all.
"""

from __future__ import annotations

import torch
from common import MB, arguments, in_turn, machine, table

from medfed.aggregation.averaging import RunningMean, weighted_mean
from medfed.federation.admission import first_bad_tensor
from medfed.training.networks import build_network


def main() -> None:
    options = arguments(__doc__, rounds=9, updates=20)
    rows = []
    network = build_network("resnet18", 1000).to(options.device)
    generator = torch.Generator().manual_seed(0)

    def update(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        return tensor + 1e-3 * torch.randn(tensor.shape, generator=generator).to(tensor.device)

    states = [{k: update(t) for k, t in network.state_dict().items()} for _ in range(options.updates)]
    weights = [float(k + 1) for k in range(options.updates)]
    size = options.updates * sum(t.numel() * t.element_size() for t in states[0].values())

    def read() -> None:
        for state in states:
            for tensor in state.values():
                tensor.sum()

    def running() -> None:
        mean = RunningMean()
        for state, weight in zip(states, weights):
            mean.add(state, weight)
        mean.result()

    def admitted() -> None:
        mean = RunningMean()
        for state, weight in zip(states, weights):
            first_bad_tensor(state)
            mean.add(state, weight)
        mean.result()

    sides = {
        "reading once": read,
        "weighted_mean": lambda: weighted_mean(states, weights),
        "RunningMean": running,
        "check of finite values and RunningMean": admitted,
    }
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        times = in_turn(sides, options.rounds, quiet=options.quiet)
        base = times["reading once"]
        for name, timing in times.items():
            ratio = timing.over(base)
            rows.append([threads, name, min(timing.wall), size / MB / min(timing.wall) / 1e3, *ratio.values()])
    table(["threads", "what", "seconds", "GB/s", "ratio of medians", "of minima", "of CPU time"], rows)
    print(machine())


if __name__ == "__main__":
    main()
