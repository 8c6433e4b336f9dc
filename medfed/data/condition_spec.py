"""What a condition is generated from: the validated part of the experiment file."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from medfed.data.corruption import Corruption


class PartitionSpec(BaseModel):
    """How the training samples are spread over clients.

    Args:
        kind: ``quality`` (FedISM: clean and corrupted pools of the same class mix), ``dirichlet``
            (class-wise) or ``given`` (the cohort's client column).
        clients: number of clients; not used by ``given``.
        alpha: Dirichlet concentration; not used by ``given``.
        group_by_patient: never split a patient over two clients.
        min_samples: samples that every client gets at least; ``given`` only warns.
        corrupted: number of corrupted clients.  The last ones where ``quality``, otherwise drawn by the seed.
        corrupted_clients: their names instead; not for ``quality``.
        shuffle: ``quality`` only: False fills the pools in the order of the cohort, as the paper's code does.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["quality", "dirichlet", "given"] = "quality"
    clients: int = Field(default=20, ge=1)
    alpha: float = Field(default=1.0, gt=0)
    group_by_patient: bool = True
    min_samples: int = Field(default=8, ge=1)
    corrupted: int = Field(default=0, ge=0)
    corrupted_clients: tuple[str, ...] | None = None
    shuffle: bool = True


class CorruptionSpec(BaseModel):
    """What is wrong with the images of corrupted clients and with the corrupted test set.

    Args:
        kind: ``gaussian_noise``, ``shot_noise``, ``motion_blur``, ``gaussian_blur``, ``defocus_blur``, ``contrast``,
            ``low_resolution`` or ``jpeg``.
        severity: 1 to 5 (ImageNet-C; FedISM uses 3).
        domain: ``image`` (prepared pixels in 0..1) or ``hounsfield`` (CT values before the window).
        hu_range: ``hounsfield`` only: width in HU that stands for the full range of an image.

    Raises:
        ConfigError: for what is no corruption; see :class:`medfed.data.corruption.Corruption`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str = "gaussian_noise"
    severity: int = 3
    domain: Literal["image", "hounsfield"] = "image"
    hu_range: float = 80.0

    @model_validator(mode="after")
    def _is_a_corruption(self) -> CorruptionSpec:
        self.build(0)
        return self

    def build(self, seed: int) -> Corruption:
        """The corruption, with the noise of one seed."""
        return Corruption(self.kind, self.severity, self.domain, seed, self.hu_range)


class ConditionSpec(BaseModel):
    """Everything that a condition is generated from, besides the cohort.

    Args:
        seed: the seed of partition, corrupted clients and corruption.
        partition: how training samples are spread over clients.
        corruption: what is wrong with the images of corrupted clients; None where all images are as they are.
        test_fraction: share of the cohort held out where it brings no test split.
        unite_identical: patients who share an identical picture count as one patient, so that it cannot be on both
            sides of a split nor at two clients.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = 0
    partition: PartitionSpec = PartitionSpec()
    corruption: CorruptionSpec | None = None
    test_fraction: float = Field(default=0.2, gt=0, lt=1)
    unite_identical: bool = True
