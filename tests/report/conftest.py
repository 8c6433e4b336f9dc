"""The factory of run directories as a fixture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_runs import write_run


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """``make(folder, records, **meta)`` writes a run directory and returns it."""
    return lambda folder, records, **meta: write_run(tmp_path / folder, records, **meta)
