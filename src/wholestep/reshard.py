"""Resharding: the cheapest sequence of collectives from one layout to another, a shortest path over layouts."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from math import prod

from .errors import LayoutError
from .hardware.hardware import Hardware
from .layout import NORMS, REPLICATED, AxisState, Layout
from .mesh import TIME, Mesh

LINEAR_OPS = frozenset({"sum", "avg"})


@dataclass(frozen=True)
class Step:
    """One step along one axis.

    `dim` is the tensor dim that it shards or gathers, `op` the reduction, `to` the dim that an all-to-all shards while
    it gathers `dim`. Of a value with an owner, `dim` is the owner's coordinate, and `to` that of the next one.
    """

    kind: str  # all_gather | all_reduce | reduce_scatter | all_to_all | send | broadcast | reduce, or local, as below
    axis: str
    dim: int = -1
    op: str = ""
    to: int = -1

    @property
    def communicates(self) -> bool:
        """False for local steps."""
        return self.kind not in ("slice", "mask", "vary", "own", "share")

    @property
    def priced_as(self) -> str:
        """The kind of collective that has its price. Sums for owners are merged: each rank gets as much as it owns."""
        return "all_to_all" if self.kind == "reduce" else self.kind


@dataclass(frozen=True)
class Path:
    """Steps, the layouts before, between and after them, and their total cost."""

    steps: tuple[Step, ...]
    layouts: tuple[Layout, ...]
    cost_us: float


def reshard(
    source: Layout, target: Layout, shape: Sequence[int], itemsize: int, mesh: Mesh, hardware: Hardware
) -> Path:
    """Return the cheapest path from `source` to `target` for a tensor of global `shape` and `itemsize` in bytes.

    Collectives have their time on `hardware` as cost, those of a value that differs between pieces once for each piece;
    local steps are free. Every path is right for tensors of all sizes. Raises LayoutError if no path exists: a varying
    value has no global value, a shard cannot become a partial value.
    """
    return _cheapest(source, target, tuple(map(int, shape)), itemsize, mesh, hardware)


@lru_cache(maxsize=65536)
def _cheapest(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh, hardware: Hardware
) -> Path:
    queue: list[tuple[float, int, Layout, tuple[Step, ...], tuple[Layout, ...]]] = [(0.0, 0, source, (), (source,))]
    tie, visited = count(1), set[Layout]()
    while queue:
        cost, _, layout, steps, layouts = heapq.heappop(queue)
        if layout == target:
            return Path(steps, layouts, cost)
        if layout in visited:
            continue
        visited.add(layout)
        for step, after in _moves(layout, target, shape, mesh):
            full_bytes = _whole_bytes(step, layout, after, shape, itemsize, mesh)
            sends = step.communicates and mesh.axis_size(step.axis) > 1
            price = hardware.collective_us(step.priced_as, full_bytes, mesh, step.axis) if sends else 0.0
            price *= mesh.pieces if step.axis != TIME and layout.state(TIME).kind in "SP" else 1
            heapq.heappush(queue, (cost + price, next(tie), after, (*steps, step), (*layouts, after)))
    raise LayoutError(f"a tensor laid out as {source} cannot become {target}", "a target that the values determine")


def _moves(layout: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh) -> Iterator[tuple[Step, Layout]]:
    for axis in sorted(layout.axes | target.axes):
        have, want = layout.state(axis), target.state(axis)
        if have == want and have.kind != "S":
            continue
        if have.kind == "S" and layout.dims[have.dim][-1] == axis and _cut(layout, have.dim) != _cut(target, have.dim):
            yield Step("all_gather", axis, have.dim), layout.put(axis, REPLICATED)
            if axis != TIME and want.kind == "S" and want.dim != have.dim and _fits(layout, target, axis, want.dim):
                yield Step("all_to_all", axis, have.dim, to=want.dim), layout.put(axis, want)
        elif have.kind == "P":
            yield from _reductions(layout, target, axis, have)
            if (dim := _dim_to_share(layout, target, axis, shape, mesh)) is not None:
                yield Step("reduce_scatter", axis, dim, have.op), layout.put(axis, AxisState("S", dim))
        elif have.kind == "O":
            yield from _from_owner(layout, axis, have, want)
        elif have.kind == "R":
            yield from _cuts(layout, target, axis, want)


def _from_owner(layout: Layout, axis: str, have: AxisState, want: AxisState) -> Iterator[tuple[Step, Layout]]:
    """To another owner, to all, or as the one share of a sum that is not zero."""
    if want.kind == "O":
        yield Step("send", axis, have.at, to=want.at), layout.put(axis, want)
    elif want.kind == "P" and want.op in ("sum", *NORMS):
        yield Step("share", axis, have.at, want.op), layout.put(axis, want)
    else:
        yield Step("broadcast", axis, have.at), layout.put(axis, REPLICATED)


def _reductions(layout: Layout, target: Layout, axis: str, have: AxisState) -> Iterator[tuple[Step, Layout]]:
    want = target.state(axis)
    if axis != TIME and want.kind == "O" and have.op in LINEAR_OPS:
        yield Step("reduce", axis, want.at, have.op), layout.put(axis, want)
    elif axis != TIME and want.kind == "S" and have.op in LINEAR_OPS:  # whatever the price of one tensor: never whole
        if _fits(layout, target, axis, want.dim):  # else another axis goes first
            yield Step("reduce_scatter", axis, want.dim, have.op), layout.put(axis, want)
    else:
        yield Step("all_reduce", axis, op=have.op), layout.put(axis, REPLICATED)


def _dim_to_share(layout: Layout, target: Layout, axis: str, shape: tuple[int, ...], mesh: Mesh) -> int | None:
    """Return the dim along which the ranks of `axis` share out the sum over another axis, which then carries pieces,
    before they gather: the first one that divides evenly, else the longest. None if there is no such sum, or no dim.
    """
    partial = {a for a, op in layout.partial if op in LINEAR_OPS and mesh.axis_size(a) > 1 and a != TIME}
    reduced = {a for a in partial if target.state(a).kind == "R"}
    if axis not in reduced or len(reduced) < 2 or not shape:
        return None
    pieces = [prod(map(mesh.axis_size, (*axes, axis))) for axes in layout.dims]
    plain = [dim for dim in range(len(shape)) if not {*layout.dims[dim]} & {a for a, _ in layout.blocks}]
    even = (dim for dim in plain if shape[dim] and shape[dim] % pieces[dim] == 0)
    return next(even, max(plain, key=lambda dim: shape[dim] / pieces[dim], default=None))


def _cuts(layout: Layout, target: Layout, axis: str, want: AxisState) -> Iterator[tuple[Step, Layout]]:
    if want.kind == "S" and _fits(layout, target, axis, want.dim):
        yield Step("slice", axis, want.dim), layout.put(axis, want)
    elif want.kind == "P":
        yield Step("mask", axis, op=want.op), layout.put(axis, want)
    elif want.kind == "V":
        yield Step("vary", axis), layout.put(axis, want)
    elif want.kind == "O":
        yield Step("own", axis, want.at), layout.put(axis, want)


def _fits(layout: Layout, target: Layout, axis: str, dim: int) -> bool:
    """Return whether sharding `dim` by `axis` now gives a prefix of the target's axes for this dim."""
    after = (*_cut(layout, dim), (axis, target.state(axis)))
    return _cut(target, dim)[: len(after)] == after


def _cut(layout: Layout, dim: int) -> tuple[tuple[str, AxisState], ...]:
    return tuple((axis, layout.state(axis)) for axis in layout.dims[dim])


def _whole_bytes(step: Step, layout: Layout, after: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """Return the bytes of the tensor that the ranks of this step's group have together."""
    layout = after if step.kind == "all_gather" else layout
    cut = prod(mesh.axis_size(axis) for axis in layout.shard_axes())
    return prod(shape) * itemsize // cut
