"""Runs a step that ends in the next call, and ends it sooner where something else is about to look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from ..backend.protocol import Run


class CrossStepRunner:
    """A Run in three: the first call, those after it, and what completes the last.

    `lasting` gives the inputs of `finish` but for what is carried: parameters, state and constants.
    """

    def __init__(self, first: Run, steady: Run, finish: Run, count: int, lasting: Callable[[], Sequence[Any]]) -> None:
        self._first, self._steady, self._finish = first, steady, finish
        self._count, self._lasting = count, lasting
        self._carried: list[Any] = []

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Complete the last call, and all but the end of this one."""
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


# Which steps of this process have something to complete. Any other use of their model has to find them, and nothing
# leads from a model, or from another step that uses it, to them.
_pending = WeakSet[CrossStepRunner]()


def flush_pending(but: object = None) -> None:
    """Complete the last call of every step in this process, except for `but`."""
    if _pending:
        for one in list(_pending):
            if one is not but:
                one.flush()


def has_pending() -> bool:
    """True where a step of this process has something to complete."""
    return bool(_pending)


def flush_before_use(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
    """From now on steps are completed before an eager update, and before state is read or loaded.

    Before an eager forward they are by what gathers for it (`between`).
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
