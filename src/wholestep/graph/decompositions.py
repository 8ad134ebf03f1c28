"""Decompositions: functions with the arguments of an op; `NotImplementedError` for arguments that are not supported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from .. import _torch

aten = torch.ops.aten
MEAN, SUM = 1, 2  # values of `reduction`
Dims = Sequence[int] | int | None


def _dims(x: Tensor, dim: Dims) -> list[int]:
    return [dim] if isinstance(dim, int) else list(dim or range(x.dim()))


def _count(x: Tensor, dim: Dims) -> int:
    return prod(x.shape[d] for d in _dims(x, dim)) if x.dim() else 1


def mean(x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Sum over count."""
    total = aten.sum.dim_IntList(x, _dims(x, dim), keepdim, dtype=dtype)
    return total / _count(x, dim)


def mean_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Sum over count."""
    return aten.sum.default(x, dtype=dtype) / x.numel()


def var(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Sum of squared distances from the mean, over count minus `correction`."""
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def var_mean(
    x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean."""
    if x.is_complex():
        raise NotImplementedError
    dims, count = _dims(x, dim), _count(x, dim)
    center = aten.sum.dim_IntList(x, dims, True) / count
    spread = aten.sum.dim_IntList((x - center) ** 2, dims, keepdim) / (
        count - (1 if correction is None else correction)
    )
    return spread, center if keepdim else center.squeeze(dims)


def std(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Root of the variance."""
    return var(x, dim, correction=correction, keepdim=keepdim).sqrt()


def affine(matmul: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Product plus bias."""
    product = matmul(a, b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


def vector_norm(
    x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Root of the sum of squares."""
    if ord != 2 or x.is_complex():
        raise NotImplementedError
    x = x if dtype is None else x.to(dtype)
    return aten.sum.dim_IntList(x * x, _dims(x, dim), keepdim).sqrt()


def logsumexp(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """Shifted by the maximum."""
    dims = _dims(x, dim)
    top = aten.amax.default(x, dims, True)
    total = aten.sum.dim_IntList((x - top).exp(), dims, True).log() + top
    return total if keepdim else total.squeeze(dims)


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Shifted by the maximum."""
    x = x.float() if half_to_float else x
    shifted = x - aten.amax.default(x, [dim], True)
    return shifted - aten.sum.dim_IntList(shifted.exp(), [dim], True).log()


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Shifted by the maximum."""
    x = x.float() if half_to_float else x
    raised = (x - aten.amax.default(x, [dim], True)).exp()
    return raised / aten.sum.dim_IntList(raised, [dim], True)


def log_softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """`grad - softmax * sum(grad)`."""
    return (grad - out.exp() * aten.sum.dim_IntList(grad, [dim], True)).to(input_dtype)


def softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """`out * (grad - sum(grad * out))`."""
    return (out * (grad - aten.sum.dim_IntList(grad * out, [dim], True))).to(input_dtype)


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, mean and inverse deviation over the last dims."""
    dims = list(range(x.dim() - len(shape), x.dim()))
    spread, center = var_mean(x, dims, correction=0, keepdim=True)
    inverse = (spread + eps).rsqrt()
    out = (x - center) * inverse
    out = out if weight is None else out * weight
    return out if bias is None else out + bias, center, inverse


def layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], center: Tensor, inverse: Tensor, weight: Tensor | None,
    bias: Tensor | None, mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of input, weight and bias."""
    last = list(range(x.dim() - len(shape), x.dim()))
    first = list(range(x.dim() - len(shape)))
    normal = (x - center) * inverse
    inner = grad if weight is None else grad * weight
    count = prod(shape)
    total = aten.sum.dim_IntList(inner, last, True) / count
    along = aten.sum.dim_IntList(inner * normal, last, True) / count
    dx = inverse * (inner - total - normal * along) if mask[0] else None
    dw = _sum(grad * normal, first) if mask[1] and weight is not None else None
    return dx, dw, _sum(grad, first) if mask[2] and bias is not None else None


def _sum(x: Tensor, dims: list[int]) -> Tensor:
    """Sum over `dims`; `aten.sum` would read an empty list as all dims."""
    return aten.sum.dim_IntList(x, dims) if dims else x


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, training: bool,
    momentum: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Output, mean, inverse deviation, and new running statistics."""
    out, center, inverse, spread, count = _normalize(x, weight, bias, training, eps)
    unbiased = spread * (count / max(count - 1, 1))
    return out, center, inverse, mean * (1 - momentum) + center * momentum, var * (1 - momentum) + unbiased * momentum


def batch_norm_no_stats(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    """`batch_norm` without running statistics."""
    return _normalize(x, weight, bias, training, eps)[:3]


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    if not training:
        raise NotImplementedError
    dims, shape, count = _around_channel(x)
    center = aten.sum.dim_IntList(x, dims) / count
    distance = x - center.view(shape)
    spread = aten.sum.dim_IntList(distance * distance, dims) / count
    inverse = (spread + eps).rsqrt()
    out = distance * inverse.view(shape)
    out = out if weight is None else out * weight.view(shape)
    return out if bias is None else out + bias.view(shape), center, inverse, spread, count


def _around_channel(x: Tensor) -> tuple[list[int], list[int], int]:
    """Return all dims except the channel, the shape `[1, channels, 1, ...]`, and the elements per channel."""
    dims = [d for d in range(x.dim()) if d != 1]
    return dims, [1, x.shape[1], *[1] * (x.dim() - 2)], x.numel() // max(x.shape[1], 1)


def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, var: Tensor | None, center: Tensor | None,
    inverse: Tensor | None, train: bool, eps: float, mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of input, weight and bias; sums over the whole batch."""
    if not train or center is None or inverse is None:
        raise NotImplementedError
    dims, shape, count = _around_channel(x)
    normal = (x - center.view(shape)) * inverse.view(shape)
    db = aten.sum.dim_IntList(grad, dims)
    dw = aten.sum.dim_IntList(grad * normal, dims)
    scale = inverse if weight is None else inverse * weight
    dx = (grad - (db / count).view(shape) - normal * (dw / count).view(shape)) * scale.view(shape)
    return dx if mask[0] else None, dw if mask[1] else None, db if mask[2] else None


def nll(
    op: Any, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Sum over the weight of the targets."""
    if reduction != MEAN:
        raise NotImplementedError
    total, count = op(x, target, weight, SUM, ignore_index)
    return total / count, count


def mean_loss(op: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Sum over number of elements; the backward of a mean loss divides the gradient by that number first."""
    positional = [a for a in _torch.schema_of(op).arguments if not a.kwarg_only]
    names = [a.name for a in positional]
    before, backward = names.index("reduction"), names[0] == "grad_output"
    arguments = list(args)
    for argument in positional[len(args) : before + 1]:
        arguments.append(kwargs.pop(argument.name, argument.default_value))
    if arguments[before] != MEAN:
        raise NotImplementedError
    arguments[before] = SUM
    x, target = arguments[backward : backward + 2]
    size = prod(cast(Sequence[int], torch.broadcast_shapes(x.shape, target.shape)))
    if backward:
        return op(arguments[0] / size, *arguments[1:], **kwargs)
    return op(*arguments, **kwargs) / size


_MEAN_LOSSES = (
    aten.mse_loss.default, aten.mse_loss_backward.default, aten.smooth_l1_loss.default,
    aten.smooth_l1_loss_backward.default, aten.huber_loss.default, aten.huber_loss_backward.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default,
    aten.binary_cross_entropy_with_logits.default, aten.soft_margin_loss.default,
    aten.soft_margin_loss_backward.default,
)  # fmt: skip

EXPANSIONS: dict[Any, Callable[..., Any]] = {
    aten.mean.default: mean_all,
    aten.mean.dim: mean,
    aten.var.correction: var,
    aten.std.correction: std,
    aten.var_mean.correction: var_mean,
    aten.addmm.default: partial(affine, aten.mm.default),
    aten.baddbmm.default: partial(affine, aten.bmm.default),
    aten.linalg_vector_norm.default: vector_norm,
    aten.logsumexp.default: logsumexp,
    aten._log_softmax.default: log_softmax,
    aten._softmax.default: softmax,
    aten._log_softmax_backward_data.default: log_softmax_backward,
    aten._softmax_backward_data.default: softmax_backward,
    aten.native_layer_norm.default: layer_norm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten._native_batch_norm_legit_functional.default: batch_norm,
    aten._native_batch_norm_legit.no_stats: batch_norm_no_stats,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.nll_loss_forward.default: partial(nll, aten.nll_loss_forward.default),
    aten.nll_loss2d_forward.default: partial(nll, aten.nll_loss2d_forward.default),
    **{op: partial(mean_loss, op) for op in _MEAN_LOSSES},
}
