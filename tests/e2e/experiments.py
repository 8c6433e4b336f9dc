"""Parts of a small experiment: a network that trains in seconds, changes by key, an environment for processes."""

from __future__ import annotations

import contextlib
import copy
import os
import socket
from pathlib import Path
from typing import Any


def free_ports(count: int) -> list[int]:
    """So many different ports of this machine that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def tiny_network() -> dict[str, Any]:
    return {
        "image_size": [32, 32],
        "batch_size": 8,
        "learning_rate": 0.001,
        "network_name": "ResNet",
        "network_def::block": "basic",
        "network_def::layers": [1, 1, 1, 1],
        "network_def::block_inplanes": [4, 8, 8, 8],
        "network_def::conv1_t_size": 3,
    }


def tiny_experiment(images: Path, cache: Path, output: Path) -> dict[str, Any]:
    """FedISM on a built-in head CT cohort, four clients, one of them with noisy images."""
    return {
        "name": "tiny",
        "cohort": {"reader": "rsna_ich", "root": str(images)},
        "condition": {
            "partition": {"kind": "quality", "clients": 4, "corrupted": 1, "min_samples": 4},
            "corruption": {"kind": "gaussian_noise", "severity": 3},
        },
        "bundle": "rsna_ich_ct_classification",
        "overrides": tiny_network(),
        "method": "fedism",
        "rounds": 3,
        "engine": {"workers": 1, "threads": 1},
        "tracking": {"enabled": False},
        "output": str(output),
        "cache": str(cache),
    }


def changed(data: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    data = copy.deepcopy(data)
    for key, value in changes.items():
        node = data
        *path, last = key.split("__")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return data


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", **more}
