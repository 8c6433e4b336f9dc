"""A run of a compared method on noisy labels: what it says of clients and labels is measured, and can be audited."""

from __future__ import annotations

import json

from medfed.auditing import audit

NOISE = {"kind": "symmetric", "rate": 0.5, "clean": 1}
FEDCORR = {"name": "fedcorr", "iterations": 1, "fine_tuning": 1, "local_epochs": 1, "confidence": 0.2}


def test_verdict_and_relabelling_are_measured(start, tmp_path):
    run = start(condition__label_noise=NOISE, method=FEDCORR)
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    last = records[-1]["evaluation"]
    assert last["identification"]["accuracy"] is not None
    assert set(last["identification"]["clients"]) == {f"client_0{k}" for k in range(4)}
    told = {c: v["edited"] for r in records for c, v in r["clients"].items() if "edited" in v}
    assert told
    found = last["relabelling"]["clients"]
    assert {c: found[c]["edited"] for c in told} == told
    client = max(told, key=told.get)
    assert told[client] > 0
    listed = audit(run, client, out=tmp_path / "audit")
    assert listed.found.changed == told[client]
