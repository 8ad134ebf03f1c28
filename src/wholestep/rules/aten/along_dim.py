"""Ops along one dim, which stays whole: softmax, cumulative sums, sorting, top-k."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..dsl import ints, rand, row, sample

# -- normalized along it ------------------------------------------------------------------
row("_softmax _log_softmax softmax.int log_softmax.int _safe_softmax", "... x[dim]! -> ... x[dim]!")
sample("_softmax _log_softmax", lambda: [(rand(5, 6, 3), 1, False), (rand(5, 6, 3), -1, False)])
sample("softmax.int log_softmax.int _safe_softmax", lambda: [(rand(5, 6, 3), 1), (rand(5, 6, 3), -1)])


def _softmax_gradients() -> Iterator[tuple[Any, ...]]:
    for dim in (1, -1):
        out = rand(5, 6, 3, seed=1)
        yield rand(5, 6, 3), out.log_softmax(dim), dim, out.dtype


row(
    "_softmax_backward_data _log_softmax_backward_data",
    "... x[dim]!, ... x[dim]! -> ... x[dim]!", linear="0", samples=_softmax_gradients,
)  # fmt: skip
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
sample("cumsum cumprod logcumsumexp cummax cummin", lambda: [(rand(5, 7, 6), 1), (rand(5, 7, 6), -1)])

# -- sorted ---------------------------------------------------------------------------------
row("sort sort.stable argsort argsort.stable topk", "... x[dim]! -> ... k[dim]+")
sample("topk", lambda: [(rand(5, 7, 6), 3, 1), (rand(5, 7), 2)])
sample("sort argsort", lambda: [(rand(5, 7, 6), 1), (rand(5, 7),)])
sample("sort.stable argsort.stable", lambda: [(rand(5, 7, 6), {"stable": True, "dim": 1})])
row("kthvalue mode median.dim nanmedian.dim", "... x[dim]! -> ... 1[dim]+")
sample("kthvalue", lambda: [(rand(5, 7, 6), 3, 1), (rand(5, 7), 2, 1, True)])
sample("mode median.dim nanmedian.dim", lambda: [(rand(5, 7, 6), 1), (rand(5, 7), 1, True)])
row("median nanmedian", "...! -> ()", samples=lambda: [(rand(5, 7),)])
row(
    "searchsorted.Tensor",
    "a!, ... b, a! -> ... b | a!, (), a! -> () | ... a!, ... b, ... a! -> ... b",
    samples=lambda: [
        (rand(5, 7).sort().values, rand(5, 6)),
        (rand(7).sort().values, rand(5, 6)),
        (rand(7).sort().values, rand()),
    ],
)
row("searchsorted.Scalar", "a!, a! -> ()", samples=lambda: [(rand(7).sort().values, 0.5)])
row("bucketize.Tensor", "..., a! -> ...", samples=lambda: [(rand(5, 6), rand(7).sort().values)])
row("bucketize.Scalar", "a! -> ()", samples=lambda: [(0.5, rand(7).sort().values)])
row("isin.Tensor_Tensor", "..., a...! -> ...", samples=lambda: [(ints(9, 5, 6), ints(9, 7))])
row("renorm", "...! x[dim] -> ...! x[dim]", samples=lambda: [(rand(5, 7, 6), 2, 1, 0.5)])
row(
    "linalg_cross",
    "... x[dim]!, ... x[dim]! -> ... x[dim]!", linear="0 | 1",
    samples=lambda: [(rand(5, 3, 6), rand(5, 3, 6, seed=1), {"dim": 1})],
)  # fmt: skip

# -- gated units: one half times the sigmoid of the other ------------------------------------
row("glu", "... x[dim]! -> ... h[dim]", samples=lambda: [(rand(5, 6, 7), 1), (rand(5, 6),)])
row(
    "glu_backward",
    "... h[dim]!, ... x[dim]! -> ... x[dim]!", linear="0", samples=lambda: [(rand(5, 3, 7), rand(5, 6, 7), 1)],
)  # fmt: skip
