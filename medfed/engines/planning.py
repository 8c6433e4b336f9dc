"""How many workers a federation should have: arithmetic of a client's training against bytes of its model.

Nothing is timed.  The numbers of workers and of threads a worker decide how floating-point sums are grouped, so the
choice must be the same whenever a run is repeated on the same machine.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

    from medfed.training.bundle import TrainingBundle

# A worker costs one more copy of the model a client, and the server's sums run on a core that the workers want too.
# A core computes about ten floating-point operations in the time in which it copies a byte, and two workers of one
# thread save some ten per cent of the time of two threads: a hundred operations pay for a byte.
FLOPS_PER_BYTE = 100.0


def available_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def forward_flops(network: nn.Module, shape: tuple[int, ...]) -> float:
    """Floating-point operations of one image's forward pass, counted without computing.

    Args:
        network: the network; it is left without its weights.
        shape: of an image, ``(C, h, w)``.

    Returns:
        The operations; 0 for a network that cannot be traced without data.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    try:
        with counter, torch.no_grad():
            network.eval().to("meta")(torch.empty(2, *shape, device="meta"))
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return 0.0
    return counter.get_total_flops() / 2


def worth_moving(flops: float, model_bytes: float) -> bool:
    """Whether a client's training costs more than moving its model to another process and back.

    Args:
        flops: floating-point operations of a client's training in a round.
        model_bytes: bytes of one model.
    """
    return flops > FLOPS_PER_BYTE * model_bytes


def choose_workers(bundle: TrainingBundle, *, clients: int, samples: float, cores: int) -> int:
    """How many workers of one thread train side by side on a CPU.

    Args:
        bundle: what a client trains.
        clients: clients asked in a round.
        samples: images that a client trains on in a round, on average (its images times its epochs).
        cores: processor cores to use.

    Returns:
        As many as there are cores and clients where training is worth more than moving the model, else 1.
    """
    workers = max(1, min(cores, clients))
    if workers > 1:
        network = bundle.build_network(seed=0)
        size = sum(t.numel() * t.element_size() for t in network.state_dict().values())
        # A backward pass costs about two forward passes.
        if not worth_moving(3 * samples * forward_flops(network, bundle.image_shape), size):
            return 1
    return workers
