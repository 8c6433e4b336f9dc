"""What one client does: training, prediction and sharpness on one resident network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from medfed.errors import ConfigError, DataError
from medfed.seeding import derive_seed, torch_generator
from medfed.training.losses import per_sample_binary_cross_entropy, per_sample_cross_entropy
from medfed.training.objectives import ClassificationObjective, Objective
from medfed.training.predict import pooled_features, predict
from medfed.training.rng import seeded
from medfed.training.sharpness import PerSampleLoss, Radius, Sharpness, dataset_sharpness

if TYPE_CHECKING:
    from medfed.data.arrays import ArrayDataset
    from medfed.training.bundle import TrainingBundle

State = dict[str, torch.Tensor]
SeedParts = Sequence[int | str]
PER_SAMPLE: dict[str, PerSampleLoss] = {
    "multiclass": per_sample_cross_entropy,
    "multilabel": per_sample_binary_cross_entropy,
}


@dataclass(frozen=True)
class FitResult:
    """What local training reports.

    Args:
        loss: mean training loss over all samples of the steps that were taken; NaN where none was.
        samples: the client's samples.
        steps: optimiser steps taken.
        skipped: batches left out because their loss or gradient was not finite.
        epoch_losses: mean training loss of each epoch.
    """

    loss: float
    samples: int
    steps: int
    skipped: int
    epoch_losses: tuple[float, ...]


class LocalTrainer:
    """One resident network and one MONAI trainer, used for every client in turn.

    A client's result depends on the state it loads, its data, the arguments and its seed parts alone, never on what was
    trained before.

    Args:
        bundle: what is trained.
        device: ``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        amp: automatic mixed precision in training; predictions and sharpness stay in float32.
        channels_last: memory format of network and images.
        compile: ``torch.compile`` of the network: True, or the name of a backend.
        threads: intra-op threads of this process; None leaves them.
        seed: seed of the initial network.
    """

    def __init__(
        self,
        bundle: TrainingBundle,
        device: str | torch.device = "auto",
        amp: bool = False,
        channels_last: bool = False,
        compile: bool | str = False,
        threads: int | None = None,
        seed: int = 0,
    ):
        from medfed.training.engine import ClientTrainer

        if threads is not None:
            torch.set_num_threads(threads)
        self.bundle, self.device = bundle, resolve_device(device)
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self.network = bundle.build_network(seed).to(self.device, memory_format=self._format)  # type: ignore[call-overload]
        if compile:
            self.network.compile(backend=compile if isinstance(compile, str) else "inductor")
        self._state: State = dict(self.network.state_dict())
        self._params = [p for p in self.network.parameters() if p.requires_grad]
        self._has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.network.modules())
        self._trainer = ClientTrainer(self.network, self.device, amp)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copies a state dict into the resident network, in place.

        Raises:
            ConfigError: a key is missing, unexpected or of another shape; nothing is copied then.
        """
        own = self._state
        if state.keys() != own.keys():
            missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
            raise ConfigError(
                f"the state lacks {missing[:3]} and has unexpected {unexpected[:3]} "
                f"({len(missing)} missing, {len(unexpected)} unexpected).",
                where="model",
                fix="Server and client must use the same bundle and overrides.",
            )
        wrong = [k for k, t in own.items() if state[k].shape != t.shape]
        if wrong:
            k = wrong[0]
            raise ConfigError(
                f"'{k}' has shape {tuple(state[k].shape)} instead of {tuple(own[k].shape)} ({len(wrong)} such).",
                where="model",
                fix="Server and client must use the same bundle and overrides.",
            )
        with torch.no_grad():
            torch._foreach_copy_(list(own.values()), [state[name] for name in own])

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the trainable parameters in the state dict."""
        return tuple(name for name, p in self.network.named_parameters() if p.requires_grad)

    def state(self) -> State:
        """The network's state dict as views: they change with the next step or load.  Clone what must last.

        With ``channels_last`` the convolution kernels have that memory format; clone to ``contiguous_format`` to write
        them to a file.
        """
        return dict(self._state)

    def fit(
        self,
        data: ArrayDataset,
        *,
        seed_parts: SeedParts,
        objective: Objective | None = None,
        step: Callable[[Any, Any], dict[str, Any]] | None = None,
        epochs: int = 1,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        weight_decay: float | None = None,
        optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None = None,
        on_batch: Callable[[Mapping[str, torch.Tensor], Mapping[str, Any]], None] | None = None,
        drop_last: bool = False,
    ) -> FitResult:
        """Trains the resident network on a client's data with a new optimiser.

        Order, augmentation and dropout come from ``seed_parts`` alone.  A last batch of one joins the one before.

        Args:
            data: the client's images and observed labels.
            seed_parts: what the randomness is for: ``(seed, round, client)``.
            objective: what is minimised; plain cross-entropy of the bundle's task where None.
            step: the optimiser step, an ``iteration_update``; the bundle's where None.
            epochs: passes over the data.
            batch_size: images a step; the bundle's where None.
            learning_rate: replaces the bundle's.
            weight_decay: replaces the bundle's.
            optimizer: makes the optimiser of the trainable parameters; the bundle's, with the two above, where None.
            on_batch: called with the batch and the step's output after each step.
            drop_last: an incomplete last batch is left out of each epoch, unless it is the only one.

        Returns:
            Losses and counts.

        Raises:
            DataError: no sample, or a single one for a network with BatchNorm.
            ConfigError: an argument is out of its range.
        """
        size = self.bundle.batch_size if batch_size is None else batch_size
        self._check(len(data), size, epochs)
        batches = _TrainingBatches(self, data, size, seed_parts, drop_last)
        tally = _Tally(on_batch)
        with seeded(derive_seed("dropout", *seed_parts), self.device):
            self._trainer.train(
                batches,
                epochs,
                self.bundle.make_optimizer(self._params, learning_rate, weight_decay)
                if optimizer is None
                else optimizer(self._params),
                objective or ClassificationObjective(self.bundle.task),  # type: ignore[arg-type]
                step or self.bundle.step,
                tally,
            )
        return tally.result(len(data), len(batches))

    def predict(self, data: ArrayDataset, batch_size: int = 64, augmented: SeedParts | None = None) -> torch.Tensor:
        """Logits ``[N, classes]``, float32, on the CPU, in the order of the data.

        Args:
            data: images.
            batch_size: images a pass; only speed depends on it, and what is drawn for a random augmentation.
            augmented: seed parts of a random augmentation; None for the deterministic images.
        """
        generator = None if augmented is None else torch_generator("predictions", *augmented)
        return predict(self.network, self._batches(data, batch_size, generator))

    def predict_as_in_training(
        self, data: ArrayDataset, *, seed_parts: SeedParts, batch_size: int | None = None
    ) -> torch.Tensor:
        """Logits in training mode: what :meth:`fit` with these seed parts sees in an epoch, were no step taken.

        Images are shuffled and augmented, features dropped, and BatchNorm takes the statistics of each batch.  Its
        running statistics stay as they were.

        Args:
            data: images.
            seed_parts: what the randomness is for.
            batch_size: images a pass; the bundle's where None.

        Returns:
            ``[N, classes]``, float32, on the CPU, in the order of the data.

        Raises:
            DataError: no sample, or a single one for a network with BatchNorm.
        """
        size = self.bundle.batch_size if batch_size is None else batch_size
        self._check(len(data), size, epochs=1)
        rows, logits, buffers = [], [], self._trainer.parts.before
        buffers.save()
        self.network.train()
        with seeded(derive_seed("dropout", *seed_parts), self.device), torch.no_grad():
            for batch in _TrainingBatches(self, data, size, seed_parts):
                rows.append(batch["index"])
                logits.append(self.network(batch["image"]).float().cpu())
        buffers.restore()
        return torch.cat(logits)[torch.cat(rows).argsort()]

    def features(self, data: ArrayDataset, batch_size: int = 64, augmented: SeedParts | None = None) -> torch.Tensor:
        """Pooled features ``[N, d]``, float32, on the CPU, in the order of the data.

        Args:
            data: the client's images.
            batch_size: images a pass; only speed depends on it.
            augmented: seed parts of a random augmentation; None for the deterministic images.
        """
        generator = None if augmented is None else torch_generator("features", *augmented)
        batches = self._batches(data, batch_size, generator)
        return predict(self.network, batches, lambda net, x: pooled_features(net, x)[0])

    def losses(self, data: ArrayDataset, batch_size: int = 64, augmented: SeedParts | None = None) -> torch.Tensor:
        """Plain loss of each sample ``[N]``, float32, on the CPU, with the labels of the data.

        Args:
            data: images and labels.
            batch_size: as of :meth:`predict`.
            augmented: as of :meth:`predict`.
        """
        loss = PER_SAMPLE[self.bundle.task]
        logits = self.predict(data, batch_size, augmented)
        return loss(nn.Identity(), {"image": logits, "label": data.labels})

    def sharpness(
        self,
        data: ArrayDataset,
        radius: Radius | float = 0.05,
        *,
        loss: PerSampleLoss | None = None,
        batch_size: int = 64,
        augmented: SeedParts | None = None,
    ) -> Sharpness:
        """Sharpness of the resident network on the data; see :func:`~medfed.training.sharpness.dataset_sharpness`.

        Args:
            data: the client's images and observed labels.
            radius: the radius, or ρ of the constant rule.
            loss: one loss a sample; the plain loss of the bundle's task where None.
            batch_size: images a pass; only speed depends on it.
            augmented: seed parts of a random augmentation, new in every pass, as FedISM's released code has it; None
                for the deterministic images.
        """
        generator = None if augmented is None else torch_generator("sharpness", *augmented)
        return dataset_sharpness(
            self.network,
            lambda: self._batches(data, batch_size, generator),
            radius,
            loss or PER_SAMPLE[self.bundle.task],
            resampled=generator is not None,
        )

    def _batches(
        self, data: ArrayDataset, batch_size: int, augment: torch.Generator | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        if not len(data):
            raise DataError("there is no sample to look at.", where="client")
        for start in range(0, len(data), batch_size):
            yield self._ready(data.batch(torch.arange(start, min(start + batch_size, len(data)))), augment)

    def _ready(self, batch: dict[str, torch.Tensor], augment: torch.Generator | None) -> dict[str, torch.Tensor]:
        """A batch on the device, augmented and normalised."""
        images = batch["image"].to(self.device, memory_format=self._format, non_blocking=True)
        if augment is not None and self.bundle.augment is not None:
            images = self.bundle.augment(images, augment)
        labels = batch["label"].to(self.device, non_blocking=True)
        return {**batch, "image": self.bundle.normalize(images), "label": labels}

    def _check(self, samples: int, batch_size: int, epochs: int) -> None:
        if epochs < 1 or batch_size < 1:
            raise ConfigError(f"{epochs} epochs with batches of {batch_size} train nothing.", where="fit")
        if samples < 1:
            raise DataError(
                "the client has no sample to train on.", where="client", fix="Raise the minimum per client."
            )
        if self._has_batch_norm and min(samples, batch_size) == 1:
            raise DataError(
                "batches of one sample give BatchNorm no statistics.",
                where="client",
                fix="Raise the minimum per client and the batch size, or use a network without BatchNorm.",
            )


class _TrainingBatches:
    """Shuffled batches of one client; iterating again gives the next epoch."""

    def __init__(
        self,
        trainer: LocalTrainer,
        data: ArrayDataset,
        batch_size: int,
        seed_parts: SeedParts,
        drop_last: bool = False,
    ):
        from medfed.data.arrays import batch_slices

        self._trainer, self._data = trainer, data
        self._slices = batch_slices(len(data), batch_size, drop_last=drop_last)
        self._shuffle = torch_generator("shuffle", *seed_parts)
        self._augment = torch_generator("augment", *seed_parts)

    def __len__(self) -> int:
        return len(self._slices)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        order = torch.randperm(len(self._data), generator=self._shuffle)
        for part in self._slices:
            yield self._trainer._ready(self._data.batch(order[part]), self._augment)


class _Tally:
    """Sums the losses of the steps taken and counts those skipped."""

    def __init__(self, on_batch: Callable[[Mapping[str, torch.Tensor], Mapping[str, Any]], None] | None):
        self._on_batch = on_batch
        self._rows: list[tuple[float, int]] = []

    def __call__(self, batch: Mapping[str, torch.Tensor], output: Mapping[str, Any]) -> None:
        taken = 0 if output["skipped"] else len(batch["label"])
        self._rows.append((float(output["loss"]) if taken else 0.0, taken))
        if self._on_batch is not None:
            self._on_batch(batch, output)

    def result(self, samples: int, epoch_length: int) -> FitResult:
        epochs = [self._rows[i : i + epoch_length] for i in range(0, len(self._rows), epoch_length)]
        taken = sum(1 for _, n in self._rows if n)
        return FitResult(
            loss=_mean(self._rows),
            samples=samples,
            steps=taken,
            skipped=len(self._rows) - taken,
            epoch_losses=tuple(_mean(rows) for rows in epochs),
        )


def _mean(rows: Sequence[tuple[float, int]]) -> float:
    total = sum(n for _, n in rows)
    return math.fsum(loss * n for loss, n in rows) / total if total else math.nan


def resolve_device(device: str | torch.device) -> torch.device:
    """The device of a name; ``auto`` is CUDA where there is one.

    Raises:
        ConfigError: there is no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"'{device}' is no device.", where="device", fix="Use auto, cpu, cuda or cuda:N.") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"there is no device '{device}' here.", where="device", fix="Use auto or cpu.")
    return found
