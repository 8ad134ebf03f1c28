"""Softmax and its logarithm: whole along the dim they normalize, linear in the gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .call import Call
from .registry import Bind, rule
from .terms import aten, dims_of, ops, rand, term, text


def along(call: Call) -> str:
    """The term of every tensor of the call, whole along `dim`."""
    dims = dims_of(call)
    dim = call.argument("dim", -1)
    at = (-1 if dim is None else dim) % max(len(dims), 1)
    return term(dims, dims[at : at + 1])


@rule(
    [aten._softmax.default, aten._log_softmax.default],
    samples=lambda: [(rand(5, 6, 3), 1, False), (rand(5, 6, 3), -1, False)],
)
@rule(ops("softmax.int", "log_softmax.int", "_safe_softmax"), samples=lambda: [(rand(5, 6, 3), 1), (rand(5, 6, 3), -1)])
def forward(call: Call) -> Bind:
    """Normalized along one dim."""
    dims = along(call)
    return Bind(text([dims], [dims]))


def _gradients() -> Iterator[tuple[Any, ...]]:
    for dim in (1, -1):
        out = rand(5, 6, 3, seed=1)
        yield rand(5, 6, 3), out.log_softmax(dim), dim, out.dtype


@rule([aten._softmax_backward_data.default, aten._log_softmax_backward_data.default], samples=_gradients)
def backward(call: Call) -> Bind:
    """Gradients are summed along the same dim."""
    dims = along(call)
    return Bind(text([dims, dims], [dims]), "0")


@rule(
    ops("_masked_softmax"),
    samples=lambda: [(rand(5, 2, 6, 6), rand(5, 6) > 0.5, 3, 1), (rand(5, 2, 6, 6), rand(6, 6) > 0.5, 3, 0)],
)
def masked(call: Call) -> Bind:
    """Over the last dim of (rows, heads, queries, keys), with a mask over (queries, keys), (rows, keys) or all."""
    kind = call.argument("mask_type")
    mask = {0: "q! k!", 1: "b k!"}.get(kind, "b h q k!")  # the op insists on queries = keys for the first two
    full = "b h q k!" if kind == 2 else "b h q! k!"
    return Bind(text([full, mask], [full]))
