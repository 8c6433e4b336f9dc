"""``medfed demo``: FedAvg against FedISM on a built-in cohort, made on the spot as real files in a public layout."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfed.config import validate
from medfed.errors import ConfigError, nearest

if TYPE_CHECKING:
    from medfed.console import Screen


@dataclass(frozen=True)
class Demo:
    """One built-in cohort and how it is trained on.

    Args:
        reader: the reader of its layout.
        bundle: what a client trains.
        patients: how many are made.
        corruption: what is wrong at the corrupted clients: enough to matter, and not so much that nothing is left.
    """

    reader: str
    bundle: str
    patients: int
    corruption: dict[str, Any]


NOISE = {"kind": "gaussian_noise", "severity": 2}
DEMOS = {
    "derm": Demo("isic", "isic_dermoscopy_classification", 260, NOISE),
    "ct": Demo("rsna_ich", "rsna_ich_ct_classification", 90, {**NOISE, "severity": 3, "domain": "hounsfield"}),
    "oct": Demo("kermany", "oct_bscan_classification", 110, {**NOISE, "severity": 1}),
}
# Enough for both methods to learn from scratch; about four minutes of processor time in all with `derm`.
ROUNDS = 40
METHODS = ("fedavg", "fedism")


def demo_experiment(kind: str, folder: Path, rounds: int | None = None) -> dict[str, Any]:
    """The demo's experiment file as a mapping.

    Args:
        kind: ``derm``, ``ct`` or ``oct``.
        folder: where images and runs go.
        rounds: communication rounds; :data:`ROUNDS` by default.

    Raises:
        ConfigError: there is no such demo.
    """
    if kind not in DEMOS:
        raise ConfigError(f"there is no demo '{kind}'.", where="--kind", fix=nearest(kind, DEMOS))
    demo = DEMOS[kind]
    return {
        "name": f"demo-{kind}",
        "cohort": {"reader": demo.reader, "root": str(folder / f"images-{kind}")},
        "condition": {
            "partition": {"kind": "quality", "clients": 6, "corrupted": 2, "alpha": 2.0},
            "corruption": dict(demo.corruption),
        },
        "bundle": demo.bundle,
        "overrides": {
            "image_size": [64, 64],
            "batch_size": 8,
            "learning_rate": 0.001,
            # A small ResNet that learns from a few hundred images in a minute, with group normalisation.
            "network_name": "ResNet",
            "network_def::block": "basic",
            "network_def::layers": [1, 1, 1, 1],
            "network_def::block_inplanes": [16, 32, 64, 128],
            "network_def::norm": ["group", {"num_groups": 8}],
            "network_def::conv1_t_size": 3,
            "network_def::conv1_t_stride": 2,
        },
        "method": "fedavg",
        "rounds": rounds or ROUNDS,
        "output": str(folder / "runs"),
        "cache": str(folder / "cache"),
    }


def make_images(folder: Path, kind: str) -> None:
    """Makes the cohort as a whole or not at all: it takes its name when all images are there.

    Args:
        folder: where to; absent or empty.
        kind: ``derm``, ``ct`` or ``oct``.
    """
    from medfed.data.demo import make_demo_cohort

    draft = folder.with_name(f"{folder.name}.writing")
    if draft.exists():  # of a demo that was stopped
        shutil.rmtree(draft)
    make_demo_cohort(draft, kind, patients=DEMOS[kind].patients, seed=0)  # type: ignore[arg-type]
    if folder.exists():
        folder.rmdir()
    draft.rename(folder)


def demonstrate(kind: str, folder: Path, rounds: int | None, screen: Screen) -> list[Path]:
    """Makes the cohort unless it is there, runs both methods and shows what came out.

    Args:
        kind: ``derm``, ``ct`` or ``oct``.
        folder: where images, runs and results go.
        rounds: communication rounds.
        screen: shows what is going on.

    Returns:
        The runs' folders.
    """
    import yaml

    from medfed.report.html import experiment_page
    from medfed.report.plots import comparison_plot
    from medfed.report.runs import load_run
    from medfed.running import start

    folder = folder.absolute()
    data = demo_experiment(kind, folder, rounds)
    images = Path(data["cohort"]["root"])
    if not (images.is_dir() and any(images.iterdir())):
        screen.say(f"Making images in {images}")
        make_images(images, kind)
    file = folder / f"{kind}.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    runs = []
    for method in METHODS:
        experiment = validate({**data, "method": method}, str(file))
        with screen:
            runs.append(start(experiment, say=screen.say, progress=screen.progress, listeners=[screen.round]))
    screen.finish(runs)
    loaded = [load_run(path) for path in runs]
    screen.say(f"Comparison: {experiment_page(loaded, folder / 'comparison.html')}")
    screen.say(f"Plot: {comparison_plot(loaded, folder / 'comparison.png')}")
    screen.say("The images are made up: these numbers show that all works, not how good a method is.")
    screen.say(f"Again, with your own changes: medfed run {file} --method fedism --set method.q=1.0")
    return runs
