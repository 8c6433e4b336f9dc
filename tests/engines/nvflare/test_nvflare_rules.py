"""Participation and refusals over NVFlare's own task management: the same rules as on the local engine."""

from __future__ import annotations

import gc
import hashlib
import threading
import time
import weakref

import pytest
import torch
from flare import flare
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply
from toy import make_server, round_of

from medfed.engines.nvflare.engine import Aborted
from medfed.engines.nvflare.wire import pack
from medfed.federation.messages import Message
from medfed.federation.server import Patience
from medfed.federation.state import same_state
from medfed.ledger import differences, read_ledger

SIZES = {"c0": 1, "c1": 3, "c2": 2}


def ask(task="train", values=None, **options):
    options.setdefault("mean", "model")
    return lambda server: server.ask(task, Message.of(values, model=server.model), **options)


def reasons(replies):
    return {r.client: r.reason for r in replies.refused}


def test_the_mean_is_bitwise_that_of_the_local_engine_whoever_is_faster(tmp_path):
    alone = round_of(make_server(SIZES), ask())
    with flare(SIZES, tmp_path, delays={"c0": 0.2}) as f:
        replies = round_of(f.server(SIZES), ask())
    assert replies.clients == ("c0", "c1", "c2")
    assert same_state(replies.mean["model"], alone.mean["model"])


def test_integer_buffers_stay_integers(tmp_path):
    with flare(SIZES, tmp_path) as f:
        replies = round_of(f.server(SIZES), ask())
    count = replies.mean["model"]["count"]
    assert count.dtype == torch.int64
    assert int(count) == 4  # each client adds one to 3


def test_a_client_that_sends_nan_is_left_out_and_the_others_are_averaged(tmp_path):
    with flare(SIZES, tmp_path) as f:
        replies = round_of(f.server(SIZES), ask("odd", {"kinds": {"c1": "nan", "c2": "nan value"}}))
    assert replies.clients == ("c0",)
    assert reasons(replies) == {"c1": "'model/w' holds NaN or infinite numbers", "c2": "value.loss is not finite"}
    assert torch.isfinite(replies.mean["model"]["w"]).all()


def test_a_client_that_crashes_is_refused_without_its_paths_and_is_back_in_the_next_round(tmp_path):
    with flare(SIZES, tmp_path) as f:
        server = f.server(SIZES)
        for number in server.rounds():
            if number == 1:
                replies = ask("crash", {"who": "c1"})(server)
                assert reasons(replies) == {"c1": "failed with RuntimeError"}
                assert replies.clients == ("c0", "c2")
            else:
                assert ask()(server).clients == ("c0", "c1", "c2")
                break
            server.state.round = number


def test_a_site_whose_executor_fails_is_refused(tmp_path):
    def fail(_):
        return make_reply(ReturnCode.EXECUTION_EXCEPTION)

    with flare(SIZES, tmp_path, tampers={"c2": fail}) as f:
        replies = round_of(f.server(SIZES), ask())
    assert reasons(replies) == {"c2": f"failed ({ReturnCode.EXECUTION_EXCEPTION})"}


def test_failed_replies_do_not_count_towards_the_quorum(tmp_path):
    """NVFlare would count the crashed client and close the task with one good reply."""
    with flare(SIZES, tmp_path, delays={"c2": 0.5}) as f:
        patience = Patience(quorum=2, grace=0.05)
        replies = round_of(f.server(SIZES, patience=patience), ask("crash", {"who": "c1"}))
    assert replies.clients == ("c0", "c2")  # c2 was waited for: c0 and a failure make no quorum of two


def test_a_reply_that_cannot_be_admitted_does_not_start_the_grace(tmp_path):
    with flare(SIZES, tmp_path, delays={"c2": 0.5}) as f:
        patience = Patience(quorum=2, grace=0.05)
        replies = round_of(f.server(SIZES, patience=patience), ask("odd", {"kinds": {"c1": "nan"}}))
    assert replies.clients == ("c0", "c2")


def test_a_quorum_that_is_missed_refuses_all_and_keeps_the_model(tmp_path):
    with flare(SIZES, tmp_path, absent=("c1", "c2")) as f:
        replies = round_of(f.server(SIZES, patience=Patience(quorum=2)), ask())
    assert len(replies) == 0
    assert reasons(replies)["c1"] == "is not connected"
    assert reasons(replies)["c0"] == "quorum of 2 not reached (1 admitted)"


def test_who_is_later_than_the_grace_is_refused_and_what_it_sends_is_written_down_and_ignored(tmp_path):
    with flare(SIZES, tmp_path, delays={"c2": 4}) as f:
        server = f.server(SIZES, patience=Patience(quorum=2, grace=0.5))
        started = time.monotonic()
        replies = round_of(server, ask())
        assert time.monotonic() - started < 3.5
        assert replies.clients == ("c0", "c1")
        assert reasons(replies) == {"c2": "did not answer within 0.5 s after the quorum of 2"}
        deadline = time.monotonic() + 30
        while not any(e["late"] for e in read_ledger(f.server_ledger)) and time.monotonic() < deadline:
            time.sleep(0.02)
    late = [e for e in read_ledger(f.server_ledger) if e["late"]]
    assert [e["client"] for e in late] == ["c2"]


