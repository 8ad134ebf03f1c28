"""Searches over the batch size of a rank: the best plan for each size, and the fastest size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from ..cost.software import OWN, Software
from ..errors import BudgetError, PlanError
from ..graph.graph import TrainGraph
from ..graph.text import human, seconds, table
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..passes.base import Pass
from ..tuning import TUNING
from .auto import Auto
from .search_result import Candidate, SearchResult, Watch, unwatched

ENOUGH = TUNING.doubling_gain
"""Sizes are doubled as long as that saves this part of the time for a sequence."""


@dataclass(frozen=True)
class BatchSize:
    """The winner for a batch of `batch` sequences, or `why` there is none."""

    batch: int
    best: Candidate | None = None
    why: str = ""

    @property
    def sequence_s(self) -> float:
        """Seconds for each sequence that is trained; infinite without a plan."""
        return self.best.batch_s / self.batch if self.best is not None else float("inf")


@dataclass(frozen=True)
class BatchSearch:
    """All sizes that were tried, and the search and the step of the size with the shortest time for a sequence."""

    rows: tuple[BatchSize, ...]
    batch: int
    search: SearchResult
    graph: TrainGraph


def search_batches(
    auto: Auto, capture: Callable[[int], TrainGraph], mesh: Mesh | str, sizes: Sequence[int] | None = None,
    hardware: Hardware | None = None, watch: Watch | None = None, passes: Sequence[Pass] | None = None,
    software: Software = OWN,
) -> BatchSearch:  # fmt: skip
    """Lets `auto` choose for each of `sizes` (sequences in a captured batch), and compares the winners by time for each
    sequence. Without `sizes`: 1, 2, 4 and on, until nothing fits, or a sequence is hardly faster.

    `capture` captures the step with a batch size. It is called in growing order, and for no size above one that does
    not fit. `watch` is called with the size and the name of each candidate; `passes` replace
    `default_passes(hardware)`, and `software` prices.

    Example:
        >>> search_batches(Auto("80GiB", hardware), lambda size: capture(step, model, optimizer, batch(size)), "dp=16")

    Raises:
        PlanError: sizes are malformed, or no plan can be made; of kind BudgetError where none fits for the smallest.
    """
    rows, notify = list[BatchSize](), watch or unwatched
    best: tuple[float, int, SearchResult, TrainGraph] | None = None
    refused: BudgetError | None = None
    for size in _checked(sizes) if sizes is not None else _doubled(rows):
        if refused is not None:
            rows.append(BatchSize(size, why=f"not looked at: no plan fits for {rows[-1].batch} already"))
            continue
        graph = capture(size)
        try:
            search = auto.search(
                graph, mesh, hardware=hardware, passes=passes, software=software,
                watch=lambda name, size=size: notify(f"batch {size}: {name}"),
            )  # fmt: skip
        except BudgetError as error:
            refused = error
            rows.append(BatchSize(size, why=error.found))
            continue
        rows.append(BatchSize(size, search.best))
        if best is None or rows[-1].sequence_s < best[0]:
            best = rows[-1].sequence_s, size, search, graph
    if best is None:
        assert refused is not None, "the first size has a plan, or was refused"
        raise refused
    return BatchSearch(tuple(rows), *best[1:])


def show(search: BatchSearch) -> str:
    """The sizes as a table; below it, why some have no plan."""
    head = ("batch", "mesh", "plan", "peak", "step", "per sequence", "rematerialized", "")
    cells = [head, *(_cells(row, row.batch == search.batch) for row in search.rows if row.best is not None)]
    unplanned = [f"batch {row.batch}: {row.why}" for row in search.rows if row.best is None]
    return "\n".join([*table(cells), *unplanned])


def _cells(row: BatchSize, is_best: bool) -> tuple[str, ...]:
    best = row.best
    assert best is not None, "only rows with a plan have cells"
    rematerialized = f"{len(best.rematerialized)} tensors" if best.rematerialized else ""
    return (
        str(row.batch), str(best.mesh), best.name, human(best.needs_bytes), seconds(best.batch_s * best.batches),
        seconds(row.sequence_s), rematerialized, "fastest" if is_best else "",
    )  # fmt: skip


def _doubled(rows: Sequence[BatchSize]) -> Iterator[int]:
    """1, 2, 4 and on; `rows` are the outcomes so far."""
    for power in count():
        yield 1 << power
        gained = 1 - rows[-1].sequence_s / rows[-2].sequence_s if len(rows) > 1 else 1.0
        if rows[-1].best is None or gained < ENOUGH:
            return


def _checked(sizes: Sequence[int]) -> list[int]:
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise PlanError(f"sizes of batches {list(sizes)}", "numbers of at least 1", "correct them")
    return sorted(set(sizes))
