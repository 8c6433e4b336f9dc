"""Start-up of a second run on the same images: nothing is decoded again.

2,400 PNG images in class folders.  The first run fills the image store; the second is a new process, timed from the
moment its libraries are imported until the first training step begins.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import arguments, machine, table
from PIL import Image

CLASSES = ("a", "b", "c", "d")


def write_images(root: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    for k in range(count):
        folder = root / CLASSES[k % len(CLASSES)]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (192, 192, 3), np.uint8)).save(folder / f"{k:05d}.png", compress_level=1)


def in_process(folder: Path, seed: int) -> None:
    import medfed.running
    import medfed.tracking.mlflow_sink
    import medfed.training.engine
    from medfed.config import validate
    from medfed.training import steps

    experiment = {
        "name": "second",
        "cohort": {"reader": "folder", "root": str(folder / "images")},
        "condition": {"partition": {"kind": "dirichlet", "clients": 10, "min_samples": 8}},
        "bundle": "isic_dermoscopy_classification",
        "overrides": {"image_size": [96, 96], "network_name": "squeezenet1_1"},
        "method": "fedavg",
        "seed": seed,
        "rounds": 1,
        "engine": {"workers": 1},
        "tracking": {"enabled": False},
        "output": str(folder / "runs"),
        "cache": str(folder / "cache"),
    }
    first: list[float] = []
    train = steps.PlainStep.__call__

    def noted(self: steps.PlainStep, *args: object) -> object:
        if not first:
            first.append(time.perf_counter())
            raise KeyboardInterrupt  # what follows is not start-up
        return train(self, *args)

    steps.PlainStep.__call__ = noted  # type: ignore[method-assign]
    started = time.perf_counter()
    with contextlib.suppress(KeyboardInterrupt):
        medfed.running.start(validate(experiment, "benchmark"))
    print(json.dumps(first[0] - started))


def main() -> None:
    if sys.argv[1:2] == ["--in"]:
        in_process(Path(sys.argv[2]), int(sys.argv[3]))
        return
    options = arguments(__doc__, images=2400)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder / "images", options.images)
        times = []
        for seed in (0, 0, 0, 1):
            command = [sys.executable, __file__, "--in", name, str(seed)]
            times.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    rows = [["first", times[0]], ["second", times[1]], ["third", times[2]], ["another seed", times[3]]]
    table([f"run on {options.images} images", "seconds to the first training step"], rows)
    print(machine())


if __name__ == "__main__":
    main()
