"""The garbage collector, paused while graphs grow: it walks all their nodes again and again, a third of the time."""

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
