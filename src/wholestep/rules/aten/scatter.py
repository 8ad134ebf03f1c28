"""Reads, writes and sums by index: embedding, gather, scatter.

An indexed dim may be sharded: each rank reads the entries of its piece and zeros for all others, and the result is the
sum over ranks. For sums at indices the added values may be sharded: only one rank starts from the tensor, the others
start from zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..dsl import WHOLE, aten, called, ints, rand, row, sample
from ..registry import Bind, Function


def near(index: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """A mask of the indices in this rank's piece, and their positions in it; 0 for the others."""
    inside = (index >= start) & (index < start + length)
    return inside, torch.where(inside, index - start, 0)


def with_one(piece: Tensor, dim: int) -> Tensor:
    """`piece` with one more entry of zeros along `dim`, for indices outside the piece."""
    shape = list(piece.shape)
    shape[dim] = 1
    return torch.cat([piece, piece.new_zeros(shape)], dim)


# -- embedding ---------------------------------------------------------------------------
def _vocabulary_piece(start: int, length: int, weight: Tensor, indices: Tensor, *rest: Any) -> Tensor:
    inside, at = near(indices, start, length)
    return aten.embedding.default(with_one(weight, 0), torch.where(inside, at, length))


def _vocabulary_gradient(
    start: int, length: int, grad: Tensor, indices: Tensor, count: int, padding: int, by_frequency: bool
) -> Tensor:
    inside, at = near(indices, start, length)
    unread = padding - start if start <= padding < start + length else -1
    index = torch.where(inside, at, length)
    return aten.embedding_dense_backward.default(grad, index, length + 1, unread, by_frequency).narrow(0, 0, length)


row("embedding", "v d, ... -> ... d", linear="0", local={"v": _vocabulary_piece})
# how often an index comes up is counted over all of them
row(
    "embedding_dense_backward",
    "scale_grad_by_freq: ...! d, ...! -> v d | ... d, ... -> v d", linear="0", local={"v": _vocabulary_gradient},
)  # fmt: skip
sample("embedding", lambda: [(rand(10, 8), ints(10, 5, 6)), (rand(5, 3), ints(5, 7), 0)])
sample(
    "embedding_dense_backward",
    lambda: [(rand(5, 6, 8), ints(10, 5, 6), 10, 3, False), (rand(5, 6, 3), ints(7, 5, 6), 7, -1, True)],
)


# -- gather and scatter --------------------------------------------------------------------
def _along(rule: str, **options: Any) -> Function:
    """`rule`; nothing is sharded if the index is empty or of a scalar, with another number of dims."""
    words = Bind(rule, **options)
    return lambda call: words if len({len(found.shape) for found in call.operands}) == 1 else Bind(WHOLE)


def _gather_piece(start: int, length: int, have: Tensor, dim: int, index: Tensor, **rest: Any) -> Tensor:
    inside, at = near(index, start, length)
    return aten.gather.default(with_one(have, dim), dim, torch.where(inside, at, length))


def _on_piece(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`op` on this rank's piece of a sharded dim; writes outside the piece go to an entry that is dropped."""

    def run(start: int, length: int, have: Tensor, dim: int, index: Tensor, *rest: Any, **more: Any) -> Tensor:
        inside, at = near(index, start, length)
        made = op(with_one(have, dim), dim, torch.where(inside, at, length), *rest, **more)
        return made.narrow(dim, 0, length)

    return called(run, op, "in_piece")


def from_first(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`op` on this rank's piece of the added values; only the first rank starts from `have`, others from zeros."""

    def run(start: int, length: int, have: Tensor, *rest: Any, **more: Any) -> Tensor:
        return op(have if start == 0 else torch.zeros_like(have), *rest, **more)

    return called(run, op, "from_first")


# Dims with different sizes in tensor and index stay whole. `a` is the indexed dim.
row("gather")(_along("...? a[dim], ...? j[dim] -> ...? j[dim]", moves="0", local={"a": _gather_piece}))
_WRITES = "...? a[dim], ...? j[dim]!, ...? k[dim]! -> ...? a[dim]"
row("scatter.src")(_along(_WRITES, moves="0+2", local={"a": _on_piece(aten.scatter.src)}))
for _op in (aten.scatter.reduce, aten.scatter_reduce.two):
    row(_op)(_along(_WRITES, local={"a": _on_piece(_op)}))
_WRITES_NUMBER = "...? a[dim], ...? j[dim]! -> ...? a[dim]"
row("scatter.value_reduce")(_along(_WRITES_NUMBER, local={"a": _on_piece(aten.scatter.value_reduce)}))


@row("scatter.value")
def scatter(call: Call) -> Any:
    """Writes a number along one dim."""
    moves = "0" if call.argument("value") == 0 else ""
    return _along(_WRITES_NUMBER, moves=moves, local={"a": _on_piece(call.target)})(call)


# along the indexed dim, the added values may be sharded
row("scatter_add")(
    _along(
        "...? a[dim]!, ...? j[dim]?, ...? j[dim]? -> ...? a[dim]!",
        linear="0+2",
        local={"j": from_first(aten.scatter_add.default)},
    )
)


def _reductions() -> Iterator[tuple[Any, ...]]:
    yield rand(5, 7, 6), 1, ints(7, 5, 3, 6), rand(5, 3, 6), "amax"
    yield rand(5, 7, 6), 1, ints(7, 5, 3, 6), rand(5, 3, 6), "mean", {"include_self": False}


sample(
    "gather",
    lambda: [
        (rand(5, 7, 6), 1, ints(7, 5, 3, 6)),
        (rand(5, 7, 6), -1, ints(6, 4, 7, 5)),
        (rand(6), 0, ints(6, 5)),
        (rand(5, 6), 0, ints(5, 0)),
    ],
)
sample("scatter.value", lambda: [(rand(5, 7, 6), 1, ints(7, 5, 3, 6), 0), (rand(5, 6), -1, ints(6, 4, 2), 1.5)])
sample(
    "scatter.src",
    lambda: [(rand(5, 7, 6), 1, ints(7, 5, 1, 6), rand(5, 1, 6)), (rand(5, 6), -1, ints(6, 4, 1), rand(5, 3))],
)
sample("scatter_add", lambda: [(rand(5, 7, 6), 1, ints(7, 5, 3, 6), rand(5, 3, 6)), (rand(6), 0, ints(6, 5), rand(5))])
sample("scatter.value_reduce", lambda: [(rand(5, 7), 1, ints(7, 5, 3), 1.5, {"reduce": "multiply"})])
sample("scatter.reduce", lambda: [(rand(5, 7), 1, ints(7, 5, 3), rand(5, 3), {"reduce": "multiply"})])
sample("scatter_reduce.two", _reductions)
