"""`wholestep check-rules`: checks every sharding rule against the real op."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from wholestep.rules.testing.check_table import Row
    from wholestep.rules.testing.mutate import Mutation

_COLORS = {"holds": "green", "shapes hold": "green", "wrong": "bold red", "no sample": "red"}
_SHOWN = 20  # failures and surviving mutations that are listed


def check_rules(
    op: Annotated[str, typer.Option("--op", help="Only ops whose names match, as in 'aten.sum*'.")] = "*",
    mutate: Annotated[
        bool, typer.Option("--mutate", help="Also mutate every rule: the check must fail on each mutation.")
    ] = False,
) -> None:
    """Check sharding rules against the real ops: shard real tensors, run the pieces, assemble the results, compare.

    Samples come from PyTorch's test database. Exit status 1 if a rule is wrong or never tried, or a mutated rule
    passes.
    """
    from wholestep.rules.testing.check_table import check_table
    from wholestep.rules.testing.mutate_table import mutate_table
    from wholestep.rules.testing.samples import samples_of, table

    console = Console()
    targets = table(op)
    if not targets:
        typer.echo(f"wholestep check-rules: no op with a rule matches {op!r}", err=True)
        raise typer.Exit(2)
    columns = (TextColumn("{task.description:<14}"), BarColumn(), TextColumn("{task.fields[at]}"), TimeElapsedColumn())
    mutations: list[Mutation] = []
    with Progress(*columns, console=console, transient=True) as progress, _quiet():
        task = progress.add_task("samples", total=1.0, at="")
        samples = samples_of(targets, lambda done: progress.update(task, completed=done))
        task = progress.add_task("check", total=len(targets), at="")
        rows: list[Row] = []
        for row in check_table(targets, samples.__getitem__):
            rows.append(row)
            progress.update(task, advance=1, at=row.op)
        if mutate:
            task = progress.add_task("mutate", total=len(targets), at="")
            for target, found in mutate_table(targets, samples.__getitem__):
                mutations += found
                progress.update(task, advance=1, at=str(target))
    console.print(_table(rows, mutations if mutate else None))
    for line in _details(rows, mutations):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    survived = [m for m in mutations if m.verdict == "survived"]
    console.print(_summary(rows, mutations if mutate else None), highlight=False, soft_wrap=True)
    raise typer.Exit(1 if survived or not all(row.ok for row in rows) else 0)


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


def _table(rows: "list[Row]", mutations: "list[Mutation] | None") -> Table:
    found = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("op", "factors", "samples", *([] if mutations is None else ["mutations", "caught"]), "verdict"):
        justify = "right" if name in ("samples", "mutations", "caught") else "left"
        found.add_column(name, justify=justify, overflow="fold")
    for row in rows:
        cells = [row.op, " ".join(row.result.factors) or "none", str(row.bound)]
        if mutations is not None:
            tried = _tried([m for m in mutations if m.op == row.op])
            cells += [str(len(tried)), str(sum(m.caught for m in tried))]
        color = _COLORS.get(row.verdict, "dim")
        found.add_row(*cells, f"[{color}]{row.verdict}[/]")
    return found


def _tried(mutations: "list[Mutation]") -> "list[Mutation]":
    """The mutations whose claim is false for the op: the check has to catch them."""
    return [m for m in mutations if m.verdict in ("caught", "survived")]


def _details(rows: "list[Row]", mutations: "list[Mutation]") -> list[str]:
    lines = [str(row.result.failures[0]) for row in rows if row.result.failures]
    lines += [f"{row.op}: {row.verdict}" for row in rows if not row.ok and not row.result.failures]
    lines += [f"{m.op}: '{m.rule}' passes with {m.change}" for m in mutations if m.verdict == "survived"]
    more = len(lines) - _SHOWN
    return lines[:_SHOWN] + ([f"... and {more} more; --op narrows it down"] if more > 0 else [])


def _summary(rows: "list[Row]", mutations: "list[Mutation] | None") -> str:
    pairs = {pair for row in rows for pair in row.result.pairs}
    wrong = sum(not row.ok for row in rows)
    text = f"{len(rows)} ops, {len(pairs)} (op, factor) pairs, {sum(row.bound for row in rows)} samples, {wrong} wrong"
    if mutations is None:
        return text
    tried = _tried(mutations)
    text += f"; {len(tried)} mutations tried, {sum(m.caught for m in tried)} caught"
    extra = {m.verdict: sum(x.verdict == m.verdict for x in mutations) for m in mutations if m not in tried}
    return text + "".join(f", {count} true ({verdict})" for verdict, count in sorted(extra.items()))
