"""`wholestep diff`: storage layouts that differ between two plans."""

from pathlib import Path
from typing import Annotated

import typer

from .target import working


def diff(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="A plan, of `wholestep plan --json`.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Another.")],
) -> None:
    """Show storage layouts and bytes of a rank that differ between two plans."""
    from wholestep.plan.plan import Plan

    with working():
        text = str(Plan.load(before).diff(Plan.load(after)))
    typer.echo(text)
