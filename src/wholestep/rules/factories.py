"""New tensors: their shapes come from the dims of what they make."""

from __future__ import annotations

from typing import Any

from .call import Call
from .registry import Bind, Samples, rule
from .terms import ops, rand, term, text, whole

_NO_GENERATOR: dict[str, Any] = {"generator": None}
_SIZED: dict[str, tuple[Any, ...]] = {
    "full": ([5, 7], 1.5), "zeros": ([5, 7],), "ones": ([5, 7],), "empty.memory_format": ([5, 7],), "rand": ([5, 7],),
    "rand.generator": ([5, 7], _NO_GENERATOR), "randn": ([5, 7],), "randn.generator": ([5, 7], _NO_GENERATOR),
    "randint": (9, [5, 7]), "randint.low": (2, 9, [5, 7]), "randint.generator": (9, [5, 7], _NO_GENERATOR),
    "randint.low_generator": (2, 9, [5, 7], _NO_GENERATOR), "normal.float_float": (0.0, 1.0, [5, 7]),
}  # fmt: skip


def sized(call: Call) -> Bind:
    """Every dim may be cut: each rank makes its own piece."""
    return Bind(text([], [_out(call)]), sizes={"size": "out0"})


def _these(*given: Any) -> Samples:
    return lambda: [given]


for _name, _given in _SIZED.items():
    rule(ops(_name), samples=_these(*_given))(sized)


@rule(ops("new_full"), samples=lambda: [(rand(3), [5, 7], 1.5)])
@rule(ops("new_zeros", "new_ones", "new_empty"), samples=lambda: [(rand(3), [5, 7])])
def new(call: Call) -> Bind:
    """Like another tensor in its type alone."""
    return Bind(text(["*"], [_out(call)]), sizes={"size": "out0"}, by_shape=frozenset({0}))


def _out(call: Call) -> str:
    return term([f"d{i}" for i in range(len(call.made()))])


rule(ops("scalar_tensor"), "-> ()", samples=lambda: [(1.5,)])
# Entries that are counted from the first: whole.
_COUNTED: dict[str, tuple[Any, ...]] = {
    "arange": (7,), "arange.start": (2, 7), "arange.start_step": (2, 9, 2), "eye": (5,), "eye.m": (5, 7),
    "linspace": (0.0, 1.0, 7), "logspace": (0.0, 1.0, 7), "randperm": (7,), "randperm.generator": (7, _NO_GENERATOR),
    "tril_indices": (5, 7), "triu_indices": (5, 7), "empty_strided": ([5, 7], [7, 1]),
    "empty_permuted": ([5, 7], [1, 0]),
} | {
    f"{name}_window{form}": (7, *([True] if form else [])) for name in ("hann", "hamming", "blackman", "bartlett",
    "kaiser") for form in ("", ".periodic")
} | {"kaiser_window.beta": (7, True, 12.0)}  # fmt: skip
for _name, _given in _COUNTED.items():
    rule(ops(_name), samples=_these(*_given))(whole)
for _name in ("linspace", "logspace"):
    rule(ops(f"{_name}.Tensor_Tensor"), samples=lambda: [(rand(), rand(seed=1), 7)])(whole)
    rule(ops(f"{_name}.Tensor_Scalar"), samples=lambda: [(rand(), 1.0, 7)])(whole)
    rule(ops(f"{_name}.Scalar_Tensor"), samples=lambda: [(0.0, rand(), 7)])(whole)
rule(ops("new_empty_strided"), "* -> *", by_shape=[0], samples=lambda: [(rand(3), [5, 7], [7, 1])])
