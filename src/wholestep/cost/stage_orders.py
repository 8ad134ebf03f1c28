"""Orders of blocks of a pipeline, by simulation: named ones, and list schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from math import ceil

from ..errors import GraphError, PlanError, shown
from ..tuning import TUNING
from ..typed_values import is_a
from .block_runs import BlockCost, OrderResult, Orders, Task, on_shared_cores, peaks, simulate_orders
from .list_schedule import list_schedule


def gpipe(blocks: Mapping[str, BlockCost], pieces: int, stages: int) -> OrderResult:
    """All forwards of a stage, then all backwards: blocks by level, each for all pieces."""
    names = sorted(blocks, key=lambda name: (blocks[name].level, blocks[name].is_filler))
    orders = tuple(
        tuple((n, piece) for n in names if blocks[n].stage == stage for piece in range(pieces))
        for stage in range(stages)
    )
    return simulate_orders(blocks, pieces, orders)


def one_forward_one_backward(blocks: Mapping[str, BlockCost], pieces: int, stages: int) -> OrderResult:
    """A backward as soon as there is one, with as many pieces in flight as keep all stages busy."""
    return list_schedule(blocks, pieces, stages, enough_in_flight(blocks, stages))


def enough_in_flight(blocks: Mapping[str, BlockCost], stages: int) -> list[int]:
    """Pieces in flight on each stage that keep it busy: the blocks on the way of a piece from the first block of the
    stage to the last one, over those that are the stage's. In a chain, stage `s` of `n` has at least `n - s`; in a V
    all stages have about `n`.
    """
    levels = [[b.level for b in blocks.values() if b.stage == stage and not b.is_filler] for stage in range(stages)]
    top = max((level for here in levels for level in here), default=0)  # at half of it a block turns, and counts twice
    limits: list[int] = []
    for stage, here in enumerate(levels):
        on_way = max(here, default=0) - min(here, default=0) + 2
        limits.append(max(stages - stage, ceil(on_way / max(1, len(here) + sum(2 * level == top for level in here)))))
    return limits


def interleaved(blocks: Mapping[str, BlockCost], pieces: int, stages: int) -> OrderResult:
    """The order of Megatron-LM for several chunks on each stage: pieces in groups of as many as there are stages, a
    group goes through all chunks of a stage. Where chunks are not alike on all stages, or pieces do not divide into
    groups: list scheduling with as many pieces in flight.
    """
    chunks, orders = _chunks(blocks, stages), list[tuple[Task, ...]]()
    count = max(1, round(len(blocks) / (2 * stages)))
    if chunks is None or pieces % stages:
        return list_schedule(blocks, pieces, stages, [stages * count] * stages)
    for stage, (forward, backward) in enumerate(chunks):
        ahead = min((stages - stage - 1) * 2 + (len(forward) - 1) * stages, pieces * len(forward))
        groups = [range(first, first + stages) for first in range(0, pieces, stages)]
        ups = [(name, piece) for group in groups for name in forward for piece in group]
        downs = [(name, piece) for group in groups for name in backward for piece in group]
        tasks = ups[:ahead]
        for up, down in zip(ups[ahead:], downs, strict=False):
            tasks += [up, down]
        tasks += downs[len(ups) - ahead :]
        orders.append(tuple(dict.fromkeys(tasks)))  # the last chunk is forward and backward at once
    order = _if_it_ends(blocks, pieces, orders)
    return order or list_schedule(blocks, pieces, stages, [stages * count] * stages)


def _if_it_ends(blocks: Mapping[str, BlockCost], pieces: int, orders: Sequence[tuple[Task, ...]]) -> OrderResult | None:
    """An order that was written for chains of stages. None where blocks wait for each other otherwise, as those that
    several stages read.
    """
    try:
        return simulate_orders(blocks, pieces, tuple(orders))
    except GraphError:
        return None


def _chunks(blocks: Mapping[str, BlockCost], stages: int) -> list[tuple[list[str], list[str]]] | None:
    """For each stage its chunks in the order of the forward and in that of the backward; None if they are not alike."""
    chunks: list[tuple[list[str], list[str]]] = []
    turn = (max(block.level for block in blocks.values()) + 1) // 2
    for stage in range(stages):
        names = sorted((n for n, b in blocks.items() if b.stage == stage), key=lambda name: blocks[name].level)
        forward = [name for name in names if blocks[name].level <= turn]
        backward = [name for name in names if blocks[name].level >= turn]
        chunks.append((forward, backward))
    alike = {len(half) for pair in chunks for half in pair}
    return chunks if len(alike) == 1 else None


def zero_bubble(blocks: Mapping[str, BlockCost], pieces: int, stages: int) -> OrderResult:
    """`1f1b` in which gradients of weights, as fillers, wait: those of stage `s` until `s` pieces later, so that no
    stage holds more than the first (ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism"). Where stages have other
    blocks than one of each kind: list scheduling.
    """
    limits = enough_in_flight(blocks, stages)
    listed = list_schedule(blocks, pieces, stages, limits, waiting=range(stages))
    orders: list[tuple[Task, ...]] = []
    for stage in range(stages):
        names = sorted((n for n, b in blocks.items() if b.stage == stage), key=lambda name: blocks[name].level)
        up = [name for name in names if not blocks[name].is_backward]
        down = [name for name in names if blocks[name].is_backward and not blocks[name].is_filler]
        late = [name for name in names if blocks[name].is_filler]
        if len(down) > 1 or len(up) > 1 or len(late) > 1:
            return listed
        ahead = min(stages - 1 - stage, pieces)
        tasks = [(name, piece) for piece in range(ahead) for name in up]
        for piece in range(pieces):
            tasks += [(name, piece + ahead) for name in up if piece + ahead < pieces]
            tasks += [(name, piece) for name in down]
            tasks += [(name, piece - stage) for name in late if piece >= stage]
        tasks += [(name, piece) for piece in range(max(0, pieces - stage), pieces) for name in late]
        orders.append(tuple(tasks))
    order = _if_it_ends(blocks, pieces, orders)
    return listed if order is None else min(order, listed, key=lambda result: result.us)


NAMED: dict[str, Callable[[Mapping[str, BlockCost], int, int], OrderResult]] = {
    "gpipe": gpipe, "1f1b": one_forward_one_backward, "interleaved": interleaved, "zero_bubble": zero_bubble,
}  # fmt: skip
"""Orders by name. Blocks of `zero_bubble` have fillers."""
APART = {"auto", "zero_bubble"}
"""Orders in which gradients of weights may be blocks of their own."""
_OWN = frozenset(NAMED)
StageOrder = Callable[[Mapping[str, BlockCost], int, int], Sequence[Sequence[Task]]]
"""From the blocks by name, the number of micro-batches and that of stages to the tasks of each stage, in order."""


def stage_order(name: str, fillers: bool = False) -> Callable[[StageOrder], StageOrder]:
    """Register an order of the blocks of stages under a name, for `Pipeline(schedule=name)`; plans store the name.

    Args:
        name: what `schedule=` says.
        fillers: gradients of weights are blocks of their own (`is_filler`), as in `zero_bubble`.

    Raises:
        PlanError: the name is one of wholestep's own. When a plan is made: a stage does not run each of its blocks once
            for each micro-batch, or stages would wait for each other.

    Example:
        >>> @ws.stage_order("forwards first")
        ... def forwards_first(blocks, micro_batches, stages):
        ...     by_level = sorted(blocks, key=lambda name: blocks[name].level)
        ...     mine = [[name for name in by_level if blocks[name].stage == stage] for stage in range(stages)]
        ...     return [[(name, i) for name in names for i in range(micro_batches)] for names in mine]
        >>> ws.Pipeline(micro_batches=8, schedule="forwards first")
    """
    if name in _OWN or name == "auto":
        raise PlanError(f"stage_order({name!r})", f"another name than {', '.join((*_OWN, 'auto'))}", "rename it")

    def register(order: StageOrder) -> StageOrder:
        def simulated(blocks: Mapping[str, BlockCost], pieces: int, stages: int) -> OrderResult:
            stage_tasks, next_step = order(blocks, pieces, stages), f"correct {order.__qualname__}"
            if not is_a(stage_tasks, Sequence[Sequence[Task]]):
                raise PlanError(f"order {name!r} is {shown(stage_tasks)}", "the tasks of each stage", next_step)
            tasks, every = tuple(map(tuple, stage_tasks)), [*product(blocks, range(pieces))]
            all_tasks = [[task for task in every if blocks[task[0]].stage == stage] for stage in range(stages)]
            for at, (ordered, needed) in enumerate(zip_longest(tasks, all_tasks, fillvalue=())):
                if sorted(ordered) != sorted(needed):
                    other = next(iter(sorted({*ordered} ^ {*needed}) or ordered))
                    problem = f"order {name!r}: stage {at} has {len(ordered)} tasks, {other} missing or too often"
                    raise PlanError(problem, f"each of its {len(needed)} tasks once", next_step)
            try:
                return simulate_orders(blocks, pieces, tasks)
            except GraphError as error:
                raise PlanError(f"order {name!r}: {error.found}", error.needed, next_step) from error

        NAMED[name] = simulated
        APART.update([name] if fillers else [])
        return order

    return register


@dataclass(frozen=True)
class TriedOrders:
    """Simulated orders by name. `enough_bytes`: of each stage, what as many pieces hold as keep it busy: in a chain
    what `1f1b` holds.
    """

    orders: Mapping[str, OrderResult]
    enough_bytes: tuple[int, ...]

    def __getitem__(self, name: str) -> OrderResult:
        """The order of this name."""
        return self.orders[name]

    @property
    def us(self) -> dict[str, float]:
        """The microseconds of each order."""
        return {name: order.us for name, order in self.orders.items()}

    def fitting(self, beside: Sequence[float] = ()) -> list[str]:
        """The names of orders with which the stage that holds most has little more of pieces in flight than
        `enough_bytes`; the fastest first. `beside`: bytes that each stage holds besides.
        """
        beside = beside or [0] * len(self.enough_bytes)
        most = {name: _most_bytes(order.peak_bytes, beside) for name, order in self.orders.items()}
        limit = _most_bytes(self.enough_bytes, beside) + TUNING.order_memory_share * max(self.enough_bytes)
        fits = [name for name in self.orders if most[name] <= limit]
        return sorted(fits, key=lambda name: (self.orders[name].us, most[name]))


def _most_bytes(peak_bytes: Sequence[int], beside: Sequence[float]) -> float:
    return max(map(sum, zip(peak_bytes, beside, strict=True)), default=0)


def simulated_orders(
    full: Mapping[str, BlockCost], cut: Mapping[str, BlockCost], pieces: int, stages: int, crowd: float = 1.0
) -> TriedOrders:
    """All orders that are tried. `cut`: the blocks with fillers apart; `crowd`: as in `simulate_orders`."""
    orders = {
        "1f1b": one_forward_one_backward(full, pieces, stages), "gpipe": gpipe(full, pieces, stages),
        "interleaved": interleaved(full, pieces, stages), "zero_bubble": zero_bubble(cut, pieces, stages),
    }  # fmt: skip
    enough = _enough_bytes(cut, pieces, orders)
    rooms = {"that of the fullest stage": [max(enough)] * stages, "what keeps each stage busy": enough}
    for wide in sorted({stages, 2 * stages - 1, pieces}):
        for name, blocks in (("whole", full), ("fillers", cut)):
            for slope in (0, 1, 2):
                limits = [max(1, min(wide, pieces) - slope * stage) for stage in range(stages)]
                label = f"list of {name}, {wide} in flight, {slope} fewer a stage"
                orders[label] = list_schedule(blocks, pieces, stages, limits)
        limits = [max(1, min(wide, pieces) - stage) for stage in range(stages)]
        label = f"list of fillers, {wide} in flight or waiting"
        orders[label] = list_schedule(cut, pieces, stages, limits, waiting=range(stages))
        for (name, room), first in product(rooms.items(), (False, True)):
            label = f"list of fillers in memory, {name}, {wide} in flight{', forwards first' if first else ''}"
            most = [(1 + TUNING.order_memory_share) * size for size in room]
            orders[label] = list_schedule(cut, pieces, stages, [wide] * stages, first, room_bytes=most)
    return TriedOrders(
        {n: on_shared_cores(blocks_of(order.orders, full, cut), pieces, order, crowd) for n, order in orders.items()},
        enough,
    )


def _enough_bytes(cut: Mapping[str, BlockCost], pieces: int, orders: Mapping[str, OrderResult]) -> tuple[int, ...]:
    """What as many pieces hold as keep each stage busy, until gradients of their weights are done; no less than `1f1b`
    does.
    """
    base = orders["1f1b"].peak_bytes
    first = tuple(tuple(task for task in tasks if task[1] == 0) for tasks in orders["zero_bubble"].orders)
    most, between = (peaks(costs, first) for costs in (cut, {n: replace(b, work_bytes=0) for n, b in cut.items()}))
    counts = [min(count, pieces) for count in enough_in_flight(cut, len(first))]
    return tuple(max(base_bytes, most[at] + (counts[at] - 1) * between[at]) for at, base_bytes in enumerate(base))


def blocks_of(orders: Orders, full: Mapping[str, BlockCost], cut: Mapping[str, BlockCost]) -> Mapping[str, BlockCost]:
    """The blocks that orders run: those of `cut`, with fillers apart, if they run a filler."""
    fillers = cut.keys() - full.keys()
    return cut if any(name in fillers for tasks in orders for name, _ in tasks) else full
