"""FedLSR: local self-regularisation, at the client alone; the server averages.

Jiang, Sun, Wang, Liu. Towards Federated Learning against Noisy Labels via Local Self-Regularization. CIKM 2022.

Every image is seen twice, as it is and lightly changed. The classifier learns from a sharpened mixture of both
predictions, and the two are held together, so that a network is slow to learn what it would have to memorise.

``form: as_released`` is the loss that the released code computes: the sharpened mixture, a probability, is taken for
logits, so that a second softmax flattens it; the divergence is averaged over the classes too; and an entropy term (the
authors' "FedLSR+"), itself of a softmax of a softmax and of the first view alone, is added with weight 0.6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field

from medfed.federation.client import Client
from medfed.federation.messages import Message
from medfed.federation.method import Method, MethodSettings
from medfed.federation.server import RoundReport, Server
from medfed.methods import fedavg
from medfed.methods.noise_aware import NoisyTraining, prior_adjusted, trained
from medfed.seeding import numpy_generator, torch_generator

if TYPE_CHECKING:
    from torch import nn

    from medfed.training.objectives import ClassificationObjective

SMALLEST = 1e-6
"""Probabilities below it count as it in the released form."""


class SecondView(MethodSettings):
    """The light change of an image that makes its second view, after the bundle's own augmentation.

    The paper rotates digits by up to 30 degrees, and flips colour images and changes their colours; these are the
    mild changes that medical images stand.

    Args:
        degrees: largest rotation, either way.
        translate: largest shift as a share of height and width, either way.
        flip: probability of a horizontal flip.
        contrast: largest relative change of contrast, either way.
        brightness: largest change of brightness in standard deviations of the image, either way.
    """

    degrees: float = Field(10.0, ge=0, le=180)
    translate: float = Field(0.02, ge=0, le=1)
    flip: float = Field(0.5, ge=0, le=1)
    contrast: float = Field(0.2, ge=0, lt=1)
    brightness: float = Field(0.2, ge=0)


class FedLSRSettings(NoisyTraining):
    """Settings of FedLSR; defaults are those of the released code, except for the second view.

    Args:
        form: ``published``, or ``as_released``: see :mod:`medfed.methods.fedlsr`.
        gamma: largest weight of the divergence of the two views.
        warmup: share of all rounds over which that weight rises from 0.
        sharpen: factor of the logits whose softmax the two views are compared by (inverse temperature).
        power: exponent by which the mixture of predictions is sharpened.
        entropy: weight of the entropy of the predictions; None is 0 as published and 0.6 as released.
        second_view: how the second view of an image is made.
    """

    form: Literal["published", "as_released"] = "published"
    gamma: float = Field(0.4, ge=0)
    warmup: float = Field(0.2, ge=0, le=1)
    sharpen: float = Field(3.0, gt=0)
    power: float = Field(2.0, gt=0)
    entropy: float | None = Field(None, ge=0)
    second_view: SecondView = SecondView()

    def check(self, rounds: int) -> list[str]:
        """Names settings without effect."""
        found = super().check(rounds)
        if self.gamma == 0:
            found += self.idle(("warmup",), "gamma: 0")
            # The entropy of the published form is that of the sharpened predictions too.
            if not self.entropy and (self.form == "published" or self.entropy == 0):
                found += self.idle(("sharpen",), "gamma: 0")
        return found

    @property
    def depends_on_rounds(self) -> bool:
        """Whether the weight of the divergence rises over a share of the rounds."""
        return self.warmup > 0

    def weight(self, round: int, rounds: int) -> float:
        """gamma_t = gamma min(1, t / t_w), t from 0 and t_w a share of all rounds."""
        until = self.warmup * rounds
        return self.gamma * min(1.0, (round - 1) / until) if until else self.gamma

    def values(self, round: int, rounds: int) -> dict[str, Any]:
        """The plain values of a ``train`` request in one round."""
        released = self.form == "as_released"
        return {
            **self.request(),
            "released": released,
            "gamma": self.weight(round, rounds),
            "sharpen": self.sharpen,
            "power": self.power,
            "entropy": (0.6 if released else 0.0) if self.entropy is None else self.entropy,
            "second_view": self.second_view.model_dump(),
        }


class SelfRegularised:
    """The objective: ``CE(p_s, y) + gamma JS(q_1, q_2) + entropy H(q)``, see :func:`self_regularised`.

    Args:
        base: the classification objective, whose offsets shift the logits that the mixture is made of.
        values: ``gamma``, ``sharpen``, ``power``, ``entropy``, ``released`` and ``second_view``.
        seed_parts: what its randomness is for.
    """

    def __init__(self, base: ClassificationObjective, values: Mapping[str, Any], seed_parts: tuple[int | str, ...]):
        from medfed.training.augment import BatchAugment

        view = dict(values["second_view"])
        self._contrast, self._brightness = view.pop("contrast"), view.pop("brightness")
        self._augment, self._base = BatchAugment(**view), base
        self._weights = {k: values[k] for k in ("gamma", "sharpen", "power", "entropy", "released")}
        self._views = torch_generator("second view", *seed_parts)
        self._mixing = numpy_generator("mixing", *seed_parts)

    def __call__(self, network: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Mean loss of a batch, a 0-dim tensor."""
        images = batch["image"]
        share = float(self._mixing.beta(1.0, 1.0))
        first, second = network(images), network(self.second_view(images))
        adjusted = self._base.adjusted(first), self._base.adjusted(second)
        return self_regularised(first, second, adjusted, batch["label"], share, **self._weights)

    def second_view(self, images: torch.Tensor) -> torch.Tensor:
        """Each image changed at random; what comes from outside it has its darkest value."""
        dark = images.amin(dim=(2, 3), keepdim=True)
        moved = self._augment(images - dark, self._views) + dark
        draws = (torch.rand(len(images), 2, generator=self._views) * 2 - 1).to(images)[:, :, None, None, None]
        middle = moved.mean(dim=(1, 2, 3), keepdim=True)
        spread = moved.std(dim=(1, 2, 3), keepdim=True, correction=0)
        contrast, brightness = 1 + self._contrast * draws[:, 0], self._brightness * draws[:, 1]
        return middle + contrast * (moved - middle) + brightness * spread


