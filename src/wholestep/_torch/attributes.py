"""Sets attributes of modules, classes and objects, replaces functions, and restores them.

A function or a flag that all threads share is replaced for this thread alone: others call the original. Each change is
noted before it is made (`undo`), so that an interruption at any point leaves a note of what is to be restored.

A function of Python is replaced by its code, so that it does not matter by which name or bound method it is called: one
that was taken before the replacement calls it too. A function in C is replaced at its place, and at its `aliases`.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from operator import is_not
from threading import get_ident
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch

from .op_schemas import identity
from .undo import REPLACES, undo, undone

Form = Callable[..., Any]
"""A function in the place of another: it is called with the original and the arguments."""

_INHERITED = object()
_REPLACED = BuiltinFunctionType, MethodType, FunctionType, type
_SERVED = "wholestep.thread"
_CALLED = "what is called"
_FORGETS = "_wholestep_forgets"


def _served() -> int | None:
    """The thread for which autograd runs a backward in this one: torch gives it what a thread has stashed."""
    return torch._C._get_obj_in_tls(_SERVED) if torch._C._is_key_in_tls(_SERVED) else None


def _this_thread() -> int:
    if (thread := get_ident()) == _served():
        return thread
    count = sys.getrefcount(thread)
    torch._C._stash_obj_in_tls(_SERVED, thread)
    if sys.getrefcount(thread) == count:  # torch 2.11 drops a reference later that it did not take
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thread))
    return thread


class _Flag:
    """A flag that is `here` in the thread that sets it, and `elsewhere` in others."""

    def __init__(self, here: bool, elsewhere: Any) -> None:
        self._here, self._elsewhere, self._thread = here, elsewhere, _this_thread()

    def __bool__(self) -> bool:
        return self._here if self._thread in (get_ident(), _served()) else bool(self._elsewhere)

    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    __ror__, __rand__, __hash__ = __or__, __and__, object.__hash__


@contextlib.contextmanager
def attributes_set(changes: Iterable[tuple[Any, str, Any]]) -> Generator[None]:
    """Set attributes, given as (owner, name, value), and restore them on exit; what was inherited is deleted again."""
    with undone():
        for owner, name, value in changes:
            undo(_restore, owner, name, _own(owner, name), value)
            setattr(owner, name, value)
        yield


def _restore(owner: Any, name: str, before: Any, replacement: Any) -> None:
    """Let a replacement be the original from now on: what was imported meanwhile may hold it for ever."""
    for function in replacement.co_consts if isinstance(replacement, CodeType) else (replacement,):
        if isinstance(function, FunctionType) and (forget := function.__dict__.get(_FORGETS)):
            forget()
    if _own(owner, name) is before:  # the class cannot be changed, or a trace has restored an object's attributes
        return
    delattr(owner, name) if before is _INHERITED else setattr(owner, name, before)


def _own(owner: Any, name: str) -> Any:
    return getattr(owner, name) if isinstance(owner, FunctionType) else owner.__dict__.get(name, _INHERITED)


def flags_set(flags: Iterable[tuple[Any, str, bool]]) -> AbstractContextManager[None]:
    """Set flags, given as (owner, name, value), for this thread, and restore them on exit."""
    return attributes_set([(owner, name, _Flag(value, getattr(owner, name))) for owner, name, value in flags])


def forms_of(forms: Iterable[tuple[Any, str, Form]]) -> list[tuple[Any, str, Any]]:
    """Attributes to set, so that functions, given as (owner, name, form), run `form(original, ...)`."""
    return [_replacement(owner, name, form) for owner, name, form in forms]


def forms_set(forms: Iterable[tuple[Any, str, Form]]) -> AbstractContextManager[None]:
    """Replace functions, given as (owner, name, form), by `form(original, ...)`; restore them on exit."""
    return attributes_set(forms_of(forms))


def aliases(changes: Iterable[tuple[Any, str, Any]], modules: Iterable[ModuleType]) -> list[tuple[Any, str, Any]]:
    """The same changes where globals of `modules` are what a module has before them, made yet or not."""
    new_of = replaced_by(changes)
    many = {old for old, _ in new_of.values() if type(old) in (FunctionType, type)}  # modules hold thousands of these
    tables: Iterable[tuple[ModuleType, list[object]]] = ((m, [*vars(m).values()]) for m in modules)
    if all(type(old) in _REPLACED for old, _ in new_of.values()):
        tables = (
            (m, [v for v in values if (kind := type(v)) is BuiltinFunctionType or kind is MethodType or
                 ((kind is FunctionType or kind is type) and v in many)])
            for m, values in tables
        )  # fmt: skip
    holding = [m for m, values in tables if not new_of.keys().isdisjoint(map(identity, values))]
    return [
        (m, name, new_of[key][1]) for m in holding for name, old in vars(m).items() if (key := identity(old)) in new_of
    ]


def replaced_by(changes: Iterable[tuple[Any, str, Any]]) -> dict[int, tuple[Any, Any]]:
    """What is in modules before `changes`, and before earlier ones, by its `identity`, and what these put there."""
    new_of = dict[int, tuple[Any, Any]]()
    for owner, name, new in changes:
        old = getattr(owner, name, None) if isinstance(owner, ModuleType) else None
        while old is not None:
            new_of[identity(old)], old = (old, new), getattr(old, REPLACES, None)
    return new_of


def with_replaced(replaced: Mapping[int, tuple[Any, Any]], value: Any) -> Any:
    """Return what is in the place of a value, of items of a tuple, or of what a partial calls and gives."""
    if type(value) is tuple:
        items_before = cast(tuple[Any, ...], value)
        items = [with_replaced(replaced, v) for v in items_before]
        return tuple(items) if any(map(is_not, items, items_before)) else items_before
    if type(value) is functools.partial:
        bound = cast("functools.partial[Any]", value)
        before = bound.func, bound.args, *bound.keywords.values()
        fn, args, *named = after = with_replaced(replaced, before)
        keywords = dict(zip(bound.keywords, named, strict=True))
        return bound if after is before else functools.partial(fn, *args, **keywords)
    return replaced.get(identity(value), (value, value))[1]


def _replacement(owner: Any, name: str, form: Form) -> tuple[Any, str, Any]:
    declared = owner.__dict__.get(name)
    of_class = isinstance(declared, classmethod)
    function = cast(Any, declared).__func__ if of_class or isinstance(declared, staticmethod) else declared

    def run_of_class(original: Callable[..., Any], kind: type, *args: Any, **kwargs: Any) -> Any:
        return form(functools.partial(original, kind), *args, **kwargs)

    if isinstance(function, FunctionType) and not hasattr(function, REPLACES):
        return code_form(function, run_of_class if of_class else form)
    if of_class:
        return owner, name, classmethod(here_only(run_of_class, function))
    return owner, name, here_only(form, getattr(owner, name))


def code_form(function: FunctionType, form: Form) -> tuple[Any, str, Any]:
    """The attribute to set, so that a function of Python runs `form(original, ...)` by whatever name it is called."""
    return function, "__code__", _code_that_calls(here_only(form, _with_its_code(function)), function)


def _with_its_code(function: FunctionType) -> FunctionType:
    """A copy that keeps the code that `function` has now."""
    code, closure = function.__code__, function.__closure__
    copied = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = cast(Any, function.__kwdefaults__)
    copied.__dict__.update(function.__dict__)
    copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__
    return copied


def _code_that_calls(run: Callable[..., Any], function: FunctionType) -> CodeType:
    """Code for `function` that calls `run` with all arguments."""
    code = _calling_code(len(function.__closure__ or ()))
    return code.replace(co_consts=tuple(run if value == _CALLED else value for value in code.co_consts))


@functools.cache
def _calling_code(count: int) -> CodeType:
    """Code with this number of closure variables, which Python asks of code for a function that has them."""
    names = ", ".join(f"closed_{i}" for i in range(count))
    source = f"""def make({names}):
        def run(*args, **kwargs):
            if 0:
                {names or "pass"}
            called = {_CALLED!r}
            return called(*args, **kwargs)
        return run"""
    scope: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), scope)
    code: CodeType = scope["make"](*range(count)).__code__
    return code.replace(co_firstlineno=_code_that_calls.__code__.co_firstlineno)


def here_only(form: Form, original: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A function that runs `form(original, ...)` in this thread, and `original` in others; without an `original`, it
    runs `form(...)`, and nothing in others.
    """
    thread, replaced, forms = _this_thread(), cast(Callable[..., Any], original), [form]

    def run(*args: Any, **kwargs: Any) -> Any:
        is_here = get_ident() == thread or _served() == thread
        return forms[0](original, *args, **kwargs) if is_here and forms else replaced(*args, **kwargs)

    def hook(*args: Any, **kwargs: Any) -> Any:
        return form(*args, **kwargs) if get_ident() == thread or _served() == thread else None

    if original is None:
        return hook
    setattr(run, REPLACES, original)
    setattr(run, _FORGETS, forms.clear)
    return run
