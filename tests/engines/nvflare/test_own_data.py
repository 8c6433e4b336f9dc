"""A site brings its own images: classes from the job, the agreed bundle, settings that stay at home."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from medfed.config import validate
from medfed.data.cohort import Task
from medfed.engines.nvflare.hospitals import NOT_EVALUATED, agree
from medfed.engines.nvflare.hosting import ERRORS, open_desk, own_data_of
from medfed.engines.nvflare.plan import RUNS, SitePlan, site_names, site_plan
from medfed.engines.nvflare.shares import open_share, write_share
from medfed.engines.nvflare.site_bundle import agreed_bundle, own_keys, site_bundle
from medfed.engines.nvflare.site_settings import SiteSettings, own_data, read_site
from medfed.engines.nvflare.wire import TASK, own_values, pack_request, unpack
from medfed.errors import ConfigError, DataError
from medfed.experiment import Shards
from medfed.federation.client import Request
from medfed.federation.messages import Message
from medfed.ledger import LEDGER, read_ledger

CLASSES = ("CNV", "DME", "DRUSEN", "NORMAL")


def write_images(root: Path, classes: tuple[str, ...], each: int = 3) -> Path:
    rng = np.random.default_rng(len(classes))
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(each):
            Image.fromarray(rng.integers(0, 256, (24, 24), dtype=np.uint8)).save(root / name / f"{name}-{i}.png")
    return root


@pytest.fixture
def experiment():
    return validate(
        {
            "sites": {"names": ["north", "south"], "classes": list(CLASSES), "held_out": 0.25},
            "bundle": "oct_bscan_classification",
            "overrides": {
                "image_size": [16, 16],
                "batch_size": 4,
                "network_name": "ResNet",
                "network_def::block": "basic",
                "network_def::layers": [1, 1, 1, 1],
                "network_def::block_inplanes": [4, 4, 4, 4],
                "network_def::conv1_t_size": 3,
            },
            "method": "fedavg",
            "rounds": 2,
            "engine": {"kind": "nvflare"},
        },
        "test",
    )


@pytest.fixture
def plan(experiment):
    return site_plan(experiment, agree(experiment).bundle, "r1", site_names(["north", "south"]))


@pytest.fixture
def workspace(tmp_path):
    (tmp_path / "kit" / "local").mkdir(parents=True)
    return tmp_path / "kit"


def settle(workspace: Path, **settings) -> None:
    settings = {"device": "cpu", "threads": 1, "cache": str(workspace / "cache"), **settings}
    (workspace / "local" / "site.yaml").write_text(yaml.safe_dump(settings))


def ask(desk, task="train", model=None, **values):
    request = Request(task, 1, 1, 0, Message.of(values, model=model or {}))
    return unpack(desk.answer(TASK, pack_request(request, "r1"), own_values(request, "north")))


def test_a_site_without_some_classes_trains_with_the_numbers_of_the_job(plan, experiment, workspace, tmp_path):
    root = write_images(tmp_path / "images", ("NORMAL", "DME"))
    settle(workspace, cohort={"reader": "folder", "root": str(root)})
    data = own_data(read_site(workspace / "local" / "site.yaml"), plan, "north", agreed_bundle(plan), tmp_path)
    labels = [*data.training.labels.tolist(), *data.held_out.labels.tolist()]
    assert sorted(labels) == [1, 1, 1, 3, 3, 3]  # DME and NORMAL of the job, not 0 and 1 of the folder
    header, answer = ask(open_desk(plan, "north", workspace), model=agree(experiment).initial_model(), **train_values())
    assert header["kind"] == "reply", header
    assert answer.values["samples"] == len(data.training)
    assert str(root) not in json.dumps(header)
    assert (workspace / RUNS / "r1" / "north" / LEDGER).is_file()


def train_values() -> dict:
    """What FedAvg's program tells its clients in the first round, recorded from the program itself."""
    from medfed.methods.registry import resolve_method

    class Stop(Exception):
        pass

    class Recorder:
        told: dict = {}
        model: dict = {}
        num_rounds = 2

        def rounds(self):
            yield 1

        def ask(self, task, message, **_):
            Recorder.told = dict(message.values)
            raise Stop

    method, settings = resolve_method({"name": "fedavg"})
    with pytest.raises(Stop):
        next(iter(method.program(Recorder(), settings)))
    return Recorder.told


