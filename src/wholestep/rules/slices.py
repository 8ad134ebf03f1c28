"""Parts of tensors and tensors from parts: slice, select, split, cat, repeat, flip, diagonal, windows.

All of them move values, and zeros: any partial value passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from ..graph.storage import shares
from .call import Call
from .registry import Bind, rule
from .rule import ANY_PARTIAL, BoundRule, Group, PassThrough, Term
from .terms import aten, dims_of, moves, ops, rand, term, text, whole


def _dim(call: Call, ndim: int, name: str = "dim", default: int = 0) -> int:
    return int(call.argument(name, default)) % max(ndim, 1)


# -- slice, select ------------------------------------------------------------------------
@rule(
    aten.slice.Tensor,
    samples=lambda: [(rand(5, 7), 1, 2, 6), (rand(5, 7), 0), (rand(5, 7), 1, 0, 7), (rand(5, 7), 1, 0, 7, 2)],
)
def slice_(call: Call) -> BoundRule:
    """Other dims keep their place; so does the dim itself where all of it is taken."""
    dims = dims_of(call)
    at = _dim(call, len(dims))
    cut = call.shape(0)[at] != call.made()[at]
    out = ["s" if i == at and cut else d for i, d in enumerate(dims)]
    return moves(call, Bind(text([term(dims, dims[at : at + 1] if cut else ())], [term(out)])))


@rule(
    aten.slice_backward.default,
    samples=lambda: [(rand(5, 4), [5, 7], 1, 2, 6, 1), (rand(5, 7), [5, 7], 1, 0, 7, 1)],
)
def slice_backward(call: Call) -> BoundRule:
    """Zeros around the gradient."""
    dims = dims_of(call)
    at = _dim(call, len(dims))
    cut = call.shape(0)[at] != call.made()[at]
    out = ["s" if i == at and cut else d for i, d in enumerate(dims)]
    bind = Bind(text([term(dims, dims[at : at + 1] if cut else ())], [term(out)]), sizes={"input_sizes": "out0"})
    return moves(call, bind)


@rule(
    aten.slice_scatter.default,
    samples=lambda: [(rand(5, 7), rand(5, 4), 1, 2, 6), (rand(5, 7), rand(5, 7, seed=1), 1, 0, 7)],
)
def slice_scatter(call: Call) -> BoundRule:
    """One tensor with another in place of a slice."""
    dims = dims_of(call)
    at = _dim(call, len(dims))
    cut = call.shape(0)[at] != call.shape(1)[at]
    whole = dims[at : at + 1] if cut else ()
    part = ["s!" if i == at and cut else d for i, d in enumerate(dims)]
    return moves(call, Bind(text([term(dims, whole), term(part)], [term(dims, whole)])), 0, 1)


@rule(aten.select.int, samples=lambda: [(rand(5, 7, 6), 1, 3), (rand(5, 7), -1, -2)])
def select(call: Call) -> BoundRule:
    """One entry of a dim, which stays whole."""
    dims = dims_of(call)
    at = _dim(call, len(dims))
    return moves(call, Bind(text([term(dims, dims[at : at + 1])], [term(dims[:at] + dims[at + 1 :])])))


@rule(aten.select_backward.default, samples=lambda: [(rand(5, 6), [5, 7, 6], 1, 3)])
def select_backward(call: Call) -> BoundRule:
    """Zeros around the gradient."""
    dims = dims_of(call)
    at = _dim(call, len(dims) + 1)
    bind = Bind(text([term(dims)], [term([*dims[:at], "s", *dims[at:]])]), sizes={"input_sizes": "out0"})
    return moves(call, bind)


@rule(aten.select_scatter.default, samples=lambda: [(rand(5, 7, 6), rand(5, 6), 1, 3)])
def select_scatter(call: Call) -> BoundRule:
    """One tensor with another in place of one entry of a dim."""
    dims = dims_of(call)
    at = _dim(call, len(dims))
    full = term(dims, dims[at : at + 1])
    return moves(call, Bind(text([full, term(dims[:at] + dims[at + 1 :])], [full])), 0, 1)


# -- split, cat ---------------------------------------------------------------------------
@rule(ops("split_with_sizes", "unsafe_split_with_sizes"), samples=lambda: [(rand(5, 7, 6), [3, 4], 1)])
@rule(
    ops("split.Tensor", "unsafe_split.Tensor", "chunk", "unsafe_chunk"),
    samples=lambda: [(rand(5, 7, 6), 3, 1), (rand(6, 5), 2, 0)],
)
def split(call: Call) -> BoundRule:
    """Pieces of one dim, which stays whole."""
    dims = dims_of(call)
    at = _dim(call, len(dims))
    parts = [term([f"s{n}" if i == at else d for i, d in enumerate(dims)]) for n in range(len(call.outputs))]
    return moves(call, Bind(text([term(dims, dims[at : at + 1])], parts)))


@rule(aten.unbind.int, samples=lambda: [(rand(5, 3, 6), 1), (rand(2, 7),)])
def unbind(call: Call) -> BoundRule:
    """Every entry of one dim, which stays whole."""
    dims = dims_of(call)
    at = _dim(call, len(dims))
    rest = term(dims[:at] + dims[at + 1 :])
    return moves(call, Bind(text([term(dims, dims[at : at + 1])], [rest] * len(call.outputs))))


@rule(
    aten.cat.default,
    samples=lambda: [([rand(5, 2, 6), rand(5, 3, 6)], 1), ([rand(0), rand(5, 3)], -1), ([rand(5, 3), rand(5, 3)],)],
)
def cat(call: Call) -> BoundRule:
    """Tensors end to end along one dim, which stays whole; cut alike along others. Empty 1-d tensors add nothing."""
    made = call.made()
    at = _dim(call, len(made))
    line: Term = tuple(None if i == at or size == 1 else f"d{i}" for i, size in enumerate(made))
    positions = [i for i, m in enumerate(call.operands) if len(m.shape) == len(made)]
    through = PassThrough(frozenset(positions), ANY_PARTIAL, mixed=True)
    return BoundRule((Group(dict.fromkeys(positions, line), {0: line}, partial=(through,)),))


# -- repeat, flip, roll ---------------------------------------------------------------------
@rule(aten.repeat.default, samples=lambda: [(rand(5, 7), [2, 1, 3]), (rand(5, 1), [1, 4])])
def repeat(call: Call) -> BoundRule:
    """Dims that are taken once keep their place."""
    dims, times = dims_of(call), [int(n) for n in call.argument("repeats")]
    lead = len(times) - len(dims)
    out = [dims[i - lead] if i >= lead and n == 1 else f"r{i}" for i, n in enumerate(times)]
    whole = [d for d in dims if d not in out]
    return moves(call, Bind(text([term(dims, whole)], [term(out)])))


@rule(aten.flip.default, samples=lambda: [(rand(5, 7, 6), [0, 2])])
def flip(call: Call) -> BoundRule:
    """Dims that are turned round stay whole."""
    dims = dims_of(call)
    turned: list[int] = list(call.argument("dims"))
    whole = [dims[d] for d in turned]
    return moves(call, Bind(text([term(dims, whole)], [term(dims, whole)])))


@rule(aten.roll.default, samples=lambda: [(rand(5, 7), [2], [1]), (rand(5, 7), [3])])
def roll(call: Call) -> BoundRule:
    """Dims that are turned stay whole; all of them where none is named."""
    dims = dims_of(call)
    named: Any = call.argument("dims")
    turned: list[int] = [named] if isinstance(named, int) else list(named or range(len(dims)))
    whole = [dims[d] for d in turned]
    return moves(call, Bind(text([term(dims, whole)], [term(dims, whole)])))


@rule(ops("rot90"), samples=lambda: [(rand(5, 4, 3), 1, [0, 1])])
def rot90(call: Call) -> BoundRule:
    """A plane that is turned stays whole."""
    dims = dims_of(call)
    a, b = (int(d) % len(dims) for d in call.argument("dims"))
    out = list(dims)
    if call.argument("k", 1) % 2:
        out[a], out[b] = out[b], out[a]
    whole = (dims[a], dims[b])
    return moves(call, Bind(text([term(dims, whole)], [term(out, whole)])))


# -- triangles, diagonals, windows ------------------------------------------------------------
@rule([aten.tril.default, aten.triu.default], samples=lambda: [(rand(5, 7, 6),), (rand(3, 5, 6), 1)])
def triangle(call: Call) -> BoundRule:
    """Of the matrices in the last two dims, which stay whole."""
    return moves(call, Bind("... a! b! -> ... a! b!"))


@rule([aten.diagonal.default], samples=lambda: [(rand(5, 7, 6), 1, 0, 2), (rand(5, 6, 6), 0, -2, -1)])
def diagonal(call: Call) -> BoundRule:
    """Of two dims, which stay whole; it comes last."""
    dims = dims_of(call)
    pair = [dims[_dim(call, len(dims), name, default)] for name, default in (("dim1", 0), ("dim2", 1))]
    rest = [d for d in dims if d not in pair]
    return moves(call, Bind(text([term(dims, pair)], [term([*rest, "s"])])))


@rule(aten.diagonal_backward.default, samples=lambda: [(rand(7, 4), [5, 7, 6], 2, 0, 2)])
def diagonal_backward(call: Call) -> BoundRule:
    """Zeros around the gradient."""
    ndim = len(call.made())
    pair = [_dim(call, ndim, name) for name in ("dim1", "dim2")]
    out = [f"d{i}" for i in range(ndim)]
    dims = [d for i, d in enumerate(out) if i not in pair]
    bind = Bind(text([term([*dims, "s!"])], [term(out)]), sizes={"input_sizes": "out0"})
    return moves(call, bind)


@rule(ops("diagonal_scatter"), samples=lambda: [(rand(5, 7, 6), rand(7, 5), 0, 0, 2)])
def diagonal_scatter(call: Call) -> BoundRule:
    """One tensor with another in place of its diagonal."""
    dims = dims_of(call)
    pair = [dims[_dim(call, len(dims), name, default)] for name, default in (("dim1", 0), ("dim2", 1))]
    rest = [d for d in dims if d not in pair]
    full = term(dims, pair)
    return moves(call, Bind(text([full, term([*rest, "s!"])], [full])), 0, 1)


@rule([aten.diag_embed.default], samples=lambda: [(rand(5, 6),), (rand(5, 6), 1, 0, 2)])
def diag_embed(call: Call) -> BoundRule:
    """The last dim becomes the diagonal of two."""
    dims, ndim = dims_of(call), len(call.made())
    pair = [_dim(call, ndim, name, default) for name, default in (("dim1", -2), ("dim2", -1))]
    rest = iter(dims[:-1])
    out = [f"s{i}" if i in pair else next(rest) for i in range(ndim)]
    return moves(call, Bind(text([term(dims, dims[-1:])], [term(out)])))


@rule(aten.unfold.default, samples=lambda: [(rand(5, 7, 6), 1, 3, 2)])
def unfold(call: Call) -> BoundRule:
    """Windows of one dim, which stays whole; what is in a window comes last."""
    dims = dims_of(call)
    at = _dim(call, len(dims), "dimension")
    out = [*("s" if i == at else d for i, d in enumerate(dims)), "w"]
    return moves(call, Bind(text([term(dims, dims[at : at + 1])], [term(out)])))


@rule(aten.unfold_backward.default, samples=lambda: [(rand(5, 3, 6, 3), [5, 7, 6], 1, 3, 2)])
def unfold_backward(call: Call) -> Bind:
    """Windows overlap: their gradients are summed."""
    dims = dims_of(call)[:-1]
    at = _dim(call, len(dims))
    out = ["s" if i == at else d for i, d in enumerate(dims)]
    left = term([*dims, "w"], [dims[at], "w"])
    return Bind(text([left], [term(out)]), "0", sizes={"input_sizes": "out0"})


@rule(aten.constant_pad_nd.default, samples=lambda: [(rand(5, 7, 6), [1, 2]), (rand(5, 7, 6), [0, 0, 1, -2], 1.5)])
def constant_pad(call: Call) -> BoundRule:
    """Dims that are padded stay whole."""
    dims, pad = dims_of(call), call.argument("pad")
    padded = [d for i, d in enumerate(reversed(dims)) if any(pad[2 * i : 2 * i + 2])]
    out = [f"p{i}" if d in padded else d for i, d in enumerate(dims)]
    bind = Bind(text([term(dims, padded)], [term(out)]))
    return moves(call, bind) if not call.argument("value", 0) else bind.on(call)


# -- by strides -----------------------------------------------------------------------------
@shares("view")
def _rows_piece(start: int, length: int, have: Tensor, size: list[int], stride: list[int], *rest: Any) -> Tensor:
    return aten.as_strided.default(have.contiguous(), [length, *size[1:]], stride)


@shares("view")
def _view_piece(start: int, length: int, have: Tensor, size: list[int], *rest: Any) -> Tensor:
    return have.reshape([-1, *size[1:]])


def _written_piece(start: int, length: int, have: Tensor, new: Tensor, *rest: Any) -> Tensor:
    return new.reshape(have.shape).clone()


def _stays_inside(call: Call) -> bool:
    """True where strides count from the first element and read what lies in the tensor, which has no gaps."""
    have, size, stride = call.operands[0], call.argument("size"), call.argument("stride")
    reach = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    filled = 1 + sum((n - 1) * step for n, step in zip(have.shape, have.stride, strict=True)) == have.numel
    return call.argument("storage_offset") is None and reach <= have.numel and (filled or not reach)


def _rows_apart(call: Call, shape: Sequence[int]) -> bool:
    """True where strides read each row of a tensor by itself, as it lies in memory."""
    size, stride = call.argument("size"), call.argument("stride")
    have = call.operands[0]
    if not have.is_contiguous or not size or not shape or size[0] != shape[0]:
        return False
    row = prod(shape[1:])
    reach = sum((n - 1) * step for n, step in zip(size[1:], stride[1:], strict=True))
    return row > 0 and stride[0] == row and reach < row


def _in_order(call: Call) -> tuple[str, str] | None:
    """Terms of a tensor and of a view of all of it in memory order, whose rows may be cut; None for other strides."""
    have, size, stride = call.operands[0], list(call.argument("size")), list(call.argument("stride"))
    plain = all(n == 1 or step == prod(size[i + 1 :]) for i, (n, step) in enumerate(zip(size, stride, strict=True)))
    whole_of_it = plain and have.is_contiguous and prod(size) == have.numel
    if not whole_of_it or len(size) < 2 or not have.numel or size[0] == 1:
        return None
    dims, given = dims_of(call), [f"m{i}" for i in range(1, len(size))]
    view = term(["n", *given], given)
    if have.shape[0] == size[0]:
        return term(["n", *dims[1:]], dims[1:]), view
    return (f"(n {' '.join(given)})", view) if len(dims) == 1 else None


@rule(
    ops("as_strided"),
    samples=lambda: [
        (rand(5, 6), [5, 3, 4], [6, 1, 1]), (rand(5, 6), [6, 5], [1, 6]), (rand(30), [5, 3], [6, 1]),
        (rand(30), [5, 6, 1], [6, 1, 1]), (rand(5, 6), [5, 3, 2], [6, 2, 1]), (rand(60), [12, 5], [5, 1]),
    ],
)  # fmt: skip
def as_strided(call: Call) -> BoundRule | None:
    """Reads memory, not dims: whole, but for rows that are read apart or in order.

    Captured steps have none that leave their tensor or count from the start of memory (`capture.strides`).
    """
    if not _stays_inside(call):
        return None
    in_order = _in_order(call)
    if in_order:
        return moves(call, Bind(text([in_order[0]], [in_order[1]]), local={"n": _view_piece}))
    dims, made = dims_of(call), [f"m{i}" for i in range(len(call.made()))]
    if not _rows_apart(call, call.shape(0)):
        return moves(call, Bind(text([term(dims, dims)], [term(made)])))
    given = term(["n", *dims[1:]], dims[1:])
    bind = Bind(text([given], [term(["n", *made[1:]])]), local={"n": _rows_piece}, filled=frozenset("n"))
    return moves(call, bind)


@rule(
    ops("as_strided_scatter"),
    samples=lambda: [
        (rand(30), rand(5, 6, seed=1), [5, 6], [6, 1]), (rand(5, 6), rand(5, 3, 2, seed=1), [5, 3, 2], [6, 2, 1]),
        (rand(5, 6), rand(3, 4, seed=1), [3, 4], [6, 1]), (rand(60), rand(12, 5, seed=1), [12, 5], [5, 1]),
    ],
)  # fmt: skip
def as_strided_scatter(call: Call) -> BoundRule | None:
    """Writes memory, not dims: whole, but where all of it is written in order."""
    if not _stays_inside(call):
        return None
    in_order = _in_order(call)
    if not in_order:
        return whole(call)
    left, right = in_order
    return moves(call, Bind(text([left, right], [left]), local={"n": _written_piece}), 0, 1)
