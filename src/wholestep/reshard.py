"""From one layout to another as the cheapest list of collective steps.

A shortest path over layouts, priced by bytes and hops.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from math import prod

from .errors import LayoutError
from .hardware.hardware import Hardware
from .layout import REPLICATED, AxisState, Layout
from .mesh import Mesh

LINEAR_OPS = frozenset({"sum", "avg"})


@dataclass(frozen=True)
class Step:
    """One move along one axis. `dim` is the tensor dim it cuts or joins, `op` what it reduces by, `to` the dim that an
    all-to-all cuts while it joins `dim`.
    """

    kind: str  # all_gather | all_reduce | reduce_scatter | all_to_all | slice | mask | vary
    axis: str
    dim: int = -1
    op: str = ""
    to: int = -1

    @property
    def communicates(self) -> bool:
        """False for moves a rank makes alone."""
        return self.kind not in ("slice", "mask", "vary")


@dataclass(frozen=True)
class Path:
    """Steps, the layouts they pass through (one more than steps), and what they cost together."""

    steps: tuple[Step, ...]
    layouts: tuple[Layout, ...]
    cost_us: float


@lru_cache(maxsize=65536)
def reshard(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh, hardware: Hardware
) -> Path:
    """The cheapest way from `source` to `target` for a tensor of global `shape` with `itemsize` bytes an element.

    Collectives cost what they take on `hardware`; what a rank does alone is free.

    Raises:
        LayoutError: there is none: a value that varies has no global meaning, a shard cannot become a partial value.
    """
    queue: list[tuple[float, int, Layout, tuple[Step, ...], tuple[Layout, ...]]] = [(0.0, 0, source, (), (source,))]
    tie, done = count(1), set[Layout]()
    while queue:
        cost, _, at, steps, layouts = heapq.heappop(queue)
        if at == target:
            return Path(steps, layouts, cost)
        if at in done:
            continue
        done.add(at)
        for step, after in _moves(at, target):
            whole = _whole_bytes(step, at, after, shape, itemsize, mesh)
            sends = step.communicates and mesh.axis_size(step.axis) > 1
            price = hardware.collective_us(step.kind, whole, mesh, step.axis) if sends else 0.0
            heapq.heappush(queue, (cost + price, next(tie), after, (*steps, step), (*layouts, after)))
    raise LayoutError(f"a tensor laid out as {source} cannot become {target}", "a target that the values determine")


def reshard_us(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh, hardware: Hardware,
    target_mesh: Mesh | None = None,
) -> float:  # fmt: skip
    """What that way costs in microseconds; infinite where values would have to be cut into partial ones, reduced by
    another operation, or moved to another mesh.
    """
    if target_mesh is not None and target_mesh != mesh:
        return float("inf")
    for axis in source.axes | target.axes:
        here, there = source.state(axis), target.state(axis)
        if there.kind == "P" and here.kind in ("S", "P") and here != there:
            return float("inf")
    try:
        return reshard(source, target, shape, itemsize, mesh, hardware).cost_us
    except LayoutError:
        return float("inf")


def _moves(at: Layout, target: Layout) -> Iterator[tuple[Step, Layout]]:
    for axis in sorted(at.axes | target.axes):
        here, there = at.state(axis), target.state(axis)
        if here == there and here.kind != "S":
            continue
        if here.kind == "S" and at.dims[here.dim][-1] == axis and at.dims[here.dim] != target.dims[here.dim]:
            yield Step("all_gather", axis, here.dim), at.put(axis, REPLICATED)
            if there.kind == "S" and there.dim != here.dim and _fits(at, target, axis, there.dim):
                yield Step("all_to_all", axis, here.dim, to=there.dim), at.put(axis, there)
        elif here.kind == "P":
            yield from _reductions(at, target, axis, here)
        elif here.kind == "R":
            yield from _cuts(at, target, axis, there)


def _reductions(at: Layout, target: Layout, axis: str, here: AxisState) -> Iterator[tuple[Step, Layout]]:
    yield Step("all_reduce", axis, op=here.op), at.put(axis, REPLICATED)
    there = target.state(axis)
    if there.kind == "S" and here.op in LINEAR_OPS and _fits(at, target, axis, there.dim):
        yield Step("reduce_scatter", axis, there.dim, here.op), at.put(axis, there)


def _cuts(at: Layout, target: Layout, axis: str, there: AxisState) -> Iterator[tuple[Step, Layout]]:
    if there.kind == "S" and _fits(at, target, axis, there.dim):
        yield Step("slice", axis, there.dim), at.put(axis, there)
    elif there.kind == "P":
        yield Step("mask", axis, op=there.op), at.put(axis, there)
    elif there.kind == "V":
        yield Step("vary", axis), at.put(axis, there)


def _fits(at: Layout, target: Layout, axis: str, dim: int) -> bool:
    """True when cutting `dim` by `axis` now leaves a prefix of what the target wants there."""
    after = (*at.dims[dim], axis)
    return target.dims[dim][: len(after)] == after


def _whole_bytes(step: Step, at: Layout, after: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """Bytes of the tensor that the group of this step holds together."""
    layout = after if step.kind == "all_gather" else at
    cut = prod(mesh.axis_size(axis) for axis in layout.shard_axes())
    return prod(shape) * itemsize // cut
