"""The same condition and seed give bitwise the same model on the local engine and in NVFlare's simulator."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))
from experiments import changed, tiny_experiment, tiny_network

from medfed.config import validate
from medfed.federation.state import same_state
from medfed.ledger import LEDGER, differences, read_ledger
from medfed.running import start
from medfed.tracking.records import RecordLog

FEDISM = {"condition__partition__clients": 3, "rounds": 2}
OCT_FEDSIR = {
    "cohort": {"reader": "kermany"},
    "bundle": "oct_bscan_classification",
    "condition": {
        "partition": {"kind": "dirichlet", "clients": 4, "alpha": 5.0, "min_samples": 6},
        "label_noise": {"kind": "symmetric", "rate": 0.4, "clean": 2},
    },
    "method": {"name": "oct_fedsir", "period": 1, "stage_one": {"epochs": 1}},
    "rounds": 3,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    from medfed.data.demo import make_demo_cohort

    root = tmp_path_factory.mktemp("images")
    for kind in ("ct", "oct"):
        make_demo_cohort(root / kind, kind, patients=20, seed=3)
    return root


def both(made: Path, folder: Path, kind: str, changes: dict[str, Any]) -> tuple[Path, Path]:
    data = changed(tiny_experiment(made / kind, made / "cache", folder / "runs"), changes)
    data |= {"cache": "cache"}
    data["cohort"]["root"] = kind  # relative, as in the files of configs/
    os.environ["OMP_NUM_THREADS"] = "1"
    local = start(validate(data, "test"))
    flare = start(validate(changed(data, {"engine": {"kind": "nvflare", "threads": 1}}), "test"))
    return local, flare


def check_same(local: Path, flare: Path) -> None:
    assert same_state(load_file(local / "model.safetensors"), load_file(flare / "model.safetensors"))
    ours, theirs = RecordLog(local / "records.jsonl").read(), RecordLog(flare / "records.jsonl").read()
    for one, other in zip(ours, theirs, strict=True):
        for key in ("round", "asked", "admitted", "refused", "bytes", "server", "clients", "evaluation", "warnings"):
            assert one[key] == other[key], key


def check_ledgers(run: Path) -> None:
    received = read_ledger(run / LEDGER)
    clients = sorted(p.name for p in (run / "clients").iterdir())
    assert clients == sorted({e["client"] for e in received})
    for client in clients:
        sent = read_ledger(run / "clients" / client / LEDGER)
        assert sent
        assert differences(sent, [e for e in received if e["client"] == client]) == ([], [])


@pytest.mark.slow
def test_fedism_and_its_ledgers(made, tmp_path, monkeypatch):
    monkeypatch.chdir(made)
    local, flare = both(made, tmp_path, "ct", FEDISM)
    check_same(local, flare)
    check_ledgers(flare)


@pytest.mark.slow
def test_oct_fedsir_with_values_for_single_clients_and_memories(made, tmp_path, monkeypatch):
    monkeypatch.chdir(made)
    local, flare = both(made, tmp_path, "oct", {**OCT_FEDSIR, "overrides": tiny_network()})
    check_same(local, flare)
    check_ledgers(flare)


@pytest.mark.slow
def test_a_killed_simulation_goes_on_to_the_same_model_in_a_folder_with_blanks(made, tmp_path):
    data = changed(tiny_experiment(made / "ct", made / "cache", tmp_path / "runs of mine"), {**FEDISM, "rounds": 6})
    local = start(validate(changed(data, {"output": str(tmp_path / "local")}), "test"))
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump(changed(data, {"engine": {"kind": "nvflare", "threads": 1}})))
    process = subprocess.Popen([sys.executable, "-m", "medfed", "run", str(file)], start_new_session=True)
    try:
        while process.poll() is None:
            found = list((tmp_path / "runs of mine").glob("*/records.jsonl"))
            if found and found[0].read_bytes().count(b"\n") >= 2:
                break
            time.sleep(0.2)
        children = psutil.Process(process.pid).children(recursive=True)
        for victim in [psutil.Process(process.pid), *children]:
            victim.send_signal(signal.SIGKILL)
        process.wait(30)
    finally:
        if process.poll() is None:
            process.kill()
    run = found[0].parent
    subprocess.run([sys.executable, "-m", "medfed", "resume", str(run)], check=True)
    check_same(local, run)
