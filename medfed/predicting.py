"""``medfed predict``: a trained model, a folder of files, and what the one says of the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from safetensors import SafetensorError

from medfed.config import validate
from medfed.data.cohort import Task
from medfed.errors import ConfigError, nearest
from medfed.inference import About, InferenceDataset, StudyBy, preprocessing_hash, run
from medfed.prediction_files import RULES, write_predictions
from medfed.rundir import EXPERIMENT, META

if TYPE_CHECKING:
    from torch import nn

    from medfed.training.bundle import TrainingBundle

MODEL = "model.safetensors"
_FIT = "Give what they were trained with: --set network_name=..., --set 'classes=[...]', or other --weights."
_BUNDLE_MODELS = ("models/model.safetensors", "models/model.pt")


@dataclass(frozen=True)
class Model:
    """A trained network and what it was trained with.

    Args:
        network: on the CPU.
        bundle: with the overrides of the training.
        hash: of the weights.
        round: communication round, where it comes from a run.
    """

    network: nn.Module
    bundle: TrainingBundle
    hash: str
    round: int | None


def load_model(
    path: str | Path, overrides: Mapping[str, Any] | None = None, weights: str | Path | None = None
) -> Model:
    """Loads a model for prediction.

    Args:
        path: the folder of a run (``model.safetensors``), or a bundle with ``models/model.safetensors`` or
            ``models/model.pt``.
        overrides: changes of the bundle, e.g. the ``network_name`` that it was trained with; not for a run, which knows
            them.
        weights: the file, where it lies elsewhere; not for a run.

    Raises:
        ConfigError: there is no model, it does not fit the network, or the bundle of a run has changed.
    """
    from medfed.training.weights import load_weights, read_weights, state_hash

    path = Path(path).expanduser()
    if (path / META).is_file():
        if overrides or weights is not None:
            raise ConfigError("a run has its own settings and weights.", where=str(path), fix="Leave yours out.")
        file, header = _model_of_run(path)
        bundle = _bundle_of_run(path, header)
        round_: int | None = int(header["round"])
    else:
        bundle, round_ = _bundle(path, overrides or {}), None
        places = [Path(weights)] if weights is not None else [bundle.root / name for name in _BUNDLE_MODELS]
        found = [place for place in places if place.is_file()]
        if not found:
            raise ConfigError(
                "there is no trained model.",
                where=", ".join(map(str, places)),
                fix="Train the bundle, put the weights there, or give the file with --weights.",
            )
        file = found[0]
    state = read_weights(file)
    network = bundle.build_network(0)
    try:
        load_weights(network, state, stem="", heads=(), where=str(file))
    except ConfigError as error:
        raise ConfigError(error.what, where=error.where, fix="" if round_ is not None else _FIT) from None
    return Model(network.eval(), bundle, state_hash(network.state_dict()), round_)


def _model_of_run(path: Path) -> tuple[Path, dict[str, Any]]:
    from medfed.federation.state import read_tensors

    file = path / MODEL
    if not file.is_file():
        raise ConfigError("the run has no final model yet.", where=str(path), fix="`medfed resume` it to the end.")
    try:
        header = read_tensors(file, names=())[1]
        return file, {key: header[key] for key in ("round", "classes", "task", "bundle_hash")}
    except (SafetensorError, ValueError, KeyError, OSError):
        fix = "Copy it again from where the run was made."
        raise ConfigError("it is damaged, or no model of a run of medfed.", where=str(file), fix=fix) from None


def _bundle_of_run(path: Path, header: Mapping[str, Any]) -> TrainingBundle:
    from medfed.training.bundle import TrainingBundle

    try:
        content = yaml.safe_load((path / EXPERIMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        fix = "Copy the whole folder of the run."
        raise ConfigError("it is missing or damaged.", where=str(path / EXPERIMENT), fix=fix) from None
    experiment = validate(content, str(path / EXPERIMENT))
    given = {**experiment.overrides, "classes": header["classes"], "task": header["task"]}
    bundle = TrainingBundle.load(experiment.bundle, given)
    if bundle.content_hash() != header["bundle_hash"]:
        raise ConfigError(
            "the bundle is no longer the one that this model was trained with.",
            where=experiment.bundle,
            fix="Restore it: with other preparation of images the probabilities mean nothing.",
        )
    # The weights that training began with need not be on this machine.
    return _without_weights(bundle)


def _bundle(path: Path, overrides: Mapping[str, Any]) -> TrainingBundle:
    from medfed.training.bundle import TrainingBundle

    return _without_weights(TrainingBundle.load(path, overrides))


def _without_weights(bundle: TrainingBundle) -> TrainingBundle:
    if "weights" in bundle.config:
        bundle.config["weights"] = "none"
    return bundle


def predict(
    model: Model,
    source: str | Path,
    out: str | Path,
    *,
    device: str = "auto",
    study_by: StudyBy = "file",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Writes what a model says of the files below a folder.

    Args:
        model: see :func:`load_model`.
        source: a folder, or one file.
        out: folder for ``images.csv``, ``studies.csv`` and ``predictions.json``.
        device: ``auto``, ``cpu`` or ``cuda``.
        study_by: what is one study where a file does not say, see :func:`medfed.inference.list_inputs`.
        say: told in one line what is going on.

    Returns:
        The content of ``predictions.json``.

    Raises:
        ConfigError: no such device, or results cannot be written there.
        DataError: no such folder, or no file in it.
    """
    from medfed.training.local import resolve_device
    from medfed.training.results import result_folder

    bundle, network = model.bundle, model.network.to(resolve_device(device))
    metadata = _metadata(bundle.root)
    own = metadata.get("medfed", {})
    study = own.get("study", "mean_logits")
    if study not in RULES:
        raise ConfigError(
            f"there is no rule '{study}'.", where="metadata.json: medfed::study", fix=nearest(str(study), RULES)
        )
    pipeline = bundle.pipeline()
    dataset = InferenceDataset(
        source, pipeline.load, pipeline.prepare, pipeline.shape, own.get("accepts"), study_by=study_by
    )
    folder = result_folder(Path(out).expanduser())
    say(f"{len(dataset.candidates)} of {len(dataset.inputs)} images and files may apply")
    found = run(network, dataset, bundle.normalize, bundle.batch_size, len(bundle.classes))
    about = About(
        model=model.hash,
        round=model.round,
        preprocessing=preprocessing_hash(pipeline.load, pipeline.prepare, bundle.normalize),
        bundle=f"{metadata.get('name', bundle.root.name)} {metadata.get('version', '')}".strip(),
        task=Task(bundle.task, bundle.classes),  # type: ignore[arg-type]
        study=study,
    )
    return write_predictions(folder, found, about)


def _metadata(root: Path) -> dict[str, Any]:
    path = root / "configs" / "metadata.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("medfed", {}), dict):
        raise ConfigError("it is no metadata of a bundle.", where=str(path), fix="See `medfed bundle check`.")
    return content
