"""Looking values up by index, and adding or writing them there.

A dim that is indexed may be cut: each rank looks up what lies in its piece and zeros for the rest, and the sum over
ranks is the result. Where values are added at indices, the values may be cut: one rank alone starts from the tensor
that is added to, the others from zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .registry import Bind, rule
from .rule import BoundRule
from .terms import aten, called, dims_of, ints, moves, ops, rand, term, text
from .terms import whole as everything_whole


def near(index: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Which indices lie in this rank's piece, and where in it; 0 for the others."""
    here = (index >= start) & (index < start + length)
    return here, torch.where(here, index - start, 0)


def with_one(piece: Tensor, dim: int) -> Tensor:
    """`piece` with one more entry of zeros along `dim`: what lies elsewhere is looked up there."""
    shape = list(piece.shape)
    shape[dim] = 1
    return torch.cat([piece, piece.new_zeros(shape)], dim)


# -- embedding ---------------------------------------------------------------------------
def _vocabulary_piece(start: int, length: int, weight: Tensor, indices: Tensor, *rest: Any) -> Tensor:
    here, at = near(indices, start, length)
    return aten.embedding.default(with_one(weight, 0), torch.where(here, at, length))


def _vocabulary_gradient(
    start: int, length: int, grad: Tensor, indices: Tensor, count: int, padding: int, by_frequency: bool
) -> Tensor:
    here, at = near(indices, start, length)
    row = padding - start if start <= padding < start + length else -1
    made = aten.embedding_dense_backward.default(grad, torch.where(here, at, length), length + 1, row, by_frequency)
    return made.narrow(0, 0, length)


@rule(aten.embedding.default, samples=lambda: [(rand(10, 8), ints(10, 5, 6)), (rand(5, 3), ints(5, 7), 0)])
def embedding(call: Call) -> Bind:
    """(rows, indices) -> a row for each index."""
    at = dims_of(call, 1, "i")
    return Bind(text(["v d", term(at)], [term([*at, "d"])]), "0", local={"v": _vocabulary_piece})


@rule(
    aten.embedding_dense_backward.default,
    samples=lambda: [(rand(5, 6, 8), ints(10, 5, 6), 10, 3, False), (rand(5, 6, 3), ints(7, 5, 6), 7, -1, True)],
)
def embedding_backward(call: Call) -> Bind:
    """The gradient of the rows, a sum over indices; how often an index comes up is counted over all of them."""
    at = dims_of(call, 1, "i")
    whole = at if call.argument("scale_grad_by_freq") else ()
    inputs = [term([*at, "d"], whole), term(at, whole)]
    return Bind(text(inputs, ["v d"]), "0", local={"v": _vocabulary_gradient})


# -- gather and scatter --------------------------------------------------------------------
def _alike(call: Call) -> bool:
    """False where an index without elements, or of a scalar, has another number of dims."""
    return len({len(found.shape) for found in call.operands}) == 1


def _along(call: Call, source: int | None = None) -> tuple[list[str], list[str], list[str], int]:
    """Names of the dims of self, index and source, and the dim. Dims of other sizes are cut off: they stay whole."""
    have, index = call.shape(0), call.shape(1)
    other = call.shape(2) if source is not None else index
    dim = call.argument("dim") % max(len(have), 1)
    names: tuple[list[str], list[str], list[str]] = ([], [], [])
    for i, (a, b, c) in enumerate(zip(have, index, other, strict=True)):
        names[0].append("a" if i == dim else f"d{i}" if a == b == c else f"a{i}!")
        names[1].append(("j" if b == c else "j!") if i == dim else f"d{i}" if a == b == c else f"b{i}!")
        names[2].append(("j" if b == c else "c!") if i == dim else f"d{i}" if a == b == c else f"c{i}!")
    return *names, dim


def _gather_piece(start: int, length: int, have: Tensor, dim: int, index: Tensor, **rest: Any) -> Tensor:
    here, at = near(index, start, length)
    return aten.gather.default(with_one(have, dim), dim, torch.where(here, at, length))


