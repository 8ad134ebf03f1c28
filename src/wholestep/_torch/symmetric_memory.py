"""Products fused with collectives through symmetric memory: `torch.ops.symm_mem`, of one node's GPUs.

- distributed._symmetric_memory (2.5): defines the ops `fused_all_gather_matmul` and `fused_matmul_reduce_scatter`, and
  those of factors in float8 (with the shape of the result since 2.8); a public module.
- enable_symm_mem_for_group (2.5): older versions need it before the first use, newer ones have deprecated it; nothing.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch

_MODULE = "torch.distributed._symmetric_memory"
_OPS = (
    "fused_all_gather_matmul", "fused_matmul_reduce_scatter",
    "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter",
)  # fmt: skip


def has_symmetric_memory(device: torch.device) -> bool:
    """True where the fused ops have kernels: on CUDA devices, in a torch that defines them."""
    if device.type != "cuda":
        return False
    try:
        importlib.import_module(_MODULE)
    except ImportError:
        return False
    ops: Any = torch.ops.symm_mem
    return all(hasattr(ops, name) for name in _OPS)


def gather_and_multiply(
    shard: torch.Tensor, factors: Sequence[torch.Tensor], group: str
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Return the all-gather of `shard` along dim 0, and its product with each of `factors`."""
    _enable(group)
    ops: Any = torch.ops.symm_mem
    return ops.fused_all_gather_matmul(shard, list(factors), 0, group, return_A=True)


def multiply_and_scatter(left: torch.Tensor, right: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """Return this rank's piece along `dim` of the sum of `left @ right` over ranks."""
    _enable(group)
    ops: Any = torch.ops.symm_mem
    return ops.fused_matmul_reduce_scatter(left, right, "sum", dim, group)


def gather_and_multiply_scaled(
    shard: torch.Tensor, factors: Sequence[torch.Tensor], scale: torch.Tensor, scales: Sequence[torch.Tensor],
    dtype: torch.dtype, fast: bool, group: str,
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:  # fmt: skip
    """`gather_and_multiply` in float8: one inverse scale of `shard`, and one of each factor."""
    _enable(group)
    ops, count = cast(Any, torch.ops.symm_mem), len(factors)
    nothing, each = [None] * count, ([dtype] * count, [fast] * count)
    return ops.fused_all_gather_scaled_matmul(
        shard, list(factors), scale, list(scales), 0, group, nothing, nothing, *each
    )


def multiply_and_scatter_scaled(
    left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor, other: torch.Tensor, dtype: torch.dtype, fast: bool,
    dim: int, group: str,
) -> torch.Tensor:  # fmt: skip
    """`multiply_and_scatter` in float8, with the inverse scale of each factor."""
    _enable(group)
    ops, shape = cast(Any, torch.ops.symm_mem), [*left.shape[:-1], right.shape[1]]
    return ops.fused_scaled_matmul_reduce_scatter(
        left, right, scale, other, "sum", dim, dim, group, shape, None, None, dtype, fast
    )


def _enable(group: str) -> None:
    enable = getattr(importlib.import_module(_MODULE), "enable_symm_mem_for_group", None)
    if enable is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable(group)
