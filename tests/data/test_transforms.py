"""The MONAI transforms: values by hand, by Pillow, and in real MONAI pipelines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser
from monai.data import DataLoader, Dataset, MetaTensor, decollate_batch
from monai.transforms import Compose, DeleteItemsd
from PIL import Image

from medfed.data import corruption
from medfed.data.borders import mask_white_border
from medfed.data.pixels import resize, resolve_windows, to_channels
from medfed.data.transforms import (
    Corruptd,
    CTWindowd,
    DecodeImaged,
    NormalizeBatch,
    NormalizeUnitd,
    ResizeImaged,
    ToChannelsd,
    ToUnitRanged,
    WhiteBorderd,
)
from medfed.errors import ConfigError, DataError
from medfed.seeding import numpy_generator


def png(path, array: np.ndarray):
    Image.fromarray(array).save(path)
    return str(path)


def image(pixels, kind="image", value_range=(0.0, 255.0)) -> dict:
    pixels = torch.as_tensor(pixels, dtype=torch.float32)
    return {"image": pixels, "image_kind": kind, "image_range": value_range, "image_corrections": ()}


def test_decode_keeps_what_it_found(tmp_path):
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
    path = png(tmp_path / "a.png", grey)
    d = DecodeImaged("image")({"image": path, "label": 1})
    assert type(d["image"]) is torch.Tensor
    np.testing.assert_array_equal(d["image"][0], grey)
    assert (d["image_kind"], d["image_range"], d["image_corrections"], d["label"]) == ("image", (0, 255), (), 1)
    assert isinstance(DecodeImaged("image", meta=True)({"image": path})["image"], MetaTensor)


def test_decode_reads_the_frame_asked_for(tmp_path):
    pages = [Image.fromarray(np.full((2, 3), n, np.uint8)) for n in (1, 2)]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:])
    for frame in (0, 1):
        assert DecodeImaged("image")({"image": str(tmp_path / "a.tif"), "frame": frame})["image"].max() == frame + 1


def test_windows_by_hand():
    """Brain 40/80 runs from 0 to 80 HU, subdural 80/200 from -20 to 180."""
    units = [[[-1000, -20, 0, 40, 80, 180, 3000]]]
    d = CTWindowd("image", ["brain", [80, 200]])(image(units, "hounsfield", (-1000.0, 3000.0)))
    truth = [[[0, 0, 0, 0.5, 1, 1, 1]], [[0, 0, 0.1, 0.3, 0.5, 1, 1]]]
    np.testing.assert_allclose(d["image"], truth, atol=1e-6)
    assert (d["image_kind"], d["image_range"], d["image_corrections"]) == ("image", (0, 1), ())


def test_named_windows():
    assert resolve_windows(["brain", "subdural", "soft_tissue", "bone"]) == (
        (40, 80),
        (80, 200),
        (40, 380),
        (600, 2800),
    )


@pytest.mark.parametrize(
    ("bad", "answer"), [(["brian"], "Did you mean 'brain'"), ([[40, 0]], "width > 0"), ([], "Known")]
)
def test_no_windows(bad, answer):
    with pytest.raises(ConfigError, match=answer):
        CTWindowd("image", bad)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_of_a_ct_is_already_windowed(channels):
    picture = torch.full((channels, 2, 2), 51.0)
    d = CTWindowd("image", ["brain", "bone"])(image(picture))
    np.testing.assert_allclose(d["image"], np.full((2, 2, 2), 0.2), atol=1e-6)
    assert "already_windowed" in d["image_corrections"]
    assert ("grey_stored_as_rgb" in d["image_corrections"]) is (channels == 3)


def test_unit_range():
    d = ToUnitRanged("image")(image([[[0, 32767.5, 65535, 70000]]], value_range=(0.0, 65535.0)))
    np.testing.assert_allclose(d["image"], [[[0, 0.5, 1, 1]]], atol=1e-6)
    again = ToUnitRanged("image")(d)
    np.testing.assert_array_equal(again["image"], d["image"])
    with pytest.raises(DataError, match="CTWindowd"):
        ToUnitRanged("image")(image([[[0]]], "hounsfield"))


def test_channels():
    grey = torch.rand(1, 2, 3)
    assert to_channels(grey, 3)[0].tolist() == [grey[0].tolist()] * 3
    one, correction = to_channels(grey.expand(3, -1, -1), 1)
    assert (one.tolist(), correction) == (grey.tolist(), "grey_stored_as_rgb")
    red = torch.zeros(3, 1, 1)
    red[0] = 1
    assert to_channels(red, 1)[0].item() == pytest.approx(0.299)
    stack = torch.rand(3, 2, 2)
    assert to_channels(stack, 3)[0] is stack
    with pytest.raises(DataError, match="2 channels"):
        to_channels(torch.rand(2, 2, 2), 3)
    with pytest.raises(ConfigError):
        ToChannelsd("image", 0)
    d = ToChannelsd("image", 1)(image(red))
    assert d["image_corrections"] == ("colour_to_grey",)


@pytest.mark.parametrize("size", [(20, 31), (64, 96), (7, 5), (100, 40)])
def test_resize_is_pillows_antialiased_bilinear(size):
    picture = numpy_generator(0, "r").random((64, 48)).astype(np.float32)
    truth = np.asarray(Image.fromarray(picture).resize(size[::-1], Image.Resampling.BILINEAR))
    ours = resize(torch.from_numpy(picture)[None], size)[0]
    np.testing.assert_allclose(ours, truth, atol=2e-5)


def test_resize_by_area_takes_means():
    picture = torch.from_numpy(numpy_generator(0, "r").random((2, 6, 8)).astype(np.float32))
    np.testing.assert_allclose(resize(picture, (3, 2), "area"), picture.reshape(2, 3, 2, 2, 4).mean((2, 4)), atol=1e-6)


def test_resize_can_keep_the_aspect():
    d = ResizeImaged("image", [10, 10], fit="pad")(image(torch.ones(1, 20, 40)))
    np.testing.assert_allclose(d["image"][0, :, 0], [0, 0, *[1] * 5, 0, 0, 0], atol=1e-6)
    assert d["image"].shape == (1, 10, 10)
    same = torch.rand(1, 4, 5)
    assert resize(same, (4, 5)) is same


@pytest.mark.parametrize(
    "bad",
    [
        {"size": [0, 4]},
        {"size": [4]},
        {"size": "44"},
        {"size": [4, 4], "mode": "bilinaer"},
        {"size": [4, 4], "fit": "padd"},
    ],
)
def test_no_resize(bad):
    with pytest.raises(ConfigError):
        ResizeImaged("image", **bad)


def test_white_corner_goes_and_bright_tissue_stays():
    picture = torch.full((1, 100, 100), 60.0)
    picture[0, :10, :10] = 253  # corner
    picture[0, 50, 0] = 255  # one bright pixel of a layer at the edge
    picture[0, 40:60, 40:60] = 255  # saturated, but inside
    masked, found = mask_white_border(picture, (0, 255), grow=0)
    assert found
    truth = picture.clone()
    truth[0, :10, :10] = 0
    assert torch.equal(masked, truth)
    assert picture[0, 0, 0] == 253  # the input is left alone
    grown = WhiteBorderd("image", grow=2)(image(picture))
    assert grown["image_corrections"] == ("white_border_masked",)
    assert grown["image"][0, 0, 11] == 0
    assert grown["image"][0, 0, 12] == 60


def test_no_white_border_no_change():
    picture = torch.full((1, 30, 30), 200.0)
    d = WhiteBorderd("image")(image(picture))
    assert torch.equal(d["image"], picture)
    assert d["image_corrections"] == ()


def test_white_borders_of_real_scans(shared):
    """Most of the unmodified scans have white corners; none has any afterwards."""
    paths = sorted((shared / "data" / "oct_fullres").rglob("*.jpeg"))[::6]
    corners = []
    for path in paths:
        d = WhiteBorderd("image")(DecodeImaged("image")({"image": str(path)}))
        corners += [float(d["image"][0, y, x]) for y in (0, -1) for x in (0, -1)]
    assert max(corners) < 200


def test_normalisation_and_its_dictionary_form():
    batch = torch.rand(2, 3, 4, 5)
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.25, 1.0]
    normalise = NormalizeBatch(mean, std)
    np.testing.assert_allclose(normalise(batch)[1, 1], (batch[1, 1] - 0.2) / 0.25, rtol=1e-5)
    single = NormalizeUnitd("image", mean, std)({"image": batch[0]})["image"]
    assert torch.equal(single, normalise(batch)[0])
    assert torch.equal(NormalizeBatch(0.5, 0.5)(torch.ones(1, 2, 3, 3)), torch.ones(1, 2, 3, 3))
    assert not normalise.state_dict()  # nothing for a client to send
    with pytest.raises(ConfigError, match="3 values, but the images have 1"):
        normalise(torch.rand(2, 1, 4, 4))
    with pytest.raises(ConfigError, match="above 0"):
        NormalizeBatch(0.5, [0.0])


def test_corruption_as_a_transform():
    unit = image(torch.full((1, 8, 8), 0.5), value_range=(0.0, 1.0)) | {"sample": "a"}
    d = Corruptd("image", "gaussian_noise", 3)(unit)
    truth = corruption.Corruption("gaussian_noise", 3).apply(unit["image"].numpy(), "a")
    np.testing.assert_array_equal(d["image"], truth)
    assert corruption.Corruptd is Corruptd
    with pytest.raises(DataError, match="which image"):
        Corruptd("image", "gaussian_noise", 3)({"image": unit["image"]})
    for wrong in ("image", "hounsfield"):
        with pytest.raises(DataError, match="acts on"):
            Corruptd("image", "gaussian_noise", 3, wrong)(image(torch.ones(1, 2, 2)) | {"sample": "a"})
    with pytest.raises(ConfigError, match="Did you mean"):
        Corruptd("image", "motion_blurr", 3)


def test_a_pipeline_from_a_bundle_configuration_collates(tmp_path):
    """Corrections are of different length from image to image; the batch holds a list of them."""
    config = {
        "prepare": {
            "_target_": "Compose",
            "transforms": [
                {"_target_": "medfed.data.transforms.DecodeImaged", "keys": "image"},
                {"_target_": "medfed.data.transforms.ToUnitRanged", "keys": "image"},
                {"_target_": "medfed.data.corruption.Corruptd", "keys": "image", "kind": "motion_blur", "severity": 1},
                {"_target_": "medfed.data.transforms.ToChannelsd", "keys": "image", "channels": 1},
                {"_target_": "medfed.data.transforms.ResizeImaged", "keys": "image", "size": [8, 8]},
                {"_target_": "medfed.data.transforms.NormalizeUnitd", "keys": "image", "mean": 0.5, "std": 0.5},
            ],
        }
    }
    prepare = ConfigParser(config).get_parsed_content("prepare")
    grey = np.full((10, 12), 128, dtype=np.uint8)
    colour = np.stack([grey, grey // 2, grey], -1)
    paths = [png(tmp_path / "a.png", grey), png(tmp_path / "b.png", colour)]
    items = [{"image": path, "label": 0, "sample": f"{n:03}"} for n, path in enumerate(paths)]
    (batch,) = DataLoader(Dataset(items, prepare), batch_size=2)
    assert batch["image"].shape == (2, 1, 8, 8)
    assert batch["image_corrections"] == [(), ("colour_to_grey",)]
    assert batch["sample"] == ["000", "001"]
    assert [tuple(d["image"].shape) for d in decollate_batch(batch)] == [(1, 8, 8)] * 2
    lean = Compose([prepare, DeleteItemsd(keys="image_", sep="?", use_re=True)])(items[0])
    assert sorted(lean) == ["image", "label", "sample"]


def test_meta_tensors_go_through_as_well(tmp_path):
    path = png(tmp_path / "a.png", np.arange(64, dtype=np.uint8).reshape(8, 8) * 4)
    steps = [ToUnitRanged, lambda k: Corruptd(k, "contrast", 1), WhiteBorderd, lambda k: ResizeImaged(k, [4, 4])]
    results = []
    for meta in (False, True):
        d = DecodeImaged("image", meta=meta)({"image": path, "sample": "a"})
        for step in steps:
            d = step("image")(d)
        results.append(torch.as_tensor(np.asarray(d["image"])))
    assert torch.equal(*results)
    units = MetaTensor(torch.full((1, 2, 2), 40.0))
    assert CTWindowd("image", ["brain"])(image(units, "hounsfield"))["image"].max() == 0.5


def test_real_head_ct_through_the_pipeline(shared):
    path = shared / "data" / "ct" / "ge_head_trauma" / "18.dcm"
    pipeline = Compose(
        [
            DecodeImaged("image"),
            Corruptd("image", "gaussian_noise", 3, "hounsfield"),
            CTWindowd("image"),
            ResizeImaged("image", [64, 64]),
        ]
    )
    d = pipeline({"image": str(path), "sample": "18"})
    assert d["image"].shape == (3, 64, 64)
    assert d["image"].dtype == torch.float32
    brain = d["image"][0, 24:40, 24:40]
    assert 0.2 < brain.mean() < 0.7  # brain tissue lies around 35 of 0..80 HU
