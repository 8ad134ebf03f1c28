"""Reductions: a factor that is summed away leaves partial sums, a maximum partial maxima."""

from __future__ import annotations

from typing import Any

import torch

from .call import Call
from .lists import NORMS, norm_group
from .registry import Bind, rule
from .rule import BoundRule
from .terms import ops, rand

aten = torch.ops.aten


def reduced_dims(call: Call, name: str = "dim") -> list[int]:
    """Dims an op reduces, counted from 0; all of them when it names none."""
    ndim = len(call.shape(0))
    given: Any = call.argument(name)
    dims = [given] if isinstance(given, int) else list(given or range(ndim))
    return [d % ndim for d in dims] if ndim else []


def terms(call: Call, dims: list[int], whole: bool) -> tuple[str, str]:
    """Input and output terms of a reduction over `dims`."""
    ndim, keep = len(call.shape(0)), len(call.made()) == len(call.shape(0))
    names = [f"d{i}" for i in range(ndim)]
    left = [n + ("!" if whole and i in dims else "") for i, n in enumerate(names)]
    right = ["1" if i in dims else n for i, n in enumerate(names) if keep or i not in dims]
    return " ".join(left) or "()", " ".join(right) or "()"


def reduction(op: str, linear: bool = False) -> Any:
    """The rule of a reduction whose pieces combine by `op`; '' when they do not combine."""

    def bind(call: Call) -> Bind:
        dims = reduced_dims(call)
        left, right = terms(call, dims, whole=not op)
        made = ", ".join([right] * len(call.outputs))
        reduces = {f"d{d}": op for d in dims} if op else {}
        return Bind(f"{left} -> {made}", "0" if linear else "", reduces)

    return bind


rule([aten.sum.default, aten.sum.dim_IntList])(reduction("sum", linear=True))
rule([aten.amax.default, aten.max.default])(reduction("max"))
rule([aten.amin.default, aten.min.default])(reduction("min"))
rule(
    [aten.prod.default, aten.prod.dim_int, aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default,
     aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.logsumexp.default,
     aten.var.correction, aten.std.correction, aten.var_mean.correction,
     *ops("all.dims", "std_mean.correction", "aminmax", "_aminmax", "_aminmax.dim", "norm.ScalarOpt_dim",
          "native_norm", "native_norm.ScalarOpt_dim_dtype")]
)(reduction(""))  # fmt: skip
rule(ops("norm.ScalarOpt_dim_dtype"), samples=lambda: [(rand(5, 7), 3, [1], False, {"dtype": torch.float64})])(
    reduction("")
)
rule(ops("norm.Scalar"), samples=lambda: [(rand(5, 7), 3)])(reduction(""))
rule(ops("norm.ScalarOpt_dtype"), samples=lambda: [(rand(5, 7), 3, {"dtype": torch.float64})])(reduction(""))
rule(ops("linalg__powsum"), samples=lambda: [(rand(5, 7), 3), (rand(5, 7), 3, [1])])(reduction("sum"))
rule(ops("count_nonzero", "count_nonzero.dim_IntList", "nansum"))(reduction("sum"))
rule(ops("_aminmax"), samples=lambda: [(rand(5, 7),)])(reduction(""))
rule(ops("_aminmax.dim"), samples=lambda: [(rand(5, 7), 1)])(reduction(""))
rule(ops("trace"), "a! b! -> ()", linear="0", samples=lambda: [(rand(5, 7),)])


@rule(ops("dist"), samples=lambda: [(rand(5, 7), rand(7, seed=1), 3)])
def dist(call: Call) -> Bind:
    """A norm of a difference."""
    return Bind("...!, ...! -> ()")


@rule(ops("histc"), samples=lambda: [(rand(5, 7), 4, -2, 2), (rand(5, 7), 4)])
def histc(call: Call) -> Bind:
    """Counts in bins: sums where the range is given, else over the range of all values."""
    given = call.argument("min") != call.argument("max")
    return Bind("... -> k" if given else "...! -> k")


@rule([aten.mean.default, aten.mean.dim])
def mean(call: Call) -> Bind:
    """Linear in what is averaged; a cut mean must first become a sum divided by the count."""
    left, right = terms(call, reduced_dims(call), whole=True)
    return Bind(f"{left} -> {right}", "0")


@rule(aten.linalg_vector_norm.default)
def vector_norm(call: Call) -> BoundRule | Bind | None:
    """Norms over all elements combine; over some dims those stay whole."""
    op = NORMS.get(call.argument("ord", 2))
    dims = reduced_dims(call)
    if op is not None and len(dims) == len(call.shape(0)) and not call.made():
        return BoundRule((norm_group(0, 0, call.shape(0), op),))
    left, right = terms(call, dims, whole=True)
    return Bind(f"{left} -> {right}")
