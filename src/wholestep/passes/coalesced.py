"""Several tensors in one collective without copies: each is sent from where it is, and received next to the others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from .. import _torch
from ..graph.op_kinds import FREE, collective, priced_like
from ..graph.storage import shares

funcol = torch.ops._c10d_functional
ALIGNED_BYTES = 512
"""Tensors in one row start at multiples of this, as CUDA's allocator aligns them: kernels and links read fastest so."""


def starts_in_row(sizes: Sequence[int], itemsize: int) -> list[int]:
    """Where tensors of so many elements start in one row, and behind them the length of the row."""
    unit = max(ALIGNED_BYTES // itemsize, 1)
    return list(accumulate((-(-size // unit) * unit for size in sizes), initial=0))


def shapes_of(outlines: Sequence[Tensor | tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The shapes of `outlines`, tensors on `meta` where they are known at run time only."""
    return [tuple(o.shape) if isinstance(o, Tensor) else o for o in outlines]


# Functions that graphs call.
@priced_like(FREE)
@shares("all")
def coalesce(pieces: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that one collective sends."""
    return [piece.contiguous() for piece in pieces]


@priced_like(FREE)
@shares("view")
def part_of_coalesced_gather(
    row: Tensor, outlines: Sequence[Tensor | tuple[int, ...]], number: int, parts: int
) -> Tensor:
    """Tensor `number` of those that were gathered into `row`; `outlines` are the shapes of the pieces sent."""
    return _part(row, tuple((parts * s[0], *s[1:]) for s in shapes_of(outlines)), number)


@priced_like(FREE)
@shares("view")
def part_of_coalesced_scatter(
    row: Tensor, outlines: Sequence[Tensor | tuple[int, ...]], number: int, parts: int
) -> Tensor:
    """This rank's piece of tensor `number` of those that were reduced into `row`; `outlines` are their shapes."""
    return _part(row, tuple((s[0] // parts, *s[1:]) for s in shapes_of(outlines)), number)


def _part(row: Tensor, shapes: tuple[tuple[int, ...], ...], number: int) -> Tensor:
    start, size = _places(shapes, row.itemsize)[number]
    return row.narrow(0, start, size).view(shapes[number])


@lru_cache(maxsize=4096)
def _places(shapes: tuple[tuple[int, ...], ...], itemsize: int) -> tuple[tuple[int, int], ...]:
    sizes = [prod(shape) for shape in shapes]
    return tuple(zip(starts_in_row(sizes, itemsize), sizes, strict=False))


# What calls them in a graph that is bound to a rank.
@collective("all_gather")
def gather_coalesced(pieces: Sequence[Tensor], parts: int, group: str) -> Tensor:
    """All-gather each of `pieces`; the results lie in one row (`starts_in_row`), for which a wait waits."""
    row, received = _row(pieces, tuple((parts * piece.shape[0], *piece.shape[1:]) for piece in pieces))
    return _torch.start_coalesced_gather(pieces, received, row, group)


@collective("reduce_scatter")
def scatter_coalesced(pieces: Sequence[Tensor], op: str, parts: int, group: str) -> Tensor:
    """Reduce and scatter each of `pieces` along its first dim, as `gather_coalesced`."""
    row, received = _row(pieces, tuple((piece.shape[0] // parts, *piece.shape[1:]) for piece in pieces))
    return _torch.start_coalesced_scatter(pieces, received, row, op, group)


COALESCED = {
    funcol.all_gather_into_tensor.default: gather_coalesced,
    funcol.reduce_scatter_tensor.default: scatter_coalesced,
}


def _row(pieces: Sequence[Tensor], shapes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, list[Tensor]]:
    row = pieces[0].new_empty(starts_in_row(list(map(prod, shapes)), pieces[0].itemsize)[-1])
    return row, [_part(row, shapes, number) for number in range(len(shapes))]
