"""Evaluation of a global model in simulation: every set is predicted once, everything else is a slice of that.

Ground truth is read here and by no method (DESIGN law 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from medfed.data.cohort import Task
from medfed.errors import ConfigError
from medfed.training.metrics import Metrics, collapse_warning, metrics_for

if TYPE_CHECKING:
    import pandas as pd

LOWER_IS_BETTER = frozenset({"calibration_error", "nll", "log_loss", "weighted_log_loss"})
COUNTS = frozenset({"samples", "non_finite"})
PRIMARY = "balanced_accuracy"


class Labelled(Protocol):
    """A test set: its length and its labels; images are the business of ``predict``."""

    @property
    def labels(self) -> Any:
        """Class indices ``[N]`` or zeros and ones ``[N, C]``."""
        ...

    def __len__(self) -> int: ...


Predict = Callable[[Any], Any]
"""``predict(dataset) -> logits [N, C]``, an array or a CPU tensor."""


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found.

    Args:
        evaluation: the part of that name in the round record: metrics by set, ``average`` and ``gap`` of clean and
            corrupted, ``clients`` (metrics of each client's share) and ``worst_client`` (the worst defined value of
            each metric; ``client`` names the one with the worst balanced accuracy).
        undefined: reasons by ``<set>/<metric>`` and ``clients/<client>/<metric>``.
        warnings: what a person should know.
        logits: logits ``[N, C]`` by set.
    """

    evaluation: dict[str, Any]
    undefined: dict[str, str]
    warnings: list[str]
    logits: Mapping[str, np.ndarray] = field(repr=False)

    def record(self) -> dict[str, Any]:
        """The three parts for the round record."""
        return {"evaluation": self.evaluation, "undefined": self.undefined, "warnings": self.warnings}


class Evaluator:
    """Evaluates a model on named test sets and on each client's share of them.

    Args:
        task: classes and kind of labels.
        sets: test sets by name; ``clean`` and ``corrupted`` are compared with each other.
        shares: by client: the name of a set and the rows of it that stand for that client.
        samples: sample ids by set, for the table of predictions; row numbers where not given.
        patients: by set a number for each sample, equal for samples of one patient, for the table of predictions.

    Raises:
        ConfigError: there is no set, a set is empty or has an unusable name, or a share names an unknown set or row.
    """

    def __init__(
        self,
        task: Task,
        sets: Mapping[str, Labelled],
        shares: Mapping[str, tuple[str, np.ndarray]] | None = None,
        *,
        samples: Mapping[str, Sequence[str]] | None = None,
        patients: Mapping[str, Sequence[int]] | None = None,
    ):
        self.task, self.sets = task, dict(sets)
        self.shares = {c: (s, np.asarray(rows, np.int64)) for c, (s, rows) in sorted((shares or {}).items())}
        self.samples = {name: list(ids) for name, ids in (samples or {}).items()}
        self.patients = {name: np.asarray(numbers, np.int64) for name, numbers in (patients or {}).items()}
        self.labels = {name: np.asarray(data.labels) for name, data in self.sets.items()}
        self._check()

    def evaluate(self, predict: Predict) -> Evaluation:
        """Predicts every set once and computes all metrics from that.

        Args:
            predict: gives the logits ``[N, C]`` of a set.

        Raises:
            ValueError: ``predict`` gives another shape.
        """
        out = Evaluation({}, {}, [], {})
        logits = {name: self._logits(name, predict) for name in self.sets}
        for name, scores in logits.items():
            metrics = metrics_for(self.task, scores, self.labels[name])
            out.evaluation[name] = metrics.values
            _note_undefined(out, name, metrics)
            out.warnings.extend(f"{name}: {text}" for text in self._warnings(name, scores, metrics))
        _compare(out.evaluation)
        clients = {}
        for client, (name, rows) in self.shares.items():
            metrics = metrics_for(self.task, logits[name][rows], self.labels[name][rows], per_class=False)
            clients[client] = metrics.values
            _note_undefined(out, f"clients/{client}", metrics)
        if clients:
            out.evaluation["clients"] = clients
            out.evaluation["worst_client"] = worst_client(clients)
        return Evaluation(out.evaluation, out.undefined, out.warnings, logits)

    def predictions(self, evaluation: Evaluation) -> pd.DataFrame:
        """One row a sample and set: what was predicted; see :func:`medfed.training.predictions.predictions_table`."""
        from medfed.training.predictions import predictions_table

        return predictions_table(self, evaluation)

    def _logits(self, name: str, predict: Predict) -> np.ndarray:
        logits = np.asarray(predict(self.sets[name]), np.float64)
        wanted = (len(self.sets[name]), self.task.num_classes)
        if logits.shape != wanted:
            raise ValueError(f"predict gave {list(logits.shape)} for the set {name!r}, not {list(wanted)}")
        return logits

    def _warnings(self, name: str, logits: np.ndarray, metrics: Metrics) -> list[str]:
        bad = metrics.values.get("non_finite")
        if bad:
            return [f"{int(bad)} of {len(logits)} samples have logits that are not finite"]
        if self.task.kind == "multiclass":
            text = collapse_warning(logits.argmax(axis=1), self.task.num_classes, self.labels[name])
            return [text] if text else []
        constant = len(logits) > 1 and bool(np.all(np.ptp(logits, axis=0) < 1e-6))
        return ["the global model gives every sample the same scores"] if constant else []

    def _check(self) -> None:
        if not self.sets:
            raise ConfigError("there is no test set.", where="evaluation", fix="Give at least one, e.g. 'clean'.")
        for name, data in self.sets.items():
            if name in ("clients", "average", "gap", "worst_client") or "/" in name or not name:
                raise ConfigError(f"a test set cannot be called {name!r}.", where="evaluation", fix="Rename it.")
            if not len(data):
                raise ConfigError("the test set is empty.", where=name, fix="Check the split of the cohort.")
            if name in self.samples and len(self.samples[name]) != len(data):
                raise ConfigError(f"{len(self.samples[name])} sample ids for {len(data)} samples.", where=name)
            if name in self.patients and len(self.patients[name]) != len(data):
                raise ConfigError(f"{len(self.patients[name])} patients for {len(data)} samples.", where=name)
        for client, (name, rows) in self.shares.items():
            if name not in self.sets:
                raise ConfigError(f"the share is of an unknown test set {name!r}.", where=client)
            if len(rows) and (rows.min() < 0 or rows.max() >= len(self.sets[name])):
                raise ConfigError(f"the share has rows outside the test set {name!r}.", where=client)


