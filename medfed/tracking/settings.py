"""What an experiment file may say about tracking, and which MLflow store it means."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from medfed.errors import ConfigError

URI_VARIABLE = "MLFLOW_TRACKING_URI"


class TrackingSettings(BaseModel):
    """The ``tracking`` section of an experiment file.

    Args:
        enabled: whether rounds are copied to MLflow; they are recorded in ``records.jsonl`` either way.
        uri: an MLflow store (``sqlite:///...``, ``http://...``); where nothing is said, the environment variable
            ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` beside the runs.
        experiment: name of the MLflow experiment.
        every: push to MLflow every so many rounds (each round is still a step there).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True
    uri: str | None = None
    experiment: str = Field(default="medfed", min_length=1, max_length=500)
    every: int = Field(default=1, ge=1)

    @field_validator("uri")
    @classmethod
    def _no_folder(cls, value: str | None) -> str | None:
        return value if value is None else check_uri(value, "tracking.uri")


def resolve_uri(settings: TrackingSettings, runs_root: Path) -> str:
    """The MLflow store to use.

    Args:
        settings: the tracking section.
        runs_root: the folder that holds the runs.

    Returns:
        The URI; a relative sqlite path is made absolute.

    Raises:
        ConfigError: the environment names a file store (``file://`` or a plain path), which MLflow 3 no longer
            maintains.
    """
    given = os.environ.get(URI_VARIABLE)
    uri = settings.uri or (given and check_uri(given, URI_VARIABLE))
    if not uri:
        return sqlite_uri(runs_root / "mlflow.db")
    path = sqlite_path(uri)
    return sqlite_uri(path) if path is not None else uri


def check_uri(uri: str, where: str) -> str:
    """The URI, unless it means a folder of files.

    Raises:
        ConfigError: it does.
    """
    scheme = uri.split(":", 1)[0].lower() if re.match(r"[A-Za-z][A-Za-z0-9+.\-]+:", uri) else "file"
    if scheme == "file":
        raise ConfigError(
            "a folder of files is no longer maintained as an MLflow store.",
            where=where,
            fix="Use sqlite:///path/to/mlflow.db or the address of an MLflow server.",
        )
    return uri


def sqlite_uri(path: Path) -> str:
    """The URI of an sqlite file, by its absolute path."""
    return f"sqlite:///{path.absolute().as_posix()}"


def sqlite_path(uri: str) -> Path | None:
    """The file of an sqlite URI; None for any other store."""
    match = re.fullmatch(r"sqlite(\+\w+)?:///(?P<path>[^?]+)", uri)
    return Path(match["path"]) if match else None


def without_password(uri: str) -> str:
    """The URI without user name and password, for log lines and files."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return parts._replace(netloc=parts.netloc.rsplit("@", 1)[1]).geturl()


def open_hint(uri: str) -> str:
    """What opens the tracking pages: a command line for a local store, else the address itself."""
    if uri.startswith(("http://", "https://")):
        return without_password(uri)
    return f"mlflow ui --backend-store-uri {without_password(uri)}"
