"""A run on disk: who may write it, what it is, and how it stands."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from medfed.durable import write_atomically
from medfed.errors import ConfigError, FederationError

META = "run.json"
EXPERIMENT = "experiment.yaml"
PATIENCE = 2.0  # who looks whether a run is held has its lock for a moment


class RunFolder:
    """One run's folder; see docs/architecture.md for its content.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(cls, root: Path, name: str, experiment: str) -> RunFolder:
        """Makes a new folder under ``root``, with the resolved experiment in it.

        Raises:
            ConfigError: the folder cannot be made.
        """
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        for attempt in range(100):
            path = root / (f"{name}-{stamp}" + (f"-{attempt}" if attempt else ""))
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(
                    f"cannot be made ({error.strerror}).", where=str(path), fix="Change 'output'."
                ) from None
            folder = cls(path)
            folder.write_experiment(experiment)
            return folder
        raise ConfigError("a hundred runs of that name started within a second.", where=str(root))

    @classmethod
    def at(cls, path: Path, experiment: str) -> RunFolder:
        """Makes a given folder a run's, with the resolved experiment in it; it is no run before its ``run.json``.

        Raises:
            ConfigError: the folder cannot be made.
        """
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder.write_experiment(experiment)
        except OSError as error:
            raise ConfigError(f"cannot be made ({error.strerror}).", where=str(path)) from None
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A folder that holds a run.

        Raises:
            ConfigError: it does not.
        """
        missing = [f for f in (EXPERIMENT, META) if not (path / f).is_file()]
        if missing:
            raise ConfigError(
                f"is not a run: it lacks {' and '.join(missing)}.",
                where=str(path),
                fix="Give the folder that `medfed run` printed.",
            )
        return cls(path)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other processes from running the same run at the same time."""
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=PATIENCE)
        except Timeout:
            raise FederationError(
                "another process is running this run.", where=str(self.path), fix="Wait for it or stop it."
            ) from None
        try:
            yield
        finally:
            lock.release()

    def meta(self) -> dict[str, Any]:
        """The content of ``run.json``.

        Raises:
            ConfigError: it cannot be read, or says nothing of how the run stands.
        """
        try:
            meta = json.loads((self.path / META).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            meta = None
        if not isinstance(meta, dict) or not isinstance(meta.get("status"), str):
            raise ConfigError(
                f"its {META} is damaged.",
                where=str(self.path),
                fix="Restore that file, or remove the folder and run again.",
            )
        return meta

    def write_meta(self, **fields: Any) -> dict[str, Any]:
        """Adds fields to ``run.json``, atomically and durably, and returns all of it."""
        path = self.path / META
        meta = {**(self.meta() if path.exists() else {}), **fields}
        write_atomically(path, json.dumps(meta, indent=1, ensure_ascii=False, allow_nan=False).encode())
        return meta

    def write_experiment(self, text: str) -> None:
        """Writes the resolved experiment, atomically and durably."""
        write_atomically(self.path / EXPERIMENT, text.encode())

    @property
    def checkpoint(self) -> Path:
        """Folder of the server state."""
        return self.path / "checkpoint"

    @property
    def clients(self) -> Path:
        """Folder of the clients' own memories."""
        return self.path / "clients"

    @property
    def records(self) -> Path:
        """The round records."""
        return self.path / "records.jsonl"


def new_uid() -> str:
    """A name for a run that is unique everywhere."""
    return uuid.uuid4().hex


def now() -> str:
    """The time as text, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("medfed", "torch", "torchvision", "monai", "numpy", "pydicom", "pillow", "scikit-learn", "mlflow"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def hardware(device: str, workers: int, threads: int) -> dict[str, Any]:
    """What a run ran on."""
    import torch

    info: dict[str, Any] = {
        "device": device,
        "workers": workers,
        "threads": threads,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
    }
    if device.startswith("cuda"):
        info["gpu"] = torch.cuda.get_device_name(device)
    return info
