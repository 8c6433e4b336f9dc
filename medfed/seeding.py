"""One random generator for each (seed, round, client, purpose).

No module of medfed draws from a global generator.  Who needs randomness names what it is for, so that the
order in which clients are visited, or the number of workers, cannot change a result.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive_seed(*parts: int | str) -> int:
    """Derives a 63-bit seed from names and numbers.

    Args:
        *parts: what the randomness is for, e.g. ``(seed, "augment", round, client)``.  The integer ``1`` and the
            string ``"1"`` give different seeds.

    Returns:
        The seed, the same on every machine and for every Python hash seed.
    """
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def numpy_generator(*parts: int | str) -> np.random.Generator:
    """A NumPy generator for one purpose; see :func:`derive_seed`."""
    return np.random.default_rng(derive_seed(*parts))


def torch_generator(*parts: int | str) -> torch.Generator:
    """A torch CPU generator for one purpose; see :func:`derive_seed`."""
    import torch

    return torch.Generator().manual_seed(derive_seed(*parts))
