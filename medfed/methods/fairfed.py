"""FairFed: clients on which the model is as accurate as on all together weigh more.

Ezzeldin, Yan, He, Ferrara, Avestimehr. FairFed: Enabling Group Fairness in Federated Learning. AAAI 2023. Their measure
is the gap between the fairness of the model at a client and over all; where a client has no groups to be fair to, as
in tasks without a sensitive attribute, it is the gap between accuracies, and that is what is used here::

    gap_k = |acc_k - acc|,   acc = sum_k a_k acc_k,   a_k = N_k / sum_j N_j
    w_k   <- w_k - beta (gap_k - mean gap),           w_k = a_k at first
    theta_{t+1} = sum_k w_k theta_(t,k)

with accuracies of the received model. A client that is served badly is far from the mean and *loses* weight.

``form: as_released`` is what FedISM's code ran under this name and what made its tables: balanced accuracy, no step in
the first round, and a sum that was left out, so that ``gap_k = acc_k (1 - a_k)``: weight falls with accuracy, and badly
served clients gain, the opposite of the rule above. FedISM's text describes the latter.

Weights below 0 are 0 in both forms: a negative one would make variances of BatchNorm negative.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from medfed.aggregation.fair import fairfed_gaps, initial_weights, lowered_by_gap
from medfed.aggregation.weights import normalised
from medfed.federation.client import Client
from medfed.federation.messages import Message
from medfed.federation.method import Method
from medfed.federation.server import RoundReport, Server
from medfed.methods.local_training import LocalTraining, train
from medfed.methods.validation import Score, score

FORMS: dict[str, dict[str, Any]] = {"published": {}, "as_released": {"metric": "balanced_accuracy"}}


class FairFedSettings(LocalTraining):
    """Settings of FairFed.

    Args:
        form: ``published`` (the two-sided gap), or ``as_released`` with FedISM: see the top of this page.
        beta: step of the weights. With K clients they begin near 1/K, so that gaps that differ by more push weights to
            0 within a round; they rise again when their gap is below the mean.
        metric: accuracy that is compared, on the training data: ``accuracy``, or ``balanced_accuracy``
            (``as_released``).
    """

    form: Literal["published", "as_released"] = "published"
    beta: float = Field(1.0, ge=0)
    metric: Score = "accuracy"

    @model_validator(mode="before")
    @classmethod
    def _form(cls, given: Any) -> Any:
        return {**FORMS.get(str(given.get("form", "")), {}), **given} if isinstance(given, Mapping) else given


def accuracy(client: Client, message: Message) -> Message:
    """Client task: accuracy of the received model on the client's training data.

    Args:
        client: the client.
        message: group ``model``; value ``metric``.

    Returns:
        Values ``samples`` and ``received_accuracy``.
    """
    client.load(message.group("model"))
    measured = score(client, client.data, message.values["metric"])
    return Message.of({"samples": client.num_samples, "received_accuracy": measured})


def program(server: Server, settings: FairFedSettings) -> Iterator[RoundReport]:
    """theta_{t+1} = sum_k w_k theta_(t,k) with weights lowered by the gap in accuracy."""
    for round in server.rounds():
        model, numbers = server.model, ("samples", "received_accuracy")
        measured = server.ask("accuracy", Message.of({"metric": settings.metric}, model=model), numbers=numbers)
        if not measured:
            yield server.report(measured)
            continue
        samples = measured.value("samples")
        kept = dict(server.notes["weights"].values) if "weights" in server.notes else {}
        weights = initial_weights(samples, kept, server.clients)
        released = settings.form == "as_released"
        gaps, overall = fairfed_gaps(measured.value("received_accuracy"), samples, two_sided=not released)
        if kept or not released:
            weights = lowered_by_gap(weights, gaps, settings.beta)
        request = Message.of(settings.request(round, server.num_rounds), model=model)
        replies = server.ask("train", request, clients=measured.clients, mean="model", weight=weights)
        if replies:
            server.model = replies.mean["model"]
            server.notes["weights"] = Message(values=weights)
        server.report(measured, server={"overall_accuracy": overall}, gap=gaps)
        yield server.report(replies, weight=normalised(weights, replies.clients) if replies else {})


METHOD = Method(
    name="fairfed",
    title="Weights clients by how near their accuracy is to that of all (fairness)",
    paper="Ezzeldin et al., AAAI 2023",
    program=program,
    tasks={"accuracy": accuracy, "train": train},
    settings=FairFedSettings,
    sends="sample count, accuracy of the received model",
)
