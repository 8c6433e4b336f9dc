"""Checkpoints: atomic, exact, without pickle, and clear when the disk is full."""

from __future__ import annotations

import errno

import pytest
import torch

from medfed.errors import FederationError
from medfed.federation import state as module
from medfed.federation.messages import Message
from medfed.federation.state import ServerState, load_state, same_state, save_state


def example(round: int = 4) -> ServerState:
    generator = torch.Generator().manual_seed(round)
    model = {
        "w": torch.randn(3, 2, generator=generator),
        "half": torch.randn(4, generator=generator).half(),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0),
    }
    notes = {
        "weights": Message(values={"client/0": 0.1, "β": 1e-300}),
        "centroids": Message({"c/x": torch.eye(2, dtype=torch.float64)}, {"kept": [1, None, "a"]}),
    }
    return ServerState(model, round, 9, notes)


def test_state_comes_back_bitwise(tmp_path):
    save_state(example(), tmp_path)
    back = load_state(tmp_path)
    assert same_state(back.model, example().model)
    assert (back.round, back.step) == (4, 9)
    assert back.notes["weights"].values == {"client/0": 0.1, "β": 1e-300}
    assert same_state(dict(back.notes["centroids"].tensors), {"c/x": torch.eye(2, dtype=torch.float64)})
    assert back.notes["centroids"].values == {"kept": [1, None, "a"]}


def test_views_of_one_buffer_are_saved_apart(tmp_path):
    block = torch.arange(6.0)
    save_state(ServerState({"a": block[:3], "b": block[3:], "c": block.view(2, 3).t()}), tmp_path)
    model = load_state(tmp_path).model
    assert torch.equal(model["b"], torch.tensor([3.0, 4.0, 5.0]))
    assert torch.equal(model["c"], block.view(2, 3).t())


def test_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path, caplog):
    save_state(example(1), tmp_path)
    path = save_state(example(2), tmp_path)
    assert load_state(tmp_path).round == 2
    assert caplog.text == ""
    path.write_bytes(path.read_bytes()[:40])
    assert load_state(tmp_path).round == 1
    assert "state.safetensors" in caplog.text
    assert "of round 1" in caplog.text


def test_checkpoint_of_a_kill_between_its_two_renames_is_the_one_before(tmp_path, caplog):
    path = save_state(example(1), tmp_path)
    path.rename(tmp_path / "previous.safetensors")
    assert load_state(tmp_path).round == 1
    assert "is missing" in caplog.text


def test_damaged_checkpoint_does_not_take_the_place_of_the_whole_one(tmp_path):
    save_state(example(1), tmp_path)
    save_state(example(2), tmp_path).write_bytes(b"damaged")
    save_state(example(2), tmp_path).write_bytes(b"damaged again")
    assert load_state(tmp_path).round == 1


def test_disk_that_does_not_give_the_newest_checkpoint_now_undoes_no_round(tmp_path, monkeypatch):
    save_state(example(1), tmp_path)
    save_state(example(2), tmp_path)
    genuine = module.safe_open

    def failing(path, **options):
        if path.name == "state.safetensors":
            raise OSError(errno.EIO, "Input/output error")
        return genuine(path, **options)

    monkeypatch.setattr(module, "safe_open", failing)
    with pytest.raises(FederationError, match=r"state\.safetensors: cannot be read .*Input/output error.*resume"):
        load_state(tmp_path)
    monkeypatch.undo()
    assert load_state(tmp_path).round == 2


def test_no_readable_checkpoint_is_said(tmp_path):
    path = save_state(example(), tmp_path)
    path.write_bytes(b"")
    with pytest.raises(FederationError, match="no checkpoint can be read"):
        load_state(tmp_path)


def test_nothing_there_is_not_a_fault(tmp_path):
    assert load_state(tmp_path / "none") is None


@pytest.mark.parametrize("where", ["save_file", "fsync"])
def test_full_disk_keeps_the_last_checkpoint_and_says_what_to_do(tmp_path, monkeypatch, where):
    save_state(example(1), tmp_path)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((module, "save_file") if where == "save_file" else (module.os, "fsync")), full)
    with pytest.raises(FederationError, match=r"the disk is full.*make room"):
        save_state(example(2), tmp_path)
    monkeypatch.undo()
    assert load_state(tmp_path).round == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state.safetensors"]


def test_value_that_is_not_plain_is_refused(tmp_path):
    state = ServerState({}, notes={"x": Message(values={"a": torch.zeros(1)})})
    with pytest.raises(TypeError, match="not a plain value"):
        save_state(state, tmp_path)


def test_a_full_file_system_for_real(tmp_path):
    """The same on a real, tiny file system where one can be mounted."""
    import os
    import subprocess

    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", mount], capture_output=True).returncode:
        pytest.skip("cannot mount a file system here")
    try:
        save_state(ServerState({"w": torch.zeros(1000)}, round=1), mount)
        with pytest.raises(FederationError, match="disk is full"):
            save_state(ServerState({"w": torch.zeros(100_000)}, round=2), mount)
        assert load_state(mount).round == 1
    finally:
        subprocess.run(["umount", mount], check=True)
        os.sync()
