"""The round loop: what is written in which order, and that a killed run goes on as if nothing had happened."""

from __future__ import annotations

import pytest
import torch
from toy import TASKS, make_server

from medfed.federation.loop import run_rounds
from medfed.federation.messages import Message
from medfed.federation.method import Method, MethodSettings
from medfed.federation.state import load_state, same_state, save_state

SIZES = {"c0": 1, "c1": 3, "c2": 2}


class Killed(BaseException):
    """Stands for a signal: not an Exception, so nothing may catch it."""


def staged(server, settings):
    """Identify once, then train: the shape of OCT-FedSIR's protocol."""
    status = server.once("status", lambda: identify(server))
    for _ in server.rounds():
        replies = server.ask("train", Message.of({}, model=server.model), mean="model")
        if replies:
            server.model = {
                k: t * 0.5 + status.values["shift"] if t.is_floating_point() else t
                for k, t in replies.mean["model"].items()
            }
        server.notes["rounds"] = Message(values={"n": len(server.notes)})
        yield server.report(replies, server={"shift": status.values["shift"]})


def identify(server) -> Message:
    replies = server.ask("remember", Message.of({}, model=server.model))
    return Message(values={"shift": float(sum(replies.value("asked").values()))})


METHOD = Method("staged", "", "", staged, TASKS)


def run(folder, *, kill_at=None, rounds=4, method=METHOD):
    log = []
    state = load_state(folder / "checkpoint")
    options = {"state": state} if state else {}

    def save(state):
        if kill_at == ("save", state.round):
            raise Killed
        save_state(state, folder / "checkpoint")

    def append(record):
        if kill_at == ("append", record["round"]):
            raise Killed
        log.append(record)

    def evaluate(server):
        if kill_at == ("evaluate", server.round):
            raise Killed
        return {"evaluation": {"clean": {"sum": float(server.model["w"].sum())}}}

    server = make_server(SIZES, folder / "clients", rounds=rounds, save=save, **options)
    try:
        run_rounds(method, MethodSettings(), server, evaluate=evaluate, append=append)
    except Killed:
        return None, log
    return server.model, log


def without_times(record):
    return {k: v for k, v in record.items() if k != "seconds"}


@pytest.mark.parametrize(
    "kill_at",
    [("save", 0), ("save", 1), ("save", 3), ("append", 1), ("append", 3), ("evaluate", 2), ("save", 4)],
)
def test_killed_anywhere_and_resumed_gives_the_same_run(tmp_path, kill_at):
    whole, log = run(tmp_path / "whole")
    killed, first = run(tmp_path / "killed", kill_at=kill_at)
    assert killed is None
    done = (load_state(tmp_path / "killed" / "checkpoint") or type("", (), {"round": 0})).round
    resumed, second = run(tmp_path / "killed")
    assert same_state(resumed, whole)
    kept = [r for r in first if r["round"] <= done]
    assert [without_times(r) for r in kept + second] == [without_times(r) for r in log]


def counting(server, settings):
    """The model follows what clients remember; two requests a round, the first of all before the first round."""
    server.once("first", lambda: server.ask("remember", Message.of({}, model=server.model)) and Message())
    for _ in server.rounds():
        for _ in range(2):
            replies = server.ask("remember", Message.of({}, model=server.model))
        asked = replies.value("asked")
        server.model = {k: t + sum(asked.values()) for k, t in server.model.items()}
        yield server.report(replies)


COUNTING = Method("counting", "", "", counting, TASKS)


@pytest.mark.parametrize("kill_at", [("evaluate", 3), ("append", 3), ("evaluate", 4)])
def test_resumed_from_the_checkpoint_before_a_damaged_one_gives_the_same_run(tmp_path, kill_at):
    whole, log = run(tmp_path / "whole", method=COUNTING)
    killed = tmp_path / "killed"
    for _ in range(2):  # the second time a restart gets as far again
        assert run(killed, kill_at=kill_at, method=COUNTING)[0] is None
    (killed / "checkpoint" / "state.safetensors").write_bytes(b"damaged")
    done = load_state(killed / "checkpoint").round
    assert done == kill_at[1] - 2
    resumed, second = run(killed, method=COUNTING)
    assert same_state(resumed, whole)
    assert [without_times(r) for r in second] == [without_times(r) for r in log[done:]]


def test_run_that_is_complete_does_nothing_more(tmp_path):
    model, _ = run(tmp_path)
    again, log = run(tmp_path)
    assert log == []
    assert same_state(model, again)


def test_record_holds_what_happened(tmp_path):
    _, log = run(tmp_path, rounds=1)
    record = log[0]
    assert record["admitted"] == ["c0", "c1", "c2"]
    assert record["clients"]["c1"]["samples"] == 3
    assert record["evaluation"] == {"clean": {"sum": pytest.approx((3.0 + 14 / 6 * 2) * 0.5 + 2 * 3.0)}}
    assert set(record["seconds"]) == {"total", "clients", "evaluation"}


def test_listener_hears_of_a_round_only_after_its_checkpoint(tmp_path):
    seen = []

    def listener(record, server):
        seen.append((record["round"], load_state(tmp_path).round))

    server = make_server(SIZES, rounds=2, save=lambda s: save_state(s, tmp_path))
    run_rounds(METHOD, MethodSettings(), server, evaluate=lambda s: {}, append=lambda r: None, listeners=[listener])
    assert seen == [(1, 1), (2, 2)]
    assert torch.isfinite(server.model["w"]).all()


def test_seconds_of_the_rounds_add_up_to_the_time_that_passed():
    import time

    records = []
    server = make_server(SIZES, rounds=4)
    started = time.perf_counter()
    run_rounds(
        METHOD, MethodSettings(), server, evaluate=lambda s: time.sleep(0.02) or {}, append=records.append, listeners=()
    )
    assert sum(r["seconds"]["total"] for r in records) <= time.perf_counter() - started
    assert all(r["seconds"]["total"] >= r["seconds"]["evaluation"] >= 0.02 for r in records)
