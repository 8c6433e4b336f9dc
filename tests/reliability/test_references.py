import math

import numpy as np
import pytest
import torch
from planted_spectra import Planted

from medfed.errors import DataError
from medfed.reliability.references import ClassReference, class_reference, consensus, cutoff
from medfed.seeding import torch_generator


def part(direction, residual=(), count=1, dominance=1.0):
    direction = torch.tensor(direction, dtype=torch.float64)
    columns = [torch.tensor(r, dtype=torch.float64) for r in residual]
    basis = torch.stack(columns, 1) if columns else torch.zeros(len(direction), 0, dtype=torch.float64)
    return ClassReference(direction, basis, count, dominance)


def projector(basis):
    return basis @ basis.T


@pytest.mark.parametrize(
    ("values", "kappa", "want"),
    [
        ([10, 1], 10, 1),  # exactly 10/11
        ([0.3, 0.3, 0.2], 3, 2),  # exactly the share, but for rounding
        ([10, 1.001], 10, 2),
        ([5, 5], 10, 2),
        ([8, 1, 1], 4, 1),
        ([8, 1, 1], 10, 3),
        ([6, 2, 1, 1], 4, 2),
        ([3], 10, 1),
        ([], 10, 0),
    ],
)
def test_cutoff_by_hand(values, kappa, want):
    assert cutoff(torch.tensor(values, dtype=torch.float64), kappa) == want


def test_cutoff_counts_values_not_their_squares():
    values = torch.tensor([4.0, 1, 1, 1, 1])  # 16 of 20 of the energy, 4 of 8 of the mass
    assert cutoff(values, kappa=3) == 3


def test_reference_of_a_class_by_hand():
    found = class_reference(torch.tensor([[10.0, 0, 0, 0], [0, 0.5, 0, 0], [0, 0, 0.4, 0]]))
    assert found.direction.tolist() == pytest.approx([1, 0, 0, 0])
    assert found.residual.T.tolist() == [pytest.approx([0, 1, 0, 0]), pytest.approx([0, 0, 1, 0])]
    assert found.count == 3
    assert found.dominance == pytest.approx(9.5 / 10.9)
    one = class_reference(torch.tensor([[10.0, 0, 0, 0], [0, 0.5, 0, 0], [0, 0, 0.4, 0]]), residual=1)
    assert one.residual.T.tolist() == [pytest.approx([0, 1, 0, 0])]


@pytest.mark.parametrize(
    "rows",
    [
        [[1.0, 2.0, 3.0]],
        [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]],
        [[1.0, 0, 0], [0, 1, 0], [0, 0, 1]],  # nothing is weak
    ],
)
def test_no_residual_where_the_rank_ends_at_the_cutoff(rows):
    found = class_reference(torch.tensor(rows))
    assert found.residual.shape == (3, 0)
    assert torch.linalg.vector_norm(found.direction) == pytest.approx(1)


def test_no_reference_without_features():
    assert class_reference(torch.zeros(0, 4)) is None
    assert class_reference(torch.zeros(3, 4)) is None
    with pytest.raises(DataError):
        class_reference(torch.tensor([[math.nan, 1.0]]))


def test_representative_projector_by_hand():
    """3 e1 e1' + v v' with v at 60 degrees: its axis is at half the angle whose tangent is 2b / (a - c)."""
    root = math.sqrt(3) / 2
    angle = 0.5 * math.atan2(2 * 0.5 * root, 3 + 0.25 - 0.75)
    for sign in (1, -1):  # a client's sign does not turn the axis
        found = consensus([part([1, 0], count=3), part([sign * 0.5, sign * root], count=1)])
        assert found.direction.tolist() == pytest.approx([math.cos(angle), math.sin(angle)])
        assert found.count == 4
    assert consensus([part([-1, 0], count=3)]).direction.tolist() == [-1, 0]


def test_residual_projector_by_hand():
    """2 (e2 e2' + e3 e3') + 1 e2 e2' + nothing: e2 with 3, e3 with 2."""
    parts = [part([1, 0, 0], [[0, 1, 0], [0, 0, 1]], 2), part([1, 0, 0], [[0, -1, 0]], 1), part([1, 0, 0], [], 50)]
    found = consensus(parts)
    assert found.residual.T.abs().tolist() == [pytest.approx([0, 1, 0]), pytest.approx([0, 0, 1])]
    assert consensus(parts, residual=1).residual.T.abs().tolist() == [pytest.approx([0, 1, 0])]
    assert consensus(parts[2:]).residual.shape == (3, 0)


