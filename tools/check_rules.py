"""Checks every sharding rule against the real op: python -m tools.check_rules --op 'aten.sum*'"""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.rule_samples import Row, check_op, samples_of, table

_COLORS = {"holds": "green", "shapes hold": "green", "wrong": "bold red", "no sample": "red"}
_SHOWN = 20  # failures that are listed


def check_rules(
    op: Annotated[str, typer.Option("--op", help="Only ops whose names match, as in 'aten.sum*'.")] = "*",
) -> None:
    """Check sharding rules against the real ops: shard real tensors, run the pieces, assemble the results, compare.

    Samples come from PyTorch's test database. Exit status 1 if a rule is wrong or never tried.
    """
    console = Console()
    targets = table(op)
    if not targets:
        typer.echo(f"check_rules: no op with a rule matches {op!r}", err=True)
        raise typer.Exit(2)
    columns = (TextColumn("{task.description:<14}"), BarColumn(), TextColumn("{task.fields[at]}"), TimeElapsedColumn())
    rows: list[Row] = []
    with Progress(*columns, console=console, transient=True) as progress, _quiet():
        task = progress.add_task("samples", total=1.0, at="")
        samples = samples_of(targets, lambda done: progress.update(task, completed=done))
        task = progress.add_task("check", total=len(targets), at="")
        for target in targets:
            progress.update(task, at=str(target))
            rows.append(check_op(target, samples[target]))
            progress.advance(task)
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("op", "factors", "samples", "verdict"):
        shown.add_column(name, justify="right" if name == "samples" else "left", overflow="fold")
    for row in rows:
        verdict = f"[{_COLORS.get(row.verdict, 'dim')}]{row.verdict}[/]"
        shown.add_row(row.result.op, " ".join(row.result.factors) or "none", str(row.result.samples), verdict)
    console.print(shown)
    wrong = [row for row in rows if not row.ok]
    for row in wrong[:_SHOWN]:
        line = str(row.result.failures[0]) if row.result.failures else f"{row.result.op}: {row.verdict}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if len(wrong) > _SHOWN:
        console.print(f"... and {len(wrong) - _SHOWN} more; --op narrows it down")
    pairs, tried = sum(len(row.result.factors) for row in rows), sum(row.result.samples for row in rows)
    text = f"{len(rows)} ops, {pairs} (op, factor) pairs, {tried} samples, {len(wrong)} wrong"
    console.print(text, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if wrong else 0)


@contextmanager
def _quiet() -> Generator[None]:
    """Suppress messages of torch's kernels about odd pieces on standard error."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


if __name__ == "__main__":
    typer.run(check_rules)
