"""The command line.

Heavy modules are imported inside the commands that need them, so that ``medfed --help`` answers at once.
"""

from __future__ import annotations

import errno
import signal
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from medfed.bundle_cli import app as bundle_app
from medfed.cli_nvflare import nvflare
from medfed.errors import ConfigError, MedfedError

DISK = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EFBIG}
"""What a disk refuses: no fault of medfed's, so no traceback."""


class Spread(str, Enum):
    """What can stand behind ± in the papers' tables of a grid."""

    sample = "sample"
    population = "population"
    pooled = "pooled"


app = typer.Typer(
    name="medfed",
    help="Federated learning for medical images of uneven quality and labels of uneven reliability.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(bundle_app)

app.add_typer(nvflare)

Sets = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this at run time on Python 3.10
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the experiment file; may be given often."),
]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")]


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="Experiment file (YAML).")],
    sets: Sets = None,
    method: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Run this method instead of the file's; give it often to run several, one by one."),
    ] = None,
    seed: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(help="Run with this seed; give it often to run several."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Validate and prepare everything, then stop.")] = False,
) -> None:
    """Runs a federation from an experiment file."""
    from medfed.console import Screen
    from medfed.running import start_all

    start_all(config, sets or [], method or [], seed or [], Screen(), check=check)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    rounds: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="New last round; also goes on with a run that was completed."),
    ] = None,
) -> None:
    """Goes on with a run after its last checkpoint."""
    from medfed.console import Screen
    from medfed.running import resume as go_on

    screen = Screen()
    with screen:
        path = go_on(run, rounds=rounds, say=screen.say, progress=screen.progress, listeners=[screen.round])
    screen.finish([path])


@app.command()
def grid(
    file: Annotated[Path, typer.Argument(metavar="GRID", help="Grid file (YAML).")],
    sets: Sets = None,
    parallel: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Cells at a time, each in a process; by default one for each device of the file."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells and what of them exists.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Write the grid's page, CSV and LaTeX at the end.")] = False,
) -> None:
    """Runs methods x conditions x seeds; goes on where an earlier call stopped.

    Exits with 1 when a cell failed.
    """
    from rich.console import Console

    from medfed.grid import check_cells, copy_the_rest, run_grid
    from medfed.grid_file import load_grid
    from medfed.grid_screen import GridScreen, plan
    from medfed.report.grid import grid_tables, write_grid_report

    loaded = load_grid(file, sets or [])
    console = Console(highlight=False)
    if dry_run:
        check_cells(loaded, say=lambda text: typer.echo(text, err=True))
        plan(loaded, console)
        return
    screen = GridScreen(loaded, parallel or len(loaded.file.devices) or 1, console)
    try:
        with screen:
            run_grid(loaded, screen.tell, parallel=parallel, say=screen.say)
    except KeyboardInterrupt:
        screen.say(f"Stopped after {screen.state.count('done')} of {len(screen.state)} cells; run it again to go on.")
        raise
    for line in copy_the_rest(loaded):
        screen.say(line)
    if "done" in screen.state:
        grid_tables(loaded.folder).render(console)
        for path in write_grid_report(loaded.folder, say=screen.say) if report else ():
            screen.say(f"Written: {path}")
    screen.finish()
    if screen.failures:
        raise typer.Exit(1)


@app.command()
def inspect(
    source: Annotated[Path, typer.Argument(help="Experiment file, or a folder or table of images.")],
    reader: Annotated[
        str, typer.Option(help="Reader of a folder or table: folder, isic, kermany, rsna_ich or table.")
    ] = "folder",
    out: Annotated[Path, typer.Option(help="Folder for the report and the picture sheet.")] = Path("inspection"),
    sets: Sets = None,
    limit: Annotated[Optional[int], typer.Option(min=1, help="Decode at most so many samples.")] = None,  # noqa: UP045
) -> None:
    """Looks at images and labels before a run: what is there, what is unusable and why.

    Exits with 1 when something was found that spoils a result.
    """
    from medfed.console import Screen
    from medfed.inspecting import inspect as look

    if not look(source, reader, out, sets or [], Screen(), limit).usable:
        raise typer.Exit(1)


