"""Reads, writes and sums by index: embedding, gather, scatter, along one dim, and x[rows, :, columns].

An indexed dim may be sharded: each rank reads the entries of its piece and zeros for all others, and the result is the
sum over ranks. For sums at indices the added values may be sharded: only one rank starts from the tensor, the others
start from zeros. Dims of the index tensors may be sharded if values are read or summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from ...graph.meta import TensorMeta
from ..call import Call
from ..dsl import WHOLE, aten, called, ints, rand, row, sample
from ..registry import Bind, Function
from ..rule import ANY_PARTIAL, COUNT_OPERANDS, LINEAR, OF_WHOLE, BoundRule, Group, PassThrough, Term


def _within(index: Tensor, start: int, length: int, size: int) -> Tensor:
    """Indices as positions in this rank's piece. Those of other pieces become `length`; those that the whole dim lacks
    become `length + 1`, at which ops raise.
    """
    elsewhere = torch.where((index >= 0) & (index < size), length, length + 1)
    return torch.where((index >= start) & (index < start + length), index - start, elsewhere)


def _with_one(piece: Tensor, dim: int) -> Tensor:
    """`piece` with one more entry of zeros along `dim`, for indices outside the piece."""
    shape = list(piece.shape)
    shape[dim] = 1
    return torch.cat([piece, piece.new_zeros(shape)], dim)


def _in_piece(op: Any, writes: bool = False) -> Callable[..., Tensor]:
    """`op` on this rank's piece of a sharded dim; writes outside the piece go to an entry that is dropped."""

    def run(
        start: int, length: int, size: int, have: Tensor, dim: int, index: Tensor, *rest: Any, **kwargs: Any
    ) -> Tensor:
        values = op(_with_one(have, dim), dim, _within(index, start, length, size), *rest, **kwargs)
        return values.narrow(dim, 0, length) if writes else values

    OF_WHOLE.add(run)
    return called(run, op, "in_piece")


