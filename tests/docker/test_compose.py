"""The compose file: a valid one, whose paths, targets, commands and variables exist, and which opens nothing."""

from __future__ import annotations

import re
import shutil
import subprocess

import jsonschema
import pytest
import yaml
from image_files import COMPOSE, ROOT, STAGES, TARGETS, last

TEXT = COMPOSE.read_text(encoding="utf-8")
DATA = yaml.safe_load(TEXT)
SERVICES = DATA["services"]
SITES = ("north", "south", "west")


def strict(**properties):
    return {"type": "object", "additionalProperties": False, "properties": properties}


STRING, STRINGS, FLAG = {"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "boolean"}
BUILD = strict(context=STRING, dockerfile=STRING, target=STRING, args={"type": "object"})
MOUNT = strict(
    type={"enum": ["bind", "volume", "tmpfs"]},
    source=STRING,
    target=STRING,
    read_only=FLAG,
    bind=strict(create_host_path=FLAG),
) | {"required": ["type", "target"]}
CONDITION = strict(condition={"enum": ["service_started", "service_healthy", "service_completed_successfully"]})
SERVICE = strict(
    image=STRING,
    build=BUILD,
    init=FLAG,
    restart={"type": "string", "pattern": r"^(no|always|unless-stopped|on-failure(:\d+)?)$"},
    user=STRING,
    read_only=FLAG,
    tmpfs=STRINGS,
    cap_drop=STRINGS,
    security_opt=STRINGS,
    networks=STRINGS,
    depends_on={"type": "object", "additionalProperties": CONDITION},
    environment={"type": "object"},
    volumes={"type": "array", "items": {"oneOf": [STRING, MOUNT]}},
    profiles=STRINGS,
    entrypoint=STRINGS,
    command=STRINGS,
    healthcheck=strict(disable=FLAG),
    working_dir=STRING,
    ports={"type": "array", "items": {"type": "string", "pattern": r"^(\d+\.){3}\d+:\d+:\d+$"}},
)
# The part of the Compose Specification that the file uses; whatever else is a typing error.
SCHEMA = strict(
    name={"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"},
    services={"type": "object", "additionalProperties": SERVICE},
    networks={"type": "object", "additionalProperties": strict(internal=FLAG)},
    volumes={"type": "object", "additionalProperties": strict()},
) | {"patternProperties": {"^x-": {}}}


def test_it_follows_the_specification():
    jsonschema.validate(DATA, SCHEMA)
    with pytest.raises(jsonschema.ValidationError, match="healthchek"):
        jsonschema.validate(DATA | {"services": {"a": {"healthchek": {}}}}, SCHEMA)


def test_compose_itself_reads_it():
    """Needs no engine."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and subprocess.run([*command, "version"], capture_output=True).returncode == 0:
            done = subprocess.run([*command, "-f", str(COMPOSE), "config", "-q"], capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, "")
            return
    pytest.skip("docker compose is not installed")


def test_services_and_what_they_refer_to():
    assert set(SERVICES) == {"server", *SITES, "admin", "mlflow"}
    images = {s["image"]: s["build"]["target"] for s in SERVICES.values() if "build" in s}
    assert {image.partition(":")[0]: target for image, target in images.items()} == {f"medfed-{t}": t for t in TARGETS}
    for name, service in SERVICES.items():
        build = service.get("build")
        if build:
            assert (COMPOSE.parent / build["context"]).resolve() == ROOT
            assert (ROOT / build["dockerfile"]).is_file()
            arguments = [a.partition("=")[0] for stage in STAGES.values() for a in stage.all("ARG")]
            assert set(build.get("args", {})) <= set(arguments)
        assert service["image"] in images, name
        assert set(service["networks"]) <= set(DATA["networks"])
        assert set(service.get("depends_on", {})) <= set(SERVICES)
        for other in service.get("depends_on", {}):
            target = SERVICES[other]["build"]["target"]
            assert last(target, "HEALTHCHECK", STAGES), other
    assert {v.partition(":")[0] for s in SERVICES.values() for v in s.get("volumes", []) if isinstance(v, str)} == {
        "mlflow"
    }


def test_the_default_of_the_build_argument_is_the_dockerfiles():
    (line,) = [a for stage in STAGES.values() for a in stage.all("ARG")]
    name, _, default = line.partition("=")
    assert SERVICES["north"]["build"]["args"] == {name: f"${{{name}:-{default}}}"}


def test_variables_all_have_defaults_and_are_explained():
    names = set(re.findall(r"\$\{(\w+):-[^}]+\}", TEXT))
    assert len(re.findall(r"\$\{", TEXT)) == len(re.findall(r"\$\{\w+:-", TEXT))
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    assert [n for n in names if f"`{n}`" not in page and f"{n}=" not in page] == []
    assert names == {"KITS", "DATA", "JOBS", "MEDFED_USER", "TORCH_INDEX"}


def test_kits_of_the_documentation_are_those_mounted(tmp_path):
    """The names on the page give exactly the folders that the services want."""
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    section = page.partition("## With containers")[2]
    words = re.search(r"nvflare provision (\S+) --sites (\S+) --server (\S+) --admin (\S+) --storage (\S+)", section)
    folder, sites, server, admin, storage = words.groups()  # type: ignore[union-attr]
    mounted = [
        v["source"] for s in SERVICES.values() for v in s["volumes"] if isinstance(v, dict) and v["target"] == "/kit"
    ]
    named = {f"${{KITS:-../{folder}/medfed/prod_00}}/{n}" for n in (server, *sites.split(","), admin)}
    assert set(mounted) == named
    assert server in SERVICES  # its host name in the network of the federation
    assert storage.startswith("/kit/")


@pytest.mark.parametrize("name", SERVICES)
def test_containers_are_confined(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True  # else the first process never sees SIGTERM
    user = service.get("user", last("mlflow", "USER", STAGES))
    assert re.fullmatch(r"(\$\{MEDFED_USER:-)?[1-9]\d*:[1-9]\d*\}?", user)


def test_only_loopback_is_open_and_sites_reach_the_server_alone():
    assert [p for s in SERVICES.values() for p in s.get("ports", [])] == ["127.0.0.1:5000:5000"]
    assert DATA["networks"]["federation"] == {"internal": True}
    for site in SITES:
        assert SERVICES[site]["networks"] == ["federation"]
        assert "environment" not in SERVICES[site]
    assert SERVICES["mlflow"]["networks"] == ["tracking"]


@pytest.mark.parametrize("site", SITES)
def test_a_site_has_its_own_kit_and_images_and_no_others(site):
    mounts = {v["target"]: v for v in SERVICES[site]["volumes"]}
    assert set(mounts) == {"/kit", "/data"}
    assert mounts["/data"]["read_only"] is True
    for mount in mounts.values():
        assert mount["source"].endswith(f"/{site}")
        assert mount["bind"] == {"create_host_path": False}  # else a missing folder is made, and root owns it


def test_server_reports_to_the_mlflow_that_answers_that_name():
    from image_files import environment_of

    uri = SERVICES["server"]["environment"]["MLFLOW_TRACKING_URI"]
    host = uri.removeprefix("http://")
    assert host.partition(":")[0] in SERVICES
    assert host in environment_of("mlflow", STAGES)["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")
