"""What a job carries: a plan for the server and one for the sites, each a JSON file in its app's config folder.

Files rather than arguments in NVFlare's own configuration, because NVFlare replaces ``{...}`` in its strings and builds
a component of every mapping with a ``path``. The plan for sites holds nothing of the server's paths.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from medfed.bundle_check import bundle_hash
from medfed.config import explain
from medfed.errors import ConfigError
from medfed.federation.memory import client_folder

if TYPE_CHECKING:
    from medfed.config import Experiment
    from medfed.training.bundle import TrainingBundle

PLAN = "medfed.json"
RUNS = "runs"
"""Folder of the runs in a workspace. Never ``medfed``: NVFlare's processes start in the workspace, and Python would
take a folder of that name there for the package where medfed is installed in development mode."""
_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
AnyPlan = TypeVar("AnyPlan", bound="Plan")


class Plan(BaseModel):
    """What both plans hold.

    Args:
        run: identifies the run: a job that is submitted again goes on with it.
        sites: the client of each site, by site.
        max_message_mb: largest message that is accepted, in MB.
        cwd: only in a simulation: the folder that relative paths of the experiment start from.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    run: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    sites: dict[str, str]
    max_message_mb: float = Field(gt=0)
    cwd: str | None = None

    def enter(self) -> None:
        """Goes to where relative paths start from; NVFlare's processes begin in folders of their own."""
        if self.cwd is not None:
            os.chdir(self.cwd)

    @property
    def limit(self) -> int:
        """The largest message in bytes."""
        return int(self.max_message_mb * (1 << 20))

    def by_client(self) -> dict[str, str]:
        """The site of each client, by client."""
        return {client: site for site, client in self.sites.items()}

    def client(self, site: str) -> str:
        """The client that a site is.

        Raises:
            ConfigError: the job does not know the site.
        """
        if site not in self.sites:
            raise ConfigError("this site has no part in the job", where=site, fix="Check the names of the sites.")
        return self.sites[site]


class ServerPlan(Plan):
    """The server's plan.

    Args:
        experiment: the resolved experiment.
        folder: the run's folder; None makes one in the server's workspace.
    """

    experiment: dict[str, Any]
    folder: str | None = None


class SitePlan(Plan):
    """A site's plan: what all agreed on, the same for every site.

    Args:
        task: ``multiclass`` or ``multilabel``.
        classes: the class names in the order of the network's outputs; no site derives its own.
        method: name and settings of the method.
        bundle: name or folder of the bundle.
        overrides: keys of the bundle that are changed.
        bundle_hash: what the bundle must be after that.
        files_hash: what its files must be before anything of them is evaluated.
        seed: seed of the run.
        held_out: share of its samples that each site keeps apart to measure the model on.
        held_out_seed: seed of that choice: of the condition, the same for all methods of a comparison.
        amp: as in the experiment.
        channels_last: as in the experiment.
        compile: as in the experiment.
        simulation: only in a simulation, where all sites are on one machine: where they find everything.
    """

    task: Literal["multiclass", "multilabel"]
    classes: tuple[str, ...]
    method: dict[str, Any]
    bundle: str
    overrides: dict[str, Any]
    bundle_hash: str
    files_hash: str
    seed: int
    held_out: float = Field(0.0, ge=0, le=0.5)
    held_out_seed: int = 0
    amp: bool = False
    channels_last: bool = False
    compile: bool = False
    simulation: Simulation | None = None


class Simulation(BaseModel):
    """Where the sites of a simulation find everything.

    Args:
        shares: folder of what each client holds.
        clients: folder of the clients' memories and ledgers.
        device: device to train on.
        threads: threads of each site.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    shares: str
    clients: str
    device: str
    threads: int


SitePlan.model_rebuild()


def site_plan(
    experiment: Experiment,
    bundle: TrainingBundle,
    run: str,
    sites: dict[str, str],
    simulation: Simulation | None = None,
) -> SitePlan:
    """The plan for sites of an experiment.

    Args:
        experiment: the experiment.
        bundle: its bundle with all overrides.
        run: identifies the run.
        sites: the client of each site.
        simulation: where the sites of a simulation find everything.
    """
    engine = experiment.engine
    bundle_name = experiment.bundle if simulation is not None else Path(experiment.bundle).name
    return SitePlan(
        run=run,
        sites=sites,
        max_message_mb=engine.max_message_mb,
        task=bundle.task,
        classes=bundle.classes,
        method=experiment.method,
        bundle=bundle_name,
        overrides=experiment.overrides,
        bundle_hash=bundle.content_hash(),
        files_hash=bundle_hash(bundle.root),
        seed=experiment.seed,
        held_out=0.0 if experiment.sites is None else experiment.sites.held_out,
        held_out_seed=experiment.condition.seed or 0,
        amp=engine.amp,
        channels_last=engine.channels_last,
        compile=engine.compile,
        simulation=simulation,
        cwd=None if simulation is None else os.getcwd(),
    )


def site_names(clients: Iterable[str]) -> dict[str, str]:
    """A name that NVFlare admits for each client's site, by site: the client's own where that is possible."""
    return {name if _SITE.fullmatch(name) else client_folder(name).replace("~", "-"): name for name in sorted(clients)}


def write_plan(plan: Plan, folder: Path) -> Path:
    """Writes a plan into an app's config folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PLAN
    path.write_text(json.dumps(plan.model_dump(mode="json"), indent=1, ensure_ascii=False), encoding="utf-8")
    return path


def read_plan(kind: type[AnyPlan], folder: Path | str) -> AnyPlan:
    """Reads a plan from an app's config folder.

    Raises:
        ConfigError: it is missing or not valid.
    """
    path = Path(folder) / PLAN
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError("the job has no plan of medfed.", where=str(path), fix="Export it anew.") from None
    except ValidationError as error:
        raise ConfigError("\n  ".join(explain(error, kind)), where=str(path)) from None
