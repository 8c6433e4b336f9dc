"""FedNed: clients are judged by the uncertainty of their models on public images; noisy ones teach what not to say.

Lu, Chen, Zhang, Wang, Wang. Federated Learning with Extremely Noisy Clients via Negative Distillation. AAAI 2024.

1. Warm-up: rounds of FedAvg.
2. Then the server measures in every round how uncertain each uploaded model is on public images, under dropout. A
   client whose share is too large counts as noisy from then on: it trains a second model on confident predictions of
   the received one, which is averaged with the others as soon as it is certain enough. Models trained on noisy labels
   are bad teachers: the averaged model is drawn to the inverse of their predictions.

Needs public images without labels, at the server.

``form: as_released`` is what the released code does: the optimiser of the distillation holds another network than the
one in its loss, so that nothing is distilled; a noisy client's two trainings happen to one model, one after the other;
and uncertainty is measured with the batch's own BatchNorm statistics. (One version of that code weights clients by one
minus their true share of wrong labels; here, as everywhere, no method sees it.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field

from medfed.federation.client import Client
from medfed.federation.messages import Message, Reply, State
from medfed.federation.method import Method
from medfed.federation.server import RoundReport, Server
from medfed.methods import fedavg
from medfed.methods.fednoro import check_warmup
from medfed.methods.local_training import train
from medfed.methods.noise_aware import NoisyTraining, correct_labels, prior_adjusted, trained
from medfed.seeding import torch_generator

if TYPE_CHECKING:
    from torch import nn


class FedNedSettings(NoisyTraining):
    """Settings of FedNed; defaults are those of the released code.

    Args:
        form: ``published``, or ``as_released``: see :mod:`medfed.methods.fedned`.
        warmup: rounds of the first stage, before clients are judged.
        uncertainty: a client is noisy whose uncertainty is more than this times the mean of the round (released: a
            share of 0.12 among ten clients).
        images: public images by which models are judged in a round, and of a step of distillation.
        passes: predictions under dropout.
        dropout: share of the features that are dropped.
        distil: the server distils from bad teachers.
        steps: optimiser steps of the distillation in a round.
        temperature: of predictions, in distillation and for the labels that a noisy client gives itself.
        server_learning_rate: of the bundle's optimiser at the server (the value of the released instructions; 0.05
            where nothing is said).
        server_weight_decay: likewise.
        confidence: probability from which a noisy client takes over the received model's class.
    """

    local_epochs: int = Field(10, ge=1)
    form: Literal["published", "as_released"] = "published"
    warmup: int = Field(10, ge=1)
    uncertainty: float = Field(1.2, ge=1)
    images: int = Field(128, ge=2)
    passes: int = Field(10, ge=1)
    dropout: float = Field(0.3, ge=0, lt=1)
    distil: bool = True
    steps: int = Field(100, ge=1)
    temperature: float = Field(2.0, gt=0)
    server_learning_rate: float = Field(0.01, gt=0)
    server_weight_decay: float = Field(0.002, ge=0)
    confidence: float = Field(0.95, ge=0, le=1)

    def check(self, rounds: int) -> list[str]:
        """Refuses a warm-up that leaves no round for the second stage; names settings without effect."""
        check_warmup(self.warmup, rounds)
        distilling = ("steps", "server_learning_rate", "server_weight_decay")
        notes = [] if self.distil else self.idle(distilling, "distil: false")
        if self.released:
            notes += self.idle(("distil", *distilling), "form: as_released")
        return [*super().check(rounds), *notes]

    @property
    def released(self) -> bool:
        """Whether the released form is wanted."""
        return self.form == "as_released"


# Clients.


def train_judged(client: Client, message: Message) -> Message:
    """Client task: trains on the observed labels; a client judged noisy also on confident ones of the received model.

    Args:
        client: the client.
        message: group ``model``; values ``noisy``, ``epochs``, ``learning_rate``, ``logit_adjustment``,
            ``temperature``, ``confidence`` and ``released``.

    Returns:
        Group ``model``, of the observed labels; values ``samples``, ``loss``, ``steps``, ``skipped``. Of a noisy
        client also the group ``second``, of the labels that it gave itself (the received model where these are fewer
        than two), and the values ``confident``, their number, and ``edited``, of those that differ from the observed.
    """
    values, received = message.values, message.group("model")
    options = {k: values[k] for k in ("epochs", "learning_rate")}
    objective = prior_adjusted(client, values["logit_adjustment"], least_count=1)
    client.load(received)
    if not values["noisy"]:
        return trained(client, client.fit(objective=objective, **options))
    logits = client.trainer.predict(client.data).double()
    sure, proposal = (logits / values["temperature"]).softmax(dim=1).max(dim=1)
    confident = sure >= values["confidence"]
    labels = torch.where(confident, proposal, client.data.labels)
    edited = correct_labels(client, labels)
    rows = confident.nonzero()[:, 0]
    if len(rows) > 1:
        client.fit(client.data.with_labels(labels).subset(rows), objective=objective, purpose="second", **options)
    second = {name: tensor.clone() for name, tensor in client.model().items()}
    if not values["released"]:
        client.load(received)
    result = client.fit(objective=objective, **options)
    answer = trained(client, result, confident=len(rows), edited=edited)
    if values["released"]:
        return answer
    return Message({**answer.tensors, **{f"second/{name}": t for name, t in second.items()}}, answer.values)


# The server.


def program(server: Server, settings: FedNedSettings) -> Iterator[RoundReport]:
    """Warm-up, then rounds with judgement and negative distillation.

    Raises:
        ConfigError: the warm-up leaves no round for the second stage.
        DataError: there are no public images at the server.
    """
    check_warmup(settings.warmup, server.num_rounds)
    _ = server.public  # refuses before the warm-up and not after it
    for _ in server.rounds(until=settings.warmup):
        yield fedavg.one_round(server, settings.request())
    for _ in server.rounds():
        yield judged_round(server, settings)


def judged_round(server: Server, settings: FedNedSettings) -> RoundReport:
    """One round of the second stage."""
    from medfed.aggregation.averaging import weighted_mean
    from medfed.aggregation.weights import by_samples

    status = dict(server.notes["verdict"].values["status"]) if "verdict" in server.notes else {}
    each = {c: {"noisy": status.get(c) == "noisy"} for c in server.participants()}
    told = {"temperature": settings.temperature, "confidence": settings.confidence, "released": settings.released}
    message = Message.of({**settings.request(), **told}, model=server.model)
    replies = server.ask("train_judged", message, each=each, expect={"model": server.model}, numbers=("samples",))
    if not replies:
        return server.report(replies)
    uploaded = {r.client: candidate(r, server.model) for r in replies}
    uncertain = {c: uncertainty(server, settings, c, state) for c, state in uploaded.items()}
    finite = [u for u in uncertain.values() if math.isfinite(u)]
    mean = math.fsum(finite) / len(finite) if finite else math.inf
    good = [c for c, u in uncertain.items() if u <= settings.uncertainty * mean]
    status |= {c: "noisy" for c in uncertain if c not in good}
    status |= {c: "clean" for c in good if status.get(c) != "noisy"}
    server.notes["verdict"] = Message(values=verdict_of(server, status))
    samples = replies.value("samples")
    weights = by_samples({c: samples[c] for c in good})
    teachers = [r.group("model") for r in replies if status[r.client] == "noisy" and math.isfinite(uncertain[r.client])]
    model = weighted_mean([uploaded[c] for c in good], [weights[c] for c in good])
    distilled = None
    if teachers and settings.distil and not settings.released:
        model, distilled = distil(server, settings, model, teachers)
    server.model = model
    return server.report(
        replies,
        server={
            "clean_clients": sum(s == "clean" for s in status.values()),
            "noisy_clients": sum(s == "noisy" for s in status.values()),
            "bad_teachers": len(teachers),
            "distillation_loss": distilled,
        },
        weight=weights,
        uncertainty={c: None if math.isinf(u) else u / mean if mean > 0 else 1.0 for c, u in uncertain.items()},
        status={c: status[c] for c in uploaded},
    )


def candidate(reply: Reply, model: State) -> State:
    """The model of a reply that may be averaged: the second one of a noisy client, if it has the form of the first."""
    second = reply.group("second")
    same = second.keys() == model.keys() and all(second[n].shape == t.shape for n, t in model.items())
    return second if same else reply.group("model")


def verdict_of(server: Server, status: Mapping[str, str]) -> dict[str, Any]:
    """The plain values of a verdict on all clients; those not yet seen are undetermined."""
    whole = {c: status.get(c, "undetermined") for c in server.clients}
    return {"status": whole, "posterior": {}, "note": "", "identification": "uncertainty", "round": server.round}


def uncertainty(server: Server, settings: FedNedSettings, client: str, state: State) -> float:
    """How uncertain a model is on some public images of the round, the same for all models."""
    from medfed.training.predict import classifier_of, pooled_features

    bench = server.public
    generator = torch_generator(server.seed, "judged images", server.round)
    data = bench.data.subset(torch.randperm(len(bench.data), generator=generator)[: settings.images])
    bench.trainer.load(state)
    network = bench.trainer.network
    if settings.released:
        network.train()
        with torch.no_grad():
            images = bench.trainer.bundle.normalize(data.batch(torch.arange(len(data)))["image"])
            features = pooled_features(network, images.to(bench.trainer.device))[0].cpu()
    else:
        features = bench.trainer.features(data)
    classifier = classifier_of(network)
    weight, own = classifier.weight.detach().cpu(), classifier.bias
    bias = torch.zeros(len(weight)) if own is None else own.detach().cpu()
    noise = torch_generator(server.seed, "dropped features", server.round, client)
    return dropout_entropy(features, weight, bias, settings.dropout, settings.passes, noise)


def dropout_entropy(
    features: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    rate: float,
    passes: int,
    generator: torch.Generator,
) -> float:
    """Sum over the samples of the entropy of the mean prediction under dropout of the features.

    Args:
        features: ``[N, d]``.
        weight: of the classifier ``[C, d]``.
        bias: of the classifier ``[C]``.
        rate: share of the features dropped; the others are scaled by ``1 / (1 - rate)``.
        passes: predictions that are averaged.
        generator: of the dropout.

    Returns:
        The sum; infinite where a prediction is not a number.
    """
    features, weight, bias = features.double(), weight.double(), bias.double()
    mean = torch.zeros(len(features), len(bias), dtype=torch.float64)
    for _ in range(passes):
        kept = torch.rand(features.shape, generator=generator) >= rate
        mean += ((features * kept / (1 - rate)) @ weight.T + bias).softmax(dim=1) / passes
    told = float(-torch.special.xlogy(mean, mean).sum())
    return told if math.isfinite(told) else math.inf


def inverted(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """``softmax(1 / z / T)`` ``[N, C]``: least where the teacher is most certain; |z| counts as 1e-6 at least.

    The released code divides ``softmax(1 / z)`` by T instead: no distribution, but a smaller loss.
    """
    small = logits.double()
    small = torch.where(small >= 0, small.clamp_min(1e-6), small.clamp_max(-1e-6))
    return (1 / small / temperature).softmax(dim=1)


def distil(server: Server, settings: FedNedSettings, model: State, teachers: list[State]) -> tuple[State, float]:
    """Draws a model to the inverted predictions of bad teachers: ``mean_b KL(y_b || softmax(z / T))``.

    Teachers see the public images as they are, the model sees them as in training.

    Args:
        server: the server.
        settings: steps, images a step, temperature, learning rate and weight decay.
        model: the averaged model.
        teachers: models trained on noisy labels, at least one.

    Returns:
        The model after it, and the mean loss.
    """
    bench = server.public
    target = torch.zeros(len(bench.data), server.task.num_classes, dtype=torch.float64)
    entropy = torch.zeros(len(bench.data), dtype=torch.float64)
    for teacher in teachers:
        bench.trainer.load(teacher)
        told = inverted(bench.trainer.predict(bench.data), settings.temperature)
        target += told / len(teachers)
        entropy -= torch.special.xlogy(told, told).sum(dim=1) / len(teachers)
    size = min(settings.images, len(bench.data))
    generator = torch_generator(server.seed, "distilled images", server.round)
    drawn = torch.cat([torch.randperm(len(bench.data), generator=generator)[:size] for _ in range(settings.steps)])

    def objective(network: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits = network(batch["image"])
        rows = drawn[batch["index"].cpu()]
        log_p = (logits / settings.temperature).log_softmax(dim=1)
        return -(target[rows].to(log_p) * log_p).sum(dim=1).mean() - entropy[rows].mean().to(log_p)

    bench.trainer.load(model)
    result = bench.trainer.fit(
        bench.data.subset(drawn),
        seed_parts=(server.seed, server.round, "negative distillation"),
        objective=objective,
        batch_size=size,
        learning_rate=settings.server_learning_rate,
        weight_decay=settings.server_weight_decay,
    )
    return {name: tensor.detach().cpu().clone() for name, tensor in bench.trainer.state().items()}, result.loss


METHOD = Method(
    name="fedned",
    title="Judges models by their uncertainty on public images; noisy ones are negative teachers (label noise)",
    paper="Lu et al., AAAI 2024",
    program=program,
    tasks={"train": train, "train_judged": train_judged},
    settings=FedNedSettings,
    sends="sample count; where judged noisy a second model, labels that it gave itself (number)",
    keeps="labels that it gave itself",
    needs="public unlabelled images",
    task_kinds=("multiclass",),
    public=True,
)
