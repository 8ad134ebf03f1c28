"""Kinds of ops: the one table that partitioning, passes, the cost model and the printer read.

An op is looked up by its overload, or by the name of its packet (`add` for `aten.add.Tensor`), so that a row for an op
that a version of torch lacks does no harm. Functions that wholestep puts into graphs join a set by `priced_like` or
`collective`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar

import torch

from .. import _torch

F = TypeVar("F", bound=Callable[..., Any])
_aten, _funcol = torch.ops.aten, torch.ops._c10d_functional

VIEWS = frozenset({
    _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.view.default, _aten._unsafe_view.default,
    _aten.reshape.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.expand.default, _aten.slice.Tensor,
    _aten.select.int, _aten.split.Tensor,
})  # fmt: skip

CHEAP = VIEWS | {_aten._to_copy.default}
"""Views and casts: cheaper to recompute than to keep or to send."""

FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
"""Floats of 8 bits, for which torch has casts and `_scaled_mm`, and little else."""

READS_A_PART: set[object] = {
    _aten.embedding.default, _aten.index_select.default, _aten.gather.default, _aten.index.Tensor,
}  # fmt: skip
"""Ops that read as much of their first operand as they return, not all of it."""

WRITES_A_PART: set[object] = {_aten.copy_.default}
"""Ops that read all operands but the first, and write as many bytes into the first."""

FREE: set[object] = {*VIEWS, _aten.detach.default, _aten.alias.default, _aten.empty.memory_format}
"""Ops that compute nothing and move nothing."""

BUCKET_COPIES: set[object] = set()
"""Copies into and out of buckets of collectives."""

PRODUCTS: set[object] = {
    _aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default, _aten.linear.default,
    _aten._grouped_mm.default, _aten._scaled_mm.default,
}  # fmt: skip
"""Products of matrices."""

SHARES_OF_ROWS: dict[object, int] = {}
"""Products of groups of rows that multiply one of so many parts of their rows, if groups are of one size."""

GATHER_AND_MULTIPLY: set[object] = set()
MULTIPLY_AND_SCATTER: set[object] = set()
"""Products that are fused with the collective before or behind them."""

COUNTS_ROWS: set[Any] = set()
"""Ops whose results the host reads, as numbers of rows."""

SUMS_OF_PIECES: set[object] = set()
"""Accumulators of what micro-batches give."""

HOST_COPIES: dict[object, Literal["host", "device"]] = {}
"""Functions that start to copy their first operand beside the step, by where to."""

ARRIVALS: set[object] = set()
"""Functions that wait for the copy that their first operand is."""


def copies_to(place: Literal["host", "device"]) -> Callable[[F], F]:
    """Adds a function to `HOST_COPIES`."""

    def note(function: F) -> F:
        HOST_COPIES[function] = place
        return function

    return note


def priced_like(kind: set[object]) -> Callable[[F], F]:
    """Adds a function that graphs call to one of the sets above."""

    def note(function: F) -> F:
        kind.add(function)
        return function

    return note


def packet_name(target: object) -> str:
    """`add` for `aten.add.Tensor`; empty for everything that is not an aten op."""
    return target.overloadpacket.__name__ if _torch.is_op(target) and target.namespace == "aten" else ""


Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
_COLLECTIVES: dict[object, Collective] = {
    _funcol.all_reduce.default: "all_reduce", _funcol.all_reduce_.default: "all_reduce",
    _funcol.all_gather_into_tensor.default: "all_gather", _funcol.all_gather_into_tensor_out.default: "all_gather",
    _funcol.reduce_scatter_tensor.default: "reduce_scatter", _funcol.all_to_all_single.default: "all_to_all",
    _funcol.broadcast.default: "broadcast",
}  # fmt: skip


def collective(kind: Collective) -> Callable[[F], F]:
    """Marks a function that does what a collective does: in its place in a bound graph, or fused with products."""

    def note(function: F) -> F:
        _COLLECTIVES[function] = kind
        return function

    return note


def collective_kind(target: object) -> Collective | None:
    """The kind of a collective; None for every other op."""
    return _COLLECTIVES.get(target)


@dataclass(frozen=True)
class Arithmetic:
    """Ops whose time follows from multiplications, and which are counted in MFU."""

    kind: Literal["product", "attention", "convolution"]
    backward: bool = False


_ATTENTION = frozenset({
    "_cudnn_attention_forward", "_efficient_attention_forward", "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace", "_native_multi_head_attention", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_attention_math_for_mps", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable",
    "_triton_multi_head_attention", "_triton_scaled_dot_attention", "scaled_dot_product_attention",
})  # fmt: skip
_ATTENTION_BACKWARD = frozenset({
    "_cudnn_attention_backward", "_efficient_attention_backward", "_flash_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward", "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
})  # fmt: skip
PACKED_CURE = "scaled_dot_product_attention with a mask, as ids[:, None, :, None] == ids[:, None, None, :] of documents"
"""What is exact, and shared out by tokens, in place of kernels of packed sequences."""
_CONVOLUTION = frozenset({
    "_convolution", "_convolution_mode", "_mps_convolution", "_mps_convolution_transpose",
    "_nnpack_spatial_convolution", "convolution", "convolution_overrideable", "cudnn_convolution",
    "cudnn_convolution_add_relu", "cudnn_convolution_relu", "cudnn_convolution_transpose", "miopen_convolution",
    "miopen_convolution_add_relu", "miopen_convolution_relu", "miopen_convolution_transpose",
    "miopen_depthwise_convolution", "mkldnn_convolution",
})  # fmt: skip
_CONVOLUTION_BACKWARD = frozenset({
    "_convolution_double_backward", "convolution_backward", "convolution_backward_overrideable",
    "mps_convolution_backward", "mps_convolution_transpose_backward",
})  # fmt: skip
_ARITHMETIC = {
    **dict.fromkeys(_ATTENTION, Arithmetic("attention")),
    **dict.fromkeys(_ATTENTION_BACKWARD, Arithmetic("attention", backward=True)),
    **dict.fromkeys(_CONVOLUTION, Arithmetic("convolution")),
    **dict.fromkeys(_CONVOLUTION_BACKWARD, Arithmetic("convolution", backward=True)),
}


IN_PLACE_OF: dict[object, object] = {}
"""The op that a function computes for a piece, as ranks call it: (start, length, *arguments of the op)."""


@cache
def arithmetic(target: object) -> Arithmetic | None:
    """The arithmetic of a product, a convolution or fused attention; None for every other op."""
    op = IN_PLACE_OF.get(target, target)
    return Arithmetic("product") if op in PRODUCTS else _ARITHMETIC.get(packet_name(op))


_BATCH_NORMS = frozenset({
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "cudnn_batch_norm",
})  # fmt: skip
_UNINITIALIZED = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_quantized", "empty_strided", "new_empty", "new_empty_strided",
    "_empty_affine_quantized", "_empty_per_channel_affine_quantized",
})  # fmt: skip
_POINTWISE_OPTIMIZERS = frozenset(
    name + suffix for name in ("_fused_adam", "_fused_adamw", "_fused_adagrad") for suffix in ("", "_")
)
_STREAMS = frozenset({
    "add", "sub", "rsub", "mul", "neg", "abs", "clone", "copy", "cat", "stack", "fill", "zero", "zeros", "ones",
    "zeros_like", "ones_like", "full", "full_like", "relu", "threshold_backward", "where", "masked_fill", "clamp",
    "clamp_min", "clamp_max", "maximum", "minimum", "lerp", "addcmul", "addcdiv", "constant_pad_nd", "contiguous",
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or",
    "bitwise_not", "tril", "triu", "roll", "flip", "repeat", "index_select", "arange", "as_strided_scatter",
    "slice_scatter", "slice_backward", "select_backward", "to_copy",
})  # fmt: skip
_GOES_BY_MEMORY = frozenset({
    # their meaning depends on memory, not on indices
    "as_strided", "as_strided_copy", "as_strided_scatter", "_reshape_alias", "view.dtype",
    # their kernels assume that all tensors of a parameter have one layout, or read an operand row by row
    "_fused_adam", "_fused_adamw", "_fused_adagrad", "_fused_sgd", "_masked_softmax", "adaptive_max_pool3d_backward",
    "fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "native_batch_norm_backward",
    "native_group_norm", "native_group_norm_backward", "native_layer_norm_backward", "nll_loss2d_backward",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_weight_norm_interface", "_weight_norm_interface_backward",
    # their backward requires that the returned factors have the layout of the matrix
    "_linalg_det", "_linalg_slogdet",
    # they refuse every other layout
    "_embedding_bag", "_embedding_bag_backward", "_embedding_bag_per_sample_weights_backward",
    "_foreach_addcdiv.Tensor", "_foreach_addcmul.Tensor", "_grouped_mm", "_linalg_check_errors", "_pdist_backward",
    "_pdist_forward", "_scaled_mm",
})  # fmt: skip


def is_list_op(target: object) -> bool:
    """True for torch's `_foreach_` and `_fused_` ops. The prefix of the packet is how torch itself identifies them."""
    return packet_name(target).startswith(("_foreach_", "_fused_"))


