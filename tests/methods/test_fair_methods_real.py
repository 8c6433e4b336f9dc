"""The fair methods for two rounds on real B-scans of five clients, and on images that are no numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from test_contract_staged import CHANGES, clients  # noqa: F401 (a fixture)
from tiny_federation import Federation, distance, images_of, three_clients

from medfed.data.arrays import ArrayDataset

SECTIONS = {
    "agnostic_fl": {"name": "agnostic_fl", "learning_rate": 0.05, "average": False},
    "agnostic_fl, epochs": {"name": "agnostic_fl", "work": "epochs", "salt": True},
    "agnostic_fl, as released": {"name": "agnostic_fl", "form": "as_released"},
    "q_fedavg": {"name": "q_fedavg", "learning_rate": 0.05},
    "fairfed": {"name": "fairfed"},
    "fedce": {"name": "fedce"},
    "fedce, as released": {"name": "fedce", "form": "as_released", "salt": True},
    "fedga": {"name": "fedga"},
    "fedism": {"name": "fedism", "q": 1.5, "beta": 0.25},
    "fedism_plus": {"name": "fedism_plus", "q": 1.5, "beta": 0.25},
}


@pytest.mark.parametrize("case", SECTIONS)
def test_two_rounds_on_real_images(case, clients):  # noqa: F811
    done = Federation(SECTIONS[case], clients, rounds=2, bundle_changes=CHANGES).run()
    for record in done.records:
        assert len(record["admitted"]) == (1 if case == "agnostic_fl, as released" else 5)
        assert record["refused"] == record["warnings"] == []
    assert all(torch.isfinite(t).all() for m in done.models for t in m.values() if t.is_floating_point())
    assert all((t > 0).all() for m in done.models for n, t in m.items() if n.endswith("running_var"))
    assert distance(done.models[1], done.models[0]) > 0
    for round in (1, 2):
        assert sum(done.column("weight", round).values()) == pytest.approx(1.0)
        assert all(loss > 0 for loss in done.column("loss", round).values())
    assert json.dumps(done.records)
    if case.startswith("fedism"):
        follow_sharpness(done, SECTIONS[case])
    if case == "fedism_plus":
        grows_to_the_radius_of_fedism(done, clients)


def follow_sharpness(done, section):
    """Weights are those of the paper, s^q without sample counts and averaged over rounds, of what clients measured."""
    weights = {}
    for round in (1, 2):
        sharp = done.column("sharpness", round)
        assert len({f"{s:.6g}" for s in sharp.values()}) == 5
        assert min(sharp.values()) > 0
        powers = {c: s ** section["q"] for c, s in sharp.items()}
        new = {c: p / sum(powers.values()) for c, p in powers.items()}
        beta = section["beta"] if weights else 1.0
        weights = {c: beta * new[c] + (1 - beta) * weights.get(c, 0.0) for c in new}
        assert done.column("weight", round) == pytest.approx(weights, rel=1e-6)


def grows_to_the_radius_of_fedism(done, clients):  # noqa: F811
    """In the first of two rounds, on the same model, the radius is a half to the power 1/2, and sharpness less."""
    constant = Federation(SECTIONS["fedism"], clients, rounds=2, bundle_changes=CHANGES).run()
    sharp, whole = done.column("sharpness", 1), constant.column("sharpness", 1)
    assert all(0.4 * whole[c] < sharp[c] < 0.9 * whole[c] for c in clients)
    assert done.column("received_loss", 1) == constant.column("received_loss", 1)
    assert distance(done.models[0], constant.models[0]) > 0


@pytest.mark.parametrize("case", [c for c in SECTIONS if "released" not in c or "agnostic" in c])
def test_images_that_are_not_numbers_leave_their_client_out(case):
    data = three_clients()
    broken = np.full(images_of(6, 5).shape, np.nan, np.float32)
    data["c1"] = ArrayDataset(broken, np.arange(6), data["c1"].labels)
    done = Federation(SECTIONS[case], data, network="Normed", rounds=2).run()
    for record in done.records:
        assert {r["client"] for r in record["refused"]} == {"c1"}
        assert set(record["admitted"]) <= {"c0", "c2"}
        assert record["admitted"]
    assert all(torch.isfinite(t).all() for t in done.models[-1].values() if t.is_floating_point())