def test_a_class_that_was_not_agreed_on_is_refused_and_its_name_stays_at_the_site(plan, workspace, tmp_path):
    root = write_images(tmp_path / "images", ("NORMAL", "SECRETCLASS"))
    settle(workspace, cohort={"reader": "folder", "root": str(root)})
    header, _ = ask(open_desk(plan, "north", workspace))
    assert header["reason"] == "cannot take part: its images and labels cannot be used"
    assert "the job has no class 'SECRETCLASS'" in (workspace / RUNS / "r1" / "north" / ERRORS).read_text()
    assert "SECRETCLASS" not in (workspace / RUNS / "r1" / "north" / LEDGER).read_text()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cohort": {"reader": "folder", "root": "/nowhere"}, "share": "x"},
        {"shore": "x"},
        {"share": "a", "threads": "b"},
    ],
)
def test_settings_that_are_not_valid_are_told_at_the_site_only(plan, workspace, settings):
    settle(workspace, **settings)
    header, _ = ask(open_desk(plan, "north", workspace))
    assert header["reason"] == "cannot take part: its site.yaml cannot be used"
    assert read_ledger(workspace / RUNS / "r1" / "north" / LEDGER)[0]["kind"] == "refusal"
    with pytest.raises(ConfigError):
        read_site(workspace / "local" / "site.yaml")


def test_no_settings_at_all_are_a_refusal(plan, workspace):
    header, _ = ask(open_desk(plan, "north", workspace))
    assert header["reason"] == "cannot take part: its site.yaml cannot be used"


def test_another_bundle_is_refused_with_the_hash_agreed_on(plan, workspace):
    settle(workspace, share="x")
    other = SitePlan.model_validate({**plan.model_dump(), "bundle_hash": "0" * 64})
    header, _ = ask(open_desk(other, "north", workspace))
    assert "is not the agreed one" in header["reason"]
    assert "agreed 000000000000" in header["reason"]
    other = SitePlan.model_validate({**plan.model_dump(), "files_hash": "0" * 64})
    header, _ = ask(open_desk(other, "north", workspace))
    assert "is not the agreed one (000000000000)" in header["reason"]


def test_overrides_that_are_code_are_refused_before_anything_is_evaluated(plan, workspace, tmp_path):
    settle(workspace, share="x")
    code = f"$__import__('pathlib').Path('{tmp_path / 'ran'}').touch()"
    evil = SitePlan.model_validate({**plan.model_dump(), "overrides": {**plan.overrides, "learning_rate": code}})
    header, _ = ask(open_desk(evil, "north", workspace))
    assert "holds what it may not hold" in header["reason"]
    assert not (tmp_path / "ran").exists()
    assert "learning_rate" in (workspace / RUNS / "r1" / "north" / ERRORS).read_text()


@pytest.mark.parametrize(
    "key", ["network_def::layers", "classes", "image_size", "learning_rate", "normalize::mean", "step", "in_channels"]
)
def test_an_override_of_what_is_agreed_is_refused_and_named_at_the_site_only(plan, workspace, key):
    settle(workspace, share="x", overrides={key: 1, "batch_size": 2})
    header, _ = ask(open_desk(plan, "north", workspace))
    assert header["reason"] == "cannot take part: its site.yaml overrides what all sites have agreed on"
    said = (workspace / RUNS / "r1" / "north" / ERRORS).read_text()
    assert f"overrides: {key}" in said
    assert "A site may override augment, batch_size" in said


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"augment::flop": 1}, "cannot take part: its overrides do not fit the bundle"),
        ({"batch_size": 0}, "cannot take part: its overrides do not fit the bundle"),
        ({"prepare::transforms::3::size": [8, 8]}, "cannot take part: its images and labels cannot be used"),
    ],
)
def test_an_override_that_does_not_fit_is_refused(plan, workspace, tmp_path, overrides, reason):
    root = write_images(tmp_path / "images", ("NORMAL", "DME"))
    settle(workspace, cohort={"reader": "folder", "root": str(root)}, overrides=overrides)
    header, _ = ask(open_desk(plan, "north", workspace))
    assert header["reason"] == reason


def test_a_share_of_a_trial_carries_its_patients_and_keeps_whole_ones_apart(plan, workspace):
    patients = np.repeat(np.arange(6), 4)
    images = np.zeros((24, 3, 16, 16), np.uint8)
    parts = {"north": (np.arange(24), torch.arange(24) % 4)}
    path = write_share(Shards(images, parts, {"north": patients}), "north", workspace / "local", own_images=True)
    assert open_share(path, "north").groups.tolist() == patients.tolist()
    settings = SiteSettings(share=str(path.relative_to(workspace / "local")))
    made = own_data_of(plan, "north", settings, workspace / "local", agreed_bundle(plan), workspace)
    held, left = set(made.held_out.groups.tolist()), set(made.training.groups.tolist())
    assert held
    assert not held & left
    assert held | left == set(range(6))


def test_patients_of_whom_one_image_is_marked_as_test_are_the_held_out_share(plan, workspace, tmp_path):
    root = write_images(tmp_path / "images", ("NORMAL", "DME"), each=6)
    files = sorted(root.rglob("*.png"))
    rows = [f"{f.relative_to(root)},{f.parent.name},p{i % 4},{'test' if i == 5 else ''}" for i, f in enumerate(files)]
    (root / "labels.csv").write_text("path,label,patient,split\n" + "\n".join(rows) + "\n")
    cohort = {"reader": "table", "root": str(root), "cache": str(tmp_path / "headers")}
    made = own_data(SiteSettings(cohort=cohort), plan, "north", agreed_bundle(plan), tmp_path / "cache")
    assert len(made.held_out) == 3  # p1 has images 1, 5 and 9
    assert len(made.training) == 9


