"""A factory of run directories with numbers that are known in advance."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from medfed.seeding import numpy_generator

CLASSES = ["MEL", "NV", "BCC"]


def record(number: int, clean: Any = 0.5, corrupted: Any = 0.3, **more: Any) -> dict[str, Any]:
    """A round record in which two clients took part."""
    clients = {"client_00": {"balanced_accuracy": 0.6}, "client_01": {"balanced_accuracy": 0.2}}
    return {
        "round": number,
        "seconds": {"total": 3.0, "clients": 2.0, "evaluation": 0.5},
        "asked": ["client_00", "client_01"],
        "admitted": ["client_00", "client_01"],
        "refused": [],
        "bytes": {"down": 2_000_000, "up": 2_100_000},
        "server": {},
        "clients": {
            "client_00": {"samples": 90, "loss": 1.0, "weight": 0.75, "sharpness": 0.01},
            "client_01": {"samples": 30, "loss": 1.5, "weight": 0.25, "sharpness": 0.04},
        },
        "evaluation": {
            "clean": {"balanced_accuracy": clean, "auc_ovo": 0.8},
            "corrupted": {"balanced_accuracy": corrupted, "auc_ovo": 0.7},
            "clients": clients,
        },
        "undefined": {},
        "warnings": [],
        **more,
    }


def write_run(path: Path, records: list[dict[str, Any]], **meta: Any) -> Path:
    """Writes ``run.json`` and ``records.jsonl`` only."""
    path.mkdir(parents=True)
    document = {
        "uid": "0123abcd",
        "name": path.name,
        "method": "fedavg",
        "method_settings": {},
        "seed": 0,
        "condition_hash": f"condition-of-seed-{meta.get('seed', 0)}",
        "data_hash": "data",
        "classes": CLASSES,
        "task": "multiclass",
        "status": "completed",
        "started": "2026-03-01T10:00:00+00:00",
        "finished": "2026-03-01T10:02:05+00:00",
        "versions": {"medfed": "0.1.0", "torch": "2.14.0"},
        "rounds": len(records),
        "clients": ["client_00", "client_01"],
        "hardware": {"device": "cpu", "cores": 2},
        **meta,
    }
    (path / "run.json").write_text(json.dumps(document))
    (path / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def fill(
    folder: Path,
    *,
    rounds: int = 12,
    clients: int = 6,
    corrupted: int = 2,
    classes: tuple[str, ...] = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC"),
    multilabel: bool = False,
    lift: float = 0.0,
    collapsed: bool = False,
    **meta: Any,
) -> Path:
    """Writes a whole run directory that looks like a real one, for the pages."""
    seed = meta.get("seed", 0)
    rng = numpy_generator(seed, "fake run", folder.name)
    names = [f"client_{k:02d}" for k in range(clients)]
    bad = set(names[-corrupted:]) if corrupted else set()
    auc = "auc_macro" if multilabel else "auc_ovo"
    records = []
    for t in range(1, rounds + 1):
        rise = 1 - np.exp(-6 * t / rounds)

        def level(top: float, rise: float = rise) -> float:
            return float(np.clip(1 / 7 + (top - 1 / 7) * rise + rng.normal(0, 0.015), 0, 1))

        def metrics(top: float, rise: float = rise) -> dict[str, Any]:
            value = 1 / len(classes) if collapsed else level(top)
            found = {"balanced_accuracy": value, "accuracy": level(top + 0.1), "f1_macro": level(top - 0.05)}
            found |= {auc: level(top + 0.2), "calibration_error": 0.12 + rng.normal(0, 0.01), "nll": 2.2 - top * rise}
            return found | {f"recall/{c}": float(rng.uniform(0.2, 0.9)) for c in classes}

        gone, refused = {}, []
        for c in names:
            if rng.random() < 0.04:
                gone[c] = "did not answer (simulated dropout)"
            elif c == names[1] and t % 7 == 0:
                gone[c] = "model/fc.weight has values that are not finite"
        refused = [{"client": c, "reason": why} for c, why in gone.items()]
        admitted = [c for c in names if c not in gone]
        weight = rng.dirichlet([3.0] * len(admitted))
        clean, dirty = metrics(0.55 + lift / 2), metrics(0.38 + lift)
        undefined = {}
        if t == 2:
            clean[auc], undefined[f"clean/{auc}"] = None, "class 'DF' is absent"
        per_client = {c: {"balanced_accuracy": level(0.35 if c in bad else 0.55), auc: level(0.7)} for c in names}
        records.append(
            {
                "round": t,
                "seconds": {"total": 4.1 + rng.random(), "clients": 3.1, "evaluation": 0.7},
                "asked": names,
                "admitted": admitted,
                "refused": refused,
                "bytes": {"down": 2_950_000 * clients, "up": 2_950_400 * len(admitted)},
                "server": {},
                "clients": {
                    c: {
                        "samples": 96,
                        "loss": float(1.9 - 1.2 * rise + (0.3 if c in bad else 0) + rng.normal(0, 0.04)),
                        "weight": float(w),
                        "sharpness": float(0.02 + (0.03 if c in bad else 0) + rng.normal(0, 0.003)),
                    }
                    for c, w in zip(admitted, weight)
                },
                "evaluation": {"clean": clean, "corrupted": dirty, "clients": per_client},
                "undefined": undefined,
                "warnings": [f"the global model predicts 1 of {len(classes)} classes"] if collapsed else [],
            }
        )
    meta = {"clients": names, "classes": list(classes), "task": "multilabel" if multilabel else "multiclass", **meta}
    write_run(folder, records, **meta)
    (folder / "experiment.yaml").write_text("name: demo\nmethod:\n  name: fedism\n  q: 2.0\nrounds: 12\n")
    _condition(folder, rng, names, bad, len(classes), multilabel)
    (folder / "findings").mkdir()
    with (folder / "findings/unusable.csv").open("w", newline="") as file:
        rows = [["secret/a.jpg", "cannot be decoded", "a"], ["secret/b.jpg", "cannot be decoded", "b"]]
        csv.writer(file).writerows([["path", "reason", "sample"], *rows, ["secret/c.jpg", "no label", "c"]])
    (folder / "findings/corrections.json").write_text(json.dumps({"monochrome1_inverted": 3}))
    _predictions(folder, rng, classes, multilabel, rounds)
    return folder


def _condition(folder: Path, rng: Any, names: list[str], bad: set[str], size: int, multilabel: bool) -> None:
    (folder / "condition").mkdir()
    spec = {"seed": 0, "partition": {"kind": "quality", "alpha": 1.0}, "corruption": {"kind": "gaussian_noise"}}
    (folder / "condition/condition.json").write_text(json.dumps({"hash": "x", "spec": spec}))
    client = np.repeat(names, 96)
    if multilabel:
        labels: list[Any] = (rng.random((len(client), size)) < 0.3).astype(float).tolist()
    else:
        labels = np.concatenate([rng.choice(size, 96, p=rng.dirichlet([0.8] * size)) for _ in names]).tolist()
    sample = [f"s{i:05d}" for i in range(len(client))]
    pd.DataFrame({"sample": sample, "client": client, "observed": labels}).to_parquet(
        folder / "condition/clients.parquet"
    )
    truth = pd.DataFrame({"sample": sample, "label": labels, "corrupted": np.isin(client, list(bad))})
    truth.to_parquet(folder / "condition/truth.parquet")


def _predictions(folder: Path, rng: Any, classes: tuple[str, ...], multilabel: bool, rounds: int) -> None:
    (folder / "predictions").mkdir()
    parts = []
    for group, skill in (("clean", 2.0), ("corrupted", 1.0)):
        size = len(classes)
        labels = (rng.random((200, size)) < 0.3) if multilabel else rng.integers(0, size, 200)
        hot = labels if multilabel else np.eye(size)[labels]
        logits = rng.normal(size=(200, size)) + skill * hot
        p = 1 / (1 + np.exp(-logits)) if multilabel else np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        part = pd.DataFrame({"sample": [f"t{i}" for i in range(200)], "set": group})
        if multilabel:
            part[[f"label_{c}" for c in classes]] = labels.astype(int)
        else:
            part["label"] = labels
        part[[f"p_{c}" for c in classes]] = p
        parts.append(part)
    pd.concat(parts).to_parquet(folder / f"predictions/round-{rounds:04d}.parquet")
