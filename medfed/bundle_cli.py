"""``medfed bundle``: what can be done with a bundle from the command line."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import typer
import yaml

from medfed.errors import ConfigError

app = typer.Typer(name="bundle", help="Bundles: is one safe to run here, and which one is it?", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `check` a command of its own."""


@app.command()
def check(
    bundle: Annotated[str, typer.Argument(help="Folder of a bundle, or the name of one that ships with medfed.")],
    expect: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--hash", help="The hash agreed on; another one is refused."),
    ] = None,
    sets: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", metavar="KEY=VALUE", help="An override that is checked too; may be given often."),
    ] = None,
    allow: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Full name of a component that this site trusts; may be given often."),
    ] = None,
) -> None:
    """Checks a bundle without executing anything of it: keys, versions, components, expressions, hash.

    Exits with 2 and says what, where and how to mend it when the bundle is refused.
    """
    from medfed.bundle_check import check_bundle

    found = check_bundle(bundle, expect, parse_sets(sets or []), allow or [])
    typer.echo(f"{found.folder.name} {found.version}: nothing to object to in {len(found.files)} files")
    typer.echo(f"hash {found.hash}")
    typer.echo(f"folder {found.folder.absolute()}")


def parse_sets(sets: list[str]) -> dict[str, Any]:
    """Overrides of a bundle from ``KEY=VALUE`` texts; the value is YAML.

    Raises:
        ConfigError: a text without ``=``, or a value that is not YAML.
    """
    found = {}
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"'{text}' is no KEY=VALUE.", where="--set", fix="E.g. --set network_name=resnet18.")
        try:
            found[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"the value of '{key}' is not valid YAML.", where="--set") from None
    return found
