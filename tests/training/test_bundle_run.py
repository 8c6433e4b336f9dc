"""A bundle runs alone: ``python -m monai.bundle run``."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from medfed.errors import DataError
from medfed.training.bundle import TrainingBundle, find_bundle
from medfed.training.standalone import training_items


@pytest.fixture(scope="module")
def oct_folder(tmp_path_factory):
    """24 tiny images in Kermany's tree."""
    root = tmp_path_factory.mktemp("oct")
    g = np.random.default_rng(0)
    for label, name in enumerate(("CNV", "DME", "DRUSEN", "NORMAL")):
        folder = root / "train" / name
        folder.mkdir(parents=True)
        for k in range(6):
            pixels = g.normal(60 * label + 20, 10, (24, 32)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{name}-{100 * label + k}-1.jpeg")
    return root


def test_training_items(oct_folder):
    items = training_items("kermany", oct_folder, ["CNV", "DME", "DRUSEN", "NORMAL"])
    assert len(items) == 24
    assert sorted({int(i["label"]) for i in items}) == [0, 1, 2, 3]
    with pytest.raises(DataError, match="Override 'classes'"):
        training_items("kermany", oct_folder, ["CNV", "DME"])


def test_bundle_runs_alone_with_the_sharpness_aware_step(oct_folder, tmp_path):
    folder = find_bundle("oct_bscan_classification")
    command = [
        *(sys.executable, "-m", "monai.bundle", "run"),
        *("--config_file", str(folder / "configs" / "train.yaml")),
        *("--bundle_root", str(folder), "--dataset_dir", str(oct_folder), "--model_dir", str(tmp_path)),
        *("--image_size", "[32,32]", "--batch_size", "8", "--epochs", "1", "--device", "$torch.device('cpu')"),
        *("--step", '{"_target_": "medfed.training.steps.SharpnessAwareStep", "rho": 0.01}'),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Epoch: 1/1, Iter: 2/2 -- train_loss:" in done.stdout + done.stderr
    trained = torch.load(tmp_path / "model.pt", weights_only=True)
    trained = trained.get("model", trained)
    start = TrainingBundle.load(folder).build_network(0).state_dict()
    assert trained.keys() == start.keys()
    assert any(not torch.equal(trained[k], start[k]) for k in start)
