"""`wholestep plan --auto --batch 1,2,4`: chooses the batch of a rank too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .screen import Screen, each, staged
from .target import Target, refuse

if TYPE_CHECKING:
    from wholestep.graph.graph import TrainGraph
    from wholestep.planner.auto import Auto
    from wholestep.planner.batch_sizes import BatchSearch

    from .hf import ModelSpec

OPEN = "auto"


@dataclass(frozen=True)
class BatchSizes:
    """Sequences for each rank to choose from; empty for `auto`."""

    given: tuple[int, ...]

    @property
    def first(self) -> int:
        """The size that is captured before the search."""
        return min(self.given, default=1)

    @property
    def several(self) -> bool:
        """True if the size is to be chosen."""
        return len(self.given) != 1


def sizes(batch: str | None, auto: bool) -> BatchSizes | None:
    """The value of `--batch`; None without it."""
    if batch is None:
        return None
    numbers = [] if batch == OPEN else [part.strip() for part in batch.split(",")]
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        refuse(f"--batch {batch}: needed a number of at least 1, or with --auto several, as 1,2,4, or auto")
    found = BatchSizes(tuple(dict.fromkeys(map(int, numbers))))
    if found.several and not auto:
        refuse(f"--batch {batch} without --auto: a plan is for one size of batches")
    return found


def chosen(
    shown: Screen, asked: BatchSizes, wanted: ModelSpec, first: tuple[Target, TrainGraph], mesh: str, auto: Auto
) -> tuple[BatchSearch, Target, str]:
    """The search results by size, the step of the fastest size, and a table of all sizes."""
    import wholestep as ws
    from wholestep.planner.batch_sizes import search_batches, show

    from .hf import build

    targets, graphs = {asked.first: first[0]}, {asked.first: first[1]}

    def capture(size: int) -> TrainGraph:
        if size in graphs:
            return graphs.pop(size)
        with staged(shown, f"capture batch {size}"):
            targets[size] = build(replace(wanted, batch=size))
            return ws.capture(targets[size].step, *targets[size].args, **targets[size].kwargs)

    with each(shown, 0) as watch:
        found = search_batches(auto, capture, mesh, asked.given or None, watch=watch)
    head = f"{first[0].name} on mesh {mesh}, by batch\n{show(found)}\n\nwith batches of {found.batch}"
    return found, targets[found.batch], head
