"""What belongs to a client and stays with it: corrected labels, label logits, a previous model.

Memory is versioned by the request that wrote it. A server that restarts from its checkpoint repeats some requests;
the client then goes back to what it knew before the repeated request, so that a resumed run is the same run.  The
newest checkpoint may turn out damaged: what belongs to the one before it is kept too.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class Version(NamedTuple):
    """One version of a client's memory on disk.

    Args:
        step: the request that wrote it.
        confirmed: the last request of the checkpoint that the server had by then.
        path: its file.
    """

    step: int
    confirmed: int
    path: Path


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
        self._loaded: Version | None = None
        self._confirmed = 0

    def open(self, step: int, confirmed: int) -> None:
        """Goes to the newest version written before request ``step``.

        Args:
            step: number of the request about to be served.
            confirmed: the last request that the server's checkpoint has seen. The newest version up to it, the newest
                up to the checkpoint before that and the newest of all are kept, the others removed.
        """
        self._confirmed = confirmed
        if self._folder is None:
            self._items, self._changed = dict(self._saved), False
            return
        versions = _versions(self._folder)
        before = [v for v in versions if v.step < step]
        kept = {*before[-1:], *resumable(before, confirmed)}
        for version in versions:
            if version not in kept:
                version.path.unlink(missing_ok=True)
        newest = before[-1] if before else None
        if newest != self._loaded or self._changed:
            self._items = self._read(newest.path) if newest is not None else {}
            self._loaded = newest
        self._changed = False

    def save(self, step: int) -> None:
        """Writes a version for request ``step`` if anything changed since :meth:`open`."""
        if not self._changed:
            return
        if self._folder is not None:
            tensors = {k: v for k, v in self._items.items() if isinstance(v, torch.Tensor)}
            plain = {k: v for k, v in self._items.items() if k not in tensors}
            path = self._folder / f"memory-{step:08d}-{self._confirmed:08d}.safetensors"
            self._loaded = Version(step, self._confirmed, write_tensors(path, tensors, plain))
        self._saved, self._changed = dict(self._items), False

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        tensors, plain = read_tensors(path)
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


def resumable(versions: Sequence[Version], confirmed: int) -> list[Version]:
    """The versions that a server needs which restarts from its newest checkpoint, or from the one before it.

    A version that the newest checkpoint has seen and the one before it has not was written when that one was the
    newest, and so bears its number.

    Args:
        versions: versions in the order in which they were written.
        confirmed: the last request that the newest checkpoint has seen.
    """
    newest = [v for v in versions if v.step <= confirmed][-1:]
    return newest + [v for v in versions if newest and v.step <= newest[0].confirmed][-1:]


def newest_version(folder: Path, step: int | None = None) -> tuple[int, int] | None:
    """Which version of a client's memory is the newest, without reading it.

    Args:
        folder: the client's folder.
        step: look at versions up to this request only; None takes them all.

    Returns:
        The request that wrote it and the time it was written (ns), which together name its content; None where there
        is none.
    """
    version = _newest(folder, step)
    return (version.step, version.path.stat().st_mtime_ns) if version else None


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
    version = _newest(folder, step)
    if version is None:
        return {}
    tensors, plain = read_tensors(version.path, names)
    return {k: v for k, v in {**plain, **tensors}.items() if names is None or k in names}


def _newest(folder: Path, step: int | None) -> Version | None:
    written = [v for v in _versions(folder) if step is None or v.step <= step]
    return written[-1] if written else None


def _versions(folder: Path) -> list[Version]:
    return sorted(map(_version, folder.glob("memory-*.safetensors")))


def _version(path: Path) -> Version:
    """A version by the name of its file; older files do not say what was confirmed."""
    step, *confirmed = (int(part) for part in path.stem.split("-")[1:])
    return Version(step, confirmed[0] if confirmed else step, path)
