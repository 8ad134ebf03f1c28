"""Indexing by tensors, as in x[rows, :, columns], and along one dim: reads, writes, sums.

Dims of the index tensors may be sharded if values are read or summed; of the indexed dims, only the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...graph.meta import TensorMeta
from ..call import Call
from ..dsl import aten, called, ints, rand, row, sample
from ..rule import ANY_PARTIAL, LINEAR, BoundRule, Group, PassThrough, Term
from .scatter import from_first, near, with_one

Indices = Sequence["TensorMeta | None"]


class _Places:
    """Terms of x[indices]: of x, of each index, of the result."""

    def __init__(self, shape: Sequence[int], indices: Indices) -> None:
        given = [i for i in indices if i is not None]
        self.indexed = [d for d, i in enumerate(indices) if i is not None]
        self.found = tuple(cast(torch.Size, torch.broadcast_shapes(*(i.shape for i in given))))
        self.own: list[str | None] = [None if n == 1 else f"d{i}" for i, n in enumerate(shape)]
        for d in self.indexed:
            self.own[d] = None
        self.index = [_right(self._names(), i.shape, self.found) for i in given]
        first, last = self.indexed[0], self.indexed[-1]
        together = last - first + 1 == len(self.indexed)
        rest = [d for d in range(len(shape)) if d not in self.indexed]
        before = [d for d in rest if d < first] if together else []
        out = [*(self.own[d] for d in before), *self._names(), *(self.own[d] for d in rest if d not in before)]
        self.out: Term = tuple(out)

    def _names(self) -> list[str | None]:
        return [None if n == 1 else f"i{j}" for j, n in enumerate(self.found)]

    def outermost(self) -> str | None:
        """The first dim of the indices larger than one."""
        return next((name for name in self._names() if name), None)

    def first(self, shape: Sequence[int]) -> int | None:
        """The first indexed dim, if it is larger than one."""
        return self.indexed[0] if shape[self.indexed[0]] > 1 else None


def _right(names: Sequence[str | None], shape: Sequence[int], full: Sequence[int]) -> Term:
    """The term of a tensor that broadcasts to dims with `names`."""
    lead = len(full) - len(shape)
    return tuple(names[lead + i] if n == full[lead + i] else None for i, n in enumerate(shape))


def _only(names: Term, keep: str | None) -> Term:
    """`names` without the dims of indices, except `keep`."""
    return tuple(n if n is None or n.startswith("d") or n == keep else None for n in names)


def _given(call: Call) -> Indices | None:
    """The index tensors; None if one of them is a mask."""
    indices: Indices = call.argument("indices")
    masks = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
    return None if masks or all(i is None for i in indices) else indices


def _moved(indices: Sequence[Tensor | None], dim: int, start: int, length: int, size: int) -> list[Tensor | None]:
    """Indices into a piece of `dim` with one more entry at its end, for indices outside the piece."""
    index = indices[dim]
    assert index is not None, "the dim is indexed"
    inside, at = near(torch.where(index < 0, index + size, index), start, length)
    return [torch.where(inside, at, length) if d == dim else i for d, i in enumerate(indices)]


# -- picks ----------------------------------------------------------------------------------
def _pick_piece(op: Any, dim: int, size: int) -> Callable[..., Tensor]:
    def pick_in_piece(start: int, length: int, have: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
        return op(with_one(have, dim), _moved(indices, dim, start, length, size))

    return called(pick_in_piece, op, "in_piece")


def _picks() -> Iterator[tuple[Any, ...]]:
    yield rand(5, 7, 6), [ints(5, 4)]
    yield rand(5, 7, 6), [None, ints(7, 3, 5) - 7, None]
    yield rand(5, 7, 6), [ints(5, 4, 1), None, ints(6, 3)]
    yield rand(5, 7), [ints(5, 6), ints(7, 6)]
    yield rand(5, 7) > 0, [None, ints(7, 6)]


@row("index.Tensor _unsafe_index.Tensor", samples=_picks)
def pick(call: Call) -> BoundRule | None:
    """x[indices]. Entries of other ranks' pieces of the first indexed dim are zero: results are partial sums."""
    indices = _given(call)
    if indices is None:
        return None
    places = _Places(call.shape(0), indices)
    dim = places.first(call.shape(0)) if call.operands[0].dtype != torch.bool else None
    if dim is not None:
        places.own[dim] = "a"
    operands: dict[int, Term] = {0: tuple(places.own)} | {i + 1: t for i, t in enumerate(places.index)}
    through = (PassThrough(frozenset({0}), ANY_PARTIAL),)
    group = Group(operands, {0: places.out}, {} if dim is None else {"a": "sum"}, through)
    local = {} if dim is None else {"a": _pick_piece(call.target, dim, call.shape(0)[dim])}
    return BoundRule((group,), local=local)


# -- writes and sums -------------------------------------------------------------------------
def _put_piece(op: Any, dim: int, size: int) -> Callable[..., Tensor]:
    def put_in_piece(
        start: int, length: int, have: Tensor, indices: Sequence[Tensor | None], values: Tensor, *rest: Any
    ) -> Tensor:
        made = op(with_one(have, dim), _moved(indices, dim, start, length, size), values, *rest)
        return made.narrow(dim, 0, length)

    return called(put_in_piece, op, "in_piece")


