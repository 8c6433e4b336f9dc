"""FedCorr: clients are found by the dimension of their predictions, labels corrected by loss and confidence, in stages.

Xu, Chen, Quek, Chong. FedCorr: Multi-Stage Federated Learning for Label Noise Correction. CVPR 2022.

1. Pre-processing: in each iteration (a round of the record) one client after another, in random order, trains the
   model of the one before, held near it by its estimated noise level, and sends the mean local intrinsic dimension of
   its predictions. A mixture over their sums splits the clients. A noisy client estimates its noise level from its
   losses and corrects the labels with the largest losses of which the model is sure.
2. Fine-tuning: federated averaging over the clients with little noise; then noisy clients correct all labels of which
   the model is sure.
3. Federated averaging over all clients.

``form: as_released`` has what the released code computes: losses of a softmax of the softmax; an intrinsic dimension
that is wrong below 20 neighbours; and no proximal term in the first step of each epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch.nn import functional as F

from medfed.errors import ConfigError
from medfed.federation.client import Client
from medfed.federation.messages import Message, Replies
from medfed.federation.method import Method
from medfed.federation.participation import sample_clients
from medfed.federation.server import RoundReport, Server
from medfed.methods import fedavg
from medfed.methods.noise_aware import NoisyTraining, correct_labels, prior_adjusted, trained
from medfed.seeding import numpy_generator, torch_generator

if TYPE_CHECKING:
    from torch import nn

    from medfed.reliability.identification import Verdict
    from medfed.training.objectives import ClassificationObjective

LOSSES = "losses"
SHARE = 500 / 950
"""Rounds of fine-tuning among those after pre-processing, in the paper."""


class FedCorrSettings(NoisyTraining):
    """Settings of FedCorr; defaults are those of the paper and the released code.

    Args:
        form: ``published``, or ``as_released``: see :mod:`medfed.methods.fedcorr`.
        iterations: rounds of the first stage, in each of which all clients train one after another.
        fine_tuning: rounds of the second stage; None takes the paper's share (500 of 950) of those after the first.
        mixup: parameter of the Beta distribution by which images are mixed in training; 0 mixes none.
        beta: weight of the proximal term, times the estimated noise level.
        neighbours: of the local intrinsic dimension.
        relabel_ratio: share of the samples estimated to be wrong that may be corrected in an iteration.
        confidence: probability above which the model's class replaces a label.
        clean_level: highest estimated noise level of a client that takes part in fine-tuning.
        correct: labels are corrected; otherwise noise levels are estimated all the same.
        mixture_seed: seed of the mixtures.
    """

    form: Literal["published", "as_released"] = "published"
    iterations: int = Field(5, ge=1)
    fine_tuning: int | None = Field(None, ge=0)
    mixup: float = Field(1.0, ge=0)
    beta: float = Field(5.0, ge=0)
    neighbours: int = Field(20, ge=2)
    relabel_ratio: float = Field(0.5, ge=0, le=1)
    confidence: float = Field(0.5, ge=0, le=1)
    clean_level: float = Field(0.1, ge=0, le=1)
    correct: bool = True
    mixture_seed: int = Field(0, ge=0)

    @property
    def depends_on_rounds(self) -> bool:
        """Whether fine-tuning ends after a share of the rounds."""
        return self.fine_tuning is None

    def check(self, rounds: int) -> list[str]:
        """Refuses iterations that leave no round for the other stages."""
        if self.iterations >= rounds:
            fix = (
                f"Set method.iterations to {max(1, rounds // 10)}, or raise rounds." if rounds > 1 else "Raise rounds."
            )
            raise ConfigError(
                f"{self.iterations} iterations of pre-processing leave none of {rounds} rounds.",
                where="method.iterations",
                fix=fix,
            )
        idle = [] if self.correct else self.idle(("relabel_ratio", "confidence"), "correct: false")
        return super().check(rounds) + idle

    def training(self) -> dict[str, Any]:
        """The plain values of a request to train."""
        return {**self.request(), "mixup": self.mixup, "released": self.form == "as_released"}

    def tuned(self, rounds: int) -> int:
        """The last round of fine-tuning."""
        rest = rounds - self.iterations
        return self.iterations + (round(SHARE * rest) if self.fine_tuning is None else min(self.fine_tuning, rest))


# Clients.


class Mixed:
    """Cross-entropy of mixed images (mixup, Zhang et al., ICLR 2018), and the way back to the received model.

    ``share CE(z, y_a) + (1 - share) CE(z, y_b) + weight ||w - w_t||_2``, with z of ``share x_a + (1 - share) x_b``, one
    share a batch. The norm, not its square, over trainable parameters; at w_t itself it has no gradient.

    Args:
        base: the classification objective.
        mixup: parameter of the Beta distribution; 0 for none.
        anchor: the received model w_t.
        weight: of the norm; 0 leaves it out.
        first_of: leave the norm out of the first batch of every that many samples; None never does.
        seed_parts: what the randomness is for.
    """

    def __init__(
        self,
        base: ClassificationObjective,
        mixup: float,
        anchor: Mapping[str, torch.Tensor],
        weight: float,
        first_of: int | None,
        seed_parts: tuple[int | str, ...],
    ):
        self._base, self._mixup, self._anchor, self._weight = base, mixup, anchor, weight
        self._first_of, self._seen = first_of, 0
        self._shares, self._pairs = numpy_generator("mixup", *seed_parts), torch_generator("mixup", *seed_parts)

    def __call__(self, network: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Mean loss of a batch, a 0-dim tensor."""
        images, labels = batch["image"], batch["label"]
        if self._mixup:
            share = float(self._shares.beta(self._mixup, self._mixup))
            pair = torch.randperm(len(images), generator=self._pairs).to(images.device)
            logits = network(share * images + (1 - share) * images[pair])
            loss = share * self._base.loss(logits, labels) + (1 - share) * self._base.loss(logits, labels[pair])
        else:
            loss = self._base.loss(network(images), labels)
        first = self._first_of is not None and self._seen % self._first_of == 0
        self._seen += len(images)
        return loss if first or not self._weight else loss + self._weight * self._way(network)

    def _way(self, network: nn.Module) -> torch.Tensor:
        own = [(p, self._anchor[name].to(p.device)) for name, p in network.named_parameters() if p.requires_grad]
        return torch.stack([(p - a).square().sum() for p, a in own]).sum().clamp_min(1e-24).sqrt()


