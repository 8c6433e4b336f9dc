"""Client memory: stays at the client, follows the server back after a restart."""

from __future__ import annotations

import re

import pytest
import torch
from toy import make_server

from medfed.federation.memory import ClientMemory, client_folder, newest_memory
from medfed.federation.messages import Message
from medfed.federation.state import load_state, save_state


def test_memory_holds_tensors_and_values_over_processes(tmp_path):
    memory = ClientMemory(tmp_path)
    memory.open(step=1, confirmed=0)
    memory["labels"] = torch.tensor([1, 2])
    memory["note"] = {"a": [1, None]}
    memory.save(1)
    again = ClientMemory(tmp_path)
    again.open(step=2, confirmed=1)
    assert torch.equal(again["labels"], torch.tensor([1, 2]))
    assert again["note"] == {"a": [1, None]}


def test_stored_tensor_does_not_follow_later_changes():
    memory = ClientMemory()
    labels = torch.zeros(2)
    memory["labels"] = labels
    labels += 1
    assert torch.equal(memory["labels"], torch.zeros(2))


def test_repeated_request_starts_from_what_was_known_before_it(tmp_path):
    memory = ClientMemory(tmp_path)
    for step in (1, 2, 3):
        memory.open(step, confirmed=step - 1)
        memory["n"] = memory.get("n", 0) + 1
        memory.save(step)
    memory.open(step=3, confirmed=2)  # the server lost request 3
    assert memory["n"] == 2


def test_changes_of_a_failed_task_are_forgotten(tmp_path):
    memory = ClientMemory(tmp_path)
    memory.open(1, 0)
    memory["n"] = 1
    memory.save(1)
    memory.open(2, 1)
    memory["n"] = 99  # the task fails here: no save
    memory.open(3, 1)
    assert memory["n"] == 1


def test_old_versions_do_not_pile_up(tmp_path):
    memory = ClientMemory(tmp_path)
    for step in range(1, 30):
        memory.open(step, confirmed=step - 1)
        memory["n"] = step
        memory.save(step)
    assert len(list(tmp_path.iterdir())) <= 3


def test_many_requests_between_two_checkpoints_keep_few_versions_and_the_way_back(tmp_path):
    memory = ClientMemory(tmp_path)
    for step in range(1, 30):
        memory.open(step, confirmed=min(step - 1, 4))
        memory["n"] = step
        memory.save(step)
        assert len(list(tmp_path.iterdir())) <= 4
    for step in (29, 4, 3):
        again = ClientMemory(tmp_path)
        again.open(step + 1, confirmed=min(step, 4))
        assert again["n"] == step


def test_memory_refuses_objects():
    with pytest.raises(TypeError, match="not a plain value"):
        ClientMemory()["x"] = object()


def test_memory_without_a_folder_forgets_failed_changes():
    memory = ClientMemory()
    memory.open(1, 0)
    memory["n"] = 1
    memory.save(1)
    memory.open(2, 1)
    memory["n"] = 99
    memory.open(3, 1)
    assert memory["n"] == 1


@pytest.mark.parametrize("killed_after", [0, 1, 2])
def test_server_restart_repeats_requests_with_the_same_answers(tmp_path, killed_after):
    """Three asks a round; the server dies after some of round 2's, having saved after round 1."""
    sizes = {"c0": 1, "c1": 1}

    def rounds(server, stop_in_round_2_after=None):
        seen = []
        for round in server.rounds():
            for i in range(3):
                if round == 2 and i == stop_in_round_2_after:
                    return seen
                replies = server.ask("remember", Message.of({}, model=server.model))
                seen.append((round, i, replies.value("asked")))
            server.state.round = round
            server.save()
        return seen

    whole = rounds(make_server(sizes, tmp_path / "a", save=lambda s: save_state(s, tmp_path / "sa")))
    rounds(make_server(sizes, tmp_path / "b", save=lambda s: save_state(s, tmp_path / "sb")), killed_after)
    state = load_state(tmp_path / "sb")
    resumed = rounds(make_server(sizes, tmp_path / "b", state=state, save=lambda s: save_state(s, tmp_path / "sb")))
    assert resumed == whole[3:]