@cache
def _from_first(op: Any) -> Callable[..., Tensor]:
    """`op` on this rank's piece of the added values; only the first rank starts from `have`, others from zeros."""

    def run(start: int, length: int, have: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        return op(have if start == 0 else torch.zeros_like(have), *rest, **kwargs)

    COUNT_OPERANDS.add(run)
    return called(run, op, "from_first")


# -- embedding ---------------------------------------------------------------------------
def _vocabulary_piece(start: int, length: int, size: int, weight: Tensor, indices: Tensor, *rest: Any) -> Tensor:
    return aten.embedding.default(_with_one(weight, 0), _within(indices, start, length, size))


def _vocabulary_gradient(
    start: int, length: int, size: int, grad: Tensor, indices: Tensor, count: int, padding: int, by_frequency: bool
) -> Tensor:
    unread = padding - start if start <= padding < start + length else -1
    index = _within(indices, start, length, size).clamp(max=length)  # the forward refuses others
    return aten.embedding_dense_backward.default(grad, index, length + 1, unread, by_frequency).narrow(0, 0, length)


OF_WHOLE.update((_vocabulary_piece, _vocabulary_gradient))
row("embedding", "v d, ... -> ... d", linear="0", local={"v": _vocabulary_piece})
# how often an index comes up is counted over all of them
row(
    "embedding_dense_backward",
    "scale_grad_by_freq: ...! d, ...! -> v d | ... d, ... -> v d", linear="0", local={"v": _vocabulary_gradient},
)  # fmt: skip


# -- gather and scatter --------------------------------------------------------------------
def _along(rule: str, **options: Any) -> Function:
    """`rule`; nothing is sharded if the index is empty or of a scalar, with another number of dims."""
    words = Bind(rule, **options)
    return lambda call: words if len({len(operand.shape) for operand in call.operands}) == 1 else Bind(WHOLE)


# Dims with different sizes in tensor and index stay whole. `a` is the indexed dim.
_GATHER = {"a": _in_piece(aten.gather.default)}
row("gather")(_along("...? a[dim], ...? j[dim] -> ...? j[dim]", moves="0", local=_GATHER))
_WRITES = "...? a[dim], ...? j[dim]!, ...? k[dim]! -> ...? a[dim]"
_WRITES_NUMBER = "...? a[dim], ...? j[dim]! -> ...? a[dim]"
row("scatter.src")(_along(_WRITES, moves="0+2", local={"a": _in_piece(aten.scatter.src, writes=True)}))
for _op in (aten.scatter.reduce, aten.scatter_reduce.two, aten.scatter.value_reduce):
    _rule = _WRITES_NUMBER if _op is aten.scatter.value_reduce else _WRITES
    row(_op)(_along(_rule, local={"a": _in_piece(_op, writes=True)}))


@row("scatter.value")
def scatter(call: Call) -> Any:
    """Writes a number along one dim."""
    moves = "0" if call.argument("value") == 0 else ""
    return _along(_WRITES_NUMBER, moves=moves, local={"a": _in_piece(call.target, writes=True)})(call)


# along the indexed dim, the added values may be sharded
_ADDS = "...? a[dim]!, ...? j[dim]?, ...? j[dim]? -> ...? a[dim]!"
row("scatter_add")(_along(_ADDS, linear="0+2", local={"j": _from_first(aten.scatter_add.default)}))
sample("scatter.value_reduce", lambda: [(rand(5, 7), 1, ints(7, 5, 3), 1.5, {"reduce": "multiply"})])
sample("scatter.reduce", lambda: [(rand(5, 7), 1, ints(7, 5, 3), rand(5, 3), {"reduce": "multiply"})])
sample("scatter_reduce.two", lambda: [(rand(5, 7, 6), 1, ints(7, 5, 3, 6), rand(5, 3, 6), "amax")])

# -- along one dim ---------------------------------------------------------------------------
_OF_SCALARS = "(), *+ -> ...! | *, (), *+ -> ...!"  # nothing is sharded of a scalar, or with a scalar index
_WITH_SCALARS = f"{_OF_SCALARS} | *, *, () -> ...!"
_SELECT = {"a": _in_piece(aten.index_select.default)}
row("index_select", f"{_OF_SCALARS} | ... a[dim], i -> ... i[dim]", moves="0", local=_SELECT)
row("index_fill.int_Scalar index_fill.int_Tensor", f"{_OF_SCALARS} | ... a[dim]!, i!, () -> ... a[dim]!")
# added values may be sharded, and one rank starts from the tensor
_ADDED = {"i": _from_first(aten.index_add.default)}
row("index_add", f"{_WITH_SCALARS} | ... a[dim]!, i, ... i[dim] -> ... a[dim]!", linear="0+2", local=_ADDED)
row("index_copy", f"{_WITH_SCALARS} | ... a[dim]!, i!, ... i[dim]! -> ... a[dim]!", linear="0+2")
row("index_reduce", f"{_WITH_SCALARS} | ... a[dim]!, i!, ... i[dim]! -> ... a[dim]!")
row("take", "x...!, ... -> ...", moves="0", samples=lambda: [(rand(5, 7), ints(35, 6, 3))])
sample("index_copy", lambda: [(rand(*n, 7), -1, torch.tensor([3, 0, 6]), rand(*n, 3)) for n in ((5, 6), (5,), ())])
sample("index_fill.int_Tensor", lambda: [(rand(5, 7, 6), 1, torch.tensor([3, 0]), rand())])

# -- x[rows, :, columns]: of the indexed dims, only the first may be sharded ------------------------
Indices = Sequence["TensorMeta | None"]


class _Places:
    """Terms of x[indices]: of x, of each index, of the result."""

    def __init__(self, shape: Sequence[int], indices: Indices) -> None:
        tensors = [i for i in indices if i is not None]
        self.indexed = [d for d, i in enumerate(indices) if i is not None]
        self.index_shape = cast(torch.Size, torch.broadcast_shapes(*(i.shape for i in tensors)))
        self.names = [None if n == 1 else f"i{j}" for j, n in enumerate(self.index_shape)]
        self.dims = [None if n == 1 or i in self.indexed else f"d{i}" for i, n in enumerate(shape)]
        self.index = [_right(self.names, i.shape, self.index_shape) for i in tensors]
        first, last = self.indexed[0], self.indexed[-1]
        together = last - first + 1 == len(self.indexed)
        rest = [d for d in range(len(shape)) if d not in self.indexed]
        lead = [d for d in rest if d < first] if together else []
        self.out: Term = (*(self.dims[d] for d in lead), *self.names, *(self.dims[d] for d in rest if d not in lead))

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """The size of each factor."""
        index = {f"i{j}": n for j, n in enumerate(self.index_shape)}
        return index | {f"d{i}": n for i, n in enumerate(shape)}

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


def _index_tensors(call: Call) -> Indices | None:
    """The index tensors; None if one of them is a mask."""
    indices: Indices = call.argument("indices")
    masks = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
    return None if masks or all(i is None for i in indices) else indices


@cache
def _at_indices(op: Any, dim: int, writes: bool = False) -> Callable[..., Tensor]:
    """`op` on this rank's piece of `dim`, with one more entry for indices outside of it."""

    def run(start: int, length: int, size: int, have: Tensor, indices: Sequence[Tensor | None], *rest: Any) -> Tensor:
        index = indices[dim]
        assert index is not None, "the dim is indexed"
        local = _within(torch.where(index < 0, index + size, index), start, length, size)
        values = op(_with_one(have, dim), [local if d == dim else i for d, i in enumerate(indices)], *rest)
        return values.narrow(dim, 0, length) if writes else values

    OF_WHOLE.add(run)
    return called(run, op, "in_piece")


def _picks() -> Iterator[tuple[Any, ...]]:
    yield rand(5, 7, 6), [ints(5, 4, 1), None, ints(6, 3)]
    yield rand(5, 7, 6), [None, ints(7, 3, 5) - 7, None]


@row("index.Tensor _unsafe_index.Tensor", samples=_picks)
def pick(call: Call) -> BoundRule | None:
    """x[indices]. Entries of other ranks' pieces of the first indexed dim are zero: results are partial sums."""
    indices = _index_tensors(call)
    if indices is None:
        return None
    places = _Places(call.shape(0), indices)
    dim = places.first(call.shape(0)) if call.operands[0].dtype != torch.bool else None
    if dim is not None:
        places.dims[dim] = "a"
    operands: dict[int, Term] = {0: tuple(places.dims)} | {i + 1: t for i, t in enumerate(places.index)}
    through = (PassThrough(frozenset({0}), ANY_PARTIAL),)
    reduces = {} if dim is None else {"a": "sum"}
    group = Group(operands, {0: places.out}, reduces, through, sizes=places.sizes(call.shape(0)))
    return BoundRule((group,), local={} if dim is None else {"a": _at_indices(call.target, dim)})


def _puts() -> Iterator[tuple[Any, ...]]:
    yield rand(5, 7, 6), [torch.tensor([3, -1])], rand(2, 1, 6)
    yield rand(5, 7, 6), [ints(5, 4, 1), None, ints(6, 3)], rand(4, 3, 7), True
    yield rand(5, 7, 6), [None, ints(7, 5)], rand(6), True
    yield rand(5, 7, 6), [rand(5, 7) > 0], rand()


@row("index_put _unsafe_index_put", samples=_puts)
def put(call: Call) -> BoundRule | None:
    """The result of x[indices] = values, or += values: then values may be sharded, and one rank starts from x."""
    indices = _index_tensors(call)
    if indices is None:
        return _masked(call)
    places, accumulate = _Places(call.shape(0), indices), bool(call.argument("accumulate"))
    last, keep = len(places.index) + 1, next(filter(None, places.names), None) if accumulate else None
    # sizes of the result of x[indices], 1 for dims without a name
    sizes = places.sizes(call.shape(0))
    values = _right(places.out, call.shape(last), [sizes[name] if name else 1 for name in places.out])
    dim = None if accumulate else places.first(call.shape(0))
    if dim is not None:
        places.dims[dim] = "a"
    operands: dict[int, Term] = {0: tuple(places.dims)}
    operands |= {i + 1: _only(t, keep) for i, t in enumerate((*places.index, values))}
    through = (PassThrough(frozenset({0, last}), LINEAR if accumulate else ANY_PARTIAL),)
    group = Group(operands, {0: tuple(places.dims)}, {keep: "sum"} if keep else {}, through, sizes=sizes)
    if keep:
        return BoundRule((group,), local={keep: _from_first(call.target)})
    return BoundRule((group,), local={} if dim is None else {"a": _at_indices(call.target, dim, True)})


def _masked(call: Call) -> BoundRule | None:
    """Writes one value where a mask over leading dims is true."""
    masks: Indices = call.argument("indices")
    mask = masks[0] if len(masks) == 1 else None
    if mask is None or mask.dtype != torch.bool or call.operands[-1].numel != 1 or call.argument("accumulate"):
        return None
    line: Term = tuple(None if n == 1 else f"d{i}" for i, n in enumerate(call.shape(0)))
    operands = {0: line, 1: line[: len(mask.shape)], 2: (None,) * len(call.shape(2))}
    return BoundRule((Group(operands, {0: line}),))
