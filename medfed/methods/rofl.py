"""RoFL: clients exchange class centroids, by which samples with small losses are trusted or given the model's class.

Yang, Park, Byun, Kim. Robust Federated Learning with Noisy Labels. IEEE Intelligent Systems 2022 (arXiv 2012.01700).

Every batch learns from its samples with the smallest losses alone. Of these, a sample whose features are nearest to the
centroid of its observed class keeps that label and is drawn to the centroid; any other one learns the class that the
received model gives it. Centroids follow the features within a round and are combined by their agreement afterwards.

The authors' code is not public. ``form: as_released`` is the public port by others: features are cut off from the
gradient before the centroid loss, which then changes nothing; that loss is a sum over the batch, not a mean; and the
server's centroids begin as random numbers, whose cosines are the weights of the first combination.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch.nn import functional as F

from medfed.federation.client import Client
from medfed.federation.messages import Message, Replies
from medfed.federation.method import Method
from medfed.federation.server import RoundReport, Server
from medfed.methods.noise_aware import NoisyTraining, correct_labels, prior_adjusted, trained
from medfed.seeding import torch_generator

if TYPE_CHECKING:
    from torch import nn

    from medfed.training.objectives import ClassificationObjective

TINY = 1e-8
_SHARE = 0.1


class RoFLSettings(NoisyTraining):
    """Settings of RoFL; defaults are those of the public port.

    Args:
        form: ``published``, or ``as_released``: see :mod:`medfed.methods.rofl`.
        noise_rate: share of each batch that is left out, the expected share of wrong labels.
        gradual: rounds over which that share rises from 0.
        pseudo_from: round, counted from 0, from which samples far from their centroid learn the model's class, and up
            to which the centroid loss rises from 0; None is a tenth of all rounds (100 of 1000 in the port).
        centroid_weight: weight of the centroid loss.
        entropy_weight: weight of the entropy of the predictions.
    """

    form: Literal["published", "as_released"] = "published"
    noise_rate: float = Field(0.2, ge=0, lt=1)
    gradual: int = Field(10, ge=0)
    pseudo_from: int | None = Field(None, ge=0)
    centroid_weight: float = Field(1.0, ge=0)
    entropy_weight: float = Field(0.8, ge=0)

    def check(self, rounds: int) -> list[str]:
        """Names settings without effect."""
        found = super().check(rounds)
        if self.form == "as_released":
            found += self.idle(("centroid_weight",), "form: as_released")
        if self.noise_rate == 0:
            found += self.idle(("gradual",), "noise_rate: 0")
        if self.pseudo_from is not None and self.pseudo_from >= rounds:
            found.append(
                f"no class of the model is learnt: method.pseudo_from is {self.pseudo_from}, counted from 0, and there "
                f"are {rounds} rounds"
            )
        return found

    @property
    def depends_on_rounds(self) -> bool:
        """Whether classes of the model are learnt from a share of the rounds on."""
        return self.pseudo_from is None

    def values(self, round: int, rounds: int) -> dict[str, Any]:
        """The plain values of a ``train`` request in one round, counted from 1."""
        passed = round - 1
        begin = int(_SHARE * rounds) if self.pseudo_from is None else self.pseudo_from
        rise = min(1.0, passed / (self.gradual - 1)) if self.gradual > 1 else 1.0
        return {
            **self.request(),
            "left_out": self.noise_rate * rise,
            "pseudo": passed >= begin,
            "centroid_weight": self.centroid_weight * (min(1.0, passed / begin) if begin else 1.0),
            "entropy_weight": self.entropy_weight,
            "released": self.form == "as_released",
        }


class CentroidObjective:
    """The objective of a client, which also moves its centroids after each step; see :func:`centroid_loss`.

    Args:
        base: the classification objective.
        centroids: ``[C, d]`` at the beginning.
        pseudo: classes for samples far from their centroid ``[N]``; None keeps observed labels.
        labels: observed labels ``[N]``.
        values: ``left_out``, ``centroid_weight``, ``entropy_weight`` and ``released``.
    """

    def __init__(
        self,
        base: ClassificationObjective,
        centroids: torch.Tensor,
        pseudo: torch.Tensor | None,
        labels: torch.Tensor,
        values: Mapping[str, Any],
    ):
        self.centroids, self.targets = centroids.clone(), labels.clone()
        self._base, self._pseudo, self._labels, self._values = base, pseudo, labels, values
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, network: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Mean loss of a batch, a 0-dim tensor."""
        from medfed.training.predict import pooled_features

        features, logits = pooled_features(network, batch["image"])
        features = features if features.dtype == torch.float64 else features.float()
        labels, rows = batch["label"], batch["index"].to(self._labels.device)
        with torch.no_grad():
            small = small_loss(self._base.losses(logits, labels), self._values["left_out"])
            centroids = self.centroids.to(features)
            near = nearest(features[small], centroids) == labels[small]
            target = labels[small]
            if self._pseudo is not None:
                target = torch.where(near, target, self._pseudo[rows].to(labels)[small])
                self.targets[rows] = self._labels[rows]
                self.targets[rows[small.to(rows.device)]] = target.to(self.targets)
        self._last = features[small].detach(), labels[small]
        adjusted = self._base.adjusted(logits[small])
        return centroid_loss(
            adjusted,
            logits[small],
            features[small],
            centroids[labels[small]],
            near,
            target,
            self._values["centroid_weight"],
            self._values["entropy_weight"],
            self._values["released"],
        )

    def after(self, batch: Mapping[str, torch.Tensor], output: Mapping[str, Any]) -> None:
        """Moves the centroids to the features of the step that was taken."""
        if self._last is not None and not output["skipped"]:
            features, labels = self._last
            self.centroids = moved(self.centroids, features.to(self.centroids), labels.to(self.centroids.device))


