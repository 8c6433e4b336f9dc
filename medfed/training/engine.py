"""medfed's own MONAI trainer: reused for every client, with the step and the objective exchanged between runs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sized
from typing import Any

import torch
from monai.engines import SupervisedTrainer
from torch import nn

from medfed.training.objectives import Objective
from medfed.training.steps import Parts

Step = Callable[[Any, Any], dict[str, Any]]


class ClientTrainer(SupervisedTrainer):
    """A ``SupervisedTrainer`` that minimises ``objective(network, batch)`` by exchangeable steps.

    Args:
        network: the resident network, on ``device``.
        device: where it trains.
        amp: automatic mixed precision: float16 with a gradient scaler, made anew each run, on CUDA; bfloat16 on a CPU.
    """

    def __init__(self, network: nn.Module, device: torch.device, amp: bool = False):
        dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
        super().__init__(
            device=device,
            max_epochs=1,
            train_data_loader=[],
            network=network,
            optimizer=None,  # type: ignore[arg-type]
            loss_function=nn.CrossEntropyLoss(),
            iteration_update=_dispatch,
            decollate=False,
            amp=amp,
            amp_kwargs={"dtype": dtype},
        )
        # One line an epoch for each of hundreds of clients says nothing.
        self.logger.setLevel(logging.WARNING)
        self.parts = Parts(network)
        self.objective: Objective | None = None
        self.step: Step | None = None
        self.on_output: Callable[[Any, dict[str, Any]], None] | None = None

    def train(
        self,
        data: Sized,
        epochs: int,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        step: Step,
        on_output: Callable[[Any, dict[str, Any]], None],
    ) -> None:
        """Runs some epochs over ``data``; ``on_output(batch, output)`` is called after each step."""
        self.optimizer, self.objective, self.step, self.on_output = optimizer, objective, step, on_output
        self.data_loader = data  # type: ignore[assignment]
        # Forget an earlier run, also one that an error ended half-way.
        self.state.max_epochs = None
        self._dataloader_iter = self._internal_run_generator = None
        self.state.epoch_length = len(data)
        self.state.iteration = self.state.epoch = 0
        self.state.max_epochs = epochs
        try:
            if self.amp:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", category=FutureWarning, message=".*GradScaler.*")
                    warnings.filterwarnings("ignore", category=UserWarning, message=".*GradScaler.*")
                    self.run()
            else:
                self.run()
        finally:
            self.optimizer = self.objective = self.step = self.on_output = None  # type: ignore[assignment]
            self.state.output = self.state.batch = None
            self.data_loader = self.state.dataloader = []

    def fire_event(self, event_name: Any) -> None:
        """Fires an event; nothing where nobody listens, which saves small networks a tenth of their time."""
        if self._event_handlers:
            super().fire_event(event_name)

    def _fire_event(self, event_name: Any, *event_args: Any, **event_kwargs: Any) -> None:
        if self._event_handlers:
            super()._fire_event(event_name, *event_args, **event_kwargs)


def _dispatch(engine: Any, batchdata: Any) -> dict[str, Any]:
    output = engine.step(engine, batchdata)
    engine.on_output(batchdata, output)
    return output
