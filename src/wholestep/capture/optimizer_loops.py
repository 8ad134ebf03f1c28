"""The loops of torch.optim over parameters: what they do for two parameters alike is recorded for all others like them.

The Python of an update takes most of the time of a trace of hundreds of parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch

from .. import _torch

_LOOPS = "_single_tensor_"  # functions of torch.optim whose loop over `params` updates one after the other
_READS_VALUES = "_single_tensor_adafactor"  # `methods` has its form


@dataclass
class _Update:
    """The ops of the first parameter of a kind. `repeats`: they were the same for the second one."""

    tape: _torch.Tape
    repeats: bool | None = None


def optimizer_loops(
    fakes_of: Callable[[list[Any]], list[Any]], kind_of: Callable[[list[Any]], Any], recorded: Callable[[], int]
) -> list[Any]:
    """Forms of the loops. Fakes alike have one `kind_of`; what is `recorded` besides must not grow in repeated ops."""

    def form(original: Callable[..., Any], params: Any, *lists: Any, **named: Any) -> Any:
        full: list[list[Any]] = [params, *(items for items in lists if type(items) is list and items)]
        aligned = all(type(items) is list and len(items) == len(params) for items in full)
        options = (*lists, *(value for key, value in named.items() if key != "lr"))
        tensors = any(isinstance(value, torch.Tensor) for value in options)
        if not aligned or tensors or torch.is_grad_enabled() or not _torch.can_tape():
            return original(params, *lists, **named)
        parts = iter(_Loop(full, fakes_of, kind_of, recorded).parts)
        return original(next(parts), *(next(parts) if type(v) is list and v else v for v in lists), **named)

    modules = [sys.modules[name] for name in [*sys.modules] if name.startswith("torch.optim.")]
    return [(module, name, form) for module in modules for name in _loops_of(module)]


@cache
def _loops_of(module: ModuleType) -> list[str]:
    return [name for name in vars(module) if name.startswith(_LOOPS) and name != _READS_VALUES]


class _Params(list[Any]):
    """The parameters for which the loop runs."""

    start: Callable[[], Iterator[Any]] = staticmethod(lambda: iter(()))

    def __iter__(self) -> Iterator[Any]:
        return self.start()


@dataclass
class _Loop:
    """A loop over parameters and other lists of tensors for each. It sees `parts`, which grow by those that it runs."""

    full: list[list[Any]]
    fakes_of: Callable[[list[Any]], list[Any]]
    kind_of: Callable[[list[Any]], Any]
    recorded: Callable[[], int]
    parts: list[list[Any]] = field(default_factory=list[list[Any]])

    def __post_init__(self) -> None:
        params = _Params()
        params.start = self._params
        self.parts += [params, *([] for _ in self.full[1:])]

    def _params(self) -> Iterator[Any]:
        """Yield the parameters that the loop has to update; the others are updated in between."""
        updates: dict[Any, _Update] = {}
        for part in self.parts:
            part.clear()
        for index in range(len(self.full[0])):
            tensors = [items[index] for items in self.full]
            fakes = self.fakes_of(tensors)
            kind = self.kind_of(fakes) if len({*map(id, fakes)}) == len(fakes) else None
            update = updates.get(kind)
            if update is not None and update.repeats:
                _torch.repeat_ops(update.tape, fakes)
                continue
            for part, item in zip(self.parts, tensors, strict=True):
                part.append(item)
            before = self.recorded()
            with _torch.ops_taped([] if kind is None else fakes) as tape:
                yield tensors[0]
            same = self.recorded() == before and all(part[-1] is t for part, t in zip(self.parts, tensors, strict=True))
            for items, part in zip(self.full, self.parts, strict=True):
                items[index] = part[-1]
            if kind is None or (update is not None and update.repeats is not None):
                continue
            if update is None:
                updates[kind] = _Update(tape, None if same else False)
            else:
                update.repeats = same and _torch.same_ops(update.tape, tape)