def test_an_override_that_is_code_is_refused_before_anything_is_evaluated(plan, workspace, tmp_path):
    code = f"$__import__('pathlib').Path('{tmp_path / 'ran'}').touch()"
    settle(workspace, share="x", overrides={"batch_size": code})
    header, _ = ask(open_desk(plan, "north", workspace))
    assert "holds what it may not hold" in header["reason"]
    assert not (tmp_path / "ran").exists()


def test_a_site_prepares_its_images_its_own_way(plan, workspace, tmp_path):
    root = write_images(tmp_path / "images", ("NORMAL", "DME"))
    whole = own_data(
        SiteSettings(cohort={"reader": "folder", "root": root}), plan, "north", agreed_bundle(plan), tmp_path
    )
    settings = SiteSettings(cohort={"reader": "folder", "root": root}, overrides={"fit": "pad", "batch_size": 2})
    bundle = site_bundle(plan, settings)
    assert (bundle.batch_size, bundle.config["fit"]) == (2, "pad")
    assert bundle.config["network_def"] == agreed_bundle(plan).config["network_def"]
    own = own_data(settings, plan, "north", bundle, tmp_path)
    assert len(own.training) == len(whole.training)
    for name in ("oct_bscan_classification", "rsna_ich_ct_classification", "isic_dermoscopy_classification"):
        from medfed.training.bundle import TrainingBundle

        keys = own_keys(TrainingBundle.load(name))
        assert {"load", "prepare", "augment", "batch_size", "device"} <= set(keys)
        assert not {"classes", "task", "network_def", "image_size", "in_channels", "optimizer", "step"} & set(keys)


def test_a_task_of_nvflare_that_is_not_medfeds_is_refused(plan, workspace):
    settle(workspace, share="x")
    header, _ = unpack(open_desk(plan, "north", workspace).answer("validate", b"", "{}"))
    assert header["reason"] == "refused: knows no task 'validate' of NVFlare"


def test_a_site_that_the_job_does_not_know_is_told(plan, workspace):
    with pytest.raises(ConfigError, match="no part in the job"):
        open_desk(plan, "east", workspace)


def test_the_sites_own_limit_counts_where_it_is_lower(plan, workspace):
    settle(workspace, share="x", max_message_mb=0.0001)
    header, _ = ask(open_desk(plan, "north", workspace), text="x" * 500)
    assert header["reason"].endswith("bytes is larger than the agreed 104 bytes")  # 0.0001 * 2**20


def test_multilabel_needs_every_label(tmp_path):
    from medfed.data.cohort import Cohort
    from medfed.engines.nvflare.site_settings import in_classes

    table = __import__("pandas").DataFrame(
        {k: ["0"] for k in ("sample", "path", "patient", "client", "split")} | {"frame": [0]}
    )
    cohort = Cohort(Task("multilabel", ("b", "a")), table, np.array([[1, 0]], np.float32))
    assert in_classes(cohort, Task("multilabel", ("a", "b"))).labels.tolist() == [[0, 1]]
    with pytest.raises(DataError, match="the site has no label 'c'"):
        in_classes(cohort, Task("multilabel", ("a", "b", "c")))
    with pytest.raises(DataError, match="multilabel, the job's are multiclass"):
        in_classes(cohort, Task("multiclass", ("a", "b")))


def test_a_server_without_images_and_held_out_shares_says_that_it_does_not_evaluate(experiment):
    sites = experiment.sites.model_copy(update={"held_out": 0})
    agreed = agree(experiment.model_copy(update={"sites": sites}))
    assert agreed.names == ("north", "south")
    assert agreed.evaluation(1, print)(None) == {"warnings": [NOT_EVALUATED]}


def test_settings_name_one_source():
    assert SiteSettings(share="x").cohort is None
    with pytest.raises(ValueError, match="either"):
        SiteSettings()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"engine": {"kind": "local"}}, "engine.kind nvflare"),
        ({"sites": None}, "'cohort' is missing."),
        ({"sites": {"names": ["a", "a"], "classes": ["x", "y"]}}, "different names"),
        ({"sites": {"names": ["a"], "classes": ["x"]}}, "at least 2"),
    ],
)
def test_an_experiment_of_sites_is_checked(experiment, change, words):
    data = {**experiment.model_dump(mode="json"), **change}
    with pytest.raises(ConfigError, match=words):
        validate(data, "test")


def test_a_run_of_real_sites_is_refused_by_medfed_run(experiment):
    from medfed.experiment import prepare

    with pytest.raises(ConfigError, match="medfed nvflare export"):
        prepare(experiment)
