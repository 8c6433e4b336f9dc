"""Assembly: from a validated experiment file to what a federation needs, and nothing else.

Everything that can be wrong with the input is found here, before anything slow starts: first what needs no image
(method, bundle, network, weights file), then the cohort, then the images, then the condition.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import ValidationError

from medfed.checks import advice, cautions, check_clients, check_condition, check_method, check_parts
from medfed.config import CohortSection, Experiment, explain
from medfed.data.cohort import Cohort, Findings, Task
from medfed.data.condition import Condition, corrupted_clients, generate
from medfed.data.readers import get_reader
from medfed.data.splits import split_cohort, unite_patients
from medfed.errors import ConfigError, DataError
from medfed.federation.messages import State
from medfed.federation.method import Method, MethodSettings
from medfed.methods.registry import resolve_method
from medfed.seeding import derive_seed
from medfed.spreadsheet import inert

if TYPE_CHECKING:
    from medfed.data.arrays import ArrayDataset
    from medfed.data.corruption import Corruption
    from medfed.data.store import ImageStore
    from medfed.training.bundle import TrainingBundle
    from medfed.training.evaluation import Evaluator
    from medfed.training.local import LocalTrainer

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Shards:
    """What clients hold: rows of the image store and observed labels, by client (DESIGN law 2: no truth here).

    Args:
        images: the records of the store, ``[M, C, h, w]``.
        parts: rows ``[N]`` and observed labels by client.
        groups: numbers ``[N]`` by client, equal for samples of one patient there.
    """

    images: np.ndarray
    parts: dict[str, tuple[np.ndarray, torch.Tensor]]
    groups: dict[str, np.ndarray] = field(default_factory=dict)

    def __call__(self, client: str) -> ArrayDataset:
        """A client's images, as that client would have them, with the labels observed there."""
        from medfed.data.arrays import ArrayDataset

        return ArrayDataset(self.images, *self.parts[client], self.groups.get(client))


