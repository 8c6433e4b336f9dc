"""From DICOM files to a report: what a run leaves behind, and that it can be repeated, resumed and spread out."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from medfed.federation.state import load_state, read_tensors, same_state


def model_of(run):
    return read_tensors(run / "model.safetensors")[0]


def records_of(run):
    return [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]


def comparable(record):
    return {k: v for k, v in record.items() if k not in ("seconds", "time")}


@pytest.fixture(scope="module")
def finished(request, images, cache, tmp_path_factory):
    """One run of FedISM that several tests look at."""
    from experiments import tiny_experiment

    from medfed.config import validate
    from medfed.running import start

    data = tiny_experiment(images, cache, tmp_path_factory.mktemp("runs"))
    return start(validate({**data, "tracking": {"enabled": True}}, "test"))


def test_run_leaves_everything_behind(finished):
    meta = json.loads((finished / "run.json").read_text())
    assert meta["status"] == "completed"
    assert meta["classes"][0] == "epidural"
    assert len(meta["condition_hash"]) == len(meta["data_hash"]) == 64
    for name in (
        "experiment.yaml",
        "report.html",
        "model.safetensors",
        "condition/condition.json",
        "findings/unusable.csv",
    ):
        assert (finished / name).is_file(), name
    assert [r["round"] for r in records_of(finished)] == [1, 2, 3]
    tensors, header = read_tensors(finished / "model.safetensors")
    assert header["classes"] == meta["classes"]
    assert all(np.isfinite(t.double().numpy()).all() for t in tensors.values())


def test_round_record_of_fedism_is_complete(finished):
    record = records_of(finished)[0]
    assert sorted(record["clients"]) == ["client_00", "client_01", "client_02", "client_03"]
    for client in record["clients"].values():
        assert client["sharpness"] >= 1e-10
        assert {"samples", "loss", "weight", "received_loss", "steps"} <= set(client)
    assert sum(c["weight"] for c in record["clients"].values()) == pytest.approx(1.0)
    assert {"clean", "corrupted", "average", "gap", "clients", "worst_client"} <= set(record["evaluation"])


def test_weights_of_round_one_follow_the_recorded_sharpness(finished):
    """Eq. 13 by hand from the record: s_k^2 / sum s_j^2."""
    clients = records_of(finished)[0]["clients"]
    squares = {c: v["sharpness"] ** 2 for c, v in clients.items()}
    for client, values in clients.items():
        assert values["weight"] == pytest.approx(squares[client] / sum(squares.values()), rel=1e-6)


def test_weights_of_round_two_are_the_moving_average(finished):
    one, two = (r["clients"] for r in records_of(finished)[:2])
    squares = {c: v["sharpness"] ** 2 for c, v in two.items()}
    for client in two:
        expected = 0.5 * squares[client] / sum(squares.values()) + 0.5 * one[client]["weight"]
        assert two[client]["weight"] == pytest.approx(expected, rel=1e-6)


def test_mlflow_has_one_parent_and_a_child_a_client_with_every_round(finished):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{finished.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("medfed")
    runs = client.search_runs([experiment.experiment_id])
    parents = [r for r in runs if "mlflow.parentRunId" not in r.data.tags]
    assert len(parents) == 1
    assert len(runs) == 5
    history = client.get_metric_history(parents[0].info.run_id, "clean/balanced_accuracy")
    assert [p.step for p in history] == [1, 2, 3]
    assert parents[0].info.status == "FINISHED"
    assert {a.path for a in client.list_artifacts(parents[0].info.run_id)} >= {"report.html", "model.safetensors"}


def test_nothing_of_this_machine_is_in_what_leaves_it(finished, images):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{finished.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("medfed")
    told = json.dumps([r.data.to_dictionary() for r in client.search_runs([experiment.experiment_id])])
    assert str(images) not in told
    assert str(images) not in (finished / "report.html").read_text()
    assert str(images) not in (finished / "records.jsonl").read_text()


def test_same_seed_same_result_and_other_seed_another(start):
    one, two = start(method="fedavg"), start(method="fedavg")
    assert same_state(model_of(one), model_of(two))
    assert [comparable(a) for a in records_of(one)] == [comparable(b) for b in records_of(two)]
    other = start(method="fedavg", seed=1, rounds=1)
    assert not same_state(model_of(one), model_of(other))


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_gives_the_same_weights(finished, start, workers):
    run = start(engine__workers=workers)
    assert same_state(model_of(run), model_of(finished))
    assert [r["clients"] for r in records_of(run)] == [r["clients"] for r in records_of(finished)]


def test_workers_started_anew_give_the_same_weights(finished, start, monkeypatch):
    """Workers with several threads, or on a GPU, cannot be forked; each starts from the run's folder."""
    monkeypatch.setattr("medfed.running.may_fork", lambda device, threads: False)
    run = start(engine__workers=2)
    assert same_state(model_of(run), model_of(finished))


