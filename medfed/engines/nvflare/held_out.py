"""Evaluation where the images are: each site keeps a share apart and tells counts; the server adds them up.

Figures are described in :mod:`medfed.training.pooling`. What a site tells it decides in ``site.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from medfed.data.cohort import Task
from medfed.federation.messages import Message
from medfed.training.counts import Metrics
from medfed.training.evaluation import worst_client
from medfed.training.pooling import AREAS, SCORE_BINS, Figures

if TYPE_CHECKING:
    from medfed.data.arrays import ArrayDataset
    from medfed.federation.client import Client
    from medfed.federation.method import ClientTask
    from medfed.federation.server import Server

HELD_OUT = "held_out"
Tells = Literal["nothing", "counts", "histogram"]
NO_SHARE = "the model is not evaluated: no site told figures of a held-out share"


@dataclass(frozen=True)
class SiteData:
    """What one site trains on, and what it keeps apart to measure the global model on.

    Args:
        training: images and labels.
        held_out: images and labels that are never trained on; None where nothing could be kept apart.
    """

    training: ArrayDataset
    held_out: ArrayDataset | None = None


def keep_apart(data: ArrayDataset, num_classes: int, fraction: float, seed: int, client: str) -> SiteData:
    """Keeps whole patients apart, balanced by class as well as these allow, the same ones in every run of a seed.

    Nothing is kept apart where there is one patient only, or would be fewer than two samples to train on.

    Args:
        data: all of the site's samples.
        num_classes: number of classes.
        fraction: wanted share of samples; 0 for none.
        seed: of the condition.
        client: the site's name.
    """
    from medfed.data.splits import validation_part
    from medfed.seeding import numpy_generator

    patients = len(data) if data.groups is None else len(np.unique(data.groups))
    if fraction <= 0 or patients < 2:
        return SiteData(data)
    generator = numpy_generator(seed, "held-out share", client)
    apart = validation_part(data.labels.numpy(), data.groups, num_classes, fraction, generator)
    return parted(data, apart)


def parted(data: ArrayDataset, apart: np.ndarray) -> SiteData:
    """The data without the samples to keep apart ``[N]`` (bool), unless fewer than two would be left, and these."""
    if not apart.any() or len(data) - apart.sum() < 2:
        return SiteData(data)
    return SiteData(data.subset(np.flatnonzero(~apart)), data.subset(np.flatnonzero(apart)))


def measuring(held_out: ArrayDataset | None, tells: Tells, overridden: Sequence[str] | None = None) -> ClientTask:
    """The client task that measures the received model on the held-out share.

    Args:
        held_out: the share; None where there is none.
        tells: what the site lets out of it.
        overridden: keys of the bundle that the site overrides; None tells none.
    """

    def task(client: Client, message: Message) -> Message:
        told = {} if overridden is None else {"overrides": list(overridden)}
        if held_out is None or tells == "nothing":
            return Message.of({HELD_OUT: 0, **told})
        client.load(message.group("model"))
        logits = client.trainer.predict(held_out).numpy()
        figures = Figures.of(client.task, logits, held_out.labels.numpy(), histogram=tells == "histogram")
        return pack_figures(figures, told)

    return task


def pack_figures(figures: Figures, values: Mapping[str, Any] | None = None) -> Message:
    """Figures as plain values, and a histogram as a tensor."""
    plain = {
        **(values or {}),
        HELD_OUT: figures.samples,
        "non_finite": figures.non_finite,
        "counts": figures.counts.tolist(),
        "losses": figures.losses.tolist(),
        "calibration": figures.calibration.tolist() if figures.task.kind == "multiclass" else [],
        "areas": dict(figures.areas or {}),
    }
    if figures.histogram is None:
        return Message.of(plain)
    return Message.of(plain, scores={"histogram": torch.from_numpy(figures.histogram.astype(np.int32))})


def read_figures(task: Task, message: Message) -> Figures:
    """The figures of :func:`pack_figures`.

    Raises:
        ValueError: they are none, or do not agree with each other.
    """
    values, classes = message.values, task.num_classes
    multiclass = task.kind == "multiclass"
    counts = _whole(values.get("counts"), (classes, classes) if multiclass else (classes, 2, 2), "counts")
    support = counts.sum(axis=-1)
    bad = int(_whole(values.get("non_finite"), (), "non_finite"))
    losses = _numbers(values.get("losses"), (1,) if multiclass else (classes,), "losses")
    bins = np.zeros((15, 3))
    if multiclass:
        bins = _numbers(values.get("calibration"), bins.shape, "calibration")
        number, right, confidence = bins.T
        if not (number.sum() == counts.sum() and (right <= number).all() and (confidence <= number + 1e-6).all()):
            raise ValueError("calibration does not agree with its counts")
    elif (support.sum(axis=1) != support[0].sum()).any():
        raise ValueError("counts differ between labels")
    areas = values.get("areas")
    if not isinstance(areas, Mapping) or set(areas) != set(AREAS[task.kind]):
        raise ValueError("no areas under curves")
    for area in areas.values():
        if area is not None and not (isinstance(area, (int, float)) and 0 <= area <= 1):
            raise ValueError("an area that is not between 0 and 1")
    histogram = None
    if message.tensors:
        kinds = classes if multiclass else 2
        histogram = _whole(message.group("scores").get("histogram"), (classes, kinds, SCORE_BINS), "histogram")
        if (histogram.sum(axis=2) != support).any():
            raise ValueError("histogram does not agree with its counts")
    figures = Figures(task, counts, losses, bins, bad, histogram, dict(areas))
    if figures.samples != values.get(HELD_OUT):
        raise ValueError("number of samples does not agree with its counts")
    return figures


def measure(server: Server, name: str = "clean") -> dict[str, Any]:
    """Has all sites measure the global model, and pools what they tell.

    Args:
        server: the server, after a round.
        name: the pool's name among the test sets of the record.

    Returns:
        ``evaluation``, ``undefined`` and ``warnings`` of the round record.
    """
    with server.apart() as aside:
        replies = server.ask(HELD_OUT, Message.of({}, model=server.model), clients=server.clients, numbers=(HELD_OUT,))
    parts: dict[str, Figures] = {}
    warnings = [*aside.warnings, *(f"held-out share of {r.client}: {r.reason}" for r in replies.refused)]
    told: dict[str, str] = {}
    for reply in replies:
        if isinstance(names := reply.values.get("overrides"), list):
            told[reply.client] = ", ".join(map(str, names)) or "none"
        if reply.values[HELD_OUT] == 0:
            warnings.append(f"held-out share of {reply.client}: it tells of none")
            continue
        try:
            parts[reply.client] = read_figures(server.task, reply.message)
        except ValueError as error:
            warnings.append(f"held-out share of {reply.client}: sent {error}")
    if told:
        server.report(overrides=told)
    if not parts:
        return {"warnings": [*warnings, NO_SHARE]}
    traffic = {"bytes_down": aside.traffic.down, "bytes_up": aside.traffic.up}
    return {**pooled(server.task, parts, name, traffic), "warnings": warnings}


def pooled(task: Task, parts: Mapping[str, Figures], name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of sites as parts of a round record: the pool's metrics, each site's, the worst, and mean areas.

    Args:
        task: classes and kind of labels.
        parts: by site; at least one.
        name: the pool's name among the test sets.
        facts: further plain values on the pool.
    """
    sites = sorted(parts)
    total = parts[sites[0]]
    for site in sites[1:]:
        total = total + parts[site]
    whole: Metrics = total.metrics()
    each = {site: parts[site].metrics(per_class=False) for site in sites}
    undefined = {f"{name}/{key}": reason for key, reason in whole.undefined.items()}
    undefined |= {f"clients/{s}/{key}": reason for s, m in each.items() for key, reason in m.undefined.items()}
    values = {site: m.values for site, m in each.items()}
    means: dict[str, Any] = {}
    for key in AREAS[task.kind]:
        defined = [v for site in sites if (v := values[site][key]) is not None]
        means[key] = sum(defined) / len(defined) if defined else None
        means[f"{key}_sites"] = len(defined)
    about = {"samples": total.samples, "sites": len(sites), "area_bound": total.bound(), **facts}
    evaluation = {
        name: whole.values,
        "clients": values,
        "worst_client": worst_client(values),
        "client_mean": means,
        "pooled": about,
    }
    return {"evaluation": evaluation, "undefined": undefined}


def _numbers(value: Any, shape: tuple[int, ...], what: str) -> np.ndarray:
    try:
        array = np.asarray(value.numpy() if isinstance(value, torch.Tensor) else value, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"no {what}") from None
    if array.shape != shape or not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"{what} of a wrong form")
    return array


def _whole(value: Any, shape: tuple[int, ...], what: str) -> np.ndarray:
    array = _numbers(value, shape, what)
    if (array != np.floor(array)).any():
        raise ValueError(f"{what} that are not whole")
    return array.astype(np.int64)
