"""What a ``method`` section may say, and how it is answered when it says something else."""

from __future__ import annotations

import pytest

from medfed.errors import ConfigError
from medfed.methods.registry import METHODS, get_method, resolve_method


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_found_under_its_name_with_tasks_and_defaults(name):
    method, settings = resolve_method({"name": name})
    assert method.name == name
    assert "train" in method.tasks
    assert settings.learning_rate is None


EPOCHS = {"fednoro": 5, "fedlsr": 5, "fedelc": 5, "fedcorr": 5, "rofl": 5, "rhfl": None, "fedned": 10}
PLAIN = ("fedlsr", "fedcorr", "rofl", "rhfl", "fedned")  # published without logit adjustment


@pytest.mark.parametrize("name", METHODS)
def test_published_local_training(name):
    _, settings = resolve_method({"name": name})
    assert (settings.local_epochs, settings.logit_adjustment) == (EPOCHS.get(name, 1), name not in PLAIN)


def test_published_defaults():
    _, settings = resolve_method({"name": "fedism"})
    assert (settings.q, settings.beta, settings.salt.rho, settings.salt.alpha) == (2.0, 0.5, 0.05, 0.1)
    assert (settings.salt.radius, settings.salt.power, settings.salt.warmup) == ("constant", 0.0, 0)
    assert resolve_method({"name": "fedavg"})[1].salt is None
    assert resolve_method({"name": "fedism_plus"})[1].salt.power == 0.5


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"name": "fedizm"}, "fedism"),
        ({"name": "fedism", "salt": None, "saga": False}, "use method: fedavg"),
        ({"name": "fedism", "beta": 0.0}, "beta"),
        ({"name": "fedism", "beta": 1.5}, "beta"),
        ({"name": "fedism", "q": -1}, "q"),
        ({"name": "fedism", "Q": 2}, "Q"),
        ({"name": "fedism", "salt": {"rho": 0}}, "rho"),
        ({"name": "fedism", "salt": {"alpha": -0.1}}, "alpha"),
        ({"name": "fedism", "salt": {"radius": "fixed"}}, "radius"),
        ({"name": "fedavg", "local_epochs": 0}, "local_epochs"),
        ({"name": "fedavg", "learning_rate": 0}, "learning_rate"),
        ({"name": "fedavg", "q": 2}, "q"),
    ],
)
def test_what_is_wrong_is_named(section, told):
    with pytest.raises(ConfigError, match=told):
        resolve_method(section)


@pytest.mark.parametrize("value", [True, {}, {"rho": 0.05}])
def test_salt_can_be_switched(value):
    assert resolve_method({"name": "fedavg", "salt": value})[1].salt.rho == 0.05
    assert resolve_method({"name": "fedavg", "salt": False})[1].salt is None


def test_bounds_are_allowed():
    settings = resolve_method({"name": "fedism", "beta": 1.0, "q": 0})[1]
    assert (settings.beta, settings.q) == (1.0, 0.0)
    assert resolve_method({"name": "fedism", "salt": {"alpha": 0}})[1].salt.alpha == 0


def test_warm_up_and_growth_of_the_radius():
    salt = resolve_method({"name": "fedism", "salt": {"rho": 0.4, "warmup": 4}})[1].salt
    assert [salt.ball(t, 10)["rho"] for t in (1, 2, 4, 5)] == pytest.approx([0.1, 0.2, 0.4, 0.4])
    salt = resolve_method({"name": "fedism", "salt": {"rho": 0.4, "power": 2}})[1].salt
    assert [salt.ball(t, 2)["rho"] for t in (1, 2)] == pytest.approx([0.1, 0.4])


def test_measured_radius_is_that_of_training_unless_it_is_bounded_or_said_otherwise():
    def probe(**settings):
        ball = resolve_method({"name": "fedism", **settings})[1].probe.ball(1, 1)
        return ball["rho"], ball["radius"]

    assert probe() == (0.05, "constant")
    assert probe(salt={"rho": 0.2, "radius": "relative"}) == (0.2, "relative")
    assert probe(salt={"rho": 0.2, "radius": "bounded"}) == (0.2, "constant")
    assert probe(salt={"rho": 0.2}, measure={"rho": 0.01, "radius": "adaptive"}) == (0.01, "adaptive")
    assert probe(salt=False) == (0.05, "constant")


def test_methods_say_what_leaves_the_client():
    assert get_method("fedavg").sends == "sample count"
    for name in ("fedism", "fedism_plus"):
        assert get_method(name).sends == "sample count, sharpness, loss of the received model"
