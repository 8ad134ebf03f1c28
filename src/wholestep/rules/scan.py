"""Running sums, products, maxima: whole along the dim they run along."""

from __future__ import annotations

from .call import Call
from .registry import Bind, rule
from .terms import aten, dims_of, ops, rand, term, text

_SAMPLES = ((1,), (-1,))


def scan(call: Call) -> Bind:
    """Every other dim may be cut. Sums are linear."""
    dims = dims_of(call)
    at = int(call.argument("dim")) % max(len(dims), 1)
    full = term(dims, dims[at : at + 1])
    return Bind(text([full], [full] * len(call.outputs)), "0" if call.target is aten.cumsum.default else "")


rule(
    ops("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"),
    samples=lambda: [(rand(5, 7, 6), *dim) for dim in _SAMPLES],
)(scan)


@rule(ops("renorm"), samples=lambda: [(rand(5, 7, 6), 2, 1, 0.5)])
def renorm(call: Call) -> Bind:
    """Each entry of one dim is made shorter: that dim may be cut, the others not."""
    dims = dims_of(call)
    at = int(call.argument("dim")) % len(dims)
    full = term(dims, [d for i, d in enumerate(dims) if i != at])
    return Bind(text([full], [full]))
