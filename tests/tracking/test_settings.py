"""Which store is used, and what is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from medfed.errors import ConfigError
from medfed.tracking.settings import TrackingSettings, open_hint, resolve_uri, sqlite_path, without_password


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_default_is_sqlite_beside_the_runs(tmp_path):
    uri = resolve_uri(TrackingSettings(), tmp_path / "runs")
    assert uri == f"sqlite:///{tmp_path.as_posix()}/runs/mlflow.db"
    assert open_hint(uri) == f"mlflow ui --backend-store-uri {uri}"


def test_variable_counts_unless_the_experiment_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert resolve_uri(TrackingSettings(), tmp_path) == "http://tracking:5000"
    assert resolve_uri(TrackingSettings(uri="https://other"), tmp_path) == "https://other"


def test_relative_sqlite_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri = resolve_uri(TrackingSettings(uri="sqlite:///a/b.db"), tmp_path)
    assert uri == f"sqlite:///{tmp_path.as_posix()}/a/b.db"
    assert sqlite_path(uri) == tmp_path / "a" / "b.db"
    assert sqlite_path("http://x") is None


@pytest.mark.parametrize("uri", ["file:///runs", "file:runs", "mlruns", "./mlruns", "/data/mlruns", "C:\\mlruns"])
def test_folder_of_files_is_refused(uri, tmp_path):
    with pytest.raises(ConfigError, match=r"tracking.uri: a folder of files .*sqlite:///"):
        resolve_uri(TrackingSettings(uri=uri), tmp_path)


def test_refusal_names_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:///x")
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI"):
        resolve_uri(TrackingSettings(), tmp_path)


def test_passwords_stay_out_of_what_people_see():
    assert without_password("https://me:secret@host:5000/x") == "https://host:5000/x"
    assert open_hint("https://me:secret@host:5000") == "https://host:5000"
    assert "secret" not in open_hint("postgresql://me:secret@db/mlflow")


@pytest.mark.parametrize("bad", [{"evry": 2}, {"every": 0}, {"experiment": ""}])
def test_bad_settings(bad):
    with pytest.raises(ValidationError):
        TrackingSettings.model_validate(bad)