@pytest.mark.parametrize("weighting", ["samples", "spectral"])
@pytest.mark.parametrize("d", [7, 60])
def test_equals_the_eigenvectors_of_the_whole_projectors(weighting, d):
    planted = torch.randn(5, 9, d, generator=torch_generator("parts", d), dtype=torch.float64)
    scale = torch.tensor([9.0, 1, 1, 1, 1, 0.2, 0.15, 0.1, 0.05], dtype=torch.float64)
    parts = [class_reference(rows[: 5 + k] * scale[: 5 + k, None] + 2, residual=3) for k, rows in enumerate(planted)]
    weights = [p.count * (p.dominance if weighting == "spectral" else 1) for p in parts]
    one = sum(w * torch.outer(p.direction, p.direction) for w, p in zip(weights, parts)) / sum(weights)
    rest = sum(w * projector(p.residual) for w, p in zip(weights, parts)) / sum(weights)
    found = consensus(parts, residual=3, weighting=weighting)
    top = np.linalg.eigh(one.numpy())[1][:, -1]
    assert abs(found.direction.numpy() @ top) == pytest.approx(1)
    basis = np.linalg.eigh(rest.numpy())[1][:, -3:]
    np.testing.assert_allclose(projector(found.residual), basis @ basis.T, atol=1e-9)
    assert sum(float(found.direction @ p.direction) for p in parts) > 0


def test_weights_of_fedsir_prefer_the_client_with_the_clearest_direction():
    parts = [part([1, 0], count=10, dominance=0.1), part([0, 1], count=2, dominance=0.9)]
    assert consensus(parts).direction.tolist() == pytest.approx([1, 0])
    found = consensus(parts, weighting="spectral")
    assert found.direction.tolist() == pytest.approx([0, 1])
    assert found.dominance == pytest.approx((10 * 0.1 * 0.1 + 2 * 0.9 * 0.9) / (1 + 1.8))


def test_no_client_with_a_clear_direction_falls_back_to_counts():
    parts = [part([1, 0], count=3, dominance=0.0), part([0, 1], count=2, dominance=0.0)]
    assert consensus(parts, weighting="spectral").direction.tolist() == pytest.approx([1, 0])


def test_more_clients_find_a_common_direction_in_noise():
    planted = Planted()
    truth = planted.places[2] / torch.linalg.vector_norm(planted.places[2])

    def angle(clients):
        sets = [planted.features(torch.full((20,), 2), seed, noise=2.0) for seed in range(clients)]
        return math.acos(min(1.0, float(consensus([class_reference(f) for f in sets]).direction @ truth)))

    few, many = angle(2), angle(50)
    assert many < 0.02
    assert many < few / 2


def test_common_residual_of_planted_classes_is_the_rest_of_the_span():
    planted = Planted()
    place = planted.places[0] / torch.linalg.vector_norm(planted.places[0])
    parts = [class_reference(planted.features(torch.zeros(30, dtype=torch.int64), seed)) for seed in range(4)]
    found = consensus(parts)
    assert found.residual.shape == (40, 9)  # ten axes less the direction
    rest = projector(planted.axes.T) - torch.outer(place, place)
    assert torch.allclose(projector(found.residual), rest, atol=0.02)


def test_small_clients_fill_the_common_residual_together():
    """Three clients with two residual directions each, no two of them alike: six, or the first L by weight."""
    axes = torch.eye(9, dtype=torch.float64)
    parts = [ClassReference(axes[0], axes[:, 1 + 2 * k : 3 + 2 * k], count) for k, count in enumerate((20, 30, 10))]
    assert torch.allclose(
        projector(consensus(parts).residual), torch.diag(torch.tensor([0, *[1.0] * 6, 0, 0]).double())
    )
    four = consensus(parts, residual=4).residual
    assert torch.allclose(projector(four), torch.diag(torch.tensor([0, *[1.0] * 4, 0, 0, 0, 0]).double()))


def test_directions_that_hardly_any_sample_supports_are_left_out():
    parts = [part([1, 0, 0], [[0, 1, 0]], 1000), part([1, 0, 0], [[0, 0, 1]], 9)]
    assert consensus(parts).residual.shape == (3, 1)
    parts[1] = part([1, 0, 0], [[0, 0, 1]], 11)
    assert consensus(parts).residual.shape == (3, 2)


def test_one_client_keeps_its_own_reference():
    mine = class_reference(torch.rand(30, 12, generator=torch_generator("one")), kappa=2)
    found = consensus([mine])
    assert torch.allclose(found.direction, mine.direction)
    assert torch.allclose(projector(found.residual), projector(mine.residual), atol=1e-12)


def test_faulty_parts_are_refused():
    with pytest.raises(ValueError, match="no part"):
        consensus([])
    with pytest.raises(ValueError, match="different dimensions"):
        consensus([part([1, 0]), part([1, 0, 0])])
    with pytest.raises(ValueError, match="zero"):
        consensus([part([0, 0])])
    with pytest.raises(DataError):
        consensus([part([math.nan, 0])])


def test_parts_of_the_wire_may_be_float32():
    parts = [part([0.6, 0.8], [[-0.8, 0.6]], 2), part([0.8, 0.6], [[-0.6, 0.8]], 1)]
    short = [ClassReference(p.direction.float(), p.residual.float(), p.count) for p in parts]
    found = consensus(short)
    assert found.direction.dtype == found.residual.dtype == torch.float64
    assert torch.allclose(found.direction, consensus(parts).direction, atol=1e-6)