@app.command()
def methods() -> None:
    """Lists the methods: paper, what clients send and keep, what is needed."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from medfed.methods.registry import METHODS, get_method

    # Two columns, so that whole sentences stay readable in 80 characters.
    table = Table.grid(padding=(0, 2))
    for name in METHODS:
        m = get_method(name)
        table.add_row(Text(m.name, style="bold"), Text(m.title))
        for what, text in (
            ("published", m.paper),
            ("sends", m.sends if m.personal else f"model, {m.sends}".removesuffix(", -")),
            ("keeps", m.keeps),
            ("needs", m.needs),
            ("labels", ", ".join(m.task_kinds)),
        ):
            if text != "-":
                table.add_row(Text(f"  {what}"), Text(text))
    Console().print(table)
    Console().print("Every client also sends its mean training loss and the number of steps taken and skipped.")


@app.command()
def compare(
    runs: Runs,
    baseline: Annotated[Optional[str], typer.Option(help="Method that differences are taken from.")] = None,  # noqa: UP045
    metric: Annotated[Optional[list[str]], typer.Option(help="Metric; may be given often.")] = None,  # noqa: UP045
    last: Annotated[int, typer.Option(help="Last rounds averaged.", min=1)] = 5,
    unpaired: Annotated[bool, typer.Option("--unpaired", help="Allow runs of different conditions.")] = False,
    pooled: Annotated[
        bool, typer.Option("--pooled", help="Also the form of FedISM's tables: last rounds of all seeds pooled.")
    ] = False,
    number: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--against",
            metavar="KEY",
            help="Line up runs over a number of the experiment, e.g. condition.label_noise.rate: a group each.",
        ),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Also write this file: .html, .csv, .md, .tex, .json or .png."),
    ] = None,
) -> None:
    """Compares runs that share a condition: clean, corrupted, average, worst client, gap."""
    from rich.console import Console

    from medfed.report.against import against
    from medfed.report.compare import compare as compare_runs
    from medfed.report.runs import load_run

    loaded = [load_run(path) for path in runs]
    how: dict[str, Any] = {"metrics": metric, "baseline": baseline, "last": last, "allow_unpaired": unpaired}
    result: Any = compare_runs(loaded, **how) if number is None else against(loaded, number, **how)
    result.render(Console(highlight=False), pooled)
    if out is not None:
        write_comparison(loaded, result, out, number, how)
        typer.echo(f"Written: {out}")


def write_comparison(loaded: list[Any], result: Any, out: Path, number: str | None, how: dict[str, Any]) -> None:
    """Writes a comparison in the format that the file's ending names."""
    texts = {".csv": result.to_csv, ".md": result.to_markdown, ".tex": result.to_latex, ".json": result.to_json}
    if out.suffix in texts:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(texts[out.suffix](), encoding="utf-8")
    elif out.suffix == ".html":
        from medfed.report.html import experiment_page

        experiment_page(loaded, out, number=number, **how)
    elif out.suffix == ".png" and number is not None:
        from medfed.report.against_figures import against_plot

        against_plot(result, out)
    elif out.suffix == ".png":
        from medfed.report.plots import comparison_plot

        comparison_plot(loaded, out)
    else:
        raise ConfigError(
            f"cannot write '{out.suffix}'.", where=str(out), fix="Use .html, .csv, .md, .tex, .json or .png."
        )


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or of a grid.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder of the files of a grid, or file of a run's page; by default within RUN."),
    ] = None,
    bootstrap: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Of a grid: resamples of the bootstrap intervals (1000); 0 for none."),
    ] = None,
    spread: Annotated[
        Optional[Spread],  # noqa: UP045
        typer.Option(help="Of a grid: what stands behind ± in the papers' tables (sample)."),
    ] = None,
) -> None:
    """Writes the report of a run anew, also of one that is still going on; of a grid the papers' tables and figures."""
    from medfed.report.grid import RESAMPLES, write_grid_report
    from medfed.report.grid_cells import CONTENT
    from medfed.report.html import write_report

    if (run / CONTENT).is_file():
        resamples = RESAMPLES if bootstrap is None else bootstrap
        how = (spread or Spread.sample).value
        paths = write_grid_report(run, out, bootstrap=resamples, spread=how, say=typer.echo)
    elif bootstrap is not None or spread is not None:
        raise ConfigError("is not the folder of a grid.", where=str(run), fix="--bootstrap and --spread are for grids.")
    else:
        paths = [write_report(run, out)]
    for path in paths:
        typer.echo(f"Written: {path}")


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, which may still be going on.")],
    client: Annotated[str, typer.Option(metavar="NAME", help="The client whose labels are looked at.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder for the list and the page; by default the client's own folder in the run."),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Most pictures on the page; the list is never cut.")] = 200,
    only: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--class", metavar="CLASS", help="Only samples of this observed class."),
    ] = None,
) -> None:
    """Lists, for one client, labels worth a look, best first: a CSV and a page with pictures.

    Made from the client's own memory and images; nothing is sent.
    """
    from medfed.auditing import audit as look
    from medfed.console import Screen

    screen = Screen()
    with screen:
        made = look(run, client, out=out, limit=limit, only=only, say=screen.say, progress=screen.progress)
    screen.say(made.summary())


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a run, or a bundle with a trained model.")],
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="Folder of DICOM, images or NIfTI, or one file.")],
    out: Annotated[Path, typer.Option(help="Folder for images.csv, studies.csv and predictions.json.")],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    study_by: Annotated[
        str, typer.Option(help="What is one study where a file does not say: file, or folder.")
    ] = "file",
    weights: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Weights of a bundle that lie elsewhere than in its models folder (.pt or .safetensors)."),
    ] = None,
    sets: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the bundle; not for a run, which knows them."),
    ] = None,
) -> None:
    """Writes the probabilities of every image and study, and why a file was not processed.

    Exits with 1 when nothing could be processed.
    """
    from medfed.bundle_cli import parse_sets
    from medfed.predicting import load_model
    from medfed.predicting import predict as judge

    if study_by not in ("file", "folder"):
        raise ConfigError(f"'{study_by}' is no grouping.", where="--study-by", fix="Use file or folder.")
    loaded = load_model(model, parse_sets(sets or []), weights)
    found = judge(loaded, source, out, device=device, study_by=study_by, say=typer.echo)  # type: ignore[arg-type]
    counts = found["counts"]
    typer.echo(f"images: {counts['processed']} processed, {counts['not processed']} not; studies: {counts['studies']}")
    typer.echo(f"Written: {out}")
    if not counts["processed"]:
        raise typer.Exit(1)


