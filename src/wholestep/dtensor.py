"""Conversion between layouts and the placements of torch's DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from math import prod
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from . import _torch
from .errors import LayoutError
from .layout import Layout
from .mesh import Mesh


class Owned(Placement):
    """Only ranks at one coordinate of an axis have the tensor; the local tensors of others are empty."""

    def __init__(self, coordinate: int) -> None:
        super().__init__()  # of a class in C++, which has to be told
        self.coordinate = coordinate

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owned) and other.coordinate == self.coordinate

    def __hash__(self) -> int:
        return hash(("Owned", self.coordinate))

    def __reduce__(self) -> tuple[type[Owned], tuple[int]]:
        return Owned, (self.coordinate,)  # to be copied with a tensor

    def __repr__(self) -> str:
        return f"Owned({self.coordinate})"


def placements(layout: Layout, mesh: Mesh) -> tuple[Any, ...]:
    """Return a placement for each mesh axis. Axes that shard blocks, or a dim out of mesh order, are strided shards."""
    out: list[Any] = []
    for axis in mesh.names:
        state = layout.state(axis)
        if state.kind == "O":
            out.append(Owned(state.at))
            continue
        if state.kind != "S":
            out.append(Replicate())
            continue
        blocks = {a: layout.state(a).blocks for a in layout.dims[state.dim]}
        factor = _factor(axis, [a for a in blocks if blocks[a] == state.blocks], mesh) * state.blocks
        earlier = mesh.names[: mesh.names.index(axis)]  # torch counts blocks of what these have left
        factor //= prod(mesh.axis_size(a) for a in earlier if blocks.get(a, state.blocks) < state.blocks)
        out.append(Shard(state.dim) if factor == 1 else _torch.strided_shard(state.dim, factor))
    return tuple(out)


def _factor(axis: str, order: Sequence[str], mesh: Mesh) -> int:
    """Return the number of shards by axes that shard the dim before `axis` but come after it in the mesh."""
    before = order[: order.index(axis)]
    return prod(mesh.axis_size(a) for a in before if mesh.names.index(a) > mesh.names.index(axis))


def layout_of(tensor: DTensor, mesh: Mesh) -> Layout:
    """The layout of a DTensor. Raises LayoutError for another mesh, or strided shards that match no order."""
    if tuple(tensor.device_mesh.shape) != tuple(a.size for a in mesh.axes):
        problem = f"a DTensor of shape {list(tensor.shape)} on {tensor.device_mesh}"
        raise LayoutError(problem, f"the mesh of the step, {mesh}", "pass plain tensors, or DTensors on that mesh")
    return layout_from(tensor.placements, tensor.dim(), mesh)


def layout_from(placed: Sequence[object], ndim: int, mesh: Mesh) -> Layout:
    """Return the layout of a tensor of `ndim` dims with these placements, one for each mesh axis. Raises LayoutError if
    their number is wrong, one is not a placement or shards a missing dim, or strided shards match no order of the axes
    of the mesh.
    """
    if len(placed) != len(mesh.axes):
        raise LayoutError(f"{len(placed)} placements {tuple(placed)}", f"one for each axis of mesh {mesh}")
    dims: list[tuple[str, ...]] = [()] * ndim
    factors: dict[str, int] = {}
    partial: list[tuple[str, str]] = []
    owned: list[tuple[str, int]] = []
    for axis, placement in zip(mesh.axes, placed, strict=True):
        shard = _torch.shard_of(placement)
        if isinstance(placement, Partial):
            partial += [(axis.name, placement.reduce_op)] if axis.size > 1 else []
        elif isinstance(placement, (Owned, _torch.OwnedRows)):
            owned.append((axis.name, placement.coordinate))
        elif shard is None and not isinstance(placement, Replicate):
            raise LayoutError(f"{placement!r} for axis {axis.name!r}", "Shard(dim), Replicate() or Partial(op)")
        elif shard is not None and axis.size > 1:
            dim, factors[axis.name] = shard
            if not -ndim <= dim < ndim:
                raise LayoutError(f"{placement!r} of a tensor of {ndim} dims", f"a dim from 0 to {ndim - 1}")
            dims[dim] = (*dims[dim], axis.name)
    for dim, axes in enumerate(dims):
        orders = [o for o in permutations(axes) if all(_factor(a, o, mesh) == factors[a] for a in o)]
        if not orders:
            problem = f"a DTensor placed as {tuple(placed)} on {mesh}"
            needed = "strided shards that match an order of the axes"
            raise LayoutError(problem, needed, "redistribute it, to Shard() or Replicate() on each axis")
        dims[dim] = orders[0]
    return Layout(tuple(dims), tuple(sorted(partial)), owned=tuple(sorted(owned)))