def small_loss(losses: torch.Tensor, left_out: float) -> torch.Tensor:
    """Positions of the smallest losses ``[B]``: all but that share, at least one."""
    kept = max(1, int((1 - left_out) * len(losses) + 1e-9))
    return losses.argsort(stable=True)[:kept]


def nearest(features: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Class of the centroid with the largest cosine to each feature vector ``[B]``."""
    return (F.normalize(features, dim=1) @ F.normalize(centroids, dim=1).T).argmax(dim=1)


def class_means(features: torch.Tensor, labels: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean feature vectors ``[C, d]``, 0 for a class without samples, and which classes have some ``[C]``."""
    counts = torch.bincount(labels, minlength=classes)
    sums = features.new_zeros(classes, features.shape[1]).index_add(0, labels, features)
    return sums / counts.clamp_min(1)[:, None].to(sums), counts > 0


def moved(centroids: torch.Tensor, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """``(1 - s^2) f + s^2 f^`` with f^ the class means and s = cos(f, f^); classes without samples stay."""
    means, present = class_means(features, labels, len(centroids))
    weight = F.cosine_similarity(centroids, means, dim=1).square()[:, None] * present[:, None]
    return (1 - weight) * centroids + weight * means


def centroid_loss(
    adjusted: torch.Tensor,
    logits: torch.Tensor,
    features: torch.Tensor,
    own: torch.Tensor,
    near: torch.Tensor,
    target: torch.Tensor,
    centroid_weight: float,
    entropy_weight: float,
    released: bool = False,
) -> torch.Tensor:
    """``CE(z, target) + a mean_i near_i ||h_i - f_(y_i)||^2 + b H(p)`` over the samples with small losses.

    Args:
        adjusted: logits for the cross-entropy ``[S, C]``.
        logits: raw logits.
        features: h ``[S, d]``.
        own: centroid of each observed class ``[S, d]``.
        near: samples nearest to that centroid ``[S]``.
        target: classes to learn ``[S]``.
        centroid_weight: a.
        entropy_weight: b.
        released: features without gradient, and the sum instead of the mean.

    Returns:
        The loss, 0-dim.
    """
    apart = ((features.detach() if released else features) - own).square().sum(dim=1) * near
    told = logits.log_softmax(dim=1)
    entropy = -(told.exp() * told).sum(dim=1).mean()
    drawn = apart.sum() if released else apart.mean()
    return F.cross_entropy(adjusted, target) + centroid_weight * drawn + entropy_weight * entropy


def train(client: Client, message: Message) -> Message:
    """Client task: trains the received model by the received centroids.

    The targets of the last epoch stay in the memory (``labels``) once the model's classes are among them.

    Args:
        client: the client.
        message: groups ``model`` and ``centroids`` (``class`` ``[C, d]``; none in the first round, when the client
            begins with its own class means); values of :meth:`RoFLSettings.values`.

    Returns:
        Groups ``model`` and ``centroids`` (0 for a class that neither side has had yet); values ``samples``, ``loss``,
        ``steps``, ``skipped``, and where classes of the model are learnt ``edited``.
    """
    values, labels = message.values, client.data.labels
    client.load(message.group("model"))
    given = message.group("centroids")
    if given:
        centroids = given["class"]
    else:
        centroids, _ = class_means(client.trainer.features(client.data), labels, client.task.num_classes)
    pseudo = client.trainer.predict(client.data).argmax(dim=1) if values["pseudo"] else None
    base = prior_adjusted(client, values["logit_adjustment"], least_count=0)
    objective = CentroidObjective(base, centroids, pseudo, labels, values)
    result = client.fit(
        objective=objective,
        on_batch=objective.after,
        epochs=values["epochs"],
        learning_rate=values["learning_rate"],
    )
    edited = {} if pseudo is None else {"edited": correct_labels(client, objective.targets)}
    answer = trained(client, result, **edited)
    return Message({**answer.tensors, "centroids/class": objective.centroids}, answer.values)


def combined(previous: torch.Tensor | None, centroids: list[torch.Tensor]) -> torch.Tensor:
    """The server's centroids: ``sum_k s_k f_k / sum_k s_k`` for each class, with s_k = cos(f, f_k).

    Without previous ones, every client that has a class counts the same. A class that no client has, or whose weights
    have no positive sum, keeps its previous centroid.

    Args:
        previous: f ``[C, d]``; None in the first round.
        centroids: f_k of each client.
    """
    stack = torch.stack(centroids).double()
    if previous is None:
        weights = (stack.norm(dim=2) > 0).double()
        previous = torch.zeros_like(stack[0])
    else:
        weights = F.cosine_similarity(previous.double()[None], stack, dim=2)
    total = weights.sum(dim=0)
    mean = (weights[:, :, None] * stack).sum(dim=0) / torch.where(total > TINY, total, 1.0)[:, None]
    return torch.where(total[:, None] > TINY, mean, previous.double()).to(centroids[0])


def program(server: Server, settings: RoFLSettings) -> Iterator[RoundReport]:
    """Rounds of training by centroids; models are averaged without weights."""
    for round in server.rounds():
        values = settings.values(round, server.num_rounds)
        groups = {"model": server.model}
        if "centroids" in server.notes:
            groups["centroids"] = server.notes["centroids"].group("centroids")
        equal = dict.fromkeys(server.participants(), 1.0)
        # In the first round the shape of the centroids is not known yet: their group is checked below.
        replies = server.ask("train", Message.of(values, **groups), mean="model", weight=equal)
        if replies:
            server.model = replies.mean["model"]
            combine(server, replies, settings.form == "as_released")
        told = {k: values[k] for k in ("left_out", "centroid_weight", "pseudo")}
        yield server.report(replies, server=told, weight={c: 1 / len(replies) for c in replies.clients})


def combine(server: Server, replies: Replies, released: bool) -> None:
    """Replaces the server's centroids by those of the replies that have the form of the first."""
    found = [r.group("centroids")["class"] for r in replies if "class" in r.group("centroids")]
    found = [f for f in found if f.shape == found[0].shape]
    if not found:
        return
    previous = server.notes["centroids"].tensors["centroids/class"] if "centroids" in server.notes else None
    if previous is None and released:
        previous = torch.randn(found[0].shape, generator=torch_generator(server.seed, "centroids"))
    server.notes["centroids"] = Message({"centroids/class": combined(previous, found)})


METHOD = Method(
    name="rofl",
    title="Class centroids are exchanged; samples with small losses are trusted or relabelled by them (label noise)",
    paper="Yang et al., IEEE Intelligent Systems 2022",
    program=program,
    tasks={"train": train},
    settings=RoFLSettings,
    sends="sample count, labels changed (number), class centroids",
    keeps="labels as last trained on",
    task_kinds=("multiclass",),
)