def averaged(parts: Mapping[str, Evaluation]) -> Evaluation:
    """One evaluation of models that belong to clients: the mean over the models of what each is worth.

    Each set's metrics are means over the models for which they are defined. A client's share is measured by its own
    model. Logits are the logarithm of the mean of the models' probabilities, for the table of predictions.

    Args:
        parts: the evaluation of each client's model, of the same sets; at least one.
    """
    names = sorted(parts)
    first = parts[names[0]]
    out = Evaluation({}, {}, [], {})
    logits = {}
    for name, scores in first.logits.items():
        metrics = [parts[c].evaluation[name] for c in names]
        out.evaluation[name] = {key: _mean([m.get(key) for m in metrics]) for key in metrics[0]}
        undefined = (f"{name}/{key}" for key, value in out.evaluation[name].items() if value is None)
        out.undefined.update({key: first.undefined.get(key, "undefined for every model") for key in undefined})
        total = np.zeros_like(scores)
        for c in names:
            shifted = np.exp(parts[c].logits[name] - parts[c].logits[name].max(axis=1, keepdims=True))
            total += shifted / shifted.sum(axis=1, keepdims=True)
        logits[name] = np.log(np.maximum(total / len(names), np.finfo(np.float64).tiny))
    _compare(out.evaluation)
    clients = {c: own[c] for c in names if c in (own := parts[c].evaluation.get("clients", {}))}
    if clients:
        out.evaluation["clients"] = clients
        out.evaluation["worst_client"] = worst_client(clients)
        for c in clients:
            own_prefix = f"clients/{c}/"
            out.undefined.update({k: why for k, why in parts[c].undefined.items() if k.startswith(own_prefix)})
    out.warnings.extend(f"{c}: {text}" for c in names for text in parts[c].warnings)
    return Evaluation(out.evaluation, out.undefined, out.warnings, logits)


def _mean(values: Sequence[float | None]) -> float | None:
    defined = [v for v in values if v is not None]
    if len(set(defined)) < 2:
        return defined[0] if defined else None
    return sum(defined) / len(defined)


def worst_client(clients: Mapping[str, Mapping[str, float | None]]) -> dict[str, Any]:
    """The worst value of every metric over the clients for which it is defined.

    Args:
        clients: metrics by client.

    Returns:
        The value of each metric (None where it is defined for no client), and as ``client`` the first client, in
        sorted order, with the lowest balanced accuracy (None where there is none).
    """
    names = dict.fromkeys(name for values in clients.values() for name in values if name not in COUNTS)
    out: dict[str, Any] = {}
    for name in names:
        defined = [v for values in clients.values() if (v := values.get(name)) is not None]
        choose = max if name in LOWER_IS_BETTER else min
        out[name] = choose(defined) if defined else None
    lowest = out.get(PRIMARY)
    out["client"] = next((c for c in sorted(clients) if lowest is not None and clients[c].get(PRIMARY) == lowest), None)
    return out


def _compare(evaluation: dict[str, Any]) -> None:
    """Adds mean and difference of clean and corrupted; None where one of them is not defined."""
    if not {"clean", "corrupted"} <= evaluation.keys():
        return
    clean, corrupted = evaluation["clean"], evaluation["corrupted"]
    names = [n for n in clean if n in corrupted and "/" not in n and n not in COUNTS]
    pairs = {n: (clean[n], corrupted[n]) for n in names}
    both = {n: pair for n, pair in pairs.items() if None not in pair}
    evaluation["average"] = {n: (sum(both[n]) / 2 if n in both else None) for n in names}
    evaluation["gap"] = {n: (both[n][0] - both[n][1] if n in both else None) for n in names}


def _note_undefined(out: Evaluation, prefix: str, metrics: Metrics) -> None:
    out.undefined.update({f"{prefix}/{name}": reason for name, reason in metrics.undefined.items()})
