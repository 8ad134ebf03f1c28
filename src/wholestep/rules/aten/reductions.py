"""Reductions, ops along a dim that stays whole (softmax, running sums, sorting), and ops that need all of a tensor.

A sharded factor of a sum makes partial sums, of a maximum partial maxima.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..call import Call
from ..dsl import WHOLE, ints, rand, row, sample
from ..registry import Bind
from ..rule import BoundRule, Group, PassThrough

_NORMS: dict[object, str] = {1: "norm1", 2: "norm2", float("inf"): "max"}

# -- to one value ---------------------------------------------------------------------------
row("sum sum.dim_IntList", "... x[dim] -> ... 1[dim]", linear="0")
row("count_nonzero count_nonzero.dim_IntList nansum linalg__powsum", "... x[dim] -> ... 1[dim]")
row("amax max", "... x[dim] -> ... 1[dim]", reduces={"x": "max"})
row("amin min", "... x[dim] -> ... 1[dim]", reduces={"x": "min"})
row("mean mean.dim", "... x[dim]! -> ... 1[dim]", linear="0")  # a sum divided by the count would be partial
row(
    "prod prod.dim_int max.dim min.dim aminmax _aminmax _aminmax.dim argmax argmin any any.dim any.dims all all.dim"
    " all.dims logsumexp var.correction std.correction var_mean.correction std_mean.correction norm.Scalar"
    " norm.ScalarOpt_dim norm.ScalarOpt_dtype norm.ScalarOpt_dim_dtype native_norm native_norm.ScalarOpt_dim_dtype",
    "... x[dim]! -> ... 1[dim]+",
)
row("trace", "a! b! -> ()", linear="0")
row("dist", "...!, ...! -> ()")
sample("norm.ScalarOpt_dim_dtype", lambda: [(rand(5, 7), 3, [1], False, {"dtype": torch.float64})])
sample("norm.ScalarOpt_dtype", lambda: [(rand(5, 7), 3, {"dtype": torch.float64})])
sample("norm.Scalar", lambda: [(rand(5, 7), 3)])
sample("linalg__powsum", lambda: [(rand(5, 7), 3), (rand(5, 7), 3, [1])])
sample("_aminmax", lambda: [(rand(5, 7),)])
sample("_aminmax.dim", lambda: [(rand(5, 7), 1)])


@row("histc", samples=lambda: [(rand(5, 7), 4, -2, 2)])
def histc(call: Call) -> str:
    """Counts in bins: partial if the range is given, else the range needs all values."""
    return "... -> k" if call.argument("min") != call.argument("max") else "...! -> k"


@row("linalg_vector_norm")
def vector_norm(call: Call) -> BoundRule | Bind:
    """Norms over all elements combine; over some dims those stay whole."""
    op, ndim = _NORMS.get(call.argument("ord", 2)), len(call.shape(0))
    named: Any = call.argument("dim")
    dims = [named] if isinstance(named, int) else list(named or range(ndim))
    if op is not None and len(dims) == ndim and not call.made():
        return BoundRule((_norm(0, call.shape(0), op),))
    return Bind("... x[dim]! -> ... 1[dim]")


def _lists() -> list[tuple[Any, ...]]:
    tensors = [torch.randn(4, 6), torch.randn(5)]
    return [(tensors,), (tensors, 1), (tensors, float("inf"))]


@row("_foreach_norm.Scalar", samples=_lists)
def foreach_norm(call: Call) -> BoundRule | None:
    """One norm for each tensor of a list."""
    op = _NORMS.get(call.argument("ord", 2))
    return BoundRule(tuple(_norm(i, m.shape, op) for i, m in enumerate(call.operands))) if op else None


def _norm(number: int, shape: Sequence[int], op: str) -> Group:
    """A norm over all dims of one tensor, the operand and output `number`.

    The maximum of no elements is an error, so no piece may be empty; partial maxima may be negative and do not pass.
    """
    term = tuple(f"d{i}" for i in range(len(shape)))
    filled = dict(zip(term, shape, strict=True)) if op == "max" else {}
    through = () if op == "max" else (PassThrough(frozenset({number}), frozenset({op})),)
    return Group({number: term}, {number: ()}, dict.fromkeys(term, op), through, filled=filled)


# -- normalized along a dim -------------------------------------------------------------------
row("_softmax _log_softmax softmax.int log_softmax.int _safe_softmax", "... x[dim]! -> ... x[dim]!")
row("_softmax_backward_data _log_softmax_backward_data", "... x[dim]!, ... x[dim]! -> ... x[dim]!", linear="0")
sample("softmax.int log_softmax.int", lambda: [(rand(5, 6, 3), 1), (rand(5, 6, 3), -1)])
# (rows, heads, queries, keys) with a mask over all, (queries, keys) or (rows, keys); the last two want as many queries
# as keys
row(
    "_masked_softmax",
    "mask_type=2: b h q k!, b h q k! -> b h q k! | mask_type=0: b h q! k!, q! k! -> b h q! k!"
    " | mask_type=1: b h q! k!, b k! -> b h q! k! | b h q! k!, b h q! k! -> b h q! k!",
    samples=lambda: [(rand(5, 2, 6, 6), rand(5, 6) > 0.5, 3, 1), (rand(5, 2, 6, 6), rand(6, 6) > 0.5, 3, 0)],
)

# -- running -------------------------------------------------------------------------------
row("cumsum", "... x[dim]! -> ... x[dim]!", linear="0")
row("cumprod logcumsumexp cummax cummin", "... x[dim]! -> ... x[dim]!+")

# -- sorted ---------------------------------------------------------------------------------
row("sort sort.stable argsort argsort.stable topk", "... x[dim]! -> ... k[dim]+")
sample("argsort", lambda: [(rand(5, 7, 6), 1), (rand(5, 7),)])
sample("argsort.stable", lambda: [(rand(5, 7, 6), {"stable": True, "dim": 1})])
row("kthvalue mode median.dim nanmedian.dim", "... x[dim]! -> ... 1[dim]+")
row("median nanmedian", "...! -> ()")
row(
    "searchsorted.Tensor",
    "a!, ... b, a! -> ... b | a!, (), a! -> () | ... a!, ... b, ... a! -> ... b",
    samples=lambda: [(rand(5, 7).sort().values, rand(5, 6)), (rand(7).sort().values, rand(5, 6))],
)
row("searchsorted.Scalar", "a!, a! -> ()", samples=lambda: [(rand(7).sort().values, 0.5)])
row("bucketize.Tensor", "..., a! -> ...")
row("bucketize.Scalar", "a! -> ()", samples=lambda: [(0.5, rand(7).sort().values)])
row("isin.Tensor_Tensor", "..., a...! -> ...", samples=lambda: [(ints(9, 5, 6), ints(9, 7))])
row("renorm", "...! x[dim] -> ...! x[dim]")
row("linalg_cross", "... x[dim]!, ... x[dim]! -> ... x[dim]!", linear="0 | 1")

# -- gated units: one half times the sigmoid of the other ------------------------------------
row("glu", "... x[dim]! -> ... h[dim]")
row("glu_backward", "... h[dim]!, ... x[dim]! -> ... x[dim]!", linear="0")

# -- unsharded: each entry depends on all others, or the size of the result on values ----------
row(
    "bincount histogram.bin_ct histogram.bins_tensor _histogramdd_bin_edges _histogramdd_from_bin_cts"
    " _histogramdd_from_bin_tensors _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive nonzero"
    " nonzero_static masked_select masked_scatter masked_scatter_backward repeat_interleave.Tensor put block_diag"
    " allclose hash_tensor _is_all_true _is_any_true _chunk_cat segment_reduce _segment_reduce_backward _embedding_bag"
    " _embedding_bag_backward _embedding_bag_per_sample_weights_backward _pdist_forward _pdist_backward _trilinear"
    " linalg_lstsq linalg_pinv.atol_rtol_tensor _linalg_check_errors",
    WHOLE,
)
sample("_is_all_true _is_any_true", lambda: [(rand(5, 7) > 0,)])
sample("unique_dim unique_dim_consecutive", lambda: [(ints(3, 5, 2), 0)])
