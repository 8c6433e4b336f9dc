"""FedCE: clients weigh by their contribution: how new their update is, and how much the model needs it.

Jiang, Roth, Li, Yang, Zhao, Nath, Xu, Dou, Xu. Fair Federated Medical Image Segmentation via Client Contribution
Estimation. CVPR 2023. In round t, with updates ``u_k = theta_(t,k) - theta_t`` over trainable parameters::

    D_k = 1 - mean over rounds of cos(u_k, sum_{j != k} c_j u_j)
    m_k = (theta_t - c_k theta_(t-1,k)) / (1 - c_k)              the model without client k, formed at the client
    P_k = 1 - mean over rounds of score(m_k) on the client's validation data;  the first round counts as a score of 0
    c_k in proportion to D_k / sum D + P_k / sum P               (``mode: plus``; ``times`` multiplies the two)
    theta_{t+1} = sum_k c_k theta_(t,k)

The score was Dice; for classification it is balanced accuracy, as in FedISM's code. Clients keep their previous
trained parameters. The server needs all models of a round at once.

``form: as_released`` is what FedISM's code ran under this name and what made its tables: ``times``, no floor, the mean
of c_k over all rounds so far instead of c_k, and the score on the training data (``validation: 0``).

Buffers of m_k are those of theta_t: the arithmetic could make variances of BatchNorm negative.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from medfed.aggregation.averaging import weighted_mean
from medfed.aggregation.contribution import Mode, coefficients, gram, leave_one_out_cosines, minus_model
from medfed.aggregation.weights import normalised
from medfed.federation.client import Client
from medfed.federation.messages import Message, Replies
from medfed.federation.method import Method
from medfed.federation.server import RoundReport, Server
from medfed.methods.local_training import fit_and_reply
from medfed.methods.validation import Score, ValidatedTraining, parts_of, score

FORMS: dict[str, dict[str, Any]] = {
    "published": {},
    "as_released": {"mode": "times", "floor": 0.0, "averaged": True, "validation": 0.0},
}
KEPT = "previous/"


class FedCESettings(ValidatedTraining):
    """Settings of FedCE.

    Args:
        form: ``published``, or the defaults of what FedISM's code ran (``as_released``): see the top of this page. A
            setting that is given holds in both.
        mode: how novelty and need are put together.
        floor: least share of novelty, of need and of both; 1e-6 is that of NVIDIA FLARE.
        averaged: whether the mean of a client's coefficients over all rounds so far is used instead of the newest.
        metric: score of the model without the client.
    """

    form: Literal["published", "as_released"] = "published"
    mode: Mode = "plus"
    floor: float = Field(1e-6, ge=0, lt=1)
    averaged: bool = False
    metric: Score = "balanced_accuracy"

    @model_validator(mode="before")
    @classmethod
    def _form(cls, given: Any) -> Any:
        return {**FORMS.get(str(given.get("form", "")), {}), **given} if isinstance(given, Mapping) else given

    def request(self, round: int, rounds: int) -> dict[str, Any]:
        """The plain values of a ``train`` request in one round."""
        return {**super().request(round, rounds), "validation": self.validation, "metric": self.metric}


def train(client: Client, message: Message) -> Message:
    """Client task: scores the received model without the client's own part, then trains the received model.

    Args:
        client: the client.
        message: group ``model``; values of :meth:`FedCESettings.request`, ``since``: the round whose trained models
            the received one is made of, and ``coefficient``: the client's weight there (None: it has none).

    Returns:
        As :func:`medfed.methods.local_training.train`, with ``validation_samples``, ``trainable`` (names of the
        parameters) and, where the client has a part in the received model and is not alone, ``minus_score``.
    """
    received, values, memory = message.group("model"), message.values, client.memory
    parts = parts_of(client, values["validation"])
    told: dict[str, Any] = {"validation_samples": len(parts.validation), "trainable": list(client.trainer.trainable)}
    coefficient = values.get("coefficient")
    if coefficient is not None and coefficient < 1 and memory.get("previous_round") == values["since"]:
        own = {name.removeprefix(KEPT): memory[name] for name in memory if name.startswith(KEPT)}
        client.load(minus_model(received, own, coefficient))
        measured = score(client, parts.validation, values["metric"])
        told["minus_score"] = measured if math.isfinite(measured) else 0.0
    client.load(received)
    reply = fit_and_reply(client, message, values=told, data=parts.training)
    model = reply.group("model")
    for name in client.trainer.trainable:
        memory[KEPT + name] = model[name]
    memory["previous_round"] = client.round
    return reply


def program(server: Server, settings: FedCESettings) -> Iterator[RoundReport]:
    """theta_{t+1} = sum_k c_k theta_(t,k) with c from contributions."""
    for round in server.rounds():
        past = server.notes["contribution"].values if "contribution" in server.notes else {}
        last, since = past.get("last", {}), past.get("round", 0)
        each = {c: {"coefficient": last.get(c), "since": since} for c in server.participants()}
        request = Message.of(settings.request(round, server.num_rounds), model=server.model)
        replies = server.ask("train", request, each=each, expect={"model": server.model}, numbers=("samples",))
        columns: dict[str, dict[str, float]] = {}
        if replies:
            history = remembered(past.get("history", {}), replies, cosines(server, replies, past.get("weights", {})))
            columns = contributions(history, replies, settings)
            weights = columns["weight"]
            states = replies.states("model")
            server.model = weighted_mean(list(states.values()), [weights[c] for c in states])
            kept = {"weights": {**past.get("weights", {}), **weights}, "last": weights}
            server.notes["contribution"] = Message(values={**kept, "round": round, "history": history})
        yield server.report(replies, **columns)


def cosines(server: Server, replies: Replies, weights: Mapping[str, float]) -> dict[str, float]:
    """Cosine of each client's update with that of the others, by the coefficients known before this round."""
    states, model = replies.states("model"), server.model
    lists = [set(r.values.get("trainable") or ()) for r in replies]
    names = [n for n, t in model.items() if t.is_floating_point() and all(n in known for known in lists)]
    prior = torch.tensor([weights.get(c, 1 / len(server.clients)) for c in states], dtype=torch.float64)
    return dict(zip(states, leave_one_out_cosines(gram(states, model, names), prior).tolist()))


