"""Worker processes: same result for any number of them, in sorted order, and nobody waits for the dead."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "federation"))
from toy import TASKS, make_host, make_server, round_of

from medfed.engines.buffers import SharedBuffer, encode, layout_of
from medfed.engines.pool import PoolEngine
from medfed.errors import FederationError
from medfed.federation.messages import Message
from medfed.federation.state import same_state

SIZES = {f"c{i}": i + 1 for i in range(7)}


@pytest.fixture
def pool(tmp_path):
    engines = []

    def make(workers: int, **options) -> PoolEngine:
        host = functools.partial(make_host, SIZES, tmp_path / "clients")
        engines.append(PoolEngine(tuple(SIZES), host, workers=workers, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def ask(task: str, **values):
    return lambda server: server.ask(task, Message.of(values, model=server.model), mean="model")


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_mean_is_bitwise_that_of_one_process_whoever_is_faster(pool, workers):
    alone = round_of(make_server(SIZES), ask("slow"))
    together = round_of(make_server(SIZES, engine=pool(workers)), ask("slow"))
    assert together.clients == alone.clients == tuple(sorted(SIZES))
    assert same_state(together.mean["model"], alone.mean["model"])


def test_several_requests_reuse_the_slots(pool):
    server = make_server(SIZES, engine=pool(2, model_bytes=64 << 20), rounds=1)
    assert server.engine._slots == 2

    def many(server):
        return [server.ask("train", Message.of({"i": i}, model=server.model)) for i in range(5)]

    for replies in round_of(server, many):
        assert [float(r.group("model")["w"][0]) for r in replies] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def test_dead_worker_takes_only_its_own_clients_out(pool):
    server = make_server(SIZES, engine=pool(2), rounds=2)
    replies = round_of(server, ask("die", who="c3"))
    lost = {r.client: r.reason for r in replies.refused}
    assert "c3" in lost
    assert len(lost) <= 2
    assert "its worker process died (exit code 9)" in lost["c3"]
    server.state.round = 1
    assert len(round_of(server, ask("train"))) == 7


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_run_without_any_worker_left_ends(pool, rounds):
    """It once went on to its last round without training, and was called completed."""
    server = make_server(SIZES, engine=pool(1), rounds=rounds)
    with pytest.raises(FederationError, match=r"all 1 worker processes died \(exit codes 9\)"):
        round_of(server, ask("die", who="c1"))
    with pytest.raises(FederationError, match="all 1 worker"):
        round_of(server, ask("train"))


def test_a_second_interrupt_leaves_no_shared_memory_and_no_worker(pool, monkeypatch):
    engine = pool(2)
    processes = list(engine._workers)
    real = type(processes[0]).join

    def join(self, timeout=None):
        monkeypatch.setattr(type(processes[0]), "join", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(processes[0]), "join", join)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert not engine._folder.exists()
    assert not any(p.is_alive() for p in processes)


def test_who_is_interrupted_at_work_does_not_wait_for_it(pool, monkeypatch):
    """The answers of that round are of no use any more."""
    from medfed.engines import pool as module
    from medfed.federation.client import Request
    from medfed.federation.server import Patience

    engine = pool(2)

    def strike(pipes):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "wait", strike)
    request = Request("linger", 1, 1, 0, Message.of({}, model={"w": torch.zeros(1)}))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(engine.exchange(request, sorted(SIZES), Patience()))
    engine.close()
    assert time.monotonic() - began < 4.5  # each client takes five seconds


def test_no_room_for_shared_memory_is_said(tmp_path, monkeypatch):
    """A file with holes ends the process that writes where no room is left, without a word."""
    import errno
    import os

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FederationError, match=r"no room for 4 MB that processes share: No space left"):
        SharedBuffer(tmp_path / "b").pack({"a": torch.ones(1_000_000)})


def test_shared_memory_has_no_holes(tmp_path):
    SharedBuffer(tmp_path / "b").pack({"a": torch.zeros(1_000_000)})
    assert (tmp_path / "b").stat().st_blocks * 512 >= 4_000_000


def test_crash_in_a_worker_is_a_refusal(pool):
    replies = round_of(make_server(SIZES, engine=pool(2)), ask("crash", who="c2"))
    assert [(r.client, r.reason) for r in replies.refused] == [("c2", "failed with RuntimeError")]


def test_listener_that_leaves_half_way_does_not_disturb_the_next_request(pool):
    from medfed.federation.client import Request
    from medfed.federation.server import Patience

    engine = pool(2)
    names = sorted(SIZES)
    stream = engine.exchange(Request("train", 1, 1, 0, Message.of({}, model={"w": torch.zeros(1)})), names, Patience())
    next(stream)
    stream.close()
    answers = dict(
        engine.exchange(Request("train", 1, 2, 0, Message.of({}, model={"w": torch.ones(1)})), names, Patience())
    )
    assert len(answers) == 7
    assert float(answers["c6"].group("model")["w"]) == 8.0


@pytest.mark.parametrize("where", ["encode", "decode"])
def test_an_interrupt_ends_a_request_wherever_it_strikes(pool, monkeypatch, where):
    """Struck between the sending of a client and its counting, it made the engine wait for an answer for ever."""
    from medfed.engines import pool as module
    from medfed.federation.client import Request
    from medfed.federation.server import Patience

    engine = pool(2)
    right = getattr(module, where)

    def strike(*args, **fields):
        if where == "encode" and args[0] != "client":
            return right(*args, **fields)
        monkeypatch.setattr(module, where, right)
        monkeypatch.setattr(module, "wait", lambda pipes: pytest.fail("waits for what may never come"))
        raise KeyboardInterrupt

    monkeypatch.setattr(module, where, strike)
    stream = engine.exchange(
        Request("train", 1, 1, 0, Message.of({}, model={"w": torch.zeros(1)})), sorted(SIZES), Patience()
    )
    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert torch.get_num_threads() == threads
    engine.close()
    assert not engine._folder.exists()


def test_shared_folder_is_removed(tmp_path):
    engine = PoolEngine(tuple(SIZES), functools.partial(make_host, SIZES), workers=1)
    folder = engine._folder
    assert folder.exists()
    engine.close()
    assert not folder.exists()


def runs(pid: str) -> bool:
    """Whether a process still runs; where nobody collects orphans (no init in a container), ended ones stay listed."""
    try:
        return psutil.Process(int(pid)).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def test_killed_server_leaves_no_worker_and_no_shared_memory(tmp_path):
    code = f"""
