"""Resharding on process groups."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..backend.eager import eager
from ..backend.gloo.exchange import exchanges
from ..backend.protocol import Run
from ..backend.rank_binding import bind
from ..dtensor import layout_from
from ..errors import LayoutError
from ..layout import Layout
from ..mesh import Mesh
from .mesh_position import MeshPosition, place
from .reshard_graph import program, route

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
    placed, whole = place(mesh), tuple(shape)
    return move(tensor, _layout(source, placed.mesh, whole), _layout(target, placed.mesh, whole), placed, whole)


def move(tensor: Tensor, source: Layout, target: Layout, placed: MeshPosition, shape: tuple[int, ...]) -> Tensor:
    """`reshard`, for layouts on the mesh of `placed`."""
    mesh = placed.mesh
    path = route(source, target, shape, tensor.dtype, mesh)
    wanted = path.layouts[0].local_shape(shape, mesh, placed.coordinate)
    if tuple(tensor.shape) != wanted:
        raise LayoutError(
            f"a local tensor of shape {list(tensor.shape)} at {dict(placed.coordinate)} of mesh {mesh}",
            f"{list(wanted)}: the shard of {list(shape)} with layout {source.show(shape)}",
            "pass this rank's shard, unpadded, and the shape of the whole tensor",
        )
    if tensor.is_meta:
        return tensor.new_empty(path.layouts[-1].local_shape(shape, mesh, placed.coordinate))
    key = (source, target, shape, tensor.dtype, str(tensor.device), mesh)
    names = tuple((axis, group.group_name) for axis, group in placed.groups.items())
    made = _runner(key, names, tuple(placed.coordinate.items()))([tensor.detach().contiguous()])[0]
    made = cast(Tensor, made).contiguous()
    shared = made.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return made.clone() if shared else made


_Key = tuple[Layout, Layout, tuple[int, ...], torch.dtype, str, Mesh]


@lru_cache(maxsize=4096)
def _runner(key: _Key, groups: tuple[tuple[str, str], ...], coordinate: tuple[tuple[str, int], ...]) -> Run:
    return eager(bind(program(*key), dict(coordinate), dict(groups), exchange=exchanges(key[4])))


def _layout(given: Placed, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    return given if isinstance(given, Layout) else layout_from(given, len(shape), mesh)
