"""FedNoRo: clients with noisy labels are found by their losses, then taught by the global model and weighted down.

Wu, Yu, Jiang, Cheng, Yan. FedNoRo: Towards Noise-Robust Federated Learning by Addressing Class Imbalance and Label
Noise Heterogeneity. IJCAI 2023.

1. Warm-up: rounds of FedAvg with logit adjustment.
2. Once: every client sends the mean loss of the global model on each of its observed classes; mixtures of two Gaussians
   over these vectors vote on who is noisy.
3. Then clean clients train as before, the others also follow the received model, with a weight that rises over the
   rounds, and models are weighted by their distance to the clean ones (DaAgg).

``form: as_released`` measures the losses by which clients are judged on images that are augmented at random as in
training, as the released code does; in evaluation mode in both forms. That code divides by zero where a class tells
nothing and where no model, or every one, is clean. These errors are not reproduced: both forms go on as above.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from medfed.errors import ConfigError
from medfed.federation.client import Client
from medfed.federation.messages import Message, Replies
from medfed.federation.method import Method
from medfed.federation.server import RoundReport, Server
from medfed.methods import fedavg
from medfed.methods.local_training import train
from medfed.methods.noise_aware import NoisyTraining, ramp_up, short_ramp, train_noise_aware

if TYPE_CHECKING:
    from medfed.reliability.identification import Verdict


class FedNoRoSettings(NoisyTraining):
    """Settings of FedNoRo; defaults are those of the released code.

    Args:
        form: ``published``, or ``as_released``: see :mod:`medfed.methods.fednoro`.
        warmup: rounds of the first stage, before clients are judged.
        teacher_weight: largest weight of the teacher for clients that are not clean; 0 trains them like clean ones.
        ramp_begin: round, counted from 0, up to which the teacher has exp(-5) of that weight; None is the first
            round after the warm-up.
        ramp_end: round, counted from 0, from which it has all of it; at or before the begin there is no ramp.
        temperature: of the teacher.
        soften_student: whether the student's logits are divided by the temperature too.
        least_count: samples that a class counts at least in the client's prior of the second stage. At 0, as released,
            classes that a client does not have are left out of the comparison with the teacher.
        daagg: models weighted by distance to the nearest clean one; otherwise by sample counts.
    """

    form: Literal["published", "as_released"] = "published"
    warmup: int = Field(10, ge=1)
    logit_adjustment: bool = True
    teacher_weight: float = Field(0.8, ge=0, le=1)
    ramp_begin: int | None = Field(None, ge=0)
    ramp_end: int = Field(49, ge=0)
    temperature: float = Field(0.8, gt=0)
    soften_student: bool = False
    least_count: float = Field(0.0, ge=0)
    daagg: bool = True

    @property
    def ramp(self) -> tuple[int, int]:
        """Rounds, counted from 0, between which the teacher's weight rises."""
        return (self.warmup if self.ramp_begin is None else self.ramp_begin), self.ramp_end

    def check(self, rounds: int) -> list[str]:
        """Says where the ramp is longer than the run, or has no effect.

        Raises:
            ConfigError: the warm-up leaves no round for the second stage.
        """
        check_warmup(self.warmup, rounds)
        if not self.teacher_weight:
            taught = ("ramp_begin", "ramp_end", "temperature", "soften_student")
            return super().check(rounds) + self.idle(taught, "teacher_weight: 0")
        return super().check(rounds) + short_ramp(rounds, *self.ramp)

    def weight(self, round: int) -> float:
        """Weight of the teacher in a round, counted from 1."""
        return self.teacher_weight * ramp_up(round, *self.ramp)


# Clients.


def class_losses(client: Client, message: Message) -> Message:
    """Client task: mean plain cross-entropy of the received model on each observed class.

    In evaluation mode.

    Args:
        client: the client.
        message: group ``model``; value ``augmented``: whether images are augmented at random, as in training.

    Returns:
        Values ``samples``, ``observed_classes``, ``class_losses`` (C numbers, None for a class that the client does
        not have) and ``class_loss``, their mean.
    """
    import torch

    client.load(message.group("model"))
    augmented = (client.seed, client.round, client.name) if message.values.get("augmented") else None
    losses, labels = client.trainer.losses(client.data, augmented=augmented).double(), client.data.labels.long()
    counts = client.class_counts().tolist()
    sums = torch.zeros(len(counts), dtype=torch.float64).index_add(0, labels, losses).tolist()
    means = [s / n if n else None for s, n in zip(sums, counts)]
    known = [m for m in means if m is not None]
    return Message.of(
        {
            "samples": client.num_samples,
            "observed_classes": len(known),
            "class_losses": means,
            "class_loss": math.fsum(known) / len(known),
        }
    )


# The server.


def program(server: Server, settings: FedNoRoSettings) -> Iterator[RoundReport]:
    """Warm-up, identification, then rounds by status.

    Raises:
        ConfigError: the warm-up leaves no round for the second stage.
    """
    check_warmup(settings.warmup, server.num_rounds)
    for _ in server.rounds(until=settings.warmup):
        yield fedavg.one_round(server, settings.request())
    for round in server.rounds():
        verdict = identified(server, augmented=settings.form == "as_released")
        if verdict is None:
            yield fedavg.one_round(server, settings.request())
            continue
        weight = settings.weight(round)
        values = {
            **settings.request(),
            "weight": weight,
            "temperature": settings.temperature,
            "soften_student": settings.soften_student,
            "least_count": settings.least_count,
        }
        yield round_by_status(server, values, verdict, settings.daagg, teacher_weight=weight)


