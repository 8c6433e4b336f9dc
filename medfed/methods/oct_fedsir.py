"""OCT-FedSIR: find clients whose labels cannot be trusted, repair their training targets, train on with them.

Gholami, Ali, Haghighi, et al. OCT-FedSIR: Toward Trustworthy Federated Ophthalmic Learning under Annotation Noise.
arXiv 2609.14734, 2026. Equation numbers are the paper's.

Stage I (:mod:`~medfed.methods.stage_one`) judges the clients once. Then, in every round, clean clients train on their
labels and the others on their current targets and on the received model as a teacher (Eqs. 28 to 34,
:mod:`~medfed.methods.noise_aware`); models are weighted by distance to the clean ones (Eqs. 35 to 39). Every ``period``
rounds there is a relabelling checkpoint (:mod:`~medfed.methods.spectral`) with the clean reference model, the
size-weighted mean of the clean clients' latest local models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from medfed.aggregation.averaging import weighted_mean
from medfed.aggregation.weights import by_samples, discounted, distances
from medfed.federation.client import Client
from medfed.federation.means import Mean
from medfed.federation.messages import Message, Replies, State
from medfed.federation.method import Method
from medfed.federation.server import RoundReport, Server
from medfed.methods.identification import first_verdict, later_verdict, verdict_of
from medfed.methods.noise_aware import train_noise_aware
from medfed.methods.spectral import Relabelling, checkpoint, describe, relabel
from medfed.methods.stage_one import Identification, forget, identify, review, stage_one

if TYPE_CHECKING:
    from medfed.reliability.identification import Verdict


class OctFedSIRSettings(Identification, Relabelling):
    """Settings of OCT-FedSIR, besides those of identification and relabelling.

    Args:
        revise: ``evidence``: clients are judged again at every checkpoint, from features of the reference model.
            Otherwise the first verdict, from features that no label of these clients has shaped, stays, but for clients
            that did not answer then.
        local_epochs: passes over a client's data in a round.
        learning_rate: None takes the bundle's.
        logit_adjustment: logits shifted by the log of the client's class frequencies, in training (Eqs. 8 to 10).
        least_count: samples that a class counts at least in the class frequencies, in Stage I and in the rounds. The
            paper has only a small epsilon in the log; 1 is FedSIR's released code, 0 means a frequency of 1e-12, with
            such classes left out of the divergence from the teacher.
        distillation: clients that are not clean follow the received model beside their targets (Eqs. 28 to 33).
        teacher_weight: weight of the teacher, lambda; None is the share of clean clients (Eq. 34).
        temperature: of the teacher, and of the student with ``soften_student``. Not in the paper; 0.8 is what runs in
            FedSIR's released code.
        soften_student: the student's logits are divided by the temperature too (Eq. 30).
        distil_on: samples that follow the teacher: ``all``, or those on which the two criteria ``disagree`` at the last
            checkpoint (FedSIR; all of them before the first).
        daagg: models weighted by distance to the nearest clean one (Eqs. 35 to 39); otherwise by sample counts.
    """

    revise: bool = True
    local_epochs: int = Field(1, ge=1)
    learning_rate: float | None = Field(None, gt=0)
    logit_adjustment: bool = True
    least_count: int = Field(1, ge=0)
    distillation: bool = True
    teacher_weight: float | None = Field(None, ge=0, le=1)
    temperature: float = Field(0.8, gt=0)
    soften_student: bool = True
    distil_on: Literal["all", "disagree"] = "all"
    daagg: bool = True

    def check(self, rounds: int) -> list[str]:
        """As of identification and relabelling; names settings of a distillation that is switched off."""
        found = super().check(rounds)
        if self.identification == "published":
            found += self.idle(("revise",), "identification: published")
        if not self.distillation:
            found += self.idle(("teacher_weight", "temperature", "soften_student", "distil_on"), "distillation: false")
        elif not self.relabel:
            found += self.idle(("distil_on",), "relabel: false")
        if not self.relabel and self.revises and rounds <= self.period:
            found.append(f"no verdict will be revised: method.period is {self.period} and there are {rounds} rounds")
        return found

    @property
    def revises(self) -> bool:
        """Whether later evidence may change a verdict."""
        return self.identification == "evidence" and self.revise

    def prior(self) -> dict[str, Any]:
        """How logits are adjusted, as plain values."""
        return {"logit_adjustment": self.logit_adjustment, "least_count": self.least_count}

    def weight_of_teacher(self, clean: int, clients: int, round: int) -> float:
        """Weight of the teacher in a round, counted from 1; 0 without a clean client (Eq. 34).

        Args:
            clean: clients judged clean.
            clients: all clients.
            round: the round.
        """
        if not self.distillation or not clean:
            return 0.0
        return clean / clients if self.teacher_weight is None else self.teacher_weight


def train(client: Client, message: Message) -> Message:
    """Client task: noise-aware local training; see :func:`~medfed.methods.noise_aware.train_noise_aware`."""
    forget(client)
    return train_noise_aware(client, message)


def program(server: Server, settings: OctFedSIRSettings) -> Iterator[RoundReport]:
    """Stage I once; then rounds, with a checkpoint before every ``period``-th."""
    server.once("verdict", lambda: first_verdict(server, settings, settings.prior()))
    for round in server.rounds():
        if settings.due(round):
            held = later_verdict(server, settings, settings.prior(), keep=settings.relabel)
            if settings.relabel:
                checkpoint(server, settings, verdict_of(server), held)
        yield one_round(server, settings, round)


def one_round(server: Server, settings: OctFedSIRSettings, round: int) -> RoundReport:
    """Local training of all participants by their status, aggregation, and the clean reference model."""
    verdict = verdict_of(server)
    weight = settings.weight_of_teacher(len(verdict.clean), len(server.clients), round)
    request = {
        "weight": weight,
        "temperature": settings.temperature,
        "soften_student": settings.soften_student,
        "distil_on": settings.distil_on,
        "learning_rate": settings.learning_rate,
        "epochs": settings.local_epochs,
        **settings.prior(),
    }
    each = {c: {"status": s} for c, s in verdict.status.items()}
    message = Message.of(request, model=server.model)
    if settings.daagg and verdict.clean and len(verdict.clean) < len(verdict.status):
        # Distances need every model of the round at once.
        replies = server.ask("train", message, each=each, expect={"model": server.model}, numbers=("samples",))
        weights, apart = _distance_aware(server, verdict, replies)
    else:
        apart = {}
        samples = server.notes["samples"].values
        means = {"model": Mean(), "reference": Mean("model", {c: samples[c] for c in verdict.clean})}
        replies = server.ask("train", message, each=each, mean=means, numbers=("samples",))
        weights = by_samples(replies.value("samples")) if replies else {}
        if replies:
            server.model = replies.mean["model"]
            refresh_reference(server, verdict, replies, replies.mean.get("reference"))
    return server.report(replies, server={"teacher_weight": weight}, weight=weights, distance=apart)


def _distance_aware(server: Server, verdict: Verdict, replies: Replies) -> tuple[dict[str, float], dict[str, float]]:
    """Sets the global model by DaAgg and refreshes the reference; the weights, and the distances behind them."""
    if not replies:
        return {}, {}
    states, samples = replies.states("model"), replies.value("samples")
    apart = distances(states, verdict.clean)
    weights = discounted(samples, apart)
    server.model = weighted_mean(list(states.values()), [weights[c] for c in states])
    latest = [c for c in states if c in verdict.clean]
    reference = weighted_mean([states[c] for c in latest], [samples[c] for c in latest]) if latest else None
    refresh_reference(server, verdict, replies, reference)
    return weights, apart


def refresh_reference(server: Server, verdict: Verdict, replies: Replies, present: State | None) -> None:
    """The clean reference model after a round: size-weighted mean of the clean clients' latest local models.

    One model is kept, whatever the number of clients. Clean clients that took no part in the round keep their weight
    with the mean as it was before: exact where all take part, and where always the same ones are absent.
    """
    if present is None:
        return
    now = {r.client: r.values["samples"] for r in replies if r.client in verdict.clean}
    absent: dict[str, Any] = {}
    if "reference" in server.notes:
        before = server.notes["reference"]
        earlier: Mapping[str, float] = before.values["samples"]
        absent = {c: n for c, n in earlier.items() if c in verdict.clean and c not in now}
        if absent:
            present = weighted_mean([present, before.group("model")], [sum(now.values()), sum(absent.values())])
    server.notes["reference"] = Message.of({"samples": {**absent, **now}}, model=present)


TASKS = {
    "identify": identify,
    "stage_one": stage_one,
    "review": review,
    "describe": describe,
    "relabel": relabel,
    "train": train,
}

METHOD = Method(
    name="oct_fedsir",
    title="Judges clients by spectra of their features, repairs training targets, trains on with all (label noise)",
    paper="Gholami et al., arXiv 2609.14734",
    program=program,
    tasks=TASKS,
    settings=OctFedSIRSettings,
    sends="three descriptors (or evidence) once; class references at checkpoints from clean clients",
    keeps="training targets, class similarity, audit of its own labels",
    needs="a clean client",
    task_kinds=("multiclass",),
)
