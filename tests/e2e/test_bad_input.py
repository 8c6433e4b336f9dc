"""Bad input: one clear message, exit code 2, before anything slow starts."""

from __future__ import annotations

import pytest
import yaml

from medfed.config import apply_sets, load_experiment, validate
from medfed.errors import ConfigError, MedfedError


def refused(data, **changes):
    from experiments import changed

    from medfed.experiment import prepare

    with pytest.raises(MedfedError) as caught:
        prepare(validate(changed(data, changes), "experiment.yaml"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "fedizm"}, ["no method 'fedizm'", "Did you mean 'fedism'?"]),
        ({"method": {"name": "fedism", "qq": 1}}, ["unknown key 'qq'", "Did you mean 'q'?"]),
        ({"method": {"name": "fedism", "q": -1}}, ["'q'", "greater than or equal to 0"]),
        ({"method": {"name": "fedism", "salt": False, "saga": False}}, ["without salt and saga this is FedAvg"]),
        ({"cohort__reader": "rsna"}, ["no reader 'rsna'", "rsna_ich"]),
        ({"cohort__taks": "subtype"}, ["unknown key 'taks'", "task"]),
        ({"cohort__root": "/does/not/exist"}, ["/does/not/exist", "no such folder", "cohort.root"]),
        ({"bundle": "rsna_ich_ct"}, ["no bundle", "rsna_ich_ct_classification"]),
        ({"overrides__network_nam": "resnet18"}, ["network_nam", "network_name"]),
        ({"overrides__network_name": "resnet81"}, ["resnet81", "resnet18"]),
        ({"overrides__weights": "/no/such/weights.pth"}, ["weights", "/no/such/weights.pth"]),
        ({"condition__partition__clients": 400}, ["400 clients"]),
        ({"condition__partition__corrupted": 9}, ["corrupted"]),
        ({"participation": {"quorum": 5}}, ["quorum of 5 can never be reached"]),
        ({"engine__device": "cuda:7"}, ["cuda:7"]),
    ],
)
def test_fault_is_named_with_what_to_do(data, changes, words):
    message = refused(data, **changes)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rounds": 0}, ["'rounds'", "greater than or equal to 1"]),
        ({"rouds": 3}, ["unknown key 'rouds'. Did you mean 'rounds'?"]),
        ({"condition__partition__alhpa": 1}, ["'condition.partition.alhpa'. Did you mean 'alpha'?"]),
        ({"condition__corruption__severity": 6}, ["severity is 6"]),
        ({"engine__workers": 0}, ["workers"]),
        ({"tracking__uri": 3}, ["tracking.uri"]),
        ({"name": "a/b"}, ["'name'", "letters a to z", "given: 'a/b'"]),
        ({"name": "müller"}, ["'name'", "letters a to z", "given: 'müller'"]),
        ({"condition__label_noise": 0.4}, ["'condition.label_noise': should be a section of keys and values"]),
        ({"condition__label_noise": {"rate": 0.4, "noisy_clients": "a"}}, ["should be a list, e.g. [a, b]"]),
        ({"participation": {"timeout": 5}}, ["waits for every client", "dropout"]),
    ],
)
def test_file_is_validated_key_by_key(data, changes, words):
    from experiments import changed

    with pytest.raises(ConfigError) as caught:
        validate(changed(data, changes), "experiment.yaml")
    for word in words:
        assert word in str(caught.value)


def test_all_faults_are_told_at_once(data):
    with pytest.raises(ConfigError) as caught:
        validate({**data, "rouds": 1, "seed": -1}, "experiment.yaml")
    assert "rouds" in str(caught.value)
    assert "seed" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1, 2\nb: 3", "not valid YAML in line"),
        ("- a\n- b", "not a mapping"),
        ("", "not a mapping"),
        ("name: !!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_file_that_is_no_experiment(tmp_path, text, words):
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_experiment(file)


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_experiment(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_experiment(tmp_path / "b.yaml")


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["rounds=7"], {"rounds": 7, "method": "fedavg"}),
        (["method.q=2"], {"method": {"name": "fedavg", "q": 2}}),
        (["method=fedism", "method.q=0.5"], {"method": {"name": "fedism", "q": 0.5}}),
        (["condition.corruption=null"], {"condition": {"corruption": None}}),
        (["overrides.network_def::layers=[1, 2]"], {"overrides": {"network_def::layers": [1, 2]}}),
        (["overrides.step::rho.x=1"], {"overrides": {"step::rho.x": 1}}),
    ],
)
def test_set_changes_one_key(sets, expected):
    base = {"method": "fedavg"}
    result = apply_sets(base, sets)
    for key, value in expected.items():
        assert result[key] == value
    assert base == {"method": "fedavg"}


