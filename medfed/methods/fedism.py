"""FedISM: sharpness-aware local training and sharpness-aware aggregation against image-quality shift.

Wu, Yu, et al. From Optimization to Generalization: Fair Federated Learning against Quality Shift via Inter-Client
Sharpness Matching. IJCAI 2024. Equation numbers are the paper's.

Each round, every client measures on its whole training set how much the loss of the *received* model rises within the
radius (Eq. 8; eval mode, plain cross-entropy) and sends that scalar; then it trains with GSAM (Eq. 11, SALT). The
server weights the trained models by sharpness (Eq. 13, SAGA), averaged over rounds (Eq. 14).

The scalar is asked for before training, not with the trained model: the weights are then known when models arrive, and
the server adds each to a running sum instead of holding all of them. What is computed and sent is the same.

``form: as_released`` measures as the released code does: the loss, its gradient and the loss within the radius are
taken on images that are augmented at random anew each time, so that S_k is noisy and can fall to its floor.

FedISM+ (``name: fedism_plus``, arXiv 2503.09587) lets the radius grow as ((t+1)/T)^0.5 in training and measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from medfed.aggregation.weights import by_samples, by_sharpness, moving_average, normalised
from medfed.federation.client import Client
from medfed.federation.messages import Message
from medfed.federation.method import Method
from medfed.federation.server import RoundReport, Server
from medfed.methods.local_training import Ball, LocalTraining, Salt, classification, idle_share, train

if TYPE_CHECKING:
    import torch
    from torch import nn

FORMS: dict[str, dict[str, Any]] = {"published": {}, "as_released": {"augmented": True}}
NUMBERS = ("samples", "sharpness", "received_loss")


class FedISMSettings(LocalTraining):
    """Settings of FedISM.

    Args:
        form: ``published``, or the defaults of the released code (``as_released``): see the top of this page. A setting
            that is given holds in both.
        salt: sharpness-aware local training; ``false`` gives the ablation "SAGA only". Its radius is also that of
            the measured sharpness, unless ``measure`` says otherwise.
        saga: sharpness-aware aggregation; ``false`` gives the ablation "SALT only" (sample-count weights).
        measure: radius of the measured sharpness; by default rho of ``salt`` (or the paper's 0.05), with a constant
            radius where that of ``salt`` is bounded: clients must be measured by the same radius.
        q: how strongly weights follow sharpness (2.0 in the paper; 0 gives equal weights).
        beta: share of the new weight in the moving average over rounds (0.5; 1 switches it off).
        saga_from: first round in which weights follow sharpness (1 in the paper); before it they follow sample counts.
            A client that is not fitted yet lies on a flat stretch of its loss and would count as served well.
        follow: what weights follow: ``sharpness`` (the paper's), or ``perturbed_loss`` (medfed's own), the loss within
            the radius, F_k + S_k: large where a client is on a sharp stretch and also where it is not fitted yet.
        augmented: whether sharpness is measured on images that are augmented at random.
        adjusted: whether sharpness is that of the loss with logit adjustment, as in training (medfed's own): plain
            cross-entropy, which the released code takes, also tells how unlike the clients' classes are.
    """

    form: Literal["published", "as_released"] = "published"
    salt: Salt | None = Salt()
    saga: bool = True
    measure: Ball | None = None
    q: float = Field(2.0, ge=0)
    beta: float = Field(0.5, gt=0, le=1)
    saga_from: int = Field(1, ge=1)
    follow: Literal["sharpness", "perturbed_loss"] = "sharpness"
    augmented: bool = False
    adjusted: bool = False

    @model_validator(mode="before")
    @classmethod
    def _form(cls, given: Any) -> Any:
        return {**FORMS.get(str(given.get("form", "")), {}), **given} if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _something(self) -> FedISMSettings:
        if self.salt is None and not self.saga:
            raise ValueError("without salt and saga this is FedAvg; use method: fedavg")
        return self

    def check(self, rounds: int) -> list[str]:
        """Names what has no effect on the weights."""
        found = super().check(rounds)
        if self.measure is not None:
            found += idle_share("measure", self.measure)
        if not self.saga:
            return found + self.idle(("q", "beta", "saga_from", "follow"), "saga: false")
        if self.saga_from > rounds:
            found.append(f"weights follow sample counts: method.saga_from is {self.saga_from} of {rounds} rounds")
        return found

    def question(self, round: int, rounds: int) -> dict[str, Any]:
        """The plain values of a ``sharpness`` request in one round."""
        return {**self.probe.ball(round, rounds), "augmented": self.augmented, "adjusted": self.adjusted}

    @property
    def depends_on_rounds(self) -> bool:
        """Whether a radius grows over the rounds, in training or in the measurement."""
        return super().depends_on_rounds or self.probe.power > 0

    @property
    def probe(self) -> Ball:
        """Radius of the measured sharpness."""
        return self.measure or (self.salt or type(self).model_fields["salt"].default).comparable


class GrowingBall(Ball):
    """As :class:`Ball`, with FedISM+'s schedule unless ``power`` says otherwise."""

    power: float = Field(0.5, ge=0)


class GrowingSalt(Salt):
    """As :class:`Salt`, with FedISM+'s schedule unless ``power`` says otherwise."""

    power: float = Field(0.5, ge=0)


class FedISMPlusSettings(FedISMSettings):
    """FedISM+: as FedISM, with a radius that grows over the rounds, in training and in the measurement."""

    salt: GrowingSalt | None = GrowingSalt()
    measure: GrowingBall | None = None


def sharpness(client: Client, message: Message) -> Message:
    """Client task: sharpness of the received model on the client's training set (Eq. 8).

    Args:
        client: the client.
        message: group ``model``; values of :meth:`FedISMSettings.question`.

    Returns:
        Values ``samples``, ``sharpness`` S_k and ``received_loss``, the mean loss of the received model.
    """
    from medfed.training.sharpness import Radius

    values = message.values
    client.load(message.group("model"))
    radius = Radius(values["rho"], values["radius"], values["share"])
    loss = None
    if values.get("adjusted"):
        objective = classification(client, logit_adjustment=True)

        def loss(network: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
            return objective.losses(network(batch["image"]), batch["label"])

    augmented = (client.seed, client.round, client.name) if values.get("augmented") else None
    measured = client.trainer.sharpness(client.data, radius, loss=loss, augmented=augmented)
    return Message.of(
        {
            "samples": client.num_samples,
            "sharpness": measured.sharpness,
            "received_loss": measured.loss,
        }
    )


def program(server: Server, settings: FedISMSettings) -> Iterator[RoundReport]:
    """theta_{t+1} = sum_k w_{k,t} theta_k with w from sharpness (Eqs. 13 and 14)."""
    for round in server.rounds():
        model = server.model
        question = Message.of(settings.question(round, server.num_rounds), model=model)
        measured = server.ask("sharpness", question, numbers=NUMBERS)
        if not measured:
            yield server.report(measured)
            continue
        by_sharp = settings.saga and round >= settings.saga_from
        if by_sharp:
            kept = server.notes["weights"].values if "weights" in server.notes else None
            needs = measured.value("sharpness")
            if settings.follow == "perturbed_loss":
                needs = {client: s + measured.value("received_loss")[client] for client, s in needs.items()}
            weights = moving_average(by_sharpness(needs, settings.q), kept, settings.beta)
        else:
            weights = by_samples(measured.value("samples"))
        request = Message.of(settings.request(round, server.num_rounds), model=model)
        replies = server.ask("train", request, clients=measured.clients, mean="model", weight=weights)
        if replies:
            server.model = replies.mean["model"]
            if by_sharp:
                previous = dict(server.notes["weights"].values) if "weights" in server.notes else {}
                server.notes["weights"] = Message(values={**previous, **weights})
        server.report(measured)
        yield server.report(replies, weight=normalised(weights, replies.clients) if replies else {})


METHOD = Method(
    name="fedism",
    title="Sharpness-aware training and sharpness-weighted aggregation (image-quality shift)",
    paper="Wu et al., IJCAI 2024",
    program=program,
    tasks={"sharpness": sharpness, "train": train},
    settings=FedISMSettings,
    sends="sample count, sharpness, loss of the received model",
)

PLUS = Method(
    name="fedism_plus",
    title="FedISM with a radius that grows over the rounds",
    paper="Wu et al., arXiv 2503.09587",
    program=program,
    tasks={"sharpness": sharpness, "train": train},
    settings=FedISMPlusSettings,
    sends="sample count, sharpness, loss of the received model",
)
