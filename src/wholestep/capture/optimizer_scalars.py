"""Numbers that torch.optim computes with in Python, rounded where eager rounds them and nowhere else.

Counts and products that it keeps as 0-dim tensors of the default dtype are read into Python numbers, which are doubles.
In the tensor-only form they stay tensors, so they are doubles while a step is traced: a model in float64 would not be
exact otherwise.
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

_COUNTS = frozenset({"step", "mu_product", "eta", "mu"})
_MULTIPLIES = ("mul_", "__imul__", "_foreach_mul_")
_COPIES = "_foreach_copy_"
_ON_THE_WAY = ("capture/optimizer_scalars.py", "capture/trace.py")
_OPTIMIZERS = torch.optim.Optimizer.__module__.rpartition(".")[0].replace(".", "/")


@dataclass(frozen=True)
class _Kept:
    """Where a number in double is kept, and as what."""

    tensor: Tensor
    dtype: torch.dtype
    key: str
    entry: dict[str, Any]
    group: dict[str, Any]


@dataclass
class Counts:
    """Those of one trace, by the identity of the tensor that stands for each."""

    kept: dict[int, _Kept] = field(default_factory=dict[int, _Kept])

    def put(self, optimizer: Optimizer, given: Input, param: Tensor, tensor: Tensor) -> None:
        """Put state into `optimizer`: in double if eager would read it; the fused kernels read it as it is."""
        entry: dict[str, Any] = cast(Any, optimizer.state)[param]
        fused = any(group.get("fused") for group in optimizer.param_groups)
        own = type(optimizer).__module__.startswith("torch.optim") and given.key in _COUNTS
        entry[given.key] = tensor
        if own and not fused and tensor.dim() == 0 and tensor.is_floating_point() and tensor.dtype != torch.float64:
            group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
            entry[given.key] = tensor.double()
            self.kept[id(entry[given.key])] = _Kept(entry[given.key], tensor.dtype, given.key, entry, group)

    def instead(self, func: Any, args: Sequence[Any]) -> Any:
        """What a call gives that would round otherwise than eager does; NotImplemented for all other calls."""
        name = getattr(func, "__name__", "")
        if func is torch.where and len(args) == 3 and not any(isinstance(a, Tensor) for a in args[1:]):
            return _either(*args) if _asked_by_torch() else NotImplemented
        found = self._found(args[0]) if self.kept and name in (*_MULTIPLIES, _COPIES) else []
        if found and name in _MULTIPLIES:
            for one, factor in zip(found, _listed(args[1], len(found)), strict=True):
                one.tensor.copy_(one.tensor.to(one.dtype) * _to(factor, one.dtype))
        elif found and all(one.key == "eta" for one in found):
            for one in found:
                one.tensor.copy_(_eta(one))
        else:
            return NotImplemented
        return args[0]

    def _found(self, written: Any) -> list[_Kept]:
        """What is known of the numbers that are written; nothing where others are too."""
        found = [self.kept.get(id(tensor)) for tensor in _listed(written, 1)]
        return [one for one in found if one] if all(found) else []


def _asked_by_torch() -> bool:
    """True where the code that calls a torch function is that of an optimizer of torch's."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.endswith(_ON_THE_WAY):
        frame = frame.f_back
    return frame is not None and _OPTIMIZERS in frame.f_code.co_filename


def _listed(value: Any, count: int) -> list[Any]:
    """The entries of a list, or one value so many times."""
    return list(cast(list[Any], value)) if isinstance(value, (list, tuple)) else [value] * count


def _either(condition: Tensor, a: float, b: float) -> Tensor:
    """One of two Python numbers."""
    first, second = (torch.full((), n, dtype=torch.float64, device=condition.device) for n in (a, b))
    return torch.where(condition, first, second)


def _to(number: Any, dtype: torch.dtype) -> Any:
    """A number as torch takes it beside a 0-dim tensor of `dtype`."""
    return number.to(dtype) if isinstance(number, Tensor) else number


def _eta(kept: _Kept) -> Tensor:
    """The step size of ASGD over lists, which is computed with the count as it is kept, not as Python has it."""
    group, dtype = kept.group, kept.dtype
    lr, lambd, alpha = group["lr"], group["lambd"], group["alpha"]
    grown = 1 + kept.entry["step"].to(dtype) * _to(lambd * lr, dtype)
    return (grown ** _to(alpha, dtype)).reciprocal() * _to(lr, dtype)
