"""``medfed audit`` on a small run: from a client's memory to list and page, and what it refuses.

The memories are written by hand in the form in which methods leave them, so that the right list is known.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from experiments import changed, tiny_experiment

from medfed.errors import MedfedError
from medfed.federation.memory import ClientMemory, client_folder
from medfed.federation.messages import Message
from medfed.federation.state import load_state, save_state

ODD = "Klinik Süd/../1"
CLASSES = 6


@pytest.fixture(scope="module")
def finished(images, cache, tmp_path_factory) -> Path:
    """A run of one round in which nothing is judged: two clients, one with an odd name and noisy images."""
    from medfed.config import validate
    from medfed.running import start

    root = tmp_path_factory.mktemp("audit")
    table = root / "table.csv"
    files = sorted(p for p in images.rglob("*.dcm"))[:60]
    rows = [
        {
            "path": str(f),
            "label": "abcdef"[i % CLASSES],
            "patient": str(i),
            "client": ODD if i % 2 else "north",
            "split": "test" if i >= 48 else "train",
        }
        for i, f in enumerate(files)
    ]
    pd.DataFrame(rows).to_csv(table, index=False)
    changes = {
        "cohort": {"reader": "table", "root": str(table)},
        "condition": {
            "partition": {"kind": "given", "corrupted_clients": [ODD]},
            "corruption": {"kind": "gaussian_noise", "severity": 3},
        },
        "method": "fedavg",
        "rounds": 1,
    }
    return start(validate(changed(tiny_experiment(images, cache, root / "runs"), changes), "test"))


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of the run for one test."""
    return Path(shutil.copytree(finished, tmp_path / finished.name))


def labels_of(run: Path, client: str) -> pd.DataFrame:
    table = pd.read_parquet(run / "condition/clients.parquet")
    return table[table["client"] == client].sort_values("sample", ignore_index=True)


def remember(run: Path, client: str, *, step: int | None = None, wrong: tuple[int, ...] = (2, 5), **more) -> list[str]:
    """Writes a memory in which the samples at ``wrong`` look like the next class; returns their ids."""
    state = load_state(run / "checkpoint")
    step = state.step if step is None else step
    held = labels_of(run, client)
    observed = torch.as_tensor(held["observed"].to_numpy().copy())
    seems = observed.clone()
    seems[list(wrong)] = (observed[list(wrong)] + 1) % CLASSES
    hot = torch.nn.functional.one_hot(seems, CLASSES).float()
    memory = ClientMemory(run / "clients" / client_folder(client))
    memory.open(step, 0)
    memory["labels"] = seems
    memory["audit_rounds"] = [1]
    memory["audit_proposals"] = seems[None]
    memory["audit_representative"], memory["audit_residual"] = 1 + hot, 2 - hot
    for name, value in more.items():
        memory[name] = value
    memory.save(step)
    return held["sample"].iloc[list(wrong)].tolist()


def judge(run: Path, **status: str) -> None:
    state = load_state(run / "checkpoint")
    values = {"status": status, "posterior": dict.fromkeys(status, 0.25), "round": 1}
    state.notes["verdict"] = Message(values=values)
    save_state(state, run / "checkpoint")


def look(run: Path, client: str = "north", **options):
    from medfed.auditing import audit

    return audit(run, client, **options)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_wrong_labels_are_listed_with_their_files(run, finished):
    wrong = remember(run, "north")
    judge(run, north="noisy")
    made = look(run)
    table = pd.read_csv(made.csv)
    assert sorted(table["sample"]) == sorted(wrong)
    assert table["contradicting"].tolist() == [2, 2]
    assert table["representative_margin"].tolist() == [0.5, 0.5]  # (2 - 1) / 2
    assert all(Path(p).is_file() for p in table["path"])
    assert made.csv == run / "clients/north/audit/audit.csv"
    text = made.page.read_text(encoding="utf-8")
    assert text.count('<img src="data:image/jpeg;base64,') == made.pictures == 2
    assert "counted this client as noisy in round 1 (probability of clean 0.25)" in text
    assert "2 of 24 samples listed (2 contradicted by 2 criteria, 0 contradicted by 1 criterion)" in made.summary()


