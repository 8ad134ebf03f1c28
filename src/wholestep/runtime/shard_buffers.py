"""Stores the shards of one all-gather side by side in memory, so that no copy is needed to send them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..graph.graph import LocalGraph
from ..passes.contiguous_shards import buckets


def pack_buckets(local: LocalGraph, held: Sequence[Tensor]) -> None:
    """Move the shards of each bucket into one buffer; `held` are the first inputs of `local`.

    The tensors stay the same objects. A bucket with a shard that is a view of a larger buffer stays where it is, as
    after another program of the same step has moved it: `side_by_side` copies then.
    """
    for numbers in buckets(local):
        pieces = [held[number] for number in numbers]
        if all(_alone(piece) for piece in pieces):
            with torch.no_grad():
                _move(pieces)


def _alone(piece: Tensor) -> bool:
    return piece.is_contiguous() and piece.untyped_storage().nbytes() == piece.nbytes


def _move(pieces: Sequence[Tensor]) -> None:
    whole = torch.cat([piece.reshape(-1) for piece in pieces])
    start = 0
    for piece in pieces:
        shape, stride = piece.shape, piece.stride()
        piece.set_(whole.untyped_storage(), start, shape, stride)  # pyright: ignore[reportUnknownMemberType]
        start += piece.numel()
