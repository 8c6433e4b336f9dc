"""What one client holds: rows of the image store and labels, handed out in batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def batch_slices(n: int, batch_size: int, *, drop_last: bool = False) -> list[slice]:
    """Cuts ``n`` positions into batches, none of which has one sample only.

    BatchNorm cannot work, or has meaningless statistics, on a single sample; so a last batch of one is merged into
    the one before it.  Only ``n == 1`` or ``batch_size == 1`` leave batches of one.

    Args:
        n: number of samples.
        batch_size: samples a batch.
        drop_last: leave an incomplete last batch out, unless it is the only one.

    Returns:
        Slices in ascending order; no sample is in two of them.

    Raises:
        ValueError: ``batch_size`` below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    ends = list(range(batch_size, n + 1, batch_size))
    rest = n - (ends[-1] if ends else 0)
    if rest == 1 and batch_size > 1 and ends and not drop_last:
        ends[-1] = n
    elif rest and not (drop_last and ends):
        ends.append(n)
    return [slice(start, end) for start, end in zip([0, *ends], ends)]


class ArrayDataset:
    """Images and labels of one client.

    Args:
        images: the records that all clients share, ``[M, C, h, w]``: uint8, or floats in 0..1.
        rows: the record of each of the client's samples, ``[N]``.
        labels: their labels, int64 ``[N]`` or float32 ``[N, C]``.
        groups: a number for each sample, ``[N]``, equal for samples of one patient; None where that is not known.

    Raises:
        ValueError: the lengths differ.
        IndexError: a row outside the records.
    """

    def __init__(
        self,
        images: np.ndarray,
        rows: np.ndarray,
        labels: torch.Tensor | np.ndarray,
        groups: np.ndarray | None = None,
    ):
        self.images = images
        self.rows = np.ascontiguousarray(rows, dtype=np.int64)
        self.labels = torch.as_tensor(labels)
        if len(self.rows) != len(self.labels):
            raise ValueError(f"{len(self.rows)} rows but {len(self.labels)} labels")
        self.groups = None if groups is None else np.asarray(groups, dtype=np.int64)
        if self.groups is not None and len(self.groups) != len(self.rows):
            raise ValueError(f"{len(self.rows)} rows but {len(self.groups)} groups")
        if len(self.rows) and not 0 <= self.rows.min() <= self.rows.max() < len(images):
            raise IndexError(f"rows {self.rows.min()}..{self.rows.max()} of {len(images)} records")

    def __len__(self) -> int:
        return len(self.rows)

    def with_labels(self, labels: torch.Tensor | np.ndarray) -> ArrayDataset:
        """The same images with other labels (e.g. corrected ones)."""
        return ArrayDataset(self.images, self.rows, labels, self.groups)

    def subset(self, indices: np.ndarray | torch.Tensor) -> ArrayDataset:
        """Some of the samples, in the order given; nothing is copied but rows, labels and groups."""
        indices = np.asarray(indices)
        groups = None if self.groups is None else self.groups[indices]
        return ArrayDataset(self.images, self.rows[indices], self.labels[torch.from_numpy(indices)], groups)

    def batch(self, indices: np.ndarray | torch.Tensor) -> dict[str, torch.Tensor]:
        """One batch.

        Args:
            indices: positions within this client's data, ``[B]``.

        Returns:
            ``image`` float32 ``[B, C, h, w]`` in 0..1, ``label``, and ``index`` int64 ``[B]``: the positions.
        """
        indices = np.asarray(indices, dtype=np.int64)
        # Through a plain array: numpy's memmap subclass doubles the cost of a batch of small images.  Sorting the
        # rows gains nothing once the file is in the page cache.
        records = np.take(np.asarray(self.images), self.rows[indices], axis=0)
        image = torch.from_numpy(records)
        image = image.float().div_(255) if image.dtype == torch.uint8 else image.float()
        index = torch.from_numpy(indices)
        return {"image": image, "label": self.labels[index], "index": index}

    def batches(
        self, batch_size: int, order: np.ndarray | None = None, *, drop_last: bool = False
    ) -> Iterator[dict[str, torch.Tensor]]:
        """All samples in batches.

        Args:
            batch_size: samples a batch; see :func:`batch_slices`.
            order: positions in the order wanted, ``[N]``; as stored by default.
            drop_last: leave an incomplete last batch out.
        """
        order = np.arange(len(self)) if order is None else np.asarray(order, dtype=np.int64)
        for part in batch_slices(len(order), batch_size, drop_last=drop_last):
            yield self.batch(order[part])

    def __getstate__(self) -> dict[str, Any]:
        # To another process goes the name of a mapped file, never its content.
        state = self.__dict__.copy()
        images = self.images
        if isinstance(images, np.memmap) and images.filename is not None and images.flags.c_contiguous:
            state["images"] = ("memmap", str(images.filename), images.dtype.str, images.offset, images.shape)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.images, tuple):
            _, path, dtype, offset, shape = self.images
            self.images = np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape)
