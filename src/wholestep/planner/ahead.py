"""Computes on another core, in a copy of this process, what will perhaps be asked for."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """What `work` returns, computed in a copy of this process while this one goes on. The copy has no other threads and
    must print nothing.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._pipe, end = os.pipe()
        self._copy = os.fork()
        if not self._copy:
            _answer(work, end)
        os.close(end)

    def result(self) -> T | None:
        """What it has returned, once it has; None where it failed: computed here, it says why."""
        found = self._ended()
        try:
            return pickle.loads(found)
        except (EOFError, pickle.UnpicklingError):  # it did not come to its end
            return None

    def drop(self) -> None:
        """End the copy."""
        os.kill(self._copy, signal.SIGKILL)
        self._ended()

    def _ended(self) -> bytes:
        with os.fdopen(self._pipe, "rb") as pipe:
            found = pipe.read()
        os.waitpid(self._copy, 0)
        return found


def _answer(work: Callable[[], object], end: int) -> None:
    """The copy: writes what `work` returns, and ends."""
    try:
        found = pickle.dumps(work())
        with os.fdopen(end, "wb") as pipe:
            pipe.write(found)
    finally:
        os._exit(0)


def usable_cores() -> int:
    """The cores that this process may run on; one where a copy of it is not safe, as on macOS."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
