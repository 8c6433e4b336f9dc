"""Traps that were found by running NVFlare, as far as other tests do not have them. Where the others are:

- arguments lost at export: test_jobs, every argument of the experiment is in the exported JSON
- integer buffers that become floats: test_nvflare_rules, integer buffers stay integers
- one client's NaN in every average: test_nvflare_rules, a client that sends NaN; test_secure, between processes
- a client that crashed stays dead: test_nvflare_rules, is back in the next round; test_secure, killed
- ``min_responses`` counts failures: test_nvflare_rules, failed replies do not count towards the quorum
- a task closes at its quorum: test_nvflare_rules, who comes within the grace is in
- a late reply: test_nvflare_rules, written down and ignored; test_secure, SIGSTOP
- types that FOBS does not admit: test_wire, FOBS sees bytes and text only
- classes that are not on the allow-list: test_jobs, the two classes need it, kits admit one class
- the best model one round late: test_hospitals, the last record measures the final model
- tracking that makes a run of every site and none of the server: test_hospitals, the server alone tracks one run
- resume: test_hospitals, test_simulation, test_secure, submitted again
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from flare import flare
from toy import make_server, round_of

import medfed
from medfed.engines.nvflare.export import check_secrets, export, read_source
from medfed.engines.nvflare.jobs import client_config, server_config
from medfed.errors import ConfigError
from medfed.federation.messages import Message
from medfed.federation.server import Patience
from medfed.federation.state import same_state

SIZES = {"c0": 1, "c1": 3, "c2": 2}


def ask(task="train", values=None):
    return lambda server: server.ask(task, Message.of(values, model=server.model), mean="model")


def test_a_crash_where_all_are_needed_costs_the_round_and_not_the_job(tmp_path):
    """NVFlare's own rule: a failure with ``min_clients`` of all is fatal."""
    with flare(SIZES, tmp_path) as f:
        server = f.server(SIZES, patience=Patience(quorum=3))
        before = server.model
        for number in server.rounds():
            replies = ask("crash", {"who": "c1"})(server) if number == 1 else ask()(server)
            if number == 1:
                assert (len(replies), "model" in replies.mean) == (0, False)
                assert same_state(server.model, before)
            else:
                assert replies.clients == ("c0", "c1", "c2")
                break
            server.state.round = number


def test_the_sites_of_a_round_are_drawn_from_the_seed_as_on_the_local_engine(tmp_path):
    """NVFlare's own rule: fewer than all are shuffled without a seed."""
    drawn = {}
    with flare(SIZES, tmp_path) as f:
        for engine in (None, f.medfed):
            options = {} if engine is None else {"engine": engine}
            server = make_server(SIZES, fraction=0.67, rounds=6, **options)
            asked = []
            for number in server.rounds():
                asked.append(ask()(server).clients)
                server.state.round = number
            drawn[engine] = asked
    assert drawn[None] == drawn[f.medfed]
    assert len(set(drawn[None])) > 1


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        (np.ones(2, np.float32), "TypeError"),
        ([1.0, 2.0], "TypeError"),
        (torch.ones(2).to_sparse(), "TypeError"),
    ],
)
def test_an_entry_that_is_no_dense_tensor_is_refused_not_dropped(tmp_path, entry, kind):
    """NVFlare's conversion leaves such entries out, arrays of NumPy included, and goes on without them."""

    def send(client, message):
        model = message.group("model")
        return Message.of({"samples": 1}, model={**model, "w": entry} if client.name == "c1" else model)

    with flare(SIZES, tmp_path, tasks={"send": send}) as f:
        replies = round_of(f.server(SIZES), ask("send"))
    assert replies.clients == ("c0", "c2")
    assert [(r.client, r.reason) for r in replies.refused] == [("c1", f"failed with {kind}")]


def test_numbers_that_cannot_be_written_are_a_refusal_of_the_site(tmp_path):
    def send(client, message):
        model = message.group("model")
        odd = model["w"].to(torch.complex128) if client.name == "c1" else model["w"]
        return Message.of({"samples": 1}, model={**model, "w": odd})

    with flare(SIZES, tmp_path, tasks={"send": send}) as f:
        replies = round_of(f.server(SIZES), ask("send"))
    assert replies.clients == ("c0", "c2")
    assert replies.refused[0].reason.startswith("its reply cannot be sent (")


def test_the_job_has_no_components_of_nvflare():
    """NVFlare's receivers make an MLflow run of every site and none of the server."""
    for config in (server_config(0.5), client_config()):
        assert config["components"] == config["task_data_filters"] == config["task_result_filters"] == []
    assert len(server_config(0.5)["workflows"]) == len(client_config()["executors"]) == 1


def test_nvflare_is_held_to_the_version_that_was_tried():
    """2.9 took classes away that earlier code built on."""
    assert 'nvflare = ["nvflare~=2.9.0"]' in (Path(medfed.__file__).parents[1] / "pyproject.toml").read_text()


def test_no_secret_is_in_a_job(tmp_path):
    """NVFlare keeps a job's parameters in clear."""
    data = {
        "sites": {"names": ["north"], "classes": ["a", "b"]},
        "bundle": "oct_bscan_classification",
        "method": "fedavg",
        "tracking": {"uri": "https://user:hunter2@mlflow.example.org"},
        "engine": {"kind": "nvflare"},
    }
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError, match="password in clear") as caught:
        export(file, tmp_path / "job")
    assert "hunter2" not in str(caught.value)
    assert not (tmp_path / "job").exists()
    check_secrets(read_source(file, ["tracking.uri=https://mlflow.example.org"]))
    check_secrets(read_source(file, ["tracking.uri=sqlite:///runs/mlflow.db"]))
