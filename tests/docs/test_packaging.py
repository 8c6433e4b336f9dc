"""What an installation outside the checkout brings: bundles, report templates, types, the command."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from medfed.training import bundle

ROOT = Path(__file__).parents[2]
BUNDLES = sorted(p for p in (ROOT / "bundles").rglob("*") if p.is_file())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """A wheel built from a copy of the tree."""
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree)
    for name in ("medfed", "bundles"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return zipfile.ZipFile(next(tree.glob("*.whl")))


def test_wheel_holds_every_file_of_package_and_bundles(wheel):
    names = set(wheel.namelist())
    for path in (p for p in (ROOT / "medfed").rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        assert path.relative_to(ROOT).as_posix() in names
    installed = {n.partition("/data/share/medfed/")[2] for n in names}
    for path in BUNDLES:
        assert path.relative_to(ROOT).as_posix() in installed
    assert not any(n.startswith("tests") for n in names)


def test_wheel_has_the_command_and_the_licence(wheel):
    entry = next(n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    assert "medfed = medfed.cli:main" in wheel.read(entry).decode()
    assert any(n.endswith("licenses/LICENSE") for n in wheel.namelist())


@pytest.mark.parametrize("where", ["prefix", "beside"])
def test_bundles_of_an_installation_are_found(tmp_path, monkeypatch, where):
    """In the share of Python's prefix, or beside the package where ``pip install --target`` puts it."""
    package = tmp_path / "site" / "medfed" / "training" / "bundle.py"
    base = tmp_path / ("prefix" if where == "prefix" else "site")
    shutil.copytree(ROOT / "bundles", base / "share" / "medfed" / "bundles")
    monkeypatch.setattr(bundle, "__file__", str(package))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    found = bundle.find_bundle("oct_bscan_classification")
    assert found == base / "share" / "medfed" / "bundles" / "oct_bscan_classification"