def check_warmup(warmup: int, rounds: int) -> None:
    """Refuses a warm-up that leaves no round for what comes after it.

    Raises:
        ConfigError: it does.
    """
    if warmup >= rounds:
        fix = f"Set method.warmup to {max(1, rounds // 10)}, or raise rounds." if rounds > 1 else "Raise rounds."
        raise ConfigError(
            f"a warm-up of {warmup} rounds leaves none of {rounds} to train by status.", where="method.warmup", fix=fix
        )


def identified(server: Server, augmented: bool = False) -> Verdict | None:
    """The verdict, for good once there is one; None where too few clients answered, who are asked again next round.

    Args:
        server: the server.
        augmented: of the ``class_losses`` request.
    """
    from medfed.reliability.identification import Verdict

    name = f"identification {server.round}"
    if "verdict" not in server.notes or name in server.notes:
        found = server.once(name, lambda: identify(server, augmented))
        if not found.values["status"]:
            return None
        server.notes["verdict"] = found
    return Verdict.from_plain(server.notes["verdict"].values)


def identify(server: Server, augmented: bool) -> Message:
    """Asks every client for its losses, and judges; an empty status where nobody counted."""
    import torch

    from medfed.reliability.identification import Verdict, vote_by_loss

    request = Message.of({"augmented": augmented}, model=server.model)
    replies = server.ask("class_losses", request, clients=server.clients, numbers=("samples", "class_loss"))
    table = {c: row for c, row in _rows(replies).items() if len(row) == server.task.num_classes}
    if not table:
        server.report(replies)
        return Message(values={"status": {}})
    found = vote_by_loss(torch.tensor(list(table.values()), dtype=torch.float64), list(table))
    verdict = Verdict(
        {c: found.status.get(c, "undetermined") for c in server.clients},
        {c: found.posterior.get(c, math.nan) for c in server.clients},
        found.note,
    )
    plain = verdict.to_plain()
    report = server.report(
        replies,
        server={
            "clean_clients": len(verdict.clean),
            "noisy_clients": len(verdict.noisy),
            "undetermined_clients": len(verdict.undetermined),
        },
        status=plain["status"],
        p_clean=plain["posterior"],
    )
    if not verdict.clean:
        report.warnings.append("no client is judged clean: models are averaged by sample counts")
    if verdict.note:
        report.warnings.append(f"identification: {verdict.note}")
    return Message(values={**plain, "identification": "class losses", "round": server.round})


def _rows(replies: Replies) -> dict[str, list[float]]:
    """Losses by client, NaN where it has no sample; nothing for a reply that does not hold numbers."""
    rows: dict[str, list[float]] = {}
    for reply in replies:
        told = reply.values.get("class_losses")
        if isinstance(told, (list, tuple)) and all(v is None or type(v) in (int, float) for v in told):
            rows[reply.client] = [math.nan if v is None else float(v) for v in told]
    return rows


def round_by_status(
    server: Server, values: Mapping[str, Any], verdict: Verdict, daagg: bool, **told: Any
) -> RoundReport:
    """One round of the second stage: every participant trains by its status, and models are combined by DaAgg.

    Args:
        server: the server; its model is replaced, unless nobody is left.
        values: of the ``train_by_status`` request.
        verdict: who is clean; each client is told its ``status``.
        daagg: by distance to the clean models where the round has clean and other ones; else by sample counts.
        **told: plain values of the round, for the record.
    """
    from medfed.aggregation.averaging import weighted_mean
    from medfed.aggregation.weights import by_samples, discounted, distances

    message = Message.of(values, model=server.model)
    status: Mapping[str, str] = {c: verdict.status.get(c, "undetermined") for c in server.participants()}
    each = {c: {"status": s} for c, s in status.items()}
    apart: dict[str, float] = {}
    if daagg and len({s == "clean" for s in status.values()}) == 2:
        # Distances need every model of the round at once.
        replies = server.ask(
            "train_by_status", message, each=each, expect={"model": server.model}, numbers=("samples",)
        )
        states = replies.states("model")
        apart = distances(states, verdict.clean)
        weights = discounted(replies.value("samples"), apart) if replies else {}
        if replies:
            server.model = weighted_mean(list(states.values()), [weights[c] for c in states])
    else:
        replies = server.ask("train_by_status", message, each=each, mean="model")
        weights = by_samples(replies.value("samples")) if replies else {}
        if replies:
            server.model = replies.mean["model"]
    return server.report(replies, server=told, weight=weights, **({"distance": apart} if apart else {}))


METHOD = Method(
    name="fednoro",
    title="Judges clients by their losses, then teaches and weights down the noisy ones (label noise)",
    paper="Wu et al., IJCAI 2023",
    program=program,
    tasks={"train": train, "class_losses": class_losses, "train_by_status": train_noise_aware},
    settings=FedNoRoSettings,
    sends="sample count; once, its mean loss by class",
    task_kinds=("multiclass",),
)
