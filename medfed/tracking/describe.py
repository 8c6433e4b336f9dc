"""What MLflow is told about a run besides its metrics.  No path, file name or sample id of the data is in it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from medfed.tracking.flatten import leaves, slug
from medfed.tracking.settings import without_password

MAX_PARAM, MAX_TAG = 500, 5000
HIDDEN = "(path)"
UNTAGGED = ("uid", "status", "finished")
_ADDRESS = re.compile(r"(https?|postgresql|mysql)(\+\w+)?://[^\s]*")
_EXPRESSION = re.compile(r"[$@%]")
_ABSOLUTE = re.compile(r"(?<![\w.)\]])(~|[A-Za-z]:)?[/\\][\w.\-/\\]+")


def read_yaml(path: Path) -> dict[str, Any]:
    """The resolved experiment; empty where there is none."""
    if not path.is_file():
        return {}
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    return data if isinstance(data, dict) else {}


def parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """The resolved experiment as MLflow parameters: flat, as text, without paths, at most 500 characters each."""
    return {slug(key): _text(value, MAX_PARAM) for key, value in leaves(without_paths(config))}


def tags(meta: Mapping[str, Any]) -> dict[str, str]:
    """What ``run.json`` says (method, seed, hashes, versions) as MLflow tags ``medfed.<key>``, without paths."""
    shown = {k: v for k, v in meta.items() if k not in UNTAGGED}
    return {
        slug(f"medfed.{key.replace('/', '.')}"): _text(value, MAX_TAG) for key, value in leaves(without_paths(shown))
    }


def without_paths(value: Any) -> Any:
    """A copy of plain values in which paths are hidden.

    Text with a slash or backslash counts as a path.  Addresses of servers stay, without user name and password; of
    expressions in a bundle (``$...``, ``@...``, ``%...``) only absolute paths are hidden.
    """
    if isinstance(value, Mapping):
        return {k: without_paths(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(v) for v in value]
    if not isinstance(value, str):
        return value
    if _ADDRESS.fullmatch(value):
        return without_password(value)
    if _EXPRESSION.match(value):
        return _ABSOLUTE.sub(HIDDEN, value)
    return HIDDEN if re.search(r"^~|[/\\]", value) else value


def manifest(run_dir: Path, classes: list[str]) -> dict[str, Any] | None:
    """What the clients hold, as counts and digests.

    Args:
        run_dir: the run; ``condition/clients.parquet`` in it says which client observes which label.
        classes: class names in the order of the labels.

    Returns:
        Samples, samples per class and a digest of the ids, in all and by client; None without such a table.
    """
    import numpy as np
    import pandas as pd

    path = run_dir / "condition" / "clients.parquet"
    if not path.is_file():
        return None
    table = pd.read_parquet(path)
    if not {"client", "sample", "observed"} <= set(table):
        return None

    def part(rows: pd.DataFrame) -> dict[str, Any]:
        counts = np.zeros(len(classes), np.int64)
        for label in rows["observed"]:
            counts += np.asarray(label, np.int64) if np.ndim(label) else np.eye(len(classes), dtype=np.int64)[label]
        ids = "\n".join(sorted(rows["sample"].astype(str)))
        return {
            "samples": len(rows),
            "classes": dict(zip(classes, counts.tolist(), strict=True)),
            "ids_sha256": hashlib.sha256(ids.encode()).hexdigest(),
        }

    return {**part(table), "clients": {str(c): part(rows) for c, rows in table.groupby("client", sort=True)}}


def dataset_input(meta: Mapping[str, Any], found: Mapping[str, Any]) -> Any:
    """The manifest as an MLflow data set input."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    digest = str(meta.get("data_hash") or found["ids_sha256"])[:36]
    profile = {k: v for k, v in found.items() if k != "clients"}
    dataset = Dataset(
        name=str(meta.get("cohort") or "cohort")[:500],
        digest=digest,
        source_type="medfed",
        source=json.dumps({"condition": meta.get("condition_hash"), "data": meta.get("data_hash")}),
        profile=json.dumps(profile),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "train")])


def artifact_files(run_dir: Path, names: list[str]) -> Iterator[tuple[str, Path]]:
    """The files behind artifact names (files, or folders as a whole), by their path within the run, sorted."""
    for name in names:
        path = run_dir / name
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and file.suffix != ".writing":
                yield file.relative_to(run_dir).as_posix(), file


def publishable(file: Path, folder: Path) -> Path:
    """The file as MLflow may have it: YAML without paths, tables with digests in place of sample ids.

    Args:
        file: a file of the run.
        folder: where an altered copy goes.

    Returns:
        The file itself where nothing had to be altered.
    """
    copy = folder / file.name
    if file.suffix in (".yaml", ".yml"):
        copy.write_text(yaml.safe_dump(without_paths(read_yaml(file)), sort_keys=False, allow_unicode=True), "utf-8")
        return copy
    if file.suffix == ".parquet":
        import pandas as pd

        table = pd.read_parquet(file)
        if "sample" in table:
            table["sample"] = [hashlib.sha256(s.encode()).hexdigest()[:16] for s in table["sample"].astype(str)]
            table.to_parquet(copy, index=False)
            return copy
    return file


def _text(value: Any, limit: int) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 3] + "..."
