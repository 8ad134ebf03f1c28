"""Other schedules of a program to try beside the one that was chosen for the hardware: the same bits, other buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..cost.simulation import simulate
from ..graph.graph import BucketSizes, LocalGraph
from ..graph.loop import with_bodies
from ..graph.nodes import is_collective, node_at
from ..hardware.hardware import Hardware
from ..partition.stage_program import orders_in, stage_program
from ..tuning import TUNING
from .base import Pass, run_passes
from .bucket import REDUCE, join_rows
from .context import Context
from .order_collectives import CallOrder, collectives_of
from .order_stages import in_order


@dataclass(frozen=True)
class TriedSchedule:
    """Sizes of buckets, the order of collectives that they lead to, and the simulated time of a step. Of a pipeline:
    the order of blocks by name, and that of the collectives of each stage.
    """

    sizes: BucketSizes | None
    orders: tuple[tuple[str, ...], ...]
    predicted_us: float
    blocks: str = ""

    @property
    def order(self) -> tuple[str, ...]:
        """The order of collectives, of the first stage."""
        return self.orders[0]


@dataclass
class _Seen:
    """What a program is like once its collectives have their order."""

    order: tuple[str, ...] = ()
    sums: frozenset[tuple[str, ...]] = frozenset()

    def __call__(self, local: LocalGraph) -> Sequence[str]:
        self.order, self.sums = tuple(collectives_of(local)), sums_of(local)
        return self.order


def scheduled_with(
    local: LocalGraph, passes: Sequence[Pass], tried: TriedSchedule, calls: CallOrder
) -> LocalGraph:  # fmt: skip
    """`local`, before passes, with these sizes and this order; that of a stage has the order of blocks already."""
    context = Context(order=lambda program: tried.orders[program.stage or 0], calls=calls)
    return run_passes(replace(local, sizes=tried.sizes or local.sizes), passes, context=context)


def orders_to_try(
    local: LocalGraph, passes: Sequence[Pass], priced_on: Hardware, step_us: Callable[[LocalGraph], float]
) -> list[TriedSchedule]:
    """The order of blocks that the program of all stages has, then the fastest of the others by simulation that compute
    the same bits in about as much memory. Left out is what adds more than two ranks in other sums. `priced_on`: what
    the plan ordered blocks for.
    """
    tried, count = list[TriedSchedule](), local.mesh.axis_size(local.stage_axis)
    first: list[frozenset[tuple[str, ...]]] = []
    for name in blocks_to_try(local):
        if len(tried) == TUNING.tried_schedules:
            break
        program, each = in_order(local, name, priced_on, []), [_Seen() for _ in range(count)]
        for stage, seen in enumerate(each):
            run_passes(stage_program(program, stage), passes, context=Context(order=seen))
        first = first or [seen.sums for seen in each]
        if [seen.sums for seen in each] == first:
            tried.append(TriedSchedule(None, tuple(seen.order for seen in each), step_us(program), name))
    return tried


def blocks_to_try(local: LocalGraph) -> list[str]:
    """Names of orders of blocks in which all loops of the program of all stages compute the same bits, their own first;
    none where they are not alike.
    """
    loops = orders_in(local)
    if len({loop.order for loop in loops}) != 1:
        return []
    return [loops[0].order, *(name for name in loops[0].variants if all(name in loop.variants for loop in loops))]


def schedules_to_try(
    local: LocalGraph, passes: Sequence[Pass], hardware: Hardware, peak_bytes: Callable[[LocalGraph], int]
) -> list[TriedSchedule]:
    """The schedule that `passes` lead to, then the best by simulation with fewer and with more collectives.

    Neighbours measure alike, and a disturbed measurement of the hardware misleads the simulation to one side: so the
    sizes differ by factors, and both sides are tried where they exist, two of one side otherwise. Left out is what
    holds more memory, or adds more than two ranks in other sums: their bits depend on what else is in a sum.

    Args:
        local: the program before `passes`.
        passes: as `default_passes` lists them.
        hardware: to simulate on.
        peak_bytes: what a program holds at most.
    """
    base = _tried(local, passes, hardware)
    if base is None:
        return []
    first, sums, program = base
    assert first.sizes is not None, "there are buckets"
    most, orders = peak_bytes(program) * (1 + TUNING.tried_memory_share), {first.order}
    fewer_calls, more_calls = list[TriedSchedule](), list[TriedSchedule]()
    for factor in TUNING.tried_factors:
        attempt = _tried(replace(local, sizes=scaled(first.sizes, factor)), passes, hardware)
        assert attempt is not None, "as the first"
        tried, tried_sums, program = attempt
        if tried.order not in orders and tried_sums == sums and peak_bytes(program) <= most:
            (fewer_calls if len(tried.order) < len(first.order) else more_calls).append(tried)
        orders.add(tried.order)
    best = [sorted(side, key=lambda schedule: schedule.predicted_us) for side in (fewer_calls, more_calls)]
    each = [schedule for side in best for schedule in side[:1]]
    rest = sorted((schedule for side in best for schedule in side[1:]), key=lambda schedule: schedule.predicted_us)
    return [first, *sorted([*each, *rest][: TUNING.tried_schedules - 1], key=lambda schedule: schedule.predicted_us)]


def _tried(
    local: LocalGraph, passes: Sequence[Pass], hardware: Hardware
) -> tuple[TriedSchedule, frozenset[tuple[str, ...]], LocalGraph] | None:
    """A schedule, its sums and its program; None without buckets."""
    seen = _Seen()
    program = run_passes(local, passes, context=Context(order=seen))
    if program.sizes is None or not seen.order:
        return None
    return TriedSchedule(program.sizes, (seen.order,), simulate(program, hardware).step_us), seen.sums, program


def scaled(sizes: BucketSizes, factor: float) -> BucketSizes:
    """Sizes times `factor`, down to the smallest that are chosen for any hardware. Smaller buckets leave bounds on what
    is in flight as they are.
    """

    def times(size: int) -> int:
        return max(int(size * factor), min(size, TUNING.smallest_bucket_bytes))

    bucket, up = times(sizes.bucket_bytes), max(factor, 1.0)
    return replace(
        sizes, bucket_bytes=bucket, summed_bytes=times(sizes.summed_bytes),
        alone_bytes=min(int(sizes.alone_bytes * up), bucket), in_flight_bytes=int(sizes.in_flight_bytes * up),
    )  # fmt: skip


def sums_of(local: LocalGraph) -> frozenset[tuple[str, ...]]:
    """What each all-reduce over more than two ranks adds up together, in order."""
    sums = list[tuple[str, ...]]()
    for node, _ in with_bodies(local.graph):
        if is_collective(node) and node.target is REDUCE and local.mesh.axis_size(str(node.args[-1])) > 2:
            operand = node_at(node, 0)
            joined = operand.target is join_rows
            sums.append(tuple(piece.name for piece in operand.all_input_nodes) if joined else (operand.name,))
    return frozenset(sums)
