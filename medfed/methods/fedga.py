"""FedGA: clients on which the aggregated model is worse than their own weigh more (generalisation adjustment).

Zhang, Xu, Yao, Zhang, Wang. Federated Domain Generalization with Generalization Adjustment. CVPR 2023. After the models
of round t = 1..T are aggregated, each client measures the result and its own trained model on its validation data::

    gap_k = F_k(theta_{t+1}) - F_k(theta_(t,k))
    w_k  <- w_k + d_t / K * (gap_k - mean gap) / max_j |gap_j - mean gap|,    d_t = d (1 - t/T)

clipped to 0..1 and scaled to sum to one; w_k = 1/K at first. There is no factor N_k.

The official code does not take the mean off (``centred: false``) and begins with d_t = d. ``form: as_released`` is what
FedISM's code ran under this name and what made its tables: d = 0.05, and the gap on the training data (``validation:
0``), which that code measures before the next round instead of after this one. (It also scales weights before it clips
them, which differs by little, and only once one of them has come to 0.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from medfed.aggregation.fair import raised_by_gap
from medfed.aggregation.weights import normalised
from medfed.federation.client import Client
from medfed.federation.messages import Message
from medfed.federation.method import Method
from medfed.federation.server import RoundReport, Server
from medfed.methods.local_training import fit_and_reply, mean_loss
from medfed.methods.validation import ValidatedTraining, parts_of, score

FORMS: dict[str, dict[str, Any]] = {"published": {}, "as_released": {"step": 0.05, "validation": 0.0}}


class FedGASettings(ValidatedTraining):
    """Settings of FedGA.

    Args:
        form: ``published``, or the defaults of what FedISM's code ran (``as_released``). A setting that is given holds
            in both.
        step: d, the largest change of a weight relative to 1/K; it falls linearly to 0 over the rounds. 0.2 is the
            default of the official code.
        metric: what is compared: the ``loss``, ``accuracy`` or ``balanced_accuracy`` (own less aggregated, so that a
            positive gap is a loss of accuracy).
        centred: whether the mean gap is taken off first.
    """

    form: Literal["published", "as_released"] = "published"
    step: float = Field(0.2, ge=0, lt=1)
    metric: Literal["loss", "accuracy", "balanced_accuracy"] = "loss"
    centred: bool = True

    @model_validator(mode="before")
    @classmethod
    def _form(cls, given: Any) -> Any:
        return {**FORMS.get(str(given.get("form", "")), {}), **given} if isinstance(given, Mapping) else given

    @property
    def measure(self) -> dict[str, Any]:
        """What is measured, as plain values."""
        return {"validation": self.validation, "metric": self.metric}

    def request(self, round: int, rounds: int) -> dict[str, Any]:
        """The plain values of a ``train`` request in one round."""
        return {**super().request(round, rounds), **self.measure}


def measured(client: Client, values: Mapping[str, Any]) -> float:
    """Badness of the resident network on the client's validation data: its loss, or accuracy with a minus sign."""
    data = parts_of(client, values["validation"]).validation
    return mean_loss(client, data) if values["metric"] == "loss" else -score(client, data, values["metric"])


def train(client: Client, message: Message) -> Message:
    """Client task: trains the received model and measures the result on the validation data.

    Args:
        client: the client.
        message: group ``model``; values of :meth:`FedGASettings.request`.

    Returns:
        As :func:`medfed.methods.local_training.train`, with ``own_validation``, the loss after training (or accuracy
        with a minus sign).
    """
    client.load(message.group("model"))
    reply = fit_and_reply(client, message, data=parts_of(client, message.values["validation"]).training)
    return Message(reply.tensors, {**reply.values, "own_validation": measured(client, message.values)})


def validate(client: Client, message: Message) -> Message:
    """Client task: measures the aggregated model on the validation data.

    Args:
        client: the client.
        message: group ``model``; values ``validation`` and ``metric``.

    Returns:
        Value ``aggregated_validation``, as ``own_validation`` of :func:`train`.
    """
    client.load(message.group("model"))
    return Message.of({"aggregated_validation": measured(client, message.values)})


def program(server: Server, settings: FedGASettings) -> Iterator[RoundReport]:
    """theta_{t+1} = sum_k w_k theta_(t,k); then weights follow the gaps."""
    for round in server.rounds():
        kept = server.notes["weights"].values if "weights" in server.notes else {}
        weights = {c: kept.get(c, 1 / len(server.clients)) for c in server.clients}
        request = Message.of(settings.request(round, server.num_rounds), model=server.model)
        numbers = ("samples", "own_validation")
        replies = server.ask("train", request, numbers=numbers, mean="model", weight=weights)
        if not replies:
            yield server.report(replies)
            continue
        server.model = replies.mean["model"]
        server.report(replies, weight=normalised(weights, replies.clients))
        step = settings.step * (1 - round / server.num_rounds) / len(server.clients)
        gaps: dict[str, float] = {}
        if step > 0:  # not in the last round, whose gaps nobody would use
            question = Message.of(settings.measure, model=server.model)
            told = server.ask("validate", question, clients=replies.clients, numbers=("aggregated_validation",))
            own = replies.value("own_validation")
            gaps = {c: value - own[c] for c, value in told.value("aggregated_validation").items()}
            server.notes["weights"] = Message(values=raised_by_gap(weights, gaps, step, settings.centred))
            server.report(told, gap=gaps)
        yield server.report(replies, server={"step": step})


METHOD = Method(
    name="fedga",
    title="Weights clients by what they lose when models are aggregated (fairness)",
    paper="Zhang et al., CVPR 2023",
    program=program,
    tasks={"train": train, "validate": validate},
    settings=FedGASettings,
    sends="sample count, two losses on its validation data",
    needs="validation data",
)
