"""What a grid shows while it goes on: a live table with the time left, plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from medfed.grid import DONE, Event, standing
from medfed.grid_file import Cell, Grid

if TYPE_CHECKING:
    from rich.console import RenderableType


class GridScreen:
    """The state of all cells, as told by events.

    Args:
        grid: the grid.
        slots: cells that run at a time.
        console: where to write; the terminal by default.
        clock: seconds that only grow.
    """

    def __init__(
        self, grid: Grid, slots: int = 1, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self.grid, self.slots = grid, slots
        self.console = console or Console(highlight=False)
        self.clock = clock
        found = [standing(cell) for cell in grid.cells]
        self.state = ["done" if what == DONE else "waiting" for what, _ in found]
        self.rounds = [rounds for _, rounds in found]
        self.failures: dict[int, str] = {}
        self._since: dict[int, float] = {}
        self._began: dict[int, float] = {}
        self._pace: dict[str, tuple[int, float]] = {}
        self._live = Live(get_renderable=self.table, console=self.console, refresh_per_second=1, transient=True)

    def __enter__(self) -> GridScreen:
        done = self.state.count("done")
        self.say(f"{len(self.state)} cells, {done} done already; {self.grid.folder}")
        if self.console.is_terminal and done < len(self.state):
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """One line of text."""
        self.console.print(text, markup=False, soft_wrap=True)

    def tell(self, event: Event) -> None:
        """Takes in an event; a cell that has come to its end is one line."""
        index, cell, now = event.cell, self.grid.cells[event.cell], self.clock()
        if event.kind == "start":
            self.state[index] = "running"
            self.rounds[index] = event.round
            self._began[index] = self._since[index] = now
            if not self.console.is_terminal:
                self.say(f"{cell.name}: " + (f"going on after round {event.round}" if event.round else "starting"))
        elif event.kind == "round":
            done, seconds = self._pace.get(cell.method, (0, 0.0))
            self._pace[cell.method] = (done + 1, seconds + now - self._since[index])
            self._since[index] = now
            self.rounds[index] = event.round
        else:
            self.state[index] = event.kind
            if event.kind == "failed":
                self.failures[index] = event.reason
            ended = sum(s in ("done", "failed") for s in self.state)
            took = span(now - self._began.get(index, now))
            how = f"done in {took}" if event.kind == "done" else f"FAILED: {event.reason}"
            self.say(f"[{ended}/{len(self.state)}] {cell.name}: {how}{self.outlook()}")

    def outlook(self) -> str:
        """How long the rest takes, where that can be told."""
        left = time_left(self.grid.cells, self.state, self.rounds, self._pace, self.slots)
        return f"; about {span(left)} left" if left else ""

    def table(self) -> RenderableType:
        """A row a condition, and below it the cells that are running."""
        table = Table(title=f"{self.grid.file.name}{self.outlook()}", title_justify="left")
        table.add_column("condition")
        for name in ("done", "running", "waiting", "failed"):
            table.add_column(name, justify="right")
        counts: dict[str, Counter[str]] = {}
        for cell, state in zip(self.grid.cells, self.state):
            counts.setdefault(cell.condition, Counter())[state] += 1
        for condition, count in counts.items():
            numbers = (str(count[name] or "") for name in ("done", "running", "waiting", "failed"))
            table.add_row(Text(condition or "-"), *numbers)
        running = [
            Text(f"{cell.name}: round {self.rounds[i]} of {cell.experiment.rounds}")
            for i, cell in enumerate(self.grid.cells)
            if self.state[i] == "running"
        ]
        return Group(table, *running)

    def finish(self) -> None:
        """How the grid stands, and each failure with its reason."""
        done = self.state.count("done")
        self.say(f"{done} of {len(self.state)} cells done, {len(self.failures)} failed")
        for index, reason in self.failures.items():
            self.say(f"  {self.grid.cells[index].name}: {reason}")


def plan(grid: Grid, console: Console) -> None:
    """Lists the cells and what of them exists."""
    table = Table()
    for name in ("condition", "method", "seed", "rounds", "state", "folder"):
        table.add_column(name, overflow="fold")
    counts: Counter[str] = Counter()
    for cell in grid.cells:
        state, rounds = standing(cell)
        counts[state] += 1
        total = cell.experiment.rounds
        words = (cell.condition or "-", cell.method, str(cell.seed), f"{rounds}/{total}", state, cell.folder.name)
        table.add_row(*map(Text, words))
    console.print(table)
    console.print(", ".join(f"{n} {state}" for state, n in counts.items()), markup=False)


def time_left(
    cells: Sequence[Cell],
    state: Sequence[str],
    rounds: Sequence[int],
    pace: Mapping[str, tuple[int, float]],
    slots: int,
) -> float | None:
    """Seconds until all cells are done, by the rounds seen so far.

    Args:
        cells: the cells.
        state: of each.
        rounds: rounds done of each.
        pace: rounds and seconds seen of each method; one not seen yet counts as the mean of those seen.
        slots: cells at a time.

    Returns:
        The seconds; None before the first round.
    """
    seen, seconds = (sum(part) for part in zip(*pace.values())) if pace else (0, 0.0)
    if not seen:
        return None
    left, open_cells = 0.0, 0
    for cell, how, done in zip(cells, state, rounds):
        if how in ("running", "waiting"):
            own, took = pace.get(cell.method, (seen, seconds))
            left += max(0, cell.experiment.rounds - done) * took / own
            open_cells += 1
    return left / max(1, min(slots, open_cells))


def span(seconds: float) -> str:
    """A span of time for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
