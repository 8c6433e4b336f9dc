"""Tensors in memory that processes share: packed once, read as views, nothing pickled."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from medfed.errors import FederationError
from medfed.federation.messages import Message

_ALIGN = 64
Layout = list[tuple[str, str, list[int], int]]


def layout_of(tensors: Mapping[str, torch.Tensor]) -> tuple[Layout, int]:
    """Where each tensor goes in one buffer: (name, dtype, shape, offset) of each, and the bytes in all."""
    layout: Layout = []
    offset = 0
    for name, tensor in tensors.items():
        layout.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset))
        size = tensor.numel() * tensor.element_size()
        offset += (size + _ALIGN - 1) // _ALIGN * _ALIGN
    return layout, offset


class SharedBuffer:
    """A file-backed block of memory that grows and that several processes map.

    Args:
        path: the backing file; in ``/dev/shm`` where there is room, so that nothing is written to a disk.
    """

    def __init__(self, path: Path):
        self.path = path
        self._size = 0
        self._map: mmap.mmap | None = None
        self._bytes: torch.Tensor | None = None
        self._views: tuple[Layout, dict[str, torch.Tensor]] | None = None

    def _ensure(self, size: int) -> torch.Tensor:
        if self._bytes is None or self._size < size:
            on_disk = self.path.stat().st_size if self.path.exists() else 0
            if on_disk < size:
                _reserve(self.path, size)
                on_disk = size
            handle = os.open(self.path, os.O_RDWR)
            try:
                self._map = mmap.mmap(handle, on_disk)
            finally:
                os.close(handle)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
            self._size, self._views = on_disk, None
        return self._bytes

    def views(self, layout: Layout, size: int) -> dict[str, torch.Tensor]:
        """The tensors of a layout as views of the buffer; those of the last layout are kept."""
        if not layout:
            return {}
        if self._views is not None and self._views[0] == layout:
            return self._views[1]
        block = self._ensure(max(size, 1))
        views = {}
        for name, dtype, shape, offset in layout:
            kind = getattr(torch, dtype)
            count = 1
            for n in shape:
                count *= n
            length = count * torch.empty((), dtype=kind).element_size()
            views[name] = block[offset : offset + length].view(kind).view(shape)
        self._views = (layout, views)
        return views

    def pack(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Layout, int]:
        """Copies tensors into the buffer and returns their layout."""
        layout, size = layout_of(tensors)
        views = self.views(layout, size)
        if views:
            with torch.no_grad():
                torch._foreach_copy_([views[name] for name in tensors], list(tensors.values()))
        return layout, size

    def remove(self) -> None:
        """Deletes the backing file; views stay valid until they are dropped."""
        self._bytes = self._views = None
        self.path.unlink(missing_ok=True)


def _reserve(path: Path, size: int) -> None:
    """Makes a file of a size whose bytes are there: writing to those of a file with holes ends a process (SIGBUS)."""
    try:
        with open(path, "ab") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
    except OSError as error:
        raise FederationError(
            f"no room for {size / 1e6:.0f} MB that processes share: {error.strerror}.",
            where=str(path.parent),
            fix="Use fewer workers, or make room there.",
        ) from None


def scratch_folder(needed: int) -> Path:
    """A new folder for shared buffers: in memory (``/dev/shm``) where twice the need is free, else on disk."""
    shm = Path("/dev/shm")
    if shm.is_dir() and os.access(shm, os.W_OK):
        free = os.statvfs(shm)
        if free.f_bavail * free.f_frsize > 2 * needed:
            return Path(tempfile.mkdtemp(prefix="medfed-", dir=shm))
    return Path(tempfile.mkdtemp(prefix="medfed-"))


def encode(kind: str, **fields: Any) -> bytes:
    """A control message as JSON bytes."""
    return json.dumps({"kind": kind, **fields}).encode()


def decode(data: bytes) -> dict[str, Any]:
    """The fields of a control message."""
    return json.loads(data)


def message_fields(message: Message, layout: Layout | None, size: int) -> dict[str, Any]:
    """What a control message says of a message whose tensors lie in a buffer; no layout where it is the last one."""
    return {"values": dict(message.values), "layout": layout, "size": size}