def train(client: Client, message: Message) -> Message:
    """Client task: trains the received model on the labels as corrected so far.

    Args:
        client: the client.
        message: group ``model``; values ``epochs``, ``learning_rate``, ``logit_adjustment``, ``mixup``, ``released``;
            in the first stage also ``proximal``, the weight of the norm, and ``neighbours``.

    Returns:
        Group ``model``; values ``samples``, ``loss``, ``steps``, ``skipped``, and in the first stage ``dimension``, the
        mean local intrinsic dimension of the predictions (None where there is none). The losses of the samples stay
        in the memory until the client is asked to correct them.
    """
    values, received = message.values, message.group("model")
    client.load(received)
    data = client.data.with_labels(current_labels(client))
    released = values["released"]
    objective = Mixed(
        prior_adjusted(client, values["logit_adjustment"], least_count=1),
        values["mixup"],
        received,
        values.get("proximal", 0.0),
        len(data) if released else None,
        (client.seed, client.round, client.name),
    )
    result = client.fit(data, objective=objective, epochs=values["epochs"], learning_rate=values["learning_rate"])
    if "neighbours" not in values:
        client.memory.pop(LOSSES, None)
        return trained(client, result)
    dimension, losses = measured(client.trainer.predict(data), data.labels, values["neighbours"], released)
    client.memory[LOSSES] = losses
    return trained(client, result, dimension=dimension)


def current_labels(client: Client) -> torch.Tensor:
    """The labels that the client trains on: corrected ones where it has them."""
    return client.memory.get("labels", client.data.labels)


def measured(
    logits: torch.Tensor, labels: torch.Tensor, neighbours: int, released: bool = False
) -> tuple[float | None, torch.Tensor]:
    """Mean local intrinsic dimension of the predicted probabilities, and the loss of each sample.

    Args:
        logits: ``[N, C]``.
        labels: current labels ``[N]``.
        neighbours: of the dimension.
        released: dimension and losses as the released code computes them.

    Returns:
        The mean over the samples that have one, None where none has; and ``[N]``.
    """
    from medfed.reliability.dimension import local_intrinsic_dimension

    predicted = logits.double().softmax(dim=1)
    dimensions = local_intrinsic_dimension(predicted, neighbours, released)
    known = dimensions[torch.isfinite(dimensions)]
    losses = F.cross_entropy(predicted if released else logits.double(), labels, reduction="none")
    return (float(known.mean()) if len(known) else None), losses.float()


def correct(client: Client, message: Message) -> Message:
    """Client task: replaces labels by the received model's class where it is sure of it.

    Args:
        client: the client.
        message: group ``model``; values ``confidence``; in the first stage also ``ratio`` (only that share of the
            samples estimated to be wrong, those with the largest losses) and ``seed``.

    Returns:
        Values ``samples``, ``proposed`` (labels replaced now), ``edited`` (labels that differ from the observed ones),
        and in the first stage ``noise_level``, the share of the samples whose losses belong to the higher ones.
    """
    from medfed.reliability.identification import suspicious

    values = message.values
    client.load(message.group("model"))
    sure, proposal = client.trainer.predict(client.data).double().softmax(dim=1).max(dim=1)
    allowed = torch.ones(client.num_samples, dtype=torch.bool)
    told: dict[str, Any] = {"samples": client.num_samples}
    if "ratio" in values:
        losses = client.memory[LOSSES]
        level = float(suspicious(losses, values["seed"]).double().mean())
        most = int(client.num_samples * level * values["ratio"])
        allowed = torch.zeros_like(allowed)
        allowed[losses.argsort(descending=True, stable=True)[:most]] = True
        told["noise_level"] = level
    replaced = allowed & (sure > values["confidence"])
    before = current_labels(client)
    labels = torch.where(replaced, proposal, before)
    proposed = int((labels != before).sum())
    return Message.of({**told, "proposed": proposed, "edited": correct_labels(client, labels)})


