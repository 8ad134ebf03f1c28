"""Control of the garbage collector, which takes up to half of the time while large graphs are built."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Generator[None]:
    """Pause the garbage collector inside this context or decorated function; nested uses have no effect."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def existing_objects_frozen() -> Generator[None]:
    """Exclude existing objects from garbage collection inside this context or decorated function: the collector frees
    the discarded graphs of a search without a walk over the others. Nested uses have no effect.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
