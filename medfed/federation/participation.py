"""Who is asked in a round, and who drops out in a simulation."""

from __future__ import annotations

from collections.abc import Sequence

from medfed.seeding import numpy_generator


def sample_clients(clients: Sequence[str], fraction: float, seed: int, round: int) -> tuple[str, ...]:
    """Draws the clients of one round, at least one, without replacement, in sorted order.

    Args:
        clients: all clients.
        fraction: share asked; 1 asks all.
        seed: seed of the run.
        round: current round.
    """
    ordered = sorted(clients)
    if fraction >= 1.0:
        return tuple(ordered)
    count = max(1, round_half_up(fraction * len(ordered)))
    drawn = numpy_generator(seed, "participation", round).choice(len(ordered), size=count, replace=False)
    return tuple(ordered[i] for i in sorted(drawn))


def dropped(client: str, probability: float, seed: int, round: int) -> bool:
    """Whether a simulated client stays silent in a round; it then answers no request of that round."""
    return probability > 0 and numpy_generator(seed, "dropout", round, client).random() < probability


def round_half_up(value: float) -> int:
    """Rounds halves up: 2.5 gives 3."""
    return int(value + 0.5)
