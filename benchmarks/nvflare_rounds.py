"""A round over NVFlare against a round of the local engine, and the memory of the server's process over many rounds.

FedAvg with three clients and a model of 4.9 MB on a small built-in cohort: local engine, NVFlare's simulator, local
engine again, so that a machine that grows busier or quieter shows. What NVFlare does of its own can be told apart by
environment variables, e.g. ``MALLOC_ARENA_MAX=1``.

    python benchmarks/nvflare_rounds.py --rounds 30
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import psutil
import yaml
from common import MB, machine, table

from medfed.data.demo import make_demo_cohort

SERVER = "medfed.engines.nvflare.simulator"
EXPERIMENT = {
    "name": "rounds",
    "condition": {"partition": {"kind": "dirichlet", "clients": 3, "alpha": 5.0, "min_samples": 4}},
    "bundle": "rsna_ich_ct_classification",
    "overrides": {
        "image_size": [32, 32],
        "batch_size": 8,
        "network_name": "ResNet",
        "network_def::block": "basic",
        "network_def::layers": [1, 1, 1, 1],
        "network_def::block_inplanes": [32, 64, 128, 256],
        "network_def::conv1_t_size": 3,
    },
    "method": "fedavg",
    "tracking": {"enabled": False},
}


def run(folder: Path, name: str, rounds: int, engine: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Seconds of each round, and the server's resident memory after each, MB; empty for the local engine."""
    output = folder / name
    cohort = {"reader": "rsna_ich", "root": str(folder / "ct")}
    data = {**EXPERIMENT, "cohort": cohort, "cache": str(folder / "cache"), "output": str(output)}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**data, "rounds": rounds, "engine": {"threads": 1, "device": "cpu", **engine}}))
    process = subprocess.Popen([sys.executable, "-m", "medfed", "run", str(file)], stdout=subprocess.DEVNULL)
    resident: list[float] = []
    while process.poll() is None:
        if engine["kind"] == "nvflare" and count(output) > len(resident):
            resident.append(server_memory(process.pid))
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(process.returncode)
    records = [json.loads(line) for path in output.glob("*/records.jsonl") for line in path.read_text().splitlines()]
    return [r["seconds"]["total"] for r in records], resident


def count(output: Path) -> int:
    """Rounds that are recorded so far."""
    return sum(path.read_bytes().count(b"\n") for path in output.glob("*/records.jsonl"))


def server_memory(pid: int) -> float:
    """Resident memory of the simulator's largest process, which is the server's."""
    sizes = [0.0]
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if SERVER in child.cmdline():
                sizes.append(child.memory_info().rss / MB)
        except psutil.Error:
            continue
    return max(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="over NVFlare")
    parser.add_argument("--local", type=int, default=15, help="of the local engine, before and after")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_demo_cohort(folder / "ct", "ct", patients=24, seed=3)
        local = {"kind": "local", "workers": 1}
        before = run(folder, "before", given.local, local)[0]
        flare, resident = run(folder, "nvflare", given.rounds, {"kind": "nvflare"})
        after = run(folder, "after", given.local, local)[0]
    ours, theirs = [*before[1:], *after[1:]], flare[1:]  # first rounds start processes
    rows = [[name, of(ours), of(theirs), of(theirs) / of(ours)] for name, of in (("median", median), ("least", min))]
    table(["seconds a round", "local engine", "NVFlare", "ratio"], rows)
    marks = sorted({1, 2, 5, *range(10, given.rounds, 10), given.rounds})
    print()
    table(["after round", "server, MB"], [[str(r), f"{resident[r - 1]:.1f}"] for r in marks if r <= len(resident)])
    half = resident[len(resident) // 2 :]
    print(f"a round of the second half: {linear_regression(range(len(half)), half).slope:+.2f} MB")
    print(machine())


if __name__ == "__main__":
    main()
