"""Run directories of a method that judges clients and relabels, with the columns that such methods record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fake_runs import fill

from medfed.federation.memory import ClientMemory, client_folder
from medfed.seeding import numpy_generator


def judge(
    folder: Path,
    *,
    noisy: int = 3,
    mistaken: int = 0,
    undetermined: int = 0,
    rename: Callable[[str], str] = str,
    truth: bool = True,
    memories: bool = True,
    every: int = 4,
    **fills: Any,
) -> Path:
    """Writes a run (:func:`fake_runs.fill`) whose last ``noisy`` clients hold noisy labels.

    Args:
        folder: where.
        noisy: number of noisy clients, the last ones.
        mistaken: noisy clients that were judged clean.
        undetermined: clean clients without a verdict, the first ones.
        rename: gives clients other names.
        truth: whether evaluation knows the noise.
        memories: whether the clients' memories lie there.
        every: rounds between relabellings.
        **fills: of the run.
    """
    fill(folder, corrupted=0, **{"method": "oct_fedsir", **fills})
    text = (folder / "records.jsonl").read_text()
    plain = json.loads((folder / "run.json").read_text())["clients"]
    names = {c: rename(c) for c in plain}
    for old, new in names.items():
        text = text.replace(json.dumps(old), json.dumps(new))
    records = [json.loads(line) for line in text.splitlines()]
    clients = [names[c] for c in plain]
    bad = clients[len(clients) - noisy :]
    believed = {c: "noisy" if c in bad[mistaken:] else "clean" for c in clients}
    believed |= dict.fromkeys(clients[:undetermined], "undetermined")
    rng = numpy_generator(fills.get("seed", 0), "fake verdicts")
    first, rounds = records[0], len(records)
    for c in clients:
        level = float(np.clip((0.78 if c in bad else 0.6) + rng.normal(0, 0.05), 0, 0.99))
        columns = first["clients"].setdefault(c, {"samples": 96})
        p = {"clean": 0.97, "noisy": 0.04}.get(believed[c])
        columns |= {
            "status": believed[c],
            "p_clean": None if p is None else float(np.clip(p + rng.normal(0, 0.02), 0, 1)),
            "descriptor_mean": level,
            "descriptor_energy": level**2 + float(rng.uniform(0, 0.02)),
            "descriptor_max": min(0.999, level + float(rng.uniform(0.02, 0.1))),
            "observed_classes": int(rng.integers(3, 8)),
            "separability": float(rng.normal(0.2 if c in bad else 0.6, 0.06)),
            "separability_error": 0.04,
            "evidence_samples": 96,
        }
    first["server"] |= {
        f"{s}_clients": sum(v == s for v in believed.values()) for s in ("clean", "noisy", "undetermined")
    }
    if truth:
        each = {c: {"noisy": c in bad, "correct": (c in bad) == (believed[c] != "clean")} for c in clients}
        quality = {"accuracy": sum(v["correct"] for v in each.values()) / len(clients), "noisy_recall": None}
        for record in records:
            record["evaluation"]["identification"] = {**quality, "clients": each}
    first["bytes"]["up"] += 400_000
    for record in records[every - 1 :]:
        if truth:
            done = record["round"] // every * every / rounds
            shares = {c: _shares(done, float(rng.normal(0, 0.05))) for c in bad}
            record["evaluation"]["relabelling"] = {**_shares(done, 0.0), "edited": 40 * noisy, "clients": shares}
        if record["round"] % every:
            continue
        record["server"]["relabelled"] = True
        record["bytes"]["up"] += 1_500_000
        for c in bad[mistaken:]:
            edited = int(40 * record["round"] / rounds)
            record["clients"].setdefault(c, {"samples": 96}).update(edited=edited, proposed=50)
    (folder / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    meta = json.loads((folder / "run.json").read_text())
    meta |= {"clients": clients, "method_settings": {"identification": "published"}}
    (folder / "run.json").write_text(json.dumps(meta))
    if memories:
        size = len(meta["classes"])
        for c in clients:
            memory = ClientMemory(folder / "clients" / client_folder(c))
            memory.open(1, 0)
            memory["similarity"] = _similarity(size, 0.8 if c in bad else 0.55, rng)
            memory.save(1)
    return folder


def _shares(done: float, shift: float) -> dict[str, Any]:
    return {
        "edit_rate": 0.3 * done,
        "recovery": 0.8 * done,
        "correction_precision": None if done < 0.3 else 0.9,
        "false_correction_rate": 0.05,
        "residual_noise": float(np.clip(0.4 - 0.3 * done + shift, 0, 1)),
        "noise_rate": 0.4,
    }


def _similarity(size: int, level: float, rng: Any) -> torch.Tensor:
    matrix = np.clip(level + rng.normal(0, 0.08, (size, size)), -1, 1)
    matrix = (matrix + matrix.T) / 2
    np.fill_diagonal(matrix, 1.0)
    matrix[-1, :] = matrix[:, -1] = np.nan  # a class that the client does not hold
    return torch.as_tensor(matrix)
