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

funcol = torch.ops._c10d_functional


@collective("all_gather")
@priced_like(GATHER_AND_MULTIPLY)
def multiply_gathered(shard: Tensor, factors: Sequence[Tensor], parts: int, axis: str) -> list[Tensor]:
    """What `parts` ranks gather of `shard` along dim 0, and its product with each of `factors`.

    `axis` is a mesh axis, and the name of a process group in a bound graph.
    """
    if _torch.has_symmetric_memory(shard.device):
        whole, products = _torch.gather_and_multiply(shard, factors, axis)
        return [whole, *products]
    whole = funcol.wait_tensor.default(funcol.all_gather_into_tensor.default(shard, parts, axis))
    return [whole, *(whole @ factor for factor in factors)]


@collective("reduce_scatter")
@priced_like(MULTIPLY_AND_SCATTER)
def scatter_product(left: Tensor, right: Tensor, inner: int, parts: int, axis: str) -> Tensor:
    """This rank's piece of the sum of `left @ right` over `parts` ranks: of shape (rows, inner, columns).

    `left` has its rows in the order (inner, parts * rows). `axis` as in `multiply_gathered`.
    """
    rows = left.reshape(inner, -1, left.shape[1])
    if _torch.has_symmetric_memory(left.device):
        return _torch.multiply_and_scatter(rows, right, 1, axis).transpose(0, 1).contiguous()
    partial = (left @ right).view(inner, -1, right.shape[1]).transpose(0, 1).contiguous()
    return funcol.wait_tensor.default(funcol.reduce_scatter_tensor.default(partial, "sum", parts, axis))


FUSED = (multiply_gathered, scatter_product)
