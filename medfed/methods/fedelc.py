"""FedELC: clients with noisy labels are found as in FedNoRo; there, labels are learnt together with the model.

Jiang, Li, Wu, Sun, Wang, Li. Tackling Noisy Clients in Federated Learning with End-to-end Label Correction. CIKM 2024.
The learning of labels is that of PENCIL (Yi and Wu, CVPR 2019).

1. Warm-up: rounds of FedAvg with logit adjustment.
2. Once: identification of noisy clients by their mean losses on each class, as in :mod:`medfed.methods.fednoro`.
3. Then clean clients train as before. At the others every sample has label logits u, which stay there: the network
   learns the distribution softmax(u) while u follows the network, held back by the observed label. Models are weighted
   by their distance to the clean ones (DaAgg).

``form: as_released`` is what the released code computes: losses of the identification on augmented images, as in
:mod:`medfed.methods.fednoro`; incomplete batches dropped from all training, so that the labels in them do not learn in
that epoch; and predictions for the merge in training mode, on augmented images and with the statistics of each batch.
That code fails on a client with fewer samples than a batch; here they are its only batch, which is kept. It leaves an
incomplete batch out of the test set too, and compares labels with the true ones; neither is part of the method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch.nn import functional as F

from medfed.data.arrays import batch_slices
from medfed.federation.client import Client
from medfed.federation.messages import Message
from medfed.federation.method import Method
from medfed.federation.server import RoundReport, Server
from medfed.methods import fedavg
from medfed.methods.fednoro import check_warmup, class_losses, identified, round_by_status
from medfed.methods.local_training import train
from medfed.methods.noise_aware import NoisyTraining, correct_labels, prior_adjusted, trained

if TYPE_CHECKING:
    from torch import nn

LOGITS = "label_logits"


class FedELCSettings(NoisyTraining):
    """Settings of FedELC; defaults are those of the released code.

    Args:
        form: ``published``, or ``as_released``: see :mod:`medfed.methods.fedelc`.
        warmup: rounds of the first stage, before clients are judged.
        logit_adjustment: logits shifted by the log of the client's class frequencies, in the warm-up and at clean
            clients; the loss of noisy clients has no such shift.
        scale: logit of the observed class at the beginning, the others being 0; and what the merged probabilities are
            multiplied by after a round.
        alpha: weight of the cross-entropy of the label distribution against the observed label.
        beta: weight of the entropy of the predictions.
        label_rate: learning rate of the label logits, on the gradient of a batch's mean loss: it goes with the batch
            size (64 in the released code).
        daagg: models weighted by distance to the nearest clean one; otherwise by sample counts.
    """

    form: Literal["published", "as_released"] = "published"
    warmup: int = Field(20, ge=1)
    logit_adjustment: bool = True
    scale: float = Field(10.0, gt=0)
    alpha: float = Field(0.5, ge=0)
    beta: float = Field(0.2, ge=0)
    label_rate: float = Field(1000.0, ge=0)
    daagg: bool = True

    def check(self, rounds: int) -> list[str]:
        """Refuses a warm-up that leaves no round for the second stage."""
        check_warmup(self.warmup, rounds)
        return super().check(rounds)

    @property
    def released(self) -> bool:
        """Whether the released form is wanted."""
        return self.form == "as_released"

    def request(self) -> dict[str, Any]:
        """The plain values of a request to train."""
        return {**super().request(), "drop_last": self.released}

    def second_stage(self) -> dict[str, Any]:
        """The plain values of a ``train_by_status`` request."""
        given = {k: getattr(self, k) for k in ("scale", "alpha", "beta", "label_rate")}
        return {**self.request(), **given, "released": self.released}


class LabelCorrection:
    """The objective of noisy clients, which also gathers the gradients of the label logits.

    Args:
        labels: observed labels ``[N]``.
        logits: label logits u ``[N, C]``.
        alpha: see :func:`correction_loss`.
        beta: see :func:`correction_loss`.
        rate: learning rate of the label logits.
        epoch: samples of an epoch, where incomplete batches are dropped; all by default.
    """

    def __init__(
        self,
        labels: torch.Tensor,
        logits: torch.Tensor,
        alpha: float,
        beta: float,
        rate: float,
        epoch: int | None = None,
    ):
        self.labels, self.logits = labels, logits.clone()
        self._epoch = len(labels) if epoch is None else epoch
        self.alpha, self.beta, self.rate = alpha, beta, rate
        self._gradient = torch.zeros_like(self.logits)
        self._seen = 0
        self._scores = self.logits[:0]

    def __call__(self, network: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Mean loss of a batch, a 0-dim tensor."""
        scores = network(batch["image"])
        self._scores = scores.detach()
        given = self.logits[batch["index"].to(self.logits.device)].to(scores.device)
        return correction_loss(scores, given, batch["label"], self.alpha, self.beta)

    def after(self, batch: Mapping[str, torch.Tensor], output: Mapping[str, Any]) -> None:
        """Keeps the gradients of a batch, and at the end of an epoch takes the step of all label logits."""
        rows = batch["index"].to(self.logits.device)
        if not output["skipped"]:
            scores = self._scores.to(self.logits)
            self._gradient[rows] = label_gradient(scores, self.logits[rows], self.labels[rows], self.alpha)
        self._seen += len(rows)
        if self._seen >= self._epoch:
            self.logits -= self.rate * self._gradient
            self._gradient.zero_()
            self._seen = 0


