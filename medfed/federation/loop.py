"""The round loop around a method's program: evaluate, record, checkpoint, tell.

The order matters for a restart: a round is appended to the record log, then the checkpoint is written, and only then
does anybody else (MLflow, the progress display) hear of it. After a kill the log is cut back to the checkpoint and the
lost round is run again, with the same result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from medfed.federation.method import Method, MethodSettings
from medfed.federation.server import RoundReport, Server

Record = dict[str, Any]


class Listener(Protocol):
    """Hears of every finished round."""

    def __call__(self, record: Record, server: Server) -> None:
        """Called after the round's checkpoint has been written."""


def run_rounds(
    method: Method,
    settings: MethodSettings,
    server: Server,
    *,
    evaluate: Callable[[Server], Mapping[str, Any]],
    append: Callable[[Record], object],
    listeners: Iterable[Listener] = (),
) -> None:
    """Runs a method's program to its last round.

    Args:
        method: the method.
        settings: its validated settings.
        server: the server, with the state to begin from.
        evaluate: measures the new global model; gives ``evaluation``, ``undefined`` and ``warnings`` of the record,
            or nothing in rounds without an evaluation.
        append: writes one record durably.
        listeners: told after the checkpoint.
    """
    started = time.perf_counter()
    for report in method.program(server, settings):
        trained = time.perf_counter()
        measured = dict(evaluate(server))
        now = time.perf_counter()
        record = round_record(report, measured, total=now - started, evaluation=now - trained)
        append(record)
        server.state.round = report.round
        server.save()
        for listener in listeners:
            listener(record, server)
        started = time.perf_counter()


def round_record(report: RoundReport, measured: Mapping[str, Any], *, total: float, evaluation: float) -> Record:
    """The record of a round as written to disk; see docs/architecture.md."""
    return {
        "round": report.round,
        "seconds": {"total": total, "clients": report.seconds, "evaluation": evaluation},
        "asked": list(report.asked),
        "admitted": list(report.admitted),
        "refused": [{"client": r.client, "reason": r.reason} for r in report.refused],
        "bytes": {"down": report.traffic.down, "up": report.traffic.up},
        "server": dict(report.server),
        "clients": {name: dict(values) for name, values in sorted(report.clients.items())},
        "evaluation": dict(measured.get("evaluation", {})),
        "undefined": dict(measured.get("undefined", {})),
        "warnings": [*report.warnings, *measured.get("warnings", [])],
    }
