"""The door of public arguments: each is checked against its annotation where it is given."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, getattr_static, getmodule, isclass, isfunction, ismodule, signature
from itertools import repeat
from numbers import Integral, Real
from operator import index
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from .errors import (
    BackendError,
    CaptureError,
    CheckpointError,
    LayoutError,
    MeshError,
    PlanError,
    RuleError,
    WholestepError,
    first_line,
    shown,
)
from .typed_json import MOST_NUMBER, hints_of

_MODULE = re.compile(r"\b(?:\w+\.)+(?=\w)")
_ERRORS: dict[str, type[WholestepError]] = {
    "backend": BackendError, "checkpoint": CheckpointError, "compile": CaptureError, "layout": LayoutError,
    "mesh": MeshError, "rules": RuleError,
}  # fmt: skip
"""By room; of all others PlanError."""
_PYTHON = frozenset({bool, float, int, str, NoneType})  # values of these types are what they are


def check_arguments_of(public: dict[str, Any], names: Iterable[str]) -> None:
    """Put the door before the functions, constructors and methods that `public` has under `names`: a value that is not
    of its annotation raises an error that names it.
    """
    for name in names:
        exported = public[name]
        if ismodule(exported):
            check_arguments_of(vars(exported), exported.__all__)
        elif isfunction(exported):
            public[name] = door = _checked(exported, name)
            setattr(getmodule(exported), exported.__name__, door)
        elif isclass(exported) and not issubclass(exported, Exception) and not getattr(exported, "_is_protocol", False):
            _check_class(exported)


def _check_class(kind: type[Any]) -> None:
    """Arguments of methods of layouts and meshes are looked at when these fail: all stages compute with them."""
    pure = is_dataclass(kind) and kind.__dataclass_params__.frozen
    for name in dir(kind):
        method = getattr_static(kind, name)
        function = getattr(method, "__func__", method)
        if not isfunction(function) or not function.__module__.startswith("wholestep"):
            continue
        if name == "__init__":
            setattr(kind, name, _checked(function, kind.__name__))
        elif not name.startswith("_"):
            computes = pure and function is method
            late = computes and kind.__module__ in ("wholestep.layout", "wholestep.mesh")
            door = _checked(function, f"{kind.__name__}.{name}", computes, late)
            setattr(kind, name, door if function is method else type(method)(door))


def _checked(function: Callable[..., Any], call: str, pure: bool = False, late: bool = False) -> Callable[..., Any]:
    """`function` behind the door. `pure`: it only computes with its arguments, so that an error for want of a key, say,
    is about these. `late`: arguments are looked at after an error.
    """
    error = _ERRORS.get(function.__module__.split(".")[1], PlanError)

    @cache
    def declared() -> tuple[list[tuple[str, Any]], tuple[str, Any], dict[str, Any]]:
        kinds, parameters = get_type_hints(function), signature(function).parameters.values()
        named = {p.name: kinds.get(p.name, Any) for p in parameters if p.kind is not Parameter.VAR_KEYWORD}
        typed = [(p.name, named[p.name]) for p in parameters if p.kind <= Parameter.POSITIONAL_OR_KEYWORD]
        rest = next((p.name for p in parameters if p.kind is Parameter.VAR_POSITIONAL), "")
        return typed, (rest, kinds.get(rest, Any)), named

    def checked(args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        typed, rest, kinds = declared()
        places = typed if len(args) <= len(typed) else [*typed, *repeat(rest, len(args) - len(typed))]
        values = [_argument(call, *place, value, error) for place, value in zip(places, args, strict=False)]
        return values, {k: _argument(call, k, kinds.get(k, Any), value, error) for k, value in named.items()}

    @wraps(function)
    def door(*args: Any, **named: Any) -> Any:
        values, keywords = (args, named) if late else checked(args, named)
        try:
            return function(*values, **keywords)
        except WholestepError:
            raise
        except Exception as wrong:
            _check_call(function, call, values, keywords, error)
            if pure:
                checked(values, keywords)
            if not pure or not isinstance(wrong, (ArithmeticError, AttributeError, LookupError, ValueError)):
                raise  # what it called, a protocol's method, say, is at fault
            written = ", ".join([*map(shown, args[1:]), *(f"{name}={shown(value)}" for name, value in named.items())])
            problem = f"{call}({written}): {type(wrong).__name__}: {first_line(wrong)}"
            raise error(problem, "arguments that fit each other, and the value", "correct them") from wrong

    return door


def _check_call(
    function: Callable[..., Any], call: str, args: Sequence[Any], named: Mapping[str, Any], error: type[WholestepError]
) -> None:
    """Raise `error` if an argument is missing, or has an unknown name."""
    names = [name for name in signature(function).parameters if name not in ("self", "cls")]
    try:
        signature(function).bind(*args, **named)
    except TypeError as misfit:
        near = [match for name in named if name not in names for match in get_close_matches(name, names, 1)]
        next_step = f"write {near[0]}=" if near else "correct the call"
        problem = f"{call}({', '.join(name + '=...' for name in named)}): {first_line(misfit)}"
        raise error(problem, f"{call}({', '.join(names)})", next_step) from None


def _argument(call: str, name: str, kind: Any, value: Any, error: type[WholestepError]) -> Any:
    """A value of its type, as Python's number where it is one of another library."""
    if not _test_of(kind)(value):
        raise _refused(call, name, value, kind, error)
    return value if type(value) in _PYTHON or not _has_numbers(kind) else as_plain(value, kind)


