"""Fits into the memory of a device what torch's allocator reserves, where searches and passes bound tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from wholestep.errors import PlanError
from wholestep.graph.text import human

from .screen import Screen

T = TypeVar("T")
_TRIES = 3  # with less for tensors each time: blocks are packed otherwise


def within_device(
    shown: Screen, memory_bytes: int | None, attempt: Callable[[int | None], T], reserved: Callable[[T], int | None]
) -> T:
    """What `attempt` makes of a budget for tensors with which it reserves no more than `memory_bytes`. Bytes that it
    reserves beyond them are taken off the budget. Where that does not help, or nothing says what is `reserved`, the
    first is returned: its figures say so.

    Raises:
        PlanError: nothing fits into `memory_bytes`, tensors alone.
    """
    first = latest = attempt(memory_bytes)
    budget = memory_bytes
    for _ in range(_TRIES):
        needs = reserved(latest)
        if memory_bytes is None or budget is None or needs is None or needs <= memory_bytes:
            return latest
        budget -= needs - memory_bytes
        shown.note(
            f"torch's allocator would reserve {human(needs)} of {human(memory_bytes)}: again with tensors within "
            f"{human(max(budget, 0))}"
        )
        try:
            latest = attempt(budget)
        except PlanError:  # nothing fits, or nothing can be recomputed as much
            break
    needs = reserved(latest)
    fits = memory_bytes is None or needs is None or needs <= memory_bytes
    return latest if fits else first
