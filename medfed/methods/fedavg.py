"""FedAvg: federated averaging by sample counts.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas. Communication-Efficient Learning of Deep Networks from
Decentralized Data. AISTATS 2017. In FedISM's tables it trains with logit adjustment and Adam rebuilt every round.

With ``salt: true`` this is FedISM's ablation "SALT only".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from medfed.federation.messages import Message
from medfed.federation.method import Method
from medfed.federation.server import RoundReport, Server
from medfed.methods.local_training import LocalTraining, train


def program(server: Server, settings: LocalTraining) -> Iterator[RoundReport]:
    """theta_{t+1} = sum_k a_k theta_k with a_k = N_k / sum_j N_j."""
    for round in server.rounds():
        yield one_round(server, settings.request(round, server.num_rounds))


def one_round(server: Server, values: Mapping[str, Any], clients: Iterable[str] | None = None) -> RoundReport:
    """One round of local training and averaging by sample counts.

    Args:
        server: the server; its model is replaced, unless nobody is left.
        values: of the ``train`` request.
        clients: who is asked; the round's participants by default.
    """
    message = Message.of(values, model=server.model)
    replies = server.ask("train", message, clients=clients, mean="model", weight="samples")
    if replies:
        server.model = replies.mean["model"]
    total = sum(r.values["samples"] for r in replies)
    return server.report(replies, weight={r.client: r.values["samples"] / total for r in replies})


METHOD = Method(
    name="fedavg",
    title="Federated averaging by sample counts",
    paper="McMahan et al., AISTATS 2017",
    program=program,
    tasks={"train": train},
    settings=LocalTraining,
    sends="sample count",
)
