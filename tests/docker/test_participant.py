"""A participant's entry point: what is wrong with a startup kit is one message and exit code 2."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from image_files import STAGES, entry_point

from medfed.engines.nvflare import participant
from medfed.engines.nvflare.participant import command, main, read_kit

SITE_YAML = "cohort: {reader: folder, root: /data}\ndevice: cpu\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Kits of a project, as ``medfed nvflare provision`` makes them."""
    from medfed.engines.nvflare.provisioning import project, provision

    out = tmp_path_factory.mktemp("kits")
    content = project("trial", "localhost", ["north"], "admin@hospital.org", org="city", port=8002, admin_port=8003)
    return provision(content, out, out / "storage")["north"].parent


@pytest.fixture
def kits(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "kits")
    (tmp_path / "kits" / "north" / "local" / "site.yaml").write_text(SITE_YAML)
    return tmp_path / "kits"


def failure(capsys, *words: object) -> str:
    """The message of a start that must fail."""
    assert main([*map(str, words)]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert caught.err.startswith("medfed: ")
    assert caught.err.count("\n") == 1
    return caught.err


def test_good_kits(kits, capsys):
    server = read_kit("server", kits / "localhost")
    site = read_kit("site", kits / "north")
    assert (server.name, server.org, server.port) == ("localhost", "city", 8002)
    assert (site.name, site.org, site.port) == ("north", "city", 8002)
    assert main(["site", str(kits / "north"), "--check"]) == 0
    assert capsys.readouterr().out == "north: the kit is complete.\n"


@pytest.mark.parametrize(("role", "name"), [("server", "localhost"), ("site", "north")])
def test_it_runs_what_the_kits_own_script_runs(kits, role, name):
    """Word for word, but for the path of Python and of the workspace."""
    script = (kits / name / "startup" / "sub_start.sh").read_text()
    (line,) = [x.split() for x in script.splitlines() if x.strip().startswith("exec python3")]
    ours = command(read_kit(role, kits / name))
    assert ours[1:] == [w.replace('"$WORKSPACE"', str(kits / name)) for w in line[2:]]


def test_classes_admitted_are_those_of_the_kits():
    from medfed.engines.nvflare.jobs import ALLOWED

    assert (participant.ADMITTED["server"], participant.ADMITTED["site"]) == ALLOWED


@pytest.mark.parametrize("target", ["server", "site"])
def test_entry_point_of_the_image_without_a_kit(target, tmp_path):
    words = [sys.executable, *entry_point(target, STAGES)[1:]]
    done = subprocess.run([*words, str(tmp_path / "none")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"medfed: {tmp_path / 'none'}: there is no such folder. Mount the startup kit there.\n"
    done = subprocess.run([*words, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "folder of the startup kit" in done.stdout


@pytest.mark.parametrize(
    ("role", "name", "said"),
    [
        ("server", "north", "this is a site's startup kit. Mount the kit of the server there."),
        ("site", "localhost", "this is the server's startup kit. Mount the kit of this site there."),
        ("site", "admin@hospital.org", "this is an administrator's startup kit."),
        ("site", ".", "this is no startup kit: startup/fed_client.json is missing."),
    ],
)
def test_kit_of_somebody_else(kits, capsys, role, name, said):
    assert said in failure(capsys, role, kits / name)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("startup/fed_client.json", "{", "fed_client.json: is not valid JSON."),
        ("startup/fed_client.json", "[]", "fed_client.json: is not an object of JSON."),
        ("startup/fed_client.json", "{}", "fed_client.json: names no server or no certificate."),
        ("startup/fed_client.json", '{"servers": [], "client": {}}', "names no server or no certificate."),
        ("startup/client.crt", None, "client.crt: is missing. Copy the whole kit."),
        ("startup/client.crt", "x", "certificates or key are damaged."),
        ("startup/client.key", "x", "certificates or key are damaged."),
        ("local/resources.json", None, "resources.json: does not confine jobs to medfed's class."),
        ("local/resources.json", "[]", "resources.json: does not confine jobs to medfed's class."),
        ("local/site.yaml", None, "site.yaml: is missing."),
        ("local/site.yaml", "device: cpu\n", "needs either 'cohort' or, in a trial, 'share'"),
    ],
)
def test_damaged_kit(kits, capsys, file, content, said):
    path = kits / "north" / file
    path.unlink() if content is None else path.write_text(content)
    assert said in failure(capsys, "site", kits / "north")


@pytest.mark.parametrize(
    "change",
    [
        {"class_list_enforcement_mode": "warn"},
        {"class_allow_list": ["os.system"]},
        {"class_allow_list": [*participant.ADMITTED.values()]},
    ],
)
def test_kit_that_is_open(kits, capsys, change):
    path = kits / "north" / "local" / "resources.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert "does not confine jobs to medfed's class" in failure(capsys, "site", kits / "north")


def admits_code(rules):
    rules["permissions"]["lead"]["byoc"] = "any"


@pytest.mark.parametrize(
    "change",
    [
        admits_code,
        lambda rules: rules["permissions"]["lead"].update({"server-predeployed-flwr": "o:site"}),
        lambda rules: rules["permissions"].update(project_admin="any"),
        lambda rules: rules["permissions"].clear(),
        lambda rules: rules.clear(),
    ],
)
def test_kit_that_admits_code(kits, capsys, change):
    """NVFlare does not look at its list of classes where a job brings code."""
    path = kits / "north" / "local" / "authorization.json"
    rules = json.loads(path.read_text())
    change(rules)
    path.write_text(json.dumps(rules))
    assert "authorization.json: lets a job bring code of its own." in failure(capsys, "site", kits / "north")
    path.unlink()  # NVFlare would take authorization.json.default
    assert "lets a job bring code of its own." in failure(capsys, "site", kits / "north")


def test_kit_that_the_user_may_not_write(kits, capsys, monkeypatch):
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and real(path, mode))
    assert f"user {os.getuid()} may not write here." in failure(capsys, "server", kits / "localhost")


def test_key_that_the_user_may_not_read(kits, capsys, monkeypatch):
    real = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.suffix == ".key":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    said = failure(capsys, "site", kits / "north")
    assert "client.key: cannot be read: Permission denied. Give the kit to user" in said


def certificates(folder: Path, start: int, end: int) -> None:
    """A root and a certificate of ``north``, valid from and until so many days from now."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def name(text: str) -> x509.Name:
        kinds = (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME)
        return x509.Name([x509.NameAttribute(kind, word) for kind, word in zip(kinds, (text, "city"))])

    now = datetime.datetime.now(datetime.timezone.utc)
    keys = {who: ec.generate_private_key(ec.SECP256R1()) for who in ("root", "north")}
    for who, file in (("root", "rootCA.pem"), ("north", "client.crt")):
        builder = x509.CertificateBuilder().subject_name(name(who)).issuer_name(name("root"))
        builder = builder.public_key(keys[who].public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now + datetime.timedelta(days=start))
        builder = builder.not_valid_after(now + datetime.timedelta(days=end))
        cert = builder.sign(keys["root"], hashes.SHA256())
        (folder / file).write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "client.key").write_bytes(keys["north"].private_bytes(*form))


@pytest.mark.parametrize(("start", "end", "said"), [(-9, -2, "expired on "), (2, 9, "is valid from ")])
def test_certificate_not_in_force(kits, capsys, start, end, said):
    certificates(kits / "north" / "startup", start, end)
    assert f"client.crt: {said}" in failure(capsys, "site", kits / "north")


def test_certificate_in_force_of_another_maker_is_taken(kits):
    certificates(kits / "north" / "startup", -1, 1)
    assert read_kit("site", kits / "north").name == "north"


def test_files_of_two_projects(kits, capsys, tmp_path):
    certificates(tmp_path, -1, 1)
    startup = kits / "north" / "startup"
    key = (startup / "client.key").read_bytes()
    (startup / "client.key").write_bytes((tmp_path / "client.key").read_bytes())
    assert "client.key: does not belong to client.crt." in failure(capsys, "site", kits / "north")
    (startup / "client.key").write_bytes(key)
    shutil.copy(tmp_path / "rootCA.pem", startup)
    assert "client.crt: was not issued by rootCA.pem" in failure(capsys, "site", kits / "north")


def healthy(role: str, folder: Path) -> int:
    return main([role, str(folder), "--healthy"])


def test_health_is_listening_or_being_connected(kits, capsys):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        for file in kits.glob("*/startup/fed_*.json"):
            file.write_text(file.read_text().replace("localhost:8002", f"localhost:{port}"))
        server, site = kits / "localhost", kits / "north"
        assert (healthy("server", server), healthy("site", site)) == (1, 1)
        listener.listen()
        assert (healthy("server", server), healthy("site", site)) == (0, 1)
        with socket.create_connection(("127.0.0.1", port)):
            assert healthy("site", site) == 0
    assert (healthy("server", server), healthy("site", site)) == (1, 1)
    assert "there is no such" not in capsys.readouterr().err


def test_health_of_no_kit_is_a_failure_too(tmp_path, capsys):
    assert "this is no startup kit" in failure(capsys, "server", tmp_path, "--healthy")


def test_a_health_check_is_cheap():
    """It runs every few seconds: neither PyTorch nor NVFlare is imported for it."""
    code = "import sys, medfed.engines.nvflare.participant; print(*{'torch', 'monai', 'nvflare'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "\n"
