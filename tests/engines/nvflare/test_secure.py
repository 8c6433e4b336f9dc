"""Between real processes with certificates: the same model, and what happens when things go wrong."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from secure import SERVER, Secure

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))
from experiments import changed, tiny_experiment

from medfed.config import validate
from medfed.federation.memory import newest_memory
from medfed.federation.state import read_tensors, same_state, write_tensors
from medfed.ledger import LEDGER, differences, read_ledger
from medfed.running import start
from medfed.tracking.records import RecordLog

SITES = ["client_00", "client_01", "client_02"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def make(tmp_path):
    from medfed.data.demo import make_demo_cohort

    made = []

    def build(kind="ct", **changes) -> Secure:
        make_demo_cohort(tmp_path / kind, kind, patients=24, seed=3)
        data = tiny_experiment(tmp_path / kind, tmp_path / "cache", tmp_path / "runs")
        engine = {"kind": "nvflare", "threads": 1, "device": "cpu"}
        data = changed(data, {"condition__partition__clients": 3, "engine": engine, **changes})
        made.append(Secure(tmp_path / "federation", data, SITES))
        made[-1].data = data  # type: ignore[attr-defined]
        return made[-1]

    yield build
    for federation in made:
        federation.close()


def ledgers_agree(federation: Secure) -> None:
    received = read_ledger(federation.run / LEDGER)
    for site in SITES:
        sent = read_ledger(federation.memory(site) / LEDGER)
        assert sent
        assert differences(sent, [e for e in received if e["client"] == site]) == ([], [])


def test_the_model_is_bitwise_that_of_the_local_engine_and_a_stranger_stays_outside(make):
    federation = make()
    local = start(validate(changed(federation.data, {"engine": {"workers": 1, "threads": 1}}), "test"))
    session = federation.start_all()
    stranger = federation.provision("other", ["stranger"]) / "stranger"
    federation.start("stranger", stranger)
    job = federation.submit(session)
    assert federation.finish(session, job) == "FINISHED:COMPLETED"
    assert federation.connected(session) == SITES
    ours, theirs = load_file(local / "model.safetensors"), load_file(federation.run / "model.safetensors")
    assert same_state(ours, theirs)
    ledgers_agree(federation)
    for site in SITES:  # where a site keeps its things is nowhere at the server
        place = str(federation.kits / site).encode()
        assert not [p for p in (federation.kits / SERVER).rglob("*") if p.is_file() and place in p.read_bytes()]


OCT = {
    "cohort__reader": "kermany",
    "bundle": "oct_bscan_classification",
    "condition": {
        "partition": {"kind": "dirichlet", "clients": 3, "alpha": 5.0, "min_samples": 6},
        "label_noise": {"kind": "symmetric", "rate": 0.4, "clean": 2},
    },
}


def test_oct_fedsir_gives_the_model_and_the_memories_of_the_local_engine(make):
    """Two jobs in one federation, one after another: both kinds of identification."""
    federation, session, corrected = make("oct", **OCT), None, []
    for identification in ("published", "evidence"):
        method = {"name": "oct_fedsir", "period": 1, "identification": identification, "stage_one": {"epochs": 1}}
        data = changed(federation.data, {"method": method})
        federation.export(data, identification)
        local = start(validate(changed(data, {"engine": {"workers": 1, "threads": 1}}), "test"))
        session = session or federation.start_all()
        assert federation.finish(session, federation.submit(session)) == "FINISHED:COMPLETED"
        assert same_state(load_file(local / "model.safetensors"), load_file(federation.run / "model.safetensors"))
        ours, theirs = RecordLog(local / "records.jsonl").read(), federation.records()
        assert [r["refused"] for r in theirs] == [[]] * 3
        for key in ("clients", "server", "bytes"):
            assert [r[key] for r in ours] == [r[key] for r in theirs]
        kept = {site: newest_memory(federation.memory(site)) for site in SITES}
        for site in SITES:
            same_memory(newest_memory(local / "clients" / site), kept[site])
        corrected += [memory["labels"] for memory in kept.values() if "labels" in memory]
        ledgers_agree(federation)
    assert corrected


def test_a_site_that_sends_nan_is_refused_and_the_others_go_on(make):
    federation = make(rounds=2, method="fedavg")
    blind(federation.kits / "client_02" / "local")
    session = federation.start_all()
    assert federation.finish(session, federation.submit(session)) == "FINISHED:COMPLETED"
    for record in federation.records():
        assert record["admitted"] == SITES[:2]
        assert record["refused"] == [{"client": "client_02", "reason": "value.loss is not finite"}]
    assert all(t.isfinite().all() for t in load_file(federation.run / "model.safetensors").values())


def same_memory(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.nan_to_num(nan=-7.0), other[name].nan_to_num(nan=-7.0)), name
        else:
            assert value == other[name], name


def blind(local: Path) -> None:
    """A site whose images are not numbers."""
    path = local / yaml.safe_load((local / "site.yaml").read_text())["share"]
    tensors, header = read_tensors(path)
    np.full(header["shape"], np.nan, np.float32).tofile(path.parent / header["images"])
    write_tensors(path, tensors, {**header, "dtype": "float32"})


def test_a_late_site_a_killed_site_and_a_killed_server(make):
    # The timeout is far above what it takes a site to start, also on a busy machine.
    federation = make(rounds=30, participation={"quorum": 2, "grace": 6.0, "timeout": 900})
    session = federation.start_all()
    federation.submit(session)
    federation.rounds(2)

    federation.signal("client_02", signal.SIGSTOP)  # later than the grace
    federation.rounds(2)
    assert federation.records()[-1]["admitted"] == SITES[:2]
    reasons = {r["client"]: r["reason"] for r in federation.records()[-1]["refused"]}
    assert reasons == {"client_02": "did not answer within 6 s after the quorum of 2"}
    federation.signal("client_02", signal.SIGCONT)
    federation.until(lambda: federation.records()[-1]["admitted"] == SITES, 60, "the late site is back")

    federation.kill("client_01")  # in the middle of a round
    federation.rounds(2)
    assert federation.records()[-1]["admitted"] == ["client_00", "client_02"]
    federation.start("client_01")  # NVFlare gives a running job to nobody who comes later

    federation.kill(SERVER)
    done = len(federation.records())
    time.sleep(2)
    federation.start(SERVER)
    session = federation.connect()
    job = federation.submit(session)  # the same job goes on with the same run
    federation.rounds(1, 900)
    assert federation.records()[done]["round"] == done + 1
    assert federation.records()[done]["admitted"] == SITES
    assert federation.finish(session, job, 900) == "FINISHED:COMPLETED"
    assert [r["round"] for r in federation.records()] == list(range(1, 31))
    for site in SITES:  # each site's ledger goes on over kills and jobs, in one chain
        assert read_ledger(federation.memory(site) / LEDGER)[-1]["round"] == 30
