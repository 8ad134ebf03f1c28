"""How many bytes collectives carry, by what the hardware takes to start one and to send one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ..graph.graph import BucketSizes, LocalGraph
from ..hardware.hardware import Hardware
from ..hardware.work import Work
from ..mesh import Mesh
from .base import Pass
from .bucket import Carried, carried_by

_PARTS = (1, 8)
_IN_FLIGHT = 3  # buckets
_LEAST_BUCKET = 256 << 10
_SAMPLE = 1 << 20
_MOST_SUMMED = 64 << 20


@dataclass(frozen=True)
class SizeBuckets:
    """Decides how large buckets are and how much is in flight.

    Args:
        hardware: how fast a rank computes, and its links.
        bucket_bytes: what a collective carries at least, where there is enough; by the link if None.
        first_bucket_bytes: the same for the first of each kind, which sets the link going; at most `bucket_bytes`.
        in_flight_bytes: gathered parameters that may wait for their use, and gradients that may be in flight; three
            buckets each if None, and two tensors each however large.
        whole: what the step carries; counted in the graph if None: right unless that is part of a step.

    Passes that bucket and order collectives follow it. A graph that has sizes keeps them.
    """

    hardware: Hardware = field(default_factory=Hardware.default)
    bucket_bytes: int | None = None
    first_bucket_bytes: int = 1 << 20
    in_flight_bytes: int | None = None
    whole: Carried | None = None

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """The same graph with sizes."""
        if local.sizes is not None:
            return local
        size = self._bucket_bytes(local)
        axes = local.mesh
        summed = summed_bytes(self.hardware, axes, size) if self.bucket_bytes is None else size
        flying = (_IN_FLIGHT * size, 2) if self.in_flight_bytes is None else (self.in_flight_bytes, 1)
        alone = min(alone_bytes(self.hardware, axes), size)
        return replace(local, sizes=BucketSizes(size, min(self.first_bucket_bytes, size), summed, alone, *flying))

    def _bucket_bytes(self, local: LocalGraph) -> int:
        """As given, or as the link and what it has to carry want it; but where parameters are gathered again to hold
        less, the buckets that are in flight hold a quarter of them at most.
        """
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        carried, most = self.whole or carried_by(local), self.hardware.bucket_bytes
        if carried.again_bytes:
            most = min(max(carried.again_bytes // (4 * _IN_FLIGHT), _LEAST_BUCKET), most)
        return even_bytes(self.hardware, local.mesh, carried.reduced_bytes, most)


def resized(passes: Sequence[Pass], **fields: object) -> tuple[Pass, ...]:
    """`passes` with other fields of `SizeBuckets`."""
    return tuple(replace(one, **fields) if isinstance(one, SizeBuckets) else one for one in passes)


def tighter(passes: Sequence[Pass]) -> list[tuple[Pass, ...]]:
    """`passes`, then the same with smaller buckets and fewer in flight: they hold less at once, and wait longer.

    Sizes that were given stay as they are.
    """
    found = [tuple(passes)]
    given = next((one for one in passes if isinstance(one, SizeBuckets)), None)
    if given is None:
        return found
    most = given.bucket_bytes or given.hardware.bucket_bytes
    for part in _PARTS:
        size = max(most // part, min(most, _LEAST_BUCKET)) if given.bucket_bytes is None else most
        flying = size if given.in_flight_bytes is None else given.in_flight_bytes
        smaller = resized(passes, bucket_bytes=size, in_flight_bytes=flying)
        if smaller not in found:
            found.append(smaller)
    return found


def alone_bytes(hardware: Hardware, mesh: Mesh) -> int:
    """From how many bytes on one more collective takes less than copying them into a bucket or out of it does."""
    axes = [axis.name for axis in mesh.axes if axis.size > 1]
    starts = [_start_us(hardware, kind, mesh, axis) for axis in axes for kind in ("all_gather", "reduce_scatter")]
    copy_us = hardware.work_us(Work(2 * _SAMPLE, bucketed=True)) - hardware.launch_us
    return int(max(starts, default=0.0) * _SAMPLE / max(copy_us, 1e-9))


def even_bytes(hardware: Hardware, mesh: Mesh, reduced_bytes: int, most_bytes: int) -> int:
    """What collectives should carry that reduce so much in all: `most_bytes`, or half as often as that takes less.

    Nothing hides the last one of a step, and all have to be started: n of them, of which computing could hide T
    microseconds in all, and each of which takes s to start, cost n s + T / n.
    """
    axes = [axis.name for axis in mesh.axes if axis.size > 1]

    def cost_us(size: int) -> float:
        started = reduced_bytes / size
        costs = (
            started * _start_us(hardware, "all_reduce", mesh, a) + _hidden_us(hardware, size, mesh, a) for a in axes
        )
        return max(costs, default=0.0)

    best = most_bytes
    while reduced_bytes and best // 2 >= _LEAST_BUCKET and cost_us(best // 2) < cost_us(best):
        best //= 2
    return best


def summed_bytes(hardware: Hardware, mesh: Mesh, bucket_bytes: int) -> int:
    """What an all-reduce should carry where others carry `bucket_bytes`: doubled as often as computing beside it hides
    half as much of it. What processors send while they should compute is not hidden at all, and few send it cheapest.
    """

    def hidden(axis: str) -> float:
        whole_us = hardware.collective_us("all_reduce", bucket_bytes, mesh, axis)
        return _hidden_us(hardware, bucket_bytes, mesh, axis) / max(whole_us, 1e-9)

    share = min((hidden(axis.name) for axis in mesh.axes if axis.size > 1), default=1.0)
    while share <= 0.5 and 2 * bucket_bytes <= _MOST_SUMMED:
        bucket_bytes, share = 2 * bucket_bytes, 2 * share
    return bucket_bytes


def _hidden_us(hardware: Hardware, size_bytes: int, mesh: Mesh, axis: str) -> float:
    """How much of an all-reduce computing beside it can hide."""
    carried = "all_reduce", size_bytes, mesh, axis
    return max(hardware.collective_us(*carried) - hardware.compute_steal_us(*carried), 0.0)


def _start_us(hardware: Hardware, kind: str, mesh: Mesh, axis: str) -> float:
    """What a collective takes of the wire, or of the processors where that is more, however few its bytes."""
    computing = hardware.compute_steal_us(kind, 0, mesh, axis) + sum(hardware.host_us(kind, 0, mesh, axis))
    return max(hardware.collective_us(kind, 0, mesh, axis), computing)
