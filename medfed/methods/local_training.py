"""Local training that methods share: settings, the server's half of the message, the client's task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from medfed.federation.client import Client
from medfed.federation.messages import Message
from medfed.federation.method import MethodSettings

if TYPE_CHECKING:
    import torch

    from medfed.data.arrays import ArrayDataset
    from medfed.training.objectives import ClassificationObjective, Objective


class Ball(MethodSettings):
    """How far weights are perturbed.

    Args:
        rho: radius of the perturbation (0.05 in the paper, for ResNet-18 with BatchNorm).
        radius: ``constant`` is the paper's: ||e|| = rho. ``relative`` makes it a share of the norm of the weights,
            ``adaptive`` scales each weight's part by its magnitude (ASAM), and ``bounded`` (medfed's own) takes the
            constant radius where the loss then rises by at most ``share`` of itself, and a smaller one elsewhere.
        share: ``bounded`` only: the largest first-order rise of the loss, as a share of the loss.
        power: FedISM+ only: rho grows as ((t+1)/T)^power over the rounds t = 0..T-1; 0 keeps it constant.
        warmup: rounds over which rho rises linearly from rho/warmup; 0 for none.
    """

    rho: float = Field(0.05, gt=0)
    radius: Literal["constant", "relative", "adaptive", "bounded"] = "constant"
    share: float = Field(0.1, gt=0)
    power: float = Field(0.0, ge=0)
    warmup: int = Field(0, ge=0)

    def ball(self, round: int, rounds: int) -> dict[str, Any]:
        """Radius and rule of one round, counted from 1, as plain values."""
        rho = self.rho * (round / rounds) ** self.power
        rho = rho * min(1.0, round / self.warmup) if self.warmup else rho
        return {"rho": rho, "radius": self.radius, "share": self.share}


def idle_share(section: str, ball: Ball) -> list[str]:
    """A caution that the share of the ``bounded`` radius was given for another one; none where it was not."""
    if ball.radius == "bounded" or "share" not in ball.model_fields_set:
        return []
    return [f"no effect with method.{section}.radius: {ball.radius}: method.{section}.share"]


class Salt(Ball):
    """Sharpness-aware local training (FedISM, Eq. 11; GSAM, Zhuang et al. 2022), with a radius as of :class:`Ball`.

    Args:
        alpha: weight of GSAM's orthogonal component; 0 gives SAM.
    """

    alpha: float = Field(0.1, ge=0)

    @property
    def comparable(self) -> Salt:
        """Itself, with a constant radius where it is bounded: clients must be measured by the same radius."""
        return self.model_copy(update={"radius": "constant"}) if self.radius == "bounded" else self


class LocalTraining(MethodSettings):
    """Settings of local training.

    Args:
        local_epochs: passes over a client's data in a round.
        learning_rate: None takes the bundle's.
        logit_adjustment: trains on logits shifted by the log of the client's class frequencies (Menon et al.
            2021), as FedISM's experiments do for every method.
        salt: sharpness-aware local training; ``true`` takes the defaults.
    """

    local_epochs: int = Field(1, ge=1)
    learning_rate: float | None = Field(None, gt=0)
    logit_adjustment: bool = True
    salt: Salt | None = None

    @field_validator("salt", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return {} if value is True else None if value is False else value

    @property
    def depends_on_rounds(self) -> bool:
        """Whether a radius grows over the rounds."""
        return self.salt is not None and self.salt.power > 0

    def check(self, rounds: int) -> list[str]:
        """Says where the radius is still rising in the last round, and where its share has no effect."""
        found = super().check(rounds) + ([] if self.salt is None else idle_share("salt", self.salt))
        if self.salt is not None and self.salt.warmup > rounds:
            found.append(
                f"rho rises for {self.salt.warmup} rounds (method.salt.warmup) and reaches "
                f"{100 * rounds / self.salt.warmup:.2g} % in the last of {rounds}"
            )
        return found

    def request(self, round: int, rounds: int) -> dict[str, Any]:
        """The plain values of a ``train`` request in one round."""
        values: dict[str, Any] = {
            "epochs": self.local_epochs,
            "learning_rate": self.learning_rate,
            "logit_adjustment": self.logit_adjustment,
        }
        if self.salt is not None:
            values["salt"] = {**self.salt.ball(round, rounds), "alpha": self.salt.alpha}
        return values


def train(client: Client, message: Message) -> Message:
    """Client task: trains the received model on the client's data.

    Args:
        client: the client.
        message: group ``model``; values of :meth:`LocalTraining.request`. Optional value ``drop_last``: incomplete
            batches are left out (FedELC as released).

    Returns:
        Group ``model``; values ``samples``, ``loss`` (mean training loss before the perturbation), ``steps`` and
        ``skipped`` (steps left out because loss or gradient was not finite).
    """
    client.load(message.group("model"))
    return fit_and_reply(client, message)


def received_loss(client: Client, message: Message) -> Message:
    """Client task: mean loss F_k of the received model on the client's training set.

    Args:
        client: the client.
        message: group ``model``.

    Returns:
        Values ``samples`` and ``received_loss``.
    """
    client.load(message.group("model"))
    return Message.of({"samples": client.num_samples, "received_loss": mean_loss(client)})


def mean_loss(client: Client, data: ArrayDataset | None = None) -> float:
    """Mean loss of the resident network: evaluation mode, no augmentation, no logit adjustment.

    Args:
        client: the client.
        data: samples to look at; all of the client's by default.
    """
    return float(client.trainer.losses(client.data if data is None else data).double().mean())


def classification(client: Client, logit_adjustment: bool) -> ClassificationObjective:
    """Cross-entropy of the task's kind, with the prior of the client's labels where that is wanted."""
    from medfed.training.losses import log_odds_offsets, logit_adjustment_offsets
    from medfed.training.objectives import ClassificationObjective

    offsets = None
    if logit_adjustment:
        counts = client.class_counts()
        multilabel = client.task.kind == "multilabel"
        offsets = log_odds_offsets(counts, client.num_samples) if multilabel else logit_adjustment_offsets(counts)
    return ClassificationObjective(client.task.kind, offsets)


def descent(rate: float) -> Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]:
    """Plain gradient descent, without momentum and weight decay, as an ``optimizer`` of :func:`fit_and_reply`."""
    import torch

    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


def fit_and_reply(
    client: Client,
    message: Message,
    around: Callable[[Objective], Objective] | None = None,
    values: Mapping[str, Any] | None = None,
    **options: Any,
) -> Message:
    """The second half of :func:`train`, for tasks that have loaded the model already.

    Args:
        client: the client.
        message: values of :func:`train`.
        around: makes another objective of the usual one.
        values: more plain values for the reply.
        **options: of :meth:`Client.fit <medfed.federation.client.Client.fit>`: other data, a batch size, an optimiser.
            Logit adjustment takes the prior of all of the client's labels, whatever part of them is trained on.
    """
    from medfed.training.steps import PlainStep, SharpnessAwareStep

    asked = message.values
    salt = asked.get("salt")
    objective: Objective = classification(client, asked["logit_adjustment"])
    usual = {k: asked[k] for k in ("epochs", "learning_rate", "drop_last") if k in asked}
    result = client.fit(
        objective=objective if around is None else around(objective),
        step=SharpnessAwareStep(**salt) if salt else PlainStep(),
        **{**usual, **options},
    )
    return Message.of(
        {
            "samples": result.samples,
            "loss": result.loss,
            "steps": result.steps,
            "skipped": result.skipped,
            **(values or {}),
        },
        model=client.model(),
    )
