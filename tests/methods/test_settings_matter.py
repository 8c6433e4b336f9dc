"""Every setting of a method changes what clients answer, what they keep or what the server concludes.

A new setting is tested by itself: another value is derived from its type. Where that value makes no difference, or
where the setting matters only beside others, say so in ``OTHER`` or ``BESIDE``.
"""

from __future__ import annotations

import hashlib
import json
import typing
from functools import cache
from typing import Any

import annotated_types
import numpy as np
import pytest
import torch
from planted import watch
from pydantic import BaseModel
from test_rhfl import public
from tiny_federation import Federation

from medfed.data.arrays import ArrayDataset
from medfed.methods.registry import METHODS, get_method

ROUNDS = 3
SALT = {"rho": 0.02}
OCT = {"period": 1, "stage_one": {"epochs": 1}, "kappa": 3.0}
BASE: dict[str, dict[str, Any]] = {
    "fednoro": {"warmup": 1, "local_epochs": 1, "ramp_end": 4},
    "oct_fedsir": OCT,
    "fedsir": {**OCT, "ramp_begin": 1, "ramp_end": 6, "min_samples": 5},
    "pruning": {"stage_one": {"epochs": 1}},
    "fedmerit": OCT,
    "fedelc": {"warmup": 1, "local_epochs": 1},
    "fedcorr": {"iterations": 1, "fine_tuning": 1, "local_epochs": 1, "confidence": 0.3},
    "rofl": {"local_epochs": 1},
    "rhfl": {"pretraining": 1},
    "fedned": {
        "warmup": 1, "local_epochs": 1, "uncertainty": 1.0, "confidence": 0.26, "images": 8, "passes": 3, "steps": 2,
    },
}  # fmt: skip
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("*", "salt.share"): {"salt": {"rho": 1.0, "radius": "bounded"}},
    ("*", "measure.share"): {"measure": {"rho": 1.0, "radius": "bounded"}},
    ("*", "min_samples"): {"balanced": False},
    ("fedsir", "soften_student"): {"temperature": 0.8},
    ("agnostic_fl", "local_epochs"): {"work": "epochs"},
    ("q_fedavg", "optimizer"): {"learning_rate": 0.01},
    ("fedcorr", "beta"): {"iterations": 2},
    ("fedsir", "confidence"): {"relabelling": "posterior"},
    ("*", "compare"): {"identification": "evidence"},
    ("*", "revise"): {"identification": "evidence"},
    ("fedmerit", "salt_with"): {"compare": "all", "salt": SALT},
    ("fedmerit", "keep_unknown"): {"relabelling": "published"},
    ("fedmerit", "relabel_from"): {"relabelling": "published"},
    **{
        ("fedmerit", key): {"identification": "published"}
        for key in ("balanced", "maximum", "absolute", "augmented", "mixture_seed")
    },
    ("fedmerit", "min_samples"): {"identification": "published", "balanced": False},
}
"""What a setting needs beside itself to matter."""
OTHER: dict[tuple[str, str], Any] = {
    ("*", "period"): 2,
    ("*", "warmup"): 2,
    ("*", "salt.warmup"): 2,
    ("*", "measure.warmup"): 2,
    ("*", "min_reference"): 12,
    ("*", "min_gap"): 1.0,
    ("*", "min_samples"): 10,
    ("*", "residual"): 2,
    ("*", "stage_one.logit_adjustment"): False,
    ("fedsir", "stage_one.logit_adjustment"): True,
    ("*", "salt"): SALT,
    ("*", "measure"): SALT,
    ("*", "teacher_weight"): 0.9,
    ("*", "ramp_begin"): 2,
    ("agnostic_fl", "batch_size"): 8,
    ("agnostic_fl", "average"): False,
    ("fedce", "floor"): 0.3,
    ("fedlsr", "warmup"): 1.0,
    ("fedcorr", "iterations"): 2,
    ("fedcorr", "fine_tuning"): 2,
    ("fedcorr", "clean_level"): 1.0,
    ("rofl", "gradual"): 2,
    ("rhfl", "pretraining"): 2,
    ("rhfl", "local_epochs"): 2,
    ("fedned", "uncertainty"): 3.0,
    ("fedned", "steps"): 3,
    ("fedned", "dropout"): 0.9,
    ("fedned", "confidence"): 0.9,
    ("fedmerit", "confidence"): 0.9,
    ("fedmerit", "measure"): {"rho": 0.2},
}
"""Another value where the derived one would make no difference."""
SAME: dict[tuple[str, str], str] = {
    ("fedmerit", "correct_undetermined"): "nobody is undetermined here",
    ("*", "mixture_seed"): "the best of thirty starts is the same from another seed",
}
"""Settings that make no difference here, and why."""


def of(table: dict[tuple[str, str], Any], method: str, key: str, default: Any = None) -> Any:
    return table.get((method, key), table.get(("*", key), default))


