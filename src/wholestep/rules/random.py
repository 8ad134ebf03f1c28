"""Random numbers: every rank draws those of its own piece."""

from __future__ import annotations

from .call import Call
from .registry import Bind, rule
from .terms import ops, rand, text

# Ops that draw for each element of their operands; `_BY_SHAPE`: they look at the shape of the first alone.
_BY_SHAPE = ops(
    "rand_like", "rand_like.generator", "randn_like", "randn_like.generator", "randint_like", "randint_like.low_dtype",
    "randint_like.generator", "randint_like.low_generator_dtype", "bernoulli.p", "normal_functional", "uniform",
    "exponential", "geometric", "cauchy", "log_normal", "random", "random.from", "random.to",
)  # fmt: skip
_EACH = ops(
    "bernoulli", "bernoulli.Tensor", "native_dropout", "_fused_dropout", "normal.Tensor_float", "normal.float_Tensor",
    "normal.Tensor_Tensor", "poisson", "binomial", "_standard_gamma", "rrelu_with_noise", "rrelu_with_noise_functional",
    "randint_like.Tensor", "randint_like.Tensor_generator",
)  # fmt: skip


@rule(ops("normal_functional", "uniform", "exponential", "random"), samples=lambda: [(rand(5, 7),)])
@rule(ops("rand_like", "randn_like"), samples=lambda: [(rand(5, 7),)])
@rule(ops("bernoulli.p", "geometric", "exponential"), samples=lambda: [(rand(5, 7), 0.5)])
@rule(ops("randint_like"), samples=lambda: [(rand(5, 7), 9)])
@rule(_BY_SHAPE)
def like(call: Call) -> Bind:
    """Numbers for each element of the first operand, whose values are not read."""
    return Bind(text(["..."] * len(call.slots), ["..."] * len(call.outputs)), by_shape=frozenset({0}))


@rule(ops("bernoulli"), samples=lambda: [(rand(5, 7).sigmoid(),)])
@rule(ops("native_dropout"), samples=lambda: [(rand(5, 7), 0.5, True)])
@rule(_EACH)
def each(call: Call) -> Bind:
    """Numbers for each element, made from the values there."""
    return Bind(text(["..."] * len(call.slots), ["..."] * len(call.outputs)))


@rule(ops("multinomial"), samples=lambda: [(rand(5, 7).abs(), 3)])
def multinomial(call: Call) -> Bind:
    """Draws from each row of weights."""
    return Bind("... c! -> ... s")
