"""Time of ``medfed --help`` and what it imports."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from common import machine, table

HEAVY = ("torch", "monai", "mlflow", "pandas", "matplotlib", "sklearn", "torchvision", "scipy")


def main() -> None:
    command = [sys.executable, "-m", "medfed", "--help"]
    times = []
    for _ in range(9):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    code = f"import medfed.cli, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    table(
        ["command", "fastest, s", "median, s", "heavy imports"],
        [["medfed --help", min(times), statistics.median(times), found]],
    )
    print(machine())


if __name__ == "__main__":
    main()
