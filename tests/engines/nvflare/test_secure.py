"""Between real processes with certificates: the same model, and what happens when things go wrong."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from secure import SERVER, Secure

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))
from experiments import changed, tiny_experiment

from medfed.config import validate
from medfed.engines.nvflare.plan import RUNS
from medfed.federation.state import same_state
from medfed.ledger import LEDGER, differences, read_ledger
from medfed.running import start

SITES = ["client_00", "client_01", "client_02"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def make(tmp_path):
    from medfed.data.demo import make_demo_cohort

    made = []

    def build(**changes) -> Secure:
        make_demo_cohort(tmp_path / "ct", "ct", patients=24, seed=3)
        data = tiny_experiment(tmp_path / "ct", tmp_path / "cache", tmp_path / "runs")
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
        sent = read_ledger(federation.kits / site / RUNS / federation.run.name / site / LEDGER)
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
        assert read_ledger(federation.kits / site / RUNS / federation.run.name / site / LEDGER)[-1]["round"] == 30
