"""What a trained model says of a folder of files: ``medfed predict``, and the parts of ``inference.yaml``.

Every file below the folder ends in the result: with probabilities, or with the reason why it was not processed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from medfed.data.cohort import Task
from medfed.data.decode import Probe, Undecodable, probe
from medfed.data.readers.scan import scan
from medfed.data.store_build import Job, Pipeline, Work, make, to_unit
from medfed.errors import ConfigError, DataError
from medfed.prediction_files import Rule, write_predictions
from medfed.training.bundle import PIPELINE_VERSION
from medfed.training.predict import evaluating
from medfed.training.results import result_folder
from medfed.training.weights import state_hash

StudyBy = Literal["file", "folder"]
# Mean difference of the colour channels, as a share of the range, above which a picture is not grey.
_COLOURFUL = 0.01


@dataclass(frozen=True)
class Accepts:
    """Which images a model is for; ``medfed::accepts`` of a bundle's metadata.

    Args:
        kind: ``hounsfield`` (CT in Hounsfield units) or ``image``; None for both.
        modalities: DICOM modalities that apply; any where empty.  A file without a modality is judged by its pixels.
        colour: whether a picture must have colours or must not.
    """

    kind: Literal["hounsfield", "image"] | None = None
    modalities: tuple[str, ...] = ()
    colour: Literal["required", "refused", "any"] = "any"

    def __post_init__(self) -> None:
        known = {"kind": (None, "hounsfield", "image"), "colour": ("required", "refused", "any")}
        for key, values in known.items():
            if (given := getattr(self, key)) not in values:
                what = f"'{key}' is {given!r}, not one of {', '.join(map(str, values))}."
                raise ConfigError(what, where="metadata.json: medfed::accepts")

    @classmethod
    def of(cls, given: Any) -> Accepts:
        """From what a bundle's metadata says; everything is accepted where it says nothing.

        Raises:
            ConfigError: another key, or a value that has no meaning.
        """
        try:
            content = dict(given or {})
            return cls(**{**content, "modalities": tuple(map(str.upper, content.get("modalities", ())))})
        except (TypeError, ValueError):
            what = "it must be a mapping with kind, modalities (a list of texts) and colour, and nothing else."
            raise ConfigError(what, where="metadata.json: medfed::accepts") from None

    def header_reason(self, found: Probe) -> str:
        """Why an image does not apply, by its header; empty where it may."""
        modality = str(found.header.get("modality") or "").strip().upper()
        if modality and self.modalities and modality not in self.modalities:
            return f"modality {modality}, this model is for {', '.join(self.modalities)}"
        if "LOCALIZER" in str(found.header.get("image_type") or "").upper().split("\\"):
            return "a localizer (scout view)"
        return ""

    def pixel_reason(self, data: Mapping[str, Any]) -> str:
        """Why a decoded image does not apply; empty where it does."""
        kind = data.get("image_kind", "image")
        if self.kind is not None and kind != self.kind:
            wanted = "CT in Hounsfield units" if self.kind == "hounsfield" else "pictures"
            return f"{'CT in Hounsfield units' if kind == 'hounsfield' else 'a picture'}, this model is for {wanted}"
        if self.colour != "any" and kind == "image":
            colourful = _is_colourful(torch.as_tensor(data["image"]), data.get("image_range", (0.0, 1.0)))
            if colourful != (self.colour == "required"):
                return "a colour picture, this model is for grey ones" if colourful else "a grey picture, not in colour"
        return ""


def _is_colourful(pixels: torch.Tensor, value_range: Sequence[float]) -> bool:
    if pixels.shape[0] != 3:
        return False
    spread = (pixels.amax(0) - pixels.amin(0)).mean()
    return bool(spread > _COLOURFUL * (float(value_range[1]) - float(value_range[0])))


@dataclass(frozen=True)
class Input:
    """One frame of a file, or a file that is not processed.

    Args:
        file: path below the folder, with forward slashes.
        path: the file.
        frame: index of the frame.
        study: what is judged together.
        series: series of DICOM, empty otherwise.
        reason: why it is not processed; empty for a candidate.
    """

    file: str
    path: str
    frame: int = 0
    study: str = ""
    series: str = ""
    reason: str = ""


def list_inputs(source: str | Path, accepts: Accepts, study_by: StudyBy = "file") -> list[Input]:
    """Every file below a folder (or one file), with the frames that may be judged.

    Images of one DICOM study (Study Instance UID) are one study.  For others it is the file, with all its frames, or
    with ``study_by="folder"`` the folder that it lies in.

    Args:
        source: a folder or a file.
        accepts: which images apply.
        study_by: ``file`` or ``folder``.

    Raises:
        DataError: there is no such file or folder, or no file in it.
    """
    source = Path(source).expanduser().absolute()
    if not source.exists():
        raise DataError("there is no such file or folder.", where=str(source), fix="Check the path.")
    if source.is_file():
        return _frames(source, source.name, accepts, study_by)
    files = scan(source)
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda p: _frames(p, files.relative(p), accepts, study_by), files.images)
        inputs = [one for frames in found for one in frames]
    left_out = [
        *((p, "not an image") for p in files.others),
        *((p, "a file of the operating system") for p in files.system),
        *((Path(u.path), u.reason) for u in files.unusable),
    ]
    inputs += [Input(files.relative(p), str(p), reason=reason) for p, reason in left_out]
    if not inputs:
        raise DataError("there is no file in that folder.", where=str(source), fix="Check the path.")
    return sorted(inputs, key=lambda i: (i.file, i.frame))


def _frames(path: Path, name: str, accepts: Accepts, study_by: StudyBy) -> list[Input]:
    study = name if study_by == "file" else name.rpartition("/")[0] or "."
    try:
        found = probe(path)
    except Undecodable as error:
        return [Input(name, str(path), study=study, reason=error.reason)]
    study, series = str(found.header.get("study_uid") or study), str(found.header.get("series_uid") or "")
    reason = accepts.header_reason(found)
    frames = 1 if reason else found.frames
    return [Input(name, str(path), k, study, series, reason) for k in range(frames)]


class InferenceDataset(torch.utils.data.Dataset):
    """The images of a folder that may be judged, prepared for a network.

    An item is ``{"image": float32 [C, h, w] in 0..1, "index": position, "reason": text, "corrections": text}``.  Where
    a file turns out to be damaged or not to apply, the image is zeros and the reason says so.  Images are kept in 8 bit
    on the way, as in a federation, so that they are exactly those which the model was trained and measured on.

    Args:
        source: a folder or a file.
        load: transform from file to pixels, as of a bundle.
        prepare: transform from pixels to ``[C, h, w]`` in 0..1.
        shape: ``(C, h, w)``.
        accepts: see :class:`Accepts`.
        study_by: see :func:`list_inputs`.
    """

    def __init__(
        self,
        source: str | Path,
        load: Callable[[dict], dict],
        prepare: Callable[[dict], dict],
        shape: Sequence[int],
        accepts: Mapping[str, Any] | None = None,
        study_by: StudyBy = "file",
    ):
        self.accepts = Accepts.of(accepts)
        self.inputs = list_inputs(source, self.accepts, study_by)
        self.candidates = [k for k, found in enumerate(self.inputs) if not found.reason]
        # MONAI starts no engine without an item, and nothing would be written: the first refused input comes, as such.
        self.items = self.candidates or [0]
        self.load, self.prepare = load, prepare
        channels, height, width = map(int, shape)
        self._work = Work(Pipeline(self._load, prepare, "", (channels, height, width)))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, position: int) -> dict[str, Any]:
        index = self.items[position]
        found, shape = self.inputs[index], self._work.pipeline.shape
        if found.reason:
            return {"image": torch.zeros(shape), "index": index, "reason": found.reason, "corrections": ""}
        made = make(self._work, Job(found.path, found.frame, found.file, ""))
        pixels = np.zeros(shape, np.uint8) if made.reason else np.frombuffer(made.pixels, np.uint8).reshape(shape)
        return {
            "image": torch.from_numpy(to_unit(pixels)),
            "index": index,
            "reason": made.reason,
            "corrections": ";".join(made.corrections),
        }

    def _load(self, data: dict) -> dict:
        loaded = self.load(data)
        if reason := self.accepts.pixel_reason(loaded):
            raise Undecodable(reason)
        return loaded


class Collector:
    """Logits of the images of a data set, and what became of each input.

    Args:
        dataset: the inputs.
        classes: number of classes.
    """

    def __init__(self, dataset: InferenceDataset, classes: int):
        self.inputs = dataset.inputs
        self.logits = np.full((len(self.inputs), classes), np.nan, np.float32)
        self.reasons = [found.reason for found in self.inputs]
        self.corrections = [""] * len(self.inputs)

    def add(self, batch: Mapping[str, Any], logits: torch.Tensor) -> None:
        """Takes the logits ``[B, C]`` of a batch."""
        values = logits.detach().float().cpu().numpy()
        for row, index in enumerate(map(int, batch["index"])):
            self.corrections[index] = batch["corrections"][row]
            if batch["reason"][row]:
                self.reasons[index] = batch["reason"][row]
            elif not np.isfinite(values[row]).all():
                self.reasons[index] = "the model's output is not a finite number"
            else:
                self.logits[index] = values[row]


@dataclass(frozen=True)
class About:
    """What a result must say of the model that gave it.

    Args:
        model: hash of the weights.
        round: communication round, where known.
        preprocessing: hash of what is done to an image.
        bundle: name and version.
        task: classes and kind of labels.
        study: rule that makes one answer of the images of a study.
    """

    model: str
    round: int | None
    preprocessing: str
    bundle: str
    task: Task
    study: Rule = "mean_logits"


class PredictionWriter:
    """Handler of a MONAI evaluator: writes ``images.csv``, ``studies.csv`` and ``predictions.json`` at the end.

    Args:
        output_dir: the folder.
        dataset: the inputs.
        normalize: normalisation of batches; for the hash of the preprocessing.
        classes: the class names.
        task: ``multiclass`` or ``multilabel``.
        study: ``max`` or ``mean_logits``.
        bundle: name and version of the bundle.
        round: the communication round of the model.
    """

    def __init__(
        self,
        output_dir: str | Path,
        dataset: InferenceDataset,
        normalize: Any,
        classes: Sequence[str],
        task: Literal["multiclass", "multilabel"] = "multiclass",
        study: Rule = "mean_logits",
        bundle: str = "",
        round: int | None = None,
    ):
        self.output_dir, self.dataset = Path(output_dir), dataset
        self.task, self.study, self.bundle, self.round = Task(task, tuple(map(str, classes))), study, bundle, round
        self.preprocessing = preprocessing_hash(dataset.load, dataset.prepare, normalize)

    def attach(self, engine: Any) -> None:
        """Attaches itself to an evaluator."""
        from ignite.engine import Events

        engine.add_event_handler(Events.STARTED, self.start)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.collect)
        engine.add_event_handler(Events.COMPLETED, self.finish)

    def start(self, engine: Any) -> None:
        """Begins anew."""
        result_folder(self.output_dir)
        self.collected = Collector(self.dataset, self.task.num_classes)

    def collect(self, engine: Any) -> None:
        """Takes the output of a batch."""
        self.collected.add(engine.state.batch, engine.state.output["pred"])

    def finish(self, engine: Any) -> None:
        """Writes the files."""
        model = state_hash(engine.network.state_dict())
        about = About(model, self.round, self.preprocessing, self.bundle, self.task, self.study)
        write_predictions(self.output_dir, self.collected, about)


def run(network: nn.Module, dataset: InferenceDataset, normalize: Any, batch_size: int, classes: int) -> Collector:
    """The logits of every image of a data set; the network and its device stay as they are."""
    device = next(network.parameters()).device
    collected = Collector(dataset, classes)
    loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size)
    with evaluating(network), torch.no_grad():
        for batch in loader:
            collected.add(batch, network(normalize(batch["image"].to(device))))
    return collected


def preprocessing_hash(*parts: Any) -> str:
    """sha256 over what transforms are set to, whichever way they were configured.

    Args:
        *parts: transforms; MONAI's ``Compose`` counts as its parts.
    """
    text = json.dumps([PIPELINE_VERSION, *map(_settings, parts)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _settings(value: Any) -> Any:
    """A transform as plain values: its class and its settings, without caches and random states."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_settings(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _settings(v) for k, v in value.items()}
    if isinstance(value, torch.Tensor):
        return value.tolist()
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if name == "monai.transforms.compose.Compose":
        return [_settings(t) for t in value.transforms]
    inner = dict(value.named_buffers()) if isinstance(value, nn.Module) else getattr(value, "__dict__", {})
    return [name, {k: _settings(v) for k, v in inner.items() if not k.startswith("_") and k != "R"}]