def test_truth_is_not_read(run):
    remember(run, ODD)
    first = everything(look(run, ODD).csv.parent)
    (run / "condition/truth.parquet").unlink()
    for file in ("test.parquet", "clients.parquet", "condition.json"):
        (run / "condition" / file).unlink()
    shutil.rmtree(run / "predictions", ignore_errors=True)
    (run / "records.jsonl").write_text("")
    again = everything(look(run, ODD).csv.parent)
    assert again["audit.csv"] == first["audit.csv"]
    columns = set(pd.read_csv(run / "clients" / client_folder(ODD) / "audit/audit.csv").columns)
    assert not {c for c in columns if "true" in c or "truth" in c}


def test_list_is_the_same_whatever_the_truth(run, monkeypatch):
    """The labels as observed count: true labels and corrupted clients of the condition may be anything."""
    from dataclasses import replace

    import medfed.auditing as auditing

    remember(run, "north")
    first = look(run).csv.read_bytes()
    genuine = auditing.prepare_run

    def scrambled(*args):
        prepared = genuine(*args)
        truth = prepared.condition.truth
        other = replace(truth, labels=(truth.labels + 1) % CLASSES, corrupted=())
        prepared.condition = replace(prepared.condition, truth=other)
        return prepared

    monkeypatch.setattr(auditing, "prepare_run", scrambled)
    assert look(run).csv.read_bytes() == first


def test_nothing_is_written_but_the_two_files(run, tmp_path, monkeypatch, cache):
    import socket

    remember(run, "north")
    look(run, out=tmp_path / "first")
    monkeypatch.setattr(socket.socket, "connect", lambda *a: pytest.fail("the audit opened a connection"))
    monkeypatch.chdir(tmp_path)
    before, images = everything(tmp_path), {p: p.stat().st_size for p in cache.rglob("images.bin")}
    look(run, out=tmp_path / "list")
    after = everything(tmp_path)
    assert set(after) - set(before) == {"list/audit.csv", "list/audit.html"}
    assert all(after[name] == content for name, content in before.items())
    assert {p: p.stat().st_size for p in cache.rglob("images.bin")} == images
    assert after["list/audit.csv"] == after["first/audit.csv"]


def test_pictures_are_those_of_the_client_in_its_own_quality(run, monkeypatch):
    """The noisy client's pictures are the noisy ones."""
    import medfed.auditing as auditing

    seen = []
    monkeypatch.setattr(
        auditing, "thumbnail", lambda record, windows: seen.append((np.array(record), windows)) or "data:,"
    )
    for client in (ODD, "north"):
        remember(run, client)
        look(run, client)
    from medfed.config import validate
    from medfed.experiment import prepare
    from medfed.yaml_file import read_yaml

    prepared = prepare(validate(read_yaml(run / "experiment.yaml"), "x"))
    for k, client in enumerate((ODD, "north")):
        shard = prepared.shards()(client)
        table = pd.read_csv(run / "clients" / client_folder(client) / "audit/audit.csv")
        held = labels_of(run, client)["sample"].tolist()
        for (record, windows), sample in zip(seen[2 * k : 2 * k + 2], table["sample"]):
            assert windows  # a head CT: the channels are windows
            assert np.array_equal(record, shard.images[shard.rows[held.index(sample)]])


def test_a_memory_beyond_the_checkpoint_is_not_read(run):
    step = load_state(run / "checkpoint").step
    wrong = remember(run, "north", wrong=(1,))
    remember(run, "north", step=step + 1, wrong=(3, 4, 6))
    assert pd.read_csv(look(run).csv)["sample"].tolist() == wrong


def test_a_run_that_goes_on_is_read_again(run, monkeypatch):
    """Between checkpoint and memory the run made a step and dropped the memory of the older checkpoint."""
    import medfed.auditing as auditing

    genuine, states = auditing.load_state, []
    wrong = remember(run, "north")

    def older_first(folder):
        state = genuine(folder)
        states.append(state)
        if len(states) == 1:
            state.step = 0
        return state

    monkeypatch.setattr(auditing, "load_state", older_first)
    assert sorted(pd.read_csv(look(run).csv)["sample"]) == sorted(wrong)
    assert len(states) > 1


def test_limit_and_class(run):
    wrong = remember(run, "north", wrong=tuple(range(10)))
    made = look(run, limit=3)
    text = made.page.read_text(encoding="utf-8")
    assert (made.shown, made.pictures, text.count("<img ")) == (10, 3, 3)
    assert "Pictures of the first 3 of 10 rows" in text
    assert len(pd.read_csv(made.csv)) == len(wrong)
    whole = pd.read_csv(made.csv).set_index("sample")["rank"]
    name = pd.read_csv(made.csv)["observed"].iloc[0]
    part = pd.read_csv(look(run, only=name).csv).set_index("sample")
    assert set(part["observed"]) == {name}
    assert (part["rank"] == whole[part.index]).all()
    assert look(run, limit=0).pictures == 0


