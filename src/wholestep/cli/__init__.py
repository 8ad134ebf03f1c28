"""The command line."""

import gc
from importlib.metadata import entry_points, version
from typing import Annotated

import typer

from .checkpoint_command import checkpoint
from .plan_command import plan
from .simulate_command import simulate
from .target import loaded, refuse

app = typer.Typer(
    name="wholestep",
    help="A training step written for one device, captured whole as one graph and run on any mesh.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(loaded(plan))
app.command()(loaded(simulate))
app.command()(loaded(checkpoint))
_PLUGINS = entry_points(group="wholestep.commands")
for entry in _PLUGINS:  # groups of typer, of installed packages
    app.registered_commands += entry.load().registered_commands


def _absent(context: typer.Context) -> None:
    """Say which package has a command."""
    refuse(f"{context.info_name} is a command of wholestep-foresight: pip install 'wholestep[foresight]'")


for name in () if "foresight" in _PLUGINS.names else ("calibrate", "gpus", "sizes"):
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(name, hidden=True, add_help_option=False, context_settings=settings)(_absent)


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
