"""Collectives on a tensor with one dim sharded along one dim of the mesh."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import LayoutError
from ..layout import PARTIAL_OPS, AxisState, replicated, sharded
from .mesh_position import axis_of, place
from .padding import checked_dim
from .redistribute import move


def shard_dim_alltoall(
    tensor: Tensor,
    gather_dim: int,
    shard_dim: int,
    mesh: DeviceMesh,
    mesh_dim: int | str = 0,
    *,
    size: int | None = None,
) -> Tensor:
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
    placed = place(mesh)
    axis = axis_of(placed, mesh, mesh_dim)
    shape, ndim = _global_shape(tensor, gather_dim, size, placed.mesh.axis_size(axis)), tensor.dim()
    return move(tensor, sharded(ndim, gather_dim, axis), sharded(ndim, shard_dim, axis), placed.along(axis), shape)


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
    dim, placed = checked_dim(tensor, dim), place(mesh)
    axis = axis_of(placed, mesh, mesh_dim)
    shape = _global_shape(tensor, dim, size, placed.mesh.axis_size(axis))
    return move(tensor, sharded(tensor.dim(), dim, axis), replicated(tensor.dim()), placed.along(axis), shape)


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
    dim, placed = checked_dim(tensor, dim), place(mesh)
    if op not in PARTIAL_OPS[:4]:
        raise LayoutError(f"op={op!r}", f"one of {', '.join(PARTIAL_OPS[:4])}")
    axis = axis_of(placed, mesh, mesh_dim)
    partial = replicated(tensor.dim()).put(axis, AxisState("P", op=op))
    return move(tensor, partial, sharded(tensor.dim(), dim, axis), placed.along(axis), tuple(tensor.shape))


def _global_shape(tensor: Tensor, dim: int, size: int | None, parts: int) -> tuple[int, ...]:
    whole = tensor.shape[dim] * parts if size is None else size
    return (*tensor.shape[:dim], whole, *tensor.shape[dim + 1 :])
