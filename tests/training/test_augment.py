"""Batch augmentation: geometry by hand and against torchvision."""

import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import affine

from medfed.errors import ConfigError
from medfed.seeding import torch_generator
from medfed.training.augment import BatchAugment, PrepareBatch


def generator(seed: int = 0) -> torch.Generator:
    return torch_generator(seed, "test")


def test_no_augmentation_returns_the_images():
    images = torch.rand(2, 1, 4, 4)
    assert BatchAugment()(images, generator()) is images


def test_flip_is_exact_and_per_sample():
    images = torch.rand(64, 2, 5, 7)
    out = BatchAugment(flip=0.5)(images, generator())
    mirrored = torch.tensor([torch.equal(o, i.flip(-1)) for o, i in zip(out, images)])
    kept = torch.tensor([torch.equal(o, i) for o, i in zip(out, images)])
    assert bool((mirrored ^ kept).all())
    assert 16 < int(mirrored.sum()) < 48
    assert torch.equal(BatchAugment(flip=1.0)(images, generator()), images.flip(-1))


def test_flip_within_the_affine_map():
    images = torch.rand(3, 1, 6, 9)
    out = BatchAugment(scale=1e-6, flip=1.0)(images, generator())
    assert torch.allclose(out, images.flip(-1), atol=1e-4)


@pytest.mark.parametrize(("height", "width"), [(16, 16), (12, 20)])
def test_affine_map_as_in_torchvision(height, width):
    images = torch.rand(1, 1, height, width)
    augment = BatchAugment(degrees=25, translate=0.2, scale=0.3)
    unit = torch.rand(1, 5, generator=generator())[0, :4] * 2 - 1
    angle, scale = unit[0].item() * 25, 1 + unit[3].item() * 0.3
    shift = [unit[1].item() * 0.2 * width, unit[2].item() * 0.2 * height]
    expected = affine(images, angle, shift, scale, [0.0, 0.0], InterpolationMode.BILINEAR)
    inside = slice(4, -4)
    difference = (augment(images, generator()) - expected)[..., inside, inside]
    assert difference.abs().max() < 1e-4


def test_what_comes_from_outside_is_black():
    out = BatchAugment(translate=1.0)(torch.ones(20, 1, 8, 8), generator())
    assert out.min() == 0
    assert out.max() <= 1


def test_draws_depend_on_the_generator_alone():
    images, augment = torch.rand(5, 3, 8, 8), BatchAugment(10, 0.02, 0.5)
    torch.manual_seed(0)
    one = augment(images, generator(1))
    torch.manual_seed(1)
    assert torch.equal(one, augment(images, generator(1)))
    assert not torch.equal(one, augment(images, generator(2)))


def test_switching_the_flip_off_leaves_the_rotation():
    images = torch.rand(8, 1, 9, 9)
    unflipped = BatchAugment(degrees=10)(images, generator())
    sometimes = BatchAugment(degrees=10, flip=0.5)(images, generator())
    same = [torch.equal(a, b) for a, b in zip(unflipped, sometimes)]
    assert 0 < sum(same) < len(same)


@pytest.mark.parametrize("wrong", [{"degrees": -1}, {"flip": 1.5}, {"translate": 2}, {"scale": 1}])
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        BatchAugment(**wrong)


def test_prepare_batch_augments_then_normalises():
    prepare = PrepareBatch(BatchAugment(flip=1.0), lambda x: x - 1, seed=3)
    images, labels = torch.rand(2, 1, 4, 4), torch.tensor([0, 1])
    out, same = prepare({"image": images, "label": labels}, torch.device("cpu"))
    assert torch.equal(out, images.flip(-1) - 1)
    assert torch.equal(same, labels)
