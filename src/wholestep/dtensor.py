"""Layouts to and from the placements of torch's DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from . import _torch
from .layout import Layout
from .mesh import Mesh


def placements(layout: Layout, mesh: Mesh) -> tuple[Any, ...]:
    """One placement for each mesh axis. Axes that shard one dim out of mesh order become strided shards."""
    out: list[Any] = []
    for m, axis in enumerate(mesh.axes):
        state = layout.state(axis.name)
        if state.kind != "S":
            out.append(Replicate())
            continue
        order = layout.dims[state.dim]
        inner = [a for a in order[: order.index(axis.name)] if mesh.names.index(a) > m]
        factor = 1
        for name in inner:
            factor *= mesh.axis_size(name)
        out.append(Shard(state.dim) if factor == 1 else _torch.strided_shard(state.dim, factor))
    return tuple(out)


def layout_of(tensor: DTensor, mesh: Mesh) -> Layout:
    """The layout of a DTensor whose shards follow mesh order."""
    dims: list[tuple[str, ...]] = [()] * tensor.dim()
    for axis, placement in zip(mesh.axes, tensor.placements, strict=True):
        if isinstance(placement, Shard) and axis.size > 1:
            dims[placement.dim] = (*dims[placement.dim], axis.name)
    return Layout(tuple(dims))


def wrap(local: torch.Tensor, layout: Layout, mesh: Mesh, devices: DeviceMesh, shape: Sequence[int]) -> DTensor:
    """A DTensor of global `shape` around this rank's piece; no communication."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return DTensor.from_local(
        local, devices, placements(layout, mesh), run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )
