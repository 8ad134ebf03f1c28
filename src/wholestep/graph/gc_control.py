"""The garbage collector, kept off graphs: it walks all their nodes again and again, up to half of the time."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Generator[None]:
    """No cyclic garbage is collected inside; also a decorator. Nested uses leave it to the outermost."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def collector_ahead() -> Generator[None]:
    """What exists when this begins is not looked at by the collector inside: it frees what is made and dropped there,
    graphs that were tried, without a walk over those that stay. Also a decorator; nested uses are the outermost's.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
