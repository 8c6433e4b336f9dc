"""Methods against label noise, killed in every stage, go on bit by bit, with what their clients keep."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from planted import memories
from test_fednoro import six_clients
from test_rhfl import public
from tiny_federation import Federation

from medfed.federation.state import load_state, same_state, save_state
from medfed.methods.registry import get_method

ROUNDS = 4
SECTIONS = {
    "fedlsr": {"name": "fedlsr", "local_epochs": 1},
    "fedelc": {"name": "fedelc", "local_epochs": 2, "warmup": 1},
    "fedcorr": {
        "name": "fedcorr", "local_epochs": 1, "iterations": 2, "fine_tuning": 1, "neighbours": 4, "confidence": 0.3,
    },
    "rofl": {"name": "rofl", "local_epochs": 1, "pseudo_from": 1, "gradual": 2},
    "rhfl": {"name": "rhfl", "pretraining": 1},
    "rhfl, as released": {"name": "rhfl", "pretraining": 1, "form": "as_released"},
    "fedelc, as released": {"name": "fedelc", "local_epochs": 2, "warmup": 1, "form": "as_released"},
    "fedned": {
        "name": "fedned", "local_epochs": 1, "warmup": 1, "uncertainty": 1.0, "confidence": 0.4, "images": 8,
        "steps": 2,
    },
}  # fmt: skip
# A save is counted (1 is the first checkpoint); or a task is named with the round in which its replies are lost, and
# where it is asked several times a round, which time.
KILLS = [
    ("fedlsr", 2),
    ("fedelc", 1),
    ("fedelc", 2),
    ("fedelc", ("class_losses", 2)),
    ("fedelc", ("train_by_status", 3)),
    ("fedcorr", 1),
    ("fedcorr", ("train", 1)),
    ("fedcorr", ("correct", 2)),
    ("fedcorr", ("train", 3)),
    ("fedcorr", ("correct", 4)),
    ("rofl", ("train", 1)),
    ("rofl", 3),
    ("rhfl", 1),
    ("rhfl", ("pretrain", 1)),
    ("rhfl", ("predict", 2)),
    ("rhfl", ("train", 3)),
    ("rhfl, as released", 2),
    ("rhfl, as released", ("predict", 2, 2)),
    ("rhfl, as released", ("train", 3, 2)),
    ("rhfl, as released", ("train", 3, 3)),
    ("fedelc, as released", ("train_by_status", 3)),
    ("fedned", 2),
    ("fedned", ("train_judged", 3)),
]


class Killed(BaseException):
    pass


def federation(name, folder, **options):
    shown = public(12) if get_method(SECTIONS[name]["name"]).public else None
    return Federation(
        SECTIONS[name], six_clients(), network="Normed", rounds=ROUNDS, folder=folder, public=shown, **options
    )


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """A whole run of each method, made once."""
    done = {}

    def of(name):
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            whole = federation(name, folder).run()
            done[name] = whole, memories(whole, folder)
        return done[name]

    return of


def untimed(records):
    return [{**r, "seconds": 0} for r in records]


@pytest.mark.parametrize(("name", "kill"), KILLS)
def test_killed_run_goes_on_bitwise(wholes, tmp_path, name, kill):
    whole, kept = wholes(name)
    saves = []

    def save(state):
        save_state(state, tmp_path / "checkpoint")
        saves.append(1)
        if len(saves) == kill:
            raise Killed

    first = federation(name, tmp_path, save=save)
    ask, asked = first.server.ask, Counter()

    def failing(task, *args, **options):
        replies = ask(task, *args, **options)
        at = task, first.server.round
        asked[at] += 1
        if kill in (at, (*at, asked[at])):
            raise Killed
        return replies

    first.server.ask = failing
    with pytest.raises(Killed):
        first.run()
    state = load_state(tmp_path / "checkpoint")
    done = state.round if state else 0
    assert done < ROUNDS
    second = federation(name, tmp_path).run()
    models = [*first.models[:done], *second.models]
    assert all(same_state(a, b) for a, b in zip(models, whole.models, strict=True))
    assert untimed([*first.records[:done], *second.records]) == untimed(whole.records)
    now = memories(second, tmp_path)
    for client, memory in kept.items():
        assert memory.keys() == now[client].keys()
        for item, value in memory.items():
            same = (
                torch.equal(value, now[client][item]) if isinstance(value, torch.Tensor) else value == now[client][item]
            )
            assert same, (client, item)