import functools, os, sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "federation")!r})
from toy import make_host
from medfed.engines.pool import PoolEngine
engine = PoolEngine(("a",), functools.partial(make_host, {{"a": 1}}), workers=2)
print(engine._folder, *(p.pid for p in engine._workers), flush=True)
sys.stdin.read()
"""
    server = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    folder, *workers = server.stdout.readline().split()
    assert Path(folder).exists()
    server.kill()
    server.wait()
    until = time.monotonic() + 30
    while time.monotonic() < until and (Path(folder).exists() or any(map(runs, workers))):
        time.sleep(0.2)
    assert not Path(folder).exists()
    assert not any(map(runs, workers))


@pytest.mark.parametrize("busy", [False, True])
def test_a_worker_whose_server_died_before_it_began_ends_too(tmp_path, monkeypatch, busy):
    """Its parent is another process by then; it once took that one for the server, and stayed for ever."""
    import multiprocessing

    from medfed.engines import pool as module

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = tmp_path / "shared"
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    host = functools.partial(make_host, SIZES, tmp_path / "clients")
    ours.send_bytes(encode("request", task="remember", round=1, step=1, confirmed=0, values={}, layout=[], size=0))
    ours.send_bytes(encode("client", client="c0", own={}))
    if busy:  # the thread that looks has not looked yet: a client whose memory a resumed run uses is not served
        monkeypatch.setattr(module, "when_orphaned", lambda parent, do: None)
    worker = context.Process(target=module._work, args=(theirs, host, 1, str(folder), 0, 2, gone.pid), daemon=True)
    worker.start()
    worker.join(30)
    assert worker.exitcode == 1
    assert not folder.exists()
    assert not [p for p in (tmp_path / "clients").rglob("*") if p.is_file()]


def test_buffer_grows_and_keeps_types(tmp_path):
    writer, reader = SharedBuffer(tmp_path / "b"), SharedBuffer(tmp_path / "b")
    for size in (3, 5000, 2):
        tensors = {
            "f": torch.arange(size, dtype=torch.float32),
            "i": torch.tensor(2**40),
            "b": torch.tensor([True, False, True]),
            "h": torch.ones(size, dtype=torch.bfloat16),
            "e": torch.zeros(0, 4),
        }
        layout, total = writer.pack(tensors)
        assert same_state(reader.views(layout, total), tensors)


def test_buffer_keeps_its_views_until_the_layout_changes(tmp_path):
    writer = SharedBuffer(tmp_path / "b")
    model = {"w": torch.arange(3.0), "n": torch.tensor(1)}
    layout, size = writer.pack(model)
    first = writer.views(layout, size)
    writer.pack({k: t + 1 for k, t in model.items()})
    assert writer.views(layout, size)["w"] is first["w"]
    assert first["w"].tolist() == [1.0, 2.0, 3.0]
    other = {"w": torch.arange(5000.0)}
    assert same_state(writer.views(*writer.pack(other)), other)


def test_layout_that_changes_between_requests_is_told_again(pool):
    server = make_server(SIZES, engine=pool(2, model_bytes=64 << 20), rounds=1)
    models = [{"w": torch.zeros(n), "count": torch.tensor(0)} for n in (2, 2, 5000, 3, 3)]

    def many(server):
        return [server.ask("train", Message.of({}, model=m)) for m in models]

    for model, replies in zip(models, round_of(server, many)):
        for reply, samples in zip(replies, SIZES.values()):
            assert reply.group("model")["w"].tolist() == [float(samples)] * len(model["w"])


def test_server_that_waits_uses_no_processor(pool):
    server = make_server(SIZES, engine=pool(2), rounds=1)
    round_of(server, ask("train"))
    server.state.round = 0
    before = time.process_time()
    round_of(server, ask("nap"))
    assert time.process_time() - before < 0.3  # of a second and more of waiting


def test_server_takes_one_thread_while_workers_train_and_all_of_its_own_after(pool):
    from medfed.federation.client import Request
    from medfed.federation.server import Patience

    engine, before = pool(2), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        request = Request("train", 1, 1, 0, Message.of({}, model={"w": torch.zeros(1)}))
        during = [torch.get_num_threads() for _ in engine.exchange(request, sorted(SIZES), Patience())]
        assert set(during) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_layout_aligns_every_tensor():
    layout, total = layout_of({"a": torch.zeros(1, dtype=torch.uint8), "b": torch.zeros(3)})
    assert [offset for *_, offset in layout] == [0, 64]
    assert total == 128


def test_toy_tasks_are_all_known():
    assert {"train", "slow", "nap", "die", "crash"} <= set(TASKS)
