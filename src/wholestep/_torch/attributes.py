"""Sets attributes of modules, classes and objects, replaces functions, and restores them.

A function or a flag that all threads share is replaced for this thread alone: others call the original. Each change is
noted before it is made (`undo`), so that an interruption at any point leaves a note of what is to be restored.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, cast

import torch

from .undo import undo, undone

Form = Callable[..., Any]
"""A function in the place of another: it is called with the original and the arguments."""

_INHERITED = object()
_SERVED = "wholestep.thread"


def _served() -> int | None:
    """The thread for which autograd runs a backward in this one: torch gives it what a thread has stashed."""
    return torch._C._get_obj_in_tls(_SERVED) if torch._C._is_key_in_tls(_SERVED) else None


def _this_thread() -> int:
    torch._C._stash_obj_in_tls(_SERVED, get_ident())
    return get_ident()


class _Flag:
    """A flag that is `here` in the thread that sets it, and `elsewhere` in others."""

    def __init__(self, here: bool, elsewhere: Any) -> None:
        self._here, self._elsewhere, self._thread = here, elsewhere, _this_thread()

    def __bool__(self) -> bool:
        return self._here if self._thread in (get_ident(), _served()) else bool(self._elsewhere)


@contextlib.contextmanager
def attributes_set(changes: Iterable[tuple[Any, str, Any]]) -> Generator[None]:
    """Set attributes, given as (owner, name, value), and restore them on exit; what was inherited is deleted again."""
    with undone():
        for owner, name, value in changes:
            undo(_restore, owner, name, cast(Mapping[str, Any], vars(owner)).get(name, _INHERITED))
            setattr(owner, name, value)
        yield


def _restore(owner: Any, name: str, before: Any) -> None:
    now = cast(Mapping[str, Any], vars(owner)).get(name, _INHERITED)
    if now is before:  # the class cannot be changed, or a trace has restored an object's attributes
        return
    if before is _INHERITED:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def flags_set(flags: Iterable[tuple[Any, str, bool]]) -> AbstractContextManager[None]:
    """Set flags, given as (owner, name, value), for this thread, and restore them on exit."""
    return attributes_set([(owner, name, _Flag(value, getattr(owner, name))) for owner, name, value in flags])


def forms_of(forms: Iterable[tuple[Any, str, Form]]) -> list[tuple[Any, str, Any]]:
    """Functions, given as (owner, name, form), with what replaces each: a function that runs `form(original, ...)`."""
    return [(owner, name, _bound(form, owner, name)) for owner, name, form in forms]


def forms_set(forms: Iterable[tuple[Any, str, Form]]) -> AbstractContextManager[None]:
    """Replace functions, given as (owner, name, form), by `form(original, ...)`, and restore them on exit."""
    return attributes_set(forms_of(forms))


def _bound(form: Form, owner: Any, name: str) -> Any:
    declared = vars(owner).get(name)
    if isinstance(declared, classmethod):

        def of_class(original: Callable[..., Any], kind: type, *args: Any, **kwargs: Any) -> Any:
            return form(functools.partial(original, kind), *args, **kwargs)

        return classmethod(here_only(of_class, cast(Any, declared).__func__))
    run = here_only(form, getattr(owner, name))
    return staticmethod(run) if isinstance(declared, staticmethod) else run


def here_only(form: Form, original: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A function that runs `form(original, ...)` in this thread, and `original` in others; without an `original`, it
    runs `form(...)`, and nothing in others.
    """
    thread, replaced = _this_thread(), cast(Callable[..., Any], original)

    def run(*args: Any, **kwargs: Any) -> Any:
        is_here = get_ident() == thread or _served() == thread
        return form(original, *args, **kwargs) if is_here else replaced(*args, **kwargs)

    def hook(*args: Any, **kwargs: Any) -> Any:
        return form(*args, **kwargs) if get_ident() == thread or _served() == thread else None

    return hook if original is None else run
