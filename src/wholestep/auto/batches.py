"""The batch of a rank searched with everything else: for each size the best plan, and the size that is fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from ..errors import BudgetError, PlanError
from ..graph.graph import TrainGraph
from ..graph.text import human, seconds, table
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..tuning import TUNING
from .auto import Auto
from .search import Considered, Found, Watch

ENOUGH = TUNING.doubling_gain
"""Sizes are doubled for as long as that makes a sequence faster by so much: what follows saves less than this."""


@dataclass(frozen=True)
class Sized:
    """What was found for a batch of so many sequences: the winner, or `why` there is none."""

    batch: int
    best: Considered | None = None
    why: str = ""

    @property
    def sequence_s(self) -> float:
        """Seconds for each sequence that is trained; infinite without a plan."""
        return self.best.batch_s / self.batch if self.best is not None else float("inf")


@dataclass(frozen=True)
class Batches:
    """Every size that was looked at, in order, and of the fastest for each sequence the search and the step."""

    rows: tuple[Sized, ...]
    batch: int
    found: Found
    graph: TrainGraph


def search_batches(
    auto: Auto, capture: Callable[[int], TrainGraph], mesh: Mesh | str, sizes: Sequence[int] | None = None,
    hardware: Hardware | None = None, watch: Watch | None = None,
) -> Batches:  # fmt: skip
    """Lets `auto` choose for each of `sizes`, the number of sequences in a captured batch, and compares the winners by
    time for each sequence. Without `sizes`: 1, 2, 4 and on, until nothing fits, or a sequence is hardly faster.

    `capture` gives the step with a batch of a size; it is called in growing order, and not for sizes above one of
    which no plan fits. `watch` is told of each candidate, after the size.

    Example:
        >>> search_batches(Auto("80GiB", hardware), lambda size: capture(step, model, optimizer, batch(size)), "dp=16")

    Raises:
        PlanError: sizes are malformed, or no plan can be made; of kind BudgetError where none fits for the smallest.
    """
    rows: list[Sized] = []
    best: tuple[float, int, Found, TrainGraph] | None = None
    refused: BudgetError | None = None
    for size in _checked(sizes) if sizes is not None else _doubled(rows):
        if refused is not None:
            rows.append(Sized(size, why=f"not looked at: no plan fits for {rows[-1].batch} already"))
            continue
        graph = capture(size)
        try:
            found = auto.search(graph, mesh, hardware=hardware, watch=_told(watch, size))
        except BudgetError as error:
            refused = error
            rows.append(Sized(size, why=error.found))
            continue
        rows.append(Sized(size, found.best))
        if best is None or rows[-1].sequence_s < best[0]:
            best = rows[-1].sequence_s, size, found, graph
    if best is None:
        assert refused is not None, "the first size has a plan, or was refused"
        raise refused
    return Batches(tuple(rows), *best[1:])


def show(found: Batches) -> str:
    """The sizes as a table; below it, why some have no plan."""
    head = ("batch", "mesh", "plan", "peak", "step", "per sequence", "made again", "")
    cells = [head, *(_cells(row, row.batch == found.batch) for row in found.rows if row.best is not None)]
    left = [f"batch {row.batch}: {row.why}" for row in found.rows if row.best is None]
    return "\n".join([*table(cells), *left])


def _cells(row: Sized, is_best: bool) -> tuple[str, ...]:
    best = row.best
    assert best is not None, "only rows with a plan have cells"
    return (
        str(row.batch), str(best.mesh), best.name, human(best.needs_bytes), seconds(best.batch_s * best.batches),
        seconds(row.sequence_s), f"{len(best.again)} values" if best.again else "", "fastest" if is_best else "",
    )  # fmt: skip


def _doubled(rows: Sequence[Sized]) -> Iterator[int]:
    """1, 2, 4 and on; `rows` are what came of those before."""
    for power in count():
        yield 1 << power
        gained = 1 - rows[-1].sequence_s / rows[-2].sequence_s if len(rows) > 1 else 1.0
        if rows[-1].best is None or gained < ENOUGH:
            return


def _checked(sizes: Sequence[int]) -> list[int]:
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise PlanError(f"sizes of batches {list(sizes)}", "numbers of at least 1", "correct them")
    return sorted(set(sizes))


def _told(watch: Watch | None, size: int) -> Watch | None:
    return None if watch is None else lambda name: watch(f"batch {size}: {name}")
