"""Settings against the length of the run: what cannot work is refused, what has no effect is told, before a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_federation import Federation, client_data, three_clients

from medfed.errors import ConfigError
from medfed.methods.registry import METHODS, get_method, resolve_method

OFF = {"relabel": False}
EVIDENCE = {"identification": "evidence"}


def told(name, rounds, **settings):
    return resolve_method({"name": name, **settings})[1].check(rounds)


@pytest.mark.parametrize("name", METHODS)
def test_defaults_of_every_method_are_without_caution_in_a_run_as_published(name):
    assert told(name, 100) == []


@pytest.mark.parametrize("name", METHODS)
def test_no_program_refuses_a_number_of_rounds_that_its_settings_let_in(name):
    """What a program finds wrong with its rounds when it starts would be found with the images decoded."""
    for rounds in (1, 2, 30):
        try:
            told(name, rounds)
        except ConfigError:
            continue
        public = client_data([0, 1, 2, 0, 1, 2], seed=9) if get_method(name).public else None
        done = Federation(name, three_clients(), rounds=rounds, public=public)
        next(iter(done.method.program(done.server, done.settings)))
        done.server.engine.close()


@pytest.mark.parametrize(
    ("name", "settings", "rounds", "words"),
    [
        ("fednoro", {}, 10, ["method.warmup", "a warm-up of 10 rounds leaves none of 10", "Set method.warmup to 1"]),
        ("fednoro", {"warmup": 1}, 1, ["Raise rounds."]),
        (
            "oct_fedsir",
            {},
            20,
            ["method.period", "after round 20, and the last round is 20", "Set method.period to 4", "method.relabel"],
        ),
        ("oct_fedsir", {"period": 3}, 3, ["after round 3, and"]),
        ("oct_fedsir", {"period": 1}, 1, ["Raise rounds, or set method.relabel to false."]),
        ("fedsir", EVIDENCE, 5, ["method.period"]),
    ],
)
def test_what_cannot_work_is_refused(name, settings, rounds, words):
    with pytest.raises(ConfigError) as caught:
        told(name, rounds, **settings)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings", "rounds"),
    [
        ("fednoro", {"warmup": 4, "ramp_end": 4}, 5),
        ("oct_fedsir", {"period": 4}, 5),
        ("oct_fedsir", OFF, 1),
        ("oct_fedsir", {**EVIDENCE, "mixture_seed": 3, "start": "initial"}, 21),
        ("fedsir", {"ramp_end": 49}, 50),
        ("fedavg", {"salt": {"warmup": 5}}, 5),
        ("fedlsr", {"form": "as_released", "gamma": 0, "sharpen": 2}, 9),
        ("fedlsr", {"gamma": 0, "sharpen": 2, "entropy": 0.1}, 9),
        ("fedism", {"saga_from": 9, "measure": {"share": 0.2, "radius": "bounded"}}, 9),
        ("agnostic_fl", {"work": "epochs", "local_epochs": 2, "average": True}, 9),
        ("rofl", {"pseudo_from": 8, "centroid_weight": 2}, 9),
    ],
)
def test_what_just_works_is_let_in(name, settings, rounds):
    assert told(name, rounds, **settings) == []


@pytest.mark.parametrize(
    ("name", "settings", "rounds", "words"),
    [
        ("oct_fedsir", {**OFF, "kappa": 3, "audit": "noisy"}, 9, ["method.relabel: false: method.kappa, method.audit"]),
        ("oct_fedsir", {**EVIDENCE, "balanced": False}, 21, ["method.identification: evidence: method.balanced"]),
        ("pruning", {**EVIDENCE, "stage_one": {"epochs": 1}}, 9, ["method.start: initial: method.stage_one"]),
        ("oct_fedsir", {"distillation": False, "temperature": 1}, 21, ["distillation: false: method.temperature"]),
        ("oct_fedsir", {**OFF, "distil_on": "disagree"}, 9, ["method.relabel: false: method.distil_on"]),
        ("oct_fedsir", {**OFF, **EVIDENCE}, 20, ["no verdict will be revised"]),
        # exp(-5 (1 - (t - b) / (e - b))^2) of the last round t, counted from 0.
        ("fedsir", {"period": 1, "ramp_begin": 0, "ramp_end": 10}, 6, ["method.ramp_end", "reaches 29 %"]),
        ("fednoro", {"warmup": 1, "ramp_end": 11}, 7, ["reaches 29 %"]),
        ("fednoro", {"teacher_weight": 0, "temperature": 1}, 50, ["teacher_weight: 0: method.temperature"]),
        ("agnostic_fl", {"local_epochs": 2}, 9, ["method.work: gradient: method.local_epochs"]),
        ("agnostic_fl", {"work": "epochs", "batch_size": 2}, 9, ["method.work: epochs: method.batch_size"]),
        (
            "agnostic_fl",
            {"form": "as_released", "work": "epochs", "ascent_rate": 1, "batch_size": 2, "average": True},
            9,
            ["as_released: method.work, method.ascent_rate, method.batch_size, method.average"],
        ),
        ("q_fedavg", {"form": "as_released", "lipschitz": 3}, 9, ["form: as_released: method.lipschitz"]),
        ("q_fedavg", {"q": 0, "lipschitz": 3}, 9, ["q: 0: method.lipschitz"]),
        ("fedcorr", {"correct": False, "confidence": 0.9}, 99, ["correct: false: method.confidence"]),
        ("rofl", {"form": "as_released", "centroid_weight": 3}, 99, ["form: as_released: method.centroid_weight"]),
        ("rofl", {"noise_rate": 0, "gradual": 3}, 99, ["noise_rate: 0: method.gradual"]),
        ("rofl", {"pseudo_from": 9}, 9, ["method.pseudo_from is 9"]),
        ("fedlsr", {"gamma": 0, "warmup": 0.5}, 99, ["gamma: 0: method.warmup"]),
        ("fedlsr", {"gamma": 0, "sharpen": 2}, 99, ["gamma: 0: method.sharpen"]),
        ("fedism", {"saga": False, "q": 1, "follow": "perturbed_loss"}, 9, ["saga: false: method.q, method.follow"]),
        ("fedism", {"saga_from": 10}, 9, ["method.saga_from is 10 of 9 rounds"]),
        ("fedism", {"measure": {"share": 0.2}}, 9, ["method.measure.radius: constant: method.measure.share"]),
        ("fedavg", {"salt": {"share": 0.2, "radius": "adaptive"}}, 9, ["salt.radius: adaptive: method.salt.share"]),
        ("fedprox", {"salt": {"warmup": 8}}, 2, ["method.salt.warmup", "reaches 25 %"]),
    ],
)
def test_what_has_no_effect_or_not_all_of_it_is_told(name, settings, rounds, words):
    (caution,) = told(name, rounds, **settings)
    for word in words:
        assert word in caution


def test_a_run_is_refused_before_its_images_are_read_and_told_its_cautions(tmp_path, monkeypatch):
    from medfed import experiment
    from medfed.config import validate

    def never(*_):
        raise AssertionError("the cohort was read")

    monkeypatch.setattr(experiment, "read_section", never)
    plan = {"cohort": {"reader": "folder", "root": str(tmp_path)}, "bundle": "oct_bscan_classification", "rounds": 10}
    with pytest.raises(ConfigError, match="warm-up"):
        experiment.prepare(validate({**plan, "method": "fednoro"}, "x.yaml"))


SEVERAL_LABELS = Path(__file__).parents[2] / "configs" / "rsna_ich_multilabel.yaml"
ONE_LABEL = [name for name in METHODS if "multilabel" not in get_method(name).task_kinds]


@pytest.mark.parametrize("name", ONE_LABEL)
def test_several_labels_are_refused_before_any_file_is_read(name, monkeypatch):
    """A method that takes one label an image, on the six outputs of the RSNA challenge."""
    from medfed import experiment
    from medfed.config import load_experiment

    monkeypatch.setattr(experiment, "read_section", lambda *_: pytest.fail("the cohort was read"))
    plan = load_experiment(SEVERAL_LABELS, [f"method={name}", "condition.public={fraction: 0.1}"])
    with pytest.raises(ConfigError, match=f"{name} does not admit multilabel labels"):
        experiment.prepare(plan)


def test_methods_of_a_command_must_admit_its_labels_and_have_their_public_images(monkeypatch, capsys):
    """Exit code 2 at once, also where a method before it would have run for hours."""
    import sys

    from medfed import running
    from medfed.cli import main

    monkeypatch.setattr(running, "prepare", lambda *_, **__: pytest.fail("a run was prepared"))
    for second, told in (("fedlsr", "does not admit multilabel labels"), ("fedned", "does not admit")):
        monkeypatch.setattr(
            sys, "argv", ["medfed", "run", str(SEVERAL_LABELS), "--method", "fedavg", "--method", second]
        )
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert told in " ".join(capsys.readouterr().err.split())
    argv = ["medfed", "run", str(SEVERAL_LABELS), "--method", "fedavg", "--method", "rhfl"]
    monkeypatch.setattr(sys, "argv", [*argv, "--set", "cohort.task=subtype"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "rhfl needs public images" in " ".join(capsys.readouterr().err.split())


def test_readers_say_what_kind_of_labels_they_will_read(tmp_path):
    from medfed.config import CohortSection
    from medfed.experiment import kind_of

    def told(reader, **options):
        return kind_of(CohortSection.model_validate({"reader": reader, "root": tmp_path, **options}))

    assert told("rsna_ich") == told("table") == told("kermany") == told("folder") == "multiclass"
    assert told("rsna_ich", task="multilabel") == told("table", label_columns=["a", "b"]) == "multilabel"


def test_all_methods_of_a_command_are_checked_before_the_first_starts(tmp_path, monkeypatch):
    import yaml

    from medfed import running
    from medfed.console import Screen

    monkeypatch.setattr(running, "prepare", lambda *_, **__: pytest.fail("a run was prepared"))
    file = tmp_path / "x.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "cohort": {"reader": "folder", "root": str(tmp_path)},
                "bundle": "oct_bscan_classification",
                "method": "fedavg",
                "rounds": 10,
            }
        )
    )
    with pytest.raises(ConfigError, match="checkpoint"):
        running.start_all(file, [], ["fedavg", "oct_fedsir"], [], Screen())
