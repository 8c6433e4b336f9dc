"""Local intrinsic dimension: by hand, with scikit-learn's neighbours, on grids, and where points coincide."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from medfed.reliability.dimension import local_intrinsic_dimension as lid


def test_three_points_on_a_line_by_hand():
    """Distances from 0: 1, 4; from 1: 1, 3; from 4: 3, 4."""
    got = lid(torch.tensor([[0.0], [1.0], [4.0]]), neighbours=2)
    want = [-2 / math.log(d) for d in (1 / 4, 1 / 3, 3 / 4)]
    assert got.tolist() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("count", [30, 600])
@pytest.mark.parametrize("k", [5, 20])
def test_as_with_the_neighbours_of_scikit_learn(count, k):
    points = np.random.default_rng(k).normal(size=(count, 4))
    apart = NearestNeighbors(n_neighbors=k + 1).fit(points).kneighbors(points)[0][:, 1:]
    want = -1 / np.log(apart / apart[:, -1:]).mean(axis=1)
    assert np.allclose(lid(torch.tensor(points), k), want, rtol=1e-9)
    released = -20 / (np.log(apart / (apart[:, -1:] + 1e-6)).sum(axis=1) + 1e-6)
    assert np.allclose(lid(torch.tensor(points), 20, released=True), released if k == 20 else lid_of_20(points))


def lid_of_20(points):
    apart = NearestNeighbors(n_neighbors=21).fit(points).kneighbors(points)[0][:, 1:]
    return -20 / (np.log(apart / (apart[:, -1:] + 1e-6)).sum(axis=1) + 1e-6)


@pytest.mark.parametrize("dimension", [1, 2, 5])
def test_uniform_points_have_about_their_dimension(dimension):
    points = torch.rand(1500, dimension, generator=torch.Generator().manual_seed(0))
    assert float(lid(points, 20).median()) == pytest.approx(dimension, rel=0.12)


def test_few_points_use_all_the_others_and_the_released_number_still_has_twenty():
    points = torch.tensor([[0.0], [1.0], [4.0], [9.0]])
    logs = math.log(1 / 9) + math.log(4 / 9)
    assert float(lid(points)[0]) == pytest.approx(-3 / logs)
    assert float(lid(points, released=True)[0]) == pytest.approx(-20 / logs, rel=1e-5)


def test_points_that_coincide():
    points = torch.tensor([[0.0], [0.0], [0.0], [2.0], [6.0]])
    # From 0 with three neighbours: two at no distance, which do not count, and the farthest; nothing to tell.
    assert math.isnan(lid(points, 3)[0])
    assert float(lid(points, 4)[0]) == pytest.approx(-2 / math.log(2 / 6))
    assert lid(points, 2)[:3].tolist() == [0.0] * 3
    assert lid(points, 4, released=True)[:3].tolist() == [0.0] * 3
    assert lid(torch.ones(30, 2), 20).tolist() == [0.0] * 30


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_points_have_none(count):
    assert torch.isnan(lid(torch.rand(count, 3))).all()
    assert lid(torch.rand(count, 3)).shape == (count,)


def test_neighbours_equally_far_do_not_tell():
    corners = torch.eye(4)
    assert torch.isnan(lid(corners, 3)).all()
