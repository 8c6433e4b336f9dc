"""A bundle that holds code is refused, whatever way the code is hidden, and nothing of it is executed."""

import contextlib
import importlib.machinery
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from ignite.engine import Engine
from monai.bundle import ConfigParser
from monai.handlers import CheckpointLoader

from medfed.bundle_check import BundleRefused, bundle_hash, check_bundle
from medfed.bundle_grammar import IMPORTS, TARGETS, expression_fault, text_fault
from medfed.cli import app
from medfed.errors import ConfigError
from medfed.training.weights import read_weights

NAMES = ["oct_bscan_classification", "rsna_ich_ct_classification", "isic_dermoscopy_classification"]
RUNS = "$__import__('os').system('touch ran')"
# A relative reference is replaced by the name of the key that it stands below: a name that is code becomes code.
KEY = "a and [0][open('ran', 'w').close()"


def at(*keys):
    """``at(..., value)``: a change that sets one value deep inside."""
    *path, value = keys

    def change(config):
        node = config
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    return change


def extended(key, value):
    return lambda config: config[key].append(value)


@pytest.mark.parametrize("name", NAMES)
def test_bundles_that_ship_with_medfed_pass(name):
    found = check_bundle(name)
    assert len(found.hash) == 64
    assert {"configs/train.yaml", "configs/metadata.json", "configs/logging.conf"} <= set(found.files)
    assert check_bundle(name, found.hash).hash == found.hash


MALICIOUS = {
    "expression": ({"train": at("seed", RUNS)}, "train.yaml: seed"),
    "target": ({"train": at("augment", {"_target_": "os.system", "command": "touch ran"})}, "'os.system'"),
    "builtin": ({"train": at("normalize", {"_target_": "builtins.eval"})}, "'builtins.eval'"),
    "in a list": ({"train": at("prepare", "transforms", 0, {"_target_": "subprocess.run"})}, "transforms::0::_target_"),
    "deep in lists": ({"train": at("extra", [[[{"a": [RUNS]}]]])}, "extra::0::0::0::a::0"),
    "import": ({"train": extended("imports", "$import subprocess")}, "imports::6"),
    "import of a name": ({"train": extended("imports", "$from os import system")}, "import system"),
    "import under another name": ({"train": extended("imports", "$import torch as len")}, "torch as len"),
    "import and more": ({"train": extended("imports", "$import torch; import os")}, "import os"),
    "macro of a file": ({"train": at("load", "%other/evil.yaml::load")}, "reaches another file"),
    "macro of a file, old separator": ({"train": at("load", "%evil.json#load")}, "reaches another file"),
    "macro in the place of a target": ({"train": at("load", "_target_", "%name")}, "'%name'"),
    "reference in the place of a target": ({"train": at("load", "_target_", "@name")}, "'@name'"),
    "expression in the place of a target": ({"train": at("load", "_target_", "$torch.hub.load")}, "torch.hub.load"),
    "requires": ({"train": at("load", "_requires_", [RUNS])}, "load::_requires_::0"),
    "disabled": ({"train": at("load", "_disabled_", RUNS)}, "load::_disabled_"),
    "debugger": ({"train": at("load", "_mode_", "debug")}, "mode 'debug'"),
    "breakpoint": ({"train": at("load", "_debug_", True)}, "'_debug_'"),
    "module attribute": ({"train": at("load", "_target_", "medfed.data.transforms.os.system")}, "transforms.os"),
    "short name": ({"train": at("load", "_target_", "LoadImaged")}, "'LoadImaged'"),
    "reader by name": ({"train": at("load", {"_target_": "monai.transforms.LoadImaged", "reader": "os.x"})}, "LoadIma"),
    "overlay of one key": ({"evaluate": at("train::trainer::_target_", "os.system")}, "evaluate.yaml: train::trainer"),
    "overlay, old separator": ({"evaluate": at("train#trainer#_target_", "os.system")}, "evaluate.yaml: train#"),
    "overlay that merges": ({"evaluate": at("+_target_", "os.system")}, "evaluate.yaml: +_target_"),
    "further file": ({"anything": at("a", RUNS)}, "anything.yaml: a"),
    "metadata": ({"metadata": at("description", "$import os")}, "metadata.json: description"),
    "metadata, nested": ({"metadata": at("network_data_format", "inputs", "x", [RUNS])}, "network_data_format"),
    "key that becomes code": (
        {"train": lambda c: c.update({"a": 1, KEY: {"b": "$@::1]"}})},
        "a key of other characters",
    ),
    "relative reference": ({"train": at("x", {"b": "$@#c", "c": 1})}, "without a whole id"),
    "network": ({"train": at("network_def", "_target_", "torch.hub.load")}, "torch.hub.load"),
    "download": ({"train": at("network_def", "_target_", "monai.apps.utils.download_url")}, "download_url"),
    "bundle in a bundle": ({"train": extended("initialize", "$monai.bundle.run('x')")}, "monai.bundle.run"),
    "path": ({"train": at("model_dir", "/etc/cron.d")}, "outside the bundle"),
    "path upwards": ({"train": at("model_dir", "models/../../x")}, "outside the bundle"),
    "path in an expression": ({"train": at("model_dir", "$'/etc' + '/cron.d'")}, "out of the bundle"),
    "path upwards in an expression": ({"train": at("model_dir", "$@bundle_root + '/../x'")}, "out of the bundle"),
    "object of YAML": ({"train": at("seed", __import__("datetime").date(2026, 1, 1))}, "of the kind date"),
}


