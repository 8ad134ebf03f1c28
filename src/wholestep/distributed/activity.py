"""What this process does now: plain fields that its main thread writes, and that a thread tells the other ranks.

A call of a step writes a few of them and reads one: it sends nothing and takes no clock.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist

from ..errors import WholestepError


class NamedStep(Protocol):
    """A compiled step: its name, its number among steps of this name, and how often it was called."""

    __name__: str
    number: int
    calls: int


@dataclass
class Activity:
    """`inside` a call of `step`, which it refers to weakly, or after it; busy with something that may take
    `allowance_s` longer than a step; at a place where this rank waits for the others, who wait at the same `point`, and
    compares a program that has `news`. For the call of number `meets` it has a program with collectives. `unfinished`
    counts calls that raised. `ran` counts those of programs with collectives, of all steps; `trail` says of the latest
    ones divisible by 1, 2, 4, ... what had run by then. `failure` is set once it is known that a rank failed. `explain`
    finds out why a collective failed, and `acknowledge` hears that the main thread knows of it. `compiled` counts steps
    by their names.
    """

    step: Callable[[], NamedStep | None] = lambda: None
    inside: bool = False
    busy: str = ""
    allowance_s: float = 0.0
    waits_at: str = ""
    point: str = ""
    news: str = ""
    meets: int = 0
    unfinished: int = 0
    ran: int = 0
    trail: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    error: str = ""
    failure: WholestepError | None = None
    explain: Callable[[BaseException], None] | None = field(default=None, repr=False)
    acknowledge: Callable[[], None] | None = field(default=None, repr=False)
    compiled: Counter[str] = field(default_factory=Counter[str], repr=False)
    _chain: int = 0

    def note_program(self, key: int) -> None:
        """A program with collectives ran, which has the same key on all ranks."""
        self._chain = hash((self._chain, key))
        self.ran += 1
        for level in range((self.ran & -self.ran).bit_length()):
            self.trail[level] = self.ran, self._chain

    def raise_failure(self) -> None:
        """Raise RankFailedError, if a rank failed."""
        if self.failure is not None:
            if self.acknowledge is not None and _on_main_thread():
                self.acknowledge()
            raise self.failure from None

    def note_error(self, error: BaseException) -> None:
        """An error left a call or an exchange. Raises RankFailedError: another rank's failure is the reason."""
        self.inside = False
        self.unfinished += 1
        if is_broken_connection(error):
            if self.explain is not None:
                self.explain(error)
                self.raise_failure()
        else:
            self.error = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

    def doing(self, what: str, allowance_s: float) -> AbstractContextManager[None]:
        """The main thread is busy inside: other ranks wait so much longer for this one."""
        return self._said(busy=what, allowance_s=allowance_s)

    @contextmanager
    def waiting(self, what: str, point: str = "", news: str = "") -> Generator[None]:
        """The main thread waits inside for other ranks, which come to the same `point`. Raises RankFailedError: one of
        them failed.
        """
        with self._said(waits_at=what, point=point, news=news):
            try:
                yield
            except RuntimeError as error:
                if _on_main_thread():
                    self.note_error(error)
                raise

    @contextmanager
    def _said(self, **fields: str | float) -> Generator[None]:
        """Fields have other values inside. Threads other than the main thread tell nothing."""
        now = vars(self) if _on_main_thread() else {}
        outer = {name: now[name] for name in fields if now}
        now.update(fields)
        try:
            yield
        finally:
            now.update(outer)


ACTIVITY = Activity()
"""Of this process, which has one main thread and is one rank of one job."""


def _on_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def is_broken_connection(error: BaseException | None) -> bool:
    """True for what a collective or the store raises when another process is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
