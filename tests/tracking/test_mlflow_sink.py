"""Tracking against a real sqlite store: structure, crashes, outages, resumption."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from medfed.errors import ConfigError, MedfedError
from medfed.tracking.mlflow_sink import MLflowTracker
from medfed.tracking.pusher import Pusher
from medfed.tracking.records import RecordLog
from medfed.tracking.settings import TrackingSettings, resolve_uri
from medfed.tracking.store import Store
from medfed.tracking.sync import sync

ODD = "St. Mary's/№1"
CLIENTS = ("client_00", ODD)


class Clock:
    """Seconds that pass only when told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory) -> Path:
    """An sqlite store with its tables, made once: that takes longer than a test."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    Store(f"sqlite:///{path}", "other", path.parent)
    return path


@pytest.fixture
def run_dir(tmp_path, empty_store, monkeypatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return make_run(tmp_path)


def make_run(root: Path, name: str = "derm-fedism", **meta) -> Path:
    run = root / name
    run.mkdir(parents=True)
    meta = {"uid": f"uid-{name}", "method": "fedism", "seed": 3, "status": "running", "classes": ["NV", "MEL"], **meta}
    (run / "run.json").write_text(json.dumps(meta))
    (run / "experiment.yaml").write_text("name: derm\nmethod: {name: fedism, q: 2.0}\ncohort: {root: /data/derm}\n")
    return run


def record(round_: int) -> dict:
    return {
        "round": round_,
        "time": 1.8e9 + round_,
        "seconds": {"total": 1.0},
        "clients": {c: {"weight": 0.1 * (k + 1), "loss": 1.0 / round_} for k, c in enumerate(CLIENTS)},
        "evaluation": {"clean": {"balanced_accuracy": 0.1 * round_, "auc_ovo": None}},
        "server": {"odd": float("inf")},
    }


def add(run: Path, *rounds: int) -> None:
    log = RecordLog(run / "records.jsonl")
    for r in rounds:
        log.append(record(r))


def tracker(run: Path, clock=None, **settings) -> MLflowTracker:
    return MLflowTracker(run, TrackingSettings(**settings), clock=clock or Clock())


def client_of(run: Path):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=resolve_uri(TrackingSettings(), run.parent))


def runs_of(run: Path, mlflow=None) -> dict:
    """All runs of the experiment by client, each once; fails on a ghost."""
    mlflow = mlflow or client_of(run)
    experiment = mlflow.get_experiment_by_name("medfed")
    uid = json.loads((run / "run.json").read_text())["uid"]
    found = [r for r in mlflow.search_runs([experiment.experiment_id]) if r.data.tags["medfed.uid"] == uid]
    by_client = {r.data.tags.get("medfed.client", ""): r for r in found}
    assert len(by_client) == len(found), "a run is there twice"
    return by_client


def assert_complete(run: Path, rounds: int, mlflow=None) -> dict:
    """Every metric of every run is there once a round, with its value."""
    mlflow = mlflow or client_of(run)
    runs = runs_of(run, mlflow)
    assert set(runs) == {"", *CLIENTS}
    steps = list(range(1, rounds + 1))
    for key, r in runs.items():
        for metric in r.data.metrics:
            history = mlflow.get_metric_history(r.info.run_id, metric)
            assert sorted(m.step for m in history) == steps, (key, metric)
    history = mlflow.get_metric_history(runs[ODD].info.run_id, "client/loss")
    assert {m.step: m.value for m in history} == {r: pytest.approx(1.0 / r) for r in steps}
    return runs


def test_one_run_a_federation_one_below_it_a_client(run_dir):
    (run_dir / "model.safetensors").write_bytes(b"weights")
    track = tracker(run_dir)
    track.start()
    add(run_dir, 1)
    track.push()
    add(run_dir, 2)
    track.finish("finished", ["model.safetensors", run_dir / "experiment.yaml", "predictions"])
    runs = assert_complete(run_dir, 2)
    parent = runs[""]
    assert parent.info.run_name == "derm-fedism"
    assert runs[ODD].info.run_name == ODD
    for c in CLIENTS:
        assert runs[c].data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert parent.data.params["method/q"] == "2.0"
    assert parent.data.params["cohort/root"] == "(path)"
    assert parent.data.tags["medfed.seed"] == "3"
    assert parent.data.metrics["clean/balanced_accuracy"] == pytest.approx(0.2)
    assert "server/odd" not in parent.data.metrics
    assert {r.info.status for r in runs.values()} == {"FINISHED"}
    assert parent.info.start_time == 1800000000000
    mlflow = client_of(run_dir)
    names = {a.path for a in mlflow.list_artifacts(parent.info.run_id)}
    assert {"model.safetensors", "experiment.yaml"} <= names
    text = Path(mlflow.download_artifacts(parent.info.run_id, "experiment.yaml")).read_text()
    assert "/data/derm" not in text
    assert not (Path.cwd() / "mlruns").exists()


@pytest.mark.parametrize(("status", "shown"), [("failed", "FAILED"), ("interrupted", "KILLED"), ("killed", "KILLED")])
def test_the_end_is_told_as_it_was(run_dir, status, shown):
    add(run_dir, 1)
    tracker(run_dir).finish(status)
    assert {r.info.status for r in runs_of(run_dir).values()} == {shown}


def test_a_resumed_run_goes_on_in_the_same_runs(run_dir):
    add(run_dir, 1, 2)
    first = tracker(run_dir)
    first.start()
    first.finish("interrupted")
    ids = {k: r.info.run_id for k, r in runs_of(run_dir).items()}
    text = (run_dir / "experiment.yaml").read_text().replace("q: 2.0", "q: 3.0")
    (run_dir / "experiment.yaml").write_text(text + "rounds: 9\n")
    second = tracker(run_dir)
    second.start()
    add(run_dir, 3)
    second.push()
    runs = assert_complete(run_dir, 3)
    assert {k: r.info.run_id for k, r in runs.items()} == ids
    assert {r.info.status for r in runs.values()} == {"RUNNING"}
    assert runs[""].data.params["rounds"] == "9"
    assert runs[""].data.tags["medfed.changed"] == "method/q: 2.0 -> 3.0"
    second.finish("finished")
    assert {r.info.status for r in runs_of(run_dir).values()} == {"FINISHED"}


def test_a_round_done_again_after_a_kill_is_not_logged_again(run_dir):
    add(run_dir, 1, 2)
    tracker(run_dir).push()
    log = RecordLog(run_dir / "records.jsonl")
    log.truncate_after(1)
    track = tracker(run_dir)
    track.start()
    log.append({**record(2), "time": 1.9e9})
    track.push()
    add(run_dir, 3)
    track.finish("finished")
    assert_complete(run_dir, 3)


def shift_times(run: Path) -> None:
    """Changes the times of the records: a point logged twice is then two rows even in an SQL store."""
    lines = (run / "records.jsonl").read_text().replace("18000000", "19000000")
    (run / "records.jsonl").write_text(lines)


class Crash(BaseException):
    """Like a kill: nothing in between may catch it."""


def crash_points(monkeypatch, after: int) -> None:
    """The process dies right after its ``after``-th change of MLflow or of the cursor."""
    from mlflow import MlflowClient

    from medfed.tracking.cursor import Cursor

    count = iter(range(1, 10_000))

    def dying(original):
        def call(*args, **kwargs):
            result = original(*args, **kwargs)
            if next(count) == after:
                raise Crash
            return result

        return call

    for name in ("create_run", "create_experiment", "log_batch", "log_inputs", "log_artifact", "set_terminated"):
        monkeypatch.setattr(MlflowClient, name, dying(getattr(MlflowClient, name)))
    monkeypatch.setattr(Cursor, "save", dying(Cursor.save))


def test_a_crash_at_any_point_neither_loses_nor_doubles_anything(tmp_path, empty_store, monkeypatch):
    (tmp_path / "count").mkdir()
    points = 0
    for after in range(1, 100):
        root = tmp_path / str(after)
        root.mkdir()
        shutil.copy(empty_store, root / "mlflow.db")
        run = make_run(root)
        (run / "report.html").write_text("x")
        add(run, 1, 2)
        track = tracker(run)
        with monkeypatch.context() as patch:
            crash_points(patch, after)
            try:
                track.start()
                track.push()
                add(run, 3)
                track.finish("finished", ["report.html"])
            except Crash:
                points += 1
            else:
                break
        if len(RecordLog(run / "records.jsonl").read()) == 2:
            add(run, 3)
        shift_times(run)
        again = tracker(run)
        again.start()
        again.finish("finished", ["report.html"])
        runs = assert_complete(run, 3)
        assert {r.info.status for r in runs.values()} == {"FINISHED"}, after
    assert points > 15


def test_part_of_a_batch_that_arrived_is_not_sent_again(run_dir, monkeypatch):
    """A server that took some of the points of a round and then lost the connection."""
    from mlflow import MlflowClient

    add(run_dir, 1)
    track = tracker(run_dir)
    track.push()
    add(run_dir, 2, 3)
    original = MlflowClient.log_batch

    def torn(self, run_id, metrics=(), **kwargs):
        original(self, run_id, metrics=list(metrics)[: len(metrics) // 2 + 1], **kwargs)
        raise ConnectionError("gone")

    clock = track.clock
    clock.now = 100
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", torn)
        track.push()
    shift_times(run_dir)
    clock.now = 1000
    track.push()
    assert_complete(run_dir, 3)


def test_same_point_with_another_time_is_still_one_point(run_dir, monkeypatch):
    """Not even a store that would keep both gets a point twice: we ask before we log again."""
    add(run_dir, 1, 2)
    tracker(run_dir).push()
    (run_dir / "tracking.json").unlink()
    shift_times(run_dir)
    report = sync(run_dir)
    assert report.metrics == 0
    assert_complete(run_dir, 2)


def test_ghosts_without_content_are_removed(run_dir):
    add(run_dir, 1)
    tracker(run_dir).push()
    mlflow = client_of(run_dir)
    runs = runs_of(run_dir)
    ghost = mlflow.create_run(runs[""].info.experiment_id, tags=dict(runs[ODD].data.tags))
    add(run_dir, 2)
    tracker(run_dir).push()
    assert_complete(run_dir, 2)
    assert mlflow.get_run(ghost.info.run_id).info.lifecycle_stage == "deleted"


def test_a_run_deleted_in_mlflow_comes_back_complete(run_dir):
    add(run_dir, 1, 2)
    tracker(run_dir).push()
    mlflow = client_of(run_dir)
    mlflow.delete_run(runs_of(run_dir)[ODD].info.run_id)
    assert sync(run_dir).runs == 1
    assert_complete(run_dir, 2)
    mlflow.delete_run(runs_of(run_dir)[""].info.run_id)
    sync(run_dir)
    runs = assert_complete(run_dir, 2)
    assert runs[ODD].data.tags["mlflow.parentRunId"] == runs[""].info.run_id
    assert runs[""].data.params["method/name"] == "fedism"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_dead_server_costs_next_to_nothing_and_is_caught_up_with(run_dir, caplog):
    uri = f"http://127.0.0.1:{free_port()}"
    track = tracker(run_dir, uri=uri)
    import mlflow  # noqa: F401  (its import is not what is measured)

    started = time.perf_counter()
    with caplog.at_level(logging.WARNING, "medfed.tracking"):
        track.start()
        for r in range(1, 21):
            add(run_dir, r)
            track.clock.now += 10
            track.push()
        track.finish("finished")
    assert time.perf_counter() - started < 2
    assert [r.message for r in caplog.records] == [
        "MLflow cannot be used (MlflowException); the run goes on and all is in records.jsonl. "
        "Copy it later with: medfed sync derm-fedism"
    ]
    with pytest.raises(MedfedError, match=r"MLflow cannot be used.*sync again"):
        sync(run_dir)
    local = TrackingSettings(uri=f"sqlite:///{run_dir.parent}/mlflow.db")
    report = sync(run_dir, local)
    assert report.rounds == tuple(range(1, 21))
    assert report.status == "FINISHED"
    assert_complete(run_dir, 20)
    again = sync(run_dir)  # goes where it went before
    assert (again.rounds, again.metrics, again.runs, again.artifacts) == ((), 0, 0, ())


def test_a_store_whose_tables_are_locked_is_a_failure_like_others(run_dir, monkeypatch, caplog):
    """Its lock has nothing to do with the run's own, which says that somebody is copying this very run."""
    track, calls = tracker(run_dir), []

    class Held:
        def __init__(self, path, timeout):
            self.path, self.timeout = str(path), timeout

        def __enter__(self):
            calls.append(self.path)
            track.clock.now += self.timeout
            raise Timeout(self.path)

        def __exit__(self, *_):
            pass

    with monkeypatch.context() as patch:
        patch.setattr("medfed.tracking.store.FileLock", Held)
        track.start()
        for n in range(1, 20):
            add(run_dir, n)
            track.push()
            track.clock.now += 10
        assert len(calls) == 1  # a wait of 60 s is made good by a long rest
        assert "MLflow cannot be used (Timeout)" in caplog.text
        with pytest.raises(MedfedError, match="MLflow cannot be used: Timeout"):
            sync(run_dir)
    track.finish("finished")
    assert_complete(run_dir, 19)


