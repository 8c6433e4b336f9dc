"""Local training that methods against label noise share: by the client's status.

A client judged clean trains on its observed labels; any other one also follows the received model as its teacher, on
corrected labels where it has them (FedNoRo, FedSIR, OCT-FedSIR).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field

from medfed.federation.client import Client
from medfed.federation.messages import Message
from medfed.federation.method import MethodSettings

if TYPE_CHECKING:
    from medfed.training.local import FitResult
    from medfed.training.objectives import ClassificationObjective


class NoisyTraining(MethodSettings):
    """Settings of local training that methods against label noise share.

    Args:
        local_epochs: passes over a client's data in a round.
        learning_rate: None takes the bundle's.
        logit_adjustment: logits shifted by the log of the client's class frequencies, in training.
    """

    local_epochs: int = Field(5, ge=1)
    learning_rate: float | None = Field(None, gt=0)
    logit_adjustment: bool = False

    def request(self) -> dict[str, Any]:
        """The plain values of a request to train."""
        return {
            "epochs": self.local_epochs,
            "learning_rate": self.learning_rate,
            "logit_adjustment": self.logit_adjustment,
        }


def train_noise_aware(client: Client, message: Message) -> Message:
    """Client task: trains the received model by the client's status.

    Clean: (logit-adjusted) cross-entropy on the observed labels. Otherwise, with y* the client's corrected labels
    (``labels`` of its memory) or, before any correction, the observed ones::

        weight * KL(p_T || p_S) + (1 - weight) * CE(z + m, y*)

    with the received model as teacher; see :class:`~medfed.training.objectives.DistillationObjective`. The offsets m
    keep the prior of the observed labels.

    Args:
        client: the client.
        message: group ``model``; values ``status``, ``weight``, ``temperature``, ``soften_student``, ``epochs``,
            ``learning_rate`` (None for the bundle's) and ``logit_adjustment``. Optional values: ``least_count`` (1):
            classes count at least so many samples in the prior, or, at 0, classes without any are left out of the KL,
            as released with FedNoRo; ``distil_on`` (``all``): ``disagree`` lets only those samples follow the
            teacher for which the last relabelling found no agreed class (FedSIR); ``salt``: radius, rule and alpha of
            sharpness-aware steps on the whole objective.

    Returns:
        Group ``model``; values ``samples``, ``loss``, ``steps`` and ``skipped``.
    """
    from medfed.training.objectives import DistillationObjective
    from medfed.training.steps import PlainStep, SharpnessAwareStep

    values, received = message.values, message.group("model")
    client.load(received)
    least = values.get("least_count", 1)
    objective: Any = prior_adjusted(client, values["logit_adjustment"], least)
    data = client.data
    if values["status"] != "clean":
        if "labels" in client.memory:
            data = data.with_labels(client.memory["labels"])
        objective = DistillationObjective(
            objective,
            received,
            weight=values["weight"],
            temperature=values["temperature"],
            soften_student=values["soften_student"],
            mask=_disagreed(client) if values.get("distil_on", "all") == "disagree" else None,
            observed=None if least else client.class_counts() > 0,
        )
    salt = values.get("salt")
    result = client.fit(
        data,
        objective=objective,
        step=SharpnessAwareStep(**salt) if salt else PlainStep(),
        epochs=values["epochs"],
        learning_rate=values["learning_rate"],
    )
    return trained(client, result)


def trained(client: Client, result: FitResult, **values: Any) -> Message:
    """The reply after local training: the model, and the values ``samples``, ``loss``, ``steps``, ``skipped``.

    Args:
        client: the client.
        result: of the training.
        **values: further ones.
    """
    told = {"samples": client.num_samples, "loss": result.loss, "steps": result.steps, "skipped": result.skipped}
    return Message.of({**told, **values}, model=client.model())


def correct_labels(client: Client, labels: torch.Tensor) -> int:
    """Keeps labels of the client's own making, for its later training, for :mod:`medfed.judging` and its own audit.

    Args:
        client: the client.
        labels: what it trains on now, int64 ``[N]``.

    Returns:
        How many of them differ from the observed labels.
    """
    changed = labels != client.data.labels
    client.memory["labels"] = labels
    client.memory["audit_rounds"] = [client.round]
    client.memory["audit_proposals"] = torch.where(changed, labels, -1)[None]
    return int(changed.sum())


def prior_adjusted(client: Client, logit_adjustment: bool = True, least_count: float = 1) -> ClassificationObjective:
    """Cross-entropy with the prior of the client's observed labels.

    Args:
        client: the client.
        logit_adjustment: False for plain cross-entropy.
        least_count: samples that a class counts at least, so that one that the client lacks keeps a prior of the
            size 1/N. At 0 it gets the floor of :func:`~medfed.training.losses.logit_adjustment_offsets`.
    """
    from medfed.training.losses import logit_adjustment_offsets
    from medfed.training.objectives import ClassificationObjective

    if not logit_adjustment:
        return ClassificationObjective("multiclass")
    return ClassificationObjective("multiclass", logit_adjustment_offsets(client.class_counts().clamp_min(least_count)))


def _disagreed(client: Client) -> torch.Tensor | None:
    """``[N]``: samples without an agreed class at the last relabelling; None where there was none.

    Proposals alone are none: a client may get them for its own list without being corrected.
    """
    if "labels" not in client.memory or "audit_proposals" not in client.memory:
        return None
    return client.memory["audit_proposals"][-1] < 0


def ramp_up(round: int, begin: int, end: int) -> float:
    """Gaussian ramp-up ``exp(-5 (1 - (clip(t, b, e) - b) / (e - b))^2)`` (FedNoRo; FedSIR), 1 from round e on.

    Args:
        round: the round, from 1; t counts from 0, as published.
        begin: b.
        end: e; not after b means no ramp, 1 always.
    """
    if end <= begin:
        return 1.0
    passed = (min(max(round - 1, begin), end) - begin) / (end - begin)
    return math.exp(-5.0 * (1.0 - passed) ** 2)


def short_ramp(rounds: int, begin: int, end: int) -> list[str]:
    """A caution that the ramp of :func:`ramp_up` goes beyond the last round; none where it does not.

    Args:
        rounds: of the run.
        begin: b.
        end: e.
    """
    reached = ramp_up(rounds, begin, end)
    if reached == 1.0:
        return []
    return [
        f"the teacher's weight rises until round {end} (method.ramp_end, counted from 0) and reaches "
        f"{100 * reached:.2g} % in the last of {rounds} rounds"
    ]
