"""Linear layers in float8: their three products become `_scaled_mm` of operands that are scaled as they come.

The recipes are torchao's (`torchao.float8`); decision 0056 has what differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import _torch
from ..errors import CaptureError
from ..precision import Float8
from .call_structure import walk

_aten = torch.ops.aten
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNED = 16  # the kernels want the dims of their operands in multiples of it
_LEAST = 1e-12  # what a scale is computed from is at least this
_OLDEST_GPU = (8, 9)
_INF = float("inf")  # the norm that is the largest absolute value


@dataclass(frozen=True)
class _Recipe:
    """How operands are scaled: as a whole, or row by row. `gradient`: the dtype of gradients of outputs."""

    rowwise: bool
    gradient: torch.dtype
    device: str

    def cast(self, values: Tensor, dtype: torch.dtype, by_rows: bool = True) -> _Numbers:
        """Cast a tensor, multiplied by what fills the range of `dtype`: a number, or one for each row (of the last
        dim), or for each column (of all dims before it). Its largest value becomes at most that of the dtype, up to
        rounding: nothing overflows.
        """
        if not self.rowwise:
            amax = _aten.linalg_vector_norm.default(values, _INF)
        else:
            amax = values.abs().amax(-1 if by_rows else tuple(range(values.dim() - 1)), keepdim=True)
        scale: Tensor = (torch.finfo(dtype).max / cast(Tensor, amax).double().clamp(min=_LEAST)).float()
        scale = torch.exp2(torch.floor(torch.log2(scale))) if self.rowwise else scale
        factor = scale if scale.dim() else scale.reshape(1)  # a number would be multiplied in the dtype of `values`
        return _Numbers((values * factor).to(dtype).contiguous(), scale.reciprocal())

    def product(self, rows: _Numbers, columns: _Numbers, dtype: torch.dtype, fast: bool = False) -> Tensor:
        """Multiply a row-major by a column-major matrix. On a GPU the kernel for rows returns bfloat16 only."""
        out_dtype = torch.bfloat16 if self.rowwise and self.device == "cuda" else dtype
        steps = rows.step, columns.step
        out = _aten._scaled_mm.default(rows.values, columns.values, *steps, None, None, out_dtype, fast or self.rowwise)
        return cast(Tensor, out).to(dtype)


@dataclass(frozen=True)
class _Numbers:
    """A tensor in float8, and the number that its 1 stands for."""

    values: Tensor
    step: Tensor

    def rows(self) -> _Numbers:
        """Return the matrix of all rows (of the last dim): what ranks cast before they gather it has its dims yet."""
        step = self.step.reshape(-1, self.step.shape[-1]) if self.step.dim() else self.step
        return _Numbers(self.values.reshape(-1, self.values.shape[-1]), step)

    def by_columns(self) -> _Numbers:
        """Return a matrix in column-major memory."""
        return _Numbers(self.values.t().contiguous().t(), self.step)

    def transposed(self) -> _Numbers:
        """Return the transpose of a row-major matrix, column-major."""
        return _Numbers(self.values.t(), self.step.reshape(self.step.shape[::-1]))


class _Linear(torch.autograd.Function):
    """`input @ weight.t()`; `given` and `step` are the input in float8.

    What is scaled as a whole is kept for the backward in float8; what is scaled by rows is scaled by columns there.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, values: Tensor, step: Tensor, recipe: _Recipe) -> Tensor:
        factor = recipe.cast(weight, _E4M3)
        ctx.recipe, ctx.dtype = recipe, weight.dtype
        rows = _Numbers(values, step).rows()
        saved = (input, weight) if recipe.rowwise else (rows.values, rows.step, factor.values, factor.step)
        ctx.save_for_backward(*saved)
        out = recipe.product(rows, factor.transposed(), input.dtype, fast=True)
        return out.reshape(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        recipe: _Recipe = ctx.recipe
        grad, saved = grads[0], cast(tuple[Tensor, ...], ctx.saved_tensors)
        for_input = for_weight = None

        by_rows = recipe.cast(grad, recipe.gradient).rows()
        if ctx.needs_input_grad[0]:
            weight = recipe.cast(saved[1], _E4M3, by_rows=False) if recipe.rowwise else _Numbers(*saved[2:])
            product = recipe.product(by_rows, weight.by_columns(), grad.dtype)
            for_input = product.reshape(*grad.shape[:-1], weight.values.shape[1])
        if ctx.needs_input_grad[1]:
            by_tokens = recipe.cast(grad, recipe.gradient, by_rows=False).rows() if recipe.rowwise else by_rows
            rows = recipe.cast(saved[0], _E4M3, by_rows=False).rows() if recipe.rowwise else _Numbers(*saved[:2])
            for_weight = recipe.product(by_tokens.by_columns().transposed(), rows.by_columns(), ctx.dtype)
        return for_input, for_weight, None, None, None


class Float8Linears:
    """`F.linear` while a step is traced: those of the chosen modules multiply in float8."""

    def __init__(self, options: Float8, roots: dict[str, nn.Module], device: str) -> None:
        self.options, kind = options, torch.device(device).type
        _check_device(kind, device)
        self.recipe = _Recipe(options.recipe == "rowwise", _E4M3 if options.recipe == "rowwise" else _E5M2, kind)
        tables = [m.num_embeddings for _, m in walk(roots) if isinstance(m, nn.Embedding)]
        self.vocabulary = max(tables, default=0)
        self.used: set[str] = set()
        self._last: tuple[Tensor, int, _Numbers] | None = None

    def linear(
        self, original: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Replace `torch.nn.functional.linear`."""
        path = str(_torch.noted("module") or "")
        if not self._chosen(path, input, weight):
            return original(input, weight, bias)
        kind = self.recipe.device
        if torch.is_autocast_enabled(kind):
            input, weight = (t.to(torch.get_autocast_dtype(kind)) for t in (input, weight))
            bias = None if bias is None else bias.to(input.dtype)
        numbers = self._cast(input)
        out = cast(Tensor, cast(Any, _Linear).apply(input, weight, numbers.values, numbers.step, self.recipe))
        return out if bias is None else out + bias

    def check_used(self) -> None:
        """Raise CaptureError if a pattern, or `"auto"`, chose no linear of the step."""
        patterns = [self.options.modules] if isinstance(self.options.modules, str) else self.options.modules
        for pattern in patterns:
            if pattern not in self.used:
                what = "'auto' finds no linear that gains" if pattern == "auto" else f"{pattern!r} matches no linear"
                raise CaptureError(
                    f"Float8(modules=...): {what} of the step",
                    f"modules that call F.linear, of bfloat16, float16 or float32, with sizes that {_ALIGNED} divides",
                    "correct the paths (`wholestep.capture` prints the graph with the module of each op), "
                    "name the layers, or leave out float8=",
                )

    def _cast(self, input: Tensor) -> _Numbers:
        """Return the input in float8. Layers that share their input share that."""
        last = self._last
        if last is None or last[0] is not input or last[1] != input._version:
            with torch.no_grad():
                numbers = self.recipe.cast(input, _E4M3)
            last = self._last = input, input._version, numbers
        return last[2]

    def _chosen(self, path: str, input: Tensor, weight: Tensor) -> bool:
        if self.options.modules == "auto":
            if _misfit(input, weight) or not self._gains(weight):
                return False
            self.used.add("auto")
            return True
        patterns = [p for p in self.options.modules if fnmatchcase(path, p)]
        if patterns and (wrong := _misfit(input, weight)):
            needed = f"bfloat16, float16 or float32, and rows, inputs and outputs that {_ALIGNED} divides"
            fix = "leave the module out of modules=, or change its sizes (pad the batch or the layer)"
            raise CaptureError(f"Float8: the linear of {path!r} has {wrong}", needed, fix)
        self.used.update(patterns)
        return bool(patterns)

    def _gains(self, weight: Tensor) -> bool:
        """Return whether float8 makes a layer faster, by torchao's thresholds, which were measured on H100."""
        outputs, inputs = weight.shape
        if outputs == self.vocabulary:
            return False
        if self.recipe.rowwise:
            return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)
        return inputs > 4096 or outputs > 1024


def _misfit(input: Tensor, weight: Tensor) -> str:
    """Return what keeps a product from float8, or ''."""
    if wrong := [t.dtype for t in (input, weight) if t.dtype not in _DTYPES]:
        return str(wrong[0])
    rows, (outputs, inputs) = input.numel() // max(input.shape[-1], 1), weight.shape
    sizes = f"{rows} rows, {inputs} inputs and {outputs} outputs"
    return sizes if not rows or any(n % _ALIGNED for n in (rows, inputs, outputs)) else ""


def _check_device(kind: str, device: str) -> None:
    text = ""
    if kind not in ("cpu", "cuda"):
        text = f"device {device!r}"
    elif kind == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < _OLDEST_GPU:
        text = f"{torch.cuda.get_device_name(device)}, of compute capability {torch.cuda.get_device_capability(device)}"
    if text:
        needed = f"a GPU of compute capability {_OLDEST_GPU} or more, or a CPU, which computes the same numbers slowly"
        raise CaptureError(f"float8= on {text}", needed, "leave out float8=")
