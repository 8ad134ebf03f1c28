"""How far the cost model is from published measurements: python -m foresight.accuracy --runs RUNS.csv ..."""

import argparse
import re
from collections.abc import Iterator
from functools import partial
from math import ceil
from pathlib import Path

from rich.console import Console
from rich.table import Table as Shown

from foresight.accuracy import assumed, collectives, config, gemms, runs
from foresight.accuracy.read import Case, Left, Row, rows
from foresight.accuracy.report import Table, errors, far, in_short, left_out, markdown, worst
from foresight.accuracy.validation import validations, write
from wholestep.hardware.validation import FILE

_HEAD = """# How far the cost model is from what was measured

Made by `{command}`. The files hold published measurements; their columns are those that
`foresight/accuracy` names when one is missing. *Held out* means that a figure was fitted without the rows that are
tested; *as shipped* means the presets of `ws.Hardware`, whose curves of collectives and tiles of products were fitted
to these files as a whole. Runs are simulated by the functions of `wholestep simulate`, on what two tables assume.
Errors are absolute, as a share of what was measured; *bias* keeps the sign, above 0 where the prediction is too slow or
too large.

"""


def main() -> None:
    """Read the files, print every table, write the page where one is asked for."""
    parser = argparse.ArgumentParser(prog="python -m foresight.accuracy", description=__doc__)
    for name, what in (("runs", "training runs"), ("collectives", "collectives"), ("gemms", "matrix products")):
        parser.add_argument(f"--{name}", type=Path, metavar="CSV", help=f"published {what}")
    parser.add_argument("--table", type=Path, metavar="PAGE.md", help="write the tables here too")
    parser.add_argument(
        "--part", default="", metavar="HEADING", help="as the part of the page with this heading; else as its beginning"
    )
    parser.add_argument(
        "--most", type=int, default=0, metavar="N", help="runs of a source, spread over it; 0: all of them"
    )
    parser.add_argument(
        "--validation", type=Path, nargs="?", const=FILE, metavar="FILE.json",
        help="write the error bars of simulate and plan here, into the package if no file is given",
    )  # fmt: skip
    given = parser.parse_args()
    if given.validation and not given.runs:
        parser.error("--validation needs --runs")
    if not (given.runs or given.collectives or given.gemms):
        parser.error("give at least one of --runs, --collectives, --gemms")
    console, made, sheet = Console(), list[Table](), list[Case]()
    of_runs = partial(_runs, given.most, sheet, given.part)
    for path, tables in ((given.collectives, _collectives), (given.gemms, _gemms), (given.runs, of_runs)):
        if path:
            for table in tables(path):
                _show(console, table)
                made.append(table)
    if given.validation:
        most = f" --most {given.most}" if given.most else ""
        command = f"python -m foresight.accuracy --runs {given.runs.name}{most} --validation"
        write(given.validation, command, validations(sheet))
    if given.table:
        files = [f"--{name} {path.name}" for name in ("runs", "collectives", "gemms") if (path := getattr(given, name))]
        most = [f"--most {given.most}"] if given.most else []
        part = [f'--part "{given.part}"'] if given.part else []
        command = " ".join(["python -m foresight.accuracy", *files, *most, f"--table {given.table.name}", *part])
        head = f"Made by `{command}`.\n\n" if given.part else _HEAD.format(command=command)
        old = given.table.read_text() if given.table.exists() else ""
        given.table.write_text(with_part(old, given.part, head + "\n".join(map(markdown, made))))


def with_part(page: str, heading: str, text: str) -> str:
    """`page` with `text` in place of the part under `heading`, or as a new one in front of all others; without a
    heading, in place of what stands before all parts.
    """
    begin, *parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    if not heading:
        return "\n".join([text, "".join(parts)]) if parts else text
    head = f"## {heading}\n"
    others = [part for part in parts if not part.startswith(head)]
    place = next((i for i, part in enumerate(parts) if part.startswith(head)), 0)
    return "".join([begin, *others[:place], f"{head}\n{text}\n", *others[place:]])


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


def thinned(given: list[Row], most: int) -> list[Row]:
    """At most so many rows of a source, at equal distances; all for 0."""
    sources = {row["source_id"]: [one for one in given if one["source_id"] == row["source_id"]] for row in given}
    return [row for several in sources.values() for row in several[:: ceil(len(several) / (most or len(several)))]]


def _runs(most: int, sheet: list[Case], part: str, path: Path) -> Iterator[Table]:
    yield from () if part else assumed.tables()
    found, left = runs.read(thinned(rows(path, config.COLUMNS), most))
    sheet += runs.from_the_data_sheet(found)
    yield from run_tables(found, left)


def run_tables(found: list[runs.Predicted], left: list[Left]) -> Iterator[Table]:
    """Errors of step times in four columns, of memory, and what is left out."""
    columns = (
        ("from the data sheet", "presets as they are: of runs, A100's memory rate and one host were fitted to some",
         runs.from_the_data_sheet(found)),
        ("factor of other sources", "one factor for a device, from all other sources, where there are some",
         runs.by_other_sources(found)),
        ("after one row", "one factor for a source and a hardware, from its row of median length, which is left out",
         runs.after_one_row(found)),
        ("after calibration",
         "one factor for a source's device, from a row, and where its host costs 2 % of a step, one for that, from a "
         "second row: both are left out",
         runs.after_calibration(found)),
        ("held out by model",
         "one factor for a source and a hardware, from its runs of other models; where its host costs 2 % of a step, "
         "two, each the median of what five of them tell",
         runs.by_other_models(found)),
    )  # fmt: skip
    if columns[0][2]:
        three = {title: cases for title, _, cases in (columns[0], columns[2], columns[3])}
        said = "mean error, bias; what each column is given is said below"
        yield in_short("Step times in short", said, three, _source, ("source", "hardware"))
    for title, said, cases in columns:
        if cases:
            yield errors(f"Step times, {title}", said, cases, _source, ("source", "hardware"))
    sheet = columns[0][2]
    if sheet:
        yield errors("Step times by device, from the data sheet", columns[0][1], sheet, _hardware, ("hardware",))
        yield errors("Step times by device, after one row", columns[2][1], columns[2][2], _hardware, ("hardware",))
        calibrated = columns[3][1:]
        yield errors("Step times by device, after calibration", *calibrated, _hardware, ("hardware",))
        yield errors("Step times by parallelism, from the data sheet", columns[0][1], sheet, _kind, ("kind",))
        yield errors("Step times by parallelism, after calibration", *calibrated, _kind, ("kind",))
        if any("pipeline" in one.group for one in sheet):
            yield errors("Step times by parallelism, held out by model", columns[4][1], columns[4][2], _kind, ("kind",))
        yield worst("Step times, from the data sheet: the worst (seconds)", sheet)
        yield far("Step times, from the data sheet: what is far off", sheet)
        yield far("Step times, after calibration: what is far off", columns[3][2])
    held = runs.memory(found)
    if held:
        yield errors("Memory", "nothing is fitted", held, _source, ("source", "hardware"))
        yield worst("Memory: the worst (GiB)", held, len(held))
    else:
        yield Table("Memory", "no row of this file has bytes (`mem_gib`)", (), ())
    yield left_out("Runs left out", left)


def _hardware(case: Case) -> tuple[str, ...]:
    return (case.hardware,)


def _kind(case: Case) -> tuple[str, ...]:
    return (case.group,)


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
