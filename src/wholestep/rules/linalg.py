"""Linear algebra and Fourier transforms: matrices and transformed dims are whole, what is before them is a batch."""

from __future__ import annotations

from torch import Tensor

from .call import Call
from .registry import Bind, Function, rule
from .terms import dims_of, ops, rand, term, text


def batched(inputs: tuple[int, ...], outputs: tuple[int, ...], linear: str = "") -> Function:
    """The rule of an op whose operands and outputs have so many dims of their own, last, and a batch before them."""

    def bind(call: Call) -> Bind:
        lead = max(
            (len(call.shape(s.positions[0])) - n for s, n in zip(call.slots, inputs, strict=True) if s.positions)
        )
        terms = [" ".join(["...", *(f"x{i}{k}!" for k in range(n))]) for i, n in enumerate(inputs)]
        made: list[str] = []
        for o, n in enumerate(outputs):
            fits = o < len(call.outputs) and len(call.made(o)) == lead + n
            made.append(" ".join(["...", *(f"y{o}{k}" for k in range(n))]) if fits else "*")
        return Bind(text(terms, made), linear)

    return bind


_MATRICES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "_linalg_det": ((2,), (0, 2, 1)),
    "_linalg_slogdet": ((2,), (0, 0, 2, 1)),
    "_linalg_eigh": ((2,), (1, 2)),
    "_linalg_eigvals": ((2,), (1,)),
    "_linalg_svd": ((2,), (2, 1, 2)),
    "linalg_eig": ((2,), (1, 2)),
    "linalg_inv_ex": ((2,), (2, 0)),
    "linalg_cholesky_ex": ((2,), (2, 0)),
    "linalg_qr": ((2,), (2, 2)),
    "linalg_lu": ((2,), (2, 2, 2)),
    "linalg_lu_factor_ex": ((2,), (2, 1, 0)),
    "linalg_lu_solve": ((2, 1, 2), (2,)),
    "linalg_ldl_factor_ex": ((2,), (2, 1, 0)),
    "linalg_ldl_solve": ((2, 1, 2), (2,)),
    "linalg_matrix_exp": ((2,), (2,)),
    "linalg_householder_product": ((2, 1), (2,)),
    "linalg_solve_triangular": ((2, 2), (2,)),
    "triangular_solve": ((2, 2), (2, 2)),
    "cholesky": ((2,), (2,)),
    "cholesky_inverse": ((2,), (2,)),
    "cholesky_solve": ((2, 2), (2,)),
    "_cholesky_solve_helper": ((2, 2), (2,)),
    "lu_unpack": ((2, 1), (2, 2, 2)),
    "geqrf": ((2,), (2, 1)),
    "ormqr": ((2, 1, 2), (2,)),
}
for _name, (_inputs, _outputs) in _MATRICES.items():
    rule(ops(_name))(batched(_inputs, _outputs))


rule(ops("_linalg_eigvals"), samples=lambda: [(rand(5, 3, 3),)])(batched((2,), (1,)))
rule(ops("_cholesky_solve_helper"), samples=lambda: [(rand(5, 3, 2), rand(5, 3, 3).tril().exp(), False)])(
    batched((2, 2), (2,))
)


@rule(ops("_linalg_solve_ex"))
def solve(call: Call) -> Bind:
    """(matrices, vectors or matrices) -> solutions, LU, pivots, info."""
    vector = len(call.shape(1)) == 1 or call.shape(0)[:-1] == call.shape(1)
    size = 1 if vector else 2
    made = batched((2, size), (size, 2, 1, 0))(call)
    assert isinstance(made, Bind), "batched gives text"
    return made


@rule(ops("linalg_cross"), samples=lambda: [(rand(5, 3, 6), rand(5, 3, 6, seed=1), {"dim": 1})])
def cross(call: Call) -> Bind:
    """Of vectors along one dim, which stays whole."""
    dims = dims_of(call)
    full = term(dims, [dims[int(call.argument("dim", -1)) % len(dims)]])
    return Bind(text([full, full], [full]), "0 | 1")


# -- distances ------------------------------------------------------------------------------
rule(ops("_cdist_forward"), "... p m!, ... r m! -> ... p r", samples=lambda: [(rand(3, 5, 4), rand(3, 6, 4), 2.0, 0)])
rule(ops("_euclidean_dist"), "... p m!, ... r m! -> ... p r", samples=lambda: [(rand(5, 4), rand(6, 4))])
rule(
    ops("_cdist_backward"),
    "... p r, ... p m, ... r m, ... p r -> ... p m",
    linear="0",
    filled=[".1", ".2", ".3", "p", "r", "m"],
    samples=lambda: [(rand(3, 5, 6), rand(3, 5, 4), rand(3, 6, 4, seed=1), 2.0, _distances())],
)


def _distances() -> Tensor:
    a, b = rand(3, 5, 4), rand(3, 6, 4, seed=1)
    return (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1).sqrt()


# -- Fourier transforms --------------------------------------------------------------------------
@rule(ops("_fft_r2c", "_fft_c2c", "_fft_c2r"))
def transform(call: Call) -> Bind:
    """Linear; the dims that are transformed stay whole."""
    dims = dims_of(call)
    at = [int(d) % len(dims) for d in call.argument("dim")]
    out = [f"f{i}" if i in at else d for i, d in enumerate(dims)]
    return Bind(text([term(dims, [dims[d] for d in at])], [term(out)]), "0", filled=frozenset(dims))