@app.command()
def ledger(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, of a client or of a site, or a ledger.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="Also list every tensor: name, type and shape.")] = False,
) -> None:
    """Shows everything that left a client, or reached a server, and checks that no line was changed."""
    from rich.console import Console

    from medfed.ledger import find_ledgers, ledger_table, read_ledger, tensor_lines

    console = Console(highlight=False)
    # Into a file or a pipe whole lines go; a narrow terminal breaks them itself, not in the middle of each cell.
    console.width = max(console.width, 120 if console.is_terminal else 240)
    for path in find_ledgers(folder):
        entries = read_ledger(path)
        console.print(ledger_table(entries, str(path)))
        for entry in entries if tensors else ():
            console.print(f"{entry['number']}  {entry['sha256'][:12]}", *tensor_lines(entry), sep="\n  ", markup=False)
        total = sum(e["bytes"] for e in entries)
        console.print(f"{len(entries)} messages, {total} bytes; the chain is unbroken.", markup=False)


@app.command()
def sync(runs: Runs) -> None:
    """Sends to MLflow what it has missed, e.g. while its server was down."""
    from medfed.tracking.sync import sync as catch_up

    for path in runs:
        typer.echo(str(catch_up(path)))


@app.command()
def demo(
    kind: Annotated[str, typer.Option(help="Built-in cohort: derm, ct or oct.")] = "derm",
    out: Annotated[Path, typer.Option(help="Folder for images, runs and results.")] = Path("demo"),
    rounds: Annotated[Optional[int], typer.Option(min=1, help="Communication rounds.")] = None,  # noqa: UP045
) -> None:
    """Runs FedAvg against FedISM on a built-in cohort, made on the spot."""
    from medfed.console import Screen
    from medfed.demonstration import demonstrate

    demonstrate(kind, out, rounds, Screen())


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from medfed import __version__

        typer.echo(f"medfed {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: a user's fault is one message and exit code 2, an interrupt exit code 130."""
    # A request to end (``kill``, a cluster's time limit) is an interrupt: the run says how it stands and cleans up.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app(standalone_mode=True)
    except MedfedError as error:
        typer.echo(f"medfed: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        if error.errno not in DISK:
            raise
        typer.echo(f"medfed: {error.filename or 'a file'}: {error.strerror}. See to the disk, then go on.", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("medfed: stopped.", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