@pytest.mark.parametrize("kind", MALICIOUS)
def test_code_is_refused_and_not_executed(own, kind, tmp_path, monkeypatch):
    changes, said = MALICIOUS[kind]
    monkeypatch.chdir(tmp_path)
    folder = own(**changes)
    with pytest.raises(BundleRefused) as refused:
        check_bundle(folder)
    assert said in str(refused.value)
    assert not (tmp_path / "ran").exists()
    assert "subprocess" not in {f.where for f in refused.value.faults}


@pytest.mark.parametrize("kind", ["key that becomes code", "expression", "metadata, nested"])
def test_what_is_refused_would_have_run(own, kind, tmp_path, monkeypatch):
    """The crafted bundles are real: MONAI executes them when it reads any such key."""
    changes, _ = MALICIOUS[kind]
    monkeypatch.chdir(tmp_path)
    folder = own(**changes)
    parser = ConfigParser()
    parser.read_config(folder / "configs" / "train.yaml")
    parser.read_meta(folder / "configs" / "metadata.json")
    key = {
        "key that becomes code": f"{KEY}::b",
        "expression": "seed",
        "metadata, nested": "_meta_::network_data_format::inputs::x",
    }[kind]
    with contextlib.suppress(Exception):  # what it evaluates to does not matter
        parser.get_parsed_content(key)
    assert (tmp_path / "ran").exists()


def test_repeated_keys_are_refused(own):
    """Parsers differ in which of the two they take."""
    folder = own()
    with open(folder / "configs" / "evaluate.yaml", "a") as file:
        file.write("run: []\n")
    with pytest.raises(BundleRefused, match="'run' stands there twice"):
        check_bundle(folder)
    (folder / "configs" / "evaluate.yaml").write_text("a: {b: 1, b: 2}")
    with pytest.raises(BundleRefused, match="'b' stands there twice"):
        check_bundle(folder)
    (folder / "configs" / "x.json").write_text('{"q": 1, "q": 2}')
    with pytest.raises(BundleRefused, match="'q' stands there twice"):
        check_bundle(folder)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdef", "bcdefg")),
        "a: &a [*a]",
        "a: " + "[" * 60 + "]" * 60,
    ],
    ids=["billion laughs", "contains itself", "deep"],
)
def test_content_without_end_is_refused_at_once(own, text):
    folder = own()
    (folder / "configs" / "evaluate.yaml").write_text(text)
    with pytest.raises(BundleRefused, match="too large or nested too deeply"):
        check_bundle(folder)


def test_what_is_not_safe_to_read_is_not_read(own, monkeypatch):
    """A link to a device, a pipe or gigabytes, also in the place of a file that is always read."""
    monkeypatch.setattr(Path, "read_text", lambda *a, **k: pytest.fail("it was read"))
    monkeypatch.setattr(Path, "read_bytes", lambda *a: pytest.fail("it was read"))
    folder = own()
    metadata = folder / "configs" / "metadata.json"
    for make, said in (
        (lambda path: path.symlink_to("/dev/zero"), "it is a symbolic link"),
        (os.mkfifo, "neither a file nor a folder"),
        (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**33), "larger than 250000 bytes together"),
    ):
        metadata.unlink()
        make(metadata)
        with pytest.raises(BundleRefused, match=said):
            check_bundle(folder)


