"""Custom ops of captured graphs, and tables of ops by cost and memory behaviour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import _torch

F = TypeVar("F", bound=Callable[..., Any])


@torch.library.custom_op("wholestep::grad_ready", mutates_args=())
def grad_ready(grad: Tensor, param: str) -> Tensor:
    """Mark `grad` as the complete gradient of `param` from one backward. Runs in an unpartitioned graph only."""
    return grad.clone()


@grad_ready.register_fake
def _(grad: Tensor, param: str) -> Tensor:
    return torch.empty_like(grad)


def _backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


grad_ready.register_autograd(_backward)

GRAD_READY = torch.ops.wholestep.grad_ready.default


@torch.library.custom_op("wholestep::loss", mutates_args=())
def loss(value: Tensor) -> Tensor:
    """Mark `value` as the start of a backward. `normalize` removes the op."""
    return value.clone()


@loss.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


LOSS = torch.ops.wholestep.loss.default

_aten = torch.ops.aten


@torch.library.custom_op("wholestep::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """Return the CTC loss of each row, and its alphas padded to the maximal label length."""
    loss, alpha = _aten._ctc_loss.Tensor(log_probs, targets, inputs, lengths, blank, zero_infinity)
    missing = 2 * targets.shape[-1] + 1 - alpha.shape[-1]
    return loss, torch.nn.functional.pad(alpha, [0, missing])


@ctc_loss.register_fake
def _(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    rows = log_probs.shape[1]
    return log_probs.new_empty(rows), log_probs.new_empty(rows, log_probs.shape[0], 2 * targets.shape[-1] + 1)


CTC_LOSS = torch.ops.wholestep.ctc_loss.default

VIEWS = frozenset(
    {
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.reshape.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.expand.default,
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.split.Tensor,
    }
)

CHEAP = VIEWS | {_aten._to_copy.default}
"""Views and casts: cheaper to recompute than to keep or to communicate."""

READS_A_PART: set[object] = {
    _aten.embedding.default, _aten.index_select.default, _aten.gather.default, _aten.index.Tensor,
}  # fmt: skip
"""Ops that read as many bytes of the first operand as they write, not all of it."""

WRITES_A_PART: set[object] = {_aten.copy_.default}
"""Ops that read all operands except the first, and write as many bytes into the first."""

FREE: set[object] = {*VIEWS, _aten.detach.default, _aten.alias.default, _aten.empty.memory_format}
"""Ops without computation and memory traffic."""

CARRIED: set[object] = set()
"""Copies into and out of the buffers of collectives."""

PRODUCTS: set[object] = {
    _aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default, _aten.linear.default,
}  # fmt: skip
"""Matrix products."""

_PLAIN = frozenset({
    "add", "sub", "rsub", "mul", "neg", "abs", "clone", "copy", "cat", "stack", "fill", "zero", "zeros", "ones",
    "zeros_like", "ones_like", "full", "full_like", "relu", "threshold_backward", "where", "masked_fill", "clamp",
    "clamp_min", "clamp_max", "maximum", "minimum", "lerp", "addcmul", "addcdiv", "constant_pad_nd", "contiguous",
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or",
    "bitwise_not", "tril", "triu", "roll", "flip", "repeat", "index_select", "arange", "as_strided_scatter",
    "slice_scatter", "slice_backward", "select_backward", "to_copy",
})  # fmt: skip

_IN_ORDER = frozenset({
    # defined by the memory layout of their operands
    "as_strided", "as_strided_copy", "as_strided_scatter", "_reshape_alias", "view.dtype",
    # the kernel assumes equal strides of all tensors of a parameter, or contiguous operands
    "_fused_adam", "_fused_adamw", "_fused_adagrad", "_fused_sgd", "_masked_softmax", "adaptive_max_pool3d_backward",
    "fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "native_batch_norm_backward",
    "native_group_norm", "native_group_norm_backward", "native_layer_norm_backward", "nll_loss2d_backward",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_weight_norm_interface", "_weight_norm_interface_backward",
    # the backward assumes that the returned factors have the strides of the matrix
    "_linalg_det", "_linalg_slogdet",
    # other strides raise an error
    "_embedding_bag", "_embedding_bag_backward", "_embedding_bag_per_sample_weights_backward",
    "_foreach_addcdiv.Tensor", "_foreach_addcmul.Tensor", "_grouped_mm", "_linalg_check_errors", "_pdist_backward",
    "_pdist_forward", "_scaled_mm",
})  # fmt: skip


def goes_by_memory(target: object) -> bool:
    """Return whether the result of an op depends on the strides of its operands, which must equal the traced ones.

    Graphs call kernels without torch's wrappers, which make operands contiguous. `check-rules` runs every op on
    operands with offsets and unusual strides; these are the ops that fail.
    """
    if not _torch.is_op(target):
        return False
    name = str(target).partition(".")[2]
    return target.namespace == "aten" and (name in _IN_ORDER or name.partition(".")[0] in _IN_ORDER)


def streams(target: object) -> bool:
    """Return whether an op is memory-bound: elementwise arithmetic, copies, optimizer updates.

    Other ops (exp, reductions, norms, losses) take longer on a CPU than their memory traffic.
    """
    if not _torch.is_op(target):
        return True
    name = target.overloadpacket.__name__
    return name.startswith(("_foreach_", "_fused_")) or name.strip("_") in _PLAIN


def costs(like: set[object]) -> Callable[[F], F]:
    """Decorator that adds a function of local graphs to a cost class: READS_A_PART, FREE or CARRIED."""

    def note(function: F) -> F:
        like.add(function)
        return function

    return note


def is_pointwise(target: object) -> bool:
    """Return whether an op is pointwise; includes foreach and fused Adam ops."""
    return _torch.is_op(target) and (
        torch.Tag.pointwise in target.tags or str(target).startswith(("aten._foreach_", "aten._fused_ad"))
    )
