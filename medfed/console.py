"""What a run shows on the terminal while it goes on, and at its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from medfed.federation.loop import Record
    from medfed.federation.server import Server


class Screen:
    """A progress bar with one line a round above it; plain lines where the output is no terminal.

    Args:
        console: where to write; the terminal by default.
    """

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._warned: set[str] = set()
        self._explained = False

    def __enter__(self) -> Screen:
        import medfed.report.summary  # noqa: F401  # now rather than in the first round, where an interrupt may strike

        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        for task in self._tasks.values():
            self._bar.remove_task(task)
        self._tasks.clear()
        self._warned.clear()
        self._explained = False

    def say(self, text: str) -> None:
        """One line of text."""
        self.console.print(text, markup=False, soft_wrap=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """Moves the bar of ``what``."""
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done, total=total, visible=done < total)

    def round(self, record: Record, server: Server) -> None:
        """One line for a finished round; a warning is shown the first time it comes up."""
        from medfed.report.summary import legend, round_line

        self.progress("Rounds", record["round"], server.num_rounds)
        if not self._explained:
            self.say(legend(record))
            self._explained = True
        self.say(round_line(record, server.num_rounds))
        for refusal in record["refused"]:
            self._warn(f"{refusal['client']} left out: {refusal['reason']}", record["round"])
        for warning in record["warnings"]:
            self._warn(warning, record["round"])

    def _warn(self, text: str, round: int) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self.console.print(f"  ! round {round}: {text}", style="yellow", markup=False, soft_wrap=True)

    def finish(self, runs: Sequence[Path]) -> None:
        """The table of a finished run, or the paired comparison of several, and where to look next."""
        from medfed.report.compare import compare
        from medfed.report.runs import load_run
        from medfed.report.summary import summary_table
        from medfed.tracking.settings import open_hint, resolve_uri

        loaded: list[Any] = [load_run(path) for path in runs]
        if len(loaded) == 1:
            self.console.print(summary_table(loaded[0]))
        else:
            compare(loaded, allow_unpaired=True).render(self.console)
        for path in runs:
            self.say(f"Report: {path / 'report.html'}")
        from medfed.config import validate
        from medfed.yaml_file import read_yaml

        tracking = validate(read_yaml(runs[-1] / "experiment.yaml"), str(runs[-1])).tracking
        if tracking.enabled:
            self.say(f"MLflow: {open_hint(resolve_uri(tracking, runs[-1].parent))}")