def test_who_comes_within_the_grace_is_in(tmp_path):
    with flare(SIZES, tmp_path, delays={"c2": 0.3}) as f:
        replies = round_of(f.server(SIZES, patience=Patience(quorum=1, grace=5)), ask())
    assert replies.clients == ("c0", "c1", "c2")


def test_the_timeout_ends_the_wait_for_one_who_never_answers(tmp_path):
    with flare(SIZES, tmp_path, tampers={"c1": lambda _: None}) as f:
        replies = round_of(f.server(SIZES, patience=Patience(timeout=3)), ask())
    assert reasons(replies) == {"c1": "did not answer within 3 s"}
    assert replies.clients == ("c0", "c2")


def test_a_site_that_comes_back_without_an_answer_is_given_the_task_again(tmp_path):
    """As after a crash of its process, while the others still work."""
    lost = []

    def lose_once(reply):
        lost.append(reply)
        return reply if len(lost) > 1 else None

    with flare(SIZES, tmp_path, tampers={"c0": lose_once}, delays={"c1": 0.3, "c2": 0.3}) as f:
        server = f.server(SIZES)
        for _ in server.rounds():
            assert ask()(server).clients == ("c0", "c1", "c2")
            assert ask()(server).clients == ("c0", "c1", "c2")
            break
        assert f.communicator._task_monitor.is_alive()
    assert len(lost) == 3


def test_an_answer_to_an_earlier_request_is_never_taken_for_the_present_one(tmp_path):
    first = {}

    def replay(reply):
        return first.setdefault("reply", reply)

    with flare(SIZES, tmp_path, tampers={"c1": replay}) as f:
        server = f.server(SIZES)
        for _ in server.rounds():
            assert ask()(server).clients == ("c0", "c1", "c2")
            assert reasons(ask()(server)) == {"c1": "sent no answer to this request"}
            break


def test_an_answer_in_the_name_of_another_client_is_refused(tmp_path):
    def pretend(reply):
        reply["medfed"] = pack(Message.of({"samples": 9}), kind="reply", client="c0", run="run-1", step=1)
        return reply

    with flare(SIZES, tmp_path, tampers={"c1": pretend}) as f:
        replies = round_of(f.server(SIZES), ask())
    assert reasons(replies) == {"c1": "sent an answer of another client or run"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\x80\x04K\x01.", "sent no message: it has no header of medfed"),
        ("text", "sent no message: str instead of bytes"),
        (None, "sent no answer"),
        (b"", "sent no message: it has no header of medfed"),
    ],
)
def test_what_is_no_message_is_refused_by_the_server(tmp_path, body, reason):
    def spoil(reply):
        reply["medfed"] = body
        return reply

    with flare(SIZES, tmp_path, tampers={"c2": spoil}) as f:
        replies = round_of(f.server(SIZES), ask(mean=()))
    assert reasons(replies) == {"c2": reason}


def test_another_schema_is_refused_by_the_server(tmp_path):
    ours = pack(Message(), kind="reply", client="c2", run="run-1", step=1)
    newer = ours.replace(rb"\"schema\": 1", rb"\"schema\": 7")
    assert newer != ours

    def spoil(reply):
        reply["medfed"] = newer
        return reply

    with flare(SIZES, tmp_path, tampers={"c2": spoil}) as f:
        replies = round_of(f.server(SIZES), ask())
    assert reasons(replies) == {"c2": "sent a message of schema 7, not 1: the versions of medfed differ"}


def test_a_task_that_the_method_does_not_know_is_refused_by_the_client_and_the_job_lives(tmp_path):
    with flare(SIZES, tmp_path) as f:
        server = f.server(SIZES)
        for _ in server.rounds():
            assert reasons(ask("dance", mean=())(server)) == dict.fromkeys(SIZES, "knows no task 'dance'")
            assert ask()(server).clients == ("c0", "c1", "c2")
            break


def test_a_site_in_another_run_refuses(tmp_path):
    with flare(SIZES, tmp_path, runs={"c1": "run-2"}) as f:
        replies = round_of(f.server(SIZES), ask())
    # Its refusal names the run that it believes in, so the server does not take it for one of this run.
    assert reasons(replies) == {"c1": "sent an answer of another client or run"}


