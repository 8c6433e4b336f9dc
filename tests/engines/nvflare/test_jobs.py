"""What is exported is what was asked, NVFlare takes it, and nothing of the server's is in it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from nvflare.apis.fl_constant import AdminCommandNames
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.fuel.sec.authz import AuthzContext, Person
from nvflare.fuel.utils.class_loader import load_class
from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.security.security import COMMAND_CATEGORIES, FLAuthorizer

import medfed
from medfed.config import validate
from medfed.engines.nvflare.export import rooted
from medfed.engines.nvflare.jobs import ALLOWED, write_job
from medfed.engines.nvflare.participant import CODE
from medfed.engines.nvflare.plan import PLAN, ServerPlan, SitePlan, read_plan, site_names, site_plan
from medfed.engines.nvflare.provisioning import project, provision
from medfed.errors import ConfigError
from medfed.training.bundle import TrainingBundle

CLASSES = ["a", "b", "c"]
SECRET = "/hospital/secret/root"


@pytest.fixture
def experiment():
    return validate(
        {
            "name": "trial",
            "cohort": {"reader": "folder", "root": SECRET},
            "bundle": "oct_bscan_classification",
            "overrides": {"batch_size": 4, "learning_rate": 0.01},
            "method": {"name": "fedism", "beta": 2.5},
            "rounds": 7,
            "seed": 3,
            "participation": {"quorum": 2, "timeout": 60.5, "grace": 1.5},
            "engine": {"kind": "nvflare", "max_message_mb": 12.5, "amp": True},
        },
        "test",
    )


@pytest.fixture
def job(experiment, tmp_path):
    bundle = TrainingBundle.load(experiment.bundle, {**experiment.overrides, "classes": CLASSES, "task": "multiclass"})
    sites = site_names(["c0", "c1", "Hospital Ä"])
    server = ServerPlan(
        run="r1", sites=sites, max_message_mb=12.5, experiment=experiment.model_dump(mode="json")
    )  # fmt: skip
    plan = site_plan(experiment, bundle, "r1", sites)
    return write_job(tmp_path / "job", "trial", server, plan, least=2, interval=0.5)


def test_every_argument_of_the_experiment_is_in_the_exported_json(job, experiment):
    """Trap: NVFlare's own export loses arguments without a word."""
    server = read_plan(ServerPlan, job / "medfed_server" / "config")
    assert validate(server.experiment, "job") == experiment
    site = json.loads((job / "medfed_site" / "config" / PLAN).read_text())
    assert site["method"] == {"name": "fedism", "beta": 2.5}
    assert site["overrides"] == {"batch_size": 4, "learning_rate": 0.01}
    assert site["classes"] == CLASSES
    assert (site["seed"], site["amp"], site["max_message_mb"], site["task"]) == (3, True, 12.5, "multiclass")
    assert read_plan(SitePlan, job / "medfed_site" / "config").limit == 12.5 * 2**20
    config = json.loads((job / "medfed_server" / "config" / "config_fed_server.json").read_text())
    assert config["workflows"] == [{"id": "medfed", "path": ALLOWED[0], "args": {}}]
    assert config["server"]["task_request_interval"] == 0.5
    config = json.loads((job / "medfed_site" / "config" / "config_fed_client.json").read_text())
    assert config["executors"] == [{"tasks": ["*"], "executor": {"path": ALLOWED[1], "args": {}}}]


