"""Control of the garbage collector, half of the time of building large graphs, and of what these leave in memory."""

from __future__ import annotations

import gc
import linecache
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

_MANY = 100  # collections of young objects, after which Python (3.11 to 3.13) looks at old ones
_enabled = ContextVar("_enabled", default=False)
FROZEN: list[str] = []
"""Who has frozen objects, once it is known: to count them is a walk over all."""


def is_enabled(original: Callable[[], bool]) -> bool:
    """In place of `gc.isenabled` where a user's code runs: whether the collector runs but for a pause."""
    return original() or _enabled.get()


@contextmanager
def collector_paused() -> Generator[None]:
    """Pause the garbage collector inside this context or decorated function; nested uses have no effect."""
    enabled = gc.isenabled()
    before = _enabled.set(enabled or _enabled.get())
    try:
        gc.disable()
        yield
    finally:
        _enabled.reset(before)
        if enabled:
            gc.enable()


@contextmanager
def collected_after(new_only: Callable[[], bool] | None = None) -> Generator[None]:
    """Pause the garbage collector inside this context, and run it at the end if there are so many new objects that it
    would go through all in a later call, which can take longer than its step; old ones not if, by then, `new_only`.
    """
    before = sys.getallocatedblocks()
    with collector_paused(), ExitStack() as frozen:
        if new_only is not None:
            frozen.enter_context(existing_objects_frozen(collects=False))
        yield
        if new_only is not None and not new_only():
            frozen.close()
        if _enabled.get() and sys.getallocatedblocks() - before > _MANY * gc.get_threshold()[0]:
            gc.collect()


@contextmanager
def existing_objects_frozen(collects: bool = True) -> Generator[None]:
    """Exclude existing objects from garbage collection inside this context or decorated function. If it `collects`, in
    a pause too: discarded graphs of a search are freed without a walk over the others. Nested uses have no effect, and
    none has one in a process that freezes objects itself.
    """
    with ExitStack() as at_end:
        if not FROZEN and gc.get_freeze_count():
            FROZEN.append("by the process")
        if not FROZEN:
            if _enabled.get() or gc.isenabled():
                gc.collect(1)  # later they are all old: young garbage would stay for long
            gc.freeze()
            FROZEN.append("here")
            at_end.callback(gc.unfreeze)
            at_end.callback(FROZEN.clear)
        if collects and _enabled.get() and not gc.isenabled():
            gc.enable()
            at_end.callback(gc.disable)
        yield


@contextmanager
def source_lines_dropped() -> Generator[None]:
    """Forget, at the end of this context or decorated function, the source files that were read in it: torch looks up
    the stacks of its fake modes, whose files have tens of thousands of lines. They are read again where needed.
    """
    cached = set(linecache.cache)
    try:
        yield
    finally:
        for name in [n for n, (_, *of) in linecache.cache.items() if n not in cached and of and of[0] is not None]:
            linecache.cache.pop(name, None)  # of a file, which has a time
