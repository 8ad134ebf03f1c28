"""Traceable forms of functions of torch that compute sizes with plain ints in C++, and so fix those of a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
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
    made, places = torch.ops.aten.max_pool2d_with_indices(input.unsqueeze(-2), *sizes, ceil_mode)
    return made.squeeze(-2), places.squeeze(-2)


def _interpolated(name: str, original: Any, input: Tensor, output_size: Any, *rest: Any) -> Tensor:
    """One of the functions behind `interpolate`: the last of its arguments are `scale_factors`."""
    *others, factors = rest
    scales: list[Any] = [None] * (input.dim() - 2) if factors is None else list(factors)
    sizes = output_size
    if sizes is None:
        sizes = [_scaled(n, scale) for n, scale in zip(input.shape[2:], scales, strict=True)]
    return _torch.RESIZES[name](input, list(sizes), *others, *scales)


def _scaled(size: int, scale: float) -> int:
    """A size by a factor, cut off as C++ does."""
    whole = int(scale)
    return size * whole if whole == scale else _torch.truncated(size * scale)


def _take_along_dim(original: Any, input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """`take_along_dim` as what it is: `gather` of operands that are broadcast."""
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    dim %= input.dim()
    shape: Any = cast(Any, torch).broadcast_shapes(
        *((*one.shape[:dim], 1, *one.shape[dim + 1 :]) for one in (input, indices))
    )

    def wide(one: Tensor) -> Tensor:
        return one.expand(*shape[:dim], one.shape[dim], *shape[dim + 1 :])

    return wide(input).gather(dim, wide(indices))


def _matmul(original: Any, input: Tensor, other: Tensor) -> Tensor:
    """A product as what it is: of all rows with a matrix or a vector, or of as many matrices with as many."""
    together = torch.ops.aten._unsafe_view
    *outer, inner = input.shape
    if input.dim() > 2 and other.dim() in (1, 2):
        rows = input.reshape(prod(outer), inner)
        return together(rows.mv(other) if other.dim() == 1 else rows.mm(other), (*outer, *other.shape[1:]))
    if input.dim() > 2 and input.shape[:-2] == other.shape[:-2]:
        left, right = (one.expand(one.shape).reshape(prod(one.shape[:-2]), *one.shape[-2:]) for one in (input, other))
        return together(left.bmm(right), (*outer, other.shape[-1]))
    return original(input, other)


def _linear(original: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is not None and (input.dim() <= 2 or input.is_contiguous()):
        return original(input, weight, bias)
    made = _matmul(torch.matmul, input, weight.t())
    return made if bias is None else made + bias


def sized_forms(symbolic: bool) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Functions, by owner and name, and the forms that a trace, with symbols or without, runs in their place."""
    own = [(torch, "max_pool1d", _max_pool1d), (torch, "max_pool1d_with_indices", _max_pool1d_with_indices)]
    own += [(owner, "take_along_dim", _take_along_dim) for owner in (torch, Tensor)]
    if symbolic and _torch.matmul_fixes_sizes():
        own += [(torch, "matmul", _matmul), (Tensor, "matmul", _matmul), (Tensor, "__matmul__", _matmul)]
        own += [(torch.nn.functional, "linear", _linear)]
    return [*own, *((_torch.RESIZES_OWNER, name, partial(_interpolated, name)) for name in _torch.RESIZES)]
