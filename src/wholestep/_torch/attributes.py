"""Sets attributes of modules, classes and objects, and restores them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any, cast

_INHERITED = object()


@contextlib.contextmanager
def attributes_set(changes: Iterable[tuple[Any, str, Any]]) -> Generator[None]:
    """Set attributes, given as (owner, name, value), and restore them on exit; what was inherited is deleted again."""
    undo: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in changes:
            before = cast(dict[str, Any], vars(owner)).get(name, _INHERITED)
            setattr(owner, name, value)
            undo.append((owner, name, before))
        yield
    finally:
        for owner, name, before in reversed(undo):
            if before is not _INHERITED:
                setattr(owner, name, before)
            elif name in vars(owner):  # a trace may have restored an object's attributes
                delattr(owner, name)
