"""Random numbers: every rank draws the numbers of its piece."""

from __future__ import annotations

from typing import Any

import torch

from ..dsl import rand, row, sample
from ..registry import Samples

_NO_GENERATOR: dict[str, Any] = {"generator": None}
# Further arguments of ops that draw for each element of their first operand, of which they read only the shape.
_LIKE: dict[str, tuple[Any, ...]] = {
    "rand_like": (), "rand_like.generator": (_NO_GENERATOR,), "randn_like": (),
    "randn_like.generator": (_NO_GENERATOR,),
    "randint_like": (9,), "randint_like.low_dtype": (2, 9), "randint_like.generator": (9, _NO_GENERATOR),
    "randint_like.low_generator_dtype": (2, 9, _NO_GENERATOR), "bernoulli.p": (0.5,), "normal_functional": (),
    "uniform": (), "exponential": (), "geometric": (0.5,), "cauchy": (), "log_normal": (), "random": (),
    "random.from": (2, 9), "random.to": (9,),
}  # fmt: skip
# Arguments of ops whose operands are parameters of the distribution.
_EACH: dict[str, Samples] = {
    "bernoulli": lambda: [(rand(5, 7).sigmoid(),)],
    "bernoulli.Tensor": lambda: [(rand(5, 7), rand(5, 7).sigmoid())],
    "native_dropout": lambda: [(rand(5, 7), 0.5, True)],
    "_fused_dropout": lambda: [(rand(5, 7), 0.5)],
    "normal.Tensor_float": lambda: [(rand(5, 7), 0.5)],
    "normal.float_Tensor": lambda: [(0.5, rand(5, 7).abs())],
    "normal.Tensor_Tensor": lambda: [(rand(5, 7), rand(5, 7).abs())],
    "poisson": lambda: [(rand(5, 7).abs(),)],
    "binomial": lambda: [(rand(5, 7).abs().ceil(), rand(5, 7).sigmoid())],
    "_standard_gamma": lambda: [(rand(5, 7).exp(),)],
    "rrelu_with_noise_functional": lambda: [(rand(5, 7), rand(5, 7), 0.1, 0.3, True)],
    "randint_like.Tensor": lambda: [(rand(5, 7), torch.tensor(9))],
    "randint_like.Tensor_generator": lambda: [(rand(5, 7), torch.tensor(9), _NO_GENERATOR)],
}
row(" ".join(_LIKE), "...+ -> ...+", by_shape=[0])
row(" ".join(_EACH), "...+ -> ...+")
row("multinomial", "... c! -> ... s", samples=lambda: [(rand(5, 7).abs(), 3)])
for _name, _more in _LIKE.items():
    sample(_name, lambda more=_more: [(rand(5, 7), *more)])
for _name, _samples in _EACH.items():
    sample(_name, _samples)
