"""A factory of grids' folders with numbers that are known in advance."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from fake_runs import CLASSES, write_run

from medfed.grid_file import slug
from medfed.methods.registry import resolve_method
from medfed.report.contents import plain
from medfed.seeding import numpy_generator

Numbers = Callable[[str, str, int, int], Mapping[str, Any]]
"""Condition, method, seed and round to the ``evaluation`` of a record."""


def method(name: str, **settings: Any) -> dict[str, Any]:
    """A method by dotted name, as ``grid.json`` has it."""
    found, resolved = resolve_method({"name": name, **settings})
    return plain({"method": {"name": found.name, **resolved.model_dump(mode="json")}})


def images(corrupted: int = 4, clients: int = 20, **more: Any) -> dict[str, Any]:
    """A condition with corrupted images, by dotted name."""
    return {
        "cohort.reader": "rsna_ich",
        "cohort.root": "ich",
        "condition.partition.kind": "quality",
        "condition.partition.clients": clients,
        "condition.partition.alpha": 1.0,
        "condition.partition.corrupted": corrupted,
        "condition.corruption.kind": "gaussian_noise",
        "condition.label_noise": None,
        **more,
    }


def labels(
    kind: str = "symmetric", rate: float = 0.4, alpha: float = 2.0, apply: bool = True, **more: Any
) -> dict[str, Any]:
    """A condition with wrong labels, by dotted name."""
    return {
        "cohort.reader": "kermany",
        "cohort.root": "oct",
        "condition.partition.kind": "dirichlet",
        "condition.partition.clients": 30,
        "condition.partition.alpha": alpha,
        "condition.partition.corrupted": 0,
        "condition.corruption": None,
        "condition.label_noise.kind": kind,
        "condition.label_noise.rate": rate,
        "condition.label_noise.apply": apply,
        **more,
    }


def make_grid(
    folder: Path,
    methods: Mapping[str, Mapping[str, Any]],
    conditions: Mapping[str, Mapping[str, Any]],
    numbers: Numbers,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    rounds: int = 2,
    without: Sequence[tuple[str, str, int]] = (),
    failed: Mapping[tuple[str, str, int], str] | None = None,
    axes: Sequence[str] = (),
    metrics: Sequence[str] | None = None,
    clients: Mapping[str, Any] | None = None,
) -> Path:
    """Writes ``grid.json`` and a run for every cell but those without."""
    folder.mkdir(parents=True)
    entries, failures = [], {}
    for condition, facts in conditions.items():
        for seed in seeds:
            for label, settings in methods.items():
                name = "-".join(filter(None, (slug(condition), slug(label), f"s{seed}")))
                name += "-again" if (folder / name).exists() else ""
                entries.append({"condition": condition, "method": label, "seed": seed, "folder": name})
                if (condition, label, seed) in (failed or {}):
                    failures[name] = (failed or {})[condition, label, seed]
                if (condition, label, seed) in {*without, *(failed or {})}:
                    continue
                records = [
                    {
                        "round": t,
                        "asked": [],
                        "admitted": [],
                        "refused": [],
                        "clients": clients or {},
                        "evaluation": dict(numbers(condition, label, seed, t)),
                    }
                    for t in range(1, rounds + 1)
                ]
                flat = {k.removeprefix("method."): v for k, v in settings.items()}
                noisy = facts.get("condition.label_noise.kind") and facts.get("condition.label_noise.apply")
                write_run(
                    folder / name,
                    records,
                    method=flat["name"],
                    method_settings={k: v for k, v in flat.items() if k != "name"},
                    seed=seed,
                    condition_hash=f"{condition}-{seed}",
                    partition_hash=f"{facts.get('condition.partition.alpha')}-{seed}",
                    mislabelled=10 if noisy else 0,
                )
                experiment: dict[str, Any] = {}
                for key, value in facts.items():
                    node = experiment
                    *path, last = key.split(".")
                    for part in path:
                        node = node.setdefault(part, {})
                    node[last] = value
                (folder / name / "experiment.yaml").write_text(json.dumps(experiment))
    content = {
        "name": folder.name,
        "baseline": None,
        "metrics": metrics,
        "last": rounds,
        "axes": list(axes),
        "methods": methods,
        "conditions": conditions,
        "cells": entries,
    }
    (folder / "grid.json").write_text(json.dumps(content))
    if failures:
        (folder / "failures.json").write_text(json.dumps(failures))
    return folder


def write_predictions(
    run: Path, rounds: Sequence[int], truth: np.ndarray, right: np.ndarray, patients: np.ndarray | None
) -> None:
    """Predictions of one test set that are right where they are said to be."""
    (run / "predictions").mkdir(exist_ok=True)
    size = len(CLASSES)
    said = np.where(right, truth, (truth + 1) % size)
    p = np.full((len(truth), size), 0.1)
    p[np.arange(len(truth)), said] = 0.8
    rng = numpy_generator(0, run.name)
    p += rng.uniform(0, 0.01, p.shape)
    table = pd.DataFrame({"sample": [f"t{i}" for i in range(len(truth))], "set": "clean", "label": truth})
    if patients is not None:
        table["patient"] = patients
    table[[f"p_{c}" for c in CLASSES]] = p / p.sum(axis=1, keepdims=True)
    for t in rounds:
        table.to_parquet(run / "predictions" / f"round-{t:04d}.parquet")
