"""The few functions in a local graph that depend on the rank. Until it is bound, `coordinate` names a mesh axis."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from ..layout import chunk_range


def take_chunk(x: Tensor, dim: int, parts: int, coordinate: int) -> Tensor:
    """Piece `coordinate` of `parts` along `dim`, as torch.chunk cuts; a view."""
    start, length = chunk_range(x.shape[dim], parts, coordinate)
    return x.narrow(dim, start, length)


def trim_chunk(x: Tensor, dim: int, size: int, parts: int, coordinate: int) -> Tensor:
    """`x`, padded to the largest piece of a dim of `size`, cut to the length of piece `coordinate`; a view."""
    return x.narrow(dim, 0, chunk_range(size, parts, coordinate)[1])


def pad_to(x: Tensor, dim: int, size: int) -> Tensor:
    """`x` with zeros appended along `dim` up to `size`; `x` itself where it is long enough."""
    missing = size - x.shape[dim]
    return pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x


def only_first(x: Tensor, coordinate: int) -> Tensor:
    """`x` on the first rank of the axis, zeros elsewhere: a replicated value as a sum over ranks."""
    return x if coordinate == 0 else x.new_zeros(x.shape)


RANK_DEPENDENT = (take_chunk, trim_chunk, only_first)
MAY_ALIAS = (take_chunk, trim_chunk, pad_to, only_first)
