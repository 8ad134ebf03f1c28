"""CaptureOptions: the settings that change the captured graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import PlanError, shown
from ..precision import Float8, MixedPrecision
from .call_structure import Modules, Optimizers, by_name


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """Settings of a capture. `compile` derives them from its options; pass equal ones to `capture` to plan its program.

    Args:
        mixed_precision: dtypes in which modules compute and gradients are reduced.
        float8: linear layers that multiply in float8.
        offload: `"cpu"` keeps parameters, gradients and optimizer state in host memory, where the update runs; shards
            are copied to the device to be gathered. On a CPU device this changes the program only.
        fused: keep fused and foreach optimizer kernels; False decomposes them.
        keep_grads: keep gradients in `param.grad` even if the step resets them at its start.
        skip_nonfinite: the step leaves its state as it was if its loss or a gradient is not finite.
        branches: what `if tensor:` takes the tensor for, in order; behind these, whatever lets the trace go on. A graph
            that has assumed something says in its last result whether that was so. Without it, `if tensor:` is refused.
        branches_of_batch: behind `branches`, a value of the batch alone is taken as it is: where no rank has another.
        module_overrides: replacements for submodules during the trace, by path (globs allowed).
        model: modules of the step that are neither arguments nor closure variables, which are found automatically.
        optimizer: optimizers, likewise.
        device: device of the step; by default the model's (cpu for a model on `meta`).
        kernels: `"cuda"` records the attention kernels that CUDA would choose, dropout included, on any device: for a
            step that is planned and simulated here and runs elsewhere. By default those of the device.

    Example:
        >>> half = wholestep.MixedPrecision(torch.bfloat16)
        >>> options = wholestep.CaptureOptions(mixed_precision=half)
        >>> graph = wholestep.capture(train_step, model, optimizer, batch, options=options)

    Raises:
        PlanError: `offload` or `kernels` is unknown.
    """

    mixed_precision: MixedPrecision | None = None
    float8: Float8 | None = None
    offload: Literal["cpu"] | None = None
    fused: bool = True
    keep_grads: bool = False
    skip_nonfinite: bool = False
    branches: tuple[bool, ...] | None = None
    branches_of_batch: bool = False
    module_overrides: Mapping[str, nn.Module] = field(default_factory=dict[str, nn.Module])
    model: Modules | None = None
    optimizer: Optimizers | None = None
    device: str | None = None
    kernels: Literal["cuda"] | None = None

    def __post_init__(self) -> None:
        try:
            torch.device(self.device or "cpu")
        except RuntimeError as error:
            text = f"device={shown(self.device)}"
            raise PlanError(text, "a device of torch, as 'cpu' or 'cuda:0'", "correct the name") from error

    @property
    def extra(self) -> dict[str, Any]:
        """`model` and `optimizer` by name."""
        return {**by_name("model", self.model, nn.Module), **by_name("optimizer", self.optimizer, Optimizer)}
