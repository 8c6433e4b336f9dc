"""``medfed audit``: a work list of suspicious labels, made at one client from what that client has.

What is read: the client's own memory up to the run's checkpoint, how the federation judged this client (it was told),
and its own images and observed labels.  The truth of a simulation is not read, and nothing is sent or tracked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfed.errors import ConfigError, DataError, FederationError, nearest
from medfed.federation.memory import client_folder, newest_memory
from medfed.federation.state import ServerState, load_state
from medfed.report.audit import WorkList, work_list
from medfed.report.audit_page import Standing, thumbnail, write_audit_page, write_csv
from medfed.report.audit_signals import Evidence
from medfed.rundir import EXPERIMENT, RunFolder

if TYPE_CHECKING:
    import pandas as pd

    from medfed.experiment import Prepared

MEMORY = (
    "labels",
    "audit_rounds",
    "audit_proposals",
    "audit_representative",
    "audit_residual",
    "audit_loo_label",
    "audit_loo_margin",
    "audit_posterior",
)
"""What is read of a client's memory."""
ATTEMPTS = 5
"""Readings of a run that goes on, whose checkpoint and memories may move on between two looks."""


@dataclass(frozen=True)
class Audit:
    """What was made.

    Args:
        found: the whole list.
        shown: rows written: all of them, or those of one class.
        pictures: rows with a picture on the page.
        standing: how the federation judged the client.
        csv: the list.
        page: the page.
    """

    found: WorkList
    shown: int
    pictures: int
    standing: Standing
    csv: Path
    page: Path

    def summary(self) -> str:
        """A few lines for the terminal."""
        samples = int(self.found.observed.sum())
        cut = f" (pictures of the first {self.pictures}; see --limit)" if self.pictures < self.shown else ""
        contradicting = self.found.table["contradicting"]
        by_number = [(n, int((contradicting == n).sum())) for n in range(len(self.found.criteria), 0, -1)]
        lines = (
            self.standing.sentence(),
            f"{len(self.found)} of {samples} samples listed ("
            + ", ".join(f"{count} contradicted by {n} criteri{'on' if n == 1 else 'a'}" for n, count in by_number)
            + f"); {self.found.changed} training targets differ from the observed label.",
            "A person must look at each: the list corrects no diagnosis.",
            f"List: {self.csv}{'' if self.shown == len(self.found) else f' ({self.shown} of them)'}",
            f"Page: {self.page}{cut}",
        )
        return "\n".join(lines)


