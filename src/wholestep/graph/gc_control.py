"""Control of the garbage collector, which takes up to half of the time while large graphs are built."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager

_MANY = 100  # collections of young objects, after which Python (3.11 to 3.13) looks at old ones


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
def collected_after() -> Generator[None]:
    """Run the garbage collector at the end of this context if there are so many new objects that it would go through
    all objects in some later call of a step, which can take longer than the step.
    """
    before = sys.getallocatedblocks()
    yield
    if gc.isenabled() and sys.getallocatedblocks() - before > _MANY * gc.get_threshold()[0]:
        gc.collect()


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
