"""Grid files of the tiny experiment, and what happens when they run."""

from __future__ import annotations

from pathlib import Path

import yaml

from medfed.grid import Event, run_grid


def grid_file(tmp_path: Path, experiment: dict, **content) -> Path:
    path = tmp_path / "grid.yaml"
    whole = {
        "name": "g",
        "base": experiment,
        "output": experiment["output"],
        "methods": ["fedavg", "fedism"],
        **content,
    }
    path.write_text(yaml.safe_dump(whole))
    return path


def ran(grid, **how) -> list[Event]:
    events: list[Event] = []
    run_grid(grid, events.append, **how)
    return events
