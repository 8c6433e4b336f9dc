"""A client as a method's task sees it: observed labels, a trainer, a memory, and nothing of the truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from medfed.data.cohort import Task
from medfed.federation.memory import ClientMemory
from medfed.federation.messages import Message, State

if TYPE_CHECKING:
    from medfed.data.arrays import ArrayDataset
    from medfed.training.local import FitResult, LocalTrainer


@dataclass(frozen=True)
class Request:
    """What a server asks of clients.

    Args:
        task: name of the client task.
        round: current round, from 1.
        step: number of the request, rising through the whole run.
        confirmed: the last request covered by the server's checkpoint.
        message: tensors and values for the task.
    """

    task: str
    round: int
    step: int
    confirmed: int
    message: Message


class Client:
    """One hospital's side of the federation.

    Args:
        name: the client's name.
        data: its images with the labels observed there.
        trainer: a trainer, which several simulated clients may share one after another.
        task: classes and kind of labels.
        memory: what the client keeps between rounds.
        seed: seed of the run; all randomness of the client comes from (seed, round, client, purpose).
    """

    def __init__(
        self,
        name: str,
        data: ArrayDataset,
        trainer: LocalTrainer,
        task: Task,
        memory: ClientMemory | None = None,
        seed: int = 0,
    ):
        self.name, self.data, self.trainer, self.task = name, data, trainer, task
        self.memory = ClientMemory() if memory is None else memory
        self.seed, self.round = seed, 0

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

    def fit(self, **options: object) -> FitResult:
        """Trains the resident network on the client's data; see :meth:`LocalTrainer.fit`."""
        return self.trainer.fit(self.data, seed_parts=(self.seed, self.round, self.name), **options)  # type: ignore[arg-type]