def settings_of(model: type[BaseModel], prefix: str = "") -> list[tuple[str, Any]]:
    """All settings with their fields, also those of a section within."""
    found = []
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        sections = [a for a in parts(field.annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
        if not sections or field.default is None:
            found.append((key, field))
        found += [pair for section in sections for pair in settings_of(section, f"{key}.")]
    return found


def parts(annotation: Any) -> tuple[Any, ...]:
    return (annotation, *typing.get_args(annotation))


def another(field: Any) -> Any:
    """A value of a setting that is not its default."""
    default, kinds = field.default, parts(field.annotation)
    choices = [c for kind in kinds if typing.get_origin(kind) is typing.Literal for c in typing.get_args(kind)]
    choices += [c for c in typing.get_args(field.annotation) if isinstance(c, str)]
    if choices:
        return next(c for c in choices if c != default)
    if bool in kinds:
        return not default
    if int in kinds:
        return 1 if default is None else default + 1
    top = next((m.le for m in field.metadata if isinstance(m, annotated_types.Le)), float("inf"))
    return 0.03 if default is None else default * 1.5 if 0 < default * 1.5 <= top else default / 2 or 0.5


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in more.items():
        inner = out.get(key)
        out[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return out


def at(key: str, value: Any) -> dict[str, Any]:
    head, _, rest = key.partition(".")
    return {head: at(rest, value) if rest else value}


def cases() -> list[tuple[str, str]]:
    """Every setting of every program, at the first method that has it."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for method in METHODS:
        program = get_method(method).program
        for key, _ in settings_of(get_method(method).settings):
            # A section within (``salt.rho``) is the same wherever it is met.
            found.setdefault(("" if "." in key else f"{program.__module__}.{program.__name__}", key), (method, key))
    return list(found.values())


@cache
def world(qualities: int = 1) -> dict[str, ArrayDataset]:
    """Six clients of four classes in signed feature space; three have wrong labels, one a single class.

    The last class occurs at noisy clients alone, and each clean client lacks or hardly has some class.

    Args:
        qualities: with 2, some clients, clean and noisy ones, have images of another quality.
    """
    draw = np.random.default_rng(5)
    prototypes = draw.uniform(60, 195, (4, 16))
    sizes = {"c0": (14, 11, 6, 0), "c1": (9, 13, 14, 0), "c2": (12, 1, 11, 0), "c6": (0, 9, 0, 0)}
    sizes |= {"c3": (10, 9, 8, 6), "c4": (11, 8, 9, 0), "c5": (9, 10, 7, 5)}
    data = {}
    for client, counts in sorted(sizes.items()):
        true = np.repeat(np.arange(4), counts)
        draw.shuffle(true)
        observed = true.copy()
        if client in ("c3", "c4", "c5"):
            wrong = draw.permutation(len(true))[: len(true) // 2]
            observed[wrong] = (observed[wrong] + draw.integers(1, 3, len(wrong))) % (4 if client != "c4" else 3)
        pixels = prototypes[true] + draw.normal(0, 35, (len(true), 16))
        if qualities == 2 and client in ("c2", "c5", "c6"):
            pixels = np.where(np.arange(16) % 2, 230, 25) + 0.15 * (pixels - 128)
        images = pixels.clip(0, 255).astype(np.uint8).reshape(-1, 1, 4, 4)
        data[client] = ArrayDataset(images, np.arange(len(true)), torch.from_numpy(observed))
    return data


def outcome(section: dict[str, Any], signed: bool = False) -> str:
    """A digest of all replies, the server's notes, its models and what clients keep; of no request.

    Args:
        section: the method and its settings.
        signed: features of either sign, as a network without ReLU has them.
    """
    network = {"_target_": "tiny_federation.Normed", "num_classes": 4, "width": 20}
    if signed:
        network = {"_target_": "tiny_federation.Softmax", "num_classes": 4}
    changes = {"network_def": network, "batch_size": 16, "augment::flip": 0.5, "classes": ["a", "b", "c", "d"]}
    shown = public(12) if get_method(section["name"]).public else None
    data = world(2 if section["name"] == "fedmerit" else 1)
    done = Federation(section, data, rounds=ROUNDS, bundle_changes=changes, public=shown)
    seen = watch(done)
    done.run()
    digest = hashlib.sha256()

    def add(values: Any, tensors: Any) -> None:
        digest.update(json.dumps(values, sort_keys=True, default=str).encode())
        for name, tensor in sorted(tensors.items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())

    for task, _, replies in seen:
        for reply in replies:
            add([task, reply.client, dict(reply.values)], reply.message.tensors)
    for name, note in sorted(done.server.notes.items()):
        add([name, dict(note.values)], note.tensors)
    for model in done.models:
        add([], model)
    for client in map(done.server.engine.host.client, done.server.clients):
        kept = dict(client.memory)
        tensors = {k: v for k, v in kept.items() if isinstance(v, torch.Tensor)}
        add([client.name, {k: v for k, v in kept.items() if k not in tensors}], tensors)
    return digest.hexdigest()


@cache
def outcome_of(text: str, signed: bool) -> str:
    return outcome(json.loads(text), signed)


@pytest.mark.parametrize(("method", "key"), cases(), ids=lambda v: v)
def test_setting_has_an_effect(method, key):
    if of(SAME, method, key):
        pytest.skip(of(SAME, method, key))
    field = dict(settings_of(get_method(method).settings))[key]
    base = {"name": method, **BASE.get(method, {})}
    if key.startswith(("salt.", "measure.")):
        base = merged(base, {key.split(".")[0]: SALT})
    base = merged(base, of(BESIDE, method, key, {}))
    changed = merged(base, at(key, of(OTHER, method, key, another(field))))
    assert changed != base
    before, after = (outcome_of(json.dumps(s, sort_keys=True), key == "absolute") for s in (base, changed))
    assert before != after


def test_nothing_but_the_settings_makes_a_difference():
    section = {"name": "fedsir", **BASE["fedsir"]}
    assert outcome(section) == outcome(section)
