"""Predictions for a folder of files: what applies and what does not, studies, and the files that are written."""

import csv
import json
import math
import shutil

import nibabel
import numpy as np
import pandas as pd
import pydicom
import pytest
import torch
from experiments import tiny_experiment
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from medfed.cli import app
from medfed.data.cohort import Task
from medfed.data.corruption import to_uint8
from medfed.errors import ConfigError, DataError
from medfed.federation.state import write_tensors
from medfed.inference import Accepts, Collector, InferenceDataset, list_inputs, preprocessing_hash, run
from medfed.predicting import load_model, predict
from medfed.prediction_files import study_probabilities
from medfed.training.bundle import TrainingBundle, find_bundle

CT, OCT, DERM = "rsna_ich_ct_classification", "oct_bscan_classification", "isic_dermoscopy_classification"
SMALL = {"image_size": [32, 32], "network_name": "squeezenet1_1"}


@pytest.fixture
def trained(tmp_path):
    """``trained(name) -> model`` of a bundle with weights that nobody has trained."""

    def make(name, **more):
        overrides = {**SMALL, **more}
        network = TrainingBundle.load(name, overrides).build_network(3)
        with open(tmp_path / "weights.pt", "wb") as file:
            torch.save(network.state_dict(), file)
        return load_model(name, overrides, tmp_path / "weights.pt")

    return make


@pytest.fixture
def slices(cohort_of):
    """Some DICOM slices of the built-in cohort, all of one study each."""
    return sorted(cohort_of(CT).rglob("*.dcm"))


def reasons(found):
    return {i["file"]: i["reason"].removeprefix("not processed: ") for i in found["images"]}


def test_every_file_ends_in_the_result(trained, slices, tmp_path):
    source = tmp_path / "in"
    (source / "deep" / "er").mkdir(parents=True)
    shutil.copy(slices[0], source / "deep" / "er" / "slice")  # DICOM needs no extension
    scout = pydicom.dcmread(slices[1])
    scout.ImageType = ["ORIGINAL", "PRIMARY", "LOCALIZER"]
    scout.save_as(source / "scout.dcm")
    other = pydicom.dcmread(slices[1])
    other.Modality = "MR"
    other.save_as(source / "mr.dcm")
    (source / "cut.dcm").write_bytes(slices[2].read_bytes()[:-2000])
    (source / "notes.txt").write_text("hello")
    (source / "empty.png").write_bytes(b"")
    Image.new("L", (20, 20), 9).save(source / "grey.png")
    (source / ".DS_Store").write_bytes(b"x")
    (source / "lost").symlink_to(tmp_path / "nowhere")
    volume = np.full((24, 20, 3), -1000.0, np.float32)
    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), source / "head.nii.gz")

    found = predict(trained(CT), source, tmp_path / "out", device="cpu")
    told = reasons(found)
    assert told["deep/er/slice"] == told["head.nii.gz"] == ""
    assert told["scout.dcm"] == "a localizer (scout view)"
    assert told["mr.dcm"] == "modality MR, this model is for CT"
    assert told["cut.dcm"].startswith("pixel data shorter than the header says")
    assert told["notes.txt"] == "not an image"
    assert told["empty.png"] == "empty file"
    assert told["grey.png"] == "a picture, this model is for CT in Hounsfield units"
    assert told[".DS_Store"] == "a file of the operating system"
    assert told["lost"] == "link that leads nowhere"
    assert found["counts"] == {"processed": 4, "not processed": 8, "studies": len(found["studies"])}
    for one in found["images"]:
        assert (one["status"] == "processed") == ("p_subdural" in one) == (one["reason"] == "")
        if one["status"] == "processed":
            p = [one[f"p_{c}"] for c in found["classes"]]
            assert sum(p) == pytest.approx(1, abs=1e-5)
            assert one["predicted"] == found["classes"][int(np.argmax(p))]


def test_files_say_the_same_and_what_they_come_from(trained, slices, tmp_path):
    model = trained(CT)
    found = predict(model, slices[0].parent, tmp_path / "out", device="cpu")
    assert json.loads((tmp_path / "out" / "predictions.json").read_text()) == found
    for name, rows in (("images", found["images"]), ("studies", found["studies"])):
        with open(tmp_path / "out" / f"{name}.csv", newline="") as file:
            table = list(csv.DictReader(file))
        assert len(table) == len(rows)
        for line, row in zip(table, rows):
            assert {k: line[k] for k in row} == {k: str(v) for k, v in row.items()}
            assert (line["model"], line["round"], line["preprocessing"]) == (model.hash, "", found["preprocessing"])
    assert found["model"] == model.hash
    assert found["round"] is None
    assert found["bundle"].startswith("RSNA intracranial haemorrhage CT classification 0.")
    assert found["study_rule"]["name"] == "max"


