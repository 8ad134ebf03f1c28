"""The numbers of micro-batches that a search tries."""

from __future__ import annotations

from ..tuning import TUNING


def piece_counts(rows: int) -> list[int]:
    """The numbers of pieces that are tried for `rows` samples of a rank, growing: those that divide it, and where the
    next one is more than twice the last, as many as `torch.chunk` makes of twice the last.

    Example:
        >>> piece_counts(12), piece_counts(13)
        ([2, 3, 4, 6, 12], [2, 4, 7, 13])
    """
    counts, last = list[int](), 1
    while last < rows:
        least = max(round(last * TUNING.pieces_growth), last + 1)
        dividing = (n for n in range(least, min(2 * last, rows) + 1) if rows % n == 0)
        last = next(dividing, -(-rows // -(-rows // (2 * last))))
        counts.append(last)
    return counts