@pytest.mark.parametrize("values", ["[]", "5", "{}", '"x"', "null", "[1, [2]]", '{"a": {"b": 1}}', "9" * 5000, "NaN"])
def test_metadata_of_another_kind_is_refused_with_a_reason(own, values):
    """Whatever stands at a key, or instead of everything, the answer is a refusal and no other error."""
    folder = own()
    path = folder / "configs" / "metadata.json"
    good = json.loads(path.read_text())
    for key in ("version", "changelog", "monai_version", "required_packages_version"):
        path.write_text(json.dumps({**good, key: "HERE"}).replace('"HERE"', values))
        if (key, values) in {("required_packages_version", v) for v in ("[]", "{}", "null")}:
            check_bundle(folder)
        else:
            with pytest.raises(BundleRefused, match=r"metadata\.json"):
                check_bundle(folder)
    path.write_text(values)
    with pytest.raises(BundleRefused, match=r"metadata\.json"):
        check_bundle(folder)


def test_deep_metadata_is_refused(own):
    folder = own()
    (folder / "configs" / "metadata.json").write_text("[" * 50_000 + "]" * 50_000)
    with pytest.raises(BundleRefused, match="it is not JSON"):
        check_bundle(folder)


def test_names_of_a_bundle_cannot_write_to_the_terminal(own):
    folder = own()
    (folder / "configs" / "\x1b[2J.yaml").write_text("a: [$x]")
    with open(os.fsencode(folder) + b"/configs/\xff.yaml", "w") as file:
        file.write('"\\e[2Jk": 1\n')
    with pytest.raises(BundleRefused) as refused:
        check_bundle(folder)
    said = str(refused.value)
    for name in (r"configs/\x1b[2J.yaml", r"configs/\udcff.yaml"):
        assert name in said
    assert all(c.isprintable() or c == "\n" for c in said)


@pytest.mark.parametrize("text", ["a: !!python/object/apply:os.system ['touch ran']", "a: [", "- 1", "\x00"])
def test_what_is_no_plain_yaml_is_refused(own, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = own()
    (folder / "configs" / "evaluate.yaml").write_text(text)
    with pytest.raises(BundleRefused, match=r"evaluate\.yaml"):
        check_bundle(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("torch.py", "code or may hold code"),
        ("scripts/net.pyc", "code or may hold code"),
        ("models/model.pkl", "code or may hold code"),
        ("evil-1.0.dist-info/entry_points.txt", "code or may hold code"),
        ("evil.egg-info/entry_points.txt", "code or may hold code"),
        (".dist-info/entry_points.txt", "code or may hold code"),
        ("docs/.Egg-Info/PKG-INFO", "code or may hold code"),
        ("EGG-INFO/entry_points.txt", "code or may hold code"),
        ("configs/run.sh", "no configuration"),
        ("configs/deep/train.YAML", "'os.system' is not on the list"),
    ],
)
def test_other_files_are_looked_at(own, name, said):
    folder = own()
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("a: {_target_: os.system}")
    with pytest.raises(BundleRefused, match=said):
        check_bundle(folder)


@pytest.mark.parametrize("suffix", importlib.machinery.all_suffixes())
def test_whatever_python_would_import_is_refused(own, suffix):
    folder = own()
    (folder / f"module{suffix}").write_bytes(b"")
    with pytest.raises(BundleRefused, match="code or may hold code"):
        check_bundle(folder)


