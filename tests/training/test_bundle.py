"""Bundles: overrides, validation, parts, and that nothing runs before it is checked."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from medfed.errors import ConfigError
from medfed.training.augment import BatchAugment
from medfed.training.bundle import REQUIRED, TrainingBundle, find_bundle
from medfed.training.steps import PlainStep, SharpnessAwareStep

NAMES = ["oct_bscan_classification", "rsna_ich_ct_classification", "isic_dermoscopy_classification"]
SMALL = {"network_name": "squeezenet1_1", "image_size": [32, 32]}


@pytest.fixture
def own_bundle(tmp_path):
    """A copy of a bundle that a test may change: ``write(config) -> folder``."""

    def write(change=lambda config: None) -> Path:
        config = yaml.safe_load((find_bundle(NAMES[0]) / "configs" / "train.yaml").read_text())
        change(config)
        (tmp_path / "own" / "configs").mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / "configs" / "train.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        return tmp_path / "own"

    return write


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_each_bundle(name):
    bundle = TrainingBundle.load(name, SMALL)
    network = bundle.build_network(seed=3)
    images = torch.rand(2, *bundle.image_shape)
    with torch.no_grad():
        assert network(bundle.normalize(images)).shape == (2, len(bundle.classes))
    assert isinstance(bundle.augment, BatchAugment)
    assert isinstance(bundle.step, PlainStep)
    optimizer = bundle.make_optimizer(network.parameters())
    assert isinstance(optimizer, torch.optim.Adam)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["decoupled_weight_decay"]) == (3e-4, 5e-4, False)
    assert bundle.make_optimizer(network.parameters(), 0.1).param_groups[0]["lr"] == 0.1
    assert bundle.pipeline().shape == (3, 32, 32)


def test_published_settings():
    oct_, ct, derm = (TrainingBundle.load(n) for n in NAMES)
    assert (oct_.batch_size, oct_.image_shape) == (128, (3, 128, 128))
    assert (ct.batch_size, ct.image_shape) == (32, (3, 224, 224))
    assert ct.classes == ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")
    assert derm.classes == ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
    assert (derm.augment.degrees, derm.augment.translate, derm.augment.flip) == (10, 0.02, 0.5)
    assert (oct_.augment.degrees, oct_.augment.flip) == (0, 0.5)


def test_pipeline_makes_images_of_its_shape(tmp_path):
    from PIL import Image

    Image.new("L", (50, 40), 128).save(tmp_path / "a.png")
    bundle = TrainingBundle.load(NAMES[0], SMALL)
    pipeline = bundle.pipeline()
    image = pipeline.prepare(pipeline.load({"image": str(tmp_path / "a.png"), "frame": 0, "sample": "a"}))["image"]
    assert tuple(image.shape) == pipeline.shape
    assert image.float().mean().item() == pytest.approx(128 / 255, abs=1e-3)


def test_networks_are_seeded():
    bundle = TrainingBundle.load(NAMES[0], SMALL)
    one, two, other = (next(iter(bundle.build_network(s).parameters())) for s in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_overrides_reach_what_refers_to_them():
    bundle = TrainingBundle.load(
        NAMES[0],
        {
            "network_def::name": "squeezenet1_1",
            "classes": ["x", "y"],
            "in_channels": 1,
            "learning_rate": 0.5,
            "optimizer::betas": [0.8, 0.9],
            "step": {"_target_": "medfed.training.steps.SharpnessAwareStep", "rho": 0.2},
            "augment": None,
            "prepare::transforms::1::min_fraction": 0.5,
        },
    )
    assert bundle.build_network(0)(torch.rand(1, 1, 32, 32)).shape == (1, 2)
    group = bundle.make_optimizer([torch.zeros(1, requires_grad=True)]).param_groups[0]
    assert (group["lr"], list(group["betas"])) == (0.5, [0.8, 0.9])
    assert isinstance(bundle.step, SharpnessAwareStep)
    assert bundle.step.radius.rho == 0.2
    assert bundle.augment is None
    assert bundle.resolved()["classes"] == ["x", "y"]
    assert bundle.pipeline().prepare.transforms[1].min_fraction == 0.5


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"batch_sise": 4}, "Did you mean 'batch_size'"),
        ({"network_def::nam": "resnet18", "x": 1}, "no key 'x'"),
        ({"optimizer::weigth_decay": 0.1}, "'weigth_decay' is no argument of torch.optim.Adam. Did you mean 'weight_"),
        ({"augment::degree": 4}, "Did you mean 'degrees'"),
        ({"train::trainer::max_epoch": 4}, "Did you mean 'max_epochs'"),
        ({"batch_size": 0}, "whole number"),
        ({"batch_size": "4"}, "whole number"),
        ({"learning_rate": "3e-4"}, r"3\.0e-4"),
        ({"image_size": 128}, r"\[height, width\]"),
        ({"classes": []}, "different names"),
        ({"classes": ["a", "a"]}, "different names"),
        ({"task": "multi"}, "multiclass, multilabel"),
        ({"network_def": "resnet18"}, "_target_"),
        ({"prepare::transforms::9::size": 3}, "no key"),
    ],
)
def test_wrong_overrides_are_refused(override, said):
    with pytest.raises(ConfigError, match=said):
        TrainingBundle.load(NAMES[0], override)


def test_nothing_is_evaluated_before_the_overrides_are_checked(own_bundle, tmp_path):
    mark = tmp_path / "ran"
    folder = own_bundle(lambda c: c.update(imports=["$import pathlib"], seed=f"$pathlib.Path('{mark}').touch()"))
    with pytest.raises(ConfigError):
        TrainingBundle.load(folder, {"batch_sise": 1})
    TrainingBundle.load(folder, {"batch_size": 1})
    assert not mark.exists()


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(own_bundle, key):
    with pytest.raises(ConfigError, match=f"lacks {key}"):
        TrainingBundle.load(own_bundle(lambda c: c.pop(key)))


def test_a_faulty_component_is_named(own_bundle):
    bundle = TrainingBundle.load(NAMES[0], {"network_name": "resnet81"})
    with pytest.raises(ConfigError, match="Did you mean 'resnet18'"):
        bundle.build_network(0)
    broken = TrainingBundle.load(own_bundle(lambda c: c.update(augment={"_target_": "medfed.nothing.Here"})))
    with pytest.raises(ConfigError, match="'augment' cannot be set up"):
        _ = broken.augment


def test_unreadable_bundles(tmp_path):
    with pytest.raises(ConfigError, match=f"Did you mean '{NAMES[0]}'"):
        find_bundle("oct_bscan_clasification")
    (tmp_path / "configs").mkdir()
    for text, said in (("a: [", "not valid YAML in line"), ("- a", "not a mapping")):
        (tmp_path / "configs" / "train.yaml").write_text(text)
        with pytest.raises(ConfigError, match=said):
            TrainingBundle.load(tmp_path)


def test_keys_and_hashes_change_with_what_they_stand_for(own_bundle):
    base = TrainingBundle.load(NAMES[0])
    again = TrainingBundle.load(own_bundle())
    assert base.pipeline().key == again.pipeline().key
    assert base.content_hash() == again.content_hash()
    for override, same_images in (
        ({"image_size": [64, 64]}, False),
        ({"load::nifti": "image"}, False),
        ({"prepare::transforms::3::mode": "area"}, False),
        ({"learning_rate": 0.1}, True),
        ({"network_name": "resnet18"}, True),
    ):
        other = TrainingBundle.load(NAMES[0], override)
        assert (other.pipeline().key == base.pipeline().key) == same_images
        assert other.content_hash() != base.content_hash()
    moved = TrainingBundle.load(NAMES[0], {"dataset_dir": "elsewhere", "device": "cpu"})
    assert moved.content_hash() == base.content_hash()


@pytest.mark.parametrize("name", NAMES)
def test_model_zoo_layout(name):
    folder = find_bundle(name)
    metadata = json.loads((folder / "configs" / "metadata.json").read_text())
    assert metadata["version"] in metadata["changelog"]
    config = TrainingBundle.load(name)
    inputs = metadata["network_data_format"]["inputs"]["image"]
    outputs = metadata["network_data_format"]["outputs"]["pred"]
    assert (inputs["num_channels"], *inputs["spatial_shape"]) == config.image_shape
    assert list(outputs["channel_def"].values()) == list(config.classes)
    assert outputs["num_channels"] == len(config.classes)
    for file in ("LICENSE", "docs/README.md", "docs/data_license.txt"):
        assert (folder / file).is_file()
    for key in ("train::trainer", "train::dataset", "train::dataloader", "train::inferer", "train::handlers"):
        section, _, part = key.partition("::")
        assert part in config.config[section]
    assert {"bundle_root", "dataset_dir", "output_dir", "device", "network", "run"} <= config.config.keys()