@pytest.mark.parametrize("fresh", [False, True], ids=["one process", "a process a request"])
def test_versions_of_both_checkpoints_are_kept_however_many_requests_lie_between_them(tmp_path, fresh):
    checkpoints, memory, changed = [0], ClientMemory(tmp_path), {0: None}
    for step in range(1, 30):
        memory = ClientMemory(tmp_path) if fresh else memory
        memory.open(step, confirmed=checkpoints[-1])
        for checkpoint in (step - 1, *checkpoints[-2:]):
            known = changed[max(s for s in changed if s <= checkpoint)]
            assert newest_memory(tmp_path, checkpoint).get("n") == known
        if step not in (7, 8, 9, 10, 17):
            memory["n"] = changed[step] = step
        memory.save(step)
        assert len(list(tmp_path.iterdir())) <= 4
        if step in (2, 3, 8, 10, 11, 17, 18, 24):
            checkpoints.append(step)


def test_versions_of_before_the_checkpoint_stood_in_their_names_are_read(tmp_path):
    memory = ClientMemory(tmp_path)
    memory.open(1, 0)
    memory["n"] = 1
    memory.save(1)
    (path,) = tmp_path.iterdir()
    path.rename(tmp_path / "memory-00000001.safetensors")
    again = ClientMemory(tmp_path)
    again.open(3, 2)
    assert dict(again) == newest_memory(tmp_path) == {"n": 1}


NAMES = [
    "client_00", "north", "North", "NORTH", "st. mary's/№1", "St. Mary's/№1", "..", ".", "", "a/b", "a\\b", "a-b",
    "con", "nul", "x" * 61, "x" * 5000, "Ünïversität", "\ud800", "a b", "a  b", "a~b",
]  # fmt: skip


def test_folders_of_clients_are_of_their_own_on_every_file_system():
    folders = [client_folder(name) for name in NAMES]
    assert len({f.lower() for f in folders}) == len(NAMES)
    for folder in folders:
        assert re.fullmatch(r"[a-z0-9~_-]{1,80}", folder)
    assert folders[:2] == ["client_00", "north"]
    assert client_folder(client_folder("North")) != client_folder("North")


def test_what_is_read_is_a_copy_so_that_a_resumed_run_knows_the_same(tmp_path):
    for memory in (ClientMemory(tmp_path), ClientMemory()):
        given = {"kept": [1]}
        memory.open(1, 0)
        memory["labels"], memory["note"] = torch.zeros(2), given
        memory.save(1)
        memory.open(2, 1)
        memory["labels"][0] = 9.0  # not set again
        memory["note"]["kept"].append(2)
        given["kept"].append(3)
        memory.save(2)
        memory.open(3, 2)
        assert memory["labels"].tolist() == [0.0, 0.0]
        assert memory["note"] == {"kept": [1]}
    again = ClientMemory(tmp_path)
    again.open(3, 2)
    assert again["note"] == {"kept": [1]}
    assert again["labels"].tolist() == [0.0, 0.0]


def test_request_that_changes_nothing_writes_nothing(tmp_path):
    memory = ClientMemory(tmp_path)
    memory.open(1, 0)
    memory.save(1)
    assert not list(tmp_path.iterdir())
    memory["n"] = 1
    memory.save(1)
    memory.open(2, 1)
    memory["n"] = 2  # the task fails here
    memory.open(3, 1)
    memory.save(3)
    assert [p.name for p in tmp_path.iterdir()] == ["memory-00000001-00000000.safetensors"]


def test_versions_of_a_lost_future_are_gone_for_good(tmp_path):
    memory = ClientMemory(tmp_path)
    for step in (1, 2, 3):
        memory.open(step, confirmed=step - 1)
        memory["n"] = step
        memory.save(step)
    again = ClientMemory(tmp_path)
    again.open(3, confirmed=2)  # repeated, and this time it changes nothing
    again.save(3)
    again.open(4, confirmed=3)
    assert again["n"] == 2


def test_what_is_deleted_stays_deleted(tmp_path):
    memory = ClientMemory(tmp_path)
    memory.open(1, 0)
    memory["a"], memory["b"] = 1, 2
    memory.save(1)
    memory.open(2, 1)
    del memory["a"]
    memory.save(2)
    again = ClientMemory(tmp_path)
    again.open(3, 2)
    assert (dict(again), len(again)) == ({"b": 2}, 1)