class Runs:
    """What a pickle of it does when it is loaded: it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_weights_that_hold_code_are_loaded_by_neither_of_the_readers_that_a_bundle_may_use(tmp_path):
    ran, file = tmp_path / "ran", tmp_path / "model.pt"
    torch.save({"weight": Runs(ran)}, file)
    with pytest.raises(ConfigError):
        read_weights(file)
    engine, network = Engine(lambda *_: None), torch.nn.Linear(1, 1)
    assert "monai.handlers.CheckpointLoader" in TARGETS
    CheckpointLoader(str(file), {"model": network}).attach(engine)
    with pytest.raises(pickle.UnpicklingError):
        engine.run([0])
    assert not ran.exists()
    torch.load(file, weights_only=False)  # the file does what is feared, where it is trusted
    assert ran.exists()


def test_links_are_refused(own, tmp_path):
    folder = own()
    (tmp_path / "elsewhere.yaml").write_text("a: 1")
    (folder / "configs" / "more.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    with pytest.raises(BundleRefused, match="symbolic link"):
        check_bundle(folder)


def test_a_folder_that_cannot_be_listed_is_refused(own, monkeypatch):
    bundle = own()
    closed = bundle / "docs" / "closed"
    closed.mkdir(parents=True)
    plain = os.scandir

    def scandir(path):
        if Path(os.fsdecode(path)) == closed:
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(BundleRefused, match="docs/closed: it cannot be listed"):
        check_bundle(bundle)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("class=StreamHandler", "class=logging.handlers.HTTPHandler", "HTTPHandler"),
        ("args=(sys.stdout,)", "args=(__import__('os').system('x'),)", "args is no plain value"),
        ("format=%(asctime)s", "class=os.system\nformat=%(asctime)s", "'os.system'"),
        ("args=(sys.stdout,)", "args=('%(level)s',)", "args refers to another key"),
        ("args=(sys.stdout,)", "args=()\nkwargs={'stream': '%(level)s'}", "kwargs refers to another key"),
        ("class=StreamHandler", "class=%(level)s", "class refers to another key"),
        ("format=%(asctime)s", "defaults=print('x')\nformat=%(asctime)s", "'defaults' is not allowed"),
        ("[loggers]", "[DEFAULT]\nx='+print('x')+'\n[loggers]", "'x' is not allowed"),
        ("[loggers]", "loggers", "no logging configuration"),
    ],
)
def test_logging_configuration_is_code_too(own, old, new, said):
    folder = own()
    path = folder / "configs" / "logging.conf"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(BundleRefused, match=said):
        check_bundle(folder)


@pytest.mark.parametrize("name", ["logging.conf", "metadata.json"])
def test_text_of_which_this_machine_loses_a_backslash_is_refused(own, monkeypatch, name):
    """In GBK the last byte of a euro sign and a backslash are one letter, so that text ends where it should not."""
    folder = own()
    path = folder / "configs" / name
    old, new = {
        "logging.conf": ("(sys.stdout,)", r"('\u20ac\'',)"),
        "metadata.json": ('"name": "', r'"name": "\u20ac\"'),
    }[name]
    path.write_bytes(path.read_text().replace(old, new.replace(r"\u20ac", "\u20ac"), 1).encode())
    assert "\u20ac" in path.read_text(encoding="utf-8")
    monkeypatch.setattr("locale.getpreferredencoding", lambda _: "cp1252")
    check_bundle(folder)
    monkeypatch.setattr("locale.getpreferredencoding", lambda _: "gbk")
    with pytest.raises(BundleRefused, match=f"{name}: in the encoding of this machine, gbk, it is another text"):
        check_bundle(folder)


def test_text_put_into_the_arguments_of_a_handler_would_have_run(own, tmp_path, monkeypatch):
    """Each value is plain by itself; together they are code."""
    monkeypatch.chdir(tmp_path)
    path = own() / "configs" / "logging.conf"
    text = path.read_text().replace("args=(sys.stdout,)", "args=('%(x)s',)\nx='+str(open('ran', 'w').close())+'")
    path.write_text(text)
    with pytest.raises(BundleRefused) as refused:
        check_bundle(path.parents[1])
    assert not Path("ran").exists()
    assert {"args refers to another key.", "the key 'x' is not allowed."} <= {f.what for f in refused.value.faults}
    subprocess.run([sys.executable, "-c", f"from logging.config import fileConfig; fileConfig({str(path)!r})"])
    assert Path("ran").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"metadata": lambda m: m.pop("task")}, "lacks task"),
        ({"metadata": at("version", "9.9")}, "9.9 is not in the changelog"),
        ({"metadata": at("monai_version", "99.0")}, "needs monai 99.0, here is"),
        ({"metadata": at("required_packages_version", {"no-such-package": "1.0"})}, "not installed"),
        ({"train": lambda c: c.pop("prepare")}, "lacks prepare"),
        ({"train": at("batch_size", 0)}, "whole number"),
    ],
)
def test_keys_and_versions(own, changes, said):
    with pytest.raises(BundleRefused, match=said):
        check_bundle(own(**changes))


def test_metadata_must_be_there(own):
    folder = own()
    (folder / "configs" / "metadata.json").unlink()
    with pytest.raises(BundleRefused, match="it is missing"):
        check_bundle(folder)
    with pytest.raises(ConfigError, match="there is no bundle"):
        check_bundle(folder / "configs")


def test_hash_covers_the_configuration_and_nothing_else(own):
    folder = own()
    first = bundle_hash(folder)
    assert first == check_bundle("oct_bscan_classification").hash
    (folder / "models").mkdir()
    (folder / "models" / "model.pt").write_bytes(b"weights")
    (folder / "docs" / "README.md").write_text("other")
    path = folder / "configs" / "evaluate.yaml"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))  # a checkout on Windows
    assert check_bundle(folder, first).hash == first
    own(train=at("batch_size", 64))
    changed = bundle_hash(folder)
    assert changed != first
    with pytest.raises(BundleRefused, match="64 hexadecimal digits"):
        check_bundle(folder, changed[:12])
    with pytest.raises(BundleRefused, match=f"it is {changed[:12]}, but {first[:12]} was agreed on"):
        check_bundle(folder, first)


def test_overrides_are_held_to_the_same_rules():
    name = NAMES[0]
    good = {"image_size": [64, 64], "weights": "~/w.pth", "dataset_dir": "/data", "learning_rate": 0.1}
    check_bundle(name, overrides=good)
    for override in (
        {"seed": RUNS},
        {"step": {"_target_": "os.system"}},
        {"optimizer::_target_": "os.system"},
        {"fit": "/etc/passwd"},
    ):
        with pytest.raises(BundleRefused, match="overrides: "):
            check_bundle(name, overrides=override)


def test_a_site_may_trust_a_component_of_its_own(own):
    folder = own(train=at("augment", {"_target_": "hospital.Augment"}))
    check_bundle(folder, allow=["hospital.Augment"])
    with pytest.raises(BundleRefused):
        check_bundle(folder, allow=["hospital"])


def test_every_fault_is_told_at_once(own):
    folder = own(train=at("seed", RUNS), metadata=at("description", "$import os"))
    with pytest.raises(BundleRefused) as refused:
        check_bundle(folder)
    assert len(refused.value.faults) == 2
    assert all(f.where and f.what and f.fix for f in refused.value.faults)


@pytest.mark.parametrize(
    "text",
    [
        "torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "@network_def.to(@device)",
        "len(@train::dataset) > @batch_size",
        "not @a and (@b[0] == 1 or -@c >= 2.5)",
        "[@in_channels] + @image_size",
        "from_engine(['loss'], first=True)",
        "{'a': @x}",
        "import torch",
        "@train#trainer.run()",
    ],
)
def test_expressions_of_the_grammar(text):
    assert expression_fault(text) is None


@pytest.mark.parametrize(
    "text",
    [
        *("@a.__class__", "().__class__", "'{0.__class__}'.format(1)", "@a[@b]", "@a[1:2]", "(lambda: 1)()"),
        *("[x for x in range(3)]", "f'{1}'", "(x := 1)", "9**9**9", "1 << 99", "open('x')", "getattr(1, 'a')"),
        *("dict(**@a)", "print(*@a)", "@a.load('x')", "torch.load('x')", "torch", "monai", "__builtins__"),
        *(" import os", "import os", "1; import os", "@a @ @b", "@", "", "1 +", "'@and' + __import__('os').name"),
        *("from_engine(['loss'], __class__=1)", "torch.device.mro()", "(1)(2)", "@a()", "1+" * 200 + "1"),
        "ｏｐｅｎ('x')",  # Python reads these letters as open
    ],
)
def test_expressions_beyond_the_grammar(text):
    assert expression_fault(text)


def test_plain_text_is_left_alone():
    for text in ("none", "@batch_size", "%(asctime)s"[2:], "a $ in the middle", "models/model.pt", "3.0e-4", ".", ""):
        assert text_fault(text) is None


def test_allow_lists_name_what_exists():
    from pydoc import locate

    assert [t for t in sorted(TARGETS) if not callable(locate(t))] == []
    for text in IMPORTS:
        module, _, name = text.removeprefix("from ").removeprefix("import ").partition(" import ")
        assert locate(f"{module}.{name}" if name else module) is not None


def test_command(own, capsys):
    def exit_code(*words):
        code = "import sys; from medfed.cli import main; sys.argv = ['medfed', *sys.argv[1:]]; main()"
        return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)

    bad = exit_code("bundle", "check", str(own(train=at("seed", RUNS))))
    assert bad.returncode == 2
    assert "configs/train.yaml: seed: the expression" in bad.stderr
    assert "Traceback" not in bad.stderr
    found = check_bundle(NAMES[0])
    with pytest.raises(SystemExit) as left:
        app(["bundle", "check", NAMES[0], "--hash", found.hash, "--set", "batch_size=4"])
    assert left.value.code == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [f"hash {found.hash}", f"folder {found.folder.absolute()}"]


def test_check_leaves_heavy_modules_alone():
    """A client refuses before anything of MONAI or torch is imported."""
    code = (
        "import sys; from medfed.bundle_check import check_bundle; check_bundle('oct_bscan_classification');"
        "print([m for m in ('torch', 'monai', 'ignite') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_yaml_of_the_bundles_is_read_alike():
    """The reader of the check and MONAI's give the same content."""
    from medfed.training.bundle import find_bundle, read_config

    for name in NAMES:
        for path in Path(find_bundle(name), "configs").glob("*.yaml"):
            assert read_config(path) == ConfigParser.load_config_file(path)
            assert yaml.safe_load(path.read_text())