def test_paths_of_the_exported_experiment_are_absolute(experiment, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    relative = experiment.model_copy(update={"cohort": experiment.cohort.model_copy(update={"root": Path("images")})})
    data = rooted(relative.model_copy(update={"cache": Path("store")}))
    assert data["cohort"]["root"] == str(tmp_path.resolve() / "images")
    assert data["cache"] == str(tmp_path.resolve() / "store")
    # Not the folder of whoever exports: the server has one of its own.
    assert rooted(relative.model_copy(update={"cache": None}))["cache"] is None
    assert data["bundle"] == "oct_bscan_classification"


def test_sites_are_told_no_path_of_the_server(job):
    for file in (job / "medfed_site").rglob("*.json"):
        assert SECRET not in file.read_text()
        assert "cohort" not in file.read_text()


def test_nvflare_admits_the_job_without_code_in_it(job):
    valid, error, meta = JobMetaValidator().validate("job", zip_directory_to_bytes("", str(job)))
    assert valid, error
    assert not meta.get("byoc")
    assert meta["min_clients"] == 2
    sites = sorted(site_names(["c0", "c1", "Hospital Ä"]))
    assert meta["deploy_map"] == {"medfed_server": ["server"], "medfed_site": sites}


def test_names_that_nvflare_does_not_admit_get_one_that_it_does():
    sites = site_names(["c0", "Hospital Ä", "a.b", "x" * 80])
    assert sites["c0"] == "c0"
    assert sorted(sites.values()) == sorted(["c0", "Hospital Ä", "a.b", "x" * 80])
    assert all(len(site) < 64 and site.replace("-", "").replace("_", "").isalnum() for site in sites)


def test_the_two_classes_exist_take_no_arguments_and_need_the_allow_list(tmp_path):
    for path in ALLOWED:
        load_class(path)()
        authorizer = ComponentPathAuthorizer()

        class Workspace:
            def get_resources_file_path(self):
                return str(tmp_path / "resources.json")

        (tmp_path / "resources.json").write_text("{}")
        with pytest.raises(Exception, match="not in allow_list"):
            authorizer.authorize_component_config({"path": path}, workspace=Workspace())
        (tmp_path / "resources.json").write_text(json.dumps({"class_allow_list": [path]}))
        ComponentPathAuthorizer().authorize_component_config({"path": path}, workspace=Workspace())


def test_kits_admit_one_class_and_stream_no_log(tmp_path):
    content = project("trial", "localhost", ["c0", "c1"], "a@b.org", org="x", port=8002, admin_port=8003)
    kits = provision(content, tmp_path / "fed", tmp_path / "store")
    assert sorted(kits) == ["a@b.org", "c0", "c1", "localhost"]
    for name, allowed in (("localhost", ALLOWED[0]), ("c0", ALLOWED[1]), ("c1", ALLOWED[1])):
        resources = json.loads((kits[name] / "local" / "resources.json").read_text())
        assert resources["class_allow_list"] == [allowed]
        assert resources["class_list_enforcement_mode"] == "enforce"
        assert resources.get("allow_log_streaming") in (None, False)
        assert "site_log_streamer" not in [c["id"] for c in resources["components"]]
        assert (kits[name] / "startup" / "rootCA.pem").is_file()
    assert "/tmp/nvflare" not in (kits["localhost"] / "local" / "resources.json").read_text()


def test_nobody_may_bring_code_and_everything_else_stays_as_nvflare_has_it(tmp_path):
    """As NVFlare itself reads the kits' rules, for every role and right that it knows."""
    content = project("trial", "localhost", ["c0"], "a@b.org", org="x", port=8002, admin_port=8003)
    kits = provision(content, tmp_path / "fed")
    for name in ("localhost", "c0"):
        local = kits[name] / "local"
        before, after = (
            FLAuthorizer("x", json.loads((local / f"authorization.json{end}").read_text())) for end in (".default", "")
        )
        roles = before.get_policy().get_roles()
        assert {"project_admin", "org_admin", "lead", "member"} <= set(roles)
        rights = {*COMMAND_CATEGORIES.values(), *before.get_policy().get_rights()}
        rights |= {value for name, value in vars(AdminCommandNames).items() if name.isupper()}
        opened = set()
        for role in roles:
            for right in rights:
                context = AuthzContext(right, Person("a@b.org", "x", role), Person("a@b.org", "x", role))
                was, now = (a.evaluate(context)[0] for a in (before, after))
                if right in CODE:
                    assert not now
                    opened |= {right} if was else set()
                elif right != "*":
                    assert now == was, (role, right)
        assert opened == set(CODE)  # NVFlare's own kits let somebody


def test_a_site_name_that_nvflare_does_not_admit_is_told(tmp_path):
    content = project("trial", "localhost", ["Hospital Ä"], "a@b.org", org="x", port=8002, admin_port=8003)
    with pytest.raises(ConfigError, match="Hospital Ä"):
        provision(content, tmp_path)


def test_nothing_but_the_engine_imports_nvflare():
    root = Path(medfed.__file__).parent
    for file in root.rglob("*.py"):
        if file.is_relative_to(root / "engines" / "nvflare"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [n for n in names if n.split(".")[0] == "nvflare"], file


def test_without_nvflare_there_is_one_message_that_says_what_to_install(tmp_path):
    code = (
        "import sys, importlib.machinery as m; find = m.PathFinder.find_spec\n"
        "m.PathFinder.find_spec = lambda name, *a: None if name.split('.')[0] == 'nvflare' else find(name, *a)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}import medfed.engines.nvflare"], capture_output=True, text=True
    )
    assert "pip install 'medfed[nvflare]'" in done.stderr.splitlines()[-1]
    done = subprocess.run(
        [sys.executable, "-c", f"{code}import sys; sys.argv = ['medfed', 'nvflare', 'provision', 'x', '--sites', 'a', "
         "'--server', 'h', '--admin', 'a@b.c']; from medfed.cli import main; main()"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert (
        done.stderr.strip() == "medfed: the NVFlare engine needs NVFlare 2.9. Install it: pip install 'medfed[nvflare]'"
    )
