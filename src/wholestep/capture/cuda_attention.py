"""Scaled dot product attention by the kernels that CUDA would choose, traced where there is no GPU.

Torch asks the GPU when it chooses. Here the choice is that of an NVIDIA GPU of compute capability 8.0 or more, from
what torch asks of the operands (`sdp_utils.cpp`; tests/nullcuda compares the two). cuDNN's kernels are not told from
flash attention: they save the same tensors and are priced alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
SDPA: Any = F.scaled_dot_product_attention
_HALF = frozenset({torch.float16, torch.bfloat16})
_FLASH_WIDTH = 256  # of a head, at most
_FLASH_UNIT = 8  # heads are padded to a multiple of this width
_MASK_UNIT = 16  # rows of a mask are padded to a multiple of this


def recorded_kernels(kernels: str | None, device: str) -> str | None:
    """Return "cuda" where attention is traced by this module: as asked, or on a CUDA device that is not there."""
    return kernels or ("cuda" if device.startswith("cuda") and not torch.cuda.is_available() else None)


def attention(
    original: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` of (batch, heads, queries, width) and (batch, heads, keys, width), twice."""
    chosen = original and choice(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if chosen == "flash":
        width = query.shape[-1]
        padded = [F.pad(x, (0, -width % _FLASH_UNIT)) if width % _FLASH_UNIT else x for x in (query, key, value)]
        scale = 1 / math.sqrt(width) if scale is None else scale
        attended = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return attended[..., :width] if width % _FLASH_UNIT else attended
    mask = _additive(attn_mask, query)
    if chosen == "efficient":
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        mask = None if mask is None else _aligned(mask.expand(*query.shape[:-1], key.shape[-2]))
        operands = query, key, value, mask, trained, dropout_p, is_causal
        return aten._scaled_dot_product_efficient_attention(*operands, scale=scale)[0]
    operands = query, key, value, mask, dropout_p, is_causal, None
    return aten._scaled_dot_product_attention_math(*operands, scale=scale, enable_gqa=enable_gqa)[0]


def of_counted_rows(original: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Attention of rows that a step counts is products: kernels for a CPU divide by the number of rows."""
    counted = any(isinstance(n, torch.SymInt) for x in (query, key, value) for n in x.shape)
    return (
        attention(None, query, key, value, *rest, **named) if counted else original(query, key, value, *rest, **named)
    )


def choice(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, is_causal: bool, grouped: bool
) -> str:
    """Return "flash", "efficient" or "math": the first that torch allows, and that takes these operands."""
    operands = query, key, value
    if any(x.dim() != 4 or x.stride(-1) != 1 or not all(x.shape[1:3]) for x in operands):
        return "math"
    widths, heads = [x.shape[-1] for x in operands], [x.shape[1] for x in operands]
    of_groups = grouped and heads[1] == heads[2] and heads[0] % heads[1] == 0
    if not _all_equal([x.dtype for x in operands]) or not _all_equal([x.shape[0] for x in operands]):
        return "math"
    square = not is_causal or query.shape[-2] == key.shape[-2]
    fits = _all_equal(widths) and widths[0] <= _FLASH_WIDTH and (_all_equal(heads) or of_groups)
    if _torch_allows("flash") and mask is None and query.dtype in _HALF and square and fits:
        return "flash"
    unit = 8 if query.dtype in _HALF else 4
    aligned = query.shape[-1] == key.shape[-1] and not any(width % unit for width in widths)
    is_supported = query.dtype in {*_HALF, torch.float32}
    if _torch_allows("mem_efficient") and is_supported and aligned and _all_equal(heads):
        return "efficient"
    return "math"


def _all_equal(values: Sequence[Any]) -> bool:
    """Not by a set: sizes may be symbols."""
    return all(value == values[0] for value in values)


def _torch_allows(kernel: str) -> bool:
    """What `torch.nn.attention.sdpa_kernel` and the switches of `torch.backends.cuda` leave."""
    return getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")()


def _additive(mask: Tensor | None, query: Tensor) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), -math.inf)


def _aligned(mask: Tensor) -> Tensor:
    """Return a mask whose rows start where the kernel can read them; padded rows are cut back to their length."""
    length = mask.shape[-1]
    if length % _MASK_UNIT:
        return F.pad(mask, (0, _MASK_UNIT - length % _MASK_UNIT))[..., :length]
    return mask.contiguous() if any(step % _MASK_UNIT for step in mask.stride()[:3]) else mask


def replaced(kernels: str | None) -> list[tuple[Any, str, Any]]:
    """Return what `_torch.replaced` puts in the place of torch's attention."""
    return [(F, "scaled_dot_product_attention", attention)] if kernels == "cuda" else []
