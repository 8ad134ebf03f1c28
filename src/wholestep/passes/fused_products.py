"""Products fused with a gather before them or a reduce-scatter behind them, as graphs call them.

On GPUs of one node they run through symmetric memory: ranks read blocks from each other's memory while they multiply.
Elsewhere they mean the collective and the product, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _torch
from ..graph.op_kinds import GATHER_AND_MULTIPLY, MULTIPLY_AND_SCATTER, collective, priced_like

funcol, _scaled_mm = torch.ops._c10d_functional, torch.ops.aten._scaled_mm.default


@collective("all_gather")
@priced_like(GATHER_AND_MULTIPLY)
def multiply_gathered(shard: Tensor, factors: Sequence[Tensor], parts: int, axis: str) -> list[Tensor]:
    """What `parts` ranks gather of `shard` along dim 0, and its product with each of `factors`.

    `axis` is a mesh axis, and the name of a process group in a bound graph.
    """
    if shard.is_cuda:
        gathered, products = _torch.gather_and_multiply(shard, factors, axis)
        return [gathered, *products]
    gathered = funcol.wait_tensor.default(funcol.all_gather_into_tensor.default(shard, parts, axis))
    return [gathered, *(gathered @ factor for factor in factors)]


@collective("reduce_scatter")
@priced_like(MULTIPLY_AND_SCATTER)
def scatter_product(left: Tensor, right: Tensor, inner: int, parts: int, axis: str) -> Tensor:
    """This rank's piece of the sum of `left @ right` over `parts` ranks: of shape (rows, inner, columns).

    `left` has its rows in the order (inner, parts * rows). `axis` as in `multiply_gathered`.
    """
    rows = left.reshape(inner, -1, left.shape[1])
    if left.is_cuda:
        return _torch.multiply_and_scatter(rows, right, 1, axis).transpose(0, 1).contiguous()
    partial = (left @ right).view(inner, -1, right.shape[1]).transpose(0, 1).contiguous()
    return funcol.wait_tensor.default(funcol.reduce_scatter_tensor.default(partial, "sum", parts, axis))


@collective("all_gather")
@priced_like(GATHER_AND_MULTIPLY)
def multiply_gathered_scaled(
    shard: Tensor, factors: Sequence[Tensor], scale: Tensor, scales: Sequence[Tensor], dtype: torch.dtype, fast: bool,
    parts: int, axis: str,
) -> list[Tensor]:  # fmt: skip
    """`multiply_gathered` of factors in float8, with one number for `shard` and for each factor: what its 1 stands for.
    `dtype` is that of the products, `fast` adds up in fewer bits.
    """
    if shard.is_cuda:
        gathered, products = _torch.gather_and_multiply_scaled(shard, factors, scale, scales, dtype, fast, axis)
        return [gathered, *products]
    sent = funcol.all_gather_into_tensor.default(shard.view(torch.uint8), parts, axis)
    gathered = funcol.wait_tensor.default(sent).view(shard.dtype)
    rows, pairs = gathered.reshape(-1, gathered.shape[-1]), zip(factors, scales, strict=True)
    products = [_scaled_mm(rows, factor, scale, other, None, None, dtype, fast) for factor, other in pairs]
    return [gathered, *(product.unflatten(0, gathered.shape[:-1]) for product in products)]


@collective("reduce_scatter")
@priced_like(MULTIPLY_AND_SCATTER)
def scatter_scaled_product(
    left: Tensor, right: Tensor, scale: Tensor, other: Tensor, dtype: torch.dtype, fast: bool, inner: int, parts: int,
    axis: str,
) -> Tensor:  # fmt: skip
    """`scatter_product` of factors in float8, scaled as in `multiply_gathered_scaled`."""
    if left.is_cuda:
        rows = left.reshape(inner, -1, left.shape[1])
        piece = _torch.multiply_and_scatter_scaled(rows, right, scale, other, dtype, fast, 1, axis)
        return piece.transpose(0, 1).contiguous()
    product = _scaled_mm(left, right, scale, other, None, None, dtype, fast)
    partial = product.view(inner, -1, right.shape[1]).transpose(0, 1).contiguous()
    return funcol.wait_tensor.default(funcol.reduce_scatter_tensor.default(partial, "sum", parts, axis))


FUSED = (multiply_gathered, scatter_product, multiply_gathered_scaled, scatter_scaled_product)
