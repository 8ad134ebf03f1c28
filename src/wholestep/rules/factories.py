"""New tensors: their shapes come from the dims of what they make."""

from __future__ import annotations

from .call import Call
from .registry import Bind, rule
from .terms import ops, rand, term, text, whole

_SIZED = ops(
    "full", "zeros", "ones", "empty.memory_format", "rand", "rand.generator", "randn", "randn.generator", "randint",
    "randint.low", "randint.generator", "randint.low_generator", "normal.float_float", "_efficientzerotensor",
)  # fmt: skip


@rule(ops("full"), samples=lambda: [([5, 7], 1.5)])
@rule(ops("zeros", "ones", "empty.memory_format", "rand", "randn"), samples=lambda: [([5, 7],)])
@rule(_SIZED)
def sized(call: Call) -> Bind:
    """Every dim may be cut: each rank makes its own piece."""
    return Bind(text([], [_out(call)]), sizes={"size": "out0"})


@rule(ops("new_full"), samples=lambda: [(rand(3), [5, 7], 1.5)])
@rule(ops("new_zeros", "new_ones", "new_empty"), samples=lambda: [(rand(3), [5, 7])])
def new(call: Call) -> Bind:
    """Like another tensor in its type alone."""
    return Bind(text(["*"], [_out(call)]), sizes={"size": "out0"}, by_shape=frozenset({0}))


def _out(call: Call) -> str:
    return term([f"d{i}" for i in range(len(call.made()))])


rule(ops("scalar_tensor"), "-> ()", samples=lambda: [(1.5,)])
rule(
    ops("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "logspace", "linspace.Tensor_Tensor",
        "linspace.Tensor_Scalar", "linspace.Scalar_Tensor", "logspace.Tensor_Tensor", "logspace.Tensor_Scalar",
        "logspace.Scalar_Tensor", "randperm", "randperm.generator", "tril_indices", "triu_indices", "empty_strided",
        "empty_permuted", "hann_window", "hann_window.periodic", "hamming_window", "hamming_window.periodic",
        "blackman_window", "blackman_window.periodic", "bartlett_window", "bartlett_window.periodic", "kaiser_window",
        "kaiser_window.periodic", "kaiser_window.beta"),
)(whole)  # fmt: skip
rule(ops("new_empty_strided"), "* -> *", by_shape=[0])
