"""What a condition is generated from: the validated part of the experiment file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from medfed.data.cohort import Task
from medfed.data.corruption import Corruption
from medfed.data.label_noise import Targets, asymmetric, ordinal, symmetric
from medfed.errors import ConfigError, nearest
from medfed.seeding import numpy_generator

NOISE = "condition.label_noise"


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

    def client_names(self) -> tuple[str, ...]:
        """Names of the clients, sorted; none where the cohort gives them."""
        if self.kind == "given":
            return ()
        width = max(2, len(str(self.clients - 1)))
        return tuple(f"client_{k:0{width}d}" for k in range(self.clients))


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


class LabelNoiseSpec(BaseModel):
    """Wrong labels: ``floor(rate * n)`` of the samples of each class at each noisy client.

    Noisy clients need not be those whose images are corrupted. What a client's labels become depends on the
    condition's seed and its name alone. Test labels stay true.

    Args:
        kind: ``symmetric`` (any other class alike), ``asymmetric`` (the class ``map``) or ``ordinal`` (a neighbour in
            the order of the cohort's classes).
        rate: share of wrong labels in each class, or ``[low, high]``, from which each noisy client draws its own.
        map: ``asymmetric`` only: what each class is mistaken for, one class or a list of equal chance; classes that are
            not in it stay, e.g. ``{CNV: DME, DME: CNV}``.
        direction: ``ordinal`` only: ``up`` (the next class), ``down`` (the one before) or ``both``.
        clean: number of clients whose labels stay true; with ``choose: coverage`` the fewest.
        noisy_clients: names of the clients with wrong labels instead.
        choose: how clean clients are found: ``random``, or ``coverage``: few that together hold ``coverage`` samples of
            every class (greedy), then at random up to ``clean``.
        coverage: ``choose: coverage`` only: samples of each class that the clean clients hold together.
        apply: False leaves all labels true: the all-clean reference of the same partition.

    Raises:
        ConfigError: keys that contradict each other or lack what they need.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["symmetric", "asymmetric", "ordinal"] = "symmetric"
    rate: float | tuple[float, float]
    map: dict[str, str | tuple[str, ...]] | None = None
    direction: Literal["both", "up", "down"] = "both"
    clean: int | None = Field(default=None, ge=0)
    noisy_clients: tuple[str, ...] | None = None
    choose: Literal["random", "coverage"] = "random"
    coverage: int | None = Field(default=None, ge=1)
    apply: bool = True

    @field_validator("rate", mode="before")
    @classmethod
    def _one_or_two_numbers(cls, value: Any) -> Any:
        parts = value if isinstance(value, (list, tuple)) and len(value) == 2 else [value]
        if not all(isinstance(part, (int, float)) and not isinstance(part, bool) for part in parts):
            raise ValueError("is a number from 0 to 1, or [low, high]")
        return value

    @field_validator("map", mode="before")
    @classmethod
    def _names_are_text(cls, value: Any) -> Any:
        def text(name: Any) -> Any:
            if isinstance(name, (list, tuple)):
                return [text(n) for n in name]
            return str(name) if type(name) is int else name

        return {text(k): text(v) for k, v in value.items()} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _consistent(self) -> LabelNoiseSpec:
        low, high = self.rates
        if not 0 <= low <= high <= 1:
            raise _fault("rate", "rates lie between 0 and 1, the lower one first.", "Give e.g. 0.4 or [0.3, 0.5].")
        if (self.kind == "asymmetric") != (self.map is not None):
            if self.map is None:
                raise _fault("map", "asymmetric noise needs a class map.", "Give e.g. map: {CNV: DME, DME: CNV}.")
            raise _fault("map", f"{self.kind} noise has no class map.", "Leave it out, or choose kind: asymmetric.")
        if self.direction != "both" and self.kind != "ordinal":
            raise _fault("direction", f"{self.kind} noise has no direction.", "Leave it out, or choose kind: ordinal.")
        if (self.choose == "coverage") != (self.coverage is not None):
            if self.coverage is None:
                raise _fault("coverage", "choose: coverage needs the samples of each class.", "Give e.g. coverage: 20.")
            raise _fault("coverage", "clean clients are not chosen by coverage.", "Add choose: coverage.")
        if self.noisy_clients is not None:
            if self.clean is not None or self.choose == "coverage":
                raise _fault("noisy_clients", "noisy clients are named and chosen.", "Leave out clean and choose.")
            if not self.noisy_clients:
                raise _fault("noisy_clients", "no client is noisy.", "Name one, or leave label_noise out.")
        elif self.clean is None and self.choose == "random":
            raise _fault("clean", "the noisy clients are not given.", "Give clean: 3, say, or noisy_clients.")
        return self

    @property
    def rates(self) -> tuple[float, float]:
        """The lowest and the highest rate of a client."""
        return self.rate if isinstance(self.rate, tuple) else (self.rate, self.rate)

    def rate_of(self, client: str, seed: int) -> float:
        """The rate of a client, which is its own where a range is given."""
        low, high = self.rates
        return low if low == high else float(numpy_generator(seed, "label noise rate", client).uniform(low, high))

    def targets(self, task: Task) -> Targets:
        """What each class may become.

        Raises:
            ConfigError: the class map does not fit the task, or a sample has no single label.
        """
        if task.kind != "multiclass":
            raise _fault("kind", "label noise needs one label a sample.", "Use a multiclass reading of the labels.")
        if self.kind == "asymmetric":
            return asymmetric(task.classes, self.map or {})
        return symmetric(task.num_classes) if self.kind == "symmetric" else ordinal(task.num_classes, self.direction)

    def check_clients(self, names: Sequence[str]) -> None:
        """Refuses names that are no clients, and a federation without a noisy client.

        Args:
            names: all clients.

        Raises:
            ConfigError: see above.
        """
        for name in self.noisy_clients or ():
            if name not in names:
                raise _fault("noisy_clients", f"there is no client {name!r}.", nearest(name, names))
        if self.clean is not None and self.clean > len(names):
            raise _fault("clean", f"{self.clean} clean clients of {len(names)}.", f"Give at most {len(names) - 1}.")
        if self.clean == len(names):
            raise _fault("clean", "no client is left to be noisy.", "Lower it, or leave label_noise out.")

    def describe(self, task: Task | None = None) -> str:
        """The noise in a few words, e.g. ``symmetric, rate 0.4``."""
        low, high = self.rates
        rate = f"rate {low:g}" if low == high else f"rates {low:g} to {high:g}"
        how = f" {self.direction}" if self.direction != "both" else ""
        if self.kind == "ordinal" and task is not None:
            how += f" ({' < '.join(task.classes)})"
        return f"{self.kind}{how}, {rate}"


def _fault(key: str, what: str, fix: str) -> ConfigError:
    return ConfigError(what, where=f"{NOISE}.{key}", fix=fix)


class PublicSpec(BaseModel):
    """Images that everybody may see: set apart from the training samples before clients get theirs, without labels.

    Methods that need public unlabelled images use them; any other method of the same condition trains without them.

    Args:
        fraction: share of the training samples; patients stay whole.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    fraction: float = Field(default=0.1, gt=0, le=0.5)


class ConditionSpec(BaseModel):
    """Everything that a condition is generated from, besides the cohort.

    Args:
        seed: the seed of partition, corrupted clients, corruption and label noise.
        partition: how training samples are spread over clients.
        corruption: what is wrong with the images of corrupted clients; None where all images are as they are.
        label_noise: wrong labels at some clients; None where all labels are as they are.
        public: images without labels that everybody may see; None for none.
        test_fraction: share of the cohort held out where it brings no test split.
        unite_identical: patients who share an identical picture count as one patient, so that it cannot be on both
            sides of a split nor at two clients.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = 0
    partition: PartitionSpec = PartitionSpec()
    corruption: CorruptionSpec | None = None
    label_noise: LabelNoiseSpec | None = None
    public: PublicSpec | None = None
    test_fraction: float = Field(default=0.2, gt=0, lt=1)
    unite_identical: bool = True

    @model_validator(mode="after")
    def _clients_are_there(self) -> ConditionSpec:
        if self.label_noise is not None and (names := self.partition.client_names()):
            self.label_noise.check_clients(names)
        return self
