"""Optimizers inside wrappers of Accelerate and Lightning: unwraps them, and refuses effects that would be lost."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from .._torch import attributes_set
from ..errors import CaptureError
from ..graph.meta import show_line

_COUNTS = "_on_before_step"  # Lightning's optimizer calls it before an update, to count the update
_SWITCHES = "_set_sync_gradients"  # Accelerate's setter for whether gradients are complete
_NOT_USERS = ("accelerate", "contextlib", "lightning", "pytorch_lightning", "wholestep")


def attributes_of(value: object) -> dict[str, Any] | None:
    """Return the attributes of an object, without asking it: its class may answer every name; None if it has none."""
    if isinstance(value, threading.local):  # it has others in each thread
        return vars(value)
    try:
        attributes: Any = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return cast("dict[str, Any]", attributes) if isinstance(attributes, dict) else None


def _looked_up(value: object, name: str) -> Any:
    """Return an attribute that an object has, or a property that a library defines; None for any other."""
    attribute: Any = inspect.getattr_static(value, name, None)
    if isinstance(attribute, property):
        module: str = getattr(attribute.fget, "__module__", None) or ""
        attribute = getattr(value, name) if module.partition(".")[0] in _NOT_USERS else None
    return attribute


def unwrapped(value: Any) -> Any:
    """Return the optimizer inside wrappers such as Accelerate's and Lightning's; any other value unchanged.

    A wrapper delegates to its `.optimizer`; an optimizer with its own state or parameter groups (Lookahead) is none.
    """
    while not isinstance(cast(object, value), (nn.Module, dict)):
        inner = _looked_up(value, "optimizer")
        if not isinstance(inner, Optimizer) or inner is value or not _delegates(value, inner):
            break
        value = inner
    return value


def _delegates(value: Any, inner: Optimizer) -> bool:
    """Return whether an object that has an optimizer passes its groups and state on."""
    try:
        return value.param_groups is inner.param_groups and value.state is inner.state
    except Exception:  # what a property or `__getattr__` of the user's raises
        return False


def switches(wrappers: Iterable[Any]) -> list[tuple[Any, str]]:
    """Return the attributes that decide whether `step()` updates: Accelerate updates if gradients are complete."""
    states = [_looked_up(wrapper, "gradient_state") for wrapper in wrappers]
    return [(state, "sync_gradients") for state in states if _looked_up(state, "sync_gradients") is not None]


def effects_refused(wrappers: Sequence[Any]) -> AbstractContextManager[None]:
    """Refuse Python effects of wrappers inside this context: they would happen at capture only.

    Lightning counts updates in Python; Accelerate's `accumulate` sets whether gradients are complete.
    """
    puts: list[tuple[Any, str, Any]] = [(w, _COUNTS, _refuse_count) for w in wrappers if _COUNTS in vars(w)]
    puts += [(state, _SWITCHES, partial(_refuse_switch, state)) for state, _ in switches(wrappers)]
    return attributes_set(puts)


def _refuse_count() -> None:
    raise CaptureError(
        "the step calls step() of a Lightning optimizer, which counts `trainer.global_step` in Python",
        "step() of the wrapped optimizer, and the count outside of the step",
        "write `self.optimizers().optimizer.step()` in the step, and `self.optimizers().step()` after it: without "
        "gradients it only counts",
        _users_line(),
    )


def _refuse_switch(state: Any, value: bool) -> None:
    if value != state.sync_gradients:
        raise CaptureError(
            f"the step changes Accelerate's sync_gradients: {state.sync_gradients} -> {value}",
            "a setting that is constant during a call of the step",
            "write `with accelerator.accumulate(model):` around the call of the step, not inside the step",
            _users_line(),
        )


def _users_line() -> str:
    frame = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _NOT_USERS:
        frame = frame.f_back
    return show_line(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""
