"""The command line."""

import gc
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, ParamSpec, TypeVar

import typer

from .calibrate_command import calibrate
from .checkpoint_command import checkpoint
from .diff_command import diff
from .passes_command import passes
from .plan_command import plan
from .simulate_command import simulate

P = ParamSpec("P")
R = TypeVar("R")


def loaded(command: Callable[P, R]) -> Callable[P, R]:
    """`command`, which first imports all of wholestep, and torch: `--help` needs neither."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        import_module("wholestep.public")
        return command(*args, **kwargs)

    return run


app = typer.Typer(
    name="wholestep",
    help="A training step written for one device, captured whole as one graph and run on any mesh.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(loaded(plan))
app.command()(loaded(simulate))
app.command()(loaded(diff))
app.command()(loaded(passes))
app.command()(loaded(calibrate))
app.command()(loaded(checkpoint))


def _show_version(requested: bool) -> None:
    if requested:
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
    gc.set_threshold(50_000, 20, 50)  # most objects of graphs live long: collect less often
    try:
        app()
    finally:
        gc.freeze()  # the process ends: its last collections can skip the remaining objects
