"""Products fused with collectives through symmetric memory: `torch.ops.symm_mem`, of one node's GPUs.

- distributed._symmetric_memory (2.5): defines the ops `fused_all_gather_matmul` and `fused_matmul_reduce_scatter`; a
  public module.
- enable_symm_mem_for_group (2.5): older versions need it before the first use, newer ones have deprecated it; nothing.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch

_MODULE = "torch.distributed._symmetric_memory"


def has_symmetric_memory(device: torch.device) -> bool:
    """True where the fused ops have kernels: on CUDA devices, in a torch that defines them."""
    if device.type != "cuda":
        return False
    try:
        importlib.import_module(_MODULE)
    except ImportError:
        return False
    ops: Any = torch.ops.symm_mem
    return hasattr(ops, "fused_all_gather_matmul") and hasattr(ops, "fused_matmul_reduce_scatter")


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


def _enable(group: str) -> None:
    enable = getattr(importlib.import_module(_MODULE), "enable_symm_mem_for_group", None)
    if enable is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable(group)
