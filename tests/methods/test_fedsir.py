"""FedSIR's own mathematics, against hand calculation and NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from planted import NOISY, federation, memories, planted, watch

from medfed.errors import ConfigError
from medfed.methods.registry import resolve_method
from medfed.methods.spectral import agreed
from medfed.reliability.references import ClassReference

PLAIN = {"name": "fedsir", "period": 1, "stage_one": {"epochs": 1}}


def test_ramp_by_hand():
    """exp(-5 (1 - (t - 2) / 47)^2) times 0.2, with t = round - 1; constant before 2 and from 49 on."""
    _, s = resolve_method({"name": "fedsir"})
    assert s.weight_of_teacher(3, 10, 1) == pytest.approx(0.2 * math.exp(-5))
    assert s.weight_of_teacher(3, 10, 3) == pytest.approx(0.2 * math.exp(-5))
    assert s.weight_of_teacher(3, 10, 4) == pytest.approx(0.2 * math.exp(-5 * (46 / 47) ** 2))
    assert s.weight_of_teacher(3, 10, 50) == s.weight_of_teacher(3, 10, 100) == pytest.approx(0.2)
    assert s.weight_of_teacher(0, 10, 50) == 0
    assert resolve_method({"name": "fedsir", "ramp_end": 0})[1].weight_of_teacher(3, 10, 1) == 0.2
    assert resolve_method({"name": "fedsir", "teacher_weight": None})[1].weight_of_teacher(3, 10, 60) == 0.3


def test_forms():
    published = resolve_method({"name": "fedsir"})[1]
    released = resolve_method({"name": "fedsir", "form": "as_released"})[1]
    keys = ("augmented", "temperature", "weighting", "min_reference", "min_gap")
    assert [getattr(published, k) for k in keys] == [False, 1.0, "samples", 1, 0.0]
    assert [getattr(released, k) for k in keys] == [True, 0.8, "spectral", 100, 0.03]
    for s in (published, released):
        assert (s.balanced, s.maximum, s.absolute, s.min_samples, s.soften_student) == (False, False, True, 20, False)
        assert (s.stage_one.logit_adjustment, s.logit_adjustment, s.distil_on) == (False, True, "disagree")
    assert resolve_method({"name": "fedsir", "form": "as_released", "min_reference": 5})[1].min_reference == 5


@pytest.mark.parametrize("changes", [{"form": "other"}, {"form": None}, {"ramp_begin": -1}, {"tau": 1}])
def test_what_is_wrong_is_refused(changes):
    with pytest.raises(ConfigError):
        resolve_method({"name": "fedsir", **changes})


def test_descriptors_are_absolute_cosines_of_large_classes():
    """One class below 20 samples has no direction, unless fewer than two classes have 20."""
    counts = {"c0": (22, 25, 6), "c1": (24, 21, 5), "c2": (22, 6, 5), "c3": (21, 23, 9)}
    world = planted(counts, noisy=())
    done = federation(PLAIN, world.data, rounds=1)
    seen = watch(done)
    done.run()
    for client, classes in (("c0", (0, 1)), ("c2", (0, 1, 2))):
        z, y = world.features(client), world.observed(client)
        v = {c: np.linalg.svd(z[y == c])[2][0] for c in classes}
        cosines = np.array([abs(v[a] @ v[b]) for a in v for b in v if a != b])
        told = done.records[0]["clients"][client]
        assert told["descriptor_mean"] == pytest.approx(cosines.mean(), abs=1e-6)
        assert told["descriptor_energy"] == pytest.approx((cosines**2).mean(), abs=1e-6)
        assert "descriptor_max" not in told
    assert all("descriptor_max" not in r.values for r in seen[0][2])


@pytest.mark.parametrize("form", ["published", "as_released"])
def test_noisy_clients_are_found_and_repaired(form, tmp_path):
    world = planted()
    done = federation({**PLAIN, "form": form, "min_gap": 0.0}, world.data, folder=tmp_path, rounds=2)
    seen = watch(done)
    done.run()
    assert {c for c, s in done.column("status", 1).items() if s == "noisy"} == set(NOISY)
    for client in NOISY:
        memory = memories(done, tmp_path)[client]
        assert (memory["labels"].numpy() == world.true[client]).all()
        # Features of length one: no projection exceeds 1.
        assert float(memory["audit_representative"].max()) <= 1 + 1e-6
    described = next(r for task, _, r in seen if task == "describe")
    assert all(("dominance" in r.values) is (form == "as_released") for r in described)


def test_only_samples_without_agreement_follow_the_teacher(tmp_path, monkeypatch):
    from medfed.training import objectives

    masks = []
    real = objectives.DistillationObjective

    def noting(*args, **options):
        masks.append(options.get("mask"))
        return real(*args, **options)

    monkeypatch.setattr(objectives, "DistillationObjective", noting)
    world = planted()
    done = federation(PLAIN, world.data, folder=tmp_path, rounds=2)
    done.run()
    assert masks[: len(NOISY)] == [None] * len(NOISY)
    kept = memories(done, tmp_path)
    for client, mask in zip(NOISY, masks[len(NOISY) :], strict=True):
        assert torch.equal(mask, kept[client]["audit_proposals"][-1] < 0)


def part(direction, count, dominance=1.0):
    direction = torch.tensor(direction, dtype=torch.float64)
    return ClassReference(direction / direction.norm(), torch.zeros(3, 0, dtype=torch.float64), count, dominance)


def settings(**changes):
    return resolve_method({"name": "fedsir", **changes})[1]


def test_small_blocks_have_no_say_and_the_largest_client_stands_in():
    parts = {"a": part([1, 0, 0], 120), "b": part([0, 1, 0], 90), "c": part([1, 0.1, 0], 110)}
    direction = agreed(parts, settings(min_reference=100)).direction
    assert abs(float(direction[1])) < 0.1
    alone = agreed({"b": parts["b"], "d": part([0, 0, 1], 50)}, settings(min_reference=100)).direction
    assert alone.tolist() == pytest.approx([0, 1, 0])


def test_clients_that_disagree_give_way_to_the_largest():
    """Two orthogonal directions with weights 52 and 48: eigenvalues 0.52 and 0.48, a gap of 0.04."""
    parts = {"a": part([1, 0, 0], 48), "b": part([0, 1, 0], 52)}
    assert agreed(parts, settings(min_gap=0.03)).count == 100
    single = agreed(parts, settings(min_gap=0.05))
    assert (single.count, single.direction.tolist()) == (52, pytest.approx([0, 1, 0]))


def test_spectral_weights_by_hand():
    """Samples times dominance: 60 x 0.2 = 12 against 20 x 0.9 = 18, so that the smaller client leads."""
    parts = {"a": part([1, 0, 0], 60, 0.2), "b": part([0, 1, 0], 20, 0.9)}
    assert agreed(parts, settings(weighting="spectral")).direction.abs().tolist() == pytest.approx([0, 1, 0])
    assert agreed(parts, settings(weighting="samples")).direction.abs().tolist() == pytest.approx([1, 0, 0])
    # Eigenvalues 18/30 and 12/30: a gap of 0.2.
    assert agreed(parts, settings(weighting="spectral", min_gap=0.19)).count == 80
    assert agreed(parts, settings(weighting="spectral", min_gap=0.21)).count == 60
