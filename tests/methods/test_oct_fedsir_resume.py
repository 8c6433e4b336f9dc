"""OCT-FedSIR killed in every stage goes on bit by bit, and corrected labels survive at the client."""

from __future__ import annotations

import pytest
import torch
from planted import federation, memories, planted

from medfed.federation.state import load_state, same_state, save_state

ROUNDS = 4
METHODS = {
    "published": {"name": "oct_fedsir", "period": 2, "stage_one": {"epochs": 1}},
    "evidence": {"name": "oct_fedsir", "period": 2, "identification": "evidence", "stage_one": {"epochs": 1}},
    "fedsir": {"name": "fedsir", "period": 2, "relabel_from": "current", "ramp_end": 0, "stage_one": {"epochs": 1}},
    "pruning": {"name": "pruning", "stage_one": {"epochs": 1}},
    "posterior": {"name": "oct_fedsir", "period": 2, "relabelling": "posterior", "stage_one": {"epochs": 1}},
}


@pytest.fixture(scope="module")
def data():
    return planted().data


@pytest.fixture(scope="module")
def wholes(data, tmp_path_factory):
    """A whole run of each method, made once."""
    done = {}

    def of(name):
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            whole = federation(METHODS[name], data, folder=folder, rounds=ROUNDS).run()
            done[name] = whole, memories(whole, folder)
        return done[name]

    return of


def untimed(records):
    return [{**r, "seconds": 0} for r in records]


def same_memories(one, other):
    assert one.keys() == other.keys()
    for client in one:
        assert one[client].keys() == other[client].keys()
        for name, value in one[client].items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value.nan_to_num(-9), other[client][name].nan_to_num(-9)), (client, name)
            else:
                assert value == other[client][name]


@pytest.mark.parametrize("name", METHODS)
def test_worker_processes_give_bitwise_the_same(name, data, wholes, tmp_path):
    done = federation(METHODS[name], data, folder=tmp_path, workers=2, rounds=ROUNDS).run()
    whole, kept = wholes(name)
    assert all(same_state(a, b) for a, b in zip(done.models, whole.models, strict=True))
    assert untimed(done.records) == untimed(whole.records)
    same_memories(memories(done, tmp_path), kept)


class Killed(BaseException):
    pass


# After the identification is saved; after rounds; and after a request that no checkpoint covers: (request, round).
KILLS = {
    "published": [
        *(("save", 1), ("save", 2), ("save", 3), ("identify", 0), ("stage_one", 0), ("train", 1)),
        *(("describe", 3), ("relabel", 3), ("train", 3), ("train", 4)),
    ],
    "evidence": [("save", 1), ("identify", 0), ("stage_one", 0), ("review", 3), ("relabel", 3), ("train", 3)],
    "fedsir": [("save", 1), ("relabel", 3), ("train", 3), ("save", 4)],
    "pruning": [("save", 1), ("identify", 0), ("train", 2)],
    "posterior": [("save", 2), ("describe", 3), ("relabel", 3), ("train", 4)],
}
CASES = [(n, k) for n, kills in KILLS.items() for k in kills]


@pytest.mark.parametrize(("name", "kill"), CASES, ids=[f"{n}-{k[0]}-{k[1]}" for n, k in CASES])
def test_killed_anywhere_goes_on_bitwise(name, kill, data, wholes, tmp_path):
    saves = []

    def save(state):
        save_state(state, tmp_path / "checkpoint")
        saves.append(1)
        if kill == ("save", len(saves)):
            raise Killed

    first = federation(METHODS[name], data, folder=tmp_path, rounds=ROUNDS, save=save)
    ask = first.server.ask

    def failing(task, *args, **options):
        replies = ask(task, *args, **options)
        if kill == (task, first.server.round):
            raise Killed
        return replies

    first.server.ask = failing
    with pytest.raises(Killed):
        first.run()
    state = load_state(tmp_path / "checkpoint")
    done = state.round if state else 0
    assert done < ROUNDS
    second = federation(METHODS[name], data, folder=tmp_path, rounds=ROUNDS)
    second.run()
    whole, kept = wholes(name)
    assert all(same_state(a, b) for a, b in zip([*first.models[:done], *second.models], whole.models, strict=True))
    assert untimed([*first.records[:done], *second.records]) == untimed(whole.records)
    same_memories(memories(second, tmp_path), kept)


def test_identification_is_not_repeated_after_a_restart(data, tmp_path):
    federation(METHODS["published"], data, folder=tmp_path, rounds=1).run()
    second = federation(METHODS["published"], data, folder=tmp_path, rounds=ROUNDS)
    ask, asked = second.server.ask, []
    second.server.ask = lambda task, *a, **o: asked.append(task) or ask(task, *a, **o)
    second.run()
    assert not {"identify", "stage_one"} & set(asked)