def self_regularised(
    first: torch.Tensor,
    second: torch.Tensor,
    adjusted: tuple[torch.Tensor, torch.Tensor],
    labels: torch.Tensor,
    share: float,
    *,
    gamma: float,
    sharpen: float = 3.0,
    power: float = 2.0,
    entropy: float = 0.0,
    released: bool = False,
) -> torch.Tensor:
    """The loss of FedLSR, from the logits of two views.

    With p = share softmax(z_1) + (1 - share) softmax(z_2), p_s = p^power scaled to sum to one, and
    q_i = softmax(sharpen z_i)::

        CE(p_s, y) + gamma JS(q_1, q_2) + entropy (H(q_1) + H(q_2)) / 2

    Args:
        first: logits z_1 of the images ``[B, C]``.
        second: logits z_2 of their second view.
        adjusted: the logits of both that the mixture is made of: the same ones, or with a prior.
        labels: class indices ``[B]``.
        share: of the first view in the mixture.
        gamma: weight of the Jensen-Shannon divergence.
        sharpen: inverse temperature of q.
        power: of the sharpening.
        entropy: weight of the entropy.
        released: the loss of the released code.

    Returns:
        The mean over the batch, 0-dim.
    """
    from torch.nn import functional as F

    parts = [z.log_softmax(dim=1) + math.log(max(w, 1e-300)) for z, w in zip(adjusted, (share, 1 - share))]
    mixed = (power * torch.logaddexp(*parts)).log_softmax(dim=1)
    one, two = ((sharpen * z).log_softmax(dim=1) for z in (first, second))
    if released:
        q, r = (x.exp().clamp_min(SMALLEST) for x in (one, two))
        between = ((q + r) / 2).log()
        apart = (q * (q.log() - between) + r * (r.log() - between)).mean() / 2
        # Probabilities as if they were logits, here and in the entropy.
        spread = -(q.softmax(dim=1) * q.log_softmax(dim=1)).sum(dim=1).mean()
        return F.cross_entropy(mixed.exp(), labels) + gamma * apart + entropy * spread
    between = torch.logaddexp(one, two) - math.log(2)
    apart = (one.exp() * (one - between) + two.exp() * (two - between)).sum(dim=1).mean() / 2
    spread = -(one.exp() * one + two.exp() * two).sum(dim=1).mean() / 2
    return F.nll_loss(mixed, labels) + gamma * apart + entropy * spread


def train(client: Client, message: Message) -> Message:
    """Client task: trains the received model with self-regularisation.

    Args:
        client: the client.
        message: group ``model``; values of :meth:`FedLSRSettings.values`.

    Returns:
        Group ``model``; values ``samples``, ``loss``, ``steps`` and ``skipped``.
    """
    client.load(message.group("model"))
    values = message.values
    base = prior_adjusted(client, values["logit_adjustment"], least_count=0)
    objective = SelfRegularised(base, values, (client.seed, client.round, client.name))
    result = client.fit(objective=objective, epochs=values["epochs"], learning_rate=values["learning_rate"])
    return trained(client, result)


def program(server: Server, settings: FedLSRSettings) -> Iterator[RoundReport]:
    """Federated averaging by sample counts."""
    for round in server.rounds():
        values = settings.values(round, server.num_rounds)
        report = fedavg.one_round(server, values)
        report.server["gamma"] = values["gamma"]
        yield report


METHOD = Method(
    name="fedlsr",
    title="Two views of every image: sharpened mixed predictions, and agreement between them (label noise)",
    paper="Jiang et al., CIKM 2022",
    program=program,
    tasks={"train": train},
    settings=FedLSRSettings,
    sends="sample count",
    task_kinds=("multiclass",),
)
