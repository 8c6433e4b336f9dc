"""Stage I of OCT-FedSIR, FedSIR and spectral pruning: whose labels can be trusted, and where training begins.

Two ways to find out (``identification``):

- ``published``: every client trains the common initial model on its own labels and sends three scalars that say how
  alike the leading directions of its classes are (Eqs. 8 to 15); the server splits the clients by a mixture.
- ``evidence``: medfed's own. Nothing is trained: a client measures how well its labels agree with the features of the
  received model and sends the values named in :mod:`medfed.reliability.evidence`; the server judges all of them, and
  again at every later checkpoint.

Models of Stage I leave a client only where it was judged clean and training begins from their mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field

from medfed.errors import DataError
from medfed.federation.client import Client
from medfed.federation.messages import Message, State
from medfed.federation.method import MethodSettings
from medfed.methods.noise_aware import prior_adjusted

KEPT = "stage_one/"
EVIDENCE = "identification: evidence"


class StageOne(MethodSettings):
    """Local training before identification. The paper gives no values; these are those of FedSIR's released code.

    Args:
        epochs: passes over the client's data.
        learning_rate: of the bundle's optimiser.
        weight_decay: of the bundle's optimiser.
        logit_adjustment: None follows that of the rounds.
    """

    epochs: int = Field(5, ge=1)
    learning_rate: float = Field(5e-5, gt=0)
    weight_decay: float = Field(5e-2, ge=0)
    logit_adjustment: bool | None = None


class Identification(MethodSettings):
    """Settings of the identification.

    Args:
        identification: ``published``, the paper's mixture of descriptors; or ``evidence``, medfed's own.
        compare: ``evidence``: clients are compared with ``all`` others, or with their ``peers``, whose images are of
            like quality: bad images then do not look like wrong labels.
        stage_one: local training before identification (``published``), and of the models from which Stage II begins.
        balanced: ``published``: each observed class is repeated at random up to the size of the largest (Eqs. 4 to 6).
        maximum: ``published``: the largest cosine is a third descriptor beside mean and energy (Eq. 15).
        absolute: ``published``: cosines without their sign, as FedSIR has them. Singular vectors have a canonical
            sign here, so that signed cosines (Eq. 12) mean something.
        min_samples: ``published``: fewest samples of a class for a direction, after balancing; where fewer than two
            classes have that many, all observed classes count. The paper takes every class.
        augmented: ``published``: features of augmented images, as in FedSIR's released code.
        mixture_seed: seed of the mixture of descriptors.
        start: where Stage II begins: ``clean``, the size-weighted mean of the clean clients' Stage-I models (FedSIR's
            released code; the paper does not say), or ``initial``, the common initial model.
    """

    identification: Literal["published", "evidence"] = "published"
    compare: Literal["all", "peers"] = "all"
    stage_one: StageOne = StageOne()
    balanced: bool = True
    maximum: bool = True
    absolute: bool = False
    min_samples: int = Field(1, ge=1)
    augmented: bool = False
    mixture_seed: int = Field(42, ge=0)
    start: Literal["clean", "initial"] = "clean"

    def check(self, rounds: int) -> list[str]:
        """Names settings of the descriptors where there are none."""
        found = super().check(rounds)
        if self.identification == "published":
            found += self.idle(("compare",), "identification: published")
        if self.identification == "evidence":
            found += self.idle(("balanced", "maximum", "absolute", "min_samples", "augmented"), EVIDENCE)
            if self.start == "initial":
                found += self.idle(("stage_one",), f"{EVIDENCE} and method.start: initial")
        return found

    @property
    def revises(self) -> bool:
        """Whether later evidence may change a verdict."""
        return False

    def local(self, prior: Mapping[str, Any]) -> dict[str, Any]:
        """Plain values of the Stage-I training, with the logit adjustment of the rounds unless it has its own."""
        own = {k: v for k, v in self.stage_one.model_dump().items() if v is not None}
        return {**prior, **own}


def identify(client: Client, message: Message) -> Message:
    """Client task: Stage-I training and descriptors, or evidence from the received model's features.

    The similarity matrix of the classes stays in the client's memory (``similarity``), and so does the trained model
    until the server asks for it or training goes on.

    Args:
        client: the client.
        message: group ``model``; values ``identification``, ``stage_one``, ``balanced``, ``absolute``,
            ``min_samples``, ``augmented``, ``maximum`` and ``keep`` (the model is kept for :func:`stage_one`).

    Returns:
        Values ``samples``, ``observed_classes``, and ``descriptor_mean``, ``descriptor_energy`` and, where wanted,
        ``descriptor_max`` (None where fewer than two classes are observed); or the evidence.
    """
    client.load(message.group("model"))
    values = message.values
    if values["identification"] == "evidence":
        return evidence_of(client, client.trainer.features(client.data))
    train_stage_one(client, values["stage_one"])
    if values["keep"]:
        keep(client, client.model())
    return Message.of({**_counts(client), **_described(client, values)})


def stage_one(client: Client, message: Message) -> Message:
    """Client task: the model of Stage I, kept since :func:`identify` or trained now from the received one.

    Args:
        client: the client.
        message: group ``model`` where there was no training yet; value ``stage_one``.

    Returns:
        Group ``model``; value ``samples``.
    """
    kept = {name.removeprefix(KEPT): client.memory[name] for name in client.memory if name.startswith(KEPT)}
    if not kept:
        given = message.group("model")
        if not given:
            raise DataError("there is no model of Stage I here.", where=client.name)
        client.load(given)
        train_stage_one(client, message.values["stage_one"])
        kept = client.model()
    forget(client)
    return Message.of({"samples": client.num_samples}, model=kept)


def review(client: Client, message: Message) -> Message:
    """Client task: evidence again, from the features of the current reference model.

    Args:
        client: the client.
        message: group ``reference``; value ``keep``: the features are kept for the rest of the checkpoint.

    Returns:
        The evidence.
    """
    return evidence_of(client, features_of(client, message))


def train_stage_one(client: Client, values: Mapping[str, Any]) -> None:
    """Trains the loaded model on the observed labels (Eq. 10)."""
    client.fit(
        objective=prior_adjusted(client, values["logit_adjustment"], values["least_count"]),
        epochs=values["epochs"],
        learning_rate=values["learning_rate"],
        weight_decay=values["weight_decay"],
        purpose="stage one",
    )


def features_of(client: Client, message: Message) -> torch.Tensor:
    """Features ``[N, d]`` of the client's images under the received reference model, or those kept since it came.

    Raises:
        DataError: no model came, and none did before.
    """
    reference = message.group("reference")
    if not reference:
        if "features" not in client.memory:
            raise DataError("there are no features of the reference model here.", where=client.name)
        return client.memory["features"]
    client.load(reference)
    features = client.trainer.features(client.data)
    if message.values["keep"]:
        client.memory["features"] = features
    return features


def evidence_of(client: Client, features: torch.Tensor) -> Message:
    """Evidence about the observed labels; what concerns single samples stays in the client's memory."""
    from medfed.reliability.evidence import evidence
    from medfed.reliability.spectra import class_directions, similarity

    labels, classes = client.data.labels, client.task.num_classes
    found = evidence(features, labels, classes, groups=patients_of(client))
    remember_samples(client, found.samples)
    client.memory["similarity"] = similarity(class_directions(features, labels, classes, min_samples=1), classes)
    return Message(found.tensors, {**_counts(client), **found.values})