def is_batch_norm_in_training(target: object) -> bool:
    """True for a forward of batch norm that can normalize by the statistics of its batch."""
    return packet_name(target) in _BATCH_NORMS


def is_uninitialized(target: object) -> bool:
    """True for an op that allocates memory and writes nothing."""
    return packet_name(target) in _UNINITIALIZED


def depends_on_strides(target: object) -> bool:
    """True for an op that reads where its operands lie in memory, so that their strides must be as on one device.
    Kernels are called with no wrapper that makes their operands contiguous. `tools.check_rules` tries every op with
    operands that have offsets and odd strides; these are the ops that it finds wrong.
    """
    name = packet_name(target)
    return bool(name) and (name in _GOES_BY_MEMORY or str(target).removeprefix("aten.") in _GOES_BY_MEMORY)


def streams(target: object) -> bool:
    """True for an op that memory bandwidth bounds: sums and copies of elements, optimizer updates. False for functions
    like exp, reductions, norms and losses: on a CPU their arithmetic takes longer than their bytes.
    """
    if not _torch.is_op(target):
        return True
    name = target.overloadpacket.__name__
    return name.startswith(("_foreach_", "_fused_")) or name.strip("_") in _STREAMS


def is_pointwise(target: object) -> bool:
    """True for an op that treats elements alike, lists of tensors included."""
    if not _torch.is_op(target):
        return False
    name = packet_name(target)
    return torch.Tag.pointwise in target.tags or name.startswith("_foreach_") or name in _POINTWISE_OPTIMIZERS
