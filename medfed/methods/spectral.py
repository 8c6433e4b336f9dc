"""Relabelling checkpoints of OCT-FedSIR and FedSIR: class references of clean clients, proposals at the others.

At a checkpoint the clean clients look at their images with the clean reference model and send, for each observed
class, how many samples they have, its representative direction and its residual basis (Eqs. 16 to 19): nothing else
goes up. The server forms what they agree on (Eqs. 20 to 22) and sends it to the clients judged noisy, which change
training targets where both criteria agree (Eqs. 23 to 27). Targets, proposals and scores stay at the client.

With ``relabelling: posterior``, medfed's own rule, clean clients also send counts and means of their classes and the
scatter within them (:mod:`medfed.reliability.posterior`); their sums go to the others, which weigh the features against
what their observed labels say. Directions and residual bases then feed the audit list alone.

Clean clients are sent the common references too (``audit: all``): they change no target, but learn which of their own
labels look doubtful. Nothing of it comes back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field

from medfed.errors import ConfigError
from medfed.federation.client import Client
from medfed.federation.messages import Message, Replies
from medfed.federation.method import MethodSettings
from medfed.federation.server import Server
from medfed.methods.identification import reference_model
from medfed.methods.stage_one import features_of, forget, patients_of, remember_samples

if TYPE_CHECKING:
    from medfed.reliability.identification import Verdict
    from medfed.reliability.posterior import ClassMoments
    from medfed.reliability.references import ClassReference

Parts = dict[int, dict[str, "ClassReference"]]


class Relabelling(MethodSettings):
    """Settings of the relabelling checkpoints.

    Args:
        relabel: whether training targets are changed at all.
        relabelling: ``published``, the class on which both spectral criteria agree; or ``posterior``, medfed's own: the
            most probable class, given the features and the observed label.
        confidence: ``posterior``: least probability of a class that is proposed; otherwise the label stays.
        period: rounds between checkpoints R; before each round whose number, counted from 0, is a positive multiple of
            R. The paper says "periodic", FedSIR's released code has 20.
        relabel_from: ``observed``: every checkpoint starts again from the observed labels, as Eq. 27 reads;
            ``current``: from the targets of the checkpoint before.
        kappa: how many times the spectral mass of the rest the dominant part of a class has (Eq. 16).
        residual: directions of a residual basis, L.
        weighting: weights of the clean clients' projectors: ``samples`` (Eq. 22), or ``spectral``, samples times the
            dominance of the first singular value (FedSIR's released code).
        min_reference: fewest samples of a class for a client to have a say in its reference.
        min_gap: least gap of the two largest eigenvalues of the representative projector. Where it is smaller, or no
            client has ``min_reference`` samples, the class takes the reference of the client with most samples.
        normalise: features of length one for the scores (FedSIR); changes the scores of the audit, no decision.
        keep_unknown: targets of samples whose observed class no clean client has stay; without it they can be changed
            to other classes, never from others to this one. They always stay with ``posterior``.
        correct_undetermined: clients whose labels could not be judged are treated as noisy ones. Otherwise their
            targets stay as observed.
        audit: who gets proposals for its own labels: ``all`` clients, or ``noisy`` ones alone.
    """

    relabel: bool = True
    relabelling: Literal["published", "posterior"] = "published"
    confidence: float = Field(0.0, ge=0, le=1)
    period: int = Field(20, ge=1)
    relabel_from: Literal["observed", "current"] = "observed"
    kappa: float = Field(10.0, gt=0)
    residual: int = Field(12, ge=1)
    weighting: Literal["samples", "spectral"] = "samples"
    min_reference: int = Field(1, ge=1)
    min_gap: float = Field(0.0, ge=0, le=1)
    normalise: bool = False
    keep_unknown: bool = False
    correct_undetermined: bool = False
    audit: Literal["all", "noisy"] = "all"

    def check(self, rounds: int) -> list[str]:
        """Refuses a first checkpoint after the last round; names settings of a relabelling that is switched off.

        Raises:
            ConfigError: there would be no checkpoint.
        """
        found = super().check(rounds)
        if not self.relabel:
            return found + self.idle(set(Relabelling.model_fields) - {"relabel", "period"}, when="relabel: false")
        unused = "keep_unknown" if self.relabelling == "posterior" else "confidence"
        found += self.idle((unused,), f"relabelling: {self.relabelling}")
        if not any(self.due(round) for round in range(1, rounds + 1)):
            fixes = [f"set method.period to {max(1, rounds // 5)}"] if rounds > 1 else []
            fixes += ["raise rounds", "set method.relabel to false"]
            raise ConfigError(
                f"no label would ever be corrected: the first checkpoint comes after round {self.period}, "
                f"and the last round is {rounds}.",
                where="method.period",
                fix=f"{', or '.join(fixes).capitalize()}.",
            )
        return found

    def due(self, round: int) -> bool:
        """Whether there is a checkpoint before a round, counted from 1."""
        return round > 1 and (round - 1) % self.period == 0


# Clients.


def describe(client: Client, message: Message) -> Message:
    """Client task: representative direction and residual basis of every observed class (Eqs. 16 to 19).

    Args:
        client: the client.
        message: group ``reference``, or none where its features are kept; values ``keep``, ``kappa``, ``residual``,
            ``dominance`` (whether that number is wanted) and ``moments`` (whether they are).

    Returns:
        Group ``references`` with ``C/direction`` ``[d]`` and ``C/residual`` ``[d, L']`` (left out where empty), values
        ``samples`` and ``counts`` by class, and ``dominance`` by class where wanted. Group ``moments``, where wanted,
        with ``counts`` ``[C]``, ``means`` ``[C, p]`` and ``scatter`` ``[p (p + 1) / 2]``.
    """
    from medfed.reliability.references import class_reference

    features, labels = features_of(client, message), client.data.labels
    tensors: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}
    dominance: dict[str, float] = {}
    for c in range(client.task.num_classes):
        found = class_reference(features[labels == c], message.values["kappa"], message.values["residual"])
        if found is None:
            continue
        tensors[f"{c}/direction"] = found.direction.float()
        if found.residual.shape[1]:
            tensors[f"{c}/residual"] = found.residual.float().contiguous()
        counts[str(c)], dominance[str(c)] = found.count, found.dominance
    values: dict[str, Any] = {"samples": client.num_samples, "counts": counts}
    if message.values["dominance"]:
        values["dominance"] = dominance
    if not message.values["moments"]:
        return Message.of(values, references=tensors)
    from medfed.reliability.posterior import class_moments

    moments = class_moments(features, labels, client.task.num_classes)
    return Message.of(values, references=tensors, moments=moments.to_tensors())


def relabel(client: Client, message: Message) -> Message:
    """Client task: proposals for the observed labels, and new training targets where the client is to be corrected.

    In the client's memory: ``labels`` (where corrected), ``audit_rounds``, ``audit_proposals``,
    ``audit_representative``, ``audit_residual``, ``audit_loo_label``, ``audit_loo_margin`` and, with moments,
    ``audit_posterior``.

    Args:
        client: the client.
        message: groups ``consensus``, ``reference`` where the client does not hold its features, and ``moments`` where
            the posterior is to decide; values ``keep``, ``normalise``, ``relabel_from``, ``keep_unknown``, ``correct``,
            ``confidence`` and ``inside`` (the moments are of this client's samples, too).

    Returns:
        ``samples``; from a corrected client also ``edited``, how many targets differ from the observed labels now, and
        ``proposed``, for how many samples another class than the observed one is proposed.
    """
    from medfed.reliability import relabelling
    from medfed.reliability.evidence import evidence

    features, observed = features_of(client, message), client.data.labels
    classes = client.task.num_classes
    references = _read(message.group("consensus"), {})
    representative, residual = relabelling.scores(features, references, classes, normalise=message.values["normalise"])
    if message.group("moments"):
        proposals = _by_posterior(client, message, features)
    else:
        proposals = relabelling.agreement(representative, residual).cpu()
    _remember(client, proposals, representative, residual)
    remember_samples(client, evidence(features, observed, classes, groups=patients_of(client)).samples)
    forget(client)
    if not message.values["correct"]:
        # Whoever was to be corrected before, and is not now, goes back to the labels as observed.
        client.memory.pop("labels", None)
        return Message.of({"samples": client.num_samples})
    unknown = [c for c in range(classes) if c not in references] if message.values["keep_unknown"] else []
    afresh = message.values["relabel_from"] == "observed" or "labels" not in client.memory
    targets = relabelling.relabel(observed if afresh else client.memory["labels"], proposals, keep=unknown)
    client.memory["labels"] = targets
    return Message.of(
        {
            "samples": client.num_samples,
            "edited": int((targets != observed).sum()),
            "proposed": int(((proposals >= 0) & (proposals != observed)).sum()),
        }
    )


def _by_posterior(client: Client, message: Message, features: torch.Tensor) -> torch.Tensor:
    from medfed.reliability.posterior import ClassMoments, posterior, proposals

    moments = ClassMoments.of(message.group("moments"), client.task.num_classes)
    found = posterior(features, client.data.labels, moments, inside=message.values["inside"])
    client.memory["audit_posterior"] = found.probability.float()
    return proposals(found.probability, message.values["confidence"])


def _remember(client: Client, proposals: torch.Tensor, representative: torch.Tensor, residual: torch.Tensor) -> None:
    memory = client.memory
    memory["audit_rounds"] = [*memory.get("audit_rounds", []), client.round]
    earlier = [memory["audit_proposals"]] if "audit_proposals" in memory else []
    memory["audit_proposals"] = torch.cat([*earlier, proposals[None].to(torch.int64)])
    memory["audit_representative"], memory["audit_residual"] = representative.float(), residual.float()


# Server.


def checkpoint(server: Server, settings: Relabelling, verdict: Verdict, held: bool) -> int:
    """One relabelling checkpoint; without a clean client, or without any reference, no target changes.

    Args:
        server: the server.
        settings: of the relabelling.
        verdict: who is clean; of those clients alone that are to take part.
        held: all clients hold the features of the reference model already.

    Returns:
        How many classes have a reference.
    """
    if not verdict.clean:
        server.report().warnings.append("no client is judged clean: no label is changed")
        return 0
    model = {} if held else {"reference": reference_model(server)}
    wanted = {
        "keep": settings.audit == "all",
        "kappa": settings.kappa,
        "residual": settings.residual,
        "dominance": settings.weighting == "spectral",
        "moments": settings.relabelling == "posterior",
    }
    told = server.ask("describe", Message.of(wanted, **model), clients=verdict.clean, numbers=("samples",))
    references = {c: agreed(parts, settings) for c, parts in sorted(parts_of(server, told).items())}
    server.report(server={"relabelled": bool(references), "referenced_classes": len(references)})
    if not references:
        server.report().warnings.append("no clean client has sent a class reference: no label is changed")
        return 0
    common = {"consensus": _written(references)}
    pooled, known = moments_of(server, told) if settings.relabelling == "posterior" else (None, set())
    if pooled is not None:
        common["moments"] = pooled.to_tensors()
    elif settings.relabelling == "posterior":
        server.report().warnings.append("no clean client has sent moments: no label is changed")
        return 0
    values = {
        "keep": False,
        "normalise": settings.normalise,
        "relabel_from": settings.relabel_from,
        "keep_unknown": settings.keep_unknown,
        "confidence": settings.confidence,
        "inside": False,
    }
    corrected = {*verdict.noisy, *(verdict.undetermined if settings.correct_undetermined else ())}
    others = set(verdict.status) - set(verdict.clean) if settings.audit == "all" else corrected
    if others:
        each = {c: {"correct": c in corrected} for c in others}
        replies = server.ask("relabel", Message.of(values, **common, **model), clients=others, each=each)
        changed = {r.client: r.values for r in replies if "edited" in r.values}
        server.report(
            edited={c: v["edited"] for c, v in changed.items()},
            proposed={c: v["proposed"] for c, v in changed.items()},
        )
    if settings.audit == "all":
        message = Message.of({**values, "correct": False}, **common)
        server.ask("relabel", message, clients=told.clients, each={c: {"inside": c in known} for c in told.clients})
    return len(references)


def parts_of(server: Server, replies: Replies) -> Parts:
    """The references that clients sent, by class and client; what does not fit the others is left out and reported."""
    found: dict[str, dict[int, ClassReference]] = {}
    for reply in replies:
        try:
            parts = _read(reply.group("references"), reply.values)
            if not all(0 <= c < server.task.num_classes for c in parts):
                raise ValueError("no such class")
        except (KeyError, ValueError, TypeError, AttributeError):
            server.report().warnings.append(f"{reply.client}: class references that cannot be read")
            continue
        found[reply.client] = parts
    sizes = Counter(len(p.direction) for parts in found.values() for p in parts.values())
    size = sizes.most_common(1)[0][0] if sizes else 0
    out: Parts = {}
    for client, parts in found.items():
        if any(len(p.direction) != size for p in parts.values()):
            server.report().warnings.append(f"{client}: class references of another dimension")
            continue
        for c, part in parts.items():
            out.setdefault(c, {})[client] = part
    return out


def moments_of(server: Server, replies: Replies) -> tuple[ClassMoments | None, set[str]]:
    """The pooled moments and whose they are; what cannot be read or does not fit is left out and reported."""
    from medfed.reliability.posterior import ClassMoments, pooled

    found: dict[str, ClassMoments] = {}
    for reply in replies:
        try:
            found[reply.client] = ClassMoments.of(reply.group("moments"), server.task.num_classes)
        except (KeyError, ValueError):
            server.report().warnings.append(f"{reply.client}: class moments that cannot be read")
    sizes = Counter(m.means.shape[1] for m in found.values())
    size = sizes.most_common(1)[0][0] if sizes else 0
    for client in [c for c, m in found.items() if m.means.shape[1] != size]:
        del found[client]
        server.report().warnings.append(f"{client}: class moments of another dimension")
    return (pooled([found[c] for c in sorted(found)]) if found else None), set(found)


def agreed(parts: Mapping[str, ClassReference], settings: Relabelling) -> ClassReference:
    """The common reference of one class (Eqs. 20 to 22), or that of the client with most samples; see the settings."""
    from medfed.reliability.references import consensus
    from medfed.reliability.spectra import right_singular

    several = [p for _, p in sorted(parts.items()) if p.count >= settings.min_reference]
    if several and settings.min_gap:
        weights = torch.tensor(
            [p.count * (p.dominance if settings.weighting == "spectral" else 1.0) for p in several], dtype=torch.float64
        )
        rows = torch.stack([p.direction.double() for p in several]) * (weights / weights.sum()).sqrt()[:, None]
        eigenvalues = [*right_singular(rows, rank=2)[0].square().tolist(), 0.0, 0.0]
        if eigenvalues[0] - eigenvalues[1] < settings.min_gap:
            several = []
    if not several:
        several = [max(parts.items(), key=lambda item: (item[1].count, item[0]))[1]]
    return consensus(several, settings.residual, settings.weighting)


def _written(references: Mapping[int, ClassReference]) -> dict[str, torch.Tensor]:
    tensors = {f"{c}/direction": r.direction.float() for c, r in references.items()}
    return tensors | {
        f"{c}/residual": r.residual.float().contiguous() for c, r in references.items() if r.residual.shape[1]
    }


def _read(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> dict[int, ClassReference]:
    """References by class, from a group of tensors with ``C/direction`` and ``C/residual``."""
    from medfed.reliability.references import ClassReference

    counts, dominance = values.get("counts"), values.get("dominance", {})
    out = {}
    for name in tensors:
        label, kind = name.split("/")
        if kind != "direction":
            continue
        direction = tensors[name]
        residual = tensors.get(f"{label}/residual", direction.new_zeros(len(direction), 0))
        count = 1 if counts is None else counts[label]
        if direction.ndim != 1 or residual.ndim != 2 or len(residual) != len(direction) or count < 1:
            raise ValueError(f"reference of class {label}")
        out[int(label)] = ClassReference(direction, residual, count, float(dominance.get(label, 1.0)))
    return out
