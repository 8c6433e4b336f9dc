"""Spectral pruning: federated averaging over the clients judged clean; the others are left out for good.

The baseline of FedSIR (arXiv 2604.20825) and OCT-FedSIR (arXiv 2609.14734), which shows what keeping and repairing the
others is worth. Training begins from the common initial model, not from models of Stage I. FedSIR's released code
trains it on true labels; here clients train on the labels that they observe, and no method sees any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from medfed.aggregation.weights import by_samples
from medfed.federation.client import Client
from medfed.federation.messages import Message
from medfed.federation.method import Method
from medfed.federation.server import RoundReport, Server
from medfed.methods.identification import first_verdict, verdict_of
from medfed.methods.local_training import LocalTraining
from medfed.methods.local_training import train as train_locally
from medfed.methods.stage_one import Identification, forget, identify, stage_one


class PruningSettings(Identification, LocalTraining):
    """Settings of pruning: those of identification and of local training.

    Args:
        start: ``initial``, as released; ``clean`` begins from the mean of the clean clients' Stage-I models.
    """

    start: Literal["clean", "initial"] = "initial"


def train(client: Client, message: Message) -> Message:
    """Client task: as in federated averaging."""
    forget(client)
    return train_locally(client, message)


def program(server: Server, settings: PruningSettings) -> Iterator[RoundReport]:
    """Stage I once; then federated averaging over clean clients, or over all where none is clean."""
    prior = {"logit_adjustment": settings.logit_adjustment, "least_count": 1}
    server.once("verdict", lambda: first_verdict(server, settings, prior))
    kept = verdict_of(server).clean or server.clients
    for round in server.rounds():
        asked = [c for c in server.participants() if c in kept]
        request = Message.of(settings.request(round, server.num_rounds), model=server.model)
        replies = server.ask("train", request, clients=asked, mean="model", weight="samples")
        if replies:
            server.model = replies.mean["model"]
        yield server.report(replies, weight=by_samples(replies.value("samples")) if replies else {})


METHOD = Method(
    name="pruning",
    title="Federated averaging over the clients judged clean; the others are left out (label noise)",
    paper="Gholami et al., arXiv 2609.14734",
    program=program,
    tasks={"identify": identify, "stage_one": stage_one, "train": train},
    settings=PruningSettings,
    sends="three descriptors (or evidence) once, sample count",
    keeps="class similarity",
    needs="a clean client",
    task_kinds=("multiclass",),
)