@rule(
    aten.gather.default,
    samples=lambda: [
        (rand(5, 7, 6), 1, ints(7, 5, 3, 6)),
        (rand(5, 7, 6), -1, ints(6, 4, 7, 5)),
        (rand(6), 0, ints(6, 5)),
        (rand(5, 6), 0, ints(5, 0)),
    ],
)
def gather(call: Call) -> BoundRule:
    """Picks along one dim; others keep their place, where the index is as long as what it picks from."""
    if not _alike(call):
        return everything_whole(call)
    have, index, _, _ = _along(call)
    return moves(call, Bind(text([term(have), term(index)], [term(index)]), local={"a": _gather_piece}), 0)


def _on_piece(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`op` on this rank's piece of a cut dim: what is written elsewhere goes to an entry that is dropped."""

    def run(start: int, length: int, have: Tensor, dim: int, index: Tensor, *rest: Any, **more: Any) -> Tensor:
        here, at = near(index, start, length)
        made = op(with_one(have, dim), dim, torch.where(here, at, length), *rest, **more)
        return made.narrow(dim, 0, length)

    return called(run, op, "in_piece")


def from_first(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`op` on this rank's piece of what is added; the first rank alone starts from `have`."""

    def run(start: int, length: int, have: Tensor, *rest: Any, **more: Any) -> Tensor:
        return op(have if start == 0 else torch.zeros_like(have), *rest, **more)

    return called(run, op, "from_first")


def _whole(names: list[str], *which: str) -> list[str]:
    return [f"{n}!" if n in which else n for n in names]


@rule(
    aten.scatter.value, samples=lambda: [(rand(5, 7, 6), 1, ints(7, 5, 3, 6), 0), (rand(5, 6), -1, ints(6, 4, 2), 1.5)]
)
@rule(
    aten.scatter.src,
    samples=lambda: [(rand(5, 7, 6), 1, ints(7, 5, 1, 6), rand(5, 1, 6)), (rand(5, 6), -1, ints(6, 4, 1), rand(5, 3))],
)
def scatter(call: Call) -> BoundRule | Bind:
    """Writes along one dim."""
    if not _alike(call):
        return everything_whole(call)
    source = call.target is aten.scatter.src
    have, index, other, _ = _along(call, 2 if source else None)
    inputs = [term(have), term(_whole(index, "j")), *([term(_whole(other, "j"))] if source else [])]
    bind = Bind(text(inputs, [term(have)]), local={"a": _on_piece(call.target)})
    if source or call.argument("value") == 0:
        return moves(call, bind, *((0, 2) if source else (0,)))
    return bind


@rule(
    aten.scatter_add.default,
    samples=lambda: [(rand(5, 7, 6), 1, ints(7, 5, 3, 6), rand(5, 3, 6)), (rand(6), 0, ints(6, 5), rand(5))],
)
def scatter_add(call: Call) -> BoundRule | Bind:
    """Adds along one dim: what is added may be cut along it, or else the result."""
    if not _alike(call):
        return everything_whole(call)
    have, index, other, _ = _along(call, 2)
    have = _whole(have, "a")
    swap = {"j": from_first(aten.scatter_add.default)}
    return Bind(text([term(have), term(index), term(other)], [term(have)]), "0+2", local=swap)


def _reductions() -> Iterator[tuple[Any, ...]]:
    yield rand(5, 7, 6), 1, ints(7, 5, 3, 6), rand(5, 3, 6), "amax"
    yield rand(5, 7, 6), 1, ints(7, 5, 3, 6), rand(5, 3, 6), "mean", {"include_self": False}


@rule(ops("scatter.value_reduce"), samples=lambda: [(rand(5, 7), 1, ints(7, 5, 3), 1.5, {"reduce": "multiply"})])
@rule(ops("scatter.reduce"), samples=lambda: [(rand(5, 7), 1, ints(7, 5, 3), rand(5, 3), {"reduce": "multiply"})])
@rule(ops("scatter_reduce.two"), samples=_reductions)
def scatter_reduce(call: Call) -> BoundRule | Bind:
    """Reduces along one dim, which stays whole in what is reduced."""
    if not _alike(call):
        return everything_whole(call)
    source = len(call.slots) > 2
    have, index, other, _ = _along(call, 2 if source else None)
    inputs = [term(have), term(_whole(index, "j")), *([term(_whole(other, "j"))] if source else [])]
    return Bind(text(inputs, [term(have)]), local={"a": _on_piece(call.target)})
