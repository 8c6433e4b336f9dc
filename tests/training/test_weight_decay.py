"""Weight decay of one training, in place of the bundle's."""

from __future__ import annotations

import torch
from test_local import bundle, dataset, snapshot, trainer


def nothing(network, batch):
    return sum(p.sum() for p in network.parameters()) * 0.0


def test_weight_decay_of_the_optimiser_groups():
    b = bundle()
    params = list(b.build_network().parameters())

    def group(**options):
        return b.make_optimizer(params, **options).param_groups[0]

    assert (group()["lr"], group()["weight_decay"]) == (0.01, 5e-4)
    stage_one = group(learning_rate=5e-5, weight_decay=5e-2)
    assert (stage_one["lr"], stage_one["weight_decay"], stage_one["decoupled_weight_decay"]) == (5e-5, 5e-2, False)
    assert group(weight_decay=0.0)["weight_decay"] == 0.0
    assert group()["weight_decay"] == 5e-4


def test_fit_hands_the_weight_decay_on():
    """Adam's first step is the learning rate times the sign of gradient + decay * weight, where that is not tiny."""
    for decay, expected in ((10.0, 0.01), (0.0, 0.0)):
        t = trainer()
        start = snapshot(t)
        t.fit(dataset(4), seed_parts=(0,), objective=nothing, weight_decay=decay, batch_size=4)
        moved = start["head.weight"] - t.state()["head.weight"]
        assert torch.allclose(moved, expected * start["head.weight"].sign(), atol=1e-5)
