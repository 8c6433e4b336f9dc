"""Laws of the architecture that are read off the source: who may import whom, and what is never called."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import medfed

ROOT = Path(medfed.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))

# What each room may not know, at any depth of a function.
FORBIDDEN = {
    "aggregation": ("engines", "methods", "training", "tracking", "report", "running", "experiment", "config", "cli"),
    "federation": ("engines", "methods", "tracking", "report", "running", "experiment", "config", "cli"),
    "engines": ("methods", "tracking", "report", "running", "cli"),
    "methods": (
        "engines",
        "tracking",
        "report",
        "running",
        "experiment",
        "cli",
        "data.condition",
        "training.evaluation",
    ),
    "training": ("engines", "methods", "federation", "tracking", "report", "running", "experiment", "cli"),
    "data": ("engines", "methods", "federation", "tracking", "report", "running", "experiment", "cli", "training"),
}
# Processes that NVFlare starts have nobody above them: these files assemble a server or a site there, by names in the
# job's plan. They may look a method up and open a run, and know no method, tracking or report.
ASSEMBLY = {
    f"engines/nvflare/{name}.py": ("medfed.methods.registry.resolve_method", "medfed.running.")
    for name in ("hospitals", "hosting", "serving")
}
FOREIGN = {"aggregation": ("mlflow", "nvflare"), "federation": ("mlflow", "nvflare"), "methods": ("mlflow", "nvflare")}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def type_checking_only(path):
    """Modules imported under ``if TYPE_CHECKING``, which nothing sees at run time."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    inner = [m for n in guarded for m in ast.walk(n) if isinstance(m, ast.ImportFrom)]
    return {f"{m.module}.{alias.name}" for m in inner for alias in m.names}


@pytest.mark.parametrize("room", FORBIDDEN)
def test_imports_point_down_only(room):
    faults = []
    for path in (ROOT / room).rglob("*.py"):
        allowed = ASSEMBLY.get(path.relative_to(ROOT).as_posix(), ())
        for name in set(imports(path)) - type_checking_only(path):
            if name.startswith(allowed):
                continue
            above = [f"medfed.{other}" for other in FORBIDDEN[room]]
            foreign = FOREIGN.get(room, ("nvflare",) if room != "engines" else ())
            faults += [f"{path.name}: {name}" for a in (*above, *foreign) if name == a or name.startswith(f"{a}.")]
    assert faults == []


def calls(path):
    """Dotted names of everything called, with the call itself."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def refused(name, given):
    """Whether a call unpickles, or runs text as code."""
    return (
        name in {"eval", "exec", "yaml.load", "torch.save", "os.system"}
        or name.startswith(("pickle.", "marshal.", "dill.", "joblib."))
        or "True" in (given.get("shell"), given.get("allow_pickle"))
        or (name == "torch.load" and given.get("weights_only") != "True")
    )


def draws_globally(name, given):
    """Whether a call draws from a generator of the process, or seeds one."""
    if name.startswith("torch.") and name.split(".")[1] in {
        *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial")
    }:
        return "generator" not in given
    if name in {"torch.manual_seed", "torch.cuda.manual_seed_all"}:
        return True
    return name.startswith(("np.random.", "numpy.random.")) and not name.endswith((".default_rng", ".Generator"))


@pytest.mark.parametrize("fault", [refused, draws_globally])
def test_nothing_is_called_that_must_not_be(fault):
    found = []
    for path in SOURCES:
        for name, call in calls(path):
            given = {k.arg: ast.unparse(k.value) for k in call.keywords}
            if fault(name, given):
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}: {name}")
    assert found == []
    assert not [p for p in SOURCES if "random" in set(imports(p))]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("torch.load(f)", refused),
        ("subprocess.run(c, shell=True)", refused),
        ("pickle.loads(b)", refused),
        ("torch.randperm(3)", draws_globally),
        ("np.random.rand(2)", draws_globally),
    ],
)
def test_the_check_itself_finds_faults(tmp_path, text, fault):
    (tmp_path / "m.py").write_text(text)
    ((name, call),) = calls(tmp_path / "m.py")
    assert fault(name, {k.arg: ast.unparse(k.value) for k in call.keywords})
