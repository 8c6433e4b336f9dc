"""Small cohorts in the public layouts, made on the spot, and bundles that a test may change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from medfed.data.demo import make_demo_cohort
from medfed.training.bundle import find_bundle

KINDS = {
    "oct_bscan_classification": ("oct", 5),
    "rsna_ich_ct_classification": ("ct", 6),
    "isic_dermoscopy_classification": ("derm", 12),
}


@pytest.fixture(scope="session")
def cohort_of(tmp_path_factory):
    """``cohort_of(bundle) -> folder`` with the built-in cohort in that bundle's layout."""
    made: dict[str, Path] = {}

    def cohort(bundle: str) -> Path:
        if bundle not in made:
            kind, patients = KINDS[bundle]
            made[bundle] = make_demo_cohort(tmp_path_factory.mktemp(kind), kind, patients=patients, seed=1)
        return made[bundle]

    return cohort


@pytest.fixture
def small(cohort_of, tmp_path):
    """``small(bundle, **more) -> overrides`` under which a workflow takes a second."""

    def overrides(bundle: str, **more):
        folder = find_bundle(bundle)
        return {
            "bundle_root": str(folder),
            "dataset_dir": str(cohort_of(bundle)),
            "model_dir": str(tmp_path / "models"),
            "output_dir": str(tmp_path / "eval"),
            "device": "$torch.device('cpu')",
            "image_size": [32, 32],
            "network_name": "squeezenet1_1",
            "batch_size": 8,
            "epochs": 1,
            **more,
        }

    return overrides


@pytest.fixture
def own(tmp_path):
    """``own(file=change)``: a copy of the OCT bundle, with changes of its files by the name of a file."""

    def copy(**changes) -> Path:
        folder = tmp_path / "own"
        if not folder.exists():
            shutil.copytree(
                find_bundle("oct_bscan_classification"), folder, ignore=shutil.ignore_patterns("models", "eval")
            )
        for name, change in changes.items():
            path = folder / "configs" / (f"{name}.json" if name == "metadata" else f"{name}.yaml")
            config = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
            change(config)
            text = json.dumps(config) if path.suffix == ".json" else yaml.safe_dump(config, sort_keys=False)
            path.write_text(text, encoding="utf-8")
        return folder

    return copy
