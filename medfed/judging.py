"""How good a method's judgement of labels was: assembly of what it said, what clients train on, and the truth.

Truth is read here and by no method (DESIGN law 2). In a federation between hospitals there is no truth and none of
this.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from medfed.data.condition import Condition
from medfed.federation.memory import client_folder, newest_memory, newest_version
from medfed.reliability.quality import Numbers, identification_quality, pooled, relabelling_quality, undefined

if TYPE_CHECKING:
    from medfed.federation.server import Server

VERDICT, LABELS = "verdict", "labels"


class AnnotationJudge:
    """Measures, after a round, who was judged noisy and which labels were corrected.

    Args:
        condition: who holds what, with the truth.
        folder: the folder of the clients' memories.
    """

    def __init__(self, condition: Condition, folder: Path):
        self.condition, self.folder = condition, folder
        self._known: dict[str, tuple[tuple[int, int] | None, Numbers | None]] = {}

    def __call__(self, server: Server) -> dict[str, Any]:
        """The parts of the round record that there is something to say in; see :meth:`judge`."""
        note = server.notes.get(VERDICT)
        return self.judge(None if note is None else note.values.get("status"), server.state.step)

    def judge(self, status: Mapping[str, str] | None, step: int) -> dict[str, Any]:
        """Measures a verdict and the labels that clients train on.

        Args:
            status: by client ``clean``, ``noisy`` or ``undetermined``; None before there is a verdict.
            step: the last request of the server: what clients remember of later ones (of a run that was killed and
                goes on from an earlier checkpoint) is not looked at.

        Returns:
            Empty, or ``evaluation``, ``undefined`` and ``warnings`` of a round record.
            ``evaluation.identification`` where there is a verdict: see
            :func:`~medfed.reliability.quality.identification_quality`; ``clients`` says for each whether it is
            ``noisy`` in truth and whether the verdict is ``correct``.
            ``evaluation.relabelling`` as soon as a client trains on labels of its own making: see
            :func:`~medfed.reliability.quality.relabelling_quality`, pooled over these clients and all others
            that are judged noisy, and for each of them under ``clients``.
        """
        evaluation: dict[str, Any] = {}
        warnings: list[str] = []
        noisy = self.condition.mislabelled
        if status is not None:
            by_client = {
                name: {"noisy": name in noisy, "correct": (given == "clean") == (name not in noisy)}
                for name, given in sorted(status.items())
            }
            evaluation["identification"] = {**identification_quality(status, noisy), "clients": by_client}
        if self.condition.task.kind == "multiclass":
            corrected, unfit = self._corrected(step)
            warnings = [f"{name}: its training labels do not fit its samples; they are not measured" for name in unfit]
            if corrected:
                selected = [name for name, given in (status or {}).items() if given == "noisy"]
                parts = {**{name: self._quality(name) for name in selected}, **corrected}
                evaluation["relabelling"] = {**pooled(parts.values()), "clients": dict(sorted(parts.items()))}
        if not evaluation and not warnings:
            return {}
        reasons = {f"{part}/{k}": why for part, values in evaluation.items() for k, why in undefined(values).items()}
        return {"evaluation": evaluation, "undefined": reasons, "warnings": warnings}

    def _corrected(self, step: int) -> tuple[dict[str, Numbers], list[str]]:
        """The quality of the labels of every client that remembers some, and clients whose labels cannot be theirs."""
        found: dict[str, Numbers] = {}
        unfit = []
        for client in self.condition.clients:
            folder = self.folder / client_folder(client)
            version = newest_version(folder, step)
            if client not in self._known or self._known[client][0] != version:
                labels = newest_memory(folder, step, [LABELS]).get(LABELS) if version else None
                self._known[client] = (version, None if labels is None else self._quality(client, labels))
            quality = self._known[client][1]
            if quality is not None:
                if quality:
                    found[client] = quality
                else:
                    unfit.append(client)
        return found, unfit

    def _quality(self, client: str, current: Any = None) -> Numbers:
        """The quality of a client's labels, those observed unless given; empty where these cannot be its labels."""
        observed = self.condition.view(client).labels
        if current is None:
            current = torch.tensor(observed)
        if not isinstance(current, torch.Tensor) or current.is_floating_point() or current.shape != observed.shape:
            return {}
        return relabelling_quality(self.condition.truth.of_client(client)[1], observed, current.numpy())


def joined(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Parts of one round record: ``evaluation`` and ``undefined`` merged by key, ``warnings`` one after another."""
    whole: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            whole[key] = [*whole.get(key, []), *value] if isinstance(value, list) else {**whole.get(key, {}), **value}
    return whole
