"""Torch's global generators, seeded for a block and given back as they were.

Initialisation and dropout draw from them; nothing else here does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seeds the CPU's generator, and that of a CUDA device, for a block.

    The generators belong to the process: two threads that train networks with dropout would share them.

    Args:
        seed: non-negative, below 2**63.
        device: the device in use; None for the CPU.
    """
    state = torch.random.get_rng_state()
    cuda = device if device is not None and device.type == "cuda" else None
    cuda_state = None if cuda is None else torch.cuda.get_rng_state(cuda)
    torch.random.default_generator.manual_seed(seed)
    if cuda is not None:
        with torch.cuda.device(cuda):
            torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        torch.random.set_rng_state(state)
        if cuda is not None and cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, cuda)
