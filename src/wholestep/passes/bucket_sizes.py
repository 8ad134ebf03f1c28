"""Chooses bucket sizes by the time that the hardware needs to start a collective and to send its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ..graph.graph import BucketSizes, LocalGraph, Role
from ..hardware.device import Device, Work
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..tuning import TUNING
from .base import Pass
from .bucket import CollectiveTraffic, collective_traffic

_SAMPLE = 1 << 20  # bytes: a rate is taken from the time of a copy of as many


@dataclass(frozen=True)
class SizeBuckets:
    """Decides how large buckets are and how much is in flight; the arguments are those of `Schedule`.

    `whole`: what the collectives of the whole step carry, where the graph is a part. A graph that has sizes keeps them.
    Collectives of GPUs are coalesced if the backend may: NCCL starts a group of them at once, gloo each by itself.
    """

    hardware: Hardware = field(default_factory=Hardware.default)
    bucket_bytes: int | None = None
    first_bucket_bytes: int = TUNING.first_bucket_bytes
    in_flight_bytes: int | None = None
    whole: CollectiveTraffic | None = None
    may_coalesce: bool = True

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """The same graph with sizes."""
        if local.sizes is not None:
            return local
        size = self._bucket_bytes(local)
        summed = summed_bytes(self.hardware, local.mesh, size) if self.bucket_bytes is None else size
        in_flight = (TUNING.buckets_in_flight * size, 2) if self.in_flight_bytes is None else (self.in_flight_bytes, 1)
        alone = min(alone_bytes(self.hardware, local.mesh), size)
        first, apart = min(self.first_bucket_bytes, size), self.may_coalesce and on_gpus(local, self.hardware)
        return replace(local, sizes=BucketSizes(size, first, summed, alone, *in_flight, apart))

    def _bucket_bytes(self, local: LocalGraph) -> int:
        """As given, or best for the link; where parameters are re-gathered to save memory, the buckets in flight hold
        at most a quarter of them.
        """
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        carried, most = self.whole or collective_traffic(local), self.hardware.bucket_bytes
        if carried.regathered_bytes:
            in_flight = int(carried.regathered_bytes * TUNING.gathered_in_flight_share)
            if self.may_coalesce and on_gpus(local, self.hardware):
                return min(
                    max(in_flight // TUNING.buckets_in_flight, TUNING.smallest_bucket_bytes), TUNING.coalesced_bytes
                )
            most = min(max(in_flight // TUNING.buckets_in_flight, TUNING.smallest_bucket_bytes), most)
        return even_bytes(self.hardware, local.mesh, carried.reduced_bytes, most)


def resized(passes: Sequence[Pass], **fields: object) -> tuple[Pass, ...]:
    """`passes` with other fields of `SizeBuckets`."""
    return tuple(replace(one, **fields) if isinstance(one, SizeBuckets) else one for one in passes)


def smaller_buckets(passes: Sequence[Pass]) -> list[tuple[Pass, ...]]:
    """`passes`, then variants with smaller buckets and fewer in flight; sizes that the user gave do not change."""
    found = [tuple(passes)]
    given = next((one for one in passes if isinstance(one, SizeBuckets)), None)
    if given is None:
        return found
    most = given.bucket_bytes or given.hardware.bucket_bytes
    for part in TUNING.bucket_parts:
        size = max(most // part, min(most, TUNING.smallest_bucket_bytes)) if given.bucket_bytes is None else most
        in_flight = size if given.in_flight_bytes is None else given.in_flight_bytes
        smaller = resized(passes, bucket_bytes=size, in_flight_bytes=in_flight)
        if smaller not in found:
            found.append(smaller)
    return found


def on_gpus(local: LocalGraph, hardware: Hardware) -> bool:
    """True where GPUs run the program: its parameters are there, or a data sheet has more processors than a core."""
    kinds = {given.meta.device.partition(":")[0] for given in local.inputs if given.role is Role.PARAM}
    return kinds == {"cuda"} or (isinstance(hardware.device, Device) and hardware.device.processors > 1)


def alone_bytes(hardware: Hardware, mesh: Mesh) -> int:
    """Size from which a collective of its own costs less than a copy into or out of a bucket."""
    axes = [axis.name for axis in mesh.axes if axis.size > 1]
    starts = [_start_us(hardware, kind, mesh, axis) for axis in axes for kind in ("all_gather", "reduce_scatter")]
    copy_us = hardware.work_us(Work(2 * _SAMPLE, bucketed=True)) - hardware.launch_us
    return int(max(starts, default=0.0) * _SAMPLE / max(copy_us, 1e-9))


def even_bytes(hardware: Hardware, mesh: Mesh, reduced_bytes: int, most_bytes: int) -> int:
    """Bucket size for a step that reduces `reduced_bytes` in all: `most_bytes`, halved while that lowers the cost.

    n buckets cost `n s + T / n`: s to start each, and the last of them, a part 1 / n of the time T that computing could
    hide, cannot overlap.
    """
    axes = [axis.name for axis in mesh.axes if axis.size > 1]

    def cost_us(size: int) -> float:
        def along(axis: str) -> float:
            starts_us = reduced_bytes / size * _start_us(hardware, "all_reduce", mesh, axis)
            return starts_us + _hidden_us(hardware, size, mesh, axis)

        return max(map(along, axes), default=0.0)

    best = most_bytes
    while reduced_bytes and best // 2 >= TUNING.smallest_bucket_bytes and cost_us(best // 2) < cost_us(best):
        best //= 2
    return best


def summed_bytes(hardware: Hardware, mesh: Mesh, bucket_bytes: int) -> int:
    """Bucket size of all-reduces: `bucket_bytes`, doubled as often as concurrent computing hides less than half of one.
    A link that needs the processors hides nothing, and is cheapest with few collectives.
    """

    def hidden(axis: str) -> float:
        whole_us = hardware.collective_us("all_reduce", bucket_bytes, mesh, axis)
        return _hidden_us(hardware, bucket_bytes, mesh, axis) / max(whole_us, 1e-9)

    share = min((hidden(axis.name) for axis in mesh.axes if axis.size > 1), default=1.0)
    while share <= TUNING.hidden_share and 2 * bucket_bytes <= TUNING.most_summed_bytes:
        bucket_bytes, share = 2 * bucket_bytes, 2 * share
    return bucket_bytes


def _hidden_us(hardware: Hardware, size_bytes: int, mesh: Mesh, axis: str) -> float:
    """The part of an all-reduce that concurrent computing can hide."""
    carried = "all_reduce", size_bytes, mesh, axis
    return max(hardware.collective_us(*carried) - hardware.compute_steal_us(*carried), 0.0)


def _start_us(hardware: Hardware, kind: str, mesh: Mesh, axis: str) -> float:
    """Time of an empty collective on the link, or on the processors if that is longer."""
    computing = hardware.compute_steal_us(kind, 0, mesh, axis) + sum(hardware.host_us(kind, 0, mesh, axis))
    return max(hardware.collective_us(kind, 0, mesh, axis), computing)
