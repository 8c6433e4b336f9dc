"""The automatic number of workers: right for small, middling and model-bound clients, and the same every time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from medfed.engines.planning import choose_workers, forward_flops
from medfed.training.networks import build_network


class Bundle:
    """What the choice reads of a bundle."""

    def __init__(self, name: str, shape: tuple[int, int, int]):
        self.name, self.image_shape = name, shape

    def build_network(self, seed: int) -> nn.Module:
        if self.name == "49 thousand parameters":
            layers = (nn.Conv2d(1, 16, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2))
            return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 49, 28), nn.Linear(28, 5))
        return build_network(self.name, 5, self.image_shape[0], seed=seed)


def test_operations_are_those_counted_by_hand():
    # 3x3 convolution, 2 to 4 channels on 8x8: 8*8*4*(3*3*2) products, each with its addition; linear 256 to 3.
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3)
    )
    assert forward_flops(network, (2, 8, 8)) == 2 * (8 * 8 * 4 * 18 + 256 * 3)


def test_resnet18_has_the_published_operations():
    # He et al. 2016, table 1: 1.8 x 10^9 multiply-adds at 224x224.
    flops = forward_flops(build_network("resnet18", 1000), (3, 224, 224))
    assert flops / 2 == pytest.approx(1.8e9, rel=0.02)


def test_counting_computes_nothing_and_leaves_no_trace(monkeypatch):
    before = torch.random.get_rng_state()
    network = build_network("resnet18", 5)
    forward_flops(network, (3, 64, 64))
    assert all(p.is_meta for p in network.parameters())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_network_that_depends_on_data_is_not_moved():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x.flatten(1)) if float(x.sum()) > 0 else x

    assert forward_flops(Odd(), (1, 2, 2)) == 0.0


@pytest.mark.parametrize(
    ("name", "shape", "clients", "samples", "workers"),
    [
        ("49 thousand parameters", (1, 28, 28), 200, 20, 2),
        ("squeezenet1_1", (3, 96, 96), 10, 64, 2),  # convolutions of few parameters
        ("resnet18", (3, 224, 224), 20, 50, 2),
        ("resnet18", (3, 28, 28), 20, 0, 1),  # nothing but moving models
        ("resnet18", (3, 28, 28), 20, 10, 1),  # 45 MB for a few small images
        ("resnet18", (3, 224, 224), 1, 500, 1),  # nobody to train beside
    ],
)
def test_choice_on_two_cores(name, shape, clients, samples, workers):
    bundle = Bundle(name, shape)
    assert choose_workers(bundle, clients=clients, samples=samples, cores=2) == workers


def test_never_more_workers_than_clients_or_cores():
    bundle = Bundle("squeezenet1_1", (3, 64, 64))
    assert choose_workers(bundle, clients=3, samples=500, cores=16) == 3
    assert choose_workers(bundle, clients=30, samples=500, cores=16) == 16
    assert choose_workers(bundle, clients=30, samples=500, cores=1) == 1
