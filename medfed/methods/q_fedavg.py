"""q-FedAvg: clients with a high loss weigh more, the more so the larger q.

Li, Sanjabi, Beirami, Smith. Fair Resource Allocation in Federated Learning. ICLR 2020, Algorithm 2.

Published: local SGD with learning rate eta and L = 1/eta; with F_k the loss of the received model w on the client's
training set, ``w' = w - sum F_k^q L (w - w_k) / sum h_k`` with ``h_k = q F_k^(q-1) L^2 ||w - w_k||^2 + L F_k^q``.
That is a share of the way from w to the mean of the w_k with weights F_k^q, see
:func:`~medfed.aggregation.fair.q_fair_share`, so the server adds models to a running sum, and a client sends two
numbers more than in FedAvg. All floating tensors go that share of the way, BatchNorm statistics too; ||w - w_k|| is
over trainable parameters.

``form: as_released`` is what FedISM's code ran under this name and what made its tables: local training with the
bundle's optimiser, and the mean of the w_k with weights F_k^q itself: no h_k, a full step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from medfed.aggregation.averaging import toward
from medfed.aggregation.fair import TINY, by_loss, q_fair_share
from medfed.federation.client import Client
from medfed.federation.messages import Message
from medfed.federation.method import Method
from medfed.federation.server import RoundReport, Server
from medfed.methods.local_training import LocalTraining, descent, fit_and_reply, mean_loss

FORMS: dict[str, dict[str, Any]] = {"published": {}, "as_released": {"optimizer": "bundle"}}
RATE = 0.01


class QFedAvgSettings(LocalTraining):
    """Settings of q-FedAvg.

    Args:
        form: ``published``, or ``as_released`` with FedISM: see the top of this page.
        q: fairness; 0 gives the plain mean of the models. At most 20; beyond, ``agnostic_fl`` is the limit.
        optimizer: of local training: ``sgd`` without momentum and weight decay (published; a learning rate of 0.01
            where none is given), or the ``bundle``'s (``as_released``).
        lipschitz: L of the published form; 1 / learning rate by default. It has that meaning for SGD alone: with
            Adam, whose steps do not shrink with the gradient, the step of the server becomes very small.
    """

    form: Literal["published", "as_released"] = "published"
    q: float = Field(1.0, ge=0, le=20)
    optimizer: Literal["sgd", "bundle"] = "sgd"
    lipschitz: float | None = Field(None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _form(cls, given: Any) -> Any:
        return {**FORMS.get(str(given.get("form", "")), {}), **given} if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _known_rate(self) -> QFedAvgSettings:
        if self.form == "published" and self.rate is None and self.lipschitz is None:
            raise ValueError("with optimizer: bundle give learning_rate or lipschitz, of which h_k is made")
        return self

    def check(self, rounds: int) -> list[str]:
        """Names L where it has no effect."""
        found = super().check(rounds)
        for other, idle in (("form: as_released", self.form == "as_released"), ("q: 0", self.q == 0)):
            if idle:
                return found + self.idle(("lipschitz",), other)
        return found

    @property
    def rate(self) -> float | None:
        """Local learning rate; None is the bundle's."""
        return RATE if self.learning_rate is None and self.optimizer == "sgd" else self.learning_rate

    def request(self, round: int, rounds: int) -> dict[str, Any]:
        """The plain values of a ``train`` request in one round."""
        own = {"learning_rate": self.rate, "sgd": self.optimizer == "sgd", "q": self.q}
        return {**super().request(round, rounds), **own}


def train(client: Client, message: Message) -> Message:
    """Client task: measures the received model, then trains it.

    Args:
        client: the client.
        message: group ``model``; values of :meth:`QFedAvgSettings.request`.

    Returns:
        As :func:`medfed.methods.local_training.train`, with ``received_loss`` F_k, ``loss_power`` F_k^q (the client's
        weight) and ``update_norm`` ||w - w_k||.
    """
    received, values = message.group("model"), message.values
    client.load(received)
    loss = mean_loss(client)
    reply = fit_and_reply(client, message, optimizer=descent(values["learning_rate"]) if values["sgd"] else None)
    model = reply.group("model")
    squares = (
        float((model[n].double() - received[n].to(model[n].device).double()).square().sum())
        for n in client.trainer.trainable
    )
    told = {
        "received_loss": loss,
        "loss_power": (max(loss, 0.0) + TINY) ** values["q"] if math.isfinite(loss) else loss,
        "update_norm": math.sqrt(math.fsum(squares)),
    }
    return Message(reply.tensors, {**reply.values, **told})


def program(server: Server, settings: QFedAvgSettings) -> Iterator[RoundReport]:
    """A share of the way from the received model to the mean of the trained ones with weights F_k^q."""
    for round in server.rounds():
        request = Message.of(settings.request(round, server.num_rounds), model=server.model)
        numbers = ("samples", "received_loss", "update_norm")
        replies = server.ask("train", request, numbers=numbers, mean="model", weight="loss_power")
        weights, share = {}, 0.0
        if replies:
            losses = replies.value("received_loss")
            weights, share = by_loss(losses, settings.q), 1.0
            if settings.form == "published":
                squares = {c: norm**2 for c, norm in replies.value("update_norm").items()}
                share = q_fair_share(losses, squares, settings.q, settings.lipschitz or 1 / (settings.rate or RATE))
            server.model = toward(server.model, replies.mean["model"], share)
        yield server.report(replies, server={"step": share}, weight=weights)


METHOD = Method(
    name="q_fedavg",
    title="Weights clients by a power of their loss (fairness)",
    paper="Li et al., ICLR 2020",
    program=program,
    tasks={"train": train},
    settings=QFedAvgSettings,
    sends="sample count, loss of the received model, length of the update",
)