def test_a_run_that_somebody_else_is_copying_is_left_to_them(run_dir, monkeypatch, caplog):
    track = tracker(run_dir)
    track.start()
    add(run_dir, 1)
    with monkeypatch.context() as patch:
        patch.setattr(FileLock, "acquire", lambda self, *_, **__: (_ for _ in ()).throw(Timeout(self.lock_file)))
        track.push()
        with pytest.raises(MedfedError, match="another process is copying this run"):
            sync(run_dir)
    assert (caplog.text, track._failures) == ("", 0)
    track.finish("finished")
    assert_complete(run_dir, 1)


def test_waits_grow_and_end_when_the_store_is_back(run_dir, monkeypatch, caplog):
    calls = []

    def dead(self):
        calls.append(self.clock())
        raise ConnectionError("no route")

    track = tracker(run_dir)
    with monkeypatch.context() as patch:
        patch.setattr(Pusher, "connect", dead)
        for r in range(1, 201):
            add(run_dir, r)
            track.clock.now += 1
            track.push()
    assert calls == [1, 31, 91]  # 30 s, then 60 s, then 120 s
    track.clock.now += 200
    with caplog.at_level(logging.WARNING, "medfed.tracking"):
        track.push()
    assert "reachable again" in caplog.text
    assert_complete(run_dir, 200)


