"""Traces the scalar state of torch.optim with the rounding of eager mode.

Eager torch.optim keeps step counts and products as 0-dim tensors of the default dtype and reads them into Python
numbers, which are doubles. The capturable form keeps them as tensors, so during a trace they are float64 tensors:
a model in float64 would not be exact otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..graph.graph import Input
from .optimizer_entries import Entry
from .state import is_of_torch

_COUNTS = frozenset({"step", "mu_product", "eta", "mu"})
_MULTIPLIES = ("mul_", "__imul__", "_foreach_mul_")
_COPIES = "_foreach_copy_"
INSTEAD = (*_MULTIPLIES, _COPIES, "where")
"""Names of the functions for which another call may run instead."""
_INTERNAL = ("capture/optimizer_scalars.py", "capture/trace.py")
_OPTIMIZERS = torch.optim.Optimizer.__module__.rpartition(".")[0].replace(".", "/")


@dataclass(frozen=True)
class _Scalar:
    """A float64 scalar of a trace, its original dtype, and the state entry that holds it."""

    tensor: Tensor
    dtype: torch.dtype
    key: str
    entry: dict[str, Any]
    group: dict[str, Any]


@dataclass
class Counts:
    """The float64 scalars of one trace, by the identity of the tensor, and the `names` of their inputs."""

    scalars: dict[int, _Scalar] = field(default_factory=dict[int, _Scalar])
    names: set[str] = field(default_factory=set[str])

    def put(self, optimizer: Optimizer, entry: dict[Any, Any], source: Input, param: Tensor, tensor: Tensor) -> None:
        """Put a state tensor into an entry: as float64 if eager would read it; fused kernels read the original."""
        fused = any(group.get("fused") for group in optimizer.param_groups)
        counts = is_of_torch(optimizer) and source.key in _COUNTS
        Entry(entry)[source.key] = tensor
        if counts and not fused and tensor.dim() == 0 and tensor.is_floating_point() and tensor.dtype != torch.float64:
            group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
            entry[source.key] = tensor.double()
            self.names.add(source.name)
            self.scalars[id(entry[source.key])] = _Scalar(entry[source.key], tensor.dtype, source.key, entry, group)

    def instead(self, func: Any, args: Sequence[Any]) -> Any:
        """Run a call that would round otherwise than eager does; NotImplemented for all other calls."""
        name = getattr(func, "__name__", "")
        if func is torch.where and len(args) == 3 and not any(isinstance(a, Tensor) for a in args[1:]):
            return _where(*args) if _called_by_optimizer() else NotImplemented
        scalars = self._written_scalars(args[0]) if self.scalars and name in INSTEAD else []
        if scalars and name in _MULTIPLIES:
            for scalar, factor in zip(scalars, _listed(args[1], len(scalars)), strict=True):
                scalar.tensor.copy_(scalar.tensor.to(scalar.dtype) * _as_operand(factor, scalar.dtype))
        elif scalars and all(scalar.key == "eta" for scalar in scalars):
            for scalar in scalars:
                scalar.tensor.copy_(_eta(scalar))
        else:
            return NotImplemented
        return args[0]

    def _written_scalars(self, written: Any) -> list[_Scalar]:
        """Return the scalars that a call writes; nothing if it writes other tensors too."""
        scalars = [self.scalars.get(id(tensor)) for tensor in _listed(written, 1)]
        return [scalar for scalar in scalars if scalar] if all(scalars) else []


def _called_by_optimizer() -> bool:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.endswith(_INTERNAL):
        frame = frame.f_back
    return frame is not None and _OPTIMIZERS in frame.f_code.co_filename


def _listed(value: Any, count: int) -> list[Any]:
    """Return the entries of a list, or `count` times one value."""
    return list(cast(list[Any], value)) if isinstance(value, (list, tuple)) else [value] * count


def _where(condition: Tensor, a: float, b: float) -> Tensor:
    first, second = (torch.full((), n, dtype=torch.float64, device=condition.device) for n in (a, b))
    return torch.where(condition, first, second)


def _as_operand(number: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor number to the dtype of its 0-dim operand, as type promotion does for a Python number."""
    return number.to(dtype) if isinstance(number, Tensor) else number


def _eta(scalar: _Scalar) -> Tensor:
    """Return the step size of foreach ASGD, which computes with the count in its original dtype."""
    group, dtype = scalar.group, scalar.dtype
    lr, lambd, alpha = group["lr"], group["lambd"], group["alpha"]
    grown = 1 + scalar.entry["step"].to(dtype) * _as_operand(lambd * lr, dtype)
    return (grown ** _as_operand(alpha, dtype)).reciprocal() * _as_operand(lr, dtype)
