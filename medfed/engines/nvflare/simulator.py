"""The process of a simulation: ``python -m medfed.engines.nvflare.simulator JOB WORKSPACE SITES THREADS``.

A process of its own, because NVFlare's simulator changes the folder, the logging and the signals of the one it is in.
"""

from __future__ import annotations

import sys

from nvflare.private.fed.app.simulator.simulator_runner import SimulatorRunner


def main(job: str, workspace: str, sites: str, threads: str) -> int:
    """Runs a job and returns NVFlare's code of how it ended."""
    return SimulatorRunner(job_folder=job, workspace=workspace, clients=sites, threads=int(threads)).run()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
