"""The command line."""

import gc
from importlib.metadata import version
from typing import Annotated

import typer

from .calibrate import calibrate
from .check_rules import check_rules
from .demo import demo
from .diff import diff
from .plan import plan
from .simulate import simulate

app = typer.Typer(
    name="wholestep",
    help="A training step written for one device, captured whole as one graph and run on any mesh.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(plan)
app.command()(simulate)
app.command()(diff)
app.command()(calibrate)
app.command("check-rules")(check_rules)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"wholestep {version('wholestep')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """A training step written for one device, captured whole as one graph and run on any mesh."""


def main() -> None:
    """Entry point of the `wholestep` command."""
    gc.set_threshold(50_000, 20, 50)  # of what graphs make most stays: it is looked at less often
    try:
        app()
    finally:
        gc.freeze()  # the process ends: its last collections need not look through what is left