@dataclass
class Prepared:
    """All that a run needs, apart from where it runs.

    Args:
        experiment: the validated experiment.
        method: its method.
        settings: the method's settings.
        bundle: what one client trains, with all overrides applied.
        condition: who holds what.
        store: the prepared images.
        rows: row of the store of each training sample, in the quality in which its client has it.
        clean_rows: row of each test sample as it is.
        corrupted_rows: row of each test sample corrupted; empty without corruption.
        files: path and frame of each training sample; for a client's own eyes.
        patients: patient of each training sample, for a client's own eyes, and of each test sample, for evaluation.
        public_rows: row of each public sample; empty where there are none.
        findings: what was left out or corrected on the way.
        cohort_name: name of the data set.
        data_hash: sha256 over samples, contents and labels.
        warnings: what a person should know before the run.
    """

    experiment: Experiment
    method: Method
    settings: MethodSettings
    bundle: TrainingBundle
    condition: Condition
    store: ImageStore
    rows: dict[str, int]
    clean_rows: dict[str, int]
    corrupted_rows: dict[str, int]
    files: dict[str, tuple[str, int]]
    patients: dict[str, str]
    public_rows: list[int]
    findings: Findings
    cohort_name: str
    data_hash: str
    warnings: list[str]

    @property
    def task(self) -> Task:
        """Classes and kind of labels."""
        return self.condition.task

    def shards(self) -> Shards:
        """What each client holds, apart from any truth."""
        parts, groups = {}, {}
        for name in self.condition.clients:
            view = self.condition.view(name)
            parts[name] = (np.asarray([self.rows[s] for s in view.samples], np.int64), self._tensor(view.labels))
            numbers: dict[str, int] = {}
            patients = [self.patients[s] for s in view.samples]
            groups[name] = np.asarray([numbers.setdefault(p, len(numbers)) for p in patients], np.int64)
        return Shards(self.store.images, parts, groups)

    def public(self) -> ArrayDataset | None:
        """The public images, without labels (-1 each); None where there are none."""
        if not self.public_rows:
            return None
        return self._dataset(self.public_rows, np.full(len(self.public_rows), -1))

    def _dataset(self, rows: list[int], labels: np.ndarray) -> ArrayDataset:
        from medfed.data.arrays import ArrayDataset

        return ArrayDataset(self.store.images, np.asarray(rows, np.int64), self._tensor(labels))

    def _tensor(self, labels: np.ndarray) -> torch.Tensor:
        return torch.tensor(labels).to(torch.int64 if self.task.kind == "multiclass" else torch.float32)

    def evaluator(self) -> Evaluator:
        """Test sets with the truth, for evaluation alone."""
        from medfed.training.evaluation import Evaluator

        truth = self.condition.truth
        samples = list(truth.test_samples)
        sets = {"clean": self._dataset([self.clean_rows[s] for s in samples], truth.test_labels)}
        if self.corrupted_rows:
            sets["corrupted"] = self._dataset([self.corrupted_rows[s] for s in samples], truth.test_labels)
        shares = {}
        for client in self.condition.clients:
            quality = "corrupted" if client in truth.corrupted and "corrupted" in sets else "clean"
            held = np.flatnonzero(truth.test_clients == client)
            if len(held):
                shares[client] = (quality, held)
        numbers: dict[str, int] = {}
        patients = [numbers.setdefault(self.patients[s], len(numbers)) for s in samples]
        known = {"samples": dict.fromkeys(sets, samples), "patients": dict.fromkeys(sets, patients)}
        return Evaluator(self.task, sets, shares, **known)

    def initial_model(self) -> State:
        """The initial global model: part of the condition, the same for every method."""
        network = self.bundle.build_network(seed=derive_seed(self.condition.spec.seed, "initial model"))
        return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}

    @cached_property
    def initial_model_hash(self) -> str:
        """sha256 over names, types, shapes and values of the initial model."""
        from medfed.training.weights import state_hash

        return state_hash(self.initial_model())

    def trainer(self, device: str, threads: int | None = None) -> LocalTrainer:
        """A trainer with its resident network, for this process."""
        from medfed.training.local import LocalTrainer

        engine = self.experiment.engine
        return LocalTrainer(
            self.bundle,
            device=device,
            amp=engine.amp,
            channels_last=engine.channels_last,
            compile=engine.compile,
            threads=threads,
        )


