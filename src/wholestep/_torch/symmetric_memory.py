"""Products fused with collectives through symmetric memory: `torch.ops.symm_mem`, of one node's GPUs.

- distributed._symmetric_memory (2.5): defines the ops `fused_all_gather_matmul` and `fused_matmul_reduce_scatter`, and
  those of factors in float8; a public module.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch


def _ops() -> Any:
    importlib.import_module("torch.distributed._symmetric_memory")  # it defines them
    return torch.ops.symm_mem


def gather_and_multiply(
    shard: torch.Tensor, factors: Sequence[torch.Tensor], group: str
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Return the all-gather of `shard` along dim 0, and its product with each of `factors`."""
    return _ops().fused_all_gather_matmul(shard, list(factors), 0, group, return_A=True)


def multiply_and_scatter(left: torch.Tensor, right: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """Return this rank's piece along `dim` of the sum of `left @ right` over ranks."""
    return _ops().fused_matmul_reduce_scatter(left, right, "sum", dim, group)


def gather_and_multiply_scaled(
    shard: torch.Tensor, factors: Sequence[torch.Tensor], scale: torch.Tensor, scales: Sequence[torch.Tensor],
    dtype: torch.dtype, fast: bool, group: str,
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:  # fmt: skip
    """`gather_and_multiply` in float8: one inverse scale of `shard`, and one of each factor."""
    count = len(factors)
    nothing, each = [None] * count, ([dtype] * count, [fast] * count)
    return _ops().fused_all_gather_scaled_matmul(
        shard, list(factors), scale, list(scales), 0, group, nothing, nothing, *each
    )


def multiply_and_scatter_scaled(
    left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor, other: torch.Tensor, dtype: torch.dtype, fast: bool,
    dim: int, group: str,
) -> torch.Tensor:  # fmt: skip
    """`multiply_and_scatter` in float8, with the inverse scale of each factor."""
    shape = [*left.shape[:-1], right.shape[1]]
    return _ops().fused_scaled_matmul_reduce_scatter(
        left, right, scale, other, "sum", dim, dim, group, shape, None, None, dtype, fast
    )
