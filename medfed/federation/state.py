"""The server's whole state in one object, and its checkpoint on disk.

Tensors are stored as safetensors and plain values as JSON in the file's header; nothing is pickled (DESIGN law 3).
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from medfed.durable import sync_folder
from medfed.errors import FederationError
from medfed.federation.messages import Message, State, check_plain

logger = logging.getLogger("medfed.federation")


@dataclass
class ServerState:
    """All that the server knows between rounds.

    Args:
        model: the global model's state dict.
        round: the last completed round, 0 before the first.
        step: requests sent so far; orders the versions of client memories.
        notes: what a method keeps, by name: each a :class:`Message` of tensors and plain values.
        once: what :meth:`Server.once` did: after which round, and its share of that round's report.
    """

    model: State
    round: int = 0
    step: int = 0
    notes: dict[str, Message] = field(default_factory=dict)
    once: dict[str, dict[str, Any]] = field(default_factory=dict)


def save_state(state: ServerState, folder: Path) -> Path:
    """Writes a checkpoint atomically; the one before it is kept as ``previous.safetensors`` unless it is damaged.

    Raises:
        FederationError: the disk is full or cannot be written; the last checkpoint is intact.
    """
    tensors: State = {f"model/{k}": t for k, t in state.model.items()}
    values: dict[str, Any] = {}
    for name, note in state.notes.items():
        check_plain(dict(note.values), name)
        values[name] = dict(note.values)
        tensors |= {f"note/{name}/{k}": t for k, t in note.tensors.items()}
    header = {"round": state.round, "step": state.step, "notes": values, "once": state.once}
    return write_tensors(folder / "state.safetensors", tensors, header, keep=folder / "previous.safetensors")


def load_state(folder: Path) -> ServerState | None:
    """Reads the newest checkpoint that is whole, or returns None where there is none; a fall-back is logged.

    Raises:
        FederationError: checkpoints are there, but none is whole, or the disk does not give one now.
    """
    faults = []
    for path in (folder / "state.safetensors", folder / "previous.safetensors"):
        try:
            tensors, header = read_tensors(path)
        except FileNotFoundError:
            continue
        except OSError as error:  # may pass: an older checkpoint would undo a round that is whole
            raise FederationError(
                f"cannot be read ({error}).", where=str(path), fix="See to the disk, then `medfed resume` the run."
            ) from None
        except (SafetensorError, ValueError) as error:
            faults.append(f"{path.name} ({error})")
            continue
        if path.name != "state.safetensors":
            why = f"is damaged: {faults[0]}" if faults else "is missing"
            logger.warning("The newest checkpoint %s; the one before it is taken, of round %d", why, header["round"])
        notes = {}
        for name, values in header["notes"].items():
            prefix = f"note/{name}/"
            notes[name] = Message({k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}, values)
        model = {k[len("model/") :]: t for k, t in tensors.items() if k.startswith("model/")}
        return ServerState(model, header["round"], header["step"], notes, header.get("once", {}))
    if faults:
        raise FederationError(
            f"no checkpoint can be read: {'; '.join(faults)}.", where=str(folder), fix="Start the run anew."
        )
    return None


def write_tensors(path: Path, tensors: State, header: dict[str, Any], keep: Path | None = None) -> Path:
    """Writes tensors and a JSON header to one file, atomically and durably.

    Args:
        path: the file.
        tensors: tensors by name, on any device; views are allowed.
        header: plain values.
        keep: where the file that stood there before goes; a damaged one does not take the place of a whole one.

    Raises:
        FederationError: the disk is full or cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".writing")
    packed = {k: t.detach().cpu().contiguous() for k, t in tensors.items()}
    try:
        save_file(unshared(packed), new, metadata={"medfed": json.dumps(header, allow_nan=False)})
        with open(new, "rb+") as handle:
            os.fsync(handle.fileno())
        if keep is not None and path.exists() and _whole(path):
            os.replace(path, keep)
        os.replace(new, path)
        sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        new.unlink(missing_ok=True)
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        raise FederationError(
            "the disk is full." if full else f"cannot be written ({error}).",
            where=str(path),
            fix="The last checkpoint is intact: make room, then `medfed resume` the run.",
        ) from None
    return path


def read_tensors(path: Path, names: Collection[str] | None = None) -> tuple[State, dict[str, Any]]:
    """Reads what :func:`write_tensors` wrote: all tensors, or those of some names, and the header."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if "medfed" not in metadata:
            raise ValueError("not written by medfed")
        wanted = [k for k in file.keys() if names is None or k in names]  # noqa: SIM118
        return {k: file.get_tensor(k) for k in wanted}, json.loads(metadata["medfed"])


def _whole(path: Path) -> bool:
    """Whether :func:`read_tensors` can read a file, by its header and its size."""
    try:
        read_tensors(path, names=())
    except (SafetensorError, ValueError):
        return False
    return True


def unshared(tensors: State) -> State:
    """The tensors, those that share memory cloned: safetensors refuses views of one buffer."""
    seen: set[int] = set()
    out: State = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        out[name] = tensor if whole and address not in seen else tensor.clone()
        seen.add(address)
    return out


def same_state(one: State, other: State) -> bool:
    """Whether two state dicts are bitwise the same."""
    return one.keys() == other.keys() and all(
        one[k].dtype == other[k].dtype and torch.equal(one[k], other[k]) for k in one
    )
