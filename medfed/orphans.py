"""What a process does when the one that started it is gone.

A pipe does not tell it: forked processes hold its other end themselves. So a thread looks who the parent is.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

GLANCE = 0.5
"""Seconds between two looks."""


def orphaned(parent: int) -> bool:
    """Whether the process that started this one is gone.

    Args:
        parent: its number, taken before this process began (afterwards it may be gone already).
    """
    return os.getppid() != parent


def when_orphaned(parent: int, do: Callable[[], object]) -> None:
    """Has something done, in a thread, when the process that started this one is gone, whatever this one is at."""

    def watch() -> None:
        while not orphaned(parent):
            time.sleep(GLANCE)
        do()

    threading.Thread(target=watch, daemon=True, name="medfed-orphan").start()


def own_output() -> None:
    """Gives a forked process the real standard output and error.

    Those of a progress bar have a lock, which the bar's thread may hold at the moment of the fork: for ever, here.
    """
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
