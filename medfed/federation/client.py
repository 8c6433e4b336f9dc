"""A client as a method's task sees it: observed labels, a trainer, a memory, and nothing of the truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from medfed.data.cohort import Task
from medfed.errors import DataError
from medfed.federation.memory import ClientMemory
from medfed.federation.messages import Message, State

if TYPE_CHECKING:
    from medfed.data.arrays import ArrayDataset
    from medfed.training.local import FitResult, LocalTrainer

PUBLIC_FIX = "Set some apart, e.g. with condition.public: {fraction: 0.1}."


@dataclass(frozen=True)
class Request:
    """What a server asks of clients.

    Args:
        task: name of the client task.
        round: current round, from 1.
        step: number of the request, rising through the whole run.
        confirmed: the last request covered by the server's checkpoint.
        message: tensors and values for the task.
        each: values for one client alone, by client.
    """

    task: str
    round: int
    step: int
    confirmed: int
    message: Message
    each: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def message_for(self, client: str) -> Message:
        """What one client is told: the message with its own values, and nobody else's."""
        own = self.each.get(client)
        return Message(self.message.tensors, {**self.message.values, **own}) if own else self.message


class Client:
    """One hospital's side of the federation.

    Args:
        name: the client's name.
        data: its images with the labels observed there.
        trainer: a trainer, which several simulated clients may share one after another.
        task: classes and kind of labels.
        memory: what the client keeps between rounds.
        seed: seed of the run; all randomness of the client comes from (seed, round, client, purpose).
        public: images that everybody may see, without labels (-1 each); None where there are none.
    """

    def __init__(
        self,
        name: str,
        data: ArrayDataset,
        trainer: LocalTrainer,
        task: Task,
        memory: ClientMemory | None = None,
        seed: int = 0,
        public: ArrayDataset | None = None,
    ):
        self.name, self.data, self.trainer, self.task = name, data, trainer, task
        self.memory = ClientMemory() if memory is None else memory
        self.seed, self.round = seed, 0
        self._public = public

    @property
    def public(self) -> ArrayDataset:
        """Images that everybody may see, without labels (-1 each).

        Raises:
            DataError: there are none here.
        """
        if self._public is None:
            raise DataError("there are no public images here.", where=self.name, fix=PUBLIC_FIX)
        return self._public

    @property
    def num_samples(self) -> int:
        """Number of training samples."""
        return len(self.data)

    def class_counts(self) -> torch.Tensor:
        """Observed samples per class ``[C]``, float32 (positives per label where multilabel)."""
        labels = self.data.labels
        if self.task.kind == "multilabel":
            return labels.sum(dim=0).float()
        return torch.bincount(labels.long(), minlength=self.task.num_classes).float()

    def load(self, model: Mapping[str, torch.Tensor]) -> None:
        """Copies a received model into the trainer's resident network."""
        self.trainer.load(model)

    def model(self) -> State:
        """The network's state dict as views, valid until the next :meth:`load`; clone what must last."""
        return self.trainer.state()

    def fit(self, data: ArrayDataset | None = None, *, purpose: str | None = None, **options: Any) -> FitResult:
        """Trains the resident network; see :meth:`LocalTrainer.fit`.

        Args:
            data: other data than the client's own (corrected labels, say).
            purpose: what it is for, where a client trains more than once in a round: gives each its own randomness.
            **options: of :meth:`LocalTrainer.fit`.
        """
        parts = (self.seed, self.round, self.name)
        return self.trainer.fit(
            self.data if data is None else data,
            seed_parts=parts if purpose is None else (*parts, purpose),
            **options,
        )
