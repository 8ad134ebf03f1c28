"""Views, slices and concatenations: reshape, permute, slice, select, split, cat, repeat, flip, diagonal, windows.

All of these only move values, or add zeros: any partial value passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor

from ...graph.meta import span
from ...graph.storage import shares
from ..call import Call
from ..dsl import WHOLE, aten, dims_of, rand, row, sample, term, text
from ..registry import Bind
from ..rule import ANY_PARTIAL, BoundRule, Group, PassThrough, Term


# -- views ---------------------------------------------------------------------------------
def regroup(have: Sequence[int], want: Sequence[int]) -> tuple[str, str]:
    """Terms of a view from one shape to another, with the finest dims of which both consist.

    Dims are matched from the left. A run of dims with equal products becomes a merged dim if one side is one dim, and
    stays whole otherwise.
    """
    a, b = ([n for n in shape if n != 1] for shape in (have, want))
    unsharded = " ".join(f"w{k}!" for k in range(len(have))), " ".join(f"v{k}!" for k in range(len(want)))
    source: list[str] = []
    target: list[str] = []
    i = j = number = 0
    while i < len(a) and j < len(b):
        start, begin, p, q = i, j, a[i], b[j]
        i, j = i + 1, j + 1
        while p != q:
            if p < q and i < len(a):
                p, i = p * a[i], i + 1
            elif j < len(b):
                q, j = q * b[j], j + 1
            else:
                return unsharded
        number = _run(a[start:i], b[begin:j], number, source, target)
    if i < len(a) or j < len(b):
        return unsharded
    return _with_ones(have, source), _with_ones(want, target)


def _with_ones(shape: Sequence[int], names: Sequence[str]) -> str:
    remaining = iter(names)
    return " ".join("1" if n == 1 else next(remaining) for n in shape) or "()"


def _run(have: list[int], want: list[int], number: int, source: list[str], target: list[str]) -> int:
    """One run of dims with equal products."""
    if len(have) == 1 or len(want) == 1:
        names = [f"f{number + k}" for k in range(max(len(have), len(want)))]
        merged = [f"({' '.join(names)})"] if len(names) > 1 else names
        source += merged if len(have) == 1 else names
        target += merged if len(want) == 1 else names
        return number + len(names)
    # several on both sides: the outermost dims are shared as far as one divides the other
    a, b = have[0], want[0]
    if a and b and (a % b == 0 or b % a == 0):
        outer = min(a, b)
        rest = max(a, b) // outer
        big = f"(f{number} r{number})" if rest > 1 else f"f{number}"
        source.append(big if a >= b else f"f{number}")
        target.append(f"f{number}" if a >= b else big)
    else:
        source.append(f"w{number}!")
        target.append(f"v{number}!")
    source += [f"x{number}_{k}!" for k in range(1, len(have))]
    target += [f"y{number}_{k}!" for k in range(1, len(want))]
    return number + 1


def _reshapes() -> list[tuple[Any, ...]]:
    shapes = [((4, 6), [24]), ((4, 6), [2, 2, 6]), ((4, 6), [8, 3]), ((6, 4, 5), [3, 8, 5]), ((2, 5, 3), [10, 3])]
    return [(rand(*have), want) for have, want in shapes]


@row("view _unsafe_view reshape unsqueeze squeeze squeeze.dim squeeze.dims")
def view(call: Call) -> Bind | BoundRule:
    """The outer factor of a merged or split dim may be sharded evenly."""
    source, target = regroup(call.shape(0), call.made())
    plain = Bind(f"{source} -> {target}", moves="0")
    if call.target is aten.unsqueeze.default:
        return plain
    bind = replace(plain, sizes={"shape" if call.target is aten.reshape.default else "size": "out0"})
    if call.target._overloadpacket is not aten.squeeze:
        return bind
    return replace(bind.on(call), instead=aten.view.default)  # a local size of one must stay


@row("t transpose.int permute numpy_T")
def permute(call: Call) -> Bind:
    """Reorders dims."""
    names = dims_of(call)
    order = list(range(len(names)))
    if call.target is aten.permute.default:
        order = [d % len(names) for d in call.argument("dims")]
    elif call.target is aten.transpose.int and names:
        a, b = call.argument("dim0") % len(names), call.argument("dim1") % len(names)
        order[a], order[b] = order[b], order[a]
    else:
        order.reverse()
    return Bind(f"{term(names)} -> {term([names[d] for d in order])}", moves="0")


row("expand", "... -> ...", moves="0", sizes={"size": "out0"})
sample("view reshape", _reshapes)
sample("numpy_T", lambda: [(rand(4, 6),)])

_BACK = {"input_sizes": "out0"}

# -- slice, select: a dim of which all is taken keeps its place ----------------------------
row("slice.Tensor", "... x[dim]? -> ... x[dim]?", moves="0")
row("slice_backward", "... x[dim]? -> ... x[dim]?", moves="0", sizes=_BACK)
row("slice_scatter", "... x[dim]?, ... x[dim]? -> ... x[dim]?", moves="0+1")
row("select.int", "... x[dim]! -> ...", moves="0")
row("select_backward", "... -> ... x[dim]", moves="0", sizes=_BACK)
row("select_scatter", "... x[dim]!, ... -> ... x[dim]!", moves="0+1")
sample("slice.Tensor", lambda: [(rand(5, 7), 1, 2, 6), (rand(5, 7), 1, 0, 7)])
sample("slice_backward", lambda: [(rand(5, 7), [5, 7], 1, 0, 7, 1)])
sample("slice_scatter", lambda: [(rand(5, 7), rand(5, 4), 1, 2, 6), (rand(5, 7), rand(5, 7, seed=1), 1, 0, 7)])

# -- split, cat ---------------------------------------------------------------------------
row(
    "split.Tensor unsafe_split.Tensor chunk unsafe_chunk split_with_sizes unsafe_split_with_sizes",
    "... x[dim]! -> ... s[dim]?+", moves="0",
)  # fmt: skip
row("unbind.int", "... x[dim]! -> ...+", moves="0")
sample("chunk unsafe_chunk", lambda: [(rand(5, 7, 6), 3, 1)])
sample("unsafe_split_with_sizes", lambda: [(rand(5, 7, 6), [3, 4], 1)])


@row("cat stack")
def cat(call: Call) -> BoundRule:
    """Joins along one dim, which stays whole; others are sharded together. `cat` ignores empty 1-d tensors, and of one
    other tensor it is a copy.
    """
    shape, stacks = call.made(), call.target is aten.stack.default
    positions = [i for i, m in enumerate(call.operands) if len(m.shape) == len(shape) - stacks]
    at = call.argument("dim", 0) % max(len(shape), 1)
    joined = () if len(positions) == 1 and not stacks else (at,)
    line: Term = tuple(None if i in joined or size == 1 else f"d{i}" for i, size in enumerate(shape))
    operand_line = (*line[:at], *line[at + 1 :]) if stacks else line
    through = PassThrough(frozenset(positions), ANY_PARTIAL, mixed=True)
    sizes = {factor: size for factor, size in zip(line, shape, strict=True) if factor}
    return BoundRule((Group(dict.fromkeys(positions, operand_line), {0: line}, partial=(through,), sizes=sizes),))


sample("cat", lambda: [([rand(5, 2, 6), rand(5, 3, 6)], 1), ([rand(0), rand(5, 3)], -1)])

# -- repeat, flip, roll ---------------------------------------------------------------------
row("repeat", "...? -> ...?", moves="0")
row("flip", "dims: ... x[dims]! -> ... x[dims]! | ... -> ...", moves="0")
row("roll", "... x[dims]! -> ... x[dims]!", moves="0")
row("rot90", "... x[dims]! -> ... y[dims]", moves="0")

# -- triangles, diagonals, windows ------------------------------------------------------------
_PAIR = "a[dim1]! b[dim2]!"
row("tril triu", "... a! b! -> ... a! b!", moves="0")
row("diagonal", f"... {_PAIR} -> ... s", moves="0")
row("diagonal_backward", f"... s! -> ... {_PAIR}", moves="0", sizes=_BACK)
row("diagonal_scatter", f"... {_PAIR}, ... s! -> ... {_PAIR}", moves="0+1")
row("diag_embed", f"... s! -> ... {_PAIR}", moves="0")
row("unfold", "... x[dimension]! -> ... s[dimension] w", moves="0")
row("unfold_backward", "... s[dim]! w! -> ... x[dim]", linear="0", sizes=_BACK)  # windows overlap
sample("diagonal_backward", lambda: [(rand(7, 4), [5, 7, 6], 2, 0, 2)])


@row("constant_pad_nd")
def constant_pad(call: Call) -> Bind:
    """Padded dims stay whole."""
    dims, pad = dims_of(call), call.argument("pad")
    padded = [d for i, d in enumerate(reversed(dims)) if any(pad[2 * i : 2 * i + 2])]
    out = [f"p{i}" if d in padded else d for i, d in enumerate(dims)]
    return Bind(text([term(dims, padded)], [term(out)]), moves="" if call.argument("value", 0) else "0")


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
    """True if the view starts at the first element and stays inside the tensor, which has no gaps."""
    have, size, stride = call.operands[0], call.argument("size"), call.argument("stride")
    reach, filled = span(size, stride), span(have.shape, have.stride) == have.numel
    return call.argument("storage_offset") is None and reach <= have.numel and (filled or not reach)


def _rows_apart(call: Call, shape: Sequence[int]) -> bool:
    """True if the view reads each row of a tensor separately."""
    size, stride = call.argument("size"), call.argument("stride")
    have = call.operands[0]
    if not have.is_contiguous or not size or not shape or size[0] != shape[0]:
        return False
    row = prod(shape[1:])
    reach = sum((n - 1) * step for n, step in zip(size[1:], stride[1:], strict=True))
    return row > 0 and stride[0] == row and reach < row


def _in_order(call: Call) -> tuple[str, str] | None:
    """Terms of a tensor and of a view of all of it in memory order, with sharded rows; None for other strides."""
    have, size, stride = call.operands[0], list(call.argument("size")), list(call.argument("stride"))
    plain = all(n == 1 or step == prod(size[i + 1 :]) for i, (n, step) in enumerate(zip(size, stride, strict=True)))
    is_full = plain and have.is_contiguous and prod(size) == have.numel
    if not is_full or len(size) < 2 or not have.numel or size[0] == 1:
        return None
    dims, inner = dims_of(call), [f"m{i}" for i in range(1, len(size))]
    view = term(["n", *inner], inner)
    if have.shape[0] == size[0]:
        return term(["n", *dims[1:]], dims[1:]), view
    return (f"(n {' '.join(inner)})", view) if len(dims) == 1 else None


@row("as_strided")
def as_strided(call: Call) -> Bind | None:
    """Reads memory, not dims: whole, unless rows are read separately or in order.

    Capture replaces views that leave their tensor or start elsewhere in memory (`capture.strides`).
    """
    if not _stays_inside(call):
        return None
    in_order = _in_order(call)
    if in_order:
        return Bind(text([in_order[0]], [in_order[1]]), moves="0", local={"n": _view_piece})
    dims, names = dims_of(call), [f"m{i}" for i in range(len(call.made()))]
    if not _rows_apart(call, call.shape(0)):
        return Bind(text([term(dims, dims)], [term(names)]), moves="0")
    source = term(["n", *dims[1:]], dims[1:])
    rule_text = text([source], [term(["n", *names[1:]])])
    return Bind(rule_text, moves="0", local={"n": _rows_piece}, filled=frozenset("n"))


@row(
    "as_strided_scatter",
    samples=lambda: [
        (rand(30), rand(5, 6, seed=1), [5, 6], [6, 1]), (rand(5, 6), rand(5, 3, 2, seed=1), [5, 3, 2], [6, 2, 1]),
        (rand(5, 6), rand(3, 4, seed=1), [3, 4], [6, 1]), (rand(60), rand(12, 5, seed=1), [12, 5], [5, 1]),
    ],
)  # fmt: skip
def as_strided_scatter(call: Call) -> Bind | None:
    """Writes memory, not dims: whole, unless all of it is written in order."""
    if not _stays_inside(call):
        return None
    in_order = _in_order(call)
    if not in_order:
        return Bind(WHOLE)
    source, target = in_order
    return Bind(text([source, target], [source]), moves="0+1", local={"n": _written_piece})
