"""How far a run has been copied to MLflow, on disk: ``tracking.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from medfed.durable import write_atomically

FEDERATION = ""
"""The key of the federation's own run among the runs of its clients."""


@dataclass
class Cursor:
    """Where copying stands.  MLflow itself is the truth; this saves asking it.

    Args:
        path: the file.
        uri: the store all this is about, without password.
        round: all rounds up to this one are there.
        pending: the last round of a push that was begun and not confirmed; 0 for none.
        runs: MLflow run ids by client, the federation's own under ``""``.
        described: whether parameters, tags and data set are there as they are now.
        wanted: how the run ended (``status``, ``time`` in ms, ``artifacts`` relative to the run), or None.
        artifacts: digest by artifact of what was uploaded.
        closed: the status that was set last, or None while the run is open.
    """

    path: Path
    uri: str = ""
    round: int = 0
    pending: int = 0
    runs: dict[str, str] = field(default_factory=dict)
    described: bool = False
    wanted: dict[str, Any] | None = None
    artifacts: dict[str, str] = field(default_factory=dict)
    closed: str | None = None

    @classmethod
    def load(cls, path: Path) -> Cursor:
        """Reads the file; a missing or damaged one gives a fresh cursor, which only costs questions to MLflow."""
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, **stored)
        except (OSError, ValueError, TypeError):
            return cls(path)

    def save(self) -> None:
        """Writes the file, atomically."""
        values = asdict(self)
        del values["path"]
        write_atomically(self.path, json.dumps(values, indent=1, ensure_ascii=False).encode())

    def point_to(self, uri: str) -> None:
        """Starts over for another store, where nothing of this run is known to be; how the run ended is kept."""
        if self.uri != uri:
            fresh = Cursor(self.path, uri, wanted=self.wanted)
            self.__dict__.update(fresh.__dict__)

    def confirm(self, round_: int) -> None:
        """All rounds up to this one are there."""
        self.round, self.pending = max(self.round, round_), 0
        self.save()
