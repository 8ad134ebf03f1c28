"""Padding of uneven shards to equal sizes before a collective, and its removal."""

from __future__ import annotations

from torch import Tensor

from ..errors import LayoutError
from ..layout import chunk_range
from ..partition.rank_ops import cut_to, pad_to


def split(tensor: Tensor, dim: int, parts: int, padded: bool = True) -> tuple[list[Tensor], list[int]]:
    """Split `dim` as `torch.chunk` does, into exactly `parts` pieces; the last ones may be shorter or empty.

    Returns the contiguous pieces, and for each the number of rows that it is shorter than the first; with `padded`,
    zeros fill these rows.

    Example:
        >>> pieces, pads = split(torch.ones(11, 2), 0, 8)
        >>> pads
        [0, 0, 0, 0, 0, 1, 2, 2]

    Raises:
        LayoutError: the tensor has no such dim, or there are no parts.
    """
    dim = checked_dim(tensor, dim)
    if parts < 1:
        raise LayoutError(f"{parts} parts of dim {dim}", "at least one part")
    size = tensor.shape[dim]
    ranges = [chunk_range(size, parts, index) for index in range(parts)]
    longest = ranges[0][1]
    pieces = [tensor.narrow(dim, start, length) for start, length in ranges]
    if padded:
        pieces = [pad_to(piece, dim, longest, 1) for piece in pieces]
    return [piece.contiguous() for piece in pieces], [longest - length for _, length in ranges]


def pad(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """Append `rows` entries of zeros along `dim`; returns `tensor` itself for 0 rows.

    Example:
        >>> collectives.pad(torch.ones(3, 2), 0, 1).shape
        torch.Size([4, 2])

    Raises:
        LayoutError: the tensor has no such dim, or `rows` is negative.
    """
    dim = checked_dim(tensor, dim)
    _check_rows(rows, tensor, dim)
    return pad_to(tensor, dim, tensor.shape[dim] + rows, 1)


def unpad(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """Remove the last `rows` entries along `dim`; returns a view.

    Example:
        >>> collectives.unpad(torch.ones(4, 2), 0, 1).shape
        torch.Size([3, 2])

    Raises:
        LayoutError: the tensor has no such dim, or too few entries.
    """
    dim = checked_dim(tensor, dim)
    _check_rows(rows, tensor, dim, at_most=tensor.shape[dim])
    return cut_to(tensor, dim, tensor.shape[dim] - rows)


def checked_dim(tensor: Tensor, dim: int) -> int:
    """Return `dim` as a non-negative number; raise LayoutError if the tensor has no such dim."""
    ndim = tensor.dim()
    if not -ndim <= dim < ndim:
        needed = f"a dim from {-ndim} to {ndim - 1}" if ndim else "a tensor with dims"
        raise LayoutError(f"dim {dim} of a tensor of shape {list(tensor.shape)}", needed)
    return dim % ndim


def _check_rows(rows: int, tensor: Tensor, dim: int, at_most: int | None = None) -> None:
    if rows < 0 or (at_most is not None and rows > at_most):
        problem = f"{rows} rows of padding in dim {dim} of a tensor of shape {list(tensor.shape)}"
        raise LayoutError(problem, "0 or more" if at_most is None else f"from 0 to {at_most}")
