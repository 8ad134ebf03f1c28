"""Optimizers inside wrappers of other libraries: found through them, and what the wrappers do besides is not lost."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import CaptureError
from ..graph.meta import show_line

_COUNTS = "_on_before_step"  # what an optimizer of Lightning's calls before an update, to count it


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
def counting_refused(wrappers: Iterable[Any]) -> Generator[None]:
    """Inside, a wrapper that counts its updates in Python refuses: a captured step would count the first one alone.

    Raises:
        CaptureError: the step calls `step()` of one.
    """
    counting = [one for one in wrappers if _COUNTS in vars(one)]
    before = [getattr(one, _COUNTS) for one in counting]
    try:
        for one in counting:
            setattr(one, _COUNTS, _refuse)
        yield
    finally:
        for one, was in zip(counting, before, strict=True):
            setattr(one, _COUNTS, was)


def _refuse() -> None:
    caller = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  # of the wrapper's step
    raise CaptureError(
        "the step calls step() of an optimizer of Lightning's, which counts `trainer.global_step` in Python",
        "the optimizer inside it, and the count after each call of the step",
        "write `self.optimizers().optimizer.step()` in the step, and `self.optimizers().step()` after it: that finds "
        "no gradients, updates nothing and counts",
        show_line(caller.f_code.co_filename, caller.f_lineno),
    )
