"""A throw-away program of OCT-FedSIR's shape, to show that the contract carries staged protocols as it is.

Not the published method: identification, descriptors and relabelling are reduced to the least that has their form.
Stage I once; then rounds in which clean and noisy clients do different work, DaAgg over all models, and every second
round a checkpoint: clean reference model down, per-class matrices up, their mean down, corrected labels kept at the
noisy clients.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call

from medfed.aggregation.averaging import weighted_mean
from medfed.federation.means import Mean
from medfed.federation.messages import Message
from medfed.federation.method import Method, MethodSettings
from medfed.training.losses import logit_adjustment_offsets
from medfed.training.objectives import ClassificationObjective
from medfed.training.predict import evaluating


class StagedSettings(MethodSettings):
    """Settings of the prototype."""

    period: int = 2
    temperature: float = 0.8


# Clients.


def identify(client, message):
    """Trains the initial model locally and describes the cross-class similarity of its features."""
    client.load(message.group("model"))
    client.fit(objective=adjusted(client), purpose="identification")
    leading = [v for v, _ in vectors_by_class(client).values()]
    cosines = [float(abs(a @ b)) for i, a in enumerate(leading) for b in leading[i + 1 :]]
    client.memory["known"] = True
    return Message.of({"samples": client.num_samples, "classes": len(leading), "similarity": sum(cosines)})


def describe(client, message):
    """Weighted projectors ``n_kc v v^T`` of every class, as matrices of one shape whatever the client holds."""
    client.load(message.group("reference"))
    d = client.trainer.features(client.data.subset(torch.arange(1))).shape[1]
    projectors = {str(c): torch.zeros(d, d) for c in range(client.task.num_classes)}
    for c, (v, count) in vectors_by_class(client).items():
        projectors[str(c)] = count * torch.outer(v, v)
    return Message.of({"samples": client.num_samples, "one": 1}, projectors=projectors)


def relabel(client, message):
    """Corrects labels by the largest projection on the consensus vectors; they stay in the client's memory."""
    client.load(message.group("reference"))
    vectors = torch.stack([v for _, v in sorted(message.group("consensus").items())])
    features = client.trainer.features(client.data)
    found = (features @ vectors.T).abs().argmax(dim=1)
    corrected = torch.where(found == client.trainer.predict(client.data).argmax(dim=1), found, client.data.labels)
    client.memory["labels"] = corrected
    return Message.of({"samples": client.num_samples, "edited": int((corrected != client.data.labels).sum())})


def train(client, message):
    """A clean client trains with logit adjustment, a noisy one also follows the received model as its teacher."""
    received = message.group("model")
    client.load(received)
    if message.values["status"] == "clean":
        result = client.fit(objective=adjusted(client))
    else:
        data = client.data.with_labels(client.memory["labels"]) if "labels" in client.memory else client.data
        objective = distilled(client, received, message.values["lambda"], message.values["temperature"])
        result = client.fit(data, objective=objective)
    return Message.of(
        {"samples": client.num_samples, "loss": result.loss, "relabelled": "labels" in client.memory},
        model=client.model(),
    )


def adjusted(client):
    return ClassificationObjective("multiclass", logit_adjustment_offsets(client.class_counts()))


def distilled(client, teacher, share, temperature):
    hard = adjusted(client)

    def objective(network, batch):
        with evaluating(network), torch.no_grad():
            soft = functional_call(network, teacher, (batch["image"],)).div(temperature).softmax(dim=1)
        logits = network(batch["image"])
        student = ((logits + hard.offsets) / temperature).log_softmax(dim=1)
        soft_loss = nn.functional.kl_div(student, soft, reduction="batchmean")
        return share * soft_loss + (1 - share) * hard.loss(logits, batch["label"])

    return objective


def vectors_by_class(client):
    """Leading right singular vector and count of every class with two samples."""
    features = client.trainer.features(client.data)
    out = {}
    for c in range(client.task.num_classes):
        rows = features[client.data.labels == c]
        if len(rows) > 1:
            v = torch.linalg.svd(rows, full_matrices=False).Vh[0]
            out[c] = (v * torch.sign(v.sum()), len(rows))
    return out


# Server.


def program(server, settings):
    """Identify once; then train, with a checkpoint every ``period`` rounds."""
    status = server.once("status", lambda: divide(server)).values["status"]
    clean = [c for c, s in status.items() if s == "clean"]
    noisy = [c for c, s in status.items() if s == "noisy"]
    share = len(clean) / len(status)
    for round in server.rounds():
        edited = {}
        if round % settings.period == 0:
            edited = checkpoint(server, clean, noisy).value("edited")
        replies = server.ask(
            "train",
            Message.of({"lambda": share, "temperature": settings.temperature}, model=server.model),
            clients=status,
            each={c: {"status": s} for c, s in status.items()},
            expect={"model": server.model},
        )
        weights = {}
        if replies:
            states = replies.states("model")
            weights = distance_aware(states, replies.value("samples"), set(clean))
            server.model = weighted_mean(list(states.values()), list(weights.values()))
            latest = [c for c in clean if c in states]
            if latest:
                counts = [replies.value("samples")[c] for c in latest]
                server.notes["reference"] = Message.of({}, model=weighted_mean([states[c] for c in latest], counts))
        yield server.report(replies, weight=weights, edited=edited)


def divide(server):
    """Stage I: clients below the mean similarity count as clean."""
    request = Message.of({}, model=server.model)
    replies = server.ask("identify", request, clients=server.clients, numbers=("similarity", "classes"))
    similarity = {r.client: r.values["similarity"] for r in replies if r.values["classes"] > 1}
    middle = sum(similarity.values()) / len(similarity)
    status = {c: "clean" if similarity.get(c, middle + 1) <= middle else "noisy" for c in server.clients}
    server.report(replies, status=status, server={"clean clients": sum(s == "clean" for s in status.values())})
    return Message(values={"status": status})


def checkpoint(server, clean, noisy):
    """Per-class projectors up from clean clients, their leading eigenvectors down to noisy ones."""
    reference = server.notes["reference"].group("model") if "reference" in server.notes else server.model
    means = {"projectors": Mean("projectors", "one")}
    replies = server.ask("describe", Message.of({}, reference=reference), clients=clean, mean=means)
    consensus = {c: torch.linalg.eigh(p).eigenvectors[:, -1] for c, p in replies.mean["projectors"].items()}
    return server.ask("relabel", Message.of({}, reference=reference, consensus=consensus), clients=noisy)


def distance_aware(states, samples, clean):
    """DaAgg: sample counts times exp(-d), d the distance to the nearest clean model over the largest such."""
    floats = {c: [t for t in s.values() if t.is_floating_point()] for c, s in states.items()}

    def between(a, b):
        return sum(float((x - y).norm()) for x, y in zip(floats[a], floats[b]))

    near = {c: 0.0 if c in clean else min((between(c, o) for o in clean & set(states)), default=0.0) for c in states}
    largest = max(near.values()) or 1.0
    raw = {c: samples[c] * float(torch.exp(torch.tensor(-d / largest))) for c, d in near.items()}
    return {c: w / sum(raw.values()) for c, w in raw.items()}


METHOD = Method(
    name="staged",
    title="A prototype",
    paper="-",
    program=program,
    tasks={"identify": identify, "describe": describe, "relabel": relabel, "train": train},
    settings=StagedSettings,
    sends="descriptors once, per-class projectors at checkpoints",
    keeps="corrected labels",
)
