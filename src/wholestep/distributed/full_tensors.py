"""From shards to whole tensors and back, many at a time: one all-gather for all tensors sharded along an axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .. import _torch, dtensor
from ..collectives.mesh_position import MeshPosition, place
from ..layout import REPLICATED, Layout, cut
from ..tuning import TUNING
from .activity import ACTIVITY

funcol = torch.ops._c10d_functional


def put_piece(target: DTensor, full: Tensor) -> None:
    """Copy this rank's piece of `full` into `target`, where it differs."""
    copy(_torch.local_tensor(target), own_piece(target, full))


def own_piece(target: DTensor, full: Tensor) -> Tensor:
    """This rank's piece of `full`, laid out as `target`, which has this shape."""
    here = place(target.device_mesh)
    return cut(full, dtensor.layout_from(target.placements, target.dim(), here.mesh), here.mesh, here.coordinate)


def copy(target: Tensor, source: Tensor) -> None:
    """Copy values where they differ: an expanded buffer cannot be written, and does not change."""
    if not torch.equal(target, source.to(target.device)):
        target.copy_(source)


@dataclass
class _Part:
    """A tensor that is being gathered: this rank's part so far, and its layout."""

    piece: Tensor
    layout: Layout
    shape: tuple[int, ...]

    def next(self) -> tuple[str, int] | None:
        """The axis to gather along next, and the dim that it shards: the innermost axis of a dim comes first."""
        return next(((axes[-1], dim) for dim, axes in enumerate(self.layout.dims) if axes), None)


@torch.no_grad()
def gather(tensors: Iterable[Tensor], at_home: bool = False) -> dict[int, Tensor]:
    """By identity, each of these tensors that is a DTensor, gathered, in memory of its own: on the device of its mesh,
    or with `at_home` on that of its shard. All ranks call it with the same tensors.
    """
    pieces = list({id(tensor): tensor for tensor in tensors if isinstance(tensor, DTensor)}.values())
    with ACTIVITY.waiting("the gathering of whole tensors"):
        return _gathered(pieces, at_home)


def _gathered(pieces: Sequence[DTensor], at_home: bool) -> dict[int, Tensor]:
    places = {tensor.device_mesh: place(tensor.device_mesh) for tensor in pieces}
    out: dict[int, Tensor] = {}
    for batch in _bounded(pieces):
        parts: list[_Part] = []
        for tensor in batch:
            layout = dtensor.layout_from(tensor.placements, tensor.dim(), places[tensor.device_mesh].mesh)
            piece = _torch.local_tensor(tensor).to(tensor.device_mesh.device_type)
            piece, layout = _from_owner(piece, layout, tuple(tensor.shape), places[tensor.device_mesh])
            parts.append(_Part(piece, layout, tuple(tensor.shape)))
        while any(part.next() for part in parts):
            buckets = defaultdict[tuple[DeviceMesh, str, torch.dtype], list[tuple[_Part, int]]](list)
            for part, tensor in zip(parts, batch, strict=True):
                if (upcoming := part.next()) is not None:
                    buckets[tensor.device_mesh, upcoming[0], part.piece.dtype].append((part, upcoming[1]))
            for (devices, axis, _), bucket in buckets.items():
                _join(bucket, axis, places[devices])
        out |= {id(tensor): _own(part.piece, tensor, at_home) for part, tensor in zip(parts, batch, strict=True)}
    return out


def _from_owner(piece: Tensor, layout: Layout, shape: tuple[int, ...], here: MeshPosition) -> tuple[Tensor, Layout]:
    """What an owner has, on all ranks."""
    for axis, owner in layout.owned:
        if not layout.is_held_at(here.coordinate):
            piece = piece.new_empty(layout.local_shape(shape, here.mesh, here.coordinate))
        sent = funcol.broadcast(piece.contiguous(), owner, here.groups[axis].group_name)
        piece, layout = funcol.wait_tensor(sent), layout.put(axis, REPLICATED)
    return piece, layout


def _own(full: Tensor, tensor: DTensor, at_home: bool) -> Tensor:
    piece = _torch.local_tensor(tensor)
    full = full.to(piece.device) if at_home else full
    return full.clone() if full.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr() else full


def _bounded(tensors: Sequence[DTensor]) -> list[list[DTensor]]:
    """In groups of so many bytes, larger tensors alone."""
    out, room = list[list[DTensor]](), 0
    for tensor in tensors:
        if room < tensor.nbytes or not out:
            out.append([])
            room = TUNING.gathered_piece_bytes
        out[-1].append(tensor)
        room -= tensor.nbytes
    return out


def _join(parts: Sequence[tuple[_Part, int]], axis: str, here: MeshPosition) -> None:
    """All-gather the shards of a dim of each part along `axis`, padded to the length of the first, the longest."""
    ranks, pieces, ends = here.mesh.axis_size(axis), list[Tensor](), list[tuple[Layout, int]]()
    for part, dim in parts:
        dims = part.layout.dims
        after = Layout((*dims[:dim], dims[dim][:-1], *dims[dim + 1 :]), part.layout.partial)
        length = after.local_shape(part.shape, here.mesh, here.coordinate)[dim]
        padded = list(part.piece.shape)
        padded[dim] = -(-length // ranks)
        piece = part.piece
        if padded != list(piece.shape):
            piece = piece.new_zeros(padded)
            piece.narrow(dim, 0, part.piece.shape[dim]).copy_(part.piece)
        pieces.append(piece)
        ends.append((after, length))
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    got = funcol.wait_tensor(funcol.all_gather_into_tensor(sent, ranks, here.groups[axis].group_name))
    several = got.view(ranks, -1).split([piece.numel() for piece in pieces], 1)
    for (part, dim), piece, (after, length), rows in zip(parts, pieces, ends, several, strict=True):
        joined = rows.reshape(ranks, *piece.shape).movedim(0, dim).flatten(dim, dim + 1)
        part.piece, part.layout = joined.narrow(dim, 0, length).contiguous(), after