def test_slow_store_is_left_alone_after_the_budget_and_goes_on_later(run_dir, monkeypatch, caplog):
    from mlflow import MlflowClient

    track = tracker(run_dir)
    original = MlflowClient.log_batch

    def slow(self, *args, **kwargs):
        track.clock.now += 9
        return original(self, *args, **kwargs)

    add(run_dir, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", slow)
        track.push()
        assert track.clock.now == 18  # the second slow call is over the budget of 15 s
        add(run_dir, 3)
        track.clock.now += 300
        track.push()
        assert track.clock.now == 318  # rests: 18 s are 5 % of 360 s
        track.clock.now += 61
        track.push()
    assert caplog.text == ""
    track.finish("finished")
    assert_complete(run_dir, 3)


def test_a_store_too_slow_to_the_end_is_told(run_dir, monkeypatch, caplog):
    from mlflow import MlflowClient

    track = tracker(run_dir)
    original = MlflowClient.log_batch

    def slow(self, *args, **kwargs):
        track.clock.now += 200
        return original(self, *args, **kwargs)

    add(run_dir, 1)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", slow)
        track.finish("finished")
    assert "Copy it with: medfed sync derm-fedism" in caplog.text
    assert sync(run_dir).status == "FINISHED"
    assert_complete(run_dir, 1)


def test_pushing_takes_a_bounded_share_of_the_time(run_dir, monkeypatch):
    from mlflow import MlflowClient

    track = tracker(run_dir)
    original, calls = MlflowClient.log_batch, []

    def slow(self, *args, **kwargs):
        track.clock.now += 0.1
        calls.append(track.clock.now)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MlflowClient, "log_batch", slow)
    for r in range(1, 31):
        add(run_dir, r)
        track.clock.now += 1
        track.push()
    assert 0.1 * len(calls) <= 0.06 * track.clock.now + 0.4
    track.finish("finished")
    assert_complete(run_dir, 30)


