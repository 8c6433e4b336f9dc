"""Agnostic federated learning (AFL): the best model for the worst mixture of clients.

Mohri, Sivek, Suresh. Agnostic Federated Learning. ICML 2019: ``min_w max_lambda sum_k lambda_k F_k(w)`` over the
simplex, by stochastic gradients of both players.

Published: each round every client takes a mini-batch and sends its gradient g_k and loss l_k at the received model::

    w      <- w - eta sum_k lambda_k g_k / sum_k lambda_k
    lambda <- P(lambda + eta_lambda l),   P the projection on the simplex,   lambda_k = 1/K at first

and the model that counts is the mean of all w so far. A client sends ``w - eta g_k``, which averages to the same and
brings its BatchNorm statistics along.

``work: epochs`` (not published) replaces the one gradient by local training as in FedAvg, and l_k by the loss of the
received model on the whole training set, so that a round does as much as in the other methods.

``form: as_released`` is what FedISM's code ran under this name (q-FedAvg at q >= 100) and what made its tables: the
next model is that of the client with the highest loss. Only that client is trained here, which comes to the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from medfed.aggregation.averaging import toward
from medfed.aggregation.fair import ascended
from medfed.aggregation.weights import normalised
from medfed.federation.client import Client
from medfed.federation.messages import Message
from medfed.federation.method import Method
from medfed.federation.server import RoundReport, Server
from medfed.methods.local_training import LocalTraining, descent, fit_and_reply, mean_loss, received_loss, train
from medfed.seeding import torch_generator

RATE = 0.01


class AgnosticSettings(LocalTraining):
    """Settings of AFL.

    Args:
        form: ``published``, or ``as_released`` with FedISM: see the top of this page.
        work: what a client does in a round of the published form: one ``gradient``, or ``epochs`` of local training.
            ``local_epochs`` counts for the latter and in ``as_released``.
        learning_rate: eta of ``gradient`` (0.01 where none is given); otherwise that of local training.
        ascent_rate: eta_lambda; 0 keeps equal weights.
        batch_size: images of a gradient; None takes the bundle's.
        average: whether the model is the mean over rounds; None does it for ``gradient`` and not for ``epochs``.
    """

    form: Literal["published", "as_released"] = "published"
    work: Literal["gradient", "epochs"] = "gradient"
    ascent_rate: float = Field(0.01, ge=0)
    batch_size: int | None = Field(None, ge=1)
    average: bool | None = None

    def check(self, rounds: int) -> list[str]:
        """Names settings of the other form, or of the other work."""
        found = super().check(rounds)
        if self.form == "as_released":
            return found + self.idle(("work", "ascent_rate", "batch_size", "average"), "form: as_released")
        other = ("local_epochs",) if self.work == "gradient" else ("batch_size",)
        return found + self.idle(other, f"work: {self.work}")

    @property
    def averaged(self) -> bool:
        """Whether the model is the mean over rounds."""
        return self.work == "gradient" if self.average is None else self.average

    def request(self, round: int, rounds: int) -> dict[str, Any]:
        """The plain values of a request in one round."""
        values = super().request(round, rounds)
        if self.form == "published" and self.work == "gradient":
            rate = RATE if self.learning_rate is None else self.learning_rate
            values |= {"learning_rate": rate, "batch_size": self.batch_size, "epochs": 1}
        return values


def gradient(client: Client, message: Message) -> Message:
    """Client task: one step of plain gradient descent on one batch.

    Args:
        client: the client.
        message: group ``model``; values of :meth:`AgnosticSettings.request`.

    Returns:
        As :func:`medfed.methods.local_training.train`; ``samples`` and ``loss`` are those of the batch.
    """
    import torch

    values = message.values
    size = values["batch_size"] or client.trainer.bundle.batch_size
    parts = (client.seed, "gradient", client.round, client.name)
    batch = client.data.subset(torch.randperm(client.num_samples, generator=torch_generator(*parts))[:size])
    client.load(message.group("model"))
    descend = descent(values["learning_rate"])
    return fit_and_reply(client, message, data=batch, batch_size=max(len(batch), 1), optimizer=descend)


def train_measured(client: Client, message: Message) -> Message:
    """Client task: as :func:`medfed.methods.local_training.train`, with ``received_loss``, measured before."""
    client.load(message.group("model"))
    return fit_and_reply(client, message, values={"received_loss": mean_loss(client)})


def program(server: Server, settings: AgnosticSettings) -> Iterator[RoundReport]:
    """Descent of the model, ascent of the weights; or the worst client's model, as released."""
    for round in server.rounds():
        values = settings.request(round, server.num_rounds)
        yield worst_client(server, values) if settings.form == "as_released" else both_players(server, settings, values)


def both_players(server: Server, settings: AgnosticSettings, values: dict[str, Any]) -> RoundReport:
    """One round of the published form."""
    kept = server.notes["iterate"] if "iterate" in server.notes else Message.of({"rounds": 0}, model=server.model)
    weights = dict(server.notes["weights"].values) if "weights" in server.notes else {}
    weights = {c: weights.get(c, 1 / len(server.clients)) for c in server.clients}
    present = {c: weights[c] for c in server.participants()}
    if not any(present.values()):  # part of the clients, none of which weighs anything
        present = dict.fromkeys(present, 1 / len(present))
    task, loss = ("gradient", "loss") if settings.work == "gradient" else ("train_measured", "received_loss")
    request = Message.of(values, model=kept.group("model"))
    replies = server.ask(task, request, numbers=("samples", loss), mean="model", weight=present)
    if replies:
        model, rounds = replies.mean["model"], kept.values["rounds"] + 1
        server.model = toward(server.model, model, 1 / rounds) if settings.averaged else model
        if settings.averaged:
            server.notes["iterate"] = Message.of({"rounds": rounds}, model=model)
        losses = replies.value(loss)
        server.notes["weights"] = Message(values=ascended(weights, losses, settings.ascent_rate))
    return server.report(replies, weight=normalised(present, replies.clients) if replies else {})


def worst_client(server: Server, values: dict[str, Any]) -> RoundReport:
    """One round as released with FedISM: the model of the client with the highest loss."""
    measured = server.ask("loss", Message.of({}, model=server.model), numbers=("samples", "received_loss"))
    if not measured:
        return server.report(measured)
    losses = measured.value("received_loss")
    worst = max(losses, key=lambda client: losses[client])
    replies = server.ask("train", Message.of(values, model=server.model), clients=[worst], mean="model")
    if replies:
        server.model = replies.mean["model"]
    server.report(measured)
    return server.report(replies, weight={c: float(c == worst) for c in losses} if replies else {})


METHOD = Method(
    name="agnostic_fl",
    title="The best model for the worst mixture of clients (fairness)",
    paper="Mohri et al., ICML 2019",
    program=program,
    tasks={"gradient": gradient, "train_measured": train_measured, "loss": received_loss, "train": train},
    settings=AgnosticSettings,
    sends="mini-batch loss (its model is one gradient step)",
    needs="all clients every round",
    together=1,
)