def test_what_is_too_large_is_refused_by_the_client_by_the_server_and_before_it_is_sent(tmp_path):
    def swell(client, message):
        return Message.of({"samples": 1}, model=message.group("model"), extra={"x": torch.zeros(40_000)})

    tasks = {"swell": swell}
    with flare(SIZES, tmp_path / "a", limits={"c1": 300}, tasks=tasks) as f:
        replies = round_of(f.server(SIZES), ask("train"))
        assert reasons(replies)["c1"].endswith("bytes is larger than the agreed 300 bytes")
    with flare(SIZES, tmp_path / "b", limits={"c1": 1 << 16}, tasks=tasks) as f:
        replies = round_of(f.server(SIZES), ask("swell"))
        assert reasons(replies) == {"c1": "its reply of 0.153 MB is larger than the agreed 65536 bytes"}
    with flare(SIZES, tmp_path / "c", limit=1 << 16, limits={"c2": 1 << 20}, tasks=tasks) as f:
        replies = round_of(f.server(SIZES), ask("swell", clients=["c2"]))
        assert reasons(replies) == {"c2": "sent a message of 0.153 MB is larger than the agreed 65536 bytes"}
    with flare(SIZES, tmp_path / "d", limit=100) as f:
        replies = round_of(f.server(SIZES), ask())
        assert reasons(replies)["c0"].endswith("bytes is larger than the agreed 100 bytes")
        assert not f.ledger_of("c0").exists() or not read_ledger(f.ledger_of("c0"))


def test_values_for_one_client_reach_that_client_alone(tmp_path):
    def told(client, message):
        return Message.of({"samples": 1, "told": dict(message.values)})

    with flare(SIZES, tmp_path, tasks={"told": told}) as f:
        each = {"c0": {"status": "clean"}, "c1": {"status": "noisy"}}
        replies = round_of(f.server(SIZES), ask("told", {"all": 1}, each=each, mean=()))
    assert replies.value("told") == {
        "c0": {"all": 1, "status": "clean"},
        "c1": {"all": 1, "status": "noisy"},
        "c2": {"all": 1},
    }


def test_the_ledgers_of_clients_and_server_are_the_bytes_that_nvflare_was_handed(tmp_path):
    with flare(SIZES, tmp_path) as f:
        server = f.server(SIZES)
        for number in server.rounds():
            ask("crash", {"who": "c1"})(server)
            ask()(server)
            server.state.round = number
        wire = {name: site.sent for name, site in f.sites.items()}
        received = read_ledger(f.server_ledger)
        for name, bodies in wire.items():
            sent = read_ledger(f.ledger_of(name))
            assert len(sent) == len(bodies) == 6
            assert [e["sha256"] for e in sent] == [hashlib.sha256(b).hexdigest() for b in bodies]
            assert [e["bytes"] for e in sent] == [len(b) for b in bodies]
            theirs = [e for e in received if e["client"] == name]
            assert differences(sent, theirs) == ([], [])
            assert [e["sha256"] for e in theirs] == [e["sha256"] for e in sent]
    first = read_ledger(f.ledger_of("c0"))[0]
    assert first["tensors"] == [["model/w", "float32", [2]], ["model/count", "int64", []]]
    assert (first["round"], first["step"], first["task"], first["values"]["samples"]) == (1, 1, "crash", 1)
    refusal = read_ledger(f.ledger_of("c1"))[0]
    assert (refusal["kind"], refusal["reason"]) == ("refusal", "failed with RuntimeError")


def test_a_stopped_job_ends_the_wait(tmp_path):
    with flare(SIZES, tmp_path, tampers={"c1": lambda _: None}) as f:
        threading.Timer(0.3, f.abort.trigger, [True]).start()
        with pytest.raises(Aborted):
            round_of(f.server(SIZES), ask())


def test_client_memory_survives_a_new_start_of_the_site(tmp_path):
    with flare(SIZES, tmp_path) as f:
        server = f.server(SIZES)
        for _ in server.rounds():
            assert ask("remember", mean=())(server).value("asked") == dict.fromkeys(SIZES, 1)
            break
        state = server.state
    with flare(SIZES, tmp_path) as f:
        again = f.server(SIZES, state=state)
        for _ in again.rounds():
            assert ask("remember", mean=())(again).value("asked") == dict.fromkeys(SIZES, 2)
            break
    assert len(read_ledger(f.ledger_of("c0"))) == 2


def test_a_task_that_is_over_is_freed_with_its_model(tmp_path):
    """NVFlare's tasks are rings of references; the server's memory must not grow until Python collects them."""
    kept = []
    gc.disable()
    try:
        with flare(SIZES, tmp_path) as f:
            send = f.controller._post.send
            f.controller._post.send = lambda *args: kept.append(weakref.ref(task := send(*args))) or task
            server = f.server(SIZES, rounds=4)
            for number in server.rounds():
                ask()(server)
                server.state.round = number
            deadline = time.monotonic() + 5
            while any(task() is not None for task in kept[:-1]) and time.monotonic() < deadline:
                time.sleep(0.05)
        assert len(kept) == 4
        assert [task() for task in kept[:-1]] == [None] * 3
    finally:
        gc.enable()
