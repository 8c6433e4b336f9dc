"""The bundles in stock NVFlare: MONAI's client at two sites, NVFlare's FedAvg, docs/examples/monai_algo."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "monai_algo"
OCT = "oct_bscan_classification"
# What goes over NVFlare's client interface is kept beside it; the example itself runs unchanged.
WATCHED = """
import runpy
import nvflare.client as flare
import torch

numbers = {{"received": 0, "sent": 0}}

def keep(kind, model):
    numbers[kind] += 1
    name = "{folder}/" + f"{{flare.get_site_name()}}-{{kind}}-{{numbers[kind]}}.pt"
    torch.save({{"params": model.params, "meta": model.meta, "metrics": model.metrics}}, name)

receive, send = flare.receive, flare.send

def watched_receive(*args, **kwargs):
    model = receive(*args, **kwargs)
    if model is not None:
        keep("received", model)
    return model

def watched_send(model, *args, **kwargs):
    keep("sent", model)
    return send(model, *args, **kwargs)

flare.receive, flare.send = watched_receive, watched_send
runpy.run_path("{client}", run_name="__main__")
"""
SETS = ["image_size=[32,32]", "network_name=resnet18", "batch_size=4", "test_fraction=0.5"]


def run_job(*words):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "job.py"), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def shares(cohort_of, tmp_path):
    """Two sites that hold different numbers of images."""
    pytest.importorskip("nvflare")
    files = sorted(p for p in cohort_of(OCT).rglob("*") if p.is_file() and "train" in p.parts)
    for number, path in enumerate(files):
        to = tmp_path / "shares" / ("site-1" if number % 3 else "site-2") / path.parent.name
        to.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)
    return tmp_path / "shares"


@pytest.mark.slow
def test_global_weights_are_the_weighted_mean(shares, tmp_path):
    (tmp_path / "kept").mkdir()
    watched = tmp_path / "watched.py"
    watched.write_text(WATCHED.format(folder=tmp_path / "kept", client=EXAMPLE / "client.py"))
    sets = [word for text in SETS for word in ("--set", text)]
    data = ["--data", shares / "{site}", "--simulate", tmp_path / "ws", "--script", watched]
    code, said = run_job("--bundle", OCT, *data, *sets)
    assert code == 0, said[-3000:]

    def kept(name):
        return torch.load(tmp_path / "kept" / f"{name}.pt", weights_only=True)

    def mean_of(round_number):
        sent = [kept(f"{site}-sent-{round_number}") for site in ("site-1", "site-2")]
        steps = [reply["meta"]["NUM_STEPS_CURRENT_ROUND"] for reply in sent]
        assert steps[0] > steps[1] > 0
        return {
            name: np.average([np.asarray(r["params"][name], np.float64) for r in sent], axis=0, weights=steps)
            for name in sent[0]["params"]
        }

    begun = kept("site-1-received-1")["params"]
    for number, found in (
        (1, kept("site-1-received-2")["params"]),
        (1, kept("site-2-received-2")["params"]),
        (2, torch.load(next((tmp_path / "ws").rglob("FL_global_model.pt")), weights_only=False)["model"]),
    ):
        expected = mean_of(number)
        assert found.keys() == expected.keys()
        assert any(name.endswith("num_batches_tracked") for name in found)
        for name, value in expected.items():
            np.testing.assert_allclose(np.asarray(found[name], np.float64), value, rtol=1e-5, atol=1e-6, err_msg=name)
        assert not torch.equal(torch.as_tensor(found["fc.weight"]), torch.as_tensor(begun["fc.weight"]))
    assert all(0 <= kept(f"site-1-sent-{k}")["metrics"]["balanced_accuracy"] <= 1 for k in (1, 2))
    # Each site's results lie in its own folder, and nothing was written into the bundle.
    assert len(list((tmp_path / "ws").rglob("eval/metrics.json"))) == 2


def test_exported_job_says_what_it_was_given(tmp_path):
    """Arguments are not lost at export, and the network is the bundle's."""
    pytest.importorskip("nvflare")
    code, said = run_job("--bundle", OCT, "--data", "/data/{site}", "--job", tmp_path / "jobs", "--set", "seed=7")
    assert code == 0, said[-3000:]
    job = tmp_path / "jobs" / OCT
    client = next(job.rglob("config_fed_client.json")).read_text()
    server = json.loads(next(job.rglob("config_fed_server.json")).read_text())
    assert "--data /data/{site} --epochs 1 --set seed=7" in client
    persistor = next(c for c in server["components"] if c["id"] == "persistor")
    assert persistor["args"]["model"] == {
        "path": "medfed.training.networks.build_network",
        "args": {"name": "squeezenet1_1", "num_classes": 4, "in_channels": 3, "weights": "none", "seed": 7},
    }
    assert next(job.rglob("client.py")).read_bytes() == (EXAMPLE / "client.py").read_bytes()
    code, said = run_job("--bundle", OCT, "--data", "/my data", "--job", tmp_path / "jobs")
    assert code == 2
    assert "without any: ['/my data']" in said
