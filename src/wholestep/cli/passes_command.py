"""`wholestep passes`: lists the passes of the pipeline."""

import inspect
from typing import Annotated

import typer

from .target import HardwareName, hardware_of, working


def passes(
    hardware: HardwareName = None,
    across_steps: Annotated[bool, typer.Option(help="Leave the end of a step to the next call.")] = False,
    memory: Annotated[str | None, typer.Option(help="Memory of a rank, as 80GiB.")] = None,
    backend: Annotated[str, typer.Option(help="eager or inductor.")] = "eager",
) -> None:
    """List the passes that a compiled step goes through after partitioning, in order, each with a description.

    `wholestep plan MODEL --program --stop-after NAME` prints the program after one of them.
    """
    with working():
        from wholestep.backend.default_passes import default_passes

        schedule = "across_steps" if across_steps else "auto"
        chain = default_passes(hardware_of(hardware), schedule=schedule, memory_bytes=memory, backend=backend)
        rows = [(" ".join([type(p).__name__, *getattr(p, "kinds", ())]), _description(p)) for p in chain]
    width = max(len(name) for name, _ in rows)
    for number, (name, description) in enumerate(rows, 1):
        typer.echo(f"{number:2}  {name:{width}}  {description}")


def _description(pass_: object) -> str:
    """The first sentence of its docstring."""
    return " ".join((inspect.getdoc(type(pass_)) or "").split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
