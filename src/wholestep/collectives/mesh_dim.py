"""Scatter and broadcast from one rank to those along a dim of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import LayoutError, MeshError
from .mesh_position import axis_of, place
from .padding import checked_dim, split, unpad


def mesh_scatter(
    output: Tensor,
    scatter_list: Sequence[Tensor] | None,
    mesh: DeviceMesh,
    mesh_dim: int | str = 0,
    async_op: bool = False,
    *,
    group_src: int = 0,
) -> dist.Work | None:
    """Write into `output` this rank's tensor of the `scatter_list` of the source, along one dim of the mesh.

    Each line of ranks along `mesh_dim` has a source of its own: its first rank, or number `group_src` of it. All
    tensors have the shape of `output`: uneven pieces are padded first, see `split`. On `meta` nothing happens.

    Args:
        output: what is written, on every rank.
        scatter_list: a tensor for each rank along the dim; read on the source alone.
        mesh: the ranks.
        mesh_dim: number or name of the dim.
        async_op: return the work, to be waited for, in place of waiting; `output` must be contiguous then.
        group_src: which rank along the dim the tensors come from.

    Example:
        >>> output = torch.empty(2)
        >>> work = collectives.mesh_scatter(output, [torch.ones(2)], devices, "dp")

    Raises:
        LayoutError: the list does not have one tensor like `output` for each rank.
        MeshError: this rank, the dim or the source is no part of the mesh.
    """
    if output.is_meta:
        return None
    group, parts, index = _group(mesh, mesh_dim, group_src)
    pieces: list[Tensor] | None = None
    if index == group_src:
        pieces = [piece.contiguous() for piece in scatter_list or ()]
        _check_pieces(pieces, output, parts)
    landing = _landing(output, async_op, "output")
    work = cast(dist.Work | None, dist.scatter(landing, pieces, group=group, async_op=async_op, group_src=group_src))
    if landing is not output:
        output.copy_(landing)
    return work


def mesh_broadcast(
    tensor: Tensor, mesh: DeviceMesh, mesh_dim: int | str = 0, async_op: bool = False, *, group_src: int = 0
) -> dist.Work | None:
    """Give `tensor` on all ranks along one dim of the mesh the values it has on the source.

    The source is the first rank along the dim, or number `group_src`. On `meta` nothing happens. With `async_op`, the
    work is returned, to be waited for; `tensor` must be contiguous then.

    Example:
        >>> weights = torch.ones(3)
        >>> work = collectives.mesh_broadcast(weights, devices, "dp")

    Raises:
        LayoutError: `tensor` is not contiguous, with `async_op`.
        MeshError: this rank, the dim or the source is no part of the mesh.
    """
    if tensor.is_meta:
        return None
    group, _, _ = _group(mesh, mesh_dim, group_src)
    landing = _landing(tensor, async_op, "tensor")
    if landing is not tensor:
        landing.copy_(tensor)
    work = cast(dist.Work | None, dist.broadcast(landing, group=group, async_op=async_op, group_src=group_src))
    if landing is not tensor:
        tensor.copy_(landing)
    return work


def shard_dim_scatter(
    tensor: Tensor, dim: int, mesh: DeviceMesh, mesh_dim: int | str = 0, *, group_src: int = 0
) -> Tensor:
    """This rank's piece of the source's `tensor`, cut along `dim` over the ranks along `mesh_dim`.

    Every rank gives a tensor of the same shape; only the source's values count. Sizes that do not divide are cut as
    `torch.chunk` cuts; the last ranks may get an empty piece.

    Example:
        >>> rows = collectives.shard_dim_scatter(torch.ones(11, 6), 0, devices, "dp")

    Raises:
        LayoutError: the tensor has no such dim.
        MeshError: this rank, the mesh dim or the source is no part of the mesh.
    """
    dim = checked_dim(tensor, dim)
    _, parts, index = _group(mesh, mesh_dim, group_src)
    pieces, pads = split(tensor.detach(), dim, parts)
    output = torch.empty_like(pieces[index])
    mesh_scatter(output, pieces, mesh, mesh_dim, group_src=group_src)
    return unpad(output, dim, pads[index]).contiguous()


def _group(mesh: DeviceMesh, mesh_dim: int | str, group_src: int) -> tuple[dist.ProcessGroup, int, int]:
    """The process group along the dim, its number of ranks, and this rank's number."""
    here = place(mesh)
    axis = axis_of(here, mesh, mesh_dim)
    parts = here.mesh.axis_size(axis)
    if not 0 <= group_src < parts:
        raise MeshError(
            f"group_src={group_src} along {axis!r} of {mesh}", f"a rank along it, from 0 to {parts - 1}", "correct it"
        )
    return here.groups[axis], parts, here.coordinate[axis]


def _landing(tensor: Tensor, async_op: bool, name: str) -> Tensor:
    """Contiguous memory like `tensor`, itself if it is: what process groups write into."""
    if tensor.is_contiguous():
        return tensor
    if async_op:
        raise LayoutError(
            f"{name} of shape {list(tensor.shape)} and stride {list(tensor.stride())} with async_op",
            "a contiguous tensor",
            f"give {name}.contiguous(), or wait for it: async_op=False",
        )
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _check_pieces(pieces: Sequence[Tensor], output: Tensor, parts: int) -> None:
    if len(pieces) != parts:
        raise LayoutError(f"a scatter_list of {len(pieces)} tensors", f"{parts}: one for each rank along the dim")
    for index, piece in enumerate(pieces):
        if piece.shape != output.shape or piece.dtype != output.dtype:
            raise LayoutError(
                f"scatter_list[{index}] of shape {list(piece.shape)} and {piece.dtype}",
                f"the shape {list(output.shape)} and {output.dtype} of output",
                "pad uneven pieces, as wholestep.collectives.split does",
            )
