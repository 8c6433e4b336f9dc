"""FedISM on the real trainer against a second implementation, written from the equations alone.

A linear softmax classifier has its gradient in closed form, so the whole round (sharpness of the received model,
weights, moving average, GSAM steps with a new Adam, logit adjustment, average) is repeated here in NumPy. A network
with BatchNorm is repeated in torch, with passes on throw-away copies.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tiny_federation import PIXELS, Federation, Normed, distance, three_clients

from medfed.seeding import torch_generator

LR, BATCH, DECAY, TINY = 0.01, 4, 5e-4, 1e-12
CLIENTS = ("c0", "c1", "c2")


def pixels(data):
    """Normalised images of a client, ``[N, PIXELS]``: scaled to 0..1, mean and deviation 0.5."""
    return (data.images[data.rows].reshape(len(data), PIXELS).astype(np.float32) / np.float32(255) - 0.5) / 0.5


def orders(seed, round, client, samples, epochs):
    generator = torch_generator("shuffle", seed, round, client)
    for _ in range(epochs):
        order = torch.randperm(samples, generator=generator).numpy()
        cuts = list(range(BATCH, samples, BATCH))
        if samples - cuts[-1] == 1:  # a last batch of one joins the one before
            cuts.pop()
        yield from np.split(order, cuts)


class LinearSoftmax:
    """Weights ``[C, PIXELS + 1]``, the bias last; loss and gradient by hand."""

    @staticmethod
    def loss_and_gradient(theta, x, y, offsets):
        x1 = np.hstack([x.astype(np.float64), np.ones((len(x), 1))])
        z = x1 @ theta.T + offsets
        z = z - z.max(axis=1, keepdims=True)
        log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
        residual = np.exp(log_p)
        residual[np.arange(len(y)), y] -= 1
        return -log_p[np.arange(len(y)), y].mean(), residual.T @ x1 / len(y)


def numpy_round(theta, data, round, *, kept, q, beta, rho, alpha, saga, epochs, la, follow="sharpness"):
    """One round of FedISM; returns the new weights, sharpness and aggregation weights by client."""
    plain = np.zeros(3)
    sharpness, losses, models = {}, {}, {}
    for name in CLIENTS:
        x, y = pixels(data[name]), data[name].labels.numpy()
        loss, gradient = LinearSoftmax.loss_and_gradient(theta, x, y, plain)
        moved = theta + rho * gradient / (np.linalg.norm(gradient) + TINY)
        sharpness[name] = max(LinearSoftmax.loss_and_gradient(moved, x, y, plain)[0] - loss, 1e-10)
        losses[name] = loss

        counts = np.bincount(y, minlength=3)
        offsets = np.log(np.maximum(counts / counts.sum(), 1e-12)) if la else plain
        local, m, v, t = theta.copy(), np.zeros_like(theta), np.zeros_like(theta), 0
        for batch in orders(0, round, name, len(y), epochs):
            _, g = LinearSoftmax.loss_and_gradient(local, x[batch], y[batch], offsets)
            if alpha is not None:
                at = local + rho * g / (np.linalg.norm(g) + TINY)
                _, gp = LinearSoftmax.loss_and_gradient(at, x[batch], y[batch], offsets)
                cosine = (g * gp).sum() / (np.linalg.norm(g) * np.linalg.norm(gp) + TINY)
                across = g - cosine * np.linalg.norm(g) * gp / (np.linalg.norm(gp) + TINY)
                g = gp - alpha * across
            g, t = g + DECAY * local, t + 1
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            local = local - LR * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        models[name] = local

    needs = {c: s + (losses[c] if follow == "perturbed_loss" else 0.0) for c, s in sharpness.items()}
    total = sum(needs.values())
    powers = {c: (s / total + 1e-10) ** q for c, s in needs.items()}
    weights = {c: p / sum(powers.values()) for c, p in powers.items()}
    if not saga:
        weights = {c: len(data[c]) / sum(map(len, data.values())) for c in CLIENTS}
    elif kept is not None:
        weights = {c: beta * w + (1 - beta) * kept[c] for c, w in weights.items()}
    return sum(weights[c] * models[c] for c in CLIENTS), sharpness, weights


def theta_of(state):
    return np.hstack([state["head.weight"].numpy(), state["head.bias"].numpy()[:, None]])


CASES = {
    "as published": {},
    "SAM": {"alpha": 0.0},
    "strong GSAM": {"alpha": 0.9, "rho": 0.5},
    "q zero": {"q": 0.0},
    "q five": {"q": 5.0},
    "no moving average": {"beta": 1.0},
    "slow moving average": {"beta": 0.2},
    "SAGA only": {"alpha": None},
    "SALT only": {"saga": False},
    "two epochs": {"epochs": 2},
    "plain loss": {"la": False},
    "sharpness from round 2": {"saga_from": 2},
    "sharpness after the end": {"saga_from": 4},
    "perturbed loss": {"follow": "perturbed_loss"},
}


@pytest.mark.parametrize("case", CASES)
def test_three_rounds_are_those_of_the_equations(case):
    wanted = {"q": 2.0, "beta": 0.5, "rho": 0.05, "alpha": 0.1, "saga": True, "epochs": 1, "la": True, **CASES[case]}
    start = wanted.pop("saga_from", 1)
    wanted.setdefault("follow", "sharpness")
    section = {
        "name": "fedism",
        "salt": None if wanted["alpha"] is None else {"rho": wanted["rho"], "alpha": wanted["alpha"]},
        **{k: wanted[k] for k in ("q", "beta", "saga")},
        "local_epochs": wanted["epochs"],
        "logit_adjustment": wanted["la"],
        "saga_from": start,
        "follow": wanted["follow"],
    }
    data = three_clients()
    ours = Federation(section, data).run()
    theta, kept = theta_of(ours.initial), None
    for round in (1, 2, 3):
        now = {**wanted, "saga": wanted["saga"] and round >= start}
        theta, sharpness, weights = numpy_round(theta, data, round, kept=kept, **now)
        kept = weights if now["saga"] else None  # the average begins with the first weights by sharpness
        assert ours.column("sharpness", round) == pytest.approx(sharpness, rel=1e-6)
        assert ours.column("weight", round) == pytest.approx(weights, rel=1e-6)
        assert np.abs(theta_of(ours.models[round - 1]) - theta).max() < 1e-6


def test_fedism_plus_grows_the_radius_in_training_and_in_the_measurement():
    """rho_t = rho ((t + 1) / T)^0.5 with t = 0..T-1."""
    data = three_clients()
    ours = Federation({"name": "fedism_plus", "salt": {"rho": 0.4}}, data, rounds=3).run()
    theta, kept = theta_of(ours.initial), None
    for t in range(3):
        rho = 0.4 * ((t + 1) / 3) ** 0.5
        theta, sharpness, kept = numpy_round(
            theta, data, t + 1, kept=kept, q=2.0, beta=0.5, rho=rho, alpha=0.1, saga=True, epochs=1, la=True
        )
        assert ours.column("sharpness", t + 1) == pytest.approx(sharpness, rel=1e-6)
        assert np.abs(theta_of(ours.models[t]) - theta).max() < 1e-6


@pytest.mark.parametrize(
    ("section", "training", "measured"),
    [
        ({}, True, [0.05 * (1 / 2) ** 0.5, 0.05]),
        ({"salt": True}, True, [0.05 * (1 / 2) ** 0.5, 0.05]),
        ({"salt": {"alpha": 0.3}}, True, [0.05 * (1 / 2) ** 0.5, 0.05]),
        ({"salt": False}, False, [0.05 * (1 / 2) ** 0.5, 0.05]),
        ({"measure": {"rho": 0.2}}, True, [0.2 * (1 / 2) ** 0.5, 0.2]),
        ({"salt": {"radius": "bounded"}}, True, [0.05 * (1 / 2) ** 0.5, 0.05]),
        ({"salt": {"power": 0.0}}, True, [0.05, 0.05]),
    ],
)
def test_every_way_to_write_fedism_plus_has_its_schedule(section, training, measured):
    from medfed.methods.registry import resolve_method

    _, settings = resolve_method({"name": "fedism_plus", **section})
    assert [settings.probe.ball(t, 2)["rho"] for t in (1, 2)] == pytest.approx(measured)
    assert settings.probe.radius == "constant"
    assert ("salt" in settings.request(1, 2)) is training


class TorchReference:
    """One client's work on a network with BatchNorm, each pass on a copy of its own."""

    def __init__(self, state):
        self.net = Normed()
        self.net.load_state_dict(state)

    def gradient(self, shift, x, y, offsets, train=True):
        """Loss and gradient at the weights plus a shift, and the copy whose buffers have seen the batch."""
        net = copy.deepcopy(self.net).train(train)
        with torch.no_grad():
            for p, s in zip(net.parameters(), shift):
                p += s
        loss = torch.nn.functional.cross_entropy(net(x) + offsets, y)
        return loss.item(), torch.autograd.grad(loss, list(net.parameters())), net

    @staticmethod
    def ascent(g, rho):
        return [rho * x / (norm(g) + TINY) for x in g]

    def still(self):
        return [torch.zeros_like(p) for p in self.net.parameters()]

    def sharpness(self, x, y, rho):
        loss, g, _ = self.gradient(self.still(), x, y, 0.0, train=False)
        return max(self.gradient(self.ascent(g, rho), x, y, 0.0, train=False)[0] - loss, 1e-10)

    def train(self, batches, x, y, offsets, rho, alpha):
        optimizer = torch.optim.Adam(self.net.parameters(), lr=LR, weight_decay=DECAY, foreach=False)
        for batch in batches:
            xb, yb = x[batch], y[batch]
            _, g, seen = self.gradient(self.still(), xb, yb, offsets)
            _, gp, _ = self.gradient(self.ascent(g, rho), xb, yb, offsets)
            cosine = sum((a * b).sum() for a, b in zip(g, gp)) / (norm(g) * norm(gp) + TINY)
            for p, a, b in zip(self.net.parameters(), g, gp):
                p.grad = b - alpha * (a - cosine * norm(g) * b / (norm(gp) + TINY))
            optimizer.step()
            for mine, theirs in zip(self.net.buffers(), seen.buffers()):
                mine.copy_(theirs)


