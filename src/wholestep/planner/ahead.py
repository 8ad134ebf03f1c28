"""Computes on another core, in a copy of this process, what will perhaps be asked for."""

from __future__ import annotations

import os
import pickle
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
PATIENCE_S = 20.0
"""Every process computes in 20 seconds, also where many share the cores; one that waits for a lock does not."""


class Ahead(Generic[T]):
    """What `work` returns, computed in a copy of this process while this one goes on. The copy has no other threads and
    must print nothing. `process`: its number. `silent`: it neither answers nor computes; it may have copied a lock that
    another thread held.
    """

    silent = False

    def __init__(self, work: Callable[[], T]) -> None:
        self._pipe, end = os.pipe()
        self.process = os.fork()
        if not self.process:
            _answer(work, end)
        os.close(end)

    def result(self, patience_s: float = PATIENCE_S) -> T | None:
        """What it has returned, once it has; None where it failed or is silent: computed here, it says why."""
        spent = self._spent()
        while not self.silent and not select.select([self._pipe], [], [], patience_s)[0]:
            before, spent = spent, self._spent()
            self.silent = spent == before
        if self.silent:
            os.kill(self.process, signal.SIGKILL)
        pickled = self._ended()
        try:
            return pickle.loads(pickled)
        except (EOFError, pickle.UnpicklingError):  # it did not come to its end
            return None

    @property
    def ended(self) -> bool:
        """True once it has returned, or failed."""
        return bool(select.select([self._pipe], [], [], 0)[0])

    def drop(self) -> None:
        """End the copy."""
        os.kill(self.process, signal.SIGKILL)
        self._ended()

    def _spent(self) -> list[str]:
        """The time for which it has computed."""
        return Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[11:13]

    def _ended(self) -> bytes:
        with os.fdopen(self._pipe, "rb") as pipe:
            pickled = pipe.read()
        os.waitpid(self.process, 0)
        return pickled


def _answer(work: Callable[[], object], end: int) -> None:
    """The copy: writes what `work` returns, and ends."""
    try:
        pickled = pickle.dumps(work())
        with os.fdopen(end, "wb") as pipe:
            pipe.write(pickled)
    finally:
        os._exit(0)


def usable_cores() -> int:
    """The cores that this process may run on; one where a copy of it is not safe or not seen, as on macOS."""
    return len(os.sched_getaffinity(0)) if Path("/proc/self/stat").exists() else 1