def test_a_study_is_what_the_header_says(trained, slices, tmp_path):
    found = predict(trained(CT), slices[0].parent, tmp_path / "out", device="cpu")
    by_study = {}
    for path in slices:
        by_study.setdefault(pydicom.dcmread(path, stop_before_pixels=True).StudyInstanceUID, []).append(path.name)
    assert {s["study"]: s["images"] for s in found["studies"]} == {k: len(v) for k, v in by_study.items()}
    for study in found["studies"]:
        held = [i for i in found["images"] if i["study"] == study["study"]]
        for c in found["classes"]:  # the rule of the CT bundle
            assert study[f"p_{c}"] == max(i[f"p_{c}"] for i in held)


def test_study_rules_by_hand():
    two = Task("multiclass", ("a", "b"))
    logits = np.log(np.array([[0.8, 0.2], [0.5, 0.5]]))
    assert study_probabilities(logits, two, "max") == pytest.approx([0.8, 0.5])
    # mean logits: (log 0.8 + log 0.5) / 2 against (log 0.2 + log 0.5) / 2, so sqrt(0.4) to sqrt(0.1)
    a, b = math.sqrt(0.4), math.sqrt(0.1)
    assert study_probabilities(logits, two, "mean_logits") == pytest.approx([a / (a + b), b / (a + b)])
    several = Task("multilabel", ("a", "b"))
    logits = np.array([[0.0, math.log(3)], [2.0, -math.log(3)]])
    assert study_probabilities(logits, several, "max") == pytest.approx([1 / (1 + math.exp(-2)), 0.75])
    assert study_probabilities(logits, several, "mean_logits") == pytest.approx([1 / (1 + math.exp(-1)), 0.5])


