"""Quality of identification and relabelling: by hand, by identities, by an independent library."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, precision_recall_fscore_support

from medfed.reliability.quality import (
    REASONS,
    identification_quality,
    pooled,
    relabelling_quality,
    undefined,
)


def test_identification_by_hand():
    status = {"a": "clean", "b": "clean", "c": "noisy", "d": "noisy", "e": "undetermined", "f": "undetermined"}
    found = identification_quality(status, {"b", "d", "e", "elsewhere"})
    # Clean in truth: a, c, f. Trusted: a, b. Right: a (clean), d and e (noisy).
    assert found == {
        "accuracy": 3 / 6,
        "clean_precision": 1 / 2,
        "clean_recall": 1 / 3,
        "clean_f1": 2 / 5,
        "noisy_precision": 2 / 4,
        "noisy_recall": 2 / 3,
        "noisy_f1": 4 / 7,
        "clients": 6,
        "clean": 3,
        "noisy": 3,
        "judged_clean": 2,
        "judged_noisy": 2,
        "undetermined": 2,
        "accused": 1,
        "missed": 1,
    }


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["clean", "noisy", "undetermined"]), st.booleans()), min_size=1, max_size=30))
def test_identification_is_that_of_scikit_learn(clients):
    status = {f"c{i}": s for i, (s, _) in enumerate(clients)}
    noisy = [f"c{i}" for i, (_, n) in enumerate(clients) if n]
    found = identification_quality(status, noisy)
    true, judged = [n for _, n in clients], [s != "clean" for s, _ in clients]
    assert found["accuracy"] == pytest.approx(accuracy_score(true, judged))
    scores = precision_recall_fscore_support(true, judged, labels=[False, True], zero_division=np.nan)
    for name, both in zip(("precision", "recall", "f1"), scores):
        for kind, value in zip(("clean", "noisy"), both):
            ours = found[f"{kind}_{name}"]
            assert np.isnan(value) if ours is None else ours == pytest.approx(value)


def test_what_is_not_defined_is_none_with_a_reason():
    everyone = identification_quality({"a": "clean", "b": "clean"}, [])
    assert everyone["accuracy"] == everyone["clean_f1"] == 1
    assert undefined(everyone) == {
        "noisy_precision": "no client was judged noisy",
        "noisy_recall": "no client is noisy",
        "noisy_f1": "no client is noisy, nor was one judged noisy",
    }
    assert identification_quality({"a": "noisy"}, [])["noisy_f1"] == 0
    assert identification_quality({"a": "noisy"}, ["a"])["clean_f1"] is None
    assert identification_quality({}, ["a"])["accuracy"] is None
    nothing = np.zeros(0, dtype=int)
    none = relabelling_quality(nothing, nothing, nothing)
    assert set(undefined(none)) == {k for k, v in none.items() if v is None} == set(REASONS) & set(none)


def test_relabelling_by_hand():
    true, observed, current = np.array(
        [
            # kept right | made right | wrong to other wrong | kept wrong | right to wrong
            [0, 1, 2, 0, 1, 0, 1, 2, 2, 0],
            [0, 1, 2, 1, 0, 2, 0, 0, 1, 0],
            [0, 1, 2, 0, 1, 0, 2, 0, 1, 1],
        ]
    )
    assert relabelling_quality(true, observed, current) == {
        "edit_rate": 5 / 10,
        "recovery": 3 / 6,
        "correction_precision": 3 / 5,
        "false_correction_rate": 1 / 4,
        "residual_noise": 4 / 10,
        "noise_rate": 6 / 10,
        "samples": 10,
        "mislabelled": 6,
        "edited": 5,
        "recovered": 3,
        "false_edits": 1,
        "remaining": 4,
    }


LABELS = st.integers(0, 2)


@settings(max_examples=100)
@given(st.lists(st.tuples(LABELS, LABELS, LABELS), min_size=1, max_size=40), st.integers(0, 40))
def test_the_identities_of_the_paper_and_pooling(rows, cut):
    true, observed, current = np.array(rows).T
    found = relabelling_quality(true, observed, current)
    recovery, precision, false = (
        found[k] or 0.0 for k in ("recovery", "correction_precision", "false_correction_rate")
    )
    noise = found["noise_rate"]
    assert found["edit_rate"] * precision == pytest.approx(noise * recovery)
    assert found["residual_noise"] == pytest.approx(noise * (1 - recovery) + (1 - noise) * false)
    halves = [
        relabelling_quality(*(a[part] for a in (true, observed, current))) for part in np.split(range(len(rows)), [cut])
    ]
    assert pooled(halves) == found


def test_the_published_table_obeys_the_identity():
    # OCT-FedSIR, Table 3, Kermany, symmetric: edit 0.520, precision 0.941, noise 0.60, recovery 0.816.
    assert pytest.approx(0.60 * 0.816, abs=1e-3) == 0.520 * 0.941


def test_pooling_is_not_a_mean_of_ratios():
    one = relabelling_quality(np.zeros(1, int), np.ones(1, int), np.zeros(1, int))
    many = relabelling_quality(np.zeros(9, int), np.ones(9, int), np.ones(9, int))
    assert (one["recovery"], many["recovery"], pooled([one, many])["recovery"]) == (1.0, 0.0, 0.1)
    assert pooled([])["recovery"] is None


@pytest.mark.parametrize(
    ("shapes", "message"), [(((3, 2),) * 3, "one label a sample"), (((3,), (3,), (2,)), "3 true, 3 observed and 2")]
)
def test_what_cannot_be_measured_is_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        relabelling_quality(*(np.zeros(s, int) for s in shapes))
