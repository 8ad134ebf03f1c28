"""Sets attributes of modules, classes and objects, replaces functions, and restores them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from typing import Any, cast

Form = Callable[..., Any]
"""A function in the place of another: it is called with the original and the arguments."""

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


def forms_of(forms: Iterable[tuple[Any, str, Form]]) -> list[tuple[Any, str, Any]]:
    """Functions, given as (owner, name, form), with what replaces each: a function that runs `form(original, ...)`."""
    return [(owner, name, _bound(form, owner, name)) for owner, name, form in forms]


def forms_set(forms: Iterable[tuple[Any, str, Form]]) -> AbstractContextManager[None]:
    """Replace functions, given as (owner, name, form), by `form(original, ...)`, and restore them on exit."""
    return attributes_set(forms_of(forms))


def _bound(form: Form, owner: Any, name: str) -> Any:
    original: Callable[..., Any] = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        return form(original, *args, **kwargs)

    return staticmethod(run) if isinstance(vars(owner).get(name), staticmethod) else run
