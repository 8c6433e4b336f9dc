"""The process of a simulation: ``python -m medfed.engines.nvflare.simulator JOB WORKSPACE SITES THREADS PARENT``.

A process of its own, because NVFlare's simulator changes the folder, the logging and the signals of the one it is in.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import psutil
from nvflare.private.fed.app.simulator.simulator_runner import SimulatorRunner

from medfed.orphans import when_orphaned


def main(job: str, workspace: str, sites: str, threads: str, parent: str) -> int:
    """Runs a job and returns NVFlare's code of how it ended.

    When ``parent``, which started it and keeps others from the run, is gone, it ends with all its sites.
    """
    when_orphaned(int(parent), end)
    return SimulatorRunner(job_folder=job, workspace=workspace, clients=sites, threads=int(threads)).run()


def end() -> None:
    """Ends this process and those of the sites, which are in process groups of their own."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
