"""What decides, beside a function and its arguments, which graph a step becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from ..errors import PlanError
from ..precision import MixedPrecision
from .call_structure import by_name


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """How a step is captured. `compile` makes one of its own options; give one to `capture` to plan the same program.

    Args:
        mixed_precision: dtypes in which modules compute and gradients are reduced.
        offload: `"cpu"` keeps parameters, gradients and optimizer state in host memory, where the update runs; shards
            go to the device to be gathered. On the CPU only the program changes.
        fused: optimizers keep their fused and foreach kernels; False writes them out, as the inductor backend wants it.
        keep_grads: leave gradients in `param.grad` also when the step resets them at its start.
        module_overrides: submodules to swap for the time of the trace, by path (globs allowed).
        model: modules that the step uses without being given them; those it closes over are found by themselves.
        optimizer: optimizers, likewise.
        device: where the step runs; by default where the model is (cpu for a model on `meta`).

    Example:
        >>> half = wholestep.MixedPrecision(torch.bfloat16)
        >>> options = wholestep.CaptureOptions(mixed_precision=half)
        >>> graph = wholestep.capture(train_step, model, optimizer, batch, options=options)

    Raises:
        PlanError: `offload` is unknown.
    """

    mixed_precision: MixedPrecision | None = None
    offload: Literal["cpu"] | None = None
    fused: bool = True
    keep_grads: bool = False
    module_overrides: Mapping[str, nn.Module] = field(default_factory=dict[str, nn.Module])
    model: nn.Module | Sequence[nn.Module] | None = None
    optimizer: Optimizer | Sequence[Optimizer] | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.offload not in (None, "cpu"):
            raise PlanError(f"offload={self.offload!r}", "None or 'cpu'", "correct the name")

    @property
    def extra(self) -> dict[str, Any]:
        """`model` and `optimizer` by name."""
        return {**by_name("model", self.model, nn.Module), **by_name("optimizer", self.optimizer, Optimizer)}