def prepare(experiment: Experiment, *, say: Say = lambda _: None, progress: Progress | None = None) -> Prepared:
    """Reads, decodes and partitions what an experiment names.

    Args:
        experiment: the validated experiment.
        say: told in one line what is going on.
        progress: told (what, done, total) while headers and files are read and images are decoded.

    Raises:
        MedfedError: anything that is wrong with the input.
    """
    from medfed.data.store import ImageStore
    from medfed.training.local import resolve_device

    if experiment.cohort is None or experiment.sites is not None:
        raise ConfigError(
            "the images are at the sites, not here.",
            where="sites",
            fix="Write a job for them with `medfed nvflare export`; see docs/deployment.md.",
        )
    method, settings = resolve_method(experiment.method)
    notes = advice(experiment, settings)
    check_method(experiment, method, kind_of(experiment.cohort))
    resolve_device(experiment.engine.device)
    say(f"Reading {experiment.cohort.root}")
    cohort = read_section(experiment.cohort, progress)
    bundle = check_on(experiment, cohort)
    pipeline = bundle.pipeline()
    store = ImageStore.open(experiment.cache_dir, pipeline)
    built = store.ensure(cohort, progress=named(progress, "Decoding"), reading=named(progress, "Reading"))
    cohort = usable(cohort, built.failures, built.corrections)
    cohort.findings.notes.extend(built.notes)
    if experiment.condition.unite_identical:
        cohort = united(cohort, built.rows, store.images)
    cohort = split_cohort(cohort, test_fraction=experiment.condition.test_fraction, seed=experiment.condition.seed)
    train, test = cohort.where(lambda t: t["split"] == "train"), cohort.where(lambda t: t["split"] == "test")
    say(f"{len(cohort)} images usable, {len(cohort.findings.unusable)} not")
    check_parts(train, test)
    digests = dict(built.digests)
    condition = generate(train, test, experiment.condition, digests={s: digests[s] for s in cohort.table["sample"]})
    check_condition(experiment, condition)
    if line := condition.label_noise_line():
        say(line)
    if condition.public:
        say(f"{len(condition.public)} images are public, without labels, and at no client")
    corruption = corruption_of(experiment)
    rows, corrupted_rows = dict(built.rows), {}
    if corruption is not None:
        truth = condition.truth
        held = [s for s, c in zip(truth.samples, truth.clients) if c in truth.corrupted]
        wanted = sorted({*held, *truth.test_samples})
        worse = store.ensure(cohort, corruption=corruption, samples=wanted, progress=named(progress, "Corrupting"))
        if worse.failures:
            first = worse.failures[0]
            raise DataError(
                f"{len(worse.failures)} images cannot be corrupted, first {first.sample}: {first.reason}.",
                where="condition.corruption",
                fix="Leave them out, or set condition.corruption.domain to image.",
            )
        corrupted_rows = {s: worse.rows[s] for s in truth.test_samples}
        rows |= {s: worse.rows[s] for s in held}
    return Prepared(
        experiment=experiment,
        method=method,
        settings=settings,
        bundle=bundle,
        condition=condition,
        store=store,
        rows={s: rows[s] for s in condition.truth.samples},
        clean_rows={s: built.rows[s] for s in condition.truth.test_samples},
        corrupted_rows=corrupted_rows,
        files=dict(zip(train.table["sample"], zip(train.table["path"], train.table["frame"].tolist()))),
        patients=dict(zip(cohort.table["sample"], cohort.table["patient"])),
        public_rows=[built.rows[s] for s in condition.public],
        findings=cohort.findings,
        cohort_name=cohort.name,
        data_hash=data_hash(cohort, digests),
        warnings=[*notes, *cautions(cohort, built.rows), *condition.warnings],
    )


def check_on(experiment: Experiment, cohort: Cohort, *, build: bool = True) -> TrainingBundle:
    """Refuses what does not fit a cohort, before any of its images is decoded.

    Args:
        experiment: the validated experiment.
        cohort: what its ``cohort`` section names.
        build: whether the network is built once, which takes its time and refuses bad arguments and weights.

    Returns:
        The bundle with the cohort's classes.

    Raises:
        ConfigError: a class map, a bundle, an override, weights or a number of clients that cannot work.
    """
    if experiment.condition.label_noise is not None:
        experiment.condition.label_noise.targets(cohort.task)
    if names := experiment.condition.partition.client_names():
        check_clients(experiment, len(names))
        corrupted_clients(names, experiment.condition)
    bundle = load_bundle(experiment, cohort.task)
    if build:
        bundle.build_network(seed=0)
    return bundle


def named(progress: Progress | None, what: str) -> Callable[[int, int], None] | None:
    """The progress of one thing."""
    return None if progress is None else lambda done, total: progress(what, done, total)


def read_section(section: CohortSection | None, progress: Progress | None = None) -> Cohort:
    """Reads the cohort that the ``cohort`` section of an experiment names.

    Args:
        section: reader, root and the reader's options.
        progress: told (what, done, total) while headers are read.

    Raises:
        ConfigError: no section, an unknown reader, or an option that it does not have.
        DataError: nothing usable is there.
    """
    if section is None:
        raise ConfigError("names no images here: they are at the sites.", where="cohort", fix="Name some.")
    reader, options = reader_of(section)
    if not section.root.exists():
        raise DataError(
            "there is no such folder or file.",
            where=str(section.root),
            fix="Set cohort.root, e.g. with --set cohort.root=/path/to/data.",
        )
    cohort = reader.read(section.root, options, named(progress, "Headers"))
    if not len(cohort):
        raise DataError("no usable sample was found.", where=str(section.root), fix="Try `medfed inspect` on it.")
    return cohort


def reader_of(section: CohortSection) -> tuple[Any, Any]:
    """The reader of a ``cohort`` section, and its validated options.

    Raises:
        ConfigError: an unknown reader, or an option that it does not have.
    """
    reader = get_reader(section.reader)
    try:
        return reader, reader.Options.model_validate(section.options)
    except ValidationError as error:
        raise ConfigError("\n  ".join(explain(error, reader.Options)), where=f"cohort ({section.reader})") from None


def kind_of(section: CohortSection) -> str:
    """Kind of the labels of a cohort that is not read yet: its reader's options say it.

    Raises:
        ConfigError: an unknown reader, or an option that it does not have.
    """
    return getattr(reader_of(section)[1], "kind", "multiclass")


def load_bundle(experiment: Experiment, task: Task) -> TrainingBundle:
    """The bundle of an experiment, with its overrides and the cohort's classes."""
    from medfed.training.bundle import TrainingBundle

    overrides = {**experiment.overrides, "classes": list(task.classes), "task": task.kind}
    return TrainingBundle.load(experiment.bundle, overrides)


def usable(cohort: Cohort, failures: list[Any], corrections: dict[str, int]) -> Cohort:
    """The cohort without the images that could not be prepared; each is among the findings."""
    lost = {f.sample for f in failures}
    findings = Findings(
        [*cohort.findings.unusable, *failures],
        {**cohort.findings.corrections, **corrections},
        list(cohort.findings.notes),
    )
    kept = replace(cohort, findings=findings).where(lambda t: ~t["sample"].isin(lost))
    if not len(kept):
        raise DataError(
            f"none of {len(cohort)} images can be used; the first: {failures[0].reason}.",
            where=cohort.name,
            fix="See `medfed inspect`.",
        )
    return kept


def united(cohort: Cohort, rows: dict[str, int], images: np.ndarray) -> Cohort:
    """The cohort where patients with an identical picture count as one; how many is among the findings.

    Args:
        cohort: usable samples.
        rows: row of the store of each; identical pictures have one row.
        images: the records of the store, to leave out pictures that show nothing.
    """
    row = np.array([rows[s] for s in cohort.table["sample"]])
    patients = cohort.table["patient"].groupby(row).nunique()
    shared = {int(r) for r in patients.index[patients > 1] if images[r].min() < images[r].max()}
    cohort, several, one = unite_patients(cohort, [int(r) if r in shared else None for r in row])
    if several:
        cohort.findings.notes.append(
            f"{len(shared)} pictures are filed under more than one patient id: "
            f"these {several} patients count as {one} (condition.unite_identical)"
        )
    return cohort


def corruption_of(experiment: Experiment) -> Corruption | None:
    """The corruption of a condition as a function, or None."""
    spec = experiment.condition.corruption
    return None if spec is None else spec.build(experiment.condition.seed)


def data_hash(cohort: Cohort, digests: dict[str, str]) -> str:
    """sha256 over (sample, content, label) in order of sample ids."""
    total = hashlib.sha256(json.dumps([cohort.task.kind, *cohort.task.classes]).encode())
    for sample, label in sorted(zip(cohort.table["sample"], cohort.labels.tolist())):
        total.update(f"{sample}\x1f{digests[sample]}\x1f{label}\x1e".encode())
    return total.hexdigest()


def write_findings(findings: Findings, folder: Path) -> None:
    """Writes ``unusable.csv``, ``corrections.json`` and ``notes.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "unusable.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "reason", "sample"])
        writer.writerows(map(inert, (u.path, u.reason, u.sample)) for u in findings.unusable)
    (folder / "corrections.json").write_text(json.dumps(findings.corrections, indent=1, sort_keys=True))
    (folder / "notes.txt").write_text("".join(f"{n}\n" for n in findings.notes), encoding="utf-8")
