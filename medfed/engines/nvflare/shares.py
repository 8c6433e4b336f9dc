"""What one client holds, apart from everybody else: rows of an image array and observed labels, no truth.

A simulation's shares point into the image store; the shares of a trial federation carry their own images, so that a
site has its own and no others.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch

from medfed.data.arrays import ArrayDataset
from medfed.errors import DataError
from medfed.experiment import Shards
from medfed.federation.memory import client_folder
from medfed.federation.state import read_tensors, write_tensors


def share_path(folder: Path, client: str) -> Path:
    """Where the share of a client lies in a folder of shares."""
    return folder / client_folder(client) / "share.safetensors"


def write_share(shards: Shards, client: str, folder: Path, *, own_images: bool) -> Path:
    """Writes what one client holds.

    Args:
        shards: what all clients hold.
        client: the client.
        folder: the folder of all shares.
        own_images: copy its images beside it instead of pointing into the image store.
    """
    data, path = shards(client), share_path(folder, client)
    images, rows = data.images, data.rows
    if own_images:
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir(parents=True)
        images, place = np.ascontiguousarray(images[rows]), "images.bin"
        images.tofile(path.parent / place)
        rows = np.arange(len(rows), dtype=np.int64)
    else:
        place = str(Path(images.filename).resolve())  # type: ignore[attr-defined]
    tensors = {"rows": torch.from_numpy(rows), "labels": data.labels}
    if data.groups is not None:
        tensors["groups"] = torch.from_numpy(data.groups)
    header = {"client": client, "images": place, "shape": list(images.shape), "dtype": str(images.dtype)}
    return write_tensors(path, tensors, header)


def open_share(path: Path, client: str) -> ArrayDataset:
    """Reads what one client holds; the images are mapped into memory.

    Raises:
        DataError: it is not there, or somebody else's.
    """
    try:
        tensors, header = read_tensors(path)
        owner, shape, dtype = header["client"], tuple(header["shape"]), np.dtype(header["dtype"])
        images = np.memmap(path.parent / header["images"], dtype=dtype, mode="r", shape=shape)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"the share cannot be read ({type(error).__name__}).", where=str(path)) from None
    if owner != client:
        raise DataError("the share belongs to another client.", where=str(path))
    groups = tensors["groups"].numpy() if "groups" in tensors else None
    return ArrayDataset(images, tensors["rows"].numpy(), tensors["labels"], groups)