def check_fields(instance: object, besides: Collection[str] = (), error: type[WholestepError] = PlanError) -> None:
    """Raise `error` for the first field of a dataclass whose value is not of the declared type; the class itself
    checks `besides`. Numbers of other libraries become Python's.
    """
    for name, kind in _kinds_of_fields(type(instance)).items():
        value = getattr(instance, name)
        if name not in besides and (plain := _argument(type(instance).__name__, name, kind, value, error)) is not value:
            object.__setattr__(instance, name, plain)


@cache
def _kinds_of_fields(dataclass: type[Any]) -> dict[str, Any]:
    return {field.name: hints_of(dataclass)[field.name] for field in fields(dataclass)}


def is_a(value: object, kind: Any) -> bool:
    """True if a value is of a type as annotations write it, entries of collections too. Numbers may be those of numpy.
    True, False and nan are no numbers, a text is no sequence, a whole number has 64 bits. A protocol takes any value:
    its users say better what is missing.
    """
    return _test_of(kind)(value)


@cache
def _test_of(kind: Any) -> Callable[[Any], bool]:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        several = [_test_of(alternative) for alternative in args]
        return lambda value: any(test(value) for test in several)
    if origin is Literal:
        return lambda value: any(type(value) is type(literal) and value == literal for literal in args)
    if origin is tuple:
        return lambda value: isinstance(value, tuple) and _are(cast(tuple[object, ...], value), args)
    if origin in (Sequence, Collection):
        return lambda value: _is_plural(value, origin) and _are(_entries(value), (args[0], ...))
    if Iterable in (origin, kind):
        return lambda value: _is_plural(value, Iterable)
    if origin in (Mapping, dict):
        return lambda value: isinstance(value, origin) and _are_entries(cast(Mapping[object, object], value), args)
    if Callable in (origin, kind):
        return callable
    if kind is None or kind is NoneType:
        return lambda value: value is None
    if kind is Path:  # or the one of a store, which is of no class of Python's own
        return lambda value: isinstance(value, Path) or type(value).__module__.startswith("upath.")
    if kind in (int, float):
        return lambda value: _is_number(plain_number(value), kind)
    if kind is Any or isinstance(kind, TypeVar) or getattr(kind, "_is_protocol", False):
        return lambda value: True
    return lambda value: isinstance(value, origin or kind)


def _are_entries(values: Mapping[object, object], kinds: tuple[Any, ...]) -> bool:
    return all(map(_test_of(kinds[0]), values)) and all(map(_test_of(kinds[1]), values.values()))


def _is_number(number: object, kind: type) -> bool:
    if isinstance(number, int):
        return not isinstance(number, bool) and -MOST_NUMBER <= number < MOST_NUMBER
    return kind is float and isinstance(number, float) and number == number


def _is_plural(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, (str, bytes))


def plain_number(value: object) -> object:
    """Python's int or float for a number of another library, such as `numpy.int64(3)`; other values as they are."""
    if type(value) in _PYTHON or isinstance(value, int) or not isinstance(value, Real):
        return value
    return index(value) if isinstance(value, Integral) else float(value)


@cache
def _has_numbers(kind: Any) -> bool:
    """True if `as_plain` may change a value of the type."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType, tuple) else (kind,)
    return int in kinds or float in kinds or (kind not in kinds and any(map(_has_numbers, kinds)))


def as_plain(value: Any, kind: Any) -> Any:
    """A value of a type, with `plain_number` for what the type says is a number, also in tuples."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return next((as_plain(value, alternative) for alternative in args if is_a(value, alternative)), value)
    if origin is tuple:
        entries = cast(tuple[Any, ...], value)
        kinds = args[:1] * len(entries) if args[1:] == (...,) else args
        plain = tuple(as_plain(entry, kind) for entry, kind in zip(entries, kinds, strict=True))
        return value if all(a is b for a, b in zip(entries, plain, strict=True)) else plain
    return plain_number(value) if kind in (int, float) else value


def _entries(values: Collection[object]) -> tuple[object, ...]:
    try:
        return tuple(values)
    except TypeError:  # a tensor of no dims says that it is a collection
        return (values,)


def _are(values: tuple[object, ...], kinds: tuple[Any, ...]) -> bool:
    if kinds[-1:] == (...,):
        return all(map(_test_of(kinds[0]), values))
    return len(values) == len(kinds) and all(map(is_a, values, kinds))


def _refused(call: str, name: str, value: object, kind: Any, error: type[WholestepError]) -> WholestepError:
    next_step = f"give {value.__name__}(...)" if isclass(value) else f"correct {name}="
    return error(f"{call}({name}={shown(value)})", f"{name} of type {_text(kind)}", next_step)


def _text(kind: Any) -> str:
    """`Mesh | str | None`: a type as annotations write it."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " | ".join(map(_text, args))
    if Callable in (origin, kind):
        return "function"
    if origin is Literal:
        return " | ".join(map(repr, args))
    if isinstance(kind, type) and not args:
        return kind.__name__.replace("NoneType", "None")
    return _MODULE.sub("", str(kind))
