"""The passes that make communication cheap and hide it, as one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..cost.machine import Machine
from ..cost.speeds import Speeds, Work
from ..graph.graph import LocalGraph
from ..mesh import Mesh
from .base import InPlace, Pass, Watch, run_passes
from .bounded_reductions import BoundedReductions
from .bucket import Bucket, Carried, carried_by
from .late_waits import LateWaits
from .next_step import AcrossSteps, move_to_next_step
from .overlap import Overlap
from .split_optimizer import SplitOptimizer

_PARTS = (1, 8)
_IN_FLIGHT = 3  # buckets
_LEAST_BUCKET = 256 << 10
_SAMPLE = 1 << 20
_MOST_SUMMED = 64 << 20


@dataclass(frozen=True)
class Schedule(InPlace):
    """Buckets sized by the link, an update and a gather for each, all in the order that a simulation finds best.

    Args:
        machine: how fast a rank computes, and its link: a `Machine`, or a `Topology`.
        bucket_bytes: what a collective holds at least, where there is enough; by the link if None.
        first_bucket_bytes: the same for the first of each kind, which sets the wire going; at most `bucket_bytes`.
        in_flight_bytes: gathered parameters that may wait for their use, and gradients that may be on their way to be
            scattered; three buckets each if None, and two tensors each however large.
        across_steps: reductions that are on their way when a step ends are waited for in the next call, where what is
            updated with them is read first. Until then, or until `step.flush()`, those parameters are a step behind.
        whole: what the step carries; counted in the graph if None: right unless that is part of a step.
    """

    machine: Speeds = field(default_factory=Machine)
    bucket_bytes: int | None = None
    first_bucket_bytes: int = 1 << 20
    in_flight_bytes: int | None = None
    across_steps: bool = False
    whole: Carried | None = None

    def __call__(self, local: LocalGraph, watch: Watch | None = None) -> LocalGraph:
        """The same step in another order, with fewer and larger collectives; nothing is left to the next call.

        `watch` is told of the passes that make it up.
        """
        return run_passes(local, self._passes(local), watch)

    def change(self, local: LocalGraph) -> LocalGraph:
        """The same to `local` itself."""
        return run_passes(local, self._passes(local), owned=True)

    def _passes(self, local: LocalGraph) -> list[Pass]:
        size = self._bucket_bytes(local)
        in_flight = self._in_flight(size)
        return [*self._merging(size, local.mesh), Overlap(self.machine, *in_flight), BoundedReductions(*in_flight)]

    def across(self, local: LocalGraph, watch: Watch | None = None) -> AcrossSteps | None:
        """The same step in programs that leave their last part to the next call; None where nothing can be left."""
        size = self._bucket_bytes(local)
        made = move_to_next_step(run_passes(local, self._merging(size, local.mesh), watch))
        overlap = Overlap(self.machine, *self._in_flight(size))
        return made.with_steady(run_passes(made.steady, [overlap], watch)) if made else None

    def _merging(self, bucket_bytes: int, mesh: Mesh) -> list[Pass]:
        first = min(self.first_bucket_bytes, bucket_bytes)
        alone = min(alone_bytes(self.machine, mesh), bucket_bytes)
        summed = summed_bytes(self.machine, mesh, bucket_bytes) if self.bucket_bytes is None else bucket_bytes
        sums = [Bucket(bucket_bytes, first, ("reduce_scatter",), alone), Bucket(summed, first, ("all_reduce",))]
        gathers = Bucket(bucket_bytes, first, ("all_gather",), alone)
        return [LateWaits(), *sums, SplitOptimizer(), LateWaits(), gathers]

    def _bucket_bytes(self, local: LocalGraph) -> int:
        """As given, or as the link and what it has to carry want it; but where parameters are gathered again to hold
        less, the buckets that are in flight hold a quarter of them at most.
        """
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        carried, most = self.whole or carried_by(local), self.machine.bucket_bytes
        if carried.again_bytes:
            most = min(max(carried.again_bytes // (4 * _IN_FLIGHT), _LEAST_BUCKET), most)
        return even_bytes(self.machine, local.mesh, carried.reduced_bytes, most)

    def _in_flight(self, bucket_bytes: int) -> tuple[int, int]:
        """Bytes, and how many at least: on a link that is the bottleneck the next one has to be there."""
        return (_IN_FLIGHT * bucket_bytes, 2) if self.in_flight_bytes is None else (self.in_flight_bytes, 1)


def alone_bytes(machine: Speeds, mesh: Mesh) -> int:
    """From how many bytes on one more collective takes less than copying them into a bucket or out of it does."""
    axes = [axis.name for axis in mesh.axes if axis.size > 1]
    starts = [_start_us(machine, kind, mesh, axis) for axis in axes for kind in ("all_gather", "reduce_scatter")]
    copy_us = machine.work_us(Work(2 * _SAMPLE, carried=True)) - machine.launch_us
    return int(max(starts, default=0.0) * _SAMPLE / max(copy_us, 1e-9))


def even_bytes(machine: Speeds, mesh: Mesh, reduced_bytes: int, most_bytes: int) -> int:
    """What collectives should carry that reduce so much in all: `most_bytes`, or half as often as that takes less.

    Nothing hides the last one of a step, and all have to be started: n of them, of which computing could hide T
    microseconds in all, and each of which takes s to start, cost n s + T / n.
    """
    axes = [axis.name for axis in mesh.axes if axis.size > 1]

    def cost_us(size: int) -> float:
        started = reduced_bytes / size
        costs = (started * _start_us(machine, "all_reduce", mesh, a) + _hidden_us(machine, size, mesh, a) for a in axes)
        return max(costs, default=0.0)

    best = most_bytes
    while reduced_bytes and best // 2 >= _LEAST_BUCKET and cost_us(best // 2) < cost_us(best):
        best //= 2
    return best


def summed_bytes(machine: Speeds, mesh: Mesh, bucket_bytes: int) -> int:
    """What an all-reduce should carry where others carry `bucket_bytes`: doubled as often as computing beside it hides
    half as much of it. What processors send while they should compute is not hidden at all, and few send it cheapest.
    """

    def hidden(axis: str) -> float:
        whole_us = machine.collective_us("all_reduce", bucket_bytes, mesh, axis)
        return _hidden_us(machine, bucket_bytes, mesh, axis) / max(whole_us, 1e-9)

    share = min((hidden(axis.name) for axis in mesh.axes if axis.size > 1), default=1.0)
    while share <= 0.5 and 2 * bucket_bytes <= _MOST_SUMMED:
        bucket_bytes, share = 2 * bucket_bytes, 2 * share
    return bucket_bytes


def _hidden_us(machine: Speeds, size_bytes: int, mesh: Mesh, axis: str) -> float:
    """How much of an all-reduce computing beside it can hide."""
    carried = "all_reduce", size_bytes, mesh, axis
    return max(machine.collective_us(*carried) - machine.taken_us(*carried), 0.0)


def _start_us(machine: Speeds, kind: str, mesh: Mesh, axis: str) -> float:
    """What a collective takes of the wire, or of the processors where that is more, however few its bytes."""
    computing = machine.taken_us(kind, 0, mesh, axis) + sum(machine.handled_us(kind, 0, mesh, axis))
    return max(machine.collective_us(kind, 0, mesh, axis), computing)


def schedules(given: Schedule | None) -> list[Schedule | None]:
    """`given`, then those that hold less at once."""
    found: list[Schedule | None] = [given]
    if given is None:
        return found
    most = given.bucket_bytes or given.machine.bucket_bytes
    for part in _PARTS:
        size = max(most // part, min(most, _LEAST_BUCKET)) if given.bucket_bytes is None else most
        flying = size if given.in_flight_bytes is None else given.in_flight_bytes
        smaller = replace(given, bucket_bytes=size, in_flight_bytes=flying)
        if smaller not in found:
            found.append(smaller)
    return found
