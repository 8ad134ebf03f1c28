"""Sorting, the largest entries, places in sorted rows: whole along the dim they look along."""

from __future__ import annotations

from .call import Call
from .registry import Bind, rule
from .terms import dims_of, ints, ops, rand, term, text


@rule(ops("topk"), samples=lambda: [(rand(5, 7, 6), 3, 1), (rand(5, 7), 2)])
@rule(ops("sort", "argsort"), samples=lambda: [(rand(5, 7, 6), 1), (rand(5, 7),)])
@rule(ops("sort.stable", "argsort.stable"), samples=lambda: [(rand(5, 7, 6), {"stable": True, "dim": 1})])
def ordered(call: Call) -> Bind:
    """Values and their indices, or indices alone, along one dim."""
    dims = dims_of(call)
    at = int(call.argument("dim", -1)) % max(len(dims), 1)
    size = call.made()[at : at + 1] == call.shape(0)[at : at + 1]
    out = [d if i != at or size else "k" for i, d in enumerate(dims)]
    made = term(out, dims[at : at + 1] if size else ())
    return Bind(text([term(dims, dims[at : at + 1])], [made] * len(call.outputs)))


@rule(ops("kthvalue"), samples=lambda: [(rand(5, 7, 6), 3, 1), (rand(5, 7), 2, 1, True)])
@rule(ops("nanmedian.dim", "mode", "median.dim"), samples=lambda: [(rand(5, 7, 6), 1), (rand(5, 7), 1, True)])
def one_of_each_row(call: Call) -> Bind:
    """One value of each row, and its index."""
    dims = dims_of(call)
    at = int(call.argument("dim", -1)) % max(len(dims), 1)
    keep = ["1"] if call.argument("keepdim") and dims else []
    out = term([*dims[:at], *keep, *dims[at + 1 :]])
    return Bind(text([term(dims, dims[at : at + 1])], [out] * len(call.outputs)))


rule(ops("median", "nanmedian"), "...! -> ()", samples=lambda: [(rand(5, 7),)])


@rule(
    ops("searchsorted.Tensor"),
    samples=lambda: [(rand(5, 7).sort().values, rand(5, 6)), (rand(7).sort().values, rand(5, 6))],
)
def searchsorted(call: Call) -> Bind:
    """Places in a sorted row: one row for all, or one for each."""
    rows = "... a!" if len(call.shape(0)) > 1 else "a!"
    return Bind(f"{rows}, ... b, {rows} -> ... b")


@rule(ops("searchsorted.Scalar"), samples=lambda: [(rand(7).sort().values, 0.5)])
def searchsorted_number(call: Call) -> Bind:
    """The place of one number."""
    return Bind("a!, a! -> ()")


rule(ops("bucketize.Tensor"), "..., a! -> ...", samples=lambda: [(rand(5, 6), rand(7).sort().values)])
rule(ops("bucketize.Scalar"), "a! -> ()", samples=lambda: [(0.5, rand(7).sort().values)])


@rule(ops("isin.Tensor_Tensor"), samples=lambda: [(ints(9, 5, 6), ints(9, 7))])
def isin(call: Call) -> Bind:
    """Which entries are among others."""
    return Bind(text(["...", term(dims_of(call, 1), dims_of(call, 1))], ["..."]))
