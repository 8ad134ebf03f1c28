"""New tensors: the layout of the result decides."""

from __future__ import annotations

from typing import Any

from ..dsl import WHOLE, rand, row, sample

_NO_GENERATOR: dict[str, Any] = {"generator": None}
_SIZED: dict[str, tuple[Any, ...]] = {
    "full": ([5, 7], 1.5), "zeros": ([5, 7],), "ones": ([5, 7],), "empty.memory_format": ([5, 7],), "rand": ([5, 7],),
    "rand.generator": ([5, 7], _NO_GENERATOR), "randn": ([5, 7],), "randn.generator": ([5, 7], _NO_GENERATOR),
    "randint": (9, [5, 7]), "randint.low": (2, 9, [5, 7]), "randint.generator": (9, [5, 7], _NO_GENERATOR),
    "randint.low_generator": (2, 9, [5, 7], _NO_GENERATOR), "normal.float_float": (0.0, 1.0, [5, 7]),
}  # fmt: skip
_COUNTED: dict[str, tuple[Any, ...]] = {
    "arange": (7,), "arange.start": (2, 7), "arange.start_step": (2, 9, 2), "eye": (5,), "eye.m": (5, 7),
    "linspace": (0.0, 1.0, 7), "logspace": (0.0, 1.0, 7), "randperm": (7,), "randperm.generator": (7, _NO_GENERATOR),
    "tril_indices": (5, 7), "triu_indices": (5, 7), "empty_strided": ([5, 7], [7, 1]),
    "empty_permuted": ([5, 7], [1, 0]),
} | {
    f"{name}_window{form}": (7, *([True] if form else [])) for name in ("hann", "hamming", "blackman", "bartlett",
    "kaiser") for form in ("", ".periodic")
} | {"kaiser_window.beta": (7, True, 12.0)}  # fmt: skip
_BETWEEN = "linspace.{0} logspace.{0}"

row(" ".join(_SIZED), "-> ...", sizes={"size": "out0"})  # each rank makes its own piece
row("new_full new_zeros new_ones new_empty", "* -> ...", sizes={"size": "out0"}, by_shape=[0])
row("new_empty_strided", "* -> *", by_shape=[0], samples=lambda: [(rand(3), [5, 7], [7, 1])])
row("zeros_like ones_like full_like empty_like", "... -> ...", by_shape=[0])
row("scalar_tensor", "-> ()", samples=lambda: [(1.5,)])
row(" ".join(_COUNTED), WHOLE)  # entries are counted from the first
row(" ".join(_BETWEEN.format(kind) for kind in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")), WHOLE)
for _name, _given in (_SIZED | _COUNTED).items():
    sample(_name, lambda given=_given: [given])
sample("new_full", lambda: [(rand(3), [5, 7], 1.5)])
sample("new_zeros new_ones new_empty", lambda: [(rand(3), [5, 7])])
sample(_BETWEEN.format("Tensor_Tensor"), lambda: [(rand(), rand(seed=1), 7)])
sample(_BETWEEN.format("Tensor_Scalar"), lambda: [(rand(), 1.0, 7)])
sample(_BETWEEN.format("Scalar_Tensor"), lambda: [(0.0, rand(), 7)])
