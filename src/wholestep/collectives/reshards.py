"""Resharding on process groups: between any two layouts, and of one dim along one dim of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph

from .. import reshard as paths
from ..backend.eager import eager
from ..backend.gloo.exchange import exchanges
from ..backend.protocol import Run
from ..backend.rank_binding import bind
from ..dtensor import layout_from
from ..errors import LayoutError
from ..graph import meta
from ..graph.graph import Input, LocalGraph, Output, Role
from ..graph.meta import TensorMeta, contiguous
from ..graph.verify import check_local_graph
from ..hardware.presets import one_host
from ..layout import PARTIAL_OPS, REPLICATED, AxisState, Layout, replicated, sharded
from ..mesh import Mesh
from ..partition.collectives import Emitter
from .mesh_position import MeshPosition, along, place
from .padding import checked_dim

Placed = Layout | Sequence[object]
"""A layout, or a placement of torch.distributed.tensor for each dim of the mesh."""


def reshard(tensor: Tensor, source: Placed, target: Placed, mesh: DeviceMesh, shape: Sequence[int]) -> Tensor:
    """Reshard this rank's local tensor from the layout `source` to the layout `target`.

    Uses the cheapest collectives: none if a rank has all it needs, none along a mesh dim of one rank, one all-to-all
    between two sharded dims. All ranks of `mesh` must make the same call. The result is contiguous and shares no memory
    with `tensor`; it has no gradient. A tensor on `meta` gives a tensor on `meta`.

    Args:
        tensor: this rank's local tensor; uneven sizes are sharded as by `torch.chunk`, without padding.
        source: the current layout: a `Layout` of the axes of `mesh`, or placements such as `[Shard(0), Replicate()]`,
            one for each dim of `mesh`.
        target: the layout of the result.
        mesh: the ranks.
        shape: global shape of the tensor.

    Example:
        >>> rows = collectives.reshard(torch.ones(11, 6), [Replicate()], [Shard(0)], devices, shape=(11, 6))

    Raises:
        LayoutError: the local tensor has another shape than `source` implies, a layout does not fit, or the values
            cannot become `target` (shards never become partial values).
        MeshError: this rank is not in `mesh`.
    """
    placed, sizes = place(mesh), tuple(shape)
    return _move(tensor, _layout(source, placed.mesh, sizes), _layout(target, placed.mesh, sizes), placed, sizes)


def shard_dim_alltoall(
    tensor: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int | str = 0, *,
    size: int | None = None,
) -> Tensor:  # fmt: skip
    """Gather `gather_dim`, which is sharded along `mesh_dim`, and shard `shard_dim` instead, with one all-to-all.

    `tensor` is this rank's shard. `size` is the global size of `gather_dim`, required if it is not divisible by the
    number of ranks; by default all shards have the size of this one. A tensor on `meta` gives a tensor on `meta`.

    Example:
        >>> columns = collectives.shard_dim_alltoall(torch.ones(12, 4), 0, 1, devices, "dp")  # on 2 ranks: (24, 2)

    Raises:
        LayoutError: the tensor lacks a dim, both dims are the same, or the shard does not fit `size`.
        MeshError: this rank or the mesh dim is not in the mesh.
    """
    gather_dim, shard_dim = checked_dim(tensor, gather_dim), checked_dim(tensor, shard_dim)
    if gather_dim == shard_dim:
        raise LayoutError(f"gather_dim and shard_dim are both {shard_dim}", "two dims", "keep the shard as it is")
    axis, here = along(mesh, mesh_dim)
    source, target = (sharded(tensor.dim(), dim, axis) for dim in (gather_dim, shard_dim))
    return _move(tensor, source, target, here, _global_shape(tensor, gather_dim, size, here.mesh.size))


def shard_dim_all_gather(
    tensor: Tensor, dim: int, mesh: DeviceMesh, mesh_dim: int | str = 0, *, size: int | None = None
) -> Tensor:
    """Gather `dim`, which is sharded along `mesh_dim`; `tensor` and `size` as for `shard_dim_alltoall`.

    Example:
        >>> whole = collectives.shard_dim_all_gather(torch.ones(11, 6), 0, devices, "dp", size=11)

    Raises:
        LayoutError: the tensor lacks the dim, or the shard does not fit `size`.
        MeshError: this rank or the mesh dim is not in the mesh.
    """
    dim = checked_dim(tensor, dim)
    axis, here = along(mesh, mesh_dim)
    source, target = sharded(tensor.dim(), dim, axis), replicated(tensor.dim())
    return _move(tensor, source, target, here, _global_shape(tensor, dim, size, here.mesh.size))


def shard_dim_reduce_scatter(
    tensor: Tensor, dim: int, mesh: DeviceMesh, mesh_dim: int | str = 0, *, op: str = "sum"
) -> Tensor:
    """Reduce the ranks' tensors along `mesh_dim` by `op` and return this rank's shard along `dim`.

    Example:
        >>> rows = collectives.shard_dim_reduce_scatter(torch.ones(11, 6), 0, devices, "dp")

    Raises:
        LayoutError: the tensor lacks the dim, or `op` is not one of sum, avg, max, min.
        MeshError: this rank or the mesh dim is not in the mesh.
    """
    dim = checked_dim(tensor, dim)
    axis, here = along(mesh, mesh_dim)
    if op not in PARTIAL_OPS[:4]:
        raise LayoutError(f"op={op!r}", f"one of {', '.join(PARTIAL_OPS[:4])}")
    partial = replicated(tensor.dim()).put(axis, AxisState("P", op=op))
    return _move(tensor, partial, sharded(tensor.dim(), dim, axis), here, tuple(tensor.shape))


def _global_shape(tensor: Tensor, dim: int, size: int | None, parts: int) -> tuple[int, ...]:
    global_size = tensor.shape[dim] * parts if size is None else size
    return (*tensor.shape[:dim], global_size, *tensor.shape[dim + 1 :])


def _move(tensor: Tensor, source: Layout, target: Layout, placed: MeshPosition, shape: tuple[int, ...]) -> Tensor:
    mesh = placed.mesh
    path = _route(source, target, shape, tensor.dtype, mesh)
    local_shape = path.layouts[0].local_shape(shape, mesh, placed.coordinate)
    if tuple(tensor.shape) != local_shape:
        problem = f"a local tensor of shape {list(tensor.shape)} at {dict(placed.coordinate)} of mesh {mesh}"
        needed = f"{list(local_shape)}: the shard of {list(shape)} with layout {source.show(shape)}"
        raise LayoutError(problem, needed, "pass this rank's shard, unpadded, and the shape of the whole tensor")
    if tensor.is_meta:
        return tensor.new_empty(path.layouts[-1].local_shape(shape, mesh, placed.coordinate))
    key = (source, target, shape, tensor.dtype, str(tensor.device), mesh)
    names = tuple((axis, group.group_name) for axis, group in placed.groups.items())
    moved = _runner(key, names, tuple(placed.coordinate.items()))([tensor.detach().contiguous()])[0]
    moved = cast(Tensor, moved).contiguous()
    shared = moved.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return moved.clone() if shared else moved


_Key = tuple[Layout, Layout, tuple[int, ...], torch.dtype, str, Mesh]


@lru_cache(maxsize=4096)
def _runner(key: _Key, groups: tuple[tuple[str, str], ...], coordinate: tuple[tuple[str, int], ...]) -> Run:
    return eager(bind(program(*key), dict(coordinate), dict(groups), exchange=exchanges(key[4])))


def _layout(placed: Placed, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    return placed if isinstance(placed, Layout) else layout_from(placed, len(shape), mesh)


def program(
    source: Layout, target: Layout, shape: tuple[int, ...], dtype: torch.dtype, device: str, mesh: Mesh
) -> LocalGraph:
    """Return the program that reshards a tensor of global `shape` from `source` to `target`: one input, one result.

    The input is contiguous. The program pads uneven shards.
    """
    path = _route(source, target, shape, dtype, mesh)
    global_meta = TensorMeta(shape, (), dtype, device)
    graph = Graph()
    tensor = graph.placeholder("tensor")
    meta.set_tensors(tensor, (contiguous(path.layouts[0].local_shape(shape, mesh, mesh.coordinate(0)), global_meta),))
    _, finish = Emitter(graph, mesh).start(path, tensor, global_meta)
    graph.output((finish(),))
    tensor_input = Input("tensor", Role.BATCH, contiguous(shape, global_meta))
    local = LocalGraph(graph, mesh, (tensor_input,), (Output("result", ""),), (path.layouts[0],))
    check_local_graph(local)
    return local


def _route(source: Layout, target: Layout, shape: tuple[int, ...], dtype: torch.dtype, mesh: Mesh) -> paths.Path:
    """Return the cheapest path from `source` to `target`, without steps along axes of one rank."""
    for layout in (source, target):
        layout.check(shape, mesh)
        if layout.owned:
            raise LayoutError(f"a tensor laid out as {layout.show(shape)}", "no owners: ranks have shards, sums or all")
    start, end = _without_single(source, mesh), _without_single(target, mesh)
    averages = [axis for axis, op in start.partial if op == "avg" and not dtype.is_floating_point]
    if averages and not dtype.is_complex:
        problem = f"an average of {dtype} over {averages[0]!r}"
        raise LayoutError(problem, "a floating-point dtype", "convert it, or reduce by sum")
    unreachable = [axis for axis, _ in end.partial if start.state(axis).kind == "S"]
    if unreachable:
        problem = f"a tensor laid out as {source} cannot become {target}: {unreachable[0]!r} shards it"
        next_step = "gather it first: zeros on all ranks except one then make it a partial sum"
        raise LayoutError(problem, "a partial or replicated tensor along this axis", next_step)
    return paths.reshard(start, end, shape, dtype.itemsize, mesh, one_host())


def _without_single(layout: Layout, mesh: Mesh) -> Layout:
    """Return `layout` without the axes of one rank, along which a tensor is always replicated."""
    for axis in layout.axes:
        layout = layout.put(axis, REPLICATED) if mesh.axis_size(axis) == 1 else layout
    return layout
