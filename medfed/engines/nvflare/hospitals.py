"""The server's side of a federation whose images stay at real sites: no cohort, no condition, no truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from medfed.conducting import write_beginning
from medfed.config import Experiment
from medfed.data.cohort import Task
from medfed.engines.nvflare.held_out import measure
from medfed.errors import ConfigError, DataError
from medfed.experiment import Say, load_bundle, read_section, usable
from medfed.federation.messages import State
from medfed.federation.method import Method, MethodSettings
from medfed.federation.server import Server
from medfed.judging import joined
from medfed.methods.registry import resolve_method
from medfed.rundir import RunFolder
from medfed.seeding import derive_seed
from medfed.training.local import resolve_device

if TYPE_CHECKING:
    from medfed.data.arrays import ArrayDataset
    from medfed.training.bundle import TrainingBundle

NOT_EVALUATED = "the model is not evaluated: the server has no test images (section 'cohort'), and sites.held_out is 0"
POOL = "held_out"
"""The sites' held-out shares among the test sets of the record, where the server has test images of its own; without
them they are the record's ``clean`` set, which reports and comparisons show."""


@dataclass
class Hospitals:
    """What the server knows of a federation of real sites.

    Args:
        experiment: the experiment, with its section ``sites``.
        method: its method.
        settings: the method's settings.
        bundle: what each site trains.
    """

    experiment: Experiment
    method: Method
    settings: MethodSettings
    bundle: TrainingBundle

    @property
    def task(self) -> Task:
        """Classes and kind of labels, as agreed."""
        assert self.experiment.sites is not None
        return Task(self.experiment.sites.task, tuple(self.experiment.sites.classes))

    @property
    def names(self) -> tuple[str, ...]:
        """The sites, sorted; each is a client of that name."""
        assert self.experiment.sites is not None
        return tuple(sorted(self.experiment.sites.names))

    def initial_model(self) -> State:
        """The initial global model, from the experiment's seed."""
        network = self.bundle.build_network(seed=derive_seed(self.experiment.condition.seed, "initial model"))
        return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}

    def begin(self, folder: RunFolder, uid: str) -> None:
        """Writes ``run.json`` as it is before the first round."""
        write_beginning(
            folder,
            self,
            uid=uid,
            clients=self.names,
            cohort="sites",
            plan=(str(resolve_device(self.experiment.engine.device)), 1, 1),
            warnings=[] if self.experiment.cohort or self.held_out else [NOT_EVALUATED],
        )

    @property
    def held_out(self) -> float:
        """Share of its samples that each site keeps apart to measure the model on."""
        assert self.experiment.sites is not None
        return self.experiment.sites.held_out

    def evaluation(self, threads: int, say: Say) -> Callable[[Server], dict[str, Any]]:
        """What is measured after a round: the model on the server's own test images and on the sites' held-out shares.

        Where there is neither, every record says so.
        """
        if self.experiment.cohort is None and not self.held_out:
            return lambda server: {"warnings": [NOT_EVALUATED]}
        plan, here = self.experiment.evaluation, self._own_images(threads, say)

        def evaluate(server: Server) -> dict[str, Any]:
            if server.round % plan.every and server.round <= server.num_rounds - plan.last:
                return {}
            there = measure(server, POOL if self.experiment.cohort else "clean") if self.held_out else {}
            return joined(here(server), there)

        return evaluate

    def _own_images(self, threads: int, say: Say) -> Callable[[Server], dict[str, Any]]:
        from medfed.training.evaluation import Evaluator
        from medfed.training.local import LocalTrainer

        if self.experiment.cohort is None:
            return lambda server: {}
        data = images_for_tests(self.experiment, self.task, self.bundle, say)
        evaluator = Evaluator(self.task, {"clean": data}, {})
        trainer = LocalTrainer(self.bundle, device=self.experiment.engine.device, threads=threads)
        size = self.experiment.evaluation.batch_size

        def evaluate(server: Server) -> dict[str, Any]:
            trainer.load(server.model)
            return evaluator.evaluate(lambda images: trainer.predict(images, size)).record()

        return evaluate


def agree(experiment: Experiment) -> Hospitals:
    """Checks everything of a federation of real sites that can be checked without images.

    Raises:
        MedfedError: anything that is wrong with the experiment.
    """
    if experiment.sites is None:
        raise ConfigError("there is no section 'sites'.", where="the experiment")
    task = Task(experiment.sites.task, tuple(experiment.sites.classes))
    method, settings = resolve_method(experiment.method)
    settings.check(experiment.rounds)
    if task.kind not in method.task_kinds:
        raise ConfigError(f"{method.name} does not admit {task.kind} labels.", where="method")
    if method.public or method.personal:
        raise ConfigError(f"{method.name} runs on the local engine alone.", where="method")
    if experiment.participation.quorum > len(experiment.sites.names):
        raise ConfigError("the quorum is larger than the number of sites.", where="participation.quorum")
    bundle = load_bundle(experiment, task)
    bundle.build_network(seed=0)
    return Hospitals(experiment, method, settings, bundle)


def images_for_tests(experiment: Experiment, task: Task, bundle: TrainingBundle, say: Say) -> ArrayDataset:
    """The server's own test images: those that the reader marks as a test set, or all where it marks none.

    Raises:
        MedfedError: nothing usable, or a class that was not agreed on.
    """
    import torch

    from medfed.data.arrays import ArrayDataset
    from medfed.data.store import ImageStore
    from medfed.engines.nvflare.site_settings import in_classes

    cohort = read_section(experiment.cohort)
    if (cohort.table["split"] == "test").any():
        cohort = cohort.where(lambda table: table["split"] == "test")
    store = ImageStore.open(experiment.cache_dir, bundle.pipeline())
    built = store.ensure(cohort)
    cohort = in_classes(usable(cohort, built.failures, built.corrections), task)
    if not len(cohort):
        raise DataError("there is no test image.", where="cohort")
    say(f"{len(cohort)} test images at the server")
    labels = torch.tensor(cohort.labels).to(torch.int64 if task.kind == "multiclass" else torch.float32)
    return ArrayDataset(store.images, built.rows_of(cohort.table["sample"]), labels)
