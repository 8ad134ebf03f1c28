"""MixedPrecision, the setting that capture, planning and plan files share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .typed_values import check_fields


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of FSDP2's mixed precision. Optimizers see the original parameters.

    Args:
        param: dtype in which modules compute; None for the dtype of their parameters.
        reduce: dtype in which gradients are reduced over ranks; None for the gradient's dtype.

    Example:
        >>> half = wholestep.MixedPrecision(torch.bfloat16, torch.float32)
        >>> step = wholestep.compile(train_step, mixed_precision=half)
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_fields(self)
