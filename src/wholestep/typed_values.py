"""Types of what a user gives: checked once, where it is given, and not by an error from somewhere inside."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from operator import index
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from .errors import PlanError, WholestepError, shown
from .typed_json import MOST_NUMBER, hints_of

_MODULE = re.compile(r"\b(?:\w+\.)+(?=\w)")


def check_fields(made: object, besides: Collection[str] = (), error: type[WholestepError] = PlanError) -> None:
    """Raise `error` for the first field of a dataclass whose value is not of the declared type; the class itself
    checks `besides`. Numbers of other libraries become Python's.
    """
    hints = hints_of(type(made))
    for name in (one.name for one in fields(cast(Any, made)) if one.name not in besides):
        value, kind = getattr(made, name), hints[name]
        if not is_a(value, kind):
            raise _refused(type(made).__name__, name, value, kind, error)
        if (plain := as_plain(value, kind)) is not value:
            object.__setattr__(made, name, plain)


def check_arguments(call: str, error: type[WholestepError] = PlanError, **given: tuple[object, Any]) -> None:
    """Raise `error` for the first argument of `call` that is not of its type: `name=(value, type)`. Numbers may be
    those of other libraries: `as_plain` makes them Python's.
    """
    for name, (value, kind) in given.items():
        if not is_a(value, kind):
            raise _refused(call, name, value, kind, error)


def is_a(value: object, kind: Any) -> bool:
    """True if a value is of a type as annotations write it, entries of collections too. Numbers may be those of numpy.
    True and False are no numbers, a text is no sequence, a whole number has 64 bits. A protocol takes any value: its
    users say better what is missing.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(is_a(value, one) for one in args)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in args)
    if origin is tuple:
        return isinstance(value, tuple) and _are(cast(tuple[object, ...], value), args)
    if origin in (Sequence, Collection, Iterable):
        if isinstance(value, (str, bytes)) or not isinstance(value, origin):
            return False
        return origin is Iterable or _are(_entries(cast(Collection[object], value)), (args[0], ...))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            return False
        return all(is_a(k, args[0]) and is_a(v, args[1]) for k, v in cast(Mapping[object, object], value).items())
    if Callable in (origin, kind):
        return callable(value)
    if kind is Iterable:
        return isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    if kind is None or kind is NoneType:
        return value is None
    if kind in (int, float):
        number = plain_number(value)
        if isinstance(number, int):
            return not isinstance(number, bool) and -MOST_NUMBER <= number < MOST_NUMBER
        return kind is float and isinstance(number, float)
    if kind is Any or isinstance(kind, TypeVar) or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, origin or kind)


def plain_number(value: object) -> object:
    """Python's int or float for a number of another library, such as `numpy.int64(3)`; other values as they are."""
    if type(value) in (int, float, bool) or not isinstance(value, Real):
        return value
    if isinstance(value, Integral):
        return value if isinstance(value, int) else index(value)
    return float(value)


def as_plain(value: Any, kind: Any) -> Any:
    """A value of a type, with `plain_number` for what the type says is a number, also in tuples."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return next((as_plain(value, one) for one in args if is_a(value, one)), value)
    if origin is tuple:
        entries = cast(tuple[Any, ...], value)
        kinds = args[:1] * len(entries) if args[1:] == (...,) else args
        made = tuple(as_plain(one, kind) for one, kind in zip(entries, kinds, strict=True))
        return value if all(a is b for a, b in zip(entries, made, strict=True)) else made
    return plain_number(value) if kind in (int, float) else value


def _entries(values: Collection[object]) -> tuple[object, ...]:
    try:
        return tuple(values)
    except TypeError:  # a tensor of no dims says that it is a collection
        return (values,)


def _are(values: tuple[object, ...], kinds: tuple[Any, ...]) -> bool:
    if kinds[-1:] == (...,):
        return all(is_a(one, kinds[0]) for one in values)
    return len(values) == len(kinds) and all(is_a(one, kind) for one, kind in zip(values, kinds, strict=True))


def _refused(call: str, name: str, value: object, kind: Any, error: type[WholestepError]) -> WholestepError:
    return error(f"{call}({name}={shown(value)})", f"{name} of type {_text(kind)}", f"correct {name}=")


def _text(kind: Any) -> str:
    """`Mesh | str | None`: a type as annotations write it."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " | ".join(map(_text, args))
    if Callable in (origin, kind):
        return "function"
    if isinstance(kind, type) and not args:
        return kind.__name__.replace("NoneType", "None")
    return _MODULE.sub("", str(kind))
