"""What belongs to a client and stays with it: corrected labels, label logits, a previous model.

Memory is versioned by the request that wrote it. A server that restarts from its checkpoint repeats some requests;
the client then goes back to what it knew before the repeated request, so that a resumed run is the same run.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Collection, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import torch

from medfed.federation.messages import check_plain
from medfed.federation.state import read_tensors, write_tensors

_PLAIN = re.compile(r"[a-z0-9][a-z0-9_-]{0,59}")
_RESERVED = re.compile(r"(con|nul|aux|prn|com\d|lpt\d)")  # on Windows


def client_folder(name: str) -> str:
    """The folder of a client, a name of its own on every file system.

    Plain names stay as they are.  Others (capitals, blanks, slashes, ``..``, any length) become a readable part and a
    digest, joined by ``~``, which no plain name has: two clients never share a folder, nor leave their place.
    """
    if _PLAIN.fullmatch(name) and not _RESERVED.fullmatch(name):
        return name
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    return f"{readable}~{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


class ClientMemory(MutableMapping[str, Any]):
    """A mapping of names to tensors or plain values, saved at the client's side.

    What is read is a copy: a change is kept when it is set again, in memory and on disk alike, so that a resumed run
    cannot know less than the one that went on.

    Args:
        folder: where versions are stored, or None to keep nothing on disk.
    """

    def __init__(self, folder: Path | None = None):
        self._folder = folder
        self._items: dict[str, Any] = {}
        self._saved: dict[str, Any] = {}
        self._changed = False
        self._loaded: int | None = None

    def open(self, step: int, confirmed: int) -> None:
        """Goes to the newest version written before request ``step``.

        Args:
            step: number of the request about to be served.
            confirmed: the last request that the server's checkpoint has seen. The newest version up to it and the
                newest of all are kept, the others removed.
        """
        if self._folder is None:
            self._items, self._changed = dict(self._saved), False
            return
        versions = self._versions()
        for late in [v for v in versions if v >= step]:
            self._path(late).unlink(missing_ok=True)
        before = [v for v in versions if v < step]
        settled = [v for v in before if v <= confirmed]
        for old in (*settled[:-1], *before[len(settled) : -1]):
            self._path(old).unlink(missing_ok=True)
        newest = before[-1] if before else None
        if newest != self._loaded or self._changed:
            self._items = self._read(newest) if newest is not None else {}
            self._loaded = newest
        self._changed = False

    def save(self, step: int) -> None:
        """Writes a version for request ``step`` if anything changed since :meth:`open`."""
        if not self._changed:
            return
        if self._folder is not None:
            tensors = {k: v for k, v in self._items.items() if isinstance(v, torch.Tensor)}
            plain = {k: v for k, v in self._items.items() if k not in tensors}
            write_tensors(self._path(step), tensors, plain)
            self._loaded = step
        self._saved, self._changed = dict(self._items), False

    def _versions(self) -> list[int]:
        return [] if self._folder is None else _versions(self._folder)

    def _path(self, step: int) -> Path:
        assert self._folder is not None
        return _file(self._folder, step)

    def _read(self, step: int) -> dict[str, Any]:
        tensors, plain = read_tensors(self._path(step))
        return {**plain, **tensors}

    def __getitem__(self, name: str) -> Any:
        value = self._items[name]
        return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().clone()
        else:
            check_plain(value, name)
            value = copy.deepcopy(value)
        self._items[name] = value
        self._changed = True

    def __delitem__(self, name: str) -> None:
        del self._items[name]
        self._changed = True

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def newest_version(folder: Path, step: int | None = None) -> tuple[int, int] | None:
    """Which version of a client's memory is the newest, without reading it.

    Args:
        folder: the client's folder.
        step: look at versions up to this request only; None takes them all.

    Returns:
        The request that wrote it and the time it was written (ns), which together name its content; None where there
        is none.
    """
    written = [v for v in _versions(folder) if step is None or v <= step]
    return (written[-1], _file(folder, written[-1]).stat().st_mtime_ns) if written else None


def newest_memory(folder: Path, step: int | None = None, names: Collection[str] | None = None) -> dict[str, Any]:
    """What a client knew after a request, for those who read it without being that client's task.

    Args:
        folder: the client's folder.
        step: the last request that counts; versions that a killed server's later requests left are passed by. None
            takes the newest version.
        names: read these items only.

    Returns:
        Tensors and plain values by name; empty where there is none.
    """
    version = newest_version(folder, step)
    if version is None:
        return {}
    tensors, plain = read_tensors(_file(folder, version[0]), names)
    return {k: v for k, v in {**plain, **tensors}.items() if names is None or k in names}


def _versions(folder: Path) -> list[int]:
    return sorted(int(p.stem.split("-")[1]) for p in folder.glob("memory-*.safetensors"))


def _file(folder: Path, step: int) -> Path:
    return folder / f"memory-{step:08d}.safetensors"
