"""Linear algebra and Fourier transforms: matrices and transformed dims stay whole, dims before them are a batch."""

from __future__ import annotations

from torch import Tensor

from ..call import Call
from ..dsl import rand, row, sample

# Outputs that a call did not request are empty.
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
    given, made = ("c!", "d") if vector else ("c! d!", "e f")
    return f"... a! b!, ... {given} -> ... {made}*, ... g h*, ... i*, ...*"


# -- distances ------------------------------------------------------------------------------
row("_cdist_forward", "... p m!, ... r m! -> ... p r", samples=lambda: [(rand(3, 5, 4), rand(3, 6, 4), 2.0, 0)])
row("_euclidean_dist", "... p m!, ... r m! -> ... p r", samples=lambda: [(rand(5, 4), rand(6, 4))])
row(
    "_cdist_backward",
    "... p r, ... p m, ... r m, ... p r -> ... p m",
    linear="0",
    filled=["...", "p", "r", "m"],
    samples=lambda: [(rand(3, 5, 6), rand(3, 5, 4), rand(3, 6, 4, seed=1), 2.0, _distances())],
)


def _distances() -> Tensor:
    a, b = rand(3, 5, 4), rand(3, 6, 4, seed=1)
    return (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1).sqrt()
