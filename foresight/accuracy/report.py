"""Errors as tables: on the screen, and as a page of the documentation."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from foresight.accuracy.read import Case, Left


@dataclass(frozen=True)
class Table:
    """A heading, a line of what it shows, and rows of cells below names of columns."""

    title: str
    said: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def errors(title: str, said: str, cases: Sequence[Case], by: Callable[[Case], tuple[str, ...]],
           names: tuple[str, ...]) -> Table:  # fmt: skip
    """Absolute errors of each group, and of all."""
    groups: dict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in cases:
        groups[by(case)].append(case)
    rows = [(*key, *_figures(members)) for key, members in sorted(groups.items())]
    if len(groups) > 1:
        rows.append(("all", *("" for _ in names[1:]), *_figures(cases)))
    return Table(title, said, (*names, "rows", "median", "mean", "bias", "above 20 %", "worst"), tuple(rows))


def in_short(title: str, said: str, columns: Mapping[str, Sequence[Case]], by: Callable[[Case], tuple[str, ...]],
             names: tuple[str, ...]) -> Table:  # fmt: skip
    """Mean errors and biases of each group, and of all, after several kinds of prediction. `rows` are the first's."""
    first = next(iter(columns.values()))
    groups = sorted({by(case) for case in first})
    rows = [
        (*group, *_means([[case for case in cases if by(case) == group] for cases in columns.values()]))
        for group in groups
    ]
    if len(groups) > 1:
        rows.append(("all", *("" for _ in names[1:]), *_means(list(columns.values()))))
    return Table(title, said, (*names, "rows", *columns), tuple(rows))


def _means(columns: Sequence[Sequence[Case]]) -> tuple[str, ...]:
    made = [
        f"{_percent(mean(abs(case.error) for case in cases))}, {mean(case.error for case in cases):+.1%}"
        if cases
        else ""
        for cases in columns
    ]
    return str(len(columns[0])), *made


def _figures(cases: Sequence[Case]) -> tuple[str, ...]:
    wrong = [abs(case.error) for case in cases]
    far = sum(error > 0.2 for error in wrong)
    bias = mean(case.error for case in cases)
    return (
        str(len(cases)),
        _percent(median(wrong)),
        _percent(mean(wrong)),
        f"{bias:+.1%}",
        str(far),
        _percent(max(wrong)),
    )


def worst(title: str, cases: Iterable[Case], count: int = 10) -> Table:
    """The rows with the largest errors, and what is known about them."""
    found = sorted(cases, key=lambda case: -abs(case.error))[:count]
    rows = tuple((*_row(case), case.reason or "not explained") for case in found)
    said = f"the {len(rows)} rows with the largest error"
    return Table(title, said, ("source", "hardware", "row", "measured", "predicted", "error", "why"), rows)


def _row(case: Case) -> tuple[str, ...]:
    figures = f"{case.measured:.4g}", f"{case.predicted:.4g}", f"{case.error:+.1%}"
    return case.source, case.hardware, case.label, *figures


def far(title: str, cases: Iterable[Case]) -> Table:
    """Rows that are off by more than 20 %, counted by what is known about them."""
    counts = Counter((c.source, c.hardware, c.reason or "not explained") for c in cases if abs(c.error) > 0.2)
    rows = tuple((*key, str(count)) for key, count in sorted(counts.items()))
    return Table(
        title, f"{sum(counts.values())} rows off by more than 20 %", ("source", "hardware", "why", "rows"), rows
    )


def left_out(title: str, left: Iterable[Left]) -> Table:
    """Rows that the model cannot express, counted by reason."""
    counts = Counter((one.source, one.reason) for one in left)
    rows = tuple((source, reason, str(count)) for (source, reason), count in sorted(counts.items()))
    return Table(title, f"{sum(counts.values())} rows that cannot be predicted", ("source", "why", "rows"), rows)


def markdown(table: Table) -> str:
    """As a section of a page."""
    lines = [f"### {table.title}", "", f"{table.said[0].upper()}{table.said[1:]}.", ""]
    if table.rows:
        lines += [_line(table.columns), _line(tuple("---" for _ in table.columns)), *map(_line, table.rows), ""]
    return "\n".join(lines)


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _percent(share: float) -> str:
    return f"{share:.1%}"
