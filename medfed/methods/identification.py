"""Verdicts on clients: the server's half of Stage I, and what it learns later.

A verdict is kept in the server's notes (``verdict``) and told in the record of its round. The ``published`` one is for
good; ``evidence`` is judged again at every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from medfed.federation.messages import Message, Replies, State
from medfed.federation.server import Server
from medfed.methods.stage_one import Identification

if TYPE_CHECKING:
    from medfed.reliability.identification import Verdict


def first_verdict(server: Server, settings: Identification, prior: Mapping[str, Any]) -> Message:
    """Stage I: asks every client, judges, and sets the model from which Stage II begins.

    Notes ``samples`` (by client), ``descriptors`` or ``evidence``, and ``reference`` where Stage II begins from the
    clean clients. For ``server.once("verdict", ...)``.

    Args:
        server: the server.
        settings: of the identification.
        prior: ``logit_adjustment`` and ``least_count`` of the rounds.
    """
    local = settings.local(prior)
    published = settings.identification == "published"
    replies = _ask_identify(server, settings, local, server.clients, server.model)
    server.notes["samples"] = Message(values=replies.value("samples"))
    verdict = _judge(server, settings, replies)
    if (published or not settings.revises) and len(replies) < len(server.clients):
        server.notes["initial"] = Message.of({}, model=server.model)
    note = tell(server, settings, verdict, replies)
    if settings.start == "clean" and verdict.clean:
        trained = Message.of({"stage_one": local}, **({} if published else {"model": server.model}))
        gathered = server.ask(
            "stage_one", trained, clients=verdict.clean, expect={"model": server.model}, mean="model", weight="samples"
        )
        if gathered:
            server.model = gathered.mean["model"]
            server.notes["reference"] = Message.of({"samples": gathered.value("samples")}, model=server.model)
    return note


def later_verdict(server: Server, settings: Identification, prior: Mapping[str, Any], keep: bool) -> bool:
    """Judges again at a checkpoint.

    ``evidence``: every client looks at its labels with the reference model, and every verdict may change. Who does not
    answer keeps the verdict that it had; where no more than half of the clients answer, so do all, since clients are
    judged by comparison.
    ``published``: a verdict is for good; only clients that did not answer so far are asked for their descriptors. So it
    is with ``evidence`` that is not revised, but that all are asked again for what they sent of the initial model's
    features, since clients are judged by comparison.

    Args:
        server: the server.
        settings: of the identification.
        prior: ``logit_adjustment`` and ``least_count`` of the rounds.
        keep: clients keep the features of the reference model for the rest of the checkpoint.

    Returns:
        Whether all clients hold the features of the reference model now.
    """
    before = verdict_of(server)
    missing = [c for c in server.clients if c not in server.notes["samples"].values]
    if settings.identification == "evidence":
        if not settings.revises and not missing:
            return False
        keep = keep and settings.revises
        model = reference_model(server) if settings.revises else server.notes["initial"].group("model")
        request = Message.of({"keep": keep}, reference=model)
        replies = server.ask("review", request, clients=server.clients, numbers=("samples", "observed_classes"))
        if 2 * len(replies) > len(server.clients):
            verdict = _with(_judge(server, settings, replies), replies, before)
            server.notes["verdict"] = tell(server, settings, verdict, replies)
            _count(server, replies)
            if not settings.revises and set(missing) <= set(replies.clients):
                del server.notes["initial"]
        else:
            few = f"{len(replies)} of {len(server.clients)} clients sent evidence"
            server.report(replies).warnings.append(f"identification: {few}: the verdict stays")
        return keep
    if missing and "initial" in server.notes:
        initial = server.notes["initial"].group("model")
        replies = _ask_identify(server, settings, settings.local(prior), missing, initial)
        if replies:
            verdict = _with(_judge(server, settings, replies), replies, before)
            server.notes["verdict"] = tell(server, settings, verdict, replies)
            _count(server, replies)
        if len(replies) == len(missing):
            del server.notes["initial"]
    return False


def verdict_of(server: Server) -> Verdict:
    """The newest verdict; who never answered is undetermined."""
    from medfed.reliability.identification import Verdict

    return Verdict.from_plain(server.notes["verdict"].values)


def reference_model(server: Server) -> State:
    """The clean reference model, or the global one while there is none."""
    return server.notes["reference"].group("model") if "reference" in server.notes else server.model


def tell(server: Server, settings: Identification, verdict: Verdict, replies: Replies) -> Message:
    """Writes a verdict into the record of the round, and gives it as a note."""
    known = {c: p if math.isfinite(p) else None for c, p in verdict.posterior.items()}
    report = server.report(
        replies,
        server={
            "clean_clients": len(verdict.clean),
            "noisy_clients": len(verdict.noisy),
            "undetermined_clients": len(verdict.undetermined),
        },
        status=verdict.status,
        p_clean=known,
    )
    if not verdict.clean:
        report.warnings.append("no client is judged clean: training goes on with the labels as they are")
    if verdict.note:
        report.warnings.append(f"identification: {verdict.note}")
    return Message(
        values={**verdict.to_plain(), "identification": settings.identification, "round": max(server.round, 1)}
    )


def _ask_identify(
    server: Server, settings: Identification, local: Mapping[str, Any], clients: Any, model: State
) -> Replies:
    first = "samples" not in server.notes
    values = {
        "identification": settings.identification,
        "stage_one": dict(local),
        "balanced": settings.balanced,
        "absolute": settings.absolute,
        "min_samples": settings.min_samples,
        "augmented": settings.augmented,
        "maximum": settings.maximum,
        "keep": first and settings.start == "clean",
    }
    numbers = ("samples", "observed_classes")
    return server.ask("identify", Message.of(values, model=model), clients=clients, numbers=numbers)


def _judge(server: Server, settings: Identification, replies: Replies) -> Verdict:
    """The verdict on all clients that answered so far; the others are undetermined."""
    from medfed.reliability.identification import published
    from medfed.reliability.spectra import Descriptors

    if settings.identification == "evidence":
        from medfed.reliability.peers import judge_among_peers
        from medfed.reliability.verdicts import judge

        earlier = dict(server.notes["evidence"].values) if "evidence" in server.notes else None
        sent = {r.client: r.message for r in replies}
        verdict, state = judge_among_peers(sent, earlier) if settings.compare == "peers" else judge(sent, earlier)
        server.notes["evidence"] = Message(values=_kept(state, earlier or {}))
    else:
        told = dict(server.notes["descriptors"].values) if "descriptors" in server.notes else {}
        names = ("descriptor_mean", "descriptor_energy", "descriptor_max")
        told |= {r.client: [_number(r.values.get(name)) for name in names] for r in replies}
        server.notes["descriptors"] = Message(values=told)
        # A maximum that is not used is not sent either.
        numbers = {c: d if settings.maximum else [*d[:2], 0.0] for c, d in told.items()}
        described = {c: Descriptors(math.nan, math.nan, math.nan, 0) for c in numbers}
        for client, (mean, energy, maximum) in numbers.items():
            if None not in (mean, energy, maximum):
                described[client] = Descriptors(mean, energy, maximum, pairs=2)
        verdict = published(described, use_maximum=settings.maximum, seed=settings.mixture_seed)
    return _completed(server, verdict)


def _kept(state: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """A state with what is pooled of those who did not answer this time."""
    out = {**state, "shares": {**earlier.get("shares", {}), **state["shares"]}}
    if "within" in state:
        before = earlier.get("within", {})
        out["within"] = {name: _kept(inner, before.get(name, {})) for name, inner in state["within"].items()}
    return out


def _with(judged: Verdict, replies: Replies, before: Verdict) -> Verdict:
    """A new verdict on those who replied, with the earlier one on the others."""
    latest = {c: judged if c in replies.clients else before for c in before.status}
    status, posterior = ({c: getattr(v, part)[c] for c, v in latest.items()} for part in ("status", "posterior"))
    return type(before)(status, posterior, judged.note)


def _completed(server: Server, verdict: Verdict) -> Verdict:
    """The verdict with all clients of the federation; those that it does not name are undetermined."""
    from medfed.reliability.identification import Verdict

    return Verdict(
        {c: verdict.status.get(c, "undetermined") for c in server.clients},
        {c: verdict.posterior.get(c, math.nan) for c in server.clients},
        verdict.note,
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _count(server: Server, replies: Replies) -> None:
    server.notes["samples"] = Message(values={**server.notes["samples"].values, **replies.value("samples")})
