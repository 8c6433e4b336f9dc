"""Files that are whole after a crash: written beside, synced, renamed."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file as a whole, durably: after a crash it holds the old or the new content."""
    new = path.with_name(path.name + ".writing")
    try:
        with open(new, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the creation or renaming of a file in a folder durable (where the system can)."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