def norm(tensors):
    return torch.sqrt(sum((t * t).sum() for t in tensors))


def test_batch_norm_network_over_three_rounds():
    data = three_clients()
    ours = Federation("fedism", data, network="Normed").run()
    state, kept = ours.initial, None
    for round in (1, 2, 3):
        sharpness, trained = {}, {}
        for name in CLIENTS:
            x, y = torch.from_numpy(pixels(data[name])), data[name].labels
            client = TorchReference(state)
            sharpness[name] = client.sharpness(x, y, 0.05)
            frequency = torch.bincount(y, minlength=3).double() / len(y)
            client.train(orders(0, round, name, len(y), 1), x, y, frequency.clamp_min(1e-12).log(), 0.05, 0.1)
            trained[name] = client.net.state_dict()
        squares = {c: (s / sum(sharpness.values()) + 1e-10) ** 2 for c, s in sharpness.items()}
        new = {c: s / sum(squares.values()) for c, s in squares.items()}
        kept = new if kept is None else {c: 0.5 * new[c] + 0.5 * kept[c] for c in CLIENTS}
        state = {
            k: sum(kept[c] * trained[c][k] for c in CLIENTS) if t.is_floating_point() else trained["c0"][k]
            for k, t in trained["c0"].items()
        }
        assert ours.column("sharpness", round) == pytest.approx(sharpness, rel=1e-6)
        assert ours.column("weight", round) == pytest.approx(kept, rel=1e-6)
        assert distance(ours.models[round - 1], state) < 1e-6
    counter = ours.models[-1]["norm.num_batches_tracked"]
    assert counter.dtype == torch.int64
    assert counter.item() == 3 * 3  # c0 takes three batches a round, and the second pass of a step counts nothing


