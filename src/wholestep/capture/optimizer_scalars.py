"""Traces the scalar state of torch.optim with the rounding of eager mode.

Eager torch.optim keeps step counts and products as 0-dim tensors of the default dtype and reads them into Python
numbers, which are doubles. The capturable form keeps them as tensors, so during a trace they are float64 tensors:
a model in float64 would not be exact otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..graph.graph import Input
from .optimizer_entries import Entry
from .state import begin, begins, is_of_torch

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
    """The float64 scalars of one trace, by the identity of the tensor."""

    scalars: dict[int, _Scalar] = field(default_factory=dict[int, _Scalar])

    def put(self, optimizer: Optimizer, entry: dict[Any, Any], source: Input, param: Tensor, tensor: Tensor) -> None:
        """Put a state tensor into an entry: as float64 if eager would read it; fused kernels read the original."""
        Entry(entry)[source.key] = tensor
        if self._is_count(optimizer, source.key, tensor):
            group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
            self._widen(entry, source.key, group)

    def begin(self, optimizer: Optimizer) -> None:
        """Create the state that the step has taken away and that an update needs: eager will read its counts, too."""
        table, later = cast(dict[Any, dict[str, Any]], optimizer.state), getattr(optimizer.state, "later", ())
        for group in optimizer.param_groups if begins(optimizer) else ():
            new = [p for p in group["params"] if p.grad is not None and p not in later and not table.get(p)]
            begin(optimizer, {**group, "params": new})
            for entry in map(table.__getitem__, new):
                for key in [key for key, value in entry.items() if self._is_count(optimizer, key, value)]:
                    self._widen(entry, key, group)

    def end(self, entries: Iterable[dict[str, Any]]) -> None:
        """Leave the scalars of these in their original dtype."""
        for entry in entries:
            widened = {k: scalar for k, v in entry.items() if (scalar := self.scalars.get(id(v)))}
            entry.update({k: scalar.tensor.to(scalar.dtype) for k, scalar in widened.items()})

    def _is_count(self, optimizer: Optimizer, key: str, value: Any) -> bool:
        fused = any(group.get("fused") for group in optimizer.param_groups)
        is_scalar = isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()
        return is_of_torch(optimizer) and key in _COUNTS and not fused and is_scalar and value.dtype != torch.float64

    def _widen(self, entry: dict[str, Any], key: str, group: dict[str, Any]) -> None:
        narrow, entry[key] = entry[key], entry[key].double()
        self.scalars[id(entry[key])] = _Scalar(entry[key], narrow.dtype, key, entry, group)

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
