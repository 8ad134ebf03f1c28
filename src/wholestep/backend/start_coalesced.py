"""Collectives that carry several tensors without copies, as a bound graph calls them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from .. import _torch
from ..graph.op_kinds import collective
from ..passes.coalesced import starts_in_row

funcol = torch.ops._c10d_functional


@collective("all_gather")
def gather_coalesced(pieces: Sequence[Tensor], parts: int, group: str) -> Tensor:
    """All-gather each of `pieces`; the results lie in one row (`starts_in_row`), for which a wait waits."""
    row, received = _row(pieces, [(parts * piece.shape[0], *piece.shape[1:]) for piece in pieces])
    return _torch.start_coalesced_gather(pieces, received, row, group)


@collective("reduce_scatter")
def scatter_coalesced(pieces: Sequence[Tensor], op: str, parts: int, group: str) -> Tensor:
    """Reduce and scatter each of `pieces` along its first dim, as `gather_coalesced`."""
    row, received = _row(pieces, [(piece.shape[0] // parts, *piece.shape[1:]) for piece in pieces])
    return _torch.start_coalesced_scatter(pieces, received, row, op, group)


COALESCED = {
    funcol.all_gather_into_tensor.default: gather_coalesced,
    funcol.reduce_scatter_tensor.default: scatter_coalesced,
}


def _row(pieces: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, list[Tensor]]:
    sizes = [prod(shape) for shape in shapes]
    starts = starts_in_row(sizes, pieces[0].itemsize)
    row = pieces[0].new_empty(starts[-1])
    places = zip(starts, sizes, shapes, strict=False)
    return row, [row.narrow(0, start, size).view(shape) for start, size, shape in places]
