"""Reductions: a sharded factor of a sum makes partial sums, of a maximum partial maxima."""

from __future__ import annotations

from typing import Any

import torch

from ..call import Call
from ..dsl import rand, row, sample
from ..registry import Bind
from ..rule import BoundRule
from .foreach import NORMS, norm_group

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
row("trace", "a! b! -> ()", linear="0", samples=lambda: [(rand(5, 7),)])
row("dist", "...!, ...! -> ()", samples=lambda: [(rand(5, 7), rand(7, seed=1), 3)])
sample("norm.ScalarOpt_dim_dtype", lambda: [(rand(5, 7), 3, [1], False, {"dtype": torch.float64})])
sample("norm.ScalarOpt_dtype", lambda: [(rand(5, 7), 3, {"dtype": torch.float64})])
sample("norm.Scalar", lambda: [(rand(5, 7), 3)])
sample("linalg__powsum", lambda: [(rand(5, 7), 3), (rand(5, 7), 3, [1])])
sample("_aminmax", lambda: [(rand(5, 7),)])
sample("_aminmax.dim", lambda: [(rand(5, 7), 1)])


@row("histc", samples=lambda: [(rand(5, 7), 4, -2, 2), (rand(5, 7), 4)])
def histc(call: Call) -> str:
    """Counts in bins: partial if the range is given, else the range needs all values."""
    return "... -> k" if call.argument("min") != call.argument("max") else "...! -> k"


@row("linalg_vector_norm")
def vector_norm(call: Call) -> BoundRule | Bind:
    """Norms over all elements combine; over some dims those stay whole."""
    op, ndim = NORMS.get(call.argument("ord", 2)), len(call.shape(0))
    named: Any = call.argument("dim")
    dims = [named] if isinstance(named, int) else list(named or range(ndim))
    if op is not None and len(dims) == ndim and not call.made():
        return BoundRule((norm_group(0, 0, call.shape(0), op),))
    return Bind("... x[dim]! -> ... 1[dim]")