def test_clean_client_with_evidence_has_a_list(run):
    remember(run, "north")
    judge(run, north="clean")
    assert "counted this client as clean" in look(run).page.read_text(encoding="utf-8")


def test_list_from_a_run_that_relabels(data):
    """No memory by hand: what OCT-FedSIR leaves at its clients is what is read."""
    from medfed.config import validate
    from medfed.running import start

    changes = {
        "method": {"name": "oct_fedsir", "period": 1, "stage_one": {"epochs": 1}},
        "rounds": 3,
        "condition": {
            "partition": {"kind": "dirichlet", "clients": 3, "alpha": 5.0, "min_samples": 12},
            "label_noise": {"kind": "symmetric", "rate": 0.4, "clean": 1},
        },
    }
    run = start(validate(changed(data, changes), "test"))
    status = load_state(run / "checkpoint").notes["verdict"].values["status"]
    assert len(status) == 3
    for client, judged in status.items():
        made = look(run, client)
        assert made.standing.status == judged
        assert made.found.criteria == ("representative", "residual", "left_out")
        assert made.found.checkpoints == (2, 3)
        observed = labels_of(run, client).set_index("sample")["observed"]
        table = pd.read_csv(made.csv)
        classes = json.loads((run / "run.json").read_text())["classes"]
        assert [classes[k] for k in observed[table["sample"]]] == table["observed"].tolist()
        assert (judged == "noisy") or made.found.changed == 0


def test_works_where_mlflow_cannot_even_be_imported(run, monkeypatch):
    import sys

    remember(run, "north")
    for module in [m for m in sys.modules if m.split(".")[0] == "mlflow"] + ["mlflow", "medfed.tracking.mlflow_sink"]:
        monkeypatch.setitem(sys.modules, module, None)
    assert look(run).shown == 2
    assert not list(run.parent.rglob("mlflow*"))


def refused(run: Path, client: str = "north", **options) -> str:
    with pytest.raises(MedfedError) as caught:
        look(run, client, **options)
    return str(caught.value)


def meta(run: Path, **changes) -> None:
    file = run / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_what_is_not_there_is_named_with_what_to_do(run, tmp_path):
    assert "Did you mean 'north'?" in refused(run, "nort")
    assert "--class: there is no class 'zzz'. Known: a, b, c, d, e, f." in refused(run, only="zzz")
    assert "is not a run" in refused(tmp_path)
    message = refused(run)
    assert "method fedavg keeps none at its clients" in message
    assert "oct_fedsir" in message
    meta(run, task="multilabel")
    assert "several labels at once" in refused(run)


def test_client_without_evidence_says_why(run, monkeypatch):
    import medfed.auditing as auditing

    monkeypatch.setattr(auditing, "keeps_labels", lambda method: True)
    assert "ended without a relabelling checkpoint" in refused(run)
    meta(run, rounds=9)
    assert "1 of 9 rounds are done and the first relabelling checkpoint is not reached" in refused(run)
    judge(run, north="undetermined")
    assert "could not judge it; 1 of 9 rounds" in refused(run)
    judge(run, north="clean")
    assert "counted it as clean" in refused(run)
    shutil.rmtree(run / "checkpoint")
    assert "no round is complete yet" in refused(run)


def test_changed_images_and_foreign_memories_are_refused(run):
    remember(run, "north", labels=torch.zeros(3, dtype=torch.int64))
    assert "labels of shape [3]" in refused(run)
    meta(run, data_hash="other")
    assert "no longer those that the run was made with" in refused(run)


def test_command_line(run, monkeypatch, capsys):
    import sys

    from medfed.cli import main

    def command(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["medfed", "audit", str(run), *args])
        try:
            main()
        except SystemExit as ended:
            return ended.code
        return 0

    assert command("--client", "nort") == 2
    said = capsys.readouterr().err
    assert said.startswith("medfed: ")
    assert "Did you mean 'north'?" in said
    remember(run, ODD)
    assert command("--client", ODD, "--limit", "1") == 0
    said = capsys.readouterr().out
    assert "2 of 24 samples listed" in said
    assert "(pictures of the first 1; see --limit)" in said
    assert "wrong" not in said
    assert (run / "clients" / client_folder(ODD) / "audit/audit.html").is_file()
