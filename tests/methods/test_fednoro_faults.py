"""FedNoRo where clients are missing or answer oddly, and where it is killed: every stage goes on bitwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_fednoro import SECTION, SHORT, six_clients
from tiny_federation import Federation

from medfed.errors import ConfigError
from medfed.federation.messages import Message
from medfed.federation.server import Patience
from medfed.federation.state import load_state, same_state, save_state
from medfed.methods import fednoro
from medfed.methods.noise_aware import train_noise_aware
from medfed.methods.registry import resolve_method

# Clients that are missing.


def failing(task, clients, rounds):
    sound = fednoro.METHOD.tasks[task]

    def unsound(client, message):
        if client.name in clients and client.round in rounds:
            raise RuntimeError("broken")
        return sound(client, message)

    return replace(SHORT, tasks={**SHORT.tasks, task: unsound})


def test_client_that_does_not_answer_at_the_identification_is_undetermined_and_taught():
    data = six_clients()
    told = {}

    def spying(client, message):
        told.setdefault(client.round, {})[client.name] = message.values["status"]
        return train_noise_aware(client, message)

    method = failing("class_losses", {"c0"}, {3})
    method = replace(method, tasks={**method.tasks, "train_by_status": spying})
    done = Federation(method, data, rounds=4).run()
    third = done.records[2]
    assert third["clients"]["c0"]["status"] == "undetermined"
    assert third["clients"]["c0"]["p_clean"] is None
    assert third["server"]["undetermined_clients"] == 1
    assert {"client": "c0", "reason": "failed with RuntimeError"} in third["refused"]
    assert third["admitted"] == sorted(data)
    assert told[3] == told[4] == done.column("status", 3)
    assert done.column("distance", 4)["c0"] > 0
    assert done.server.notes["verdict"].values["posterior"]["c0"] is None


def test_identification_without_quorum_is_made_in_the_next_round():
    data = six_clients()
    method = failing("class_losses", {"c0", "c1"}, {3})
    done = Federation(method, data, rounds=5, patience=Patience(quorum=5)).run()
    assert done.records[2]["warnings"] == [
        "class_losses: quorum of 5 not reached (4 admitted); the previous model is kept"
    ]
    assert done.column("status", 3) == {}
    assert "teacher_weight" not in done.records[2]["server"]
    assert done.records[2]["admitted"] == sorted(data)
    assert set(done.column("status", 4)) == set(data)
    assert done.column("status", 5) == {}
    assert done.server.notes["verdict"].values["round"] == 4
    assert "teacher_weight" in done.records[3]["server"]


def test_round_without_quorum_keeps_the_model():
    data = six_clients()
    done = Federation(failing("train_by_status", set(data), {4}), data, rounds=5).run()
    assert same_state(done.models[3], done.models[2])
    assert done.records[3]["admitted"] == []
    assert done.column("weight", 4) == {}
    assert not same_state(done.models[4], done.models[3])


def test_client_that_fails_in_the_second_stage_leaves_the_others_at_work():
    data = six_clients()
    done = Federation(failing("train_by_status", {"c0"}, {4}), data, rounds=5).run()
    assert done.records[3]["admitted"] == [c for c in sorted(data) if c != "c0"]
    assert sum(done.column("weight", 4).values()) == pytest.approx(1.0)
    assert "c0" in done.column("weight", 5)


@pytest.mark.parametrize("losses", [None, [1.0], [1.0, "x", 2.0], "abc", [True, 1.0, 2.0]])
def test_reply_that_holds_no_losses_leaves_its_client_undetermined(losses):
    def odd(client, message):
        reply = fednoro.class_losses(client, message)
        return Message.of({**reply.values, "class_losses": losses}) if client.name == "c2" else reply

    method = replace(SHORT, tasks={**SHORT.tasks, "class_losses": odd})
    done = Federation(method, six_clients(), rounds=3).run()
    assert done.column("status", 3)["c2"] == "undetermined"
    assert done.records[2]["server"]["undetermined_clients"] == 1


def test_partial_participation_judges_everyone_and_trains_some():
    done = Federation(SECTION, six_clients(), rounds=8, fraction=0.5).run()
    assert len(done.column("status", 3)) == 6
    assert all(len(r["admitted"]) == 3 for r in done.records)
    for round in range(3, 9):
        weights = done.column("weight", round)
        assert set(weights) == set(done.records[round - 1]["admitted"])
        assert sum(weights.values()) == pytest.approx(1.0)


# Stages, settings, resume.


def test_warm_up_must_leave_a_round():
    for rounds in (1, 2):
        with pytest.raises(ConfigError, match="warm-up of 2 rounds leaves none"):
            Federation(SECTION, six_clients(), rounds=rounds).run()


def test_defaults_are_those_of_the_released_code():
    settings = resolve_method({"name": "fednoro"})[1]
    assert (settings.warmup, settings.local_epochs, settings.temperature) == (10, 5, 0.8)
    assert (settings.teacher_weight, settings.ramp_begin, settings.ramp_end) == (0.8, None, 49)
    assert (settings.soften_student, settings.least_count, settings.daagg) == (False, 0.0, True)
    for bad in ({"warmup": 0}, {"teacher_weight": 1.1}, {"temperature": 0}, {"least_count": -1}, {"salt": True}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            resolve_method({"name": "fednoro", **bad})


class Killed(BaseException):
    pass


OPTIONS = {"network": "Normed", "rounds": 5, "dropout": 0.2, "seed": 3}


@pytest.fixture(scope="module")
def whole():
    return Federation(SECTION, six_clients(), **OPTIONS).run()


KILLS = [*(("save", n) for n in (1, 2, 3, 5)), ("task", "class_losses"), ("task", "train_by_status")]


@pytest.mark.parametrize(("kill", "workers"), [*((k, 1) for k in KILLS), (KILLS[2], 2), (KILLS[5], 2)])
def test_killed_in_any_stage_goes_on_bitwise(whole, tmp_path, kill, workers):
    """The third checkpoint is that of the identification, before the first round by status."""
    saves = []

    def save(state):
        save_state(state, tmp_path / "checkpoint")
        saves.append(1)
        if kill == ("save", len(saves)):
            raise Killed

    first = Federation(SECTION, six_clients(), folder=tmp_path, workers=workers, save=save, **OPTIONS)
    ask = first.server.ask

    def dying(task, *args, **options):
        replies = ask(task, *args, **options)
        if kill == ("task", task):
            raise Killed
        return replies

    first.server.ask = dying
    with pytest.raises(Killed):
        first.run()
    done = load_state(tmp_path / "checkpoint").round
    assert done < 5
    second = Federation(SECTION, six_clients(), folder=tmp_path, workers=workers, **OPTIONS).run()
    models = [*first.models[:done], *second.models]
    assert all(same_state(a, b) for a, b in zip(models, whole.models, strict=True))
    records = [{**r, "seconds": 0} for r in [*first.records[:done], *second.records]]
    assert records == [{**r, "seconds": 0} for r in whole.records]
    assert second.server.notes["verdict"] == whole.server.notes["verdict"]


def test_resume_after_an_identification_that_failed(tmp_path):
    options = {"rounds": 5, "patience": Patience(quorum=5)}
    method = failing("class_losses", {"c0", "c1"}, {3})
    expected = Federation(method, six_clients(), **options).run()
    for number in (3, 4, 5):  # the failed attempt, its round, the attempt that succeeds
        folder, saves = tmp_path / str(number), []

        def save(state, folder=folder, saves=saves, number=number):
            save_state(state, folder / "checkpoint")
            saves.append(1)
            if len(saves) == number:
                raise Killed

        first = Federation(method, six_clients(), folder=folder, save=save, **options)
        with pytest.raises(Killed):
            first.run()
        second = Federation(method, six_clients(), folder=folder, **options).run()
        done = len(expected.records) - len(second.records)
        records = [{**r, "seconds": 0} for r in [*first.records[:done], *second.records]]
        assert records == [{**r, "seconds": 0} for r in expected.records]
        assert same_state(second.models[-1], expected.models[-1])
