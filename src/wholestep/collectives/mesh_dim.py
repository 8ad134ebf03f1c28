"""Scatter and broadcast from one rank to the ranks along a dim of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import LayoutError, MeshError
from .mesh_position import along
from .padding import checked_dim, split, unpad


def mesh_scatter(
    output: Tensor, scatter_list: Sequence[Tensor] | None, mesh: DeviceMesh, mesh_dim: int | str = 0,
    async_op: bool = False, *, group_src: int = 0,
) -> dist.Work | None:  # fmt: skip
    """Scatter the `scatter_list` of a source rank to the ranks along one dim of the mesh, into `output`.

    Each group of ranks along `mesh_dim` has its own source: rank number `group_src` of the group. All tensors have the
    shape of `output`; pad uneven pieces with `split`. No effect on `meta`.

    Args:
        output: the tensor to write, on every rank.
        scatter_list: a tensor for each rank along the dim; used on the source only.
        mesh: the ranks.
        mesh_dim: number or name of the dim.
        async_op: return the work without waiting; `output` must be contiguous.
        group_src: position of the source along the dim.

    Example:
        >>> output = torch.empty(2)
        >>> work = collectives.mesh_scatter(output, [torch.ones(2)], devices, "dp")

    Raises:
        LayoutError: the list does not have one tensor like `output` for each rank.
        MeshError: this rank, the dim or the source is not in the mesh.
    """
    if output.is_meta:
        return None
    group, parts, index = _group(mesh, mesh_dim, group_src)
    pieces: list[Tensor] | None = None
    if index == group_src:
        pieces = [piece.contiguous() for piece in scatter_list or ()]
        _check_pieces(pieces, output, parts)
    buffer = _buffer(output, async_op, "output")
    work = cast(dist.Work | None, dist.scatter(buffer, pieces, group=group, async_op=async_op, group_src=group_src))
    if buffer is not output:
        output.copy_(buffer)
    return work


def mesh_broadcast(
    tensor: Tensor, mesh: DeviceMesh, mesh_dim: int | str = 0, async_op: bool = False, *, group_src: int = 0
) -> dist.Work | None:
    """Broadcast `tensor` in place from a source rank to the ranks along one dim of the mesh.

    The source is rank number `group_src` along the dim. With `async_op`, returns the work without waiting; `tensor`
    must be contiguous. No effect on `meta`.

    Example:
        >>> weights = torch.ones(3)
        >>> work = collectives.mesh_broadcast(weights, devices, "dp")

    Raises:
        LayoutError: `tensor` is not contiguous, with `async_op`.
        MeshError: this rank, the dim or the source is not in the mesh.
    """
    if tensor.is_meta:
        return None
    group, _, _ = _group(mesh, mesh_dim, group_src)
    buffer = _buffer(tensor, async_op, "tensor")
    work = cast(dist.Work | None, dist.broadcast(buffer, group=group, async_op=async_op, group_src=group_src))
    if buffer is not tensor:
        tensor.copy_(buffer)
    return work


def shard_dim_scatter(
    tensor: Tensor, dim: int, mesh: DeviceMesh, mesh_dim: int | str = 0, *, group_src: int = 0
) -> Tensor:
    """Return this rank's shard along `dim` of the source's `tensor`, over the ranks along `mesh_dim`.

    Every rank passes a tensor of the same shape; only the source's values are used. Uneven sizes are sharded as by
    `torch.chunk`; the last ranks may get an empty shard.

    Example:
        >>> rows = collectives.shard_dim_scatter(torch.ones(11, 6), 0, devices, "dp")

    Raises:
        LayoutError: the tensor has no such dim.
        MeshError: this rank, the mesh dim or the source is not in the mesh.
    """
    dim = checked_dim(tensor, dim)
    _, parts, index = _group(mesh, mesh_dim, group_src)
    pieces, pads = split(tensor.detach(), dim, parts)
    output = torch.empty_like(pieces[index])
    mesh_scatter(output, pieces, mesh, mesh_dim, group_src=group_src)
    return unpad(output, dim, pads[index]).contiguous()


def _group(mesh: DeviceMesh, mesh_dim: int | str, group_src: int) -> tuple[dist.ProcessGroup, int, int]:
    """Return the process group along the dim, its size, and this rank's position in it."""
    axis, here = along(mesh, mesh_dim)
    parts = here.mesh.size
    if not 0 <= group_src < parts:
        problem, needed = f"group_src={group_src} along {axis!r} of {mesh}", f"a rank along it, from 0 to {parts - 1}"
        raise MeshError(problem, needed, "correct it")
    return here.groups[axis], parts, here.coordinate[axis]


def _buffer(tensor: Tensor, async_op: bool, name: str) -> Tensor:
    """Return `tensor` if it is contiguous, else a contiguous copy, which process groups require."""
    if async_op and not tensor.is_contiguous():
        problem = f"{name} of shape {list(tensor.shape)} and stride {list(tensor.stride())} with async_op"
        raise LayoutError(problem, "a contiguous tensor", f"pass {name}.contiguous(), or async_op=False")
    return tensor.contiguous()


def _check_pieces(pieces: Sequence[Tensor], output: Tensor, parts: int) -> None:
    if len(pieces) != parts:
        raise LayoutError(f"a scatter_list of {len(pieces)} tensors", f"{parts}: one for each rank along the dim")
    for index, piece in enumerate(pieces):
        if piece.shape != output.shape or piece.dtype != output.dtype:
            problem = f"scatter_list[{index}] of shape {list(piece.shape)} and {piece.dtype}"
            needed = f"the shape {list(output.shape)} and {output.dtype} of output"
            raise LayoutError(problem, needed, "pad uneven pieces, as wholestep.collectives.split does")
