"""List scheduling of the blocks of a pipeline: a stage that is free runs what is ready."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import GraphError
from .block_runs import BlockCost, BlockRuns, HeldBytes, OrderResult, Task


def list_schedule(
    blocks: Mapping[str, BlockCost], pieces: int, stages: int, limits: Sequence[int], forward_first: bool = False,
    waiting: Sequence[int] | None = None, room_bytes: Sequence[float] | None = None,
) -> OrderResult:  # fmt: skip
    """List scheduling: a stage that is free runs what is ready, backwards before forwards (`forward_first`: the other
    way), earlier micro-batches first. Weight gradients run when nothing else is ready, or when those of more than
    `waiting` micro-batches wait. A stage starts its next micro-batch while fewer than `limits[stage]` are in flight.
    Where they would hold more than `room_bytes`, only the oldest unfinished one goes on: so the schedule ends.
    """
    run, listed = BlockRuns(blocks, pieces, stages), _Listed(blocks, limits, forward_first, waiting, room_bytes)
    of_stage = [[name for name, block in blocks.items() if block.stage == stage] for stage in range(stages)]
    listed.in_flight = [HeldBytes(blocks, dict.fromkeys(range(pieces), len(names))) for names in of_stage]
    listed.block_counts = [sum(not blocks[name].is_filler for name in names) for names in of_stage]
    ready: list[list[Task]] = [[] for _ in range(stages)]
    for task in run.ready_at:
        ready[blocks[task[0]].stage].append(task)
    events: list[tuple[float, int]] = [(0.0, stage) for stage in range(stages)]
    heapq.heapify(events)
    while events:
        now, stage = heapq.heappop(events)
        if run.free[stage] > now:
            continue
        task = listed.next(stage, [queued for queued in ready[stage] if run.ready_at[queued] <= now])
        if task is None:
            later = [run.ready_at[t] for t in ready[stage] if run.ready_at[t] > now]
            if later:
                heapq.heappush(events, (min(later), stage))
            continue
        ready[stage].remove(task)
        for other in run.run(task, now):
            at = blocks[other[0]].stage
            ready[at].append(other)
            heapq.heappush(events, (max(run.ready_at[other], run.free[at]), at))
        heapq.heappush(events, (run.free[stage], stage))
    if len(run.spans) < len(blocks) * pieces:
        raise GraphError("list scheduling ends before all blocks have run", "limits of at least one piece")
    return run.result()


@dataclass
class _Listed:
    """State of a list schedule, with the options of `list_schedule`. Per stage: `block_counts`, blocks of a micro-batch
    without fillers; `flying`, blocks left of each micro-batch in flight; `begun`, the number of micro-batches begun.
    """

    blocks: Mapping[str, BlockCost]
    limits: Sequence[int]
    forward_first: bool
    waiting: Sequence[int] | None
    room_bytes: Sequence[float] | None
    in_flight: list[HeldBytes] = field(init=False)
    block_counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.flying: list[dict[int, int]] = [{} for _ in self.limits]
        self.begun = [0 for _ in self.limits]

    def next(self, stage: int, ready: Sequence[Task]) -> Task | None:
        """What a stage runs now, of what is ready; None if it waits."""
        flying, begun = self.flying[stage], self.begun[stage]
        admitted = flying.keys() | ({begun} if len(flying) < self.limits[stage] else set[int]())
        first = min(flying, default=begun)
        able = [
            task for task in ready
            if self.blocks[task[0]].is_filler or (task[1] in admitted and (task[1] == first or self._fits(stage, task)))
        ]  # fmt: skip
        if not able:
            return None
        late = {piece for name, piece in able if self.blocks[name].is_filler}
        overdue = self.waiting is not None and len(late) > self.waiting[stage]

        def rank(task: Task) -> tuple[bool, bool, int, int]:
            block = self.blocks[task[0]]
            return block.is_filler != overdue, block.is_backward == self.forward_first, task[1], -block.level

        task = min(able, key=rank)
        self.in_flight[stage].run(task)
        if not self.blocks[task[0]].is_filler:
            if task[1] not in flying:
                flying[task[1]] = self.block_counts[stage]
                self.begun[stage] += 1
            flying[task[1]] -= 1
            if not flying[task[1]]:
                del flying[task[1]]
        return task

    def _fits(self, stage: int, task: Task) -> bool:
        in_flight = self.in_flight[stage]
        return self.room_bytes is None or in_flight.held_bytes + in_flight.adds(task) <= self.room_bytes[stage]
