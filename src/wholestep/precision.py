"""MixedPrecision and Float8: in which numbers a step computes, and what a captured step uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from .errors import PlanError, shown


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of FSDP2's mixed precision. Optimizers see the original parameters.

    Args:
        param: dtype in which modules compute; None for the dtype of their parameters.
        reduce: dtype in which gradients are reduced over ranks; None for the gradient's dtype.
        stochastic_rounding: the optimizer updates bfloat16 parameters in float32, and the result is rounded up or down
            at random, so that its expectation is the float32 value: small updates are not lost. Random numbers follow
            from the optimizer's count of steps, the parameter's name and the place of the element; ranks, meshes and
            styles draw the same. Optimizer state in bfloat16 takes the nearest value. The step must update a bfloat16
            parameter, by an optimizer that counts steps.

    Example:
        >>> half = wholestep.MixedPrecision(torch.bfloat16, torch.float32)
        >>> step = wholestep.compile(train_step, mixed_precision=half)
        >>> rounded = wholestep.MixedPrecision(stochastic_rounding=True)  # of a model in bfloat16
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    stochastic_rounding: bool = False


@dataclass(frozen=True)
class Float8:
    """Linear layers whose three products (output, gradient of the input, gradient of the weight) multiply numbers of 8
    bits, scaled by the largest value of the current tensor. Parameters and optimizer state keep their dtype.

    Args:
        recipe: `"tensorwise"` has one scale for a tensor, e4m3, and e5m2 for gradients of outputs. `"rowwise"` has one
            for each row or column of a product's operands, a power of two, and e4m3 throughout.
        modules: paths of modules, globs allowed: every `F.linear` that one of them calls itself. `"auto"` takes the
            linears that float8 makes faster, and leaves out projections to the vocabulary.

    Example:
        >>> step = wholestep.compile(train_step, float8=wholestep.Float8("rowwise"))
        >>> step = wholestep.compile(train_step, float8=wholestep.Float8(modules=["layers.*.mlp.*"]))

    Raises:
        PlanError: an unknown recipe, or no modules.
    """

    recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    modules: Literal["auto"] | Sequence[str] = "auto"

    def __post_init__(self) -> None:
        if not self.modules:
            needed = '"auto", or a list of paths, as ["layers.*.mlp.*"]'
            raise PlanError(f"Float8(modules={shown(self.modules)})", needed, "correct modules=")


@dataclass(frozen=True)
class StepPrecision:
    """Dtypes of a captured step by use, those of most bytes or products first, and bytes of a parameter with its
    gradient and optimizer state on one device.
    """

    weights: str
    compute: str
    state: str
    bytes_each: float

    def __str__(self) -> str:
        used = f"weights {self.weights}, compute {self.compute}, optimizer state {self.state or 'none'}"
        return f"{used}: {round(self.bytes_each, 1):,.9g} B a parameter with its gradient"
