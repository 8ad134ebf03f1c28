"""The comparison: a column for each way to train, a row for each quantity."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class Measured:
    """What one way to train came to; `differences` are the largest of any parameter to other ways, by their names."""

    name: str
    loss: float
    differences: dict[str, float]
    seconds: float
    stored_bytes: int
    collectives: dict[str, int]
    sent_bytes: int


def comparison(ways: Sequence[Measured], steps: int) -> Table:
    """The table; differences are those after `steps` steps. The last way is compared with all others that are shown."""
    table = Table(title="Same weights and same data, steps taken in turn", title_justify="left")
    table.add_column("")
    for way in ways:
        table.add_column(way.name, justify="right")
    table.add_row("loss at the end", *[f"{way.loss:.4f}" for way in ways], end_section=True)
    for other in ways[-1].differences:
        found = [way.differences.get(other) for way in ways]
        label = f"largest parameter difference\nto {other}, after {steps} steps"
        table.add_row(label, *["-" if one is None else f"{one:.1e}" for one in found])
    table.add_row("ms per step, median", *[f"{1e3 * way.seconds:.1f}" for way in ways])
    table.add_row("MB stored per rank", *[_megabytes(way.stored_bytes) for way in ways], end_section=True)
    for kind in sorted({kind for way in ways for kind in way.collectives}):
        table.add_row(f"{kind} per step", *[str(way.collectives.get(kind, "-")) for way in ways])
    table.add_row("MB sent per rank and step", *[_megabytes(way.sent_bytes) for way in ways])
    return table


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f}" if size_bytes else "-"