def test_methods_of_a_comparison_share_condition_and_initial_model(finished, start):
    run = start(method="fedavg", rounds=1)
    one, two = (json.loads((p / "run.json").read_text()) for p in (finished, run))
    assert one["condition_hash"] == two["condition_hash"]
    assert one["data_hash"] == two["data_hash"]


def test_second_run_decodes_no_image(finished, data, monkeypatch):
    from medfed.config import validate
    from medfed.data import decode
    from medfed.experiment import prepare

    def fail(*args, **kwargs):
        raise AssertionError("an image was decoded again")

    monkeypatch.setattr(decode, "decode", fail)
    monkeypatch.setattr("medfed.data.transforms.decode", fail, raising=False)
    started = time.perf_counter()
    prepare(validate(data, "test"))
    assert time.perf_counter() - started < 30


def test_truth_cannot_be_reached_from_what_a_method_gets(data):
    """Walks the whole object graph of a client and of the server as their method sees them."""
    from medfed.config import validate
    from medfed.data.condition import Condition, Truth
    from medfed.experiment import Prepared, prepare
    from medfed.federation.server import Server
    from medfed.federation.state import ServerState
    from medfed.rundir import RunFolder
    from medfed.running import make_engine

    prepared = prepare(validate(data, "test"))
    folder = RunFolder(prepared.experiment.output)
    engine, _ = make_engine(prepared, folder, "cpu", 1, 1)
    client = engine.host.client("client_03")
    server = Server(engine, ServerState(prepared.initial_model()), prepared.task, rounds=1)
    for seen in reachable(client), reachable(server):
        assert not [o for o in seen if isinstance(o, (Condition, Truth, Prepared))]
        texts = [o for o in seen if isinstance(o, str)]
        assert not [t for t in texts if "corrupt" in t.lower() and len(t) < 60]
    assert set(vars(client)) == {"name", "data", "trainer", "task", "memory", "seed", "round", "_public"}


