"""Pieces of equal size out of a dim that does not divide: rows of zeros go in before a collective and out after it."""

from __future__ import annotations

from torch import Tensor

from ..errors import LayoutError
from ..layout import chunk_range
from ..partition.rank_ops import cut_to, pad_to


def split(tensor: Tensor, dim: int, parts: int, padded: bool = True) -> tuple[list[Tensor], list[int]]:
    """Cut `dim` as `torch.chunk` cuts, into exactly `parts` pieces; the last ones may be short or empty.

    Returns the pieces, contiguous, and how many rows each lacks to be as long as the first; with `padded` it has them,
    as zeros.

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
    """`tensor` with `rows` entries of zeros appended along `dim`; itself where there are none to append.

    Example:
        >>> collectives.pad(torch.ones(3, 2), 0, 1).shape
        torch.Size([4, 2])

    Raises:
        LayoutError: the tensor has no such dim, or `rows` is negative.
    """
    dim = checked_dim(tensor, dim)
    _checked_rows(rows, tensor, dim, at_most=None)
    return pad_to(tensor, dim, tensor.shape[dim] + rows, 1)


def unpad(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """`tensor` without the last `rows` entries along `dim`: a view.

    Example:
        >>> collectives.unpad(torch.ones(4, 2), 0, 1).shape
        torch.Size([3, 2])

    Raises:
        LayoutError: the tensor has no such dim, or not so many entries.
    """
    dim = checked_dim(tensor, dim)
    _checked_rows(rows, tensor, dim, at_most=tensor.shape[dim])
    return cut_to(tensor, dim, tensor.shape[dim] - rows)


def checked_dim(tensor: Tensor, dim: int) -> int:
    """`dim` counted from the front; LayoutError where the tensor has no such dim."""
    ndim = tensor.dim()
    if not -ndim <= dim < ndim:
        raise LayoutError(
            f"dim {dim} of a tensor of shape {list(tensor.shape)}",
            f"a dim from {-ndim} to {ndim - 1}" if ndim else "a tensor that has dims",
        )
    return dim % ndim


def _checked_rows(rows: int, tensor: Tensor, dim: int, at_most: int | None) -> None:
    if rows < 0 or (at_most is not None and rows > at_most):
        raise LayoutError(
            f"{rows} rows of padding in dim {dim} of a tensor of shape {list(tensor.shape)}",
            "0 or more" if at_most is None else f"from 0 to {at_most}",
        )
