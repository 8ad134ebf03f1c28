"""Matrix products. A contracted factor that is cut leaves partial sums."""

from __future__ import annotations

import torch

from .call import Call
from .registry import Bind, rule

aten = torch.ops.aten

rule(aten.mm.default, "m k, k n -> m n", linear="0 | 1")
rule(aten.bmm.default, "b m k, b k n -> b m n", linear="0 | 1")
rule(aten.mv.default, "m k, k -> m", linear="0 | 1")
rule(aten.dot.default, "k, k -> ()", linear="0 | 1")
rule(aten.vdot.default, "k, k -> ()", linear="0 | 1")
rule(aten.ger.default, "m, n -> m n", linear="0 | 1", samples=lambda: [(torch.randn(5), torch.randn(4))])


@rule([aten.addmm.default, aten.addbmm.default, aten.baddbmm.default])
def with_bias(call: Call) -> Bind:
    """A product and a bias that broadcasts: the bias must be added once, so a cut contraction needs it whole."""
    name = call.target._overloadpacket.__name__
    product = {"addmm": "m k!, k! n -> m n", "baddbmm": "b m k!, b k! n -> b m n", "addbmm": "b! m k!, b! k! n -> m n"}
    left, _, made = product[name].partition("->")
    dims = made.split()
    bias = dims[len(dims) - len(call.shape(0)) :]
    term = " ".join("1" if size == 1 else dim for dim, size in zip(bias, call.shape(0), strict=True)) or "()"
    return Bind(f"{term}, {left}-> {made}")