def test_fedavg_with_salt_is_fedism_without_saga():
    one = Federation({"name": "fedavg", "salt": True}, three_clients(), network="Normed").run()
    two = Federation({"name": "fedism", "saga": False}, three_clients(), network="Normed").run()
    assert max(distance(a, b) for a, b in zip(one.models, two.models)) < 1e-12
    assert one.server.notes == two.server.notes == {}
    three = Federation("fedavg", three_clients(), network="Normed").run()
    assert distance(one.models[0], three.models[0]) > 1e-6


def test_equal_clients_get_equal_weights():
    twins = dict.fromkeys(("c0", "c1", "c2", "c3"), three_clients()["c0"])
    done = Federation("fedism", twins).run()
    for round in (1, 2, 3):
        assert done.column("weight", round) == pytest.approx(dict.fromkeys(twins, 0.25))


def test_quadratic_loss_has_the_sharpness_of_the_book():
    """F = ||theta||^2 / 2 rises by rho ||theta|| + rho^2 / 2 within the radius."""
    done = Federation("fedism", three_clients())
    trainer = done.server.engine.host.client("c0").trainer
    trainer.load(done.initial)
    size = float(np.linalg.norm(theta_of(done.initial)))

    def loss(network, batch):
        return sum((p * p).sum() for p in network.parameters()).expand(len(batch["label"])) / 2

    assert trainer.sharpness(three_clients()["c0"], 0.3, loss=loss).sharpness == pytest.approx(0.3 * size + 0.045)
