"""Optimizers inside wrappers of other libraries: found through them, and what the wrappers do besides is not lost."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import CaptureError
from ..graph.meta import show_line

_COUNTS = "_on_before_step"  # what an optimizer of Lightning's calls before an update, to count it
_SWITCHES = "_set_sync_gradients"  # how Accelerate says whether gradients are complete
_NOT_USERS = ("accelerate", "contextlib", "lightning", "pytorch_lightning", "wholestep")


def unwrapped(value: Any) -> Any:
    """The optimizer inside wrappers that hand all on to their `.optimizer`; anything else as it is.

    Accelerate's and Lightning's do. One with state or parameter groups of its own (a Lookahead) is no such wrapper.
    """
    while not isinstance(value, nn.Module):
        inner = getattr(value, "optimizer", None)
        if not isinstance(inner, Optimizer) or inner is value:
            break
        groups, state = getattr(value, "param_groups", None), getattr(value, "state", None)
        if groups is not inner.param_groups or state is not inner.state:
            break
        value = inner
    return value


def switches(wrappers: Iterable[Any]) -> list[tuple[Any, str]]:
    """Attributes by which wrappers decide whether `step()` updates: Accelerate's do it when gradients are complete."""
    states = [getattr(one, "gradient_state", None) for one in wrappers]
    return [(state, "sync_gradients") for state in states if hasattr(state, "sync_gradients")]


@contextmanager
def effects_refused(wrappers: Sequence[Any]) -> Generator[None]:
    """Inside, wrappers refuse what they would do once, at capture, and never again.

    Lightning's count updates in Python. What Accelerate's ask for complete gradients is set by `accumulate`.

    Raises:
        CaptureError: the step does one of these.
    """
    puts: list[tuple[Any, str, Any]] = [(one, _COUNTS, _refuse_count) for one in wrappers if _COUNTS in vars(one)]
    puts += [(state, _SWITCHES, partial(_refuse_switch, state)) for state, _ in switches(wrappers)]
    before: list[Any] = [vars(holder).get(name) for holder, name, _ in puts]
    try:
        for holder, name, refuse in puts:
            setattr(holder, name, refuse)
        yield
    finally:
        for (holder, name, _), was in zip(puts, before, strict=True):
            vars(holder).pop(name, None)
            vars(holder).update({name: was} if was is not None else {})


def _refuse_count() -> None:
    raise CaptureError(
        "the step calls step() of an optimizer of Lightning's, which counts `trainer.global_step` in Python",
        "the optimizer inside it, and the count after each call of the step",
        "write `self.optimizers().optimizer.step()` in the step, and `self.optimizers().step()` after it: that finds "
        "no gradients, updates nothing and counts",
        _users_line(),
    )


def _refuse_switch(state: Any, value: bool) -> None:
    if value != state.sync_gradients:
        raise CaptureError(
            f"the step changes Accelerate's sync_gradients: {state.sync_gradients} -> {value}",
            "a step that is called with gradients that are complete after it, or are not",
            "write `with accelerator.accumulate(model):` around the call of the step, not into it",
            _users_line(),
        )


def _users_line() -> str:
    """The line that called into a library."""
    frame = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _NOT_USERS:
        frame = frame.f_back
    return show_line(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""