# The server.


def program(server: Server, settings: FedCorrSettings) -> Iterator[RoundReport]:
    """Pre-processing, fine-tuning, usual training.

    Raises:
        ConfigError: the iterations leave no round for the other stages.
    """
    settings.check(server.num_rounds)
    for _ in server.rounds(until=settings.iterations):
        yield iteration(server, settings)
    tuned = settings.tuned(server.num_rounds)
    for _ in server.rounds(until=tuned):
        yield fedavg.one_round(server, settings.training(), clients=tuners(server, settings))
    for _ in server.rounds():
        if settings.correct and tuned > settings.iterations:
            server.once("correction", lambda: correct_all(server, settings))
        yield fedavg.one_round(server, settings.training())


def iteration(server: Server, settings: FedCorrSettings) -> RoundReport:
    """One visit to all clients, and the noise levels and corrections of those judged noisy."""
    levels = dict(server.notes["levels"].values) if "levels" in server.notes else {}
    told = {**settings.training(), "neighbours": settings.neighbours}
    answers = []
    for client in numpy_generator(server.seed, "visits", server.round).permutation(server.clients).tolist():
        values = {**told, "proximal": settings.beta * levels.get(client, 0.0)}
        message = Message.of(values, model=server.model)
        answer = server.ask(
            "train", message, clients=[client], expect={"model": server.model}, numbers=("samples",), quorum=1
        )
        for reply in answer:
            server.model = reply.group("model")
        answers.append(answer)
    verdict = judge(server, settings, answers)
    corrected = Replies(())
    if verdict.noisy:
        ratio = settings.relabel_ratio if settings.correct else 0.0
        values = {"confidence": settings.confidence, "ratio": ratio, "seed": settings.mixture_seed}
        message = Message.of(values, model=server.model)
        corrected = server.ask("correct", message, clients=verdict.noisy, numbers=("noise_level",), quorum=1)
    levels = corrected.value("noise_level")
    server.notes["levels"] = Message(values=levels)
    plain = verdict.to_plain()
    return server.report(
        *answers,
        corrected,
        server={
            "clean_clients": len(verdict.clean),
            "noisy_clients": len(verdict.noisy),
            "undetermined_clients": len(verdict.undetermined),
            "relabelled": bool(corrected) and settings.correct,
        },
        status=plain["status"],
        p_clean=plain["posterior"],
    )


def judge(server: Server, settings: FedCorrSettings, answers: list[Replies]) -> Verdict:
    """Adds the dimensions of an iteration to the earlier ones and splits the clients by their sums."""
    from medfed.reliability.identification import split_by_score

    known = dict(server.notes["dimensions"].values) if "dimensions" in server.notes else {}
    for reply in (r for replies in answers for r in replies):
        value = reply.values.get("dimension")
        if isinstance(value, float):
            total, times = known.get(reply.client, (0.0, 0))
            known[reply.client] = [total + value, times + 1]
    server.notes["dimensions"] = Message(values=known)
    # A client that missed an iteration is taken to have had its mean there.
    scores = {c: known[c][0] / known[c][1] * server.round if c in known else math.nan for c in server.clients}
    verdict = split_by_score(scores, settings.mixture_seed)
    note = {**verdict.to_plain(), "identification": "local intrinsic dimension", "round": server.round}
    server.notes["verdict"] = Message(values=note)
    return verdict


def tuners(server: Server, settings: FedCorrSettings) -> tuple[str, ...]:
    """The participants of a round of fine-tuning: as many as of any other round, as far as there are that many."""
    levels, status = server.notes["levels"].values, server.notes["verdict"].values["status"]
    few = [c for c in server.clients if status[c] != "undetermined" and levels.get(c, 0.0) <= settings.clean_level]
    if not few:
        return server.participants()
    share = min(1.0, server.fraction * len(server.clients) / len(few))
    return sample_clients(few, share, server.seed, server.round)


def correct_all(server: Server, settings: FedCorrSettings) -> Message:
    """The correction after fine-tuning, by every client judged noisy."""
    noisy = [c for c, s in server.notes["verdict"].values["status"].items() if s == "noisy"]
    if not noisy:
        return Message(values={"corrected": []})
    message = Message.of({"confidence": settings.confidence}, model=server.model)
    replies = server.ask("correct", message, clients=noisy, numbers=("samples",), quorum=1)
    server.report(replies, server={"relabelled": True})
    return Message(values={"corrected": list(replies.clients)})


METHOD = Method(
    name="fedcorr",
    title="Finds noisy clients by the dimension of their predictions and corrects labels, in stages (label noise)",
    paper="Xu et al., CVPR 2022",
    program=program,
    tasks={"train": train, "correct": correct},
    settings=FedCorrSettings,
    sends="sample count, labels changed (number); in the first stage mean intrinsic dimension, estimated noise level",
    keeps="corrected labels",
    needs="clients one after another in the first stage",
    task_kinds=("multiclass",),
)
