"""FedProx: federated averaging with a proximal term that holds local models near the received one.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated Optimization in Heterogeneous Networks. MLSys 2020. Of the
paper's two parts this is the proximal term; the other one, less local work for slow clients, is left to participation.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from medfed.federation.client import Client
from medfed.federation.messages import Message
from medfed.federation.method import Method
from medfed.methods.fedavg import program
from medfed.methods.local_training import LocalTraining, fit_and_reply


class FedProxSettings(LocalTraining):
    """Settings of FedProx.

    Args:
        mu: weight of the proximal term, mu/2 ||w - w_t||^2. 0.2 is the value of FedSIR's released code, which trains
            with plain cross-entropy (``logit_adjustment: false``); OCT-FedSIR gives none; the FedProx paper tries
            0.001, 0.01, 0.1 and 1. 0 is FedAvg, bit by bit.
    """

    mu: float = Field(0.2, ge=0)

    def request(self, round: int, rounds: int) -> dict[str, Any]:
        """The plain values of a ``train`` request in one round."""
        return {**super().request(round, rounds), "mu": self.mu}


def train(client: Client, message: Message) -> Message:
    """Client task: minimises F_k(w) + mu/2 ||w - w_t||^2 over the trainable parameters, from the received w_t.

    Args:
        client: the client.
        message: group ``model``; values of :meth:`FedProxSettings.request`.

    Returns:
        As :func:`medfed.methods.local_training.train`; ``loss`` contains the proximal term.
    """
    from medfed.training.objectives import ProximalObjective

    received, mu = message.group("model"), message.values["mu"]
    client.load(received)
    return fit_and_reply(client, message, lambda objective: ProximalObjective(objective, received, mu))


METHOD = Method(
    name="fedprox",
    title="Federated averaging with a proximal term",
    paper="Li et al., MLSys 2020",
    program=program,
    tasks={"train": train},
    settings=FedProxSettings,
    sends="sample count",
)
