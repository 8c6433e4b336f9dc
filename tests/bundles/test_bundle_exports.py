"""TorchScript and ONNX exports of the bundles give the logits of the network."""

import numpy as np
import pytest
import torch
from monai.bundle import ckpt_export, onnx_export

from medfed.training.bundle import TrainingBundle, find_bundle

NAMES = ["oct_bscan_classification", "rsna_ich_ct_classification", "isic_dermoscopy_classification"]
DYNAMIC = {"image": {0: "batch"}, "pred": {0: "batch"}}


@pytest.fixture
def trained(tmp_path):
    """``trained(name, **overrides) -> network, arguments of MONAI's verbs, a batch``; weights as a checkpoint."""

    def make(name, **overrides):
        bundle, root = TrainingBundle.load(name, overrides), find_bundle(name)
        network = bundle.build_network(7).eval()
        file = tmp_path / "model.pt"
        with open(file, "wb") as handle:
            torch.save(network.state_dict(), handle)
        verbs = {
            "net_id": "network_def",
            "ckpt_file": str(file),
            "meta_file": str(root / "configs" / "metadata.json"),
            "config_file": str(root / "configs" / "train.yaml"),
            **overrides,
        }
        images = torch.rand(3, *bundle.image_shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            return network, verbs, images, network(images).numpy()

    return make


def check_torchscript(trained, tmp_path, name, **overrides):
    _, verbs, images, expected = trained(name, **overrides)
    ckpt_export(filepath=str(tmp_path / "model.ts"), **verbs)
    extra = {"train.json": "", "metadata.json": ""}
    exported = torch.jit.load(tmp_path / "model.ts", _extra_files=extra)
    with torch.no_grad():
        assert np.allclose(exported(images).numpy(), expected, atol=1e-5)
    assert b"network_data_format" in extra["metadata.json"]
    assert b"medfed.training.networks.build_network" in extra["train.json"]


def check_onnx(trained, tmp_path, name, **overrides):
    runtime = pytest.importorskip("onnxruntime")
    _, verbs, images, expected = trained(name, **overrides)
    how = {"dynamo": False, "input_names": ["image"], "output_names": ["pred"], "dynamic_axes": DYNAMIC}
    onnx_export(filepath=str(tmp_path / "model.onnx"), use_trace=True, converter_kwargs=how, **verbs)
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(["pred"], {"image": images.numpy()})
    assert np.allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("check", [check_torchscript, check_onnx])
def test_exports_of_squeezenet(trained, tmp_path, check):
    check(trained, tmp_path, NAMES[0])


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_torchscript, check_onnx])
@pytest.mark.parametrize("name", NAMES[1:])
def test_exports_of_resnet(trained, tmp_path, check, name):
    check(trained, tmp_path, name)