def patients_of(client: Client) -> torch.Tensor | None:
    """The patient of each of the client's samples as a number ``[N]``; None where that is not known."""
    groups = client.data.groups
    return None if groups is None else torch.tensor(groups)


def remember_samples(client: Client, samples: Any) -> None:
    """Keeps the leave-one-out evidence of each sample for the client's own audit list."""
    client.memory["audit_loo_label"] = samples.predicted
    client.memory["audit_loo_margin"] = samples.margin


def keep(client: Client, model: State) -> None:
    """Keeps a model in the client's memory."""
    forget(client)
    for name, tensor in model.items():
        client.memory[KEPT + name] = tensor


def forget(client: Client) -> None:
    """Drops what is of no use after Stage I or a checkpoint: the trained model and the features."""
    for name in [n for n in client.memory if n.startswith(KEPT) or n == "features"]:
        del client.memory[name]


def _counts(client: Client) -> dict[str, int]:
    return {"samples": client.num_samples, "observed_classes": int((client.class_counts() > 0).sum())}


def _described(client: Client, values: Mapping[str, Any]) -> dict[str, Any]:
    """The descriptors of the resident network's features (Eqs. 11 to 15)."""
    from medfed.reliability.spectra import balanced, class_directions, descriptors, similarity
    from medfed.seeding import torch_generator

    labels, classes = client.data.labels, client.task.num_classes
    parts = (client.seed, client.round, client.name)
    features = client.trainer.features(client.data, augmented=parts if values["augmented"] else None)
    if values["balanced"]:
        rows = balanced(labels, torch_generator("balance", *parts))
        features, labels = features[rows], labels[rows]
    directions = class_directions(features, labels, classes, min_samples=values["min_samples"])
    if len(directions) < 2:
        directions = class_directions(features, labels, classes, min_samples=1)
    matrix = similarity(directions, classes)
    client.memory["similarity"] = matrix
    found = descriptors(matrix, absolute=values["absolute"])
    told = {"descriptor_mean": found.mean, "descriptor_energy": found.energy}
    told |= {"descriptor_max": found.maximum} if values["maximum"] else {}
    return told if found.pairs else dict.fromkeys(told)