def _puts() -> Iterator[tuple[Any, ...]]:
    yield rand(5, 7, 6), [None, torch.tensor([3, 1, 6]), None], rand(5, 3, 6)
    yield rand(5, 7, 6), [torch.tensor([3, -1])], rand(2, 1, 6)
    yield rand(5, 7, 6), [ints(5, 4, 1), None, ints(6, 3)], rand(4, 3, 7), True
    yield rand(5, 7, 6), [None, ints(7, 5)], rand(6), True
    yield rand(5, 7, 6), [rand(5, 7) > 0], rand()


@row("index_put _unsafe_index_put", samples=_puts)
def put(call: Call) -> BoundRule | None:
    """The result of x[indices] = values, or += values: then values may be sharded, and one rank starts from x."""
    indices = _given(call)
    if indices is None:
        return _masked(call)
    places, accumulate = _Places(call.shape(0), indices), bool(call.argument("accumulate"))
    last, keep = len(places.index) + 1, places.outermost() if accumulate else None
    full = _full(places, call.shape(0))
    values = _right(places.out, call.shape(last), full)
    dim = None if accumulate else places.first(call.shape(0))
    if dim is not None:
        places.own[dim] = "a"
    operands: dict[int, Term] = {0: tuple(places.own), last: _only(values, keep)}
    operands |= {i + 1: _only(t, keep) for i, t in enumerate(places.index)}
    through = (PassThrough(frozenset({0, last}), LINEAR if accumulate else ANY_PARTIAL),)
    group = Group(dict(sorted(operands.items())), {0: tuple(places.own)}, {keep: "sum"} if keep else {}, through)
    local = {} if dim is None else {"a": _put_piece(call.target, dim, call.shape(0)[dim])}
    if keep:
        local = {keep: from_first(call.target)}
    return BoundRule((group,), local=local)


def _full(places: _Places, shape: Sequence[int]) -> list[int]:
    """Sizes of the result of x[indices]; 1 for dims without a name."""
    sizes = {f"i{j}": n for j, n in enumerate(places.found)} | {f"d{i}": n for i, n in enumerate(shape)}
    return [sizes[name] if name else 1 for name in places.out]


def _masked(call: Call) -> BoundRule | None:
    """Writes one value where a mask over leading dims is true."""
    masks: Indices = call.argument("indices")
    mask = masks[0] if len(masks) == 1 else None
    if mask is None or mask.dtype != torch.bool or call.operands[-1].numel != 1 or call.argument("accumulate"):
        return None
    line: Term = tuple(None if n == 1 else f"d{i}" for i, n in enumerate(call.shape(0)))
    operands = {0: line, 1: line[: len(mask.shape)], 2: (None,) * len(call.shape(2))}
    return BoundRule((Group(operands, {0: line}),))


# -- along one dim ---------------------------------------------------------------------------
def _select_piece(start: int, length: int, have: Tensor, dim: int, index: Tensor) -> Tensor:
    inside, at = near(index, start, length)
    return aten.index_select.default(with_one(have, dim), dim, torch.where(inside, at, length))


_OF_SCALARS = "(), *+ -> ...! | *, (), *+ -> ...!"  # nothing is sharded of a scalar, or with a scalar index
_WITH_SCALARS = f"{_OF_SCALARS} | *, *, () -> ...!"
row("index_select", f"{_OF_SCALARS} | ... a[dim], i -> ... i[dim]", moves="0", local={"a": _select_piece})
row("index_fill.int_Scalar index_fill.int_Tensor", f"{_OF_SCALARS} | ... a[dim]!, i!, () -> ... a[dim]!")
# added values may be sharded, and one rank starts from the tensor
_ADDED = {"i": from_first(aten.index_add.default)}
row("index_add", f"{_WITH_SCALARS} | ... a[dim]!, i, ... i[dim] -> ... a[dim]!", linear="0+2", local=_ADDED)
row("index_copy", f"{_WITH_SCALARS} | ... a[dim]!, i!, ... i[dim]! -> ... a[dim]!", linear="0+2")
row("index_reduce", f"{_WITH_SCALARS} | ... a[dim]!, i!, ... i[dim]! -> ... a[dim]!")
row("take", "x...!, ... -> ...", moves="0", samples=lambda: [(rand(5, 7), ints(35, 6, 3))])


def _copies() -> list[tuple[Any, ...]]:
    some = torch.tensor([3, 0, 6])
    return [(rand(5, 7, 6), 1, some, rand(5, 3, 6)), (rand(5, 7), 1, some, rand(5, 3)), (rand(7), 0, some, rand(3))]


sample("index_select", lambda: [(rand(5, 7, 6), 1, ints(7, 5)), (rand(5, 7), -1, ints(7, 3))])
sample("index_add", lambda: [(rand(5, 7, 6), 1, ints(7, 5), rand(5, 5, 6)), (rand(5, 7), 0, ints(5, 6), rand(6, 7))])
sample("index_copy", _copies)
sample("index_reduce", lambda: [(rand(5, 7, 6), 1, ints(7, 5), rand(5, 5, 6), "amax")])
sample("index_fill.int_Scalar", lambda: [(rand(5, 7, 6), 1, torch.tensor([3, 0]), 1.5)])
sample("index_fill.int_Tensor", lambda: [(rand(5, 7, 6), 1, torch.tensor([3, 0]), rand())])
