"""Every experiment file in configs/ is valid: keys, reader options, method settings, bundle and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from medfed.config import Experiment, load_experiment
from medfed.data.cohort import Task
from medfed.data.readers import get_reader
from medfed.data.readers.isic import HAM_CLASSES, ISIC_CLASSES
from medfed.data.readers.kermany import CLASSES as OCT_CLASSES
from medfed.data.readers.rsna_ich import OUTPUTS, SUBTYPES
from medfed.experiment import corruption_of, load_bundle
from medfed.methods.registry import resolve_method

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))


def task_of(experiment: Experiment) -> Task:
    """The task that the reader will find in the data."""
    options = get_reader(experiment.cohort.reader).Options.model_validate(experiment.cohort.options)
    known = {
        "rsna_ich": SUBTYPES if getattr(options, "task", "") == "subtype" else OUTPUTS,
        "isic": HAM_CLASSES if "HAM" in experiment.cohort.root.name else ISIC_CLASSES,
        "kermany": OCT_CLASSES,
    }
    classes = known.get(experiment.cohort.reader) or options.classes
    return Task("multilabel" if classes is OUTPUTS else "multiclass", tuple(classes))


def test_there_is_a_file_for_each_layout():
    readers = {load_experiment(f, []).cohort.reader for f in FILES}
    assert readers == {"folder", "isic", "kermany", "rsna_ich", "table"}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_file_is_valid(file):
    experiment = load_experiment(file, [])
    task = task_of(experiment)
    method, _ = resolve_method(experiment.method)
    assert task.kind in method.task_kinds
    bundle = load_bundle(experiment, task)
    assert bundle.classes == task.classes
    assert bundle.augment is None or callable(bundle.augment)
    assert (corruption_of(experiment) is None) == (experiment.condition.partition.corrupted == 0)


def test_the_paper_settings_are_the_papers():
    for name in ("rsna_ich_fedism", "isic2019_fedism"):
        experiment = load_experiment(CONFIGS / f"{name}.yaml", [])
        _, settings = resolve_method(experiment.method)
        bundle = load_bundle(experiment, task_of(experiment))
        partition = experiment.condition.partition
        # FedISM (IJCAI 2024), section 4; rho from the released code, as the paper does not give it.
        assert (partition.clients, partition.corrupted, partition.alpha) == (20, 4, 1.0)
        assert (settings.q, settings.beta, settings.salt.rho, settings.local_epochs) == (2.0, 0.5, 0.05, 1)
        assert (bundle.batch_size, bundle.learning_rate, bundle.config["weight_decay"]) == (32, 3e-4, 5e-4)
        assert (experiment.rounds, bundle.image_shape) == (300, (3, 224, 224))
        assert (bundle.config["network_name"], bundle.config["weights"]) == ("resnet18", "imagenet")
        assert (experiment.condition.corruption.kind, experiment.condition.corruption.severity) == ("gaussian_noise", 3)


def test_comments_end_within_the_page():
    for file in FILES:
        assert all(len(line) <= 120 for line in file.read_text().splitlines()), file.name
