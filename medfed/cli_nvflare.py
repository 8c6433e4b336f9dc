"""``medfed nvflare ...``: jobs and kits for a federation of real sites."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

nvflare = typer.Typer(
    name="nvflare", help="A federation of real sites over NVFlare: see docs/deployment.md.", no_args_is_help=True
)
Source = Annotated[Path, typer.Argument(metavar="RUN_OR_CONFIG", help="Experiment file, or folder of a run.")]
Sets = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this at run time on Python 3.10
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the experiment; may be given often."),
]


@nvflare.command()
def export(source: Source, out: Annotated[Path, typer.Argument(help="New job folder.")], sets: Sets = None) -> None:
    """Writes a job folder for `nvflare job submit`. Submitted again, it goes on after the last checkpoint."""
    from medfed.console import Screen
    from medfed.engines.nvflare.export import export as write

    screen = Screen()
    with screen:
        write(source, out, sets or [], say=screen.say, progress=screen.progress)
    screen.say(f"Submit: nvflare job submit -j {out}")


@nvflare.command()
def shares(source: Source, out: Annotated[Path, typer.Argument(help="New folder.")], sets: Sets = None) -> None:
    """For a trial: writes what each client of an experiment holds, for the `local` folder of its site."""
    from medfed.console import Screen
    from medfed.engines.nvflare.export import shares as write

    screen = Screen()
    with screen:
        folders = write(source, out, sets or [], say=screen.say, progress=screen.progress)
    for folder in folders:
        screen.say(f"For the local folder of {folder.name}: {folder}")


@nvflare.command()
def provision(
    out: Annotated[Path, typer.Argument(help="Folder for the project file and the kits.")],
    sites: Annotated[str, typer.Option(help="Names of the sites, with commas between.")],
    server: Annotated[str, typer.Option(help="Host name of the server, as the sites reach it.")],
    admin: Annotated[str, typer.Option(help="E-mail address of the administrator.")],
    project: Annotated[str, typer.Option(help="Name of the project.")] = "medfed",
    org: Annotated[str, typer.Option(help="Organisation: letters, digits, '_'.")] = "medfed",
    port: Annotated[int, typer.Option(help="Port that sites connect to.")] = 8002,
    admin_port: Annotated[int, typer.Option(help="Port that the administrator connects to.")] = 8003,
    storage: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder on the server's machine for its list of jobs; by default NVFlare's, below /tmp."),
    ] = None,
) -> None:
    """Makes startup kits with `nvflare provision` and closes them: medfed's class only, no log leaves a site."""
    from medfed.engines.nvflare.provisioning import project as content
    from medfed.engines.nvflare.provisioning import provision as make

    names = [name.strip() for name in sites.split(",") if name.strip()]
    kits = make(content(project, server, names, admin, org=org, port=port, admin_port=admin_port), out, storage)
    for name, kit in kits.items():
        typer.echo(f"{name}: {kit}")


KitFolder = Annotated[Path, typer.Argument(metavar="KIT", help="Folder of a startup kit on this machine.")]


@nvflare.command()
def start(
    kit: KitFolder, check: Annotated[bool, typer.Option("--check", help="Check the kit, then stop.")] = False
) -> None:
    """Checks a kit, then starts its server or site in the foreground, e.g. for systemd."""
    from medfed.engines.nvflare.keeping import role_of
    from medfed.engines.nvflare.participant import main

    raise typer.Exit(main([role_of(kit), str(kit), *(["--check"] if check else [])]))


@nvflare.command()
def stop(kit: KitFolder) -> None:
    """Ends the server or site of a kit on this machine, however it was started."""
    from medfed.engines.nvflare.keeping import stop as end

    end(kit)
    typer.echo(f"{kit.name}: stopped.")


@nvflare.command()
def status(kit: KitFolder) -> None:
    """Whether the server or site of a kit runs and is connected, and how its runs stand."""
    from medfed.engines.nvflare.keeping import status as lines

    for line in lines(kit):
        typer.echo(line)