def test_every_batches_rounds_and_loses_none(run_dir):
    track = tracker(run_dir, every=3)
    for r in range(1, 6):
        add(run_dir, r)
        track.clock.now += 1000
        track.push()
        if r == 2:
            assert client_of(run_dir).get_experiment_by_name("medfed") is None
    track.finish("finished")
    assert_complete(run_dir, 5)


def test_disabled_does_nothing(run_dir):
    track = tracker(run_dir, enabled=False)
    before = sorted(p.name for p in run_dir.iterdir())
    track.start()
    track.push()
    track.finish("finished")
    assert sorted(p.name for p in run_dir.iterdir()) == before


def test_sync_of_a_run_that_was_never_tracked(run_dir):
    add(run_dir, 1, 2)
    (run_dir / "report.html").write_text("x")
    meta = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**meta, "status": "finished"}))
    report = sync(run_dir)
    assert report.rounds == (1, 2)
    assert report.artifacts == ("experiment.yaml", "report.html", "records.jsonl")
    assert report.status == "FINISHED"
    runs = assert_complete(run_dir, 2)
    assert runs[""].info.end_time == 1800000002000


def test_sync_of_a_folder_that_was_moved(run_dir, tmp_path):
    add(run_dir, 1)
    sync(run_dir)
    moved = tmp_path / "elsewhere" / "runs"
    moved.parent.mkdir()
    (tmp_path / "first").mkdir()
    shutil.move(tmp_path / "mlflow.db", tmp_path / "first")
    cursor = run_dir / "tracking.json"
    cursor.write_text(cursor.read_text().replace(f"{tmp_path}/mlflow.db", f"{tmp_path}/gone/mlflow.db"))
    moved.mkdir()
    shutil.move(run_dir, moved)
    shutil.move(tmp_path / "first" / "mlflow.db", moved)
    report = sync(moved / run_dir.name)
    assert report.uri == f"sqlite:///{moved}/mlflow.db"
    assert report.metrics == 0  # the store moved along, and has it all
    assert not (tmp_path / "gone").exists()