@pytest.mark.parametrize("text", ["rounds", "=3", "a=[1"])
def test_set_that_is_no_change_is_refused(text):
    with pytest.raises(ConfigError, match="--set"):
        apply_sets({}, [text])


def test_condition_seed_follows_the_seed_unless_given(data):
    assert validate({**data, "seed": 5}, "x").condition.seed == 5
    assert validate({**data, "seed": 5, "condition": {"seed": 2}}, "x").condition.seed == 2


def test_resolved_file_means_the_same(data):
    experiment = validate(data, "x")
    assert validate(yaml.safe_load(experiment.dump()), "x") == experiment


def test_command_line_says_it_once_and_exits_with_2(command):
    done = command("run", "FILE", method="fedizm")
    assert done.returncode == 2
    assert done.stderr.startswith("medfed: method.name: there is no method 'fedizm'.")
    assert "Traceback" not in done.stderr


def test_help_answers_without_heavy_imports():
    import subprocess
    import sys

    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom medfed.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "heavy = {'torch', 'monai', 'mlflow', 'pandas', 'matplotlib', 'sklearn'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_damaged_images_are_named_and_left_out(data, tmp_path):
    """A class-folder tree with good files, a truncated one, an empty one, NaN pixels and text named .png."""
    import numpy as np
    from PIL import Image

    from medfed.experiment import prepare

    rng = np.random.default_rng(0)
    root = tmp_path / "tree"
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for i in range(24):
            Image.fromarray(rng.integers(0, 255, (20, 30), dtype=np.uint8)).save(root / name / f"{i}.png")
    good = (root / "cat" / "0.png").read_bytes()
    (root / "cat" / "cut.png").write_bytes(good[: len(good) // 2])
    (root / "cat" / "empty.png").write_bytes(b"")
    (root / "dog" / "text.png").write_text("no image")
    Image.fromarray(np.full((20, 30), np.nan, np.float32)).save(root / "dog" / "nan.tiff")
    from experiments import changed

    experiment = validate(
        changed(
            data,
            {
                "cohort": {"reader": "folder", "root": str(root)},
                "bundle": "isic_dermoscopy_classification",
                "condition__partition__clients": 3,
            },
        ),
        "x",
    )
    prepared = prepare(experiment)
    left_out = {u.path.rsplit("/", 1)[-1]: u.reason for u in prepared.findings.unusable}
    assert set(left_out) == {"cut.png", "empty.png", "text.png", "nan.tiff"}
    assert "NaN" in left_out["nan.tiff"]
    assert len(prepared.rows) + len(prepared.clean_rows) == 48
    assert all(reason for reason in left_out.values())


def test_client_of_one_class_trains_and_is_noted(data, tmp_path):
    import numpy as np
    from experiments import changed
    from PIL import Image

    from medfed.running import start

    rng = np.random.default_rng(0)
    lines = ["path,label,client,split"]
    for i in range(48):
        Image.fromarray(rng.integers(0, 255, (20, 20), dtype=np.uint8)).save(tmp_path / f"{i}.png")
        client = "north" if i % 2 else "south"
        label = "a" if client == "north" or i % 4 else "b"
        lines.append(f"{i}.png,{label},{client},{'test' if i >= 36 else 'train'}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    run = start(
        validate(
            changed(
                data,
                {
                    "cohort": {"reader": "table", "root": str(tmp_path / "table.csv")},
                    "bundle": "oct_bscan_classification",
                    "condition": {"partition": {"kind": "given"}},
                    "rounds": 2,
                },
            ),
            "x",
        )
    )
    import json

    meta = json.loads((run / "run.json").read_text())
    assert meta["clients"] == ["north", "south"]
    assert any("north holds one class only (a)" in w for w in meta["warnings"])
    record = json.loads((run / "records.jsonl").read_text().splitlines()[-1])
    assert record["admitted"] == ["north", "south"]
