"""Matrix products, linear algebra, Fourier transforms. A sharded contracted factor makes partial sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..call import Call
from ..dsl import WHOLE, rand, row, sample
from ..registry import Bind
from ..rule import BoundRule

# -- products -------------------------------------------------------------------------------
row("mm mm.dtype _int_mm", "m k, k n -> m n", linear="0 | 1")
row("bmm bmm.dtype", "b m k, b k n -> b m n", linear="0 | 1")
row("matmul", f"... m k, ... k n -> ... m n | {WHOLE}", linear="0 | 1")  # vectors stay whole
row("mv", "m k, k -> m", linear="0 | 1")
row("dot vdot", "k, k -> ()", linear="0 | 1")
row("ger", "m, n -> m n", linear="0 | 1", samples=lambda: [(torch.randn(5), torch.randn(4))])
sample("matmul", lambda: [(rand(2, 3, 5, 4), rand(2, 3, 4, 6)), (rand(3, 5, 4), rand(2, 1, 4, 6))])
sample("_int_mm", lambda: [((3 * rand(5, 4)).to(torch.int8), (3 * rand(4, 6)).to(torch.int8))])

# With a bias, which must be added once, the contracted factor stays whole.
row("addmm addmm.dtype _addmm_activation", "{m n}, m k!, k! n -> m n")
row("baddbmm baddbmm.dtype", "{b m n}, b m k!, b k! n -> b m n")
row("addbmm", "{m n}, b! m k!, b! k! n -> m n")
row("addmv", "{m}, m k!, k! -> m", filled=["m"])
row("addr", "{m n}, m, n -> m n")
sample("_addmm_activation", lambda: [(rand(6), rand(5, 4), rand(4, 6))])

# Ops of transformers.
row("transformers::grouped_mm_fallback.default", "t! k, e! k n, e! -> t! n", linear="0 | 1")
row("transformers::grouped_mm_fallback_backward.default", "t! k, e! k n, e!, t! n -> t! k, e! k n", linear="3")


def _scales() -> Iterator[tuple[Any, ...]]:
    small, wide = rand(8, 32).to(torch.float8_e4m3fn), rand(16, 32, seed=1).to(torch.float8_e4m3fn).t()
    yield small, wide, torch.tensor(0.5), torch.tensor(2.0), None, None, torch.float32
    yield small, wide, rand(8, 1).abs().float(), rand(1, 16).abs().float(), None, None, torch.float32


@row("_scaled_mm", samples=_scales)
def scaled(call: Call) -> BoundRule | None:
    """A product of numbers of 8 bits, with a scale for all, or for each row and column.

    The kernel of a GPU wants columns, and rows of the second operand, in multiples of 16.
    """
    (m, n), sizes = call.made(), [call.operands[s.positions[0]].numel for s in call.slots[2:4] if s.positions]
    if len(sizes) != 2 or sizes[0] not in (1, m) or sizes[1] not in (1, n):
        return None
    k = "k!" if call.slots[4:] and call.slots[4].positions else "k"  # a bias is added once
    bound = Bind(f"m {k}, {k} n, {{m {k}}}, {{{k} n}}, n, * -> m n").on(call)
    group = bound.groups[0]
    on_cpu = call.operands[0].device.startswith("cpu")
    even = {f: n // 16 for f, n in call.sizes(group.operands).items() if f != "m" and not on_cpu}
    return replace(bound, groups=(replace(group, even=even),))


def _groups() -> Iterator[tuple[Any, ...]]:
    ends = torch.tensor([3, 5, 8], dtype=torch.int32)
    yield rand(8, 16).float(), rand(3, 16, 24).float(), ends
    yield rand(3, 16, 24).float(), rand(3, 24, 16).float()


@row("_grouped_mm", samples=_groups)
def grouped(call: Call) -> BoundRule | None:
    """Products of groups of rows, or of columns, or of matrices: `offsets` say where each group ends.

    The kernel wants rows of a multiple of 16 bytes: pieces are as long.
    """
    if call.slots[3].positions:
        return None
    cases = (
        "t! k, e! k n, e!, * -> t! n | e! m k, k t!, e!, * -> m t! | m t!, t! n, e!, * -> e m n"
        " | e m k, e k n, *, * -> e m n"
    )
    return in_lines_of_16_bytes(Bind(cases, "0 | 1").on(call), call, "e")


def in_lines_of_16_bytes(rule: BoundRule, call: Call, besides: str) -> BoundRule:
    """`rule` of a grouped product whose factors, but those `besides`, are cut into multiples of 16 bytes."""
    group, size = rule.groups[0], call.operands[0].dtype.itemsize
    even = {f: n * size // 16 for f, n in call.sizes(group.operands).items() if f not in besides}
    return replace(rule, groups=(replace(group, even={**group.even, **even}),))


# -- factors and solutions: outputs that a call did not request are empty ---------------------------
row("_linalg_det", "... a! b! -> ...*, ... c d*, ... e*")
row("_linalg_slogdet", "... a! b! -> ...*, ...*, ... c d*, ... e*")
row("_linalg_eigh linalg_eig", "... a! b! -> ... c*, ... d e*")
row("_linalg_eigvals", "... a! b! -> ... c*", samples=lambda: [(rand(5, 3, 3),)])
row("_linalg_svd", "... a! b! -> ... c d*, ... e*, ... f g*")
row("linalg_inv_ex linalg_cholesky_ex", "... a! b! -> ... c d*, ...*")
row("linalg_qr", "... a! b! -> ... c d*, ... e f*")
row("linalg_lu", "... a! b! -> ... c d*, ... e f*, ... g h*")
row("linalg_lu_factor_ex linalg_ldl_factor_ex", "... a! b! -> ... c d*, ... e*, ...*")
row("linalg_lu_solve linalg_ldl_solve ormqr", "... a! b!, ... c!, ... d! e! -> ... f g")
row("linalg_matrix_exp cholesky cholesky_inverse", "... a! b! -> ... c d")
row("linalg_householder_product", "... a! b!, ... c! -> ... d e")
row("linalg_solve_triangular cholesky_solve _cholesky_solve_helper", "... a! b!, ... c! d! -> ... e f")
row("triangular_solve", "... a! b!, ... c! d! -> ... e f*, ... g h*")
row("lu_unpack", "... a! b!, ... c! -> ... d e*, ... f g*, ... h i*")
row("geqrf", "... a! b! -> ... c d*, ... e*")
row("_fft_r2c _fft_c2c _fft_c2r", "... x[dim]! -> ... f[dim]", linear="0", filled=["..."])
sample("_cholesky_solve_helper", lambda: [(rand(5, 3, 2), rand(5, 3, 3).tril().exp(), False)])


@row("_linalg_solve_ex")
def solve(call: Call) -> str:
    """(matrices, vectors or matrices) -> solutions, LU, pivots, info."""
    vector = len(call.shape(1)) == 1 or call.shape(0)[:-1] == call.shape(1)
    right, solution = ("c!", "d") if vector else ("c! d!", "e f")
    return f"... a! b!, ... {right} -> ... {solution}*, ... g h*, ... i*, ...*"


# -- distances ------------------------------------------------------------------------------
row("_cdist_forward", "... p m!, ... r m! -> ... p r")
row("_euclidean_dist", "... p m!, ... r m! -> ... p r", samples=lambda: [(rand(5, 4), rand(6, 4))])
row("_cdist_backward", "... p r, ... p m, ... r m, ... p r -> ... p m", linear="0", filled=["...", "p", "r", "m"])
