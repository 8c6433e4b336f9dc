"""Random augmentation of whole batches, on their device, from an explicit generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from medfed.errors import ConfigError
from medfed.seeding import torch_generator


class BatchAugment:
    """Random affine map and horizontal flip, one draw a sample.

    The FedISM authors train with ±10 degrees, 2 % translation and a flip.  Sampling is bilinear, what comes from
    outside the image is black (0).  The parameters are drawn on the CPU, so that they are the same whatever the device;
    always five a sample, so that switching one kind off leaves the others as they were.

    Args:
        degrees: largest rotation, either way.
        translate: largest shift as a share of height and width, either way.
        flip: probability of a horizontal flip.
        scale: largest relative change of size, either way (0.1: from 0.9 to 1.1).

    Raises:
        ConfigError: a value is out of its range.
    """

    def __init__(self, degrees: float = 0.0, translate: float = 0.0, flip: float = 0.0, scale: float = 0.0):
        limits = {"degrees": (degrees, 180), "translate": (translate, 1), "flip": (flip, 1), "scale": (scale, 0.99)}
        for name, (value, limit) in limits.items():
            if not 0 <= value <= limit:
                raise ConfigError(f"{name} must be between 0 and {limit}, got {value}.", where="augment")
        self.degrees, self.translate, self.flip, self.scale = degrees, translate, flip, scale

    def __call__(self, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Augments a batch.

        Args:
            images: floating ``[B, C, H, W]``.
            generator: a CPU generator.

        Returns:
            A batch of the same shape; the given one is not changed.
        """
        if not (self.degrees or self.translate or self.flip or self.scale):
            return images
        draws = torch.rand(len(images), 5, generator=generator)
        flipped = draws[:, 4] < self.flip
        if not (self.degrees or self.translate or self.scale):
            return torch.where(flipped.to(images.device)[:, None, None, None], images.flip(-1), images)
        theta = self._inverse_maps(draws[:, :4] * 2 - 1, flipped, images.shape[-2], images.shape[-1])
        grid = F.affine_grid(theta.to(images.device, images.dtype), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)

    def _inverse_maps(self, unit: torch.Tensor, flipped: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Maps ``[B, 2, 3]`` from output to input, in coordinates of -1..1.

        With x, y in pixels from the centre, the input of output point p is ``(sR)⁻¹ (F p − t)``: rotation R, scale s
        and shift t first, the flip F last.
        """
        angle = torch.deg2rad(unit[:, 0] * self.degrees)
        shift_x, shift_y = unit[:, 1] * self.translate * width, unit[:, 2] * self.translate * height
        size = 1 + unit[:, 3] * self.scale
        cos, sin = torch.cos(angle) / size, torch.sin(angle) / size
        mirror = 1.0 - 2.0 * flipped
        rows = [
            [cos * mirror, sin * (height / width), -(cos * shift_x + sin * shift_y) * (2 / width)],
            [-sin * mirror * (width / height), cos, (sin * shift_x - cos * shift_y) * (2 / height)],
        ]
        return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=1)


class PrepareBatch:
    """``prepare_batch`` of a MONAI engine: moves a batch to the device, augments and normalises it.

    Args:
        augment: ``augment(images, generator)``; None for evaluation.
        normalize: ``normalize(images)``.
        seed: seed of the augmentation.
    """

    def __init__(
        self,
        augment: Callable[[torch.Tensor, torch.Generator], torch.Tensor] | None = None,
        normalize: Callable[[torch.Tensor], torch.Tensor] | None = None,
        seed: int = 0,
    ):
        self.augment, self.normalize = augment, normalize
        self.generator = torch_generator(seed, "augment")

    def __call__(
        self, batch: dict[str, Any], device: torch.device | None = None, non_blocking: bool = False, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Images ``[B, C, H, W]`` and labels (None without any) of a collated batch, ready for the network."""
        images = torch.as_tensor(batch["image"]).to(device, torch.float32, non_blocking=non_blocking, **kwargs)
        images = images.as_tensor() if hasattr(images, "as_tensor") else images
        labels = None
        if "label" in batch:
            labels = torch.as_tensor(batch["label"]).to(device, non_blocking=non_blocking, **kwargs)
        if self.augment is not None:
            images = self.augment(images, self.generator)
        if self.normalize is not None:
            images = self.normalize(images)
        return images, labels
