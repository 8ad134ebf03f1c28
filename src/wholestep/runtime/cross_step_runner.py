"""Runs a step whose last reductions and updates complete in the next call, or when the step is flushed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from ..backend.protocol import Run


class CrossStepRunner:
    """Runs the first call, each later call, and the completion of the last call as three programs.

    `count` values are carried from a call to the next. `lasting` returns the other inputs of `finish`: parameters,
    state and constants.
    """

    def __init__(self, first: Run, steady: Run, finish: Run, count: int, lasting: Callable[[], Sequence[Any]]) -> None:
        self._first, self._steady, self._finish = first, steady, finish
        self._count, self._lasting = count, lasting
        self._carried: list[Any] = []

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Complete the last call, and run this one up to the part that is left to the next."""
        carried, self._carried = self._carried, []
        out = self._steady([*inputs, *carried]) if carried else self._first(inputs)
        self._carried = out[len(out) - self._count :]
        _pending.add(self)
        return out[: len(out) - self._count]

    @property
    def source(self) -> str:
        """Text of the program that runs in all calls but the first."""
        return getattr(self._steady, "source", "")

    def flush(self) -> None:
        """Complete the last call."""
        if self._carried:
            lasting = self._lasting()
            carried, self._carried = self._carried, []
            self._finish([*lasting, *carried])
        _pending.discard(self)


# The steps of this process with a call to complete. Any other use of their model has to find them, and no reference
# leads to them from the model, or from another step that uses it.
_pending = WeakSet[CrossStepRunner]()


def flush_pending(but: object = None) -> None:
    """Complete the last call of every step in this process, except for `but`."""
    if _pending:
        for one in list(_pending):
            if one is not but:
                one.flush()


def has_pending() -> bool:
    """True where a step of this process has a call to complete."""
    return bool(_pending)


def flush_before_use(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
    """From now on pending steps are flushed before an eager update, and before state is read or loaded.

    Before an eager forward, `EagerGather` flushes them.
    """
    for module in modules:
        module.register_state_dict_pre_hook(_flush)
        module.register_load_state_dict_pre_hook(_flush)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(_flush)
        optimizer.register_state_dict_pre_hook(_flush)
        optimizer.register_load_state_dict_pre_hook(_flush)


def _flush(*_: Any, **__: Any) -> None:
    flush_pending()
