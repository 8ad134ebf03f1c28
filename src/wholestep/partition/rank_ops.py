"""Functions of local graphs, some rank-dependent: before binding, their argument `coordinate` is a mesh axis's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..graph.meta import with_stride
from ..graph.op_kinds import FREE, READS_A_PART, priced_like
from ..graph.owned import asks_owner
from ..graph.storage import shares
from ..layout import chunk_range, has_extent
from ..rules.registry import draws
from .accumulators import kept_piece, put_piece
from .host_copies import HOST_COPIES
from .owned_rows import part_of_row


@priced_like(FREE)
@shares("view")
def take_chunk(x: Tensor, dim: int, parts: int, coordinate: int) -> Tensor:
    """Return piece `coordinate` of `parts` along `dim`, as torch.chunk does; a view."""
    start, length = chunk_range(x.shape[dim], parts, coordinate)
    return x.narrow(dim, start, length)


@priced_like(FREE)
@shares("view")
def take_units(x: Tensor, dim: int, unit: int, parts: int, coordinate: int) -> Tensor:
    """Return piece `coordinate` of `parts` along a dim that is cut between units of `unit` places alone; a view."""
    start, length = chunk_range(x.shape[dim] // unit, parts, coordinate)
    return x.narrow(dim, start * unit, length * unit)


@shares("if alike")
def pad_to(x: Tensor, dim: int, chunk: int, chunks: int) -> Tensor:
    """Pad `dim` with zeros to the length `chunks * chunk`; returns `x` itself if it is long enough."""
    missing = chunk * chunks - x.shape[dim]
    if not missing:
        return x
    return torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim)  # torch pads no symbol


@priced_like(FREE)
@shares("if alike")
def at_least_one(x: Tensor, dim: int) -> Tensor:
    """Return `x`, or one place of zeros along `dim` if it has none: some kernels need one."""
    return x if x.shape[dim] else x.new_zeros((*x.shape[:dim], 1, *x.shape[dim + 1 :]))


def join_exchanged(x: Tensor, parts: int, dim: int, into: int, length: int, size: int) -> Tensor:
    """Reorder the result of an all-to-all and remove its padding.

    Dim 0 of `x` has `parts` pieces of this rank's shard of dim `into`, one for each piece of dim `dim`; the true
    lengths are `length` of `dim` and `size` of `into`.
    """
    rows = x.shape[0] // parts
    split = x.view(parts, rows, *x.shape[1:])  # part, into, the other dims in order
    dims = [d for d in range(x.dim()) if d != into]
    split = split.permute(0, *(1 + (0 if d == into else 1 + dims.index(d)) for d in range(x.dim())))
    joined = split.movedim(0, dim).flatten(dim, dim + 1)
    return joined.narrow(dim, 0, length).narrow(into, 0, size)


def rows_in_parts(x: Tensor, dim: int, lengths: list[int], order: list[int]) -> Tensor:
    """Parts of `dim`, of these lengths, in another order: a contiguous copy with `dim` as its first."""
    parts: tuple[Tensor, ...] = torch.split(x.movedim(dim, 0), lengths)
    return torch.cat([parts[i] for i in order]).contiguous()


@priced_like(FREE)
@shares("if alike")
def after(x: Tensor, done: Tensor) -> Tensor:
    """Return `x`, once `done` is there: what reads `x` does not start earlier."""
    return x


def tokens_first(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values of attention as one contiguous tensor, (tokens, batch, heads, width of both)."""
    return torch.cat([key.movedim(2, 0), value.movedim(2, 0)], -1).contiguous()


def rows_at(x: Tensor, starts: list[int], lengths: list[int]) -> Tensor:
    """Ranges of dim 0 one after another, as a contiguous copy; a range may have rows of another one."""
    return torch.cat([x.narrow(0, start, length) for start, length in zip(starts, lengths, strict=True)]).contiguous()


def range_with_rows(
    x: Tensor, dim: int, start: int, length: int, rows: Tensor, before: int, zeros: Sequence[int] = (0, 0)
) -> Tensor:
    """Return `length` places of `dim` from `start` on, with the first `rows` before them, the others behind them, and
    so many zeros around.
    """
    rows, shape = rows.movedim(0, dim), list(x.shape)
    around = [x.new_zeros([*shape[:dim], n, *shape[dim + 1 :]]) for n in zeros]
    first, others = rows.tensor_split([before], dim)
    return torch.cat([around[0], first, x.narrow(dim, start, length), others, around[1]], dim).contiguous()


