"""One client's work on the resident network."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from medfed.data.arrays import ArrayDataset
from medfed.errors import ConfigError, DataError
from medfed.training.bundle import TrainingBundle
from medfed.training.local import LocalTrainer, resolve_device
from medfed.training.losses import cross_entropy
from medfed.training.steps import PlainStep, SharpnessAwareStep


class SmallNetwork(nn.Module):
    """A convolution, BatchNorm, dropout and a linear classifier, for 8x8 images."""

    def __init__(self, num_classes: int = 3, norm: bool = True, dropout: float = 0.3):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(4, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.norm(self.conv(images))).mean(dim=(2, 3))
        return self.head(self.drop(features))


def bundle(**changes) -> TrainingBundle:
    network = {"_target_": f"{__name__}.SmallNetwork", **changes.pop("network", {})}
    overrides = {
        "network_def": network,
        "classes": ["a", "b", "c"],
        "in_channels": 1,
        "image_size": [8, 8],
        "batch_size": 4,
        "learning_rate": 0.01,
        **changes,
    }
    return TrainingBundle.load("oct_bscan_classification", overrides)


def dataset(n: int = 11, seed: int = 0) -> ArrayDataset:
    g = np.random.default_rng(seed)
    images = g.integers(0, 256, (n + 3, 1, 8, 8), dtype=np.uint8)
    return ArrayDataset(images, np.arange(n) + 2, torch.from_numpy(g.integers(0, 3, n)))


def trainer(**options) -> LocalTrainer:
    return LocalTrainer(bundle(**options.pop("bundle", {})), device="cpu", **options)


def snapshot(t: LocalTrainer) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in t.state().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def shared_trainer() -> LocalTrainer:
    return trainer()


PARTS = (0, 1, "client_00")


@pytest.mark.parametrize("step", [PlainStep, SharpnessAwareStep])
def test_fit_depends_on_state_data_and_seed_parts_alone(step, shared_trainer):
    t = shared_trainer
    start = snapshot(t)

    def fit(parts, data):
        t.load(start)
        result = t.fit(data, seed_parts=parts, step=step(), epochs=2)
        return snapshot(t), result

    data = dataset()
    first, one = fit(PARTS, data)
    fit((0, 1, "client_01"), dataset(7, seed=5))
    torch.manual_seed(99)
    t.predict(data)
    second, two = fit(PARTS, data)
    assert equal(first, second)
    assert one == two
    for other in [(0, 1, "client_01"), (0, 2, "client_00"), (1, 1, "client_00")]:
        assert not equal(first, fit(other, data)[0])
    t.load(start)


def test_another_trainer_gives_the_same(shared_trainer):
    one, two = trainer(seed=4), trainer(seed=4)
    assert equal(snapshot(one), snapshot(two))
    assert not equal(snapshot(one), snapshot(shared_trainer))
    one.fit(dataset(7, seed=2), seed_parts=("warm", 1, "x"))
    one.load(snapshot(two))
    for t in (one, two):
        t.fit(dataset(), seed_parts=PARTS)
    assert equal(snapshot(one), snapshot(two))


def test_fit_leaves_the_global_generator(shared_trainer):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    shared_trainer.fit(dataset(), seed_parts=PARTS)
    assert torch.equal(torch.rand(3), expected)


def test_fit_equals_a_bare_loop():
    """The same optimiser steps written out: order and augmentation from the generators, Adam anew."""
    from medfed.seeding import torch_generator

    t = trainer(bundle={"network": {"dropout": 0.0}})
    data, start = dataset(9), snapshot(t)
    result = t.fit(data, seed_parts=PARTS, epochs=2)
    after = snapshot(t)

    net = SmallNetwork(dropout=0.0)
    net.load_state_dict(start)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4, fused=True)
    order_from, flips_from = torch_generator("shuffle", *PARTS), torch_generator("augment", *PARTS)
    losses = []
    for _ in range(2):
        order = torch.randperm(9, generator=order_from)
        for rows in (order[:4], order[4:]):  # the ninth sample joins the second batch
            images = torch.from_numpy(data.images[data.rows[rows.numpy()]]).float() / 255
            flip = torch.rand(len(rows), 5, generator=flips_from)[:, 4] < 0.5
            images = torch.where(flip[:, None, None, None], images.flip(-1), images)
            loss = nn.functional.cross_entropy(net((images - 0.5) / 0.5), data.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append((loss.item(), len(rows)))
    assert all(torch.allclose(after[k].float(), v.float(), atol=1e-6) for k, v in net.state_dict().items())
    assert (result.steps, result.samples, result.skipped) == (4, 9, 0)
    assert result.loss == pytest.approx(sum(x * n for x, n in losses) / 18, rel=1e-5)
    assert result.epoch_losses[1] == pytest.approx((losses[2][0] * 4 + losses[3][0] * 5) / 9, rel=1e-5)


def test_fit_learns_and_the_optimiser_forgets(shared_trainer):
    start, data = snapshot(shared_trainer), dataset()
    result = shared_trainer.fit(data, seed_parts=PARTS, epochs=30, learning_rate=0.05)
    assert result.epoch_losses[-1] < result.epoch_losses[0]
    # A single step with a new Adam moves each weight by about the learning rate, whatever came before.
    shared_trainer.load(start)
    shared_trainer.fit(data, seed_parts=PARTS, batch_size=11, learning_rate=0.01)
    moved = (shared_trainer.state()["head.bias"] - start["head.bias"]).abs()
    assert moved.tolist() == pytest.approx([0.01] * 3, rel=1e-2)
    shared_trainer.load(start)


def test_on_batch_sees_indices_and_losses(shared_trainer):
    start, seen = snapshot(shared_trainer), []
    result = shared_trainer.fit(
        dataset(), seed_parts=PARTS, on_batch=lambda batch, out: seen.append((batch["index"].tolist(), out["loss"]))
    )
    assert sorted(i for rows, _ in seen for i in rows) == list(range(11))
    assert len(seen) == result.steps == 3
    shared_trainer.load(start)


def test_objective_is_what_is_minimised(shared_trainer):
    start = snapshot(shared_trainer)
    shared_trainer.fit(
        dataset(), seed_parts=PARTS, objective=lambda net, batch: 0 * net(batch["image"]).sum(), epochs=1
    )
    # Nothing pulls but the weight decay, which Adam scales to steps of the learning rate towards zero.
    after = shared_trainer.state()
    grown = (after["head.weight"].abs() > start["head.weight"].abs()) & (start["head.weight"].abs() > 0.05)
    assert not bool(grown.any())
    shared_trainer.load(start)


def test_an_error_half_way_leaves_the_trainer_usable(shared_trainer):
    start, data = snapshot(shared_trainer), dataset()
    expected = shared_trainer.fit(data, seed_parts=PARTS)
    calls = []

    def failing(net, batch):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("broken")
        return net(batch["image"]).sum()

    with pytest.raises(RuntimeError, match="broken"):
        shared_trainer.fit(data, seed_parts=PARTS, objective=failing)
    shared_trainer.load(start)
    assert shared_trainer.fit(data, seed_parts=PARTS) == expected
    shared_trainer.load(start)


def test_a_loss_that_is_never_finite_moves_nothing(shared_trainer):
    start = snapshot(shared_trainer)
    result = shared_trainer.fit(
        dataset(), seed_parts=PARTS, objective=lambda net, batch: net(batch["image"]).sum() * math.nan
    )
    assert (result.steps, result.skipped) == (0, 3)
    assert math.isnan(result.loss)
    assert equal(snapshot(shared_trainer), start)


def test_load_is_strict_and_atomic(shared_trainer):
    start = snapshot(shared_trainer)
    with pytest.raises(ConfigError, match=r"lacks \['conv\.bias'\].*unexpected \['other'\]"):
        shared_trainer.load({**{k: v for k, v in start.items() if k != "conv.bias"}, "other": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"'head\.weight' has shape \(2, 2\) instead of \(3, 4\)"):
        shared_trainer.load({k: torch.zeros(2, 2) if k == "head.weight" else v + 1 for k, v in start.items()})
    assert equal(snapshot(shared_trainer), start)
    assert not any(v.requires_grad for v in shared_trainer.state().values())


def test_state_is_a_view(shared_trainer):
    start, view = snapshot(shared_trainer), shared_trainer.state()
    shared_trainer.load({k: torch.zeros_like(v) for k, v in start.items()})
    assert view["head.weight"].abs().sum() == 0
    shared_trainer.load(start)


def test_predictions_features_and_losses(shared_trainer):
    data = dataset()
    logits, features = shared_trainer.predict(data, 4), shared_trainer.features(data, 64)
    assert logits.shape == (11, 3)
    assert features.shape == (11, 4)
    state = shared_trainer.state()
    assert torch.allclose(features @ state["head.weight"].T + state["head.bias"], logits, atol=1e-6)
    losses = shared_trainer.losses(data)
    assert torch.allclose(losses, cross_entropy(logits, data.labels, reduction="none"), atol=1e-6)
    assert not shared_trainer.predict(data).requires_grad


def test_predictions_of_augmented_images():
    """An augmentation that always mirrors: what is predicted is what the network says of mirrored images."""
    t, data = trainer(bundle={"augment::flip": 1.0}), dataset()
    mirrored = ArrayDataset(data.images[..., ::-1].copy(), data.rows, data.labels)
    assert torch.allclose(t.predict(data, augmented=PARTS), t.predict(mirrored), atol=1e-6)
    assert torch.allclose(t.losses(data, augmented=PARTS), t.losses(mirrored), atol=1e-6)
    assert not torch.allclose(t.predict(data), t.predict(mirrored), atol=1e-3)


@pytest.mark.parametrize("count", [4, 11])
def test_predictions_as_in_training_are_those_of_the_steps(count):
    """Of every batch of an epoch that takes no step: same order, images, dropped features and batch statistics."""
    t, data = trainer(bundle={"augment::flip": 0.5}), dataset(count)
    before, told = snapshot(t), t.predict_as_in_training(data, seed_parts=PARTS)
    assert equal(snapshot(t), before)
    assert torch.equal(told, t.predict_as_in_training(data, seed_parts=PARTS))
    assert not torch.allclose(told, t.predict(data), atol=1e-3)
    seen = torch.full((count, 3), torch.nan)

    def objective(network, batch):
        logits = network(batch["image"])
        seen[batch["index"]] = logits.detach()
        return logits.sum()

    t.fit(data, seed_parts=PARTS, objective=objective, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    assert torch.equal(seen, told)
    assert not equal(snapshot(t), before)  # the steps moved the running statistics


@pytest.mark.parametrize(("count", "sizes"), [(11, [4, 4]), (9, [4, 4]), (8, [4, 4]), (5, [4]), (3, [3])])
def test_incomplete_batches_are_left_out_unless_there_is_no_other(count, sizes, shared_trainer):
    seen = []
    result = shared_trainer.fit(
        dataset(count), seed_parts=PARTS, epochs=2, drop_last=True, on_batch=lambda b, _: seen.append(b["index"])
    )
    assert [len(rows) for rows in seen] == sizes * 2
    assert result.steps == 2 * len(sizes)
    for epoch in (seen[: len(sizes)], seen[len(sizes) :]):
        rows = torch.cat(epoch).tolist()
        assert len(set(rows)) == len(rows)


def test_sharpness_is_deterministic_unless_augmented(shared_trainer):
    data, start = dataset(), snapshot(shared_trainer)
    one, two = shared_trainer.sharpness(data, 0.05), shared_trainer.sharpness(data, 0.05, batch_size=5)
    assert one.sharpness == pytest.approx(two.sharpness, rel=1e-3)
    assert one.samples == 11
    assert one.loss == pytest.approx(shared_trainer.losses(data).mean().item(), rel=1e-5)
    noisy = shared_trainer.sharpness(data, 0.05, augmented=PARTS)
    assert noisy == shared_trainer.sharpness(data, 0.05, augmented=PARTS)
    assert noisy.loss != one.loss
    assert equal(snapshot(shared_trainer), start)


def test_a_client_of_one_sample(shared_trainer):
    with pytest.raises(DataError, match="BatchNorm"):
        shared_trainer.fit(dataset(1), seed_parts=PARTS)
    with pytest.raises(DataError, match="BatchNorm"):
        shared_trainer.fit(dataset(4), seed_parts=PARTS, batch_size=1)
    without = trainer(bundle={"network": {"norm": False}})
    assert without.fit(dataset(1), seed_parts=PARTS).steps == 1


def test_a_client_without_samples(shared_trainer):
    for call in (lambda d: shared_trainer.fit(d, seed_parts=PARTS), shared_trainer.predict, shared_trainer.sharpness):
        with pytest.raises(DataError, match="no sample"):
            call(dataset(0))
    with pytest.raises(ConfigError, match="0 epochs"):
        shared_trainer.fit(dataset(), seed_parts=PARTS, epochs=0)


def test_one_class_clients_train(shared_trainer):
    start = snapshot(shared_trainer)
    data = dataset().with_labels(torch.ones(11, dtype=torch.int64))
    assert math.isfinite(shared_trainer.fit(data, seed_parts=PARTS).loss)
    shared_trainer.load(start)


@pytest.mark.parametrize("options", [{"channels_last": True}, {"amp": True}, {"compile": "eager"}])
def test_options_give_nearly_the_same(options, shared_trainer):
    start, data = snapshot(shared_trainer), dataset()
    reference = shared_trainer.fit(data, seed_parts=PARTS)
    shared_trainer.load(start)
    other = trainer(**options)
    other.load(start)
    found = other.fit(data, seed_parts=PARTS)
    assert found.loss == pytest.approx(reference.loss, rel=0.05)
    assert other.state().keys() == start.keys()
    assert other.predict(data).dtype == torch.float32


def test_multilabel_task():
    t = trainer(bundle={"task": "multilabel"})
    data = dataset().with_labels(torch.randint(2, (11, 3)).float())
    assert math.isfinite(t.fit(data, seed_parts=PARTS).loss)
    assert t.losses(data).shape == (11,)
    assert t.sharpness(data).sharpness > 0


def test_memory_of_an_earlier_client_is_given_back(shared_trainer):
    start = snapshot(shared_trainer)
    shared_trainer.fit(dataset(), seed_parts=PARTS)
    assert all(p.grad is None for p in shared_trainer.network.parameters())
    assert shared_trainer._trainer.optimizer is None
    shared_trainer.load(start)


def test_devices():
    assert resolve_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="no device"):
        resolve_device("gpu0")
    with pytest.raises(ConfigError, match="no device 'cuda:99'"):
        resolve_device("cuda:99")


def test_events_reach_a_handler_though_they_are_left_out_where_there_is_none():
    from ignite.engine import Events

    from medfed.training.engine import ClientTrainer

    trainer = ClientTrainer(torch.nn.Linear(2, 2), torch.device("cpu"))
    heard = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: heard.append(engine.state.iteration))
    parameters = list(trainer.network.parameters())
    batch = {"image": torch.zeros(3, 2), "label": torch.tensor([0, 1, 0])}
    trainer.train(
        [batch, batch],
        2,
        torch.optim.SGD(parameters, lr=0.1),
        lambda network, b: torch.nn.functional.cross_entropy(network(b["image"]), b["label"]),
        PlainStep(),
        lambda *_: None,
    )
    assert heard == [1, 2, 3, 4]


def test_room_for_copies_is_made_once_for_all_clients():
    from medfed.training.engine import ClientTrainer

    trainer = ClientTrainer(torch.nn.Linear(2, 2), torch.device("cpu"))
    batch = {"image": torch.ones(3, 2), "label": torch.tensor([0, 1, 0])}
    rooms = set()
    for _ in range(3):
        step = SharpnessAwareStep()
        trainer.train(
            [batch],
            1,
            torch.optim.SGD(trainer.network.parameters(), lr=0.1),
            lambda network, b: torch.nn.functional.cross_entropy(network(b["image"]), b["label"]),
            step,
            lambda *_: None,
        )
        rooms.add(id(step._weights))
    assert len(rooms) == 1
