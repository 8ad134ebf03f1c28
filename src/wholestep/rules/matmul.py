"""Matrix products. A contracted factor that is cut leaves partial sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from .call import Call
from .registry import Bind, Function, rule
from .rule import BoundRule
from .terms import fitted, ops, rand, text

aten = torch.ops.aten

rule(aten.mm.default, "m k, k n -> m n", linear="0 | 1")
rule(aten.bmm.default, "b m k, b k n -> b m n", linear="0 | 1")


@rule(aten.matmul.default, samples=lambda: [(rand(2, 3, 5, 4), rand(2, 3, 4, 6)), (rand(3, 5, 4), rand(2, 1, 4, 6))])
def matmul(call: Call) -> Bind | None:
    """Products of matrices over any leading dims; of vectors nothing is said."""
    if min(len(call.shape(0)), len(call.shape(1))) < 2:
        return None
    return Bind("... m k, ... k n -> ... m n", "0 | 1")


rule(aten.mv.default, "m k, k -> m", linear="0 | 1")
rule(aten.dot.default, "k, k -> ()", linear="0 | 1")
rule(aten.vdot.default, "k, k -> ()", linear="0 | 1")
rule(aten.ger.default, "m, n -> m n", linear="0 | 1", samples=lambda: [(torch.randn(5), torch.randn(4))])


@rule([aten.addmm.default, aten.addbmm.default, aten.baddbmm.default])
def with_bias(call: Call) -> Bind:
    """A product and a bias that broadcasts: the bias must be added once, so a cut contraction needs it whole."""
    name = call.target._overloadpacket.__name__.removeprefix("_").removesuffix("_activation")
    product = {"addmm": "m k!, k! n -> m n", "baddbmm": "b m k!, b k! n -> b m n", "addbmm": "b! m k!, b! k! n -> m n"}
    left, _, made = product[name].partition("->")
    dims = made.split()
    bias = dims[len(dims) - len(call.shape(0)) :]
    term = " ".join("1" if size == 1 else dim for dim, size in zip(bias, call.shape(0), strict=True)) or "()"
    return Bind(f"{term}, {left}-> {made}")


rule(ops("mm.dtype"), "m k, k n -> m n", linear="0 | 1")
rule(ops("bmm.dtype"), "b m k, b k n -> b m n", linear="0 | 1")
rule(ops("_int_mm"), "m k, k n -> m n", linear="0 | 1", samples=lambda: [_bytes()])
rule(ops("addmm.dtype", "baddbmm.dtype", "_addmm_activation"))(with_bias)
rule(
    ops("_addmm_activation"),
    samples=lambda: [(rand(6), rand(5, 4), rand(4, 6)), (rand(6), rand(5, 4), rand(4, 6), {"use_gelu": True})],
)(with_bias)


def _bytes() -> tuple[torch.Tensor, torch.Tensor]:
    return (3 * rand(5, 4)).to(torch.int8), (3 * rand(4, 6)).to(torch.int8)


@rule(ops("addmv"))
def matrix_vector(call: Call) -> Bind:
    """A product with a vector, and a bias."""
    return Bind(text([fitted(["m"], call.shape(0)), "m k!", "k!"], ["m"]), filled=frozenset("m"))


@rule(ops("addr"))
def outer(call: Call) -> Bind:
    """A product of vectors, and a bias."""
    return Bind(text([fitted(["m", "n"], call.shape(0)), "m", "n"], ["m n"]))


def _scales() -> Iterator[tuple[Any, ...]]:
    small, wide = rand(8, 32).to(torch.float8_e4m3fn), rand(16, 32, seed=1).to(torch.float8_e4m3fn).t()
    yield small, wide, torch.tensor(0.5), torch.tensor(2.0), None, None, torch.float32
    yield small, wide, rand(8, 1).abs().float(), rand(1, 16).abs().float(), None, None, torch.float32


@rule(ops("_scaled_mm"), samples=_scales)
def scaled(call: Call) -> Bind | None:
    """A product of numbers of 8 bits, with a scale for all, or for each row and column."""
    (m, n), sizes = call.made(), [call.operands[s.positions[0]].numel for s in call.slots[2:4] if s.positions]
    if len(sizes) != 2 or sizes[0] not in (1, m) or sizes[1] not in (1, n):
        return None
    rows, columns = (fitted(dims, call.shape(i)) for dims, i in ((["m", "k"], 2), (["k", "n"], 3)))
    return Bind(text(["m k!", "k! n", rows, columns, "n", "*"], ["m n"]))


def _groups() -> Iterator[tuple[Any, ...]]:
    ends = torch.tensor([3, 5, 8], dtype=torch.int32)
    yield rand(8, 16).float(), rand(3, 16, 24).float(), ends
    yield rand(3, 16, 24).float(), rand(3, 24, 16).float()


@rule(ops("_grouped_mm"), samples=_groups)
def grouped(call: Call) -> BoundRule | None:
    """Products of groups of rows, or of columns, or of matrices: `offsets` say where each group ends.

    The kernel wants rows of a multiple of 16 bytes: pieces are as long.
    """
    kinds = {(2, 3): "t! k, e! k n, e! -> t! n", (3, 2): "e! m k, k t!, e! -> m t!", (2, 2): "m t!, t! n, e! -> e m n",
             (3, 3): "e m k, e k n, * -> e m n"}  # fmt: skip
    if call.slots[3].positions:
        return None
    left, _, made = kinds[len(call.shape(0)), len(call.shape(1))].partition(" -> ")
    bound = Bind(f"{left}, * -> {made}", "0 | 1").on(call)
    group, size = bound.groups[0], call.operands[0].dtype.itemsize
    lengths = {f: n for i, t in group.operands.items() for f, n in zip(t, call.shape(i), strict=True) if f}
    even = {f: n * size // 16 for f, n in lengths.items() if f != "e"}
    return replace(bound, groups=(replace(group, even=even),))


# Ops of other libraries, by name: they exist once those are imported.
LATE: dict[str, Function] = {
    "transformers.grouped_mm_fallback.default": lambda call: Bind("t! k, e! k n, e! -> t! n", "0 | 1"),
    "transformers.grouped_mm_fallback_backward.default": lambda call: Bind(
        "t! k, e! k n, e!, t! n -> t! k, e! k n", "3"
    ),
}