def plus_rows(x: Tensor, first: int, size: int, rows: Tensor, starts: list[int], lengths: list[int]) -> Tensor:
    """Return `size` rows of `x` from `first` on, and to these ranges of them add `rows`, of one after another."""
    out = x.narrow(0, first, size).clone()
    parts: tuple[Tensor, ...] = torch.split(rows, lengths)
    for start, part in zip(starts, parts, strict=True):
        out.narrow(0, start, part.shape[0]).add_(part)
    return out


@priced_like(READS_A_PART)
def columns(x: Tensor, start: int, length: int) -> Tensor:
    """A range of the last dim of a mask, as a copy: kernels want each row to begin at a multiple of 16 bytes. A dim
    that repeats one entry still does, and a single column is that of all keys.
    """
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride()[:-1])
    part = x[once] if x.shape[-1] == 1 else x[once].narrow(-1, start, length)
    copy = part.new_zeros((*part.shape[:-1], -(-length // 16) * 16)).narrow(-1, 0, length)
    return copy.copy_(part).expand(*x.shape[:-1], length)


def only_first(x: Tensor, coordinate: int) -> Tensor:
    """Return a contiguous `x` on the first rank of the axis, zeros on others: a replicated value as a partial sum."""
    return x.contiguous() if coordinate == 0 else x.new_zeros(x.shape)


@asks_owner
def share(x: Tensor, owner: int, coordinate: int) -> Tensor:
    """Return a contiguous `x` on the owner's rank of the axis and zeros on others: an owned value as a partial sum."""
    return x.contiguous() if coordinate == owner else x.new_zeros(x.shape)


@shares("if alike")
def contiguous(x: Tensor) -> Tensor:
    """Return `x` if it is contiguous, else a contiguous copy."""
    return x.contiguous()


@priced_like(FREE)  # kernels keep the order that was traced, so that it returns `x`; but none of them promises to
@shares("if alike")
def in_order(x: Tensor, order: list[int], expanded: tuple[int, ...] = ()) -> Tensor:
    """Return `x` dense in memory with dims in `order`, outermost first, and `expanded` dims of stride 0; `x` itself if
    it is.
    """
    back, compact = [order.index(d) for d in range(len(order))], x
    for dim in expanded:
        compact = compact[(slice(None),) * dim + (slice(0, 1),)]
    return compact.permute(order).contiguous().permute(back).expand(x.shape)


@priced_like(FREE)
@shares("view")
def cut_to(x: Tensor, dim: int, size: int) -> Tensor:
    """Return the first `size` entries along `dim`; a view."""
    return x.narrow(dim, 0, size)


def draws_numbers(node: Node) -> bool:
    """True for a node of a local graph that draws random numbers, on a shard or on all of a tensor."""
    return node.op == "call_function" and (draws(node) or node.target is drawn)


def is_ranked(node: Node) -> bool:
    """True for a call with numbers that differ between ranks, or pieces of the batch."""
    return has_extent((node.args, tuple(node.kwargs.values())))


def drawn(piece: int, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a random op on a shard with the shard's own random stream. Its seed is derived from one draw of the default
    CPU generator, so that the generator advances equally on all ranks.
    """
    seed = (int(torch.randint(0, 2**62, ())) + 0x9E3779B97F4A7C15 * (piece + 1)) % 2**63
    outside = torch.get_rng_state()
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    outside_gpu = torch.cuda.get_rng_state() if on_gpu else None
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats the stack for each device that is not there
    if on_gpu:
        torch.cuda.manual_seed(seed)
    try:
        return op(*args, **kwargs)
    finally:
        torch.set_rng_state(outside)
        if outside_gpu is not None:
            torch.cuda.set_rng_state(outside_gpu)


RANK_DEPENDENT = (take_chunk, take_units, only_first, share, put_piece, kept_piece)
MAY_ALIAS = (
    take_chunk, take_units, pad_to, at_least_one, only_first, share, contiguous, in_order, with_stride, cut_to,
    part_of_row, after, *HOST_COPIES,
)  # fmt: skip
