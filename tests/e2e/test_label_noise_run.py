"""Runs on noisy labels: what clients get, what is recorded and told, the reference, a run that was stopped."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from experiments import changed

from medfed.config import validate
from medfed.data.condition import load
from medfed.errors import ConfigError
from medfed.federation.memory import newest_memory
from medfed.report.compare import compare
from medfed.report.runs import load_run
from medfed.running import resume
from medfed.running import start as go

NOISE = {"kind": "symmetric", "rate": 0.5, "clean": 1}
METHOD = {"name": "oct_fedsir", "identification": "published", "period": 1}


def records_of(run):
    return [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]


def without_times(run):
    return [{k: v for k, v in r.items() if k not in ("seconds", "time")} for r in records_of(run)]


@pytest.fixture
def noisy(data):
    """A corrupted and three noisy clients of four; the model itself is measured in rounds 2 and 3."""
    return changed(data, {"condition__label_noise": NOISE, "method": METHOD, "evaluation": {"every": 2, "last": 1}})


def test_a_run_is_judged_and_goes_on_as_if_it_had_not_been_stopped(noisy, start):
    whole = go(validate(noisy, "test"))
    records = records_of(whole)
    assert [sorted(set(r["evaluation"]) & {"clean", "identification", "relabelling"}) for r in records] == [
        ["identification"],
        ["clean", "identification", "relabelling"],
        ["clean", "identification", "relabelling"],
    ]
    condition = load(whole / "condition")
    assert len(condition.truth.noisy) == 3
    assert condition.truth.corrupted == ("client_03",)
    first = records[0]
    judged = {c: v["status"] for c, v in first["clients"].items()}
    found = first["evaluation"]["identification"]
    right = [(judged[c] == "clean") == (c not in condition.truth.noisy) for c in condition.clients]
    assert found["accuracy"] == np.mean(right)
    assert [found["clients"][c]["correct"] for c in condition.clients] == right

    # The relabelling again from the files: what clients remember, what they observed, what is true.
    held, truth = (pd.read_parquet(whole / "condition" / f"{name}.parquet") for name in ("clients", "truth"))
    held["true"], held["now"] = truth["label"], held["observed"]
    measured = records[-1]["evaluation"]["relabelling"]
    for client in condition.clients:
        labels = newest_memory(whole / "clients" / client).get("labels")
        assert (client in measured["clients"]) == (judged[client] == "noisy")
        if labels is not None:
            held.loc[held["client"] == client, "now"] = labels.numpy()
    part = held[held["client"].isin(measured["clients"])]
    assert measured["samples"] == len(part)
    assert measured["edited"] == (part["now"] != part["observed"]).sum()
    assert measured["edited"] == sum(v["edited"] for v in records[-1]["clients"].values() if "edited" in v)
    assert measured["residual_noise"] == (part["now"] != part["true"]).mean()
    assert measured["noise_rate"] == (part["observed"] != part["true"]).mean()

    class Stop(Exception):
        pass

    def stop(record, server):
        if record["round"] == 2:
            raise Stop

    with pytest.raises(Stop):
        go(validate(noisy, "test"), listeners=[stop])
    (stopped,) = (p.parent for p in whole.parent.glob("*/run.json") if p.parent != whole)
    # What a killed server's next request would have left at a client.
    newest = max((stopped / "clients").glob("*/memory-*.safetensors"), key=lambda p: p.name)
    newest.with_name("memory-00009999.safetensors").write_bytes(newest.read_bytes())
    resume(stopped)
    assert without_times(stopped) == without_times(whole)


def test_the_reference_on_true_labels_is_paired_with_noisy_runs(noisy, start):
    noisy = changed(noisy, {"rounds": 1, "method": "fedavg"})
    with_noise, reference, plain = (
        go(validate(changed(noisy, {"condition__label_noise": n}), "test"))
        for n in (NOISE, {**NOISE, "apply": False}, None)
    )
    metas = [json.loads((run / "run.json").read_text()) for run in (with_noise, reference, plain)]
    assert len({m["partition_hash"] for m in metas}) == len({m["initial_model_hash"] for m in metas}) == 1
    assert len({m["condition_hash"] for m in metas}) == 3
    assert metas[2]["condition_hash"] == metas[2]["partition_hash"]
    assert [m["mislabelled"] for m in metas] == [sum(load(with_noise / "condition").mislabelled.values()), 0, 0]
    assert metas[0]["mislabelled"] > 0
    result = compare([load_run(with_noise), load_run(reference)])
    assert result.methods == ["fedavg", "fedavg (true labels)"]
    assert result.paired
    one, two = (records_of(run)[-1] for run in (reference, plain))
    assert one["evaluation"] == two["evaluation"]  # not applied is as if there were none
    assert one["evaluation"]["clean"] != records_of(with_noise)[-1]["evaluation"]["clean"]


def test_clients_get_observed_labels_and_people_the_count(noisy):
    from medfed.experiment import prepare

    told = []
    prepared = prepare(validate(noisy, "test"), say=told.append)
    condition = prepared.condition
    for client, (_, labels) in prepared.shards().parts.items():
        np.testing.assert_array_equal(labels.numpy(), condition.view(client).labels)
        differs = not np.array_equal(labels.numpy(), condition.truth.of_client(client)[1])
        assert differs == (client in condition.truth.noisy)
    evaluator = prepared.evaluator()
    assert all(np.array_equal(v, condition.truth.test_labels) for v in evaluator.labels.values())
    count = sum(condition.mislabelled.values())
    line = f"Label noise (symmetric, rate 0.5): {count} of {len(condition.observed)} labels at 3 of 4 clients are wrong"
    assert line in told


def test_a_map_that_does_not_fit_is_refused_before_any_image_is_decoded(noisy, monkeypatch):
    from medfed.experiment import prepare

    monkeypatch.setattr("medfed.data.store.ImageStore.open", lambda *_: pytest.fail("images were touched"))
    wrong = {**NOISE, "kind": "asymmetric", "map": {"epidural": "subdurral"}}
    with pytest.raises(ConfigError, match="Did you mean 'subdural'"):
        prepare(validate(changed(noisy, {"condition__label_noise": wrong}), "test"))
    with pytest.raises(ConfigError, match="one label a sample"):
        prepare(validate(changed(noisy, {"cohort__task": "multilabel", "method": "fedavg"}), "test"))