def reachable(root):
    """All objects that can be reached from ``root`` through instances and containers, but not through code."""
    import types

    code = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType, types.CodeType)
    seen, todo = {}, [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or (isinstance(item, code) and not isinstance(item, types.FunctionType)):
            continue
        seen[id(item)] = item
        if isinstance(item, types.FunctionType):
            todo += [c.cell_contents for c in item.__closure__ or () if c.cell_contents is not None]
            continue
        todo += gc.get_referents(item)
    return list(seen.values())


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def runs_in(data):
    root = data["output"]
    return [os.path.join(root, n) for n in os.listdir(root) if n.startswith("tiny")] if os.path.isdir(root) else []


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_run_resumes_bitwise_and_tells_mlflow_once(command, data, finished, workers):
    import mlflow

    from medfed.running import resume

    process = subprocess.Popen(
        command.prepare("run", "FILE", engine__workers=workers, tracking__enabled=True),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )

    def first_round_is_done():
        return any(os.path.exists(os.path.join(r, "checkpoint", "state.safetensors")) for r in runs_in(data))

    wait_for(first_round_is_done, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (path,) = runs_in(data)
    path = Path(path)
    done = load_state(path / "checkpoint").round
    assert done < 3, "the run was over before it could be killed"
    resume(path)
    assert same_state(model_of(path), model_of(finished))
    assert [comparable(r) for r in records_of(path)] == [comparable(r) for r in records_of(finished)]
    client = mlflow.MlflowClient(f"sqlite:///{path.parent / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("medfed").experiment_id])
    parents = [r for r in runs if "mlflow.parentRunId" not in r.data.tags]
    assert len(parents) == 1
    history = client.get_metric_history(parents[0].info.run_id, "clean/balanced_accuracy")
    assert [p.step for p in history] == [1, 2, 3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_in_the_middle_of_a_round_keeps_what_is_done(command, data, finished, number):
    """By Ctrl-C, and by who ends processes: ``kill``, a cluster's time limit."""
    process = subprocess.Popen(
        command.prepare("run", "FILE", rounds=500, engine__workers=2),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # As in a terminal: what is started in the background has its interrupts ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_for(
            lambda: any(os.path.exists(os.path.join(r, "checkpoint", "state.safetensors")) for r in runs_in(data)),
            process,
        )
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, out
    assert "medfed resume" in out
    assert "Traceback" not in out
    (path,) = runs_in(data)
    path = Path(path)
    assert json.loads((path / "run.json").read_text())["status"] == "interrupted"
    assert load_state(path / "checkpoint").round >= 1


def test_interrupt_ends_with_130_wherever_it_strikes(tmp_path):
    """CPython lets ``python -m`` die by SIGINT instead if it struck where a string was executed, as dataclasses do."""
    (tmp_path / "sitecustomize.py").write_text(
        "import medfed.cli\ndef app(**options):\n    exec('raise KeyboardInterrupt')\nmedfed.cli.app = app\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "medfed"], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "medfed: stopped.\n")


@pytest.mark.parametrize(("number", "code"), [("ENOSPC", 2), ("EACCES", 2), ("ENOTSOCK", 1)])
def test_what_the_disk_refuses_is_one_message_without_a_traceback(tmp_path, number, code):
    (tmp_path / "sitecustomize.py").write_text(
        "import errno, os\nimport medfed.cli\n"
        "def app(**options):\n"
        f"    raise OSError(errno.{number}, os.strerror(errno.{number}), '/data/file')\n"
        "medfed.cli.app = app\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "medfed"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert ("Traceback" in done.stderr) == (code == 1)
    assert "/data/file" in done.stderr


def test_completed_run_goes_on_to_more_rounds_as_if_planned(finished, start, tmp_path):
    """The weights are those of a run that was to have so many rounds; MLflow has one run with all of them."""
    from mlflow import MlflowClient

    from medfed.running import resume

    run = start(rounds=2, tracking={"enabled": True, "uri": f"sqlite:///{tmp_path}/mlflow.db"})
    assert resume(run, rounds=3) == run
    assert same_state(model_of(run), model_of(finished))
    assert [comparable(r) for r in records_of(run)] == [comparable(r) for r in records_of(finished)]
    meta = json.loads((run / "run.json").read_text())
    assert (meta["rounds"], meta["status"]) == (3, "completed")
    assert yaml.safe_load((run / "experiment.yaml").read_text())["rounds"] == 3
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiments = [e.experiment_id for e in client.search_experiments()]
    parents = [r for r in client.search_runs(experiments) if "mlflow.parentRunId" not in r.data.tags]
    assert len(parents) == 1
    steps = client.get_metric_history(parents[0].info.run_id, "clean/balanced_accuracy")
    assert [m.step for m in steps] == [1, 2, 3]


def test_rounds_cannot_be_changed_where_that_would_change_what_is_done(start):
    from medfed.errors import ConfigError
    from medfed.running import resume

    run = start(rounds=2, method="fedavg")
    with pytest.raises(ConfigError, match="2 rounds are done"):
        resume(run, rounds=1)
    run = start(rounds=1, method="fedism_plus")
    before = (run / "experiment.yaml").read_text()
    with pytest.raises(ConfigError, match="number of rounds"):
        resume(run, rounds=3)
    assert (run / "experiment.yaml").read_text() == before


def test_run_in_use_is_not_resumed_by_another_process(finished):
    from medfed.errors import FederationError
    from medfed.rundir import RunFolder
    from medfed.running import resume

    with RunFolder(finished).held(), pytest.raises(FederationError, match="another process"):
        resume(finished)


def test_resume_refuses_changed_labels(start, data, images, tmp_path):
    import shutil

    from medfed.data.condition import load as load_condition
    from medfed.errors import MedfedError
    from medfed.running import resume

    copy = tmp_path / "copy"
    shutil.copytree(images, copy)
    run = start(cohort={"reader": "rsna_ich", "root": str(copy)}, rounds=1, method="fedavg")
    config = yaml.safe_load((run / "experiment.yaml").read_text())
    (run / "experiment.yaml").write_text(yaml.safe_dump({**config, "rounds": 2}))
    table = next(copy.rglob("stage_2_train.csv"))
    sample = load_condition(run / "condition").view("client_00").samples[0]
    kept = [line for line in table.read_text().splitlines() if not line.startswith(sample)]
    table.write_text("\n".join(kept) + "\n")
    with pytest.raises(MedfedError, match="no longer those that the run began with"):
        resume(run)


def test_full_disk_in_the_middle_of_a_run_keeps_the_last_checkpoint(command, data, tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", mount], capture_output=True).returncode:
        pytest.skip("cannot mount a file system here")
    try:
        done = command("run", "FILE", output=str(mount), rounds=200)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "disk is full" in done.stderr
        (run,) = [p for p in mount.iterdir() if p.name.startswith("tiny")]
        assert load_state(run / "checkpoint").round >= 1
    finally:
        subprocess.run(["umount", mount], check=True)