def test_sync_leaves_a_torn_last_line_alone(run_dir):
    add(run_dir, 1, 2)
    with open(run_dir / "records.jsonl", "ab") as handle:
        handle.write(b'{"round": 3, "ser')
    assert sync(run_dir).rounds == (1, 2)
    add(run_dir, 3)
    assert sync(run_dir).rounds == (3,)
    assert_complete(run_dir, 3)


def test_sync_says_what_is_wrong(tmp_path, run_dir):
    with pytest.raises(MedfedError, match="no such run"):
        sync(tmp_path / "nothing")
    (run_dir / "experiment.yaml").write_text("tracking: {evry: 3}\n")
    with pytest.raises(ConfigError, match=r"tracking\.evry"):
        sync(run_dir)
    (run_dir / "experiment.yaml").unlink()
    (run_dir / "run.json").write_text("{}")
    with pytest.raises(MedfedError, match=r"no readable run.json"):
        sync(run_dir)


def test_bad_calls_are_named(run_dir):
    with pytest.raises(ValueError, match="'done'"):
        tracker(run_dir).finish("done")
    with pytest.raises(ValueError, match="elsewhere"):
        tracker(run_dir).finish("finished", [run_dir.parent / "elsewhere"])
    with pytest.raises(ConfigError):
        tracker(run_dir, uri="file:///x")


PROCESS = """
import sys
from pathlib import Path
from medfed.tracking.mlflow_sink import MLflowTracker
from medfed.tracking.settings import TrackingSettings
track = MLflowTracker(Path(sys.argv[1]), TrackingSettings())
track.start(); track.push(); track.finish("finished")
"""


def test_two_processes_on_one_fresh_store(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    runs = [make_run(tmp_path, name) for name in ("a", "b")]
    for run in runs:
        add(run, 1, 2, 3)
    processes = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(run)], stderr=subprocess.PIPE, text=True) for run in runs
    ]
    for p in processes:
        _, errors = p.communicate(timeout=120)
        assert p.returncode == 0, errors
        assert "MLflow cannot be used" not in errors
    for run in runs:
        assert_complete(run, 3)
    mlflow = client_of(runs[0])
    assert len([e for e in mlflow.search_experiments() if e.name == "medfed"]) == 1


def test_light_import():
    code = "import sys, medfed.tracking.mlflow_sink, medfed.tracking.sync; print('mlflow' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"
