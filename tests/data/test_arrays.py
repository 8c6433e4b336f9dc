"""What one client holds: batches, the remainder of one, other labels, other processes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medfed.data.arrays import ArrayDataset, batch_slices


@pytest.mark.parametrize(
    ("n", "size", "drop", "sizes"),
    [
        (0, 4, False, []),
        (1, 4, False, [1]),
        (4, 4, False, [4]),
        (5, 4, False, [5]),
        (6, 4, False, [4, 2]),
        (9, 4, False, [4, 5]),
        (3, 1, False, [1, 1, 1]),
        (3, 2, False, [3]),
        (9, 4, True, [4, 4]),
        (6, 4, True, [4]),
        (3, 4, True, [3]),
    ],
)
def test_batch_sizes_by_hand(n, size, drop, sizes):
    assert [s.stop - s.start for s in batch_slices(n, size, drop_last=drop)] == sizes


@given(st.integers(0, 200), st.integers(1, 40))
def test_batches_cover_once_and_none_has_a_single_sample(n, size):
    slices = batch_slices(n, size)
    assert [i for s in slices for i in range(n)[s]] == list(range(n))
    if n > 1 and size > 1:
        assert all(2 <= s.stop - s.start <= size + 1 for s in slices)


def test_batch_size_zero_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        batch_slices(3, 0)


@pytest.fixture
def mapped(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (10, 2, 3, 4), dtype=np.uint8)
    values.tofile(tmp_path / "images.bin")
    return np.memmap(tmp_path / "images.bin", dtype=np.uint8, mode="r", shape=values.shape), values


def test_a_batch_is_the_rows_asked_for(mapped):
    images, values = mapped
    data = ArrayDataset(images, np.array([7, 2, 9]), torch.tensor([1, 0, 2]))
    batch = data.batch(np.array([2, 0]))
    assert batch["image"].dtype == torch.float32
    np.testing.assert_array_equal(batch["image"].numpy(), values[[9, 7]].astype(np.float32) / np.float32(255))
    assert batch["label"].tolist() == [2, 1]
    assert batch["index"].tolist() == [2, 0]
    batch["image"].zero_()  # a batch is the trainer's own
    assert (data.batch([2])["image"].numpy() == values[9] / np.float32(255)).all()


def test_batches_follow_the_order(mapped):
    images, _ = mapped
    data = ArrayDataset(images, np.arange(9), torch.arange(9))
    order = np.random.default_rng(1).permutation(9)
    batches = list(data.batches(4, order))
    assert [len(b["index"]) for b in batches] == [4, 5]
    assert torch.cat([b["label"] for b in batches]).tolist() == order.tolist()
    assert [len(b["index"]) for b in data.batches(4, drop_last=True)] == [4, 4]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_float_records_are_not_scaled(dtype):
    data = ArrayDataset(np.full((2, 1, 1, 1), 0.5, dtype=dtype), np.arange(2), np.zeros((2, 3), dtype=np.float32))
    batch = data.batch([0, 1])
    assert batch["image"].dtype == torch.float32
    assert batch["image"].unique().tolist() == [0.5]
    assert batch["label"].shape == (2, 3)


def test_other_labels_leave_the_first_alone(mapped):
    data = ArrayDataset(mapped[0], np.arange(3), torch.tensor([0, 0, 0]))
    other = data.with_labels(torch.tensor([1, 2, 3]))
    assert data.labels.tolist() == [0, 0, 0]
    assert other.batch([1])["label"].item() == 2
    assert other.images is data.images
    assert data.with_labels(torch.tensor([4, 5, 6])).subset(np.array([2, 0])).labels.tolist() == [6, 4]


def test_what_does_not_fit_is_refused(mapped):
    with pytest.raises(ValueError, match="3 rows but 2 labels"):
        ArrayDataset(mapped[0], np.arange(3), torch.zeros(2))
    with pytest.raises(IndexError, match="of 10 records"):
        ArrayDataset(mapped[0], np.array([3, 10]), torch.zeros(2))


def test_another_process_gets_the_file_and_not_its_content(mapped):
    data = ArrayDataset(mapped[0], np.array([4, 1]), torch.tensor([0, 1]))
    sent = pickle.dumps(data)
    assert not any(row.tobytes() in sent for row in mapped[1])
    again = pickle.loads(sent)
    assert isinstance(again.images, np.memmap)
    assert not again.images.flags.writeable
    np.testing.assert_array_equal(again.batch([0, 1])["image"], data.batch([0, 1])["image"])
