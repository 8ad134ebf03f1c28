"""Chooses bucket sizes by the time that the hardware needs to start a collective and to send its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ..graph import meta
from ..graph.graph import BucketSizes, LocalGraph, Role
from ..graph.loop import with_bodies
from ..graph.nodes import is_collective, node_at
from ..graph.op_kinds import collective_kind
from ..hardware.device import Work
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..tuning import TUNING
from .base import InContext, Pass
from .bucket import collective_traffic
from .context import CollectiveTraffic, Context

_BUCKETED = ("all_reduce", "all_gather", "reduce_scatter")
_LITTLE = 1e-3  # of the bytes of the collectives that carry most
_SAMPLE = 1 << 20  # bytes: a rate is taken from the time of a copy of as many


@dataclass(frozen=True)
class SizeBuckets(InContext):
    """Decides how large buckets are and how much is in flight; the arguments are those of `Schedule`.

    `puts_off`: gradients of weights may wait to be computed beside collectives. A graph that has sizes keeps them.
    Collectives of GPUs are coalesced if the backend may: NCCL starts a group of them at once, gloo each by itself.
    """

    hardware: Hardware = field(default_factory=Hardware.default)
    bucket_bytes: int | None = None
    first_bucket_bytes: int = TUNING.first_bucket_bytes
    in_flight_bytes: int | None = None
    may_coalesce: bool = True
    puts_off: bool = True

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)
    keeps_nothing: ClassVar[bool] = True

    def within(self, local: LocalGraph, context: Context) -> LocalGraph:
        """The same graph with sizes."""
        if local.sizes is not None:
            return local
        size = self._bucket_bytes(local, context.traffic or collective_traffic(local))
        summed = summed_bytes(self.hardware, local.mesh, size) if self.bucket_bytes is None else size
        in_flight = (TUNING.buckets_in_flight * size, 2) if self.in_flight_bytes is None else (self.in_flight_bytes, 1)
        routes = _routes(local.mesh, "all_gather", "reduce_scatter") if self._is_measured else routes_of(local)
        alone = min(alone_bytes(self.hardware, local.mesh, routes), size)
        first, apart = min(self.first_bucket_bytes, size), self.may_coalesce and on_gpus(local, self.hardware)
        return replace(local, sizes=BucketSizes(size, first, summed, alone, *in_flight, apart, self.puts_off))

    def _bucket_bytes(self, local: LocalGraph, carried: CollectiveTraffic) -> int:
        """As given, or best for the links; where parameters are re-gathered to save memory, the buckets in flight hold
        at most a quarter of them; along long rings what a device can spare.
        """
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        routes = _routes(local.mesh, "all_reduce") if self._is_measured else routes_of(local)
        most = largest_bytes(self.hardware, local.mesh, routes)
        if carried.regathered_bytes:
            in_flight = int(carried.regathered_bytes * TUNING.gathered_in_flight_share)
            if most > self.hardware.bucket_bytes:  # a long ring
                in_flight = max(in_flight, self.hardware.spare_bytes)
            elif self.may_coalesce and on_gpus(local, self.hardware):
                most = max(most, _coalesced_bytes(carried.regathered_bytes))
            most = min(max(in_flight // TUNING.buckets_in_flight, TUNING.smallest_bucket_bytes), most)
        return even_bytes(self.hardware, local.mesh, carried.reduced_bytes, most, routes)

    @property
    def _is_measured(self) -> bool:
        """Measured starts do not depend on ranks; that of an all-reduce stands for all (decision 0028)."""
        return bool(self.hardware.levels[-1].costs)


def resized(passes: Sequence[Pass], **fields: object) -> tuple[Pass, ...]:
    """`passes` with other fields of `SizeBuckets`."""
    return tuple(replace(pass_, **fields) if isinstance(pass_, SizeBuckets) else pass_ for pass_ in passes)


def sizing_of(passes: Sequence[Pass]) -> SizeBuckets | None:
    """The pass that decides sizes."""
    return next((pass_ for pass_ in passes if isinstance(pass_, SizeBuckets)), None)


def smaller_buckets(passes: Sequence[Pass]) -> list[tuple[Pass, ...]]:
    """`passes`, then variants with smaller buckets and fewer in flight, in the last of which no gradient of a weight
    waits; sizes that the user gave do not change.
    """
    variants, sizing = [tuple(passes)], sizing_of(passes)
    if sizing is None:
        return variants
    most = sizing.bucket_bytes or sizing.hardware.bucket_bytes
    for part in TUNING.bucket_parts:
        size = max(most // part, min(most, TUNING.smallest_bucket_bytes)) if sizing.bucket_bytes is None else most
        in_flight = size if sizing.in_flight_bytes is None else sizing.in_flight_bytes
        puts_off = part != TUNING.bucket_parts[-1]
        smaller = resized(passes, bucket_bytes=size, in_flight_bytes=in_flight, puts_off=puts_off)
        if smaller not in variants:
            variants.append(smaller)
    return variants


@dataclass(frozen=True)
class Route:
    """Collectives of one kind along one axis, and the part of a bucket that they carry: stages behind a reduce-scatter,
    or before a gather, carry pieces.
    """

    kind: str
    axis: str
    share: float = 1.0

    def us(self, size_bytes: float, hardware: Hardware, mesh: Mesh) -> float:
        """Microseconds of that part of a bucket on the link."""
        return hardware.algorithm_us(self.kind, size_bytes * self.share, mesh, self.axis)

    def start_us(self, hardware: Hardware, mesh: Mesh) -> float:
        """Time of an empty collective on the link, or on the processors if that is longer."""
        computing = hardware.compute_steal_us(self.kind, 0, mesh, self.axis)
        computing += sum(hardware.host_us(self.kind, 0, mesh, self.axis))
        return max(self.us(0, hardware, mesh), computing)

    def hidden_us(self, size_bytes: float, hardware: Hardware, mesh: Mesh) -> float:
        """The part of `us` that concurrent computing can hide."""
        stolen = hardware.compute_steal_us(self.kind, size_bytes * self.share, mesh, self.axis)
        return max(self.us(size_bytes, hardware, mesh) - stolen, 0.0)


def routes_of(local: LocalGraph) -> tuple[Route, ...]:
    """What carries the bytes of a step. Few bytes (losses, norms) have no say in the size of buckets."""
    carried: dict[tuple[str, str], float] = {}
    for node, _ in with_bodies(local.graph):
        if is_collective(node) and (kind := collective_kind(node.target)) in _BUCKETED:
            key = kind, str(node.args[-1])
            size = max(meta.size_bytes(node_at(node, 0)), meta.size_bytes(node))
            carried[key] = carried.get(key, 0.0) + size * (local.mesh.axis_size(key[1]) > 1)
    most = max(carried.values(), default=0.0)
    alike = {kind: max(size for (other, _), size in carried.items() if other == kind) for kind, _ in carried}
    if "reduce_scatter" in alike and "all_reduce" in alike:  # hybrid: sums of pieces
        alike["all_reduce"] = max(alike["all_reduce"], alike["reduce_scatter"])
    return tuple(Route(*key, size / alike[key[0]]) for key, size in carried.items() if size > _LITTLE * most)


def _routes(mesh: Mesh, *kinds: str) -> tuple[Route, ...]:
    return tuple(Route(kind, axis.name) for axis in mesh.axes for kind in kinds if axis.size > 1)


def largest_bytes(hardware: Hardware, mesh: Mesh, routes: Sequence[Route]) -> int:
    """`Hardware.bucket_bytes` for the groups of a step: doubled while starting takes a larger part of sending, as
    long rings make it, and buckets in flight take no more than a device can spare.
    """
    size, most = hardware.bucket_bytes, hardware.spare_bytes / TUNING.buckets_in_flight
    for route in routes:
        while 2 * size <= most and _is_slow_start(route, size, hardware, mesh):
            size *= 2
    return size


def _is_slow_start(route: Route, size_bytes: int, hardware: Hardware, mesh: Mesh) -> bool:
    full = replace(route, share=1.0)
    start = full.us(0, hardware, mesh)
    return start > TUNING.slow_start_share * (full.us(size_bytes, hardware, mesh) - start)


def expected_bytes(hardware: Hardware, mesh: Mesh, axes: Sequence[str], reduced_bytes: int) -> int:
    """Estimate the bucket size of a step that reduces `reduced_bytes` along `axes`, before its program exists."""
    if hardware.levels[-1].costs:
        return hardware.bucket_bytes
    routes = [Route("all_gather", axis) for axis in axes if mesh.axis_size(axis) > 1]
    most = largest_bytes(hardware, mesh, routes)
    if hardware.has_gpus:
        most = max(most, _coalesced_bytes(reduced_bytes))
    return even_bytes(hardware, mesh, reduced_bytes, most, routes)


def _coalesced_bytes(regathered_bytes: int) -> int:
    """Of a bucket without copies, of those parameters: in flight they hold half of what buckets with copies may."""
    in_flight = regathered_bytes * TUNING.gathered_in_flight_share / 2
    return min(int(in_flight / TUNING.buckets_in_flight), TUNING.coalesced_bytes)


def on_gpus(local: LocalGraph, hardware: Hardware) -> bool:
    """True where GPUs run the program: its parameters are there, or a data sheet has more processors than a core."""
    kinds = {param.meta.device.partition(":")[0] for param in local.inputs if param.role is Role.PARAM}
    return kinds == {"cuda"} or hardware.has_gpus


def alone_bytes(hardware: Hardware, mesh: Mesh, routes: Sequence[Route]) -> int:
    """Size from which a collective of its own costs less than a copy into or out of a bucket."""
    starts = [route.start_us(hardware, mesh) for route in routes]
    copy_us = hardware.work_us(Work(2 * _SAMPLE, bucketed=True)) - hardware.launch_us
    return int(max(starts, default=0.0) * _SAMPLE / max(copy_us, 1e-9))


def even_bytes(hardware: Hardware, mesh: Mesh, reduced_bytes: int, most_bytes: int, routes: Sequence[Route]) -> int:
    """Bucket size for a step that reduces `reduced_bytes` in all: `most_bytes`, halved while that lowers the cost.

    n buckets cost `n s + T / n`: s to start each, and the last of them, a part 1 / n of the time T that computing could
    hide, cannot overlap.
    """
    starts = [(route, route.start_us(hardware, mesh)) for route in routes]

    def cost_us(size: int) -> float:
        along = (reduced_bytes / size * us + route.hidden_us(size, hardware, mesh) for route, us in starts)
        return max(along, default=0.0)

    best, least_us = most_bytes, cost_us(max(most_bytes, 1))
    while reduced_bytes and best // 2 >= TUNING.smallest_bucket_bytes and (us := cost_us(best // 2)) < least_us:
        best, least_us = best // 2, us
    return best


def summed_bytes(hardware: Hardware, mesh: Mesh, bucket_bytes: int) -> int:
    """Bucket size of all-reduces: `bucket_bytes`, doubled as often as concurrent computing hides less than half of one.
    A link that needs the processors hides nothing, and is cheapest with few collectives.
    """

    def hidden(route: Route) -> float:
        return route.hidden_us(bucket_bytes, hardware, mesh) / max(route.us(bucket_bytes, hardware, mesh), 1e-9)

    share = min(map(hidden, _routes(mesh, "all_reduce")), default=1.0)
    while share <= TUNING.hidden_share and 2 * bucket_bytes <= TUNING.most_summed_bytes:
        bucket_bytes, share = 2 * bucket_bytes, 2 * share
    return bucket_bytes