def test_what_is_one_study_without_a_header(tmp_path):
    for name in ("a/1.png", "a/2.png", "b/1.png", "3.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / name)
    studies = {i.file: i.study for i in list_inputs(tmp_path, Accepts())}
    assert studies == {n: n for n in ("3.png", "a/1.png", "a/2.png", "b/1.png")}
    studies = {i.file: i.study for i in list_inputs(tmp_path, Accepts(), "folder")}
    assert studies == {"3.png": ".", "a/1.png": "a", "a/2.png": "a", "b/1.png": "b"}
    (one,) = list_inputs(tmp_path / "a" / "1.png", Accepts())
    assert (one.file, one.study, one.reason) == ("1.png", "1.png", "")
    with pytest.raises(DataError, match="no such file or folder"):
        list_inputs(tmp_path / "c", Accepts())


def test_colour(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3)).astype(np.uint8)
    Image.fromarray(noise).save(tmp_path / "colour.png")
    Image.fromarray(np.repeat(noise[..., :1], 3, axis=2)).save(tmp_path / "grey_as_rgb.png")
    # JPEG may leave a little colour in a grey picture.
    Image.fromarray((noise // 64 + np.array([0, 1, 0])).astype(np.uint8)).save(tmp_path / "nearly.png")

    def told(colour):
        pipeline = TrainingBundle.load(OCT, SMALL).pipeline()
        accepts = {"kind": "image", "modalities": [], "colour": colour}
        dataset = InferenceDataset(tmp_path, pipeline.load, pipeline.prepare, pipeline.shape, accepts)
        return {dataset.inputs[item["index"]].file: item["reason"] for item in map(dataset.__getitem__, range(3))}

    grey, colour = "a colour picture, this model is for grey ones", "a grey picture, not in colour"
    assert told("refused") == {"colour.png": grey, "grey_as_rgb.png": "", "nearly.png": ""}
    assert told("required") == {"colour.png": "", "grey_as_rgb.png": colour, "nearly.png": colour}
    assert set(told("any").values()) == {""}


def test_frames_and_volumes(trained, tmp_path):
    pages = [Image.new("L", (16, 16), 10 * k) for k in range(3)]
    pages[0].save(tmp_path / "stack.tiff", save_all=True, append_images=pages[1:])
    found = predict(trained(OCT), tmp_path / "stack.tiff", tmp_path / "out", device="cpu")
    assert [(i["frame"], i["study"]) for i in found["images"]] == [(k, "stack.tiff") for k in range(3)]
    (study,) = found["studies"]
    assert (study["images"], study["rule"]) == (3, "mean_logits")


def test_nothing_that_applies(trained, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.txt").write_text("x")
    model = trained(DERM)
    found = predict(model, tmp_path / "in", tmp_path / "out", device="cpu")
    assert found["counts"] == {"processed": 0, "not processed": 1, "studies": 0}
    words = [
        "predict",
        DERM,
        str(tmp_path / "in"),
        "--out",
        str(tmp_path / "o"),
        "--weights",
        str(tmp_path / "weights.pt"),
    ]
    with pytest.raises(SystemExit) as left:
        app([*words, "--set", "network_name=squeezenet1_1"])
    assert left.value.code == 1
    assert "images: 0 processed, 1 not" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_results_that_cannot_be_written_are_told_before_anything_is_computed(place, trained, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    model = trained(OCT)
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda *a: pytest.fail("the network was called"))
    with pytest.raises(ConfigError, match="results cannot be written there") as told:
        predict(model, tmp_path / "a.png", tmp_path / place, device="cpu")
    assert told.value.where == str(tmp_path / place)
    assert told.value.fix


def test_a_folder_without_files_is_told(trained, tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    with pytest.raises(DataError, match="no file in that folder"):
        predict(trained(OCT), tmp_path / "in", tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_output_that_is_not_finite_is_told(tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "a.png")

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, images):
            return torch.full((len(images), 2), torch.nan)

    pipeline = TrainingBundle.load(OCT, SMALL).pipeline()
    dataset = InferenceDataset(tmp_path, pipeline.load, pipeline.prepare, pipeline.shape)
    found = run(Broken(), dataset, lambda x: x, 4, 2)
    assert found.reasons == ["the model's output is not a finite number"]
    assert isinstance(found, Collector)


def test_hash_of_the_preparation_changes_with_it():
    def of(name, **overrides):
        bundle = TrainingBundle.load(name, overrides)
        pipeline = bundle.pipeline()
        return preprocessing_hash(pipeline.load, pipeline.prepare, bundle.normalize)

    base = of(CT)
    assert base == of(CT, learning_rate=0.5, network_name="resnet50")
    assert base == of(CT, **{"load::apply_voi": True})  # its default
    different = [
        of(CT, image_size=[64, 64]),
        of(CT, windows=[[40, 80], [80, 200], [600, 2801]]),
        of(CT, **{"normalize::mean": [0.5]}),
        of(CT, **{"load::fix_12bit_wrap": True}),
        of(OCT),
    ]
    assert len({base, *different}) == 6


def test_weights_must_fit(trained, tmp_path):
    trained(OCT)
    with pytest.raises(ConfigError, match="not of this network"):
        load_model(OCT, {"network_name": "resnet18"}, tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match=r"fc|classifier.*--set network_name=.*classes="):
        load_model(OCT, {**SMALL, "classes": ["A", "B"]}, tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match="no trained model"):
        load_model(OCT, {}, tmp_path / "absent.pt")
    with pytest.raises(ConfigError, match="there is no bundle"):
        load_model(tmp_path / "absent")


@pytest.mark.parametrize(
    "accepts", [{"kind": "mri"}, {"colour": "blue"}, {"colours": "any"}, "image", 5, ["CT"], {"modalities": 5}]
)
def test_what_is_accepted_has_a_meaning(accepts):
    with pytest.raises(ConfigError) as told:
        Accepts.of(accepts)
    assert told.value.where == "metadata.json: medfed::accepts"


def test_modalities_may_be_written_in_small_letters():
    assert Accepts.of({"modalities": ["ct"]}).modalities == ("CT",)
    assert Accepts.of(None) == Accepts()


@pytest.mark.parametrize("text", ["{", "[]", '{"medfed": 5}'])
def test_metadata_that_are_none(text, trained, tmp_path):
    shutil.copytree(find_bundle(OCT) / "configs", tmp_path / "own" / "configs")
    (tmp_path / "own" / "configs" / "metadata.json").write_text(text)
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    trained(OCT)
    model = load_model(tmp_path / "own", SMALL, tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match="no metadata of a bundle"):
        predict(model, tmp_path / "a.png", tmp_path / "out", device="cpu")


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("model.safetensors", cut_short, "damaged, or no model of a run"),
        ("model.safetensors", lambda path: path.write_bytes(b"xx"), "damaged, or no model of a run"),
        ("model.safetensors", lambda path: save_file({"a": torch.ones(2)}, path), "damaged, or no model of a run"),
        ("model.safetensors", lambda path: path.unlink(), "no final model yet"),
        ("experiment.yaml", lambda path: path.unlink(), "missing or damaged"),
        ("experiment.yaml", lambda path: path.write_text("a: ["), "missing or damaged"),
        ("experiment.yaml", lambda path: path.write_bytes(b"\xff"), "missing or damaged"),
    ],
)
def test_a_damaged_run_is_told(file, damage, said, tmp_path):
    header = {"round": 1, "classes": ["a", "b"], "task": "multiclass", "bundle_hash": "x"}
    write_tensors(tmp_path / "model.safetensors", {"model/w": torch.ones(3)}, header)
    (tmp_path / "experiment.yaml").write_text("name: x\n")
    (tmp_path / "run.json").write_text("{}")
    damage(tmp_path / file)
    with pytest.raises(ConfigError, match=said) as told:
        load_model(tmp_path)
    assert told.value.where == str(tmp_path / file) or file == "model.safetensors"


def test_predictions_of_a_run_are_those_that_it_measured(cohort_of, tmp_path):
    """The model of a run, given its test images, says what the run has recorded of them."""
    from medfed.config import validate
    from medfed.running import start

    data = tiny_experiment(cohort_of(CT), tmp_path / "cache", tmp_path / "runs")
    data |= {"method": "fedavg", "rounds": 1}
    data["condition"] = {"partition": {"kind": "dirichlet", "clients": 2, "alpha": 10.0}}
    folder = start(validate(data, "test"))
    recorded = pd.read_parquet(next((folder / "predictions").glob("*.parquet"))).set_index("sample")
    model = load_model(folder)
    found = predict(model, cohort_of(CT), tmp_path / "out", device="cpu")
    assert found["round"] == 1
    said = {i["file"].rpartition("/")[2].removesuffix(".dcm"): i for i in found["images"]}
    assert len(recorded) > 1
    for sample, row in recorded.iterrows():
        for c in found["classes"]:
            assert said[sample][f"p_{c}"] == pytest.approx(row[f"p_{c}"], abs=2e-6)

    with pytest.raises(ConfigError, match="its own settings"):
        load_model(folder, {"batch_size": 2})
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no final model yet"):
        load_model(folder)


def test_bundle_and_command_give_the_same(trained, cohort_of, tmp_path):
    """inference.yaml and medfed predict are one piece of code."""
    from monai.bundle import ConfigWorkflow

    model = trained(OCT)
    mine = predict(model, cohort_of(OCT), tmp_path / "mine", device="cpu")
    configs = find_bundle(OCT) / "configs"
    (tmp_path / "models").mkdir()
    shutil.copy(tmp_path / "weights.pt", tmp_path / "models" / "model.pt")
    workflow = ConfigWorkflow(
        config_file=[str(configs / "train.yaml"), str(configs / "inference.yaml")],
        workflow_type="infer",
        logging_file=False,
        dataset_dir=str(cohort_of(OCT)),
        model_dir=str(tmp_path / "models"),
        output_dir=str(tmp_path / "theirs"),
        device="$torch.device('cpu')",
        round=None,
        **SMALL,
    )
    workflow.initialize()
    workflow.run()
    theirs = json.loads((tmp_path / "theirs" / "predictions.json").read_text())
    assert theirs == mine


def test_images_are_in_8_bit_as_in_a_federation(cohort_of):
    pipeline = TrainingBundle.load(CT, SMALL).pipeline()
    dataset = InferenceDataset(cohort_of(CT), pipeline.load, pipeline.prepare, pipeline.shape)
    item = dataset[0]
    unit = pipeline.prepare(pipeline.load({"image": dataset.inputs[item["index"]].path, "frame": 0}))["image"].numpy()
    expected = to_uint8(unit, truncate=False).astype(np.float32) / np.float32(255)
    assert np.array_equal(item["image"].numpy(), expected)


def test_real_odd_files(trained, shared, tmp_path):
    found = predict(trained(CT), shared / "data" / "dicom_odd", tmp_path / "out", device="cpu")
    told = reasons(found)
    files = {p.name for p in (shared / "data" / "dicom_odd").iterdir()}
    assert set(told) == files
    assert told["CTImage_explLE.dcm"] == told["CT_small.dcm"] == ""
    assert told["MR_small_padded.dcm"] == "modality MR, this model is for CT"
    assert told["CT_JPEG70.dcm"] == "a localizer (scout view)"
    assert "not an image" in told["reportsi.dcm"] or "modality" in told["reportsi.dcm"]
    assert told["derived_head_ct_truncated.dcm"]
    assert told["derived_dermoscopic_photo_jpeg.dcm"].startswith("modality")
    assert told["MANIFEST.csv"] == "not an image"


@pytest.mark.parametrize(
    ("name", "folder", "applies"),
    [(OCT, "oct_fullres/DRUSEN", True), (OCT, "derm/images", False), (DERM, "oct_fullres/DRUSEN", False)],
)
def test_real_pictures(trained, shared, tmp_path, name, folder, applies):
    source = tmp_path / "in"
    source.mkdir()
    for path in sorted((shared / "data" / folder).glob("*.jp*g"))[:4]:
        shutil.copy(path, source)
    found = predict(trained(name), source, tmp_path / "out", device="cpu")
    assert {i["status"] for i in found["images"]} == {"processed" if applies else "not processed"}


def test_real_ge_series(trained, shared, tmp_path):
    found = predict(trained(CT), shared / "data" / "ct" / "ge_head_trauma", tmp_path / "out", device="cpu")
    assert found["counts"]["processed"] > 10
    assert sum(s["images"] for s in found["studies"]) == found["counts"]["processed"]
