"""Views: dims of the result from dims of the operand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..call import Call
from ..dsl import aten, dims_of, rand, row, sample, term
from ..registry import Bind
from ..rule import BoundRule


def regroup(have: Sequence[int], want: Sequence[int]) -> tuple[str, str]:
    """Terms of a view from one shape to another, with the finest dims of which both consist.

    Dims are matched from the left. A run of dims with equal products becomes a merged dim if one side is one dim, and
    stays whole otherwise.
    """
    left: list[str] = []
    right: list[str] = []
    whole = " ".join(f"w{k}!" for k in range(len(have))), " ".join(f"v{k}!" for k in range(len(want)))
    i = j = number = 0
    while i < len(have) or j < len(want):
        if i < len(have) and have[i] == 1:
            left.append("1")
            i += 1
            continue
        if j < len(want) and want[j] == 1:
            right.append("1")
            j += 1
            continue
        if i == len(have) or j == len(want):
            return whole
        a, b, start, begin = have[i], want[j], i, j
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(have):
                a, i = a * have[i], i + 1
            elif j < len(want):
                b, j = b * want[j], j + 1
            else:
                return whole
        number = _run(list(have[start:i]), list(want[begin:j]), number, left, right)
    return " ".join(left) or "()", " ".join(right) or "()"


def _run(have: list[int], want: list[int], number: int, left: list[str], right: list[str]) -> int:
    """One run of dims with equal products."""
    if len(have) == 1 or len(want) == 1:
        many = want if len(have) == 1 else have
        names = [f"f{number + k}" if size != 1 else "1" for k, size in enumerate(many)]
        split = names if len(many) > 1 else [f"f{number}"]
        merged = "(" + " ".join(n for n in split if n != "1") + ")" if len(many) > 1 else split[0]
        left += [merged] if len(have) == 1 else split
        right += [merged] if len(want) == 1 else split
        return number + len(many)
    # several on both sides: the outermost dims are shared as far as one divides the other
    a, b = have[0], want[0]
    if a % b == 0 or b % a == 0:
        outer = min(a, b)
        rest = max(a, b) // outer
        big = f"(f{number} r{number})" if rest > 1 else f"f{number}"
        left.append(big if a >= b else f"f{number}")
        right.append(f"f{number}" if a >= b else big)
    else:
        left.append(f"w{number}!")
        right.append(f"v{number}!")
    left += [f"x{number}_{k}!" for k in range(1, len(have))]
    right += [f"y{number}_{k}!" for k in range(1, len(want))]
    return number + 1


def _reshapes() -> list[tuple[Any, ...]]:
    shapes = [((4, 6), [24]), ((4, 6), [2, 2, 6]), ((4, 6), [8, 3]), ((6, 4, 5), [3, 8, 5]), ((2, 5, 3), [10, 3])]
    return [(rand(*have), want) for have, want in shapes]


@row("view _unsafe_view reshape unsqueeze squeeze squeeze.dim squeeze.dims")
def view(call: Call) -> Bind | BoundRule:
    """The outer factor of a merged or split dim may be sharded evenly."""
    left, right = regroup(call.shape(0), call.made())
    plain = Bind(f"{left} -> {right}", moves="0")
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
