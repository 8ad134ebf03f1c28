"""What is to be restored after a capture, also where it is interrupted in the middle of restoring.

A change is noted before it is made. `undone` takes the notes back at its end, the latest first, and drops each after it
ran. What an interruption leaves is taken back by the `undone` around it, so that one Ctrl-C at any point leaves nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any


class _Notes(threading.local):
    def __init__(self) -> None:
        self.taken = list[tuple[Callable[..., object], tuple[Any, ...]]]()


_notes, TURN = _Notes(), threading.RLock()


def undo(fn: Callable[..., object], *args: Any) -> None:
    """Call `fn(*args)`, which may run twice, at the end of the innermost `undone`."""
    _notes.taken.append((fn, args))


class undone:  # used like a function
    """Take back, at the end of this context, what was noted in it."""

    def __enter__(self) -> None:
        undo(self._begin)

    def _begin(self) -> None:
        """The note that begins this context."""

    def __exit__(self, *_: object) -> None:
        taken, begin = _notes.taken, (self._begin, ())
        if begin in taken:  # else the context around this one has taken it back
            while taken[-1] != begin:
                fn, args = taken[-1]
                fn(*args)
                taken.pop()
            taken.pop()


@contextmanager
def one_thread() -> Generator[None]:
    """Let one thread at a time replace, inside this context, what all threads share."""
    with TURN, undone(), undone():
        yield
