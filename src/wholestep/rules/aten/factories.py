"""New tensors: the layout of the result decides. Random numbers: every rank draws the numbers of its piece."""

from __future__ import annotations

from typing import Any

import torch

from ..dsl import WHOLE, rand, row, sample

_NO_GENERATOR: dict[str, Any] = {"generator": None}

# -- of a size ------------------------------------------------------------------------------
row(
    "full zeros ones empty.memory_format rand rand.generator randn randn.generator randint randint.low"
    " randint.generator randint.low_generator normal.float_float",
    "-> ...", sizes={"size": "out0"},
)  # fmt: skip
row("new_full new_zeros new_ones new_empty", "* -> ...", sizes={"size": "out0"}, by_shape=[0])
row("new_empty_strided", "* -> *", by_shape=[0])
row("zeros_like ones_like full_like empty_like", "... -> ...", by_shape=[0])
row("scalar_tensor", "-> ()")
sample("rand.generator randn.generator", lambda: [([5, 7], _NO_GENERATOR)])
sample("randint.generator", lambda: [(9, [5, 7], _NO_GENERATOR)])
sample("randint.low_generator", lambda: [(2, 9, [5, 7], _NO_GENERATOR)])

# -- counted from the first entry --------------------------------------------------------------
_WINDOWS = "hann_window{0} hamming_window{0} blackman_window{0} bartlett_window{0} kaiser_window{0}"
row(
    "arange arange.start arange.start_step eye eye.m linspace logspace randperm randperm.generator tril_indices"
    " triu_indices empty_strided empty_permuted linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor"
    " logspace.Tensor_Tensor logspace.Tensor_Scalar logspace.Scalar_Tensor kaiser_window.beta"
    f" {_WINDOWS.format('')} {_WINDOWS.format('.periodic')}",
    WHOLE,
)
sample(f"randperm {_WINDOWS.format('')}", lambda: [(7,)])
sample(_WINDOWS.format(".periodic"), lambda: [(7, True)])
sample("kaiser_window.beta", lambda: [(7, True, 12.0)])
sample("randperm.generator", lambda: [(7, _NO_GENERATOR)])

# -- drawn for each element of the first operand, of which only the shape is read -----------------
row(
    "rand_like rand_like.generator randn_like randn_like.generator randint_like randint_like.low_dtype"
    " randint_like.generator randint_like.low_generator_dtype bernoulli.p normal_functional uniform exponential"
    " geometric cauchy log_normal random random.from random.to",
    "...+ -> ...+", by_shape=[0],
)  # fmt: skip
sample("rand_like.generator randn_like.generator", lambda: [(rand(5, 7), _NO_GENERATOR)])
sample("randint_like.generator", lambda: [(rand(5, 7), 9, _NO_GENERATOR)])
sample("randint_like.low_generator_dtype", lambda: [(rand(5, 7), 2, 9, _NO_GENERATOR)])
sample("bernoulli.p", lambda: [(rand(5, 7), 0.5)])
sample("random", lambda: [(rand(5, 7),)])
sample("random.from", lambda: [(rand(5, 7), 2, 9)])
sample("random.to", lambda: [(rand(5, 7), 9)])

# -- drawn with parameters of the distribution ----------------------------------------------------
row(
    "bernoulli bernoulli.Tensor native_dropout _fused_dropout normal.Tensor_float normal.float_Tensor"
    " normal.Tensor_Tensor poisson binomial _standard_gamma rrelu_with_noise_functional randint_like.Tensor"
    " randint_like.Tensor_generator",
    "...+ -> ...+",
)
row("multinomial", "... c! -> ... s")
sample("bernoulli.Tensor", lambda: [(rand(5, 7), rand(5, 7).sigmoid())])
sample("native_dropout", lambda: [(rand(5, 7), 0.5, True)])
sample("normal.float_Tensor", lambda: [(0.5, rand(5, 7).abs())])
sample("poisson _standard_gamma", lambda: [(rand(5, 7).abs(),)])
sample("binomial", lambda: [(rand(5, 7).abs().ceil(), rand(5, 7).sigmoid())])
sample("rrelu_with_noise_functional", lambda: [(rand(5, 7), rand(5, 7), 0.1, 0.3, True)])
sample("randint_like.Tensor", lambda: [(rand(5, 7), torch.tensor(9))])
sample("randint_like.Tensor_generator", lambda: [(rand(5, 7), torch.tensor(9), _NO_GENERATOR)])