def correction_loss(
    scores: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, alpha: float, beta: float
) -> torch.Tensor:
    """The loss of a batch, with p = softmax(scores) and y = softmax(logits)::

        KL(p || y) / C + alpha CE(y, observed) + beta H(p) / C

    Args:
        scores: of the network ``[B, C]``.
        logits: label logits u ``[B, C]``.
        labels: observed labels ``[B]``.
        alpha: weight of the observed label.
        beta: weight of the entropy.

    Returns:
        The mean over the batch, 0-dim.
    """
    told, known = scores.log_softmax(dim=1), logits.log_softmax(dim=1)
    entropy = -(told.exp() * told).sum(dim=1).mean()
    divergence = -(told.exp() * known).sum(dim=1).mean() - entropy
    return (divergence + beta * entropy) / scores.shape[1] + alpha * F.nll_loss(known, labels)


def label_gradient(scores: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, alpha: float) -> torch.Tensor:
    """Gradient of :func:`correction_loss` with respect to the label logits ``[B, C]``, p taken as given.

    ``((y - p) / C + alpha (y - e)) / B`` with e = 1 at the observed class; in closed form, since a loss scale of mixed
    precision would be part of one that came from the backward pass.
    """
    known, (samples, classes) = logits.softmax(dim=1), logits.shape
    observed = F.one_hot(labels, classes).to(known)
    return ((known - scores.softmax(dim=1)) / classes + alpha * (known - observed)) / samples


def merged(logits: torch.Tensor, scores: torch.Tensor, scale: float) -> torch.Tensor:
    """Label logits after a round: ``scale (softmax(u) + softmax(f(x))) / 2``, ten times a probability as published."""
    return scale * (logits.softmax(dim=1) + scores.to(logits).softmax(dim=1)) / 2


def train_by_status(client: Client, message: Message) -> Message:
    """Client task: training of a clean client, or training and label correction of any other.

    Label logits (``label_logits`` of the memory) and the classes that they favour (``labels``) never leave the client.

    Args:
        client: the client.
        message: group ``model``; values ``status``, ``epochs``, ``learning_rate``, ``logit_adjustment``, ``scale``,
            ``alpha``, ``beta``, ``label_rate``, ``drop_last`` and ``released``.

    Returns:
        Group ``model``; values ``samples``, ``loss``, ``steps``, ``skipped``, and where labels are corrected
        ``edited``: how many of them now favour another class than the observed one.
    """
    values, options = message.values, {k: message.values[k] for k in ("epochs", "learning_rate", "drop_last")}
    client.load(message.group("model"))
    if values["status"] == "clean":
        objective = prior_adjusted(client, values["logit_adjustment"], least_count=0)
        return trained(client, client.fit(objective=objective, **options))
    labels = client.data.labels
    logits = client.memory.get(LOGITS)
    if logits is None:
        logits = values["scale"] * F.one_hot(labels, client.task.num_classes).float()
    size = client.trainer.bundle.batch_size
    epoch = batch_slices(client.num_samples, size, drop_last=values["drop_last"])[-1].stop
    correction = LabelCorrection(labels, logits, values["alpha"], values["beta"], values["label_rate"], epoch)
    result = client.fit(objective=correction, on_batch=correction.after, **options)
    logits = merged(correction.logits, final_scores(client, values["released"]), values["scale"])
    client.memory[LOGITS] = logits
    return trained(client, result, edited=correct_labels(client, logits.argmax(dim=1)))


def final_scores(client: Client, released: bool) -> torch.Tensor:
    """Scores of the trained network on the client's images ``[N, C]``: for the merge."""
    if released:
        return client.trainer.predict_as_in_training(
            client.data, seed_parts=(client.seed, client.round, client.name, "merge")
        )
    return client.trainer.predict(client.data)


def program(server: Server, settings: FedELCSettings) -> Iterator[RoundReport]:
    """Warm-up, identification, then rounds by status.

    Raises:
        ConfigError: the warm-up leaves no round for the second stage.
    """
    check_warmup(settings.warmup, server.num_rounds)
    for _ in server.rounds(until=settings.warmup):
        yield fedavg.one_round(server, settings.request())
    for _ in server.rounds():
        verdict = identified(server, augmented=settings.released)
        if verdict is None:
            yield fedavg.one_round(server, settings.request())
        else:
            yield round_by_status(server, settings.second_stage(), verdict, settings.daagg)


METHOD = Method(
    name="fedelc",
    title="Judges clients by their losses, then learns the labels of the noisy ones with the model (label noise)",
    paper="Jiang et al., CIKM 2024",
    program=program,
    tasks={"train": train, "class_losses": class_losses, "train_by_status": train_by_status},
    settings=FedELCSettings,
    sends="sample count, labels changed (number); once, its mean loss by class",
    keeps="label logits of every sample",
    task_kinds=("multiclass",),
)
