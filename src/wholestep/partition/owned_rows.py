"""Exchanges with owners: sums go to the rank that owns a tensor, and what it makes of it comes back to all.

A row has the tensors of all owners, one owner after the other. Each rank sends the part of each owner there and adds up
what it receives (an all-to-all, as a reduce-scatter into parts of any size), or receives the part of each owner. So a
rank sends (n-1)/n of the row, whatever each of `n` owners has in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..graph import meta
from ..graph.meta import TensorMeta, contiguous, one_tensor
from ..graph.op_kinds import BUCKET_COPIES, FREE, priced_like
from ..graph.owned import picks_own
from ..graph.storage import shares
from ..layout import OfOwner

funcol = torch.ops._c10d_functional
Call = Callable[[Any, tuple[Any, ...], TensorMeta, Node], Node]
"""Writes a call: of a function, with these arguments, with this result, like another node."""


# -- functions of local graphs --------------------------------------------------------------------------
@priced_like(BUCKET_COPIES)
def join_by_owner(pieces: Sequence[Tensor], owners: Sequence[int]) -> Tensor:
    """All pieces in one row: first those of the first owner."""
    order = sorted(range(len(pieces)), key=owners.__getitem__)
    return torch.cat([pieces[i].reshape(-1) for i in order])


@priced_like(BUCKET_COPIES)
@picks_own
def own_row(pieces: Sequence[Tensor], parts: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What this rank owns, in one row, once for each of `parts` ranks. A rank is given its own pieces alone."""
    if not pieces:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.cat([piece.reshape(-1) for piece in pieces] * parts)


@priced_like(FREE)
@shares("view")
def part_of_row(row: Tensor, start: int, shape: Sequence[int]) -> Tensor:
    """The tensor of this shape that begins at `start` of a row; a view."""
    return row.narrow(0, start, prod(shape)).view(shape)


def add_parts(value: Tensor, parts: int, op: str, out: Tensor | None = None) -> Tensor:
    """The sum, average or extreme of the parts that came from all ranks, in the order of the ranks."""
    rows = value.view(parts, value.shape[0] // parts, *value.shape[1:])
    if op in ("max", "min"):
        return rows.amax(0) if op == "max" else rows.amin(0)
    total = torch.add(rows[0], rows[1], out=out)
    for row in rows[2:]:
        total += row
    return total.div_(parts) if op == "avg" else total


# -- their nodes ----------------------------------------------------------------------------------------------
def places(pieces: Sequence[Node], owners: Sequence[int], parts: int) -> tuple[tuple[int, ...], list[int]]:
    """The elements that each owner has in a row, and for each piece its start in the part of its owner."""
    sizes, starts = [0] * parts, list[int]()
    for piece, at in zip(pieces, owners, strict=True):
        starts.append(sizes[at])
        sizes[at] += one_tensor(piece).numel
    return tuple(sizes), starts


def start_sums(call: Call, pieces: Sequence[Node], owners: Sequence[int], parts: int, axis: str) -> Node:
    """Send partial values to their owners."""
    (sizes, _), tensor = places(pieces, owners, parts), one_tensor(pieces[0])
    row = _everywhere(call(join_by_owner, (list(pieces), list(owners)), contiguous([sum(sizes)], tensor), pieces[0]))
    args = row, [OfOwner(axis, sizes)] * parts, list(sizes), axis
    return call(funcol.all_to_all_single.default, args, contiguous([sizes[0] * parts], tensor), row)


def add_sums(call: Call, received: Node, parts: int, op: str) -> Node:
    """Add up what `start_sums` has sent, once it is waited for: a row of what this rank owns."""
    tensor = one_tensor(received)
    return call(add_parts, (received, parts, op), contiguous([tensor.numel // parts], tensor), received)


def start_spread(call: Call, pieces: Sequence[Node], owners: Sequence[int], parts: int, axis: str) -> Node:
    """Send what owners have to all ranks."""
    (sizes, _), tensor = places(pieces, owners, parts), one_tensor(pieces[0])
    args = list(pieces), parts, tensor.dtype, torch.device(tensor.device)
    row = _everywhere(call(own_row, args, contiguous([sizes[0] * parts], tensor), pieces[0]))
    args = row, list(sizes), [OfOwner(axis, sizes)] * parts, axis
    return call(funcol.all_to_all_single.default, args, contiguous([sum(sizes)], tensor), row)


def _everywhere(node: Node) -> Node:
    meta.set_owner(node, None)
    meta.set_strided(node, False)
    return node
