"""Three bundles, each complete by itself, and alike where they need not differ; MONAI's own checks pass offline."""

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
from monai.bundle import verify_metadata, verify_net_in_out

from medfed.bundle_check import SCHEMA, metadata_schema
from medfed.inference import Accepts
from medfed.prediction_files import RULES
from medfed.training.bundle import find_bundle

NAMES = ["oct_bscan_classification", "rsna_ich_ct_classification", "isic_dermoscopy_classification"]
ALIKE = [
    "LICENSE",
    *(f"configs/{n}.yaml" for n in ("evaluate", "inference", "federated", "sharpness_aware", "noise_robust")),
    "configs/logging.conf",
]
OWN = ["configs/train.yaml", "configs/metadata.json", "docs/README.md", "docs/data_license.txt"]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", ALIKE)
def test_what_need_not_differ_is_the_same(file):
    assert len({(find_bundle(name) / file).read_bytes() for name in NAMES}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_files_of_a_bundle(name):
    root = find_bundle(name)
    present = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}
    assert {p for p in present if not p.startswith(("models/", "eval/"))} == {*ALIKE, *OWN}


@pytest.mark.parametrize("name", NAMES)
def test_verify_metadata_without_a_network(name, tmp_path, monkeypatch):
    """MONAI takes a file that is there already for the schema, and then asks nobody."""
    schema = tmp_path / SCHEMA
    shutil.copy(ROOT / "medfed" / "schemas" / SCHEMA, schema)
    monkeypatch.setattr("urllib.request.urlopen", lambda *a, **k: pytest.fail("asked the network"))
    verify_metadata(meta_file=str(find_bundle(name) / "configs" / "metadata.json"), filepath=str(schema))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("authors"),
        lambda m: m.update(version="one"),
        lambda m: m["network_data_format"]["inputs"]["image"].pop("dtype"),
        lambda m: m["network_data_format"]["outputs"]["pred"].update(num_channels="4"),
        lambda m: m["network_data_format"]["outputs"].pop("pred"),
        lambda m: m["medfed"].update(study="median"),
        lambda m: m["medfed"]["accepts"].update(modality="CT"),
    ],
)
def test_schema_refuses_faulty_metadata(change):
    metadata = json.loads((find_bundle(NAMES[0]) / "configs" / "metadata.json").read_text())
    jsonschema.validate(metadata, metadata_schema())
    change(metadata)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(metadata, metadata_schema())


def test_schema_is_a_schema_and_takes_the_example_of_the_specification():
    jsonschema.Draft7Validator.check_schema(metadata_schema())
    image = {"type": "image", "format": "magnitude", "modality": "MR", "num_channels": 1}
    image |= {"spatial_shape": [160, 160, "2**n"], "dtype": "float32", "value_range": [0, 1], "is_patch_data": False}
    pred = {**image, "format": "labels", "num_channels": 2, "value_range": []}
    example = {
        "version": "0.1.0",
        "changelog": {"0.1.0": "complete the model package"},
        **{"monai_version": "0.8.0", "pytorch_version": "1.10.0", "numpy_version": "1.21.2"},
        "optional_packages_version": {"nibabel": "3.2.1"},
        **{"task": "t", "description": "d", "authors": "MONAI team", "copyright": "c", "eval_metrics": {"dice": 0.96}},
        "network_data_format": {
            "inputs": {"image": {**image, "channel_def": {"0": "image"}}},
            "outputs": {"pred": {**pred, "channel_def": {"0": "background", "1": "spleen"}}},
        },
    }
    jsonschema.validate(example, metadata_schema())


@pytest.mark.parametrize("name", NAMES)
def test_verify_net_in_out(name):
    configs = find_bundle(name) / "configs"
    given = {"meta_file": str(configs / "metadata.json"), "config_file": str(configs / "train.yaml"), "device": "cpu"}
    small = {"network_name": "squeezenet1_1"}
    verify_net_in_out(net_id="network_def", **given, **small)
    with pytest.raises(ValueError, match="output channel number"):
        verify_net_in_out(net_id="network_def", **given, **small, classes=["a", "b"])


@pytest.mark.parametrize("name", NAMES)
def test_medfed_keys_of_the_metadata(name):
    own = json.loads((find_bundle(name) / "configs" / "metadata.json").read_text())["medfed"]
    assert Accepts(**own["accepts"]).kind in ("hounsfield", "image")
    assert own["study"] in RULES
