"""FedAvg, SALT only, SAGA only and FedISM on paired conditions: the tables of docs/results.md.

    python benchmarks/quality_shift.py configs/results/derm.yaml --data HAM10000 --weights squeezenet1_0.pth --out runs

Finished runs are not run again and a killed one is resumed, so the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from medfed.config import load_experiment
from medfed.console import Screen
from medfed.report.compare import compare
from medfed.report.html import experiment_page
from medfed.report.runs import load_run
from medfed.running import resume, start

BOUNDED = {"radius": "bounded", "rho": 0.05, "share": 0.1}
SMALL = {"rho": 0.005}
ADAPTIVE = {"rho": 0.05, "radius": "adaptive"}
# The paper's radius, 0.05, is that of a network with BatchNorm; docs/results.md says why others are tried.
VARIANTS = {
    "fedavg": {"name": "fedavg"},
    "saga": {"name": "fedism", "salt": False, "measure": SMALL},
    "salt": {"name": "fedavg", "salt": SMALL},
    "fedism": {"name": "fedism", "salt": SMALL},
    "fedism-late": {"name": "fedism", "salt": SMALL, "saga_from": 11},
    "saga-loss": {"name": "fedism", "salt": False, "measure": SMALL, "follow": "perturbed_loss"},
    "fedism-loss": {"name": "fedism", "salt": SMALL, "follow": "perturbed_loss"},
    "salt-0.001": {"name": "fedavg", "salt": {"rho": 0.001}},
    "salt-0.02": {"name": "fedavg", "salt": {"rho": 0.02}},
    "salt-warm": {"name": "fedavg", "salt": {"rho": 0.05, "warmup": 10}},
    "salt-adaptive": {"name": "fedavg", "salt": {"rho": 0.5, "radius": "adaptive"}},
    "salt-adaptive-small": {"name": "fedavg", "salt": ADAPTIVE},
    "saga-adaptive-small": {"name": "fedism", "salt": False, "measure": ADAPTIVE},
    "fedism-adaptive-small": {"name": "fedism", "salt": ADAPTIVE},
    "salt-bounded-0.03": {"name": "fedavg", "salt": BOUNDED | {"share": 0.03}},
    "salt-bounded-0.01": {"name": "fedavg", "salt": BOUNDED | {"share": 0.01}},
    "salt-bounded": {"name": "fedavg", "salt": BOUNDED},
    "fedism-bounded": {"name": "fedism", "salt": BOUNDED},
    "saga-paper": {"name": "fedism", "salt": False},
    "salt-paper": {"name": "fedavg", "salt": True},
    "fedism-paper": {"name": "fedism"},
}


def run_variant(args: argparse.Namespace, variant: str, seed: int, screen: Screen) -> Path:
    """Runs, resumes or finds one run."""
    folder = args.out / variant
    sets = [
        f"method={json.dumps(VARIANTS[variant])}",
        f"seed={seed}",
        f"output={folder}",
        f"cohort.root={args.data}",
        f"overrides.weights={args.weights}",
        *(["rounds=" + str(args.rounds)] if args.rounds else []),
        *args.set,
    ]
    experiment = load_experiment(args.config, sets)
    show = {"say": screen.say, "progress": screen.progress, "listeners": [screen.round]}
    for path in sorted(folder.glob(f"*-s{seed}-*")):
        meta = json.loads((path / "run.json").read_text())
        if meta["status"] == "completed" and meta["rounds"] == experiment.rounds:
            return path
        if meta["rounds"] == experiment.rounds:
            with screen:
                return resume(path, **show)
    screen.say(f"\n{variant}, seed {seed}")
    with screen:
        return start(experiment, **show)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS)[:4], choices=list(VARIANTS))
    parser.add_argument("--set", action="append", default=[], help="further key=value changes")
    args = parser.parse_args()
    screen = Screen()
    # Seed by seed, so that whatever exists at any time is paired.
    runs = [run_variant(args, variant, seed, screen) for seed in args.seeds for variant in args.variants]
    loaded = [load_run(path) for path in runs]
    result = compare(loaded)
    result.render(screen.console)
    (args.out / "comparison.md").write_text(result.to_markdown(), encoding="utf-8")
    (args.out / "comparison.csv").write_text(result.to_csv(), encoding="utf-8")
    screen.say(f"Written: {experiment_page(loaded, args.out / 'comparison.html')}")


if __name__ == "__main__":
    main()
