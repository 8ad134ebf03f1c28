"""From one layout to another on real process groups."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..backend.eager import eager
from ..backend.gloo.collectives import exchanges
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
    """This rank's piece of a tensor laid out as `target`, from its piece laid out as `source`.

    Takes the cheapest collectives: nothing is sent where a rank has all it needs, nor along a dim of `mesh` of one
    rank; between two sharded dims it is one all-to-all. All ranks of `mesh` must call it alike. The result is
    contiguous and shares no memory with `tensor`; gradients do not flow through. From `meta` comes a tensor on `meta`.

    Args:
        tensor: this rank's piece; sizes that do not divide are cut as `torch.chunk` cuts them, without padding.
        source: how the tensor is laid out: a `Layout` of the axes of `mesh`, or placements as
            `[Shard(0), Replicate()]`, one for each dim of `mesh`.
        target: how it shall be.
        mesh: the ranks.
        shape: of the whole tensor.

    Example:
        >>> rows = collectives.reshard(torch.ones(11, 6), [Replicate()], [Shard(0)], devices, shape=(11, 6))

    Raises:
        LayoutError: the piece has another shape than `source` gives it, a layout does not fit, or the values cannot
            become `target` (shards never become partial values).
        MeshError: this rank is no part of `mesh`.
    """
    here, whole = place(mesh), tuple(shape)
    return move(tensor, _layout(source, here.mesh, whole), _layout(target, here.mesh, whole), here, whole)


def move(tensor: Tensor, source: Layout, target: Layout, here: MeshPosition, shape: tuple[int, ...]) -> Tensor:
    """`reshard`, for layouts on the mesh of `here`."""
    path = route(source, target, shape, tensor.dtype, here.mesh)
    wanted = path.layouts[0].local_shape(shape, here.mesh, here.coordinate)
    if tuple(tensor.shape) != wanted:
        raise LayoutError(
            f"a piece of shape {list(tensor.shape)} at {dict(here.coordinate)} of mesh {here.mesh}",
            f"{list(wanted)}: the piece of {list(shape)} laid out as {source.show(shape)}",
            "give this rank's piece, unpadded, and the shape of the whole tensor",
        )
    if tensor.is_meta:
        return tensor.new_empty(path.layouts[-1].local_shape(shape, here.mesh, here.coordinate))
    key = (source, target, shape, tensor.dtype, str(tensor.device), here.mesh)
    names = tuple((axis, group.group_name) for axis, group in here.groups.items())
    made = _runner(key, names, tuple(here.coordinate.items()))([tensor.detach().contiguous()])[0]
    made = cast(Tensor, made).contiguous()
    shared = made.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return made.clone() if shared else made


_Key = tuple[Layout, Layout, tuple[int, ...], torch.dtype, str, Mesh]


@lru_cache(maxsize=4096)
def _runner(key: _Key, groups: tuple[tuple[str, str], ...], coordinate: tuple[tuple[str, int], ...]) -> Run:
    """The program of a reshard, compiled for one rank."""
    return eager(bind(program(*key), dict(coordinate), dict(groups), exchange=exchanges(key[4])))


def _layout(given: Placed, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    return given if isinstance(given, Layout) else layout_from(given, len(shape), mesh)
