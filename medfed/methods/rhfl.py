"""RHFL: every client keeps a model of its own; they learn from one another's predictions on public images.

Fang, Ye. Robust Federated Learning with Noisy and Heterogeneous Clients. CVPR 2022.

There is no global model: what is measured is the mean over the clients' models. Needs public images without labels.

1. Once, every client trains the common initial model on its own labels with symmetric cross-entropy.
2. Every round all send their predictions on the public images, and the mean loss on their own images. How much a
   client is listened to depends on how fast that loss falls (client confidence re-weighting). Each then follows the
   weighted predictions of the others on the public images, and trains on its own labels.

The clients' models may differ in the paper; here they have one architecture. Predictions are exchanged once a round, as
the paper's equations have it.

``form: as_released`` exchanges them for every batch of public images, as the released code does. All predict the batch
in training mode, that is the same augmented images with the statistics of the batch, and then each takes one step on it
with a new optimiser. The loss on the own images is measured in training mode too. Incomplete batches are dropped,
unless there is no other. Where losses rise on the whole, those whose losses rise most are listened to most. Who fails
in an exchange sits out the rest of the round. Not reproduced: in that code the pass that measures the loss also moves
BatchNorm's running statistics, and its mean is one over complete batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch.nn import functional as F

from medfed.data.arrays import ArrayDataset, batch_slices
from medfed.errors import DataError
from medfed.federation.client import Client
from medfed.federation.messages import Message, Replies, State
from medfed.federation.method import Method
from medfed.federation.server import RoundReport, Server
from medfed.methods.noise_aware import NoisyTraining, prior_adjusted
from medfed.seeding import torch_generator

if TYPE_CHECKING:
    from torch import nn

MODEL, OWN = "model/", "public_predictions"


class RHFLSettings(NoisyTraining):
    """Settings of RHFL; defaults are those of the released code.

    Args:
        form: ``published``, or ``as_released``: see :mod:`medfed.methods.rhfl`.
        pretraining: passes over a client's own data before the first round.
        local_epochs: passes over its own data in a round; None is as many as the public images are larger than it, at
            least one.
        cross_entropy: weight of the cross-entropy.
        reverse: weight of the reverse cross-entropy.
        confidence: how much a client's confidence counts (eta); 0 listens to all alike.
    """

    form: Literal["published", "as_released"] = "published"
    pretraining: int = Field(40, ge=0)
    local_epochs: int | None = Field(None, ge=1)  # type: ignore[assignment]
    cross_entropy: float = Field(0.1, ge=0)
    reverse: float = Field(1.0, ge=0)
    confidence: float = Field(0.5, ge=0)

    def request(self) -> dict[str, Any]:
        """The plain values of any request."""
        own = {"cross_entropy": self.cross_entropy, "reverse": self.reverse, "released": self.form == "as_released"}
        return {**super().request(), **own}


# Clients.


def symmetric(logits: torch.Tensor, labels: torch.Tensor, cross_entropy: float, reverse: float) -> torch.Tensor:
    """Symmetric cross-entropy of each sample ``[B]`` (Wang et al., ICCV 2019): ``a CE + b RCE``.

    RCE is ``-sum_c p_c log(e_c)``, where the one-hot label e counts as 1e-4 in place of 0 and p as 1e-7 at least.
    """
    observed = F.one_hot(labels, logits.shape[1]).to(logits).clamp_min(1e-4)
    predicted = logits.softmax(dim=1).clamp_min(1e-7)
    rce = -(predicted * observed.log()).sum(dim=1)
    return cross_entropy * F.cross_entropy(logits, labels, reduction="none") + reverse * rce


def fit_own(client: Client, values: Mapping[str, Any], epochs: int, purpose: str) -> Any:
    """Trains the resident network on the client's own labels."""
    base = prior_adjusted(client, values["logit_adjustment"])

    def objective(network: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits = base.adjusted(network(batch["image"]))
        return symmetric(logits, batch["label"], values["cross_entropy"], values["reverse"]).mean()

    options = {"learning_rate": values["learning_rate"], "drop_last": values["released"]}
    return client.fit(objective=objective, epochs=epochs, purpose=purpose, **options)


def pretrain(client: Client, message: Message) -> Message:
    """Client task: begins the client's own model from the received one.

    Args:
        client: the client.
        message: group ``model``; values ``pretraining`` (epochs) and those of :meth:`RHFLSettings.request`.

    Returns:
        Value ``samples``.
    """
    client.load(message.group("model"))
    if message.values["pretraining"]:
        fit_own(client, message.values, message.values["pretraining"], "pretraining")
    keep(client)
    return Message.of({"samples": client.num_samples})


def predict(client: Client, message: Message) -> Message:
    """Client task: what the client's model says of the public images of an exchange.

    Args:
        client: the client.
        message: values ``first`` (of the round), those of :func:`exchanges` and of :meth:`RHFLSettings.request`.

    Returns:
        Group ``public``: ``predictions`` ``[P, C]``, probabilities; value ``samples``, and in the first exchange
        ``own_loss``, the mean symmetric cross-entropy on its own images.
    """
    values = message.values
    client.load(own_model(client))
    shown, options = shown_to(client, values)
    trainer = client.trainer
    logits = trainer.predict_as_in_training(shown, **options) if values["released"] else trainer.predict(shown)
    predictions = logits.softmax(dim=1)
    client.memory[OWN] = predictions
    told = {"samples": client.num_samples, **({"own_loss": own_loss(client, values)} if values["first"] else {})}
    return Message.of(told, public={"predictions": predictions})


def shown_to(client: Client, values: Mapping[str, Any]) -> tuple[ArrayDataset, dict[str, Any]]:
    """The public images of an exchange, and how they are trained on: seed parts and batch size.

    The seed parts of a batch of the released form have no client in them, so that everybody sees the same images.
    """
    if not values["released"]:
        return client.public, {"seed_parts": (client.seed, client.round, client.name, "public")}
    rows, parts = values["rows"], (client.seed, client.round, "public", values["exchange"])
    return client.public.subset(torch.tensor(rows)), {"seed_parts": parts, "batch_size": len(rows)}


def own_loss(client: Client, values: Mapping[str, Any]) -> float:
    """Mean symmetric cross-entropy of the resident network on the client's own images."""
    if values["released"]:
        parts = (client.seed, client.round, client.name, "own loss")
        logits = client.trainer.predict_as_in_training(client.data, seed_parts=parts)
    else:
        logits = client.trainer.predict(client.data)
    losses = symmetric(logits, client.data.labels, values["cross_entropy"], values["reverse"])
    return float(losses.double().mean())


def train(client: Client, message: Message) -> Message:
    """Client task: follows the others on the public images of an exchange; after the last, trains on its own.

    ``sum_(j != k) W_j KL(p_j || p_k)`` has the gradient of the cross-entropy with ``sum_(j != k) W_j p_j``, which is
    what everybody is sent less one's own part; so, of three clients or more, none is told what a single other one
    predicts.

    Args:
        client: the client.
        message: group ``public``: ``total`` ``[P, C]``, the weighted sum of all predictions; values ``weight`` (its
            own), ``last`` (exchange of the round), those of :func:`exchanges` and of :meth:`RHFLSettings.request`.

    Returns:
        Values ``samples``, ``public_loss``, ``steps`` and ``skipped``, and after the last exchange ``loss`` (of its own
        labels).
    """
    values = message.values
    client.load(own_model(client))
    shown, options = shown_to(client, values)
    others = (message.group("public")["total"] - values["weight"] * client.memory[OWN]).clamp_min(0)

    def follow(network: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits = network(batch["image"])
        return -(others[batch["index"]].to(logits) * logits.log_softmax(dim=1)).sum(dim=1).mean()

    results = [client.trainer.fit(shown, objective=follow, learning_rate=values["learning_rate"], **options)]
    told = {"samples": client.num_samples, "public_loss": results[0].loss}
    if values["last"]:
        epochs = values["epochs"] or max(1, len(client.public) // client.num_samples)
        results.append(fit_own(client, values, epochs, "own"))
        told["loss"] = results[1].loss
    keep(client)
    del client.memory[OWN]
    return Message.of({**told, "steps": sum(r.steps for r in results), "skipped": sum(r.skipped for r in results)})


def own_model(client: Client) -> State:
    """The client's own model.

    Raises:
        DataError: it has none yet.
    """
    found = {name.removeprefix(MODEL): client.memory[name] for name in client.memory if name.startswith(MODEL)}
    if not found:
        raise DataError("this client has no model yet.", where=client.name)
    return found


def keep(client: Client) -> None:
    """Keeps the resident network as the client's own model."""
    for name, tensor in client.model().items():
        client.memory[MODEL + name] = tensor


# The server.


def confidences(
    losses: Mapping[str, float], earlier: Mapping[str, float], eta: float, released: bool = False
) -> dict[str, float]:
    """How much each client is listened to, W_k, from its mean loss now and a round ago.

    ``W_k = exp(a_k) / sum_j exp(a_j)``, ``a_k = 1 / (K - 1) + eta q_k / sum_j q_j``, ``q_k = (L_k' - L_k) / L_k``; and
    ``1 / (K - 1)`` for everybody as long as nobody has an earlier loss. A client without one, or without a loss to
    divide by, has q = 0. Where the q have no positive sum, the quotient would reward the clients whose losses rise: all
    are listened to alike then.

    Args:
        losses: L_k of the clients of the round.
        earlier: L_k' of the round before.
        eta: weight of the confidence.
        released: the quotient is taken with a negative sum too.
    """
    count = len(losses)
    base = 1 / max(1, count - 1)
    if not any(c in earlier for c in losses):
        return dict.fromkeys(losses, base)
    quality = {c: (earlier[c] - loss) / loss if c in earlier and loss > 0 else 0.0 for c, loss in losses.items()}
    total = math.fsum(quality.values())
    divided = (abs(total) if released else total) > 1e-12
    a = {c: base + (eta * q / total if divided else 0.0) for c, q in quality.items()}
    excess = max(0.0, max(a.values()) - 100)  # of a sum near 0; exp would overflow
    raw = {c: math.exp(x - excess) for c, x in a.items()}
    whole = math.fsum(raw.values())
    return {c: w / whole for c, w in raw.items()}


def program(server: Server, settings: RHFLSettings) -> Iterator[RoundReport]:
    """Pre-training once, then rounds of predictions and training; the server's model stays as it was."""
    for _ in server.rounds():
        begin(server, settings)
        yield one_round(server, settings)


def one_round(server: Server, settings: RHFLSettings) -> RoundReport:
    """The exchanges of a round, in which all predict and then learn from one another, and training on own labels."""
    asked, planned = server.participants(), exchanges(server, settings)
    weights: dict[str, float] = {}
    answers: list[Replies] = []
    for number, shown in enumerate(planned):
        first, last = number == 0, number == len(planned) - 1
        values = {**settings.request(), **shown, "first": first, "last": last}
        numbers = ("samples", "own_loss") if first else ("samples",)
        told = server.ask("predict", Message.of(values), clients=asked, numbers=numbers, quorum=None if first else 1)
        told = alike(told)
        if first:
            answers.append(told)
            weights = listened_to(server, told, settings)
        if not told:
            break
        total = torch.stack([weights[r.client] * r.group("public")["predictions"] for r in told]).sum(dim=0)
        message = Message.of(values, public={"total": total})
        each = {c: {"weight": weights[c]} for c in told.clients}
        replies = server.ask("train", message, clients=told.clients, each=each, numbers=("samples",), quorum=1)
        asked = replies.clients
        answers.append(replies)
    return server.report(*answers, weight=weights, **over_exchanges(answers[1:]))


def exchanges(server: Server, settings: RHFLSettings) -> list[dict[str, Any]]:
    """What each exchange of a round is about, as plain values: all public images, or in the released form a batch.

    Returns:
        Nothing more to say of the one exchange of the published form; else ``exchange``, its number, and ``rows``, the
        images of the batch. An incomplete batch is left out, unless it is the only one.
    """
    if settings.form == "published":
        return [{}]
    bench = server.public
    order = torch.randperm(len(bench.data), generator=torch_generator(server.seed, "public batches", server.round))
    slices = batch_slices(len(order), bench.trainer.bundle.batch_size, drop_last=True)
    return [{"exchange": number, "rows": order[part].tolist()} for number, part in enumerate(slices)]


def listened_to(server: Server, told: Replies, settings: RHFLSettings) -> dict[str, float]:
    """The weights of a round's clients by their losses, which are noted for the next round."""
    if not told:
        return {}
    losses = {c: float(v) for c, v in told.value("own_loss").items()}
    earlier = dict(server.notes["losses"].values) if "losses" in server.notes else {}
    server.notes["losses"] = Message(values={**earlier, **losses})
    return confidences(losses, earlier, settings.confidence, settings.form == "as_released")


def over_exchanges(answers: list[Replies]) -> dict[str, dict[str, Any]]:
    """Of each client, over the exchanges of a round: mean ``public_loss``, sum of ``steps``, sum of ``skipped``."""
    found: dict[str, dict[str, Any]] = {"public_loss": {}, "steps": {}, "skipped": {}}
    for client in sorted({c for replies in answers for c in replies.clients}):
        own = [dict(r.values) for replies in answers for r in replies if r.client == client]
        for name in found:
            known = [v[name] for v in own if isinstance(v.get(name), (int, float))]
            if known:
                found[name][client] = math.fsum(known) / len(known) if name == "public_loss" else sum(known)
    return found


def begin(server: Server, settings: RHFLSettings) -> None:
    """Lets the round's participants that have no model yet make one."""
    begun = set(server.notes["begun"].values["clients"]) if "begun" in server.notes else set()
    new = [c for c in server.participants() if c not in begun]
    if not new:
        return
    message = Message.of({**settings.request(), "pretraining": settings.pretraining}, model=server.model)
    name = f"pretraining {server.round}"

    def produce() -> Message:
        replies = server.ask("pretrain", message, clients=new, numbers=("samples",), quorum=1)
        server.report(replies)
        return Message(values={"clients": list(replies.clients)})

    done = server.once(name, produce)
    server.notes["begun"] = Message(values={"clients": sorted({*begun, *done.values["clients"]})})


def alike(replies: Replies) -> Replies:
    """The replies whose predictions have the form of the first one's."""
    shapes = {r.client: getattr(r.group("public").get("predictions"), "shape", None) for r in replies}
    first = next((s for s in shapes.values() if s is not None), None)
    return Replies(tuple(r for r in replies if first is not None and shapes[r.client] == first), replies.refused)


METHOD = Method(
    name="rhfl",
    title="A model a client, taught by the others' predictions on public images (label noise)",
    paper="Fang and Ye, CVPR 2022",
    program=program,
    tasks={"pretrain": pretrain, "predict": predict, "train": train},
    settings=RHFLSettings,
    sends="predictions on public images, mean loss",
    keeps="its own model",
    needs="public unlabelled images",
    task_kinds=("multiclass",),
    public=True,
    personal=True,
)