def remembered(past: Mapping[str, Any], replies: Replies, cosines: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Sums over the rounds of each client, with this round. A client's first round has a score of 0."""
    history = {c: dict(sums) for c, sums in past.items()}
    for reply in replies:
        sums = history.setdefault(reply.client, dict.fromkeys(("cosine", "rounds", "score", "scored", "weight"), 0.0))
        sums["cosine"] += cosines[reply.client]
        sums["rounds"] += 1
        told = reply.values.get("minus_score")
        if isinstance(told, (int, float)):
            sums["score"] += min(max(float(told), 0.0), 1.0)
        # Later rounds without a score (the client was away in the one before) tell nothing.
        if isinstance(told, (int, float)) or sums["rounds"] == 1:
            sums["scored"] += 1
    return history


def contributions(
    history: dict[str, dict[str, float]], replies: Replies, settings: FedCESettings
) -> dict[str, dict[str, float]]:
    """Novelty, need and weight of this round's clients; adds the coefficients to their history."""
    novelty = {c: 1.0 - history[c]["cosine"] / history[c]["rounds"] for c in replies.clients}
    need = {c: 1.0 - history[c]["score"] / history[c]["scored"] for c in replies.clients}
    weights = coefficients(novelty, need, settings.mode, settings.floor)
    for client, weight in weights.items():
        history[client]["weight"] += weight
    if settings.averaged:
        weights = normalised({c: history[c]["weight"] / history[c]["rounds"] for c in weights}, list(weights))
    return {"novelty": novelty, "need": need, "weight": weights}


METHOD = Method(
    name="fedce",
    title="Weights clients by their contribution: novelty of the update, need of the model (fairness)",
    paper="Jiang et al., CVPR 2023",
    program=program,
    tasks={"train": train},
    settings=FedCESettings,
    sends="sample count, score of the model without it",
    keeps="its previous trained parameters",
    needs="two clients; all of them every round; validation data",
    together=2,
)
