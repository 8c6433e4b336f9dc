"""The server's memory does not grow with the rounds."""

from __future__ import annotations

import collections
import gc
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from flare import flare
from toy import make_server

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))
from experiments import changed, environment, tiny_experiment

from medfed.federation.messages import Message

SIZES = {"c0": 1, "c1": 3, "c2": 2}
# NVFlare keeps the names of the last 10,000 client tasks, so that it knows a late answer.
BOUNDED = "_CompletedClientTaskInfo"


def objects() -> collections.Counter:
    gc.collect()
    return collections.Counter(str(type(o)) for o in gc.get_objects())


def test_neither_objects_nor_bytes_are_left_behind_by_a_round(tmp_path):
    """Over NVFlare's own task management: 20 rounds of three clients leave fewer objects than one a round."""
    model = {"w": torch.zeros(1 << 16), "count": torch.tensor(3)}
    counted, allocated = [], []
    with flare(SIZES, tmp_path) as f:
        server = make_server(SIZES, engine=f.medfed, rounds=60)
        for number in server.rounds():
            replies = server.ask("train", Message.of({}, model=model), mean="model")
            assert replies.clients == ("c0", "c1", "c2")
            server.report(replies)
            server.state.round = number
            del replies
            for site in f.sites.values():
                site.sent.clear()  # kept by these tests alone
            if number == 10:
                tracemalloc.start()
            if number in (20, 40, 60):  # the first count has objects of its own
                time.sleep(0.3)  # until NVFlare's monitor has seen the end of the task
                counted.append(objects())
                allocated.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    grown = {kind: n - counted[1][kind] for kind, n in counted[2].items() if BOUNDED not in kind}
    assert sum(n for n in grown.values() if n > 0) < 20, grown
    assert "<class 'torch.Tensor'>" not in {kind for kind, n in grown.items() if n > 0}
    # Bytes: a model that every round leaves would be 20 times 256 KB; what is on its way just now is allowed.
    assert allocated[2] - allocated[1] < 4 * (1 << 18)


def resident(pid: int) -> float:
    """Resident memory of the simulator's largest process, which is the server's, in MB."""
    sizes = [0.0]
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if "medfed.engines.nvflare.simulator" in child.cmdline():
                sizes.append(child.memory_info().rss / 1e6)
        except psutil.Error:
            continue
    return max(sizes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_of_the_servers_process_is_flat(tmp_path):
    """A model of 4.9 MB, 40 rounds: what is allowed to grow after the tenth is far less than one model a round."""
    from medfed.data.demo import make_demo_cohort

    make_demo_cohort(tmp_path / "ct", "ct", patients=20, seed=3)
    data = tiny_experiment(tmp_path / "ct", tmp_path / "cache", tmp_path / "runs")
    data["overrides"]["network_def::block_inplanes"] = [32, 64, 128, 256]
    engine = {"kind": "nvflare", "threads": 1}
    data = changed(data, {"engine": engine, "rounds": 40, "method": "fedavg", "condition__partition__clients": 3})
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(data))
    command = [sys.executable, "-m", "medfed", "run", str(tmp_path / "experiment.yaml")]
    process = subprocess.Popen(command, env=environment(), start_new_session=True, stdout=subprocess.DEVNULL)
    after: list[float] = []
    try:
        while process.poll() is None:
            done = sum(p.read_bytes().count(b"\n") for p in (tmp_path / "runs").glob("*/records.jsonl"))
            after += [resident(process.pid)] * (done - len(after))
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
    assert process.returncode == 0
    assert len(after) == 40
    # The least of ten rounds: models that are on their way at the moment do not count.
    early, late = min(after[9:19]), min(after[29:39])
    assert late - early < 30, after  # twenty rounds apart; one model kept a round would be 98 MB