def audit(
    run: Path,
    client: str,
    *,
    out: Path | None = None,
    limit: int = 200,
    only: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Audit:
    """Writes ``audit.csv`` and ``audit.html`` for one client of a run, which may still be going on.

    Args:
        run: the run's folder.
        client: the client's name.
        out: the folder to write to; ``clients/<client>/audit`` in the run's folder by default.
        limit: most pictures on the page; the list itself is never cut.
        only: list samples of this observed class alone.
        say: told in one line what is going on.
        progress: told (what, done, total) while images are read.

    Raises:
        ConfigError: no such run, client or class, or labels of which a sample may carry several.
        FederationError: the client has no evidence: with what it lacks and what to do.
        DataError: images or labels are no longer those of the run.
    """
    folder = RunFolder.open(run)
    meta = folder.meta()
    check_request(run, meta, client, only)
    state, memory = read_memory(folder, client)
    standing = replace(judged(state, client), targets=keeps_labels(str(meta["method"])))
    evidence = Evidence.of(memory)
    if evidence is None:
        raise nothing_yet(run, meta, client, state, standing)
    prepared = prepare_run(run, meta, say, progress)
    view = prepared.condition.view(client)
    files = {s: prepared.files[s] for s in view.samples}
    try:
        found = work_list(view.samples, view.labels, prepared.task.classes, evidence, files)
    except DataError as error:
        raise DataError(error.what, where=f"{run}, client {client}", fix=error.fix) from None
    table = found.table if only is None else found.of_class(only)
    out = folder.clients / client_folder(client) / "audit" if out is None else out
    pictures = thumbnails(prepared, table, limit)
    csv = write_csv(table, out / "audit.csv")
    page = write_audit_page(
        found,
        table,
        out / "audit.html",
        client=client,
        run=run.resolve().name,
        method=str(meta["method"]),
        standing=standing,
        thumbnails=pictures,
        only=only,
        csv=csv.name,
    )
    return Audit(found, len(table), len(pictures), standing, csv, page)


def check_request(run: Path, meta: dict[str, Any], client: str, only: str | None) -> None:
    """Refuses what this run does not have."""
    if client not in meta["clients"]:
        raise ConfigError(f"there is no client '{client}'.", where=str(run), fix=nearest(client, meta["clients"]))
    if meta["task"] != "multiclass":
        raise ConfigError(
            "a sample may carry several labels at once, for which there is no list.",
            where=str(run),
            fix="Use a run with one class a sample.",
        )
    if only is not None and only not in meta["classes"]:
        raise ConfigError(f"there is no class '{only}'.", where="--class", fix=nearest(only, meta["classes"]))


def read_memory(folder: RunFolder, client: str) -> tuple[ServerState, dict[str, Any]]:
    """The newest checkpoint and what the client knew then.

    Later versions of the memory belong to a round that may be repeated, and are not read.

    Raises:
        FederationError: there is no checkpoint, or it moves on faster than it can be read.
    """
    place = folder.clients / client_folder(client)
    for _ in range(ATTEMPTS):
        state = load_state(folder.checkpoint)
        if state is None:
            raise FederationError(
                "no round is complete yet, so there is nothing to list.",
                where=str(folder.path),
                fix="Try again after the first checkpoint.",
            )
        try:
            memory = newest_memory(place, state.step, MEMORY)
        except FileNotFoundError:
            continue
        # A client drops versions older than the checkpoint it was last told of: nothing left means a later one.
        if memory or not any(place.glob("memory-*.safetensors")) or same_step(folder, state):
            return state, memory
    raise FederationError("the run moves on faster than it can be read.", where=str(place), fix="Try again.")


def same_step(folder: RunFolder, state: ServerState) -> bool:
    """Whether the checkpoint is still the one that was read."""
    now = load_state(folder.checkpoint)
    return now is not None and now.step == state.step


def judged(state: ServerState, client: str) -> Standing:
    """What the client was told of its judgement."""
    if "verdict" not in state.notes:
        return Standing()
    values = state.notes["verdict"].values
    return Standing(
        status=str(values.get("status", {}).get(client, "")),
        posterior=values.get("posterior", {}).get(client),
        round=values.get("round"),
    )


def nothing_yet(
    run: Path, meta: dict[str, Any], client: str, state: ServerState, standing: Standing
) -> FederationError:
    """Why a client has no evidence, and what to do."""
    method, rounds = str(meta["method"]), meta.get("rounds", 0)
    if not keeps_labels(method):
        why, fix = f"method {method} keeps none at its clients", "Use a run of a method that relabels, e.g. oct_fedsir."
    elif standing.status == "clean":
        why = "the federation counted it as clean and asked it for none; no label of it was changed"
        fix = "Nothing needs to be done."
    elif state.round < rounds:
        why = f"{state.round} of {rounds} rounds are done and the first relabelling checkpoint is not reached"
        fix = "Try again later in the run, or see the method's settings for when it comes."
    else:
        why = "the run ended without a relabelling checkpoint for this client"
        fix = "See the method's settings for when they come, and run more rounds."
    if standing.status == "undetermined":
        why = f"the federation could not judge it; {why}"
    return FederationError(f"client {client} has no evidence about its labels: {why}.", where=str(run), fix=fix)


def keeps_labels(method: str) -> bool:
    """Whether a method keeps anything about labels at its clients, as ``medfed methods`` says."""
    from medfed.methods.registry import METHODS, get_method

    return method in METHODS and "label" in get_method(method).keeps


def prepare_run(
    run: Path,
    meta: dict[str, Any],
    say: Callable[[str], None],
    progress: Callable[[str, int, int], None] | None,
) -> Prepared:
    """The run's images and labels, which must be those that its memories are of.

    Raises:
        DataError: they are not.
    """
    from medfed.config import validate
    from medfed.experiment import prepare
    from medfed.yaml_file import read_yaml

    file = run / EXPERIMENT
    say(f"Reading the images of {run}")
    # What preparing says of a simulation as a whole (which clients are noisy, how much) is not for one client.
    prepared = prepare(validate(read_yaml(file), str(file)), progress=progress)
    if (prepared.data_hash, prepared.condition.hash) != (meta["data_hash"], meta["condition_hash"]):
        raise DataError(
            "images or labels are no longer those that the run was made with.",
            where=str(run),
            fix="Restore them: the evidence in a client's memory is of the former ones.",
        )
    return prepared


def thumbnails(prepared: Prepared, table: pd.DataFrame, limit: int) -> dict[str, str]:
    """Pictures of the first rows, as the network sees them, in the client's own quality."""
    from medfed.data.transforms import CTWindowd

    steps = getattr(prepared.store.pipeline.prepare, "transforms", ())
    windows = any(isinstance(step, CTWindowd) for step in steps)
    images = prepared.store.images
    return {s: thumbnail(images[prepared.rows[s]], windows) for s in table["sample"].head(limit)}
