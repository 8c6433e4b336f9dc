"""Round records and configurations as flat names that MLflow takes."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_NAME = 250
_FORBIDDEN = re.compile(r"[^\w\-. :/]")


def flatten_record(record: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The numbers of a round record, by the run they belong to.

    Args:
        record: see docs/architecture.md.

    Returns:
        The federation's metrics (``clean/balanced_accuracy``, ``server/...``, ``seconds/total``, ``bytes/up``,
        ``clients/asked``, ``clients/admitted``, ``clients/refused``, ``warnings``), and the metrics of each client
        (``client/weight``, ``evaluation/balanced_accuracy``; of a part of the evaluation that has clients of its own
        ``relabelling/recovery``).  Text, lists and what is not defined have no metric.
    """
    evaluation = dict(record.get("evaluation") or {})
    evaluated = {"evaluation": evaluation.pop("clients", None) or {}}
    for part, values in evaluation.items():
        if isinstance(values, Mapping) and isinstance(values.get("clients"), Mapping):
            evaluated[part] = values["clients"]
            evaluation[part] = {k: v for k, v in values.items() if k != "clients"}
    server = dict(numbers(evaluation))
    for part in ("server", "seconds", "bytes"):
        server |= dict(numbers(record.get(part) or {}, part))
    for part in ("asked", "admitted", "refused"):
        if part in record:
            server[f"clients/{part}"] = float(len(record[part] or ()))
    server["warnings"] = float(len(record.get("warnings") or ()))
    reported = record.get("clients") or {}
    clients = {}
    for name in sorted({*reported, *(c for by_client in evaluated.values() for c in by_client)}):
        clients[name] = dict(numbers(reported.get(name) or {}, "client"))
        for part, by_client in evaluated.items():
            clients[name] |= dict(numbers(by_client.get(name) or {}, part))
    return server, clients


def numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of nested mappings, by slugged path."""
    for path, value in leaves(values, prefix):
        if isinstance(value, (bool, int, float)) and math.isfinite(value):
            yield slug(path), float(value)


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What nested mappings hold, by path ``a/b``; a list counts as one value."""
    for key, value in values.items():
        path = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from leaves(value, path)
        else:
            yield path, value


def slug(name: str) -> str:
    """A name that MLflow takes for metrics and parameters.

    Letters, digits and ``_ - . space : /`` stay; a name that had to be changed ends in a digest of the original, so
    that two names never become one.

    Args:
        name: any text.
    """
    parts = [_FORBIDDEN.sub("_", part) for part in name.split("/")]
    parts = [part if part.strip(". ") else "_" for part in parts]
    clean = "/".join(parts)
    if clean == name and len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{clean[: MAX_NAME - 9].rstrip('/')}-{digest}"
