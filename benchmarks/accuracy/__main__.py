"""How far the cost model is from published measurements: python -m benchmarks.accuracy --runs RUNS.csv ..."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table as Shown

from benchmarks.accuracy import collectives, config, gemms, refit, runs
from benchmarks.accuracy.read import Case, rows
from benchmarks.accuracy.report import Table, errors, far, left_out, markdown, worst

_HEAD = """# How far the cost model is from what was measured

Made by `{command}`. The files hold published measurements; their columns are those that
`benchmarks/accuracy` names when one is missing. *Held out* means that a figure was fitted without the rows that are
tested; *as shipped* means the presets of `ws.Hardware`, whose figures were fitted to these files as a whole. Errors are
absolute, as a share of what was measured; *bias* keeps the sign, above 0 where the prediction is too slow or too large.

"""


_OWN = "## On this machine"  # of `benchmarks.truth`, which writes the end of the page


def main() -> None:
    """Read the files, print every table, write the page where one is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    for name, what in (("runs", "training runs"), ("collectives", "collectives"), ("gemms", "matrix products")):
        parser.add_argument(f"--{name}", type=Path, metavar="CSV", help=f"published {what}")
    parser.add_argument(
        "--refit", action="store_true", help="fit the figures of presets again too, to half of the runs"
    )
    parser.add_argument("--table", type=Path, metavar="PAGE.md", help="write the tables here too")
    given = parser.parse_args()
    if not (given.runs or given.collectives or given.gemms):
        parser.error("give at least one of --runs, --collectives, --gemms")
    console, made = Console(), list[Table]()
    for path, tables in ((given.collectives, _collectives), (given.gemms, _gemms), (given.runs, _runs)):
        if path:
            for table in tables(path):
                _show(console, table)
                made.append(table)
    if given.refit and given.runs:
        made.append(_refitted(given.runs))
        _show(console, made[-1])
    if given.table:
        files = [f"--{name} {path.name}" for name in ("runs", "collectives", "gemms") if (path := getattr(given, name))]
        command = " ".join(
            ["python -m benchmarks.accuracy", *files, *(["--refit"] * given.refit), f"--table {given.table.name}"]
        )
        old = given.table.read_text() if given.table.exists() else ""
        own = "".join(["\n", *old.partition(_OWN)[1:]]) if _OWN in old else ""
        given.table.write_text(_HEAD.format(command=command) + "\n".join(map(markdown, made)) + own)


def _collectives(path: Path) -> Iterator[Table]:
    found, left = collectives.read(rows(path, collectives.COLUMNS))
    if found:
        tested = collectives.by_size(found)
        without_sizes = "curves fitted without a fifth of the sizes, tested on those"
        without_ranks = "curves fitted without groups of one size, tested on those, where there are several"
        shipped = "in sample for the rows that the presets were fitted to"
        for title, said, cases in (
            ("by size, held out", without_sizes, tested),
            ("by ranks, held out", without_ranks, collectives.by_ranks(found)),
            ("as shipped", shipped, collectives.in_sample(found)),
        ):
            if cases:
                yield errors(f"Collectives, {title}", said, cases, lambda c: (c.group,), ("size",))
        if tested:
            yield errors("Collectives by device and kind, held out by size", without_sizes, tested, _device, _DEVICE)
            longer = [case for case in tested if case.group != "< 1 MiB"]
            yield worst("Collectives of 1 MiB and more, held out by size: the worst (microseconds)", longer)
    yield left_out("Collectives left out", left)


_DEVICE = ("source", "device", "kind", "size")


def _device(case: Case) -> tuple[str, ...]:
    return case.source, case.hardware, case.label.split()[0], case.group


def _product(case: Case) -> tuple[str, ...]:
    return case.hardware, case.group, "> 30 us" if case.measured > 30 else "<= 30 us"


def _gemms(path: Path) -> Iterator[Table]:
    cases, left = gemms.read(rows(path, gemms.COLUMNS))
    if cases:
        said = "in sample for the table that tiles and rates were fitted to"
        yield errors("Matrix products, as shipped", said, cases, _product, ("device", "dtype", "time"))
        yield worst("Matrix products: the worst", cases)
    yield left_out("Matrix products left out", left)


def _runs(path: Path) -> Iterator[Table]:
    found, held, left = runs.read(rows(path, config.COLUMNS))
    if found:
        said = "one scalar for each hardware, fitted to its other models"
        tested = runs.held_out(found)
        yield errors("Step times, held out by model", said, tested, _source, ("source", "hardware"))
        yield errors("Step times by parallelism, held out by model", said, tested, lambda c: (c.group,), ("kind",))
        yield errors("Step times, in sample", "one scalar for each hardware, fitted to all of its rows",
                     runs.in_sample(found), _source, ("source", "hardware"))  # fmt: skip
        yield worst("Step times, held out by model: the worst (seconds)", tested)
        yield far("Step times, held out by model: what is far off", tested)
        yield Table("Scalars", "measured time by that of the model as shipped", ("hardware", "scalar"),
                    tuple((name, f"{value:.3f}") for name, value in sorted(runs.scalars(found).items())))  # fmt: skip
    if held:
        yield errors("Memory", "nothing is fitted", held, _source, ("source", "hardware"))
        yield worst("Memory: the worst (GiB)", held)
    else:
        yield Table("Memory", "no row of this file has bytes (`mem_gib`)", (), ())
    yield left_out("Runs left out", left)


def _refitted(path: Path) -> Table:
    found, _, _ = runs.read(rows(path, config.COLUMNS))
    said = "figures of presets and scalars fitted to half of the models, tested on the other half"
    return errors("Step times, all figures held out", said, refit.halves(found), _source, ("source", "hardware"))


def _source(case: Case) -> tuple[str, ...]:
    return case.source, case.hardware


def _show(console: Console, table: Table) -> None:
    shown = Shown(title=f"{table.title}: {table.said}", title_justify="left", title_style="bold")
    for column in table.columns:
        shown.add_column(column, overflow="fold")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown, markup=False) if table.rows else console.print(f"{table.title}: {table.said}", markup=False)
    console.print()


if __name__ == "__main__":
    main()
