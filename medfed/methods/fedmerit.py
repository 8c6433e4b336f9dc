"""FedMerit: federations with corrupted images and wrong labels at once (medfed's own).

A client that is served badly deserves weight, one whose labels are wrong does not, and to its loss both look the same.
FedISM (Wu et al., IJCAI 2024) would feed label noise, since a loss on wrong labels stays high; OCT-FedSIR (Gholami et
al., 2026) would accuse clients with bad images, whose labels are hard to predict. FedMerit takes from both what their
principles have in common and compares like with like: *peers* are clients with images of like quality, found without
labels (:mod:`medfed.reliability.peers`).

- Labels are judged among peers once before training (with ``revise: true`` again at every checkpoint).
- The merit of a client is ``w_k ~ N_k purity_k need_g^q``. ``purity_k = 1 - C/(C-1) wrong_k`` of a client that is not
  judged clean: of its gradient so much is signal under symmetric noise. ``need_g`` is the loss within the radius,
  F + S (``follow: sharpness`` for S alone), of the received model: measured at clean clients, it is the mean over the
  clean members of a group, and holds for their peers as well. Wrong labels have no say in it. A group without a clean
  member is measured on its training targets, and its need counts at most as much as the greatest of the others.
- Class references and corrected targets are made among peers; without a clean peer no target is changed.
- Local steps are taken on the noise-aware objective: logit adjustment, and at clients not judged clean the received
  model as a teacher, with the weight of the estimated share of wrong labels or the share of clean clients, whichever is
  larger. With ``salt: true`` they are sharpness-aware (GSAM) where images differ in quality.

With nobody judged noisy this is FedISM's aggregation with weights that follow the loss within the radius, by groups;
with images of one quality it is OCT-FedSIR, weighted by purity (``daagg``: distance).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from medfed.aggregation.averaging import weighted_mean
from medfed.aggregation.weights import by_merit, discounted, distances, needs_of_groups, normalised
from medfed.federation.client import Client
from medfed.federation.means import Mean
from medfed.federation.messages import Message, Replies
from medfed.federation.method import Method
from medfed.federation.server import RoundReport, Server
from medfed.methods import oct_fedsir
from medfed.methods.fedism import NUMBERS
from medfed.methods.identification import first_verdict, later_verdict, verdict_of
from medfed.methods.local_training import Ball, LocalTraining, Salt
from medfed.methods.oct_fedsir import OctFedSIRSettings, refresh_reference
from medfed.methods.spectral import checkpoint

if TYPE_CHECKING:
    from medfed.reliability.identification import Verdict


class FedMeritSettings(LocalTraining, OctFedSIRSettings):
    """Settings of FedMerit, besides those of OCT-FedSIR.

    Args:
        salt: sharpness-aware local training; ``true`` takes the defaults of FedISM. Off by default: in runs of a dozen
            rounds it cost accuracy in most (docs/results-labels.md).
        salt_with: ``peers``: sharpness-aware steps only where images differ in quality, which is what they are for; or
            ``always``.
        measure: radius of the measured need; ``null`` takes that of ``salt``, and a constant radius where that of
            ``salt`` is bounded: clients must be measured by the same radius.
        saga: weights follow the need of each group of peers; ``false`` leaves sample counts and purity.
        follow: what need is: ``perturbed_loss``, the loss within the radius, or ``sharpness``, its rise alone.
        q: how strongly weights follow the need of a group.
        beta: share of the new need in the moving average over rounds; 1 switches it off.
        at_once: targets are corrected before the first round already, from features of the model that training begins
            with; otherwise at the first checkpoint.
        purity: weights of clients that are not judged clean are reduced by their estimated share of wrong labels.
        daagg: instead of ``purity``, they are reduced by the distance of their models to the nearest clean one.
    """

    identification: Literal["published", "evidence"] = "evidence"
    compare: Literal["all", "peers"] = "peers"
    revise: bool = False
    relabelling: Literal["published", "posterior"] = "posterior"
    salt: Salt | None = None
    salt_with: Literal["peers", "always"] = "peers"
    measure: Ball | None = Ball(rho=0.05, radius="adaptive")
    saga: bool = True
    follow: Literal["sharpness", "perturbed_loss"] = "perturbed_loss"
    q: float = Field(1.0, ge=0)
    beta: float = Field(0.5, gt=0, le=1)
    at_once: bool = True
    purity: bool = True
    daagg: bool = False

    @property
    def depends_on_rounds(self) -> bool:
        """Whether a radius grows over the rounds, in training or in the measurement."""
        return super().depends_on_rounds or self.probe.power > 0

    @property
    def probe(self) -> Ball:
        """Radius of the measured need."""
        return self.measure or (self.salt or Salt()).comparable

    def check(self, rounds: int) -> list[str]:
        """As of OCT-FedSIR and of local training; names what has no effect without peers or with distances."""
        found = super().check(rounds)
        by_need = ("q", "beta", "follow", "measure")
        if not self.saga:
            found += self.idle(by_need, "saga: false")
        elif self.identification == "published":
            found += self.idle(by_need, "identification: published")
        elif self.compare == "all":
            found += self.idle(by_need, "compare: all")
        if self.salt is None:
            found += self.idle(("salt_with",), "salt: false")
        elif self.salt_with == "peers" and (self.identification == "published" or self.compare == "all"):
            found.append("no sharpness-aware steps: nobody has peers; method.salt_with: always takes them all the same")
        if not self.relabel:
            found += self.idle(("at_once",), "relabel: false")
        if self.daagg:
            found += self.idle(("purity",), "daagg: true")
        return found

    def teacher(self, clean: int, clients: int, round: int, wrong: float | None) -> float:
        """Weight of the teacher at a client with a share of wrong labels; see :meth:`weight_of_teacher`."""
        usual = self.weight_of_teacher(clean, clients, round)
        return max(usual, wrong or 0.0) if usual and self.teacher_weight is None else usual


def need(client: Client, message: Message) -> Message:
    """Client task: loss and sharpness of the received model, on the client's training targets where not clean.

    Args:
        client: the client.
        message: group ``model``; values ``status``, ``rho``, ``radius`` and ``share``.

    Returns:
        Values ``samples``, ``sharpness`` and ``received_loss``.
    """
    from medfed.training.sharpness import Radius

    client.load(message.group("model"))
    values, data = message.values, client.data
    if values["status"] != "clean" and "labels" in client.memory:
        data = data.with_labels(client.memory["labels"])
    measured = client.trainer.sharpness(data, Radius(values["rho"], values["radius"], values["share"]))
    return Message.of({"samples": client.num_samples, "sharpness": measured.sharpness, "received_loss": measured.loss})


def program(server: Server, settings: FedMeritSettings) -> Iterator[RoundReport]:
    """Judges once; then rounds, with a checkpoint among peers before every ``period``-th."""
    server.once("verdict", lambda: first_verdict(server, settings, settings.prior()))
    for round in server.rounds():
        if settings.due(round):
            held = later_verdict(server, settings, settings.prior(), keep=settings.relabel)
            if settings.relabel:
                _checkpoints(server, settings, held)
        elif round == 1 and settings.relabel and settings.at_once:
            _checkpoints(server, settings, held=False)
        needs = _needs(server, settings, round) if settings.saga else {}
        yield _one_round(server, settings, round, needs)


def peers(server: Server) -> list[list[str]]:
    """The groups of clients with images of like quality; clients that sent no evidence form one of their own."""
    found = [list(g) for g in server.notes["evidence"].values.get("peers", [])] if "evidence" in server.notes else []
    others = sorted(set(server.clients) - {c for group in found for c in group})
    return [*found, others] if others else found


def wrong_shares(server: Server, verdict: Verdict) -> dict[str, float | None]:
    """Estimated share of wrong labels of the clients not judged clean; None where there is no estimate."""
    state: Mapping[str, Any] = server.notes["evidence"].values if "evidence" in server.notes else {}
    states = [state, *state.get("within", {}).values()]
    found: dict[str, float | None] = {}
    for client in sorted(set(verdict.status) - set(verdict.clean)):
        told = [s["shares"][client]["wrong"] for s in states if client in s.get("shares", {})]
        known = [float(w) for w in told if w is not None]
        found[client] = max(known) if known else None
    return found


def _checkpoints(server: Server, settings: FedMeritSettings, held: bool) -> None:
    """A relabelling checkpoint in each group of peers."""
    verdict, classes = verdict_of(server), []
    for group in peers(server):
        part = type(verdict)({c: verdict.status[c] for c in group}, {c: verdict.posterior[c] for c in group})
        classes.append(checkpoint(server, settings, part, held))
    server.report(server={"relabelled": any(classes), "referenced_classes": max(classes, default=0)})


def _needs(server: Server, settings: FedMeritSettings, round: int) -> dict[str, float]:
    """Need of each client, that of its group; empty where there is one group, or nobody could be measured."""
    groups, verdict = peers(server), verdict_of(server)
    if len(groups) < 2:
        return {}
    present = server.participants()
    asked = [c for g in groups for c in g if c in present and (c in verdict.clean or not set(g) & set(verdict.clean))]
    before = dict(server.notes["needs"].values) if "needs" in server.notes else {}
    measured = Replies((), ())
    if asked:
        values = settings.probe.ball(round, server.num_rounds)
        each = {c: {"status": verdict.status[c]} for c in asked}
        measured = server.ask(
            "need", Message.of(values, model=server.model), clients=asked, each=each, numbers=NUMBERS, quorum=1
        )
        server.report(measured)
    own = dict(measured.value("sharpness")) if measured else {}
    if settings.follow == "perturbed_loss":
        own = {c: s + measured.value("received_loss")[c] for c, s in own.items()}
    samples = measured.value("samples") if measured else {}
    now = needs_of_groups(own, samples, groups, verdict.clean)
    # A group is known by its first member.
    kept = {
        g[0]: settings.beta * now[g[0]] + (1 - settings.beta) * before.get(g[0], now[g[0]])
        if g[0] in now
        else before.get(g[0])
        for g in groups
    }
    known = {name: value for name, value in kept.items() if value is not None}
    if not known:
        return {}
    server.notes["needs"] = Message(values=known)
    usual = sum(known.values()) / len(known)
    return {c: known.get(g[0], usual) for g in groups for c in g}


def _one_round(server: Server, settings: FedMeritSettings, round: int, needs: Mapping[str, float]) -> RoundReport:
    """Local training of all participants by their status, aggregation by merit, and the clean reference model."""
    verdict = verdict_of(server)
    wrong = wrong_shares(server, verdict)
    samples = server.notes["samples"].values
    teacher = {c: settings.teacher(len(verdict.clean), len(server.clients), round, wrong.get(c)) for c in wrong}
    each: dict[str, dict[str, Any]] = {
        c: {"status": s, "weight": teacher.get(c, 0.0)} for c, s in verdict.status.items()
    }
    request = {
        **settings.request(round, server.num_rounds),
        **settings.prior(),
        "temperature": settings.temperature,
        "soften_student": settings.soften_student,
        "distil_on": settings.distil_on,
    }
    if settings.salt_with == "peers" and len(peers(server)) < 2:
        request.pop("salt", None)
    message = Message.of(request, model=server.model)
    by_distance = settings.daagg and bool(verdict.clean) and bool(wrong)
    discount = wrong if settings.purity and not settings.daagg and verdict.clean else {}
    # Who never answered tells its sample count with its model.
    usual = sum(samples.values()) / max(len(samples), 1) or 1.0
    size = {c: float(samples.get(c, usual)) for c in server.clients}
    merit = by_merit(size, discount, needs, settings.q, server.task.num_classes)
    if by_distance:
        replies = server.ask("train", message, each=each, expect={"model": server.model}, numbers=("samples",))
        weights, apart = _by_distance(server, verdict, replies, merit)
    else:
        apart = {}
        means = {
            "model": Mean("model", merit),
            "reference": Mean("model", {c: size[c] for c in verdict.clean}),
        }
        replies = server.ask("train", message, each=each, mean=means, numbers=("samples",))
        weights = {}
        if replies and "model" in replies.mean:
            weights = normalised(merit, replies.clients)
            server.model = replies.mean["model"]
            refresh_reference(server, verdict, replies, replies.mean.get("reference"))
        elif replies:
            server.report().warnings.append("train: all weights are zero; the previous model is kept")
    told = {"teacher": teacher, "need": needs, "wrong_share": {c: w for c, w in wrong.items() if w is not None}}
    shown = {name: {c: v for c, v in of.items() if c in replies.clients} for name, of in told.items()}
    return server.report(replies, weight=weights, distance=apart, **shown)


def _by_distance(
    server: Server, verdict: Verdict, replies: Replies, merit: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Merit, reduced by distance to the nearest clean model; sets the global model and the reference."""
    if not replies:
        return {}, {}
    states, samples = replies.states("model"), replies.value("samples")
    apart = distances(states, verdict.clean)
    weights = discounted({c: merit[c] for c in states}, apart)
    server.model = weighted_mean(list(states.values()), [weights[c] for c in states])
    latest: Sequence[str] = [c for c in states if c in verdict.clean]
    reference = weighted_mean([states[c] for c in latest], [samples[c] for c in latest]) if latest else None
    refresh_reference(server, verdict, replies, reference)
    return weights, apart


METHOD = Method(
    name="fedmerit",
    title="Judges labels among clients of like image quality; weights by need and purity (both problems at once)",
    paper="medfed",
    program=program,
    tasks={**oct_fedsir.TASKS, "need": need},
    settings=FedMeritSettings,
    sends="evidence; loss, sharpness and class references from clean clients",
    keeps="training targets, class similarity, audit of its own labels",
    needs="a clean client",
    task_kinds=("multiclass",),
)
