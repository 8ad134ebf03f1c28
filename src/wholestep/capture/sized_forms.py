"""Traceable forms of functions that compute sizes with plain ints in C++, and so fix those of a batch."""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, cast

import torch
from torch import Tensor

from .. import _torch


def _pair(value: Any, first: int) -> tuple[int, int]:
    return first, cast(Any, value)[0] if isinstance(value, (list, tuple)) else value


def _max_pool1d(original: Any, *args: Any, **kwargs: Any) -> Tensor:
    return _max_pool1d_with_indices(original, *args, **kwargs)[0]


def _max_pool1d_with_indices(
    original: Any, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`max_pool1d` as what it is: a pool of two dims, of which one has a single place."""
    stride = kernel_size if stride is None or stride in ((), []) else stride
    sizes = _pair(kernel_size, 1), _pair(stride, 1), _pair(padding, 0), _pair(dilation, 1)
    pooled, places = torch.ops.aten.max_pool2d_with_indices(input.unsqueeze(-2), *sizes, ceil_mode)
    return pooled.squeeze(-2), places.squeeze(-2)


def _interpolated(name: str, original: Any, input: Tensor, output_size: Any, *rest: Any) -> Tensor:
    """One of the functions behind `interpolate`: the last of its arguments are `scale_factors`."""
    *flags, factors = rest
    scales: list[Any] = [None] * (input.dim() - 2) if factors is None else list(factors)
    sizes = output_size
    if sizes is None:
        sizes = [_scaled(n, scale) for n, scale in zip(input.shape[2:], scales, strict=True)]
    return _torch.RESIZES[name](input, list(sizes), *flags, *scales)


def _scaled(size: int, scale: float) -> int:
    """A size by a factor, cut off as C++ does."""
    factor = int(scale)
    return size * factor if factor == scale else _torch.truncated(size * scale)


def _take_along_dim(original: Any, input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """`take_along_dim` as what it is: `gather` of operands that are broadcast, at places that go round."""
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    dim %= input.dim()
    shape: Any = cast(Any, torch).broadcast_shapes(
        *((*operand.shape[:dim], 1, *operand.shape[dim + 1 :]) for operand in (input, indices))
    )

    def wide(operand: Tensor) -> Tensor:
        return operand.expand(*shape[:dim], operand.shape[dim], *shape[dim + 1 :])

    return wide(input).gather(dim, wide(indices.remainder(input.shape[dim])))


def _matmul(original: Any, input: Tensor, other: Tensor) -> Tensor:
    """A product as what it is: of all rows with a matrix or a vector, or of as many matrices with as many."""
    together = torch.ops.aten._unsafe_view
    *outer, inner = input.shape
    if input.dim() > 2 and other.dim() in (1, 2):
        rows = input.reshape(math.prod(outer), inner)
        return together(rows.mv(other) if other.dim() == 1 else rows.mm(other), (*outer, *other.shape[1:]))
    if input.dim() > 2 and input.shape[:-2] == other.shape[:-2]:
        first, second = (t.expand(t.shape).reshape(math.prod(t.shape[:-2]), *t.shape[-2:]) for t in (input, other))
        return together(first.bmm(second), (*outer, other.shape[-1]))
    return original(input, other)


def _linear(original: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is not None and (input.dim() <= 2 or input.is_contiguous()):
        return original(input, weight, bias)
    product = _matmul(torch.matmul, input, weight.t())
    return product if bias is None else product + bias


def _of_math(name: str, original: Any, value: Any, *rest: Any) -> Any:
    """A function of `math`, also of a size."""
    if not _torch.is_size(value):
        return original(value, *rest)
    value_of = _torch.math_of(name, value)
    return value_of / original(*rest) if rest else value_of


def _linspace(original: Any, start: Any, end: Any, steps: Any, **named: Any) -> Tensor:
    """`linspace` as its kernels compute it: from the start up to the middle, from there on from the end."""
    dtype: Any = named.get("dtype") or torch.get_default_dtype()
    numbers = not any(isinstance(bound, (Tensor, complex)) for bound in (start, end))
    if not numbers or not dtype.is_floating_point or named.keys() - {"dtype", "device"} or steps < 2:
        return original(start, end, steps, **named)
    counted = torch.promote_types(dtype, torch.float32)  # 16 bits do not count far
    places: Tensor = cast(Any, torch).arange(steps, **{**named, "dtype": counted})
    step = (end - start) / (steps - 1)
    return torch.where(places < steps // 2, start + step * places, end - step * (steps - 1 - places)).to(dtype)


def _affine_grid(original: Any, theta: Tensor, size: Sequence[Any], align_corners: bool) -> Tensor:
    """`affine_grid_generator` as what it is: a matrix by the places of an image, the last dim first."""
    rows, _, *dims = size
    places: list[Tensor] = []
    for dim, n in enumerate(dims):
        end: Any = 1 if align_corners else (n - 1) / n
        kind: Any = {"dtype": theta.dtype, "device": theta.device}
        line: Any = torch.linspace(-end, end, n, **kind) if n > 1 else theta.new_zeros(1)
        places.insert(0, line.view([n if i == dim else 1 for i in range(len(dims))]).expand(dims))
    base = torch.stack([*places, torch.ones_like(places[0])], -1).view(1, -1, len(dims) + 1)
    return (base @ theta.transpose(1, 2)).view(rows, *dims, len(dims))


def _kron(original: Any, input: Tensor, other: Tensor, **named: Any) -> Tensor:
    """`kron` as what it is: a product of all pairs of elements."""
    if named:
        return original(input, other, **named)
    dims = max(input.dim(), other.dim())
    first, second = (t.reshape([1] * (dims - t.dim()) + list(t.shape)) for t in (input, other))
    apart = first.reshape([n for size in first.shape for n in (size, 1)])
    pairs = apart * second.reshape([n for size in second.shape for n in (1, size)])
    return pairs.reshape([a * b for a, b in zip(first.shape, second.shape, strict=True)])


def _cumprod(original: Any, input: Tensor, dim: int, *, dtype: torch.dtype | None = None, **named: Any) -> Tensor:
    value = input if dtype is None else input.to(dtype)
    if named or not value.is_floating_point() or not value.dim() or _torch.inside_transform():
        return original(input, dim, dtype=dtype, **named)
    return cast(Any, _CumulativeProduct).apply(value, dim)


class _CumulativeProduct(torch.autograd.Function):
    """`cumprod`, whose backward in torch is a loop over places where one may be zero."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The products."""
        products = torch.ops.aten.cumprod.default(input, dim)
        ctx.dim = dim
        ctx.save_for_backward(input, products)
        return products

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Before the first zero, sums by products over the factor; at it, products without it; behind it, zero."""
        (input, products), dim = ctx.saved_tensors, ctx.dim
        if torch.is_grad_enabled():
            return torch.ops.aten.cumprod_backward.default(grad, input, dim, products), None
        zeros = (input == 0).cumsum(dim)
        before, first = zeros == 0, (input == 0) & (zeros == 1)
        terms = torch.where(before, products * grad, 0)
        rest = torch.where(zeros == 1, torch.ops.aten.cumprod.default(torch.where(first, 1, input), dim) * grad, 0)
        sums = terms.flip(dim).cumsum(dim).flip(dim) / torch.where(before, input, 1)
        return torch.where(before, sums, torch.where(first, rest.sum(dim, keepdim=True), 0)), None


def _recurrent(name: str, original: Any, input: Tensor, *rest: Any) -> Any:
    """A recurrent layer, place by place: on a CPU, torch does that in C++, with plain numbers of rows."""
    if not isinstance(rest[1], list) or input.device.type != "cpu":  # sequences are packed, or a kernel does it all
        return original(input, *rest)
    return _torch.RECURRENT[name](input, *rest)


def _slice_backward(grad: Tensor, sizes: Any, dim: int, start: Any, end: Any, step: Any) -> Any:
    """The gradient of a slice `[:]`, which torch records of symbolic dims only; its copy would have other strides."""
    return grad if type(start) is type(end) is int and (start, end, step) == (0, sys.maxsize, 1) else NotImplemented


SIZED_OPS: dict[Any, Callable[..., Any]] = {torch.ops.aten.slice_backward.default: _slice_backward}
"""Ops, and what a trace records in their place, unless that is NotImplemented."""


def _length(original: Callable[[Any], int], value: Any) -> Any:
    return value.shape[0] if _torch.is_fake(value) and value.dim() else original(value)


def _bound(of_two: Callable[[Any, Any], Any], original: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """`min` or `max`, also of numbers of rows."""
    if named or len(values) < 2 or not any(map(_torch.is_size, values)):
        return original(*values, **named)
    return reduce(of_two, values)


COUNTED: list[tuple[Any, str, Callable[..., Any]]] = [
    (builtins, "len", _length), (builtins, "min", partial(_bound, torch.sym_min)),
    (builtins, "max", partial(_bound, torch.sym_max)),
]  # fmt: skip
"""Functions of Python that ask how many rows there are, and what runs in their place where the step counts rows."""


def sized_forms(symbolic: bool) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Functions, by owner and name, and the forms that a trace, with symbols or without, runs in their place."""
    forms = [(torch, "max_pool1d", _max_pool1d), (torch, "max_pool1d_with_indices", _max_pool1d_with_indices)]
    both = (("take_along_dim", _take_along_dim), ("cumprod", _cumprod), ("kron", _kron))
    forms += [(owner, name, form) for name, form in both for owner in (torch, Tensor) if hasattr(owner, name)]
    forms += [(math, name, partial(_of_math, name)) for name in _torch.MATH]
    forms += [(cast(Any, torch)._VF, name, partial(_recurrent, name)) for name in _torch.RECURRENT]
    forms += [(torch, "linspace", _linspace), (torch, "affine_grid_generator", _affine_grid)]
    if symbolic and _torch.matmul_fixes_sizes():
        forms += [(torch, "matmul", _matmul), (Tensor, "matmul", _matmul), (Tensor, "__matmul__", _matmul)]
        forms += [(torch.nn.functional, "linear", _linear)]
    return [*forms, *((_torch.RESIZES_OWNER, name, partial(_interpolated, name)) for name in _torch.RESIZES)]
