"""Collectives on a tensor that one dim of the mesh cuts along one dim of its own."""

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
    """Join `gather_dim`, which the ranks along `mesh_dim` cut, and cut `shard_dim` in its place: one all-to-all.

    `tensor` is this rank's piece. `size` is that of `gather_dim` in the whole tensor; it is needed where it does not
    divide by the number of ranks, and by default all pieces are as large as this one. A tensor on `meta` gives one.

    Example:
        >>> columns = collectives.shard_dim_alltoall(torch.ones(12, 4), 0, 1, devices, "dp")  # on 2 ranks: (24, 2)

    Raises:
        LayoutError: the tensor lacks a dim, both are the same, or the piece is not that of `size`.
        MeshError: this rank or the mesh dim is no part of the mesh.
    """
    gather_dim, shard_dim = checked_dim(tensor, gather_dim), checked_dim(tensor, shard_dim)
    if gather_dim == shard_dim:
        raise LayoutError(f"gather_dim and shard_dim are both {shard_dim}", "two dims", "keep the piece as it is")
    here = place(mesh)
    axis = axis_of(here, mesh, mesh_dim)
    shape, ndim = _joined(tensor, gather_dim, size, here.mesh.axis_size(axis)), tensor.dim()
    return move(tensor, sharded(ndim, gather_dim, axis), sharded(ndim, shard_dim, axis), here.along(axis), shape)


def shard_dim_all_gather(
    tensor: Tensor, dim: int, mesh: DeviceMesh, mesh_dim: int | str = 0, *, size: int | None = None
) -> Tensor:
    """The whole of `dim`, which the ranks along `mesh_dim` cut; `tensor` and `size` as for `shard_dim_alltoall`.

    Example:
        >>> whole = collectives.shard_dim_all_gather(torch.ones(11, 6), 0, devices, "dp", size=11)

    Raises:
        LayoutError: the tensor lacks the dim, or the piece is not that of `size`.
        MeshError: this rank or the mesh dim is no part of the mesh.
    """
    dim, here = checked_dim(tensor, dim), place(mesh)
    axis = axis_of(here, mesh, mesh_dim)
    shape = _joined(tensor, dim, size, here.mesh.axis_size(axis))
    return move(tensor, sharded(tensor.dim(), dim, axis), replicated(tensor.dim()), here.along(axis), shape)


def shard_dim_reduce_scatter(
    tensor: Tensor, dim: int, mesh: DeviceMesh, mesh_dim: int | str = 0, *, op: str = "sum"
) -> Tensor:
    """This rank's piece along `dim` of the sum, average, maximum or minimum of the ranks' tensors along `mesh_dim`.

    Example:
        >>> rows = collectives.shard_dim_reduce_scatter(torch.ones(11, 6), 0, devices, "dp")

    Raises:
        LayoutError: the tensor lacks the dim, or `op` is none of sum, avg, max, min.
        MeshError: this rank or the mesh dim is no part of the mesh.
    """
    dim, here = checked_dim(tensor, dim), place(mesh)
    if op not in PARTIAL_OPS[:4]:
        raise LayoutError(f"op={op!r}", f"one of {', '.join(PARTIAL_OPS[:4])}")
    axis = axis_of(here, mesh, mesh_dim)
    partial = replicated(tensor.dim()).put(axis, AxisState("P", op=op))
    return move(tensor, partial, sharded(tensor.dim(), dim, axis), here.along(axis), tuple(tensor.shape))


def _joined(tensor: Tensor, dim: int, size: int | None, parts: int) -> tuple[int, ...]:
    whole = tensor.shape[dim] * parts if size is None else size
    return (*tensor.shape[:dim], whole, *tensor.shape[dim + 1 :])
