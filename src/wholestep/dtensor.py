"""Layouts to and from the placements of torch's DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from . import _torch
from .errors import LayoutError
from .layout import Layout
from .mesh import Mesh


def placements(layout: Layout, mesh: Mesh) -> tuple[Any, ...]:
    """One placement for each mesh axis. Axes that shard one dim out of mesh order become strided shards."""
    out: list[Any] = []
    for axis in mesh.names:
        state = layout.state(axis)
        if state.kind != "S":
            out.append(Replicate())
            continue
        factor = _factor(axis, layout.dims[state.dim], mesh)
        out.append(Shard(state.dim) if factor == 1 else _torch.strided_shard(state.dim, factor))
    return tuple(out)


def _factor(axis: str, order: Sequence[str], mesh: Mesh) -> int:
    """How many pieces axes make that cut a dim before `axis` does but stand after it in the mesh."""
    before = order[: order.index(axis)]
    return prod(mesh.axis_size(a) for a in before if mesh.names.index(a) > mesh.names.index(axis))


def layout_of(tensor: DTensor, mesh: Mesh) -> Layout:
    """The layout of a DTensor.

    Raises:
        LayoutError: it lies on another mesh, or its strided shards follow no order of the axes of the mesh.
    """
    if tuple(tensor.device_mesh.shape) != tuple(a.size for a in mesh.axes):
        raise LayoutError(
            f"a DTensor of shape {list(tensor.shape)} on {tensor.device_mesh}",
            f"the mesh of the step, {mesh}",
            "give plain tensors, or DTensors on that mesh",
        )
    return layout_from(tensor.placements, tensor.dim(), mesh)


def layout_from(placed: Sequence[object], ndim: int, mesh: Mesh) -> Layout:
    """The layout that placements, one for each mesh axis, give a tensor of `ndim` dims.

    Raises:
        LayoutError: their number is wrong, one is no placement of a dim the tensor has, or strided shards follow no
            order of the axes of the mesh.
    """
    if len(placed) != len(mesh.axes):
        raise LayoutError(f"{len(placed)} placements {tuple(placed)}", f"one for each axis of mesh {mesh}")
    dims: list[tuple[str, ...]] = [()] * ndim
    factors: dict[str, int] = {}
    partial: list[tuple[str, str]] = []
    for axis, placement in zip(mesh.axes, placed, strict=True):
        found = _torch.shard_of(placement)
        if isinstance(placement, Partial):
            partial += [(axis.name, placement.reduce_op)] if axis.size > 1 else []
        elif found is None and not isinstance(placement, Replicate):
            raise LayoutError(f"{placement!r} for axis {axis.name!r}", "Shard(dim), Replicate() or Partial(op)")
        elif found is not None and axis.size > 1:
            dim, factors[axis.name] = found
            if not -ndim <= dim < ndim:
                raise LayoutError(f"{placement!r} of a tensor of {ndim} dims", f"a dim from 0 to {ndim - 1}")
            dims[dim] = (*dims[dim], axis.name)
    for dim, axes in enumerate(dims):
        orders = [o for o in permutations(axes) if all(_factor(a, o, mesh) == factors[a] for a in o)]
        if not orders:
            raise LayoutError(
                f"a DTensor placed as {tuple(placed)} on {mesh}",
                "shards that follow an order of the axes",
                "redistribute it, to Shard() or Replicate() on each axis",
            )
        dims[dim] = orders[0]
    return Layout(tuple(dims), tuple(sorted(partial)))


def wrap(local: torch.Tensor, layout: Layout, mesh: Mesh, devices: DeviceMesh, shape: Sequence[int]) -> DTensor:
    """A DTensor of global `shape` around this rank's piece, in host memory too; no communication."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return _torch.dtensor(local, devices, placements(layout, mesh), shape, strides)
