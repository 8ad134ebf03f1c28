"""JSON as values of Python types: the one decoder of plans, hardware, cached choices and manifests.

Nothing in a file is trusted: depth, numbers and text are bounded, every value is of the type that belongs there, and an
error has the path to the value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from .errors import PlanError, WholestepError, shown

MOST_DEPTH = 64
MOST_NUMBER = 1 << 63
_LONGEST = 500  # characters of a message: a name in a file may be anything

Readers = Mapping[Any, Callable[[Any, str], Any]]
"""By type: a function of a value and the path to it, for types that have a form of their own in JSON."""
_NO_READERS: Readers = {}

_NEEDED = {int: "a whole number", float: "a finite number", str: "a text", bool: "true or false", NoneType: "null"}


def write_text(path: str | Path, text: str) -> None:
    """Write a file; missing folders are created. Raises PlanError, which names the path."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # also a null in the name
        problem = f"{shown(str(path), 4096)} cannot be written: {getattr(error, 'strerror', None) or error}"
        raise PlanError(problem, "a path to write to", "correct it") from error


class MalformedError(Exception):
    """A text is no JSON, or a value is none that belongs at its place. `found` starts with the path to it."""

    def __init__(self, found: str, needed: str) -> None:
        super().__init__(found, needed)
        self.found = found if len(found) <= _LONGEST else f"{found[:_LONGEST]} ..."
        self.needed = needed

    def __str__(self) -> str:
        return f"{self.found}: needed {self.needed}"


def parse(text: str | bytes) -> Any:
    """The JSON value of a text. Raises MalformedError: it is none, or nests deeper than `MOST_DEPTH`."""
    try:
        value: Any = json.loads(text)
    except UnicodeDecodeError as error:
        raise MalformedError("the file is not text", "JSON in UTF-8") from error
    except RecursionError as error:
        raise too_deep() from error
    except ValueError as error:  # no JSON, or a number of more digits than Python reads
        raise MalformedError(f"the text is not JSON ({error})", "JSON") from error
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [inner for outer in level if isinstance(outer, (dict, list)) for inner in _inside(outer)]
        if not level:
            return value
    raise too_deep()


def too_deep() -> MalformedError:
    """The error of a text with more lists in lists than any file that wholestep writes."""
    return MalformedError("lists or objects stand too deep inside each other", f"at most {MOST_DEPTH} levels")


def _inside(value: Any) -> Any:
    return cast(dict[str, Any], value).values() if isinstance(value, dict) else cast(list[Any], value)


def read(kind: Any, value: Any, at: str = "", readers: Readers = _NO_READERS) -> Any:
    """A JSON value as the type `kind`: an object as a dataclass or a mapping; a list as a tuple, or as a dataclass
    whose fields it holds in order. Raises MalformedError.
    """
    if kind is Any:
        return value
    if kind in readers:
        return readers[kind](value, at)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return read(_alternative(args, value, at, readers), value, at, readers)
    if origin is Literal:
        if not isinstance(value, str) or value not in args:
            raise wrong(at, value, f"one of {', '.join(map(repr, args))}")
        return value
    if origin is Sequence:
        return read(tuple[args[0], ...], value, at, readers)
    if origin is tuple:
        inner = [args[0]] * len(as_list(value, at)) if args[-1] is ... else list(args)
        if len(as_list(value, at)) != len(inner):
            raise wrong(at, value, f"a list of {len(inner)}")
        return tuple(read(each, v, f"{at}[{i}]", readers) for i, (each, v) in enumerate(zip(inner, value, strict=True)))
    if origin is Mapping:
        return dict(_entries(args, value, at, readers))
    if is_dataclass(kind):
        return _instance(cast(type[Any], kind), value, at, readers)
    if issubclass(kind, Enum):
        return _member(kind, value, at)
    return _plain(kind, value, at)


def _entries(kinds: tuple[Any, ...], value: Any, at: str, readers: Readers) -> Iterator[tuple[Any, Any]]:
    """The entries of an object; of keys that are no texts, pairs in a list."""
    if kinds[0] is str or value == {}:
        for key, entry in as_object(value, at).items():
            yield _text(key, at), read(kinds[1], entry, f"{at}[{shown(key)}]", readers)
        return
    for number, pair in enumerate(as_list(value, at)):
        yield read(tuple[kinds], pair, f"{at}[{number}]", readers)


def as_list(value: Any, at: str) -> list[Any]:
    """`value`, which has to be a list."""
    if not isinstance(value, (list, tuple)):
        raise wrong(at, value, "a list")
    return cast(list[Any], value)


def as_object(value: Any, at: str) -> Mapping[str, Any]:
    """`value`, which has to be an object."""
    if not isinstance(value, Mapping):
        raise wrong(at, value, "an object")
    return cast(Mapping[str, Any], value)


def wrong(at: str, value: object, needed: str) -> MalformedError:
    """The error of a value that does not belong at the path `at`."""
    return MalformedError(f"{at or 'the file'} is {shown(value)}", needed)


def _plain(kind: type, value: Any, at: str) -> Any:
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise wrong(at, value, _NEEDED[kind])
    if isinstance(value, str):
        return _text(value, at)
    if isinstance(value, (int, float)) and not (
        isfinite(value) if isinstance(value, float) else -MOST_NUMBER <= value < MOST_NUMBER
    ):
        raise wrong(at, value, "a number of at most 64 bits" if isinstance(value, int) else _NEEDED[float])
    return float(value) if kind is float else value


def _text(value: str, at: str) -> str:
    """`value`, which can be written again: JSON can hold half of a character."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise wrong(at, value, "text in UTF-8") from error
    return value


def _member(kind: type[Enum], value: Any, at: str) -> Enum:
    by_value = {member.value: member for member in kind}
    if not isinstance(value, str) or value not in by_value:
        raise wrong(at, value, f"one of {', '.join(map(repr, by_value))}")
    return by_value[value]


def _instance(kind: type[Any], value: Any, at: str, readers: Readers) -> Any:
    hints, by_name = hints_of(kind), {f.name: f for f in fields(kind)}
    if isinstance(value, (list, tuple)):
        entries = as_list(value, at)
        if len(entries) != len(by_name):
            raise wrong(at, entries, f"a list of {len(by_name)}: {', '.join(by_name)}")
        values: Mapping[str, Any] = dict(zip(by_name, entries, strict=True))
    else:
        values = as_object(value, at)
    prefix = f"{at}." if at else ""
    for name in values:
        if name not in by_name:
            raise MalformedError(f"unknown field {prefix}{name}", f"one of {', '.join(by_name)}")
    for name, field in by_name.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise MalformedError(f"field {prefix}{name} is missing", describe(hints[name]))
    arguments = {name: read(hints[name], v, f"{prefix}{name}", readers) for name, v in values.items()}
    try:
        return kind(**arguments)
    except WholestepError as error:
        raise MalformedError(f"{prefix}{error.found}", error.needed) from error


def _alternative(kinds: tuple[Any, ...], value: Any, at: str, readers: Readers) -> Any:
    """The type of a union that `value` is meant as: that of its form, and of all required fields among dataclasses."""
    fitting = [kind for kind in kinds if _has_form(kind, value, readers)]
    if not fitting:
        raise wrong(at, value, " or ".join(describe(kind) for kind in kinds))
    names = set(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else set[str]()
    for kind in filter(is_dataclass, fitting):
        if names >= {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}:
            return kind
    return fitting[0]


def _has_form(kind: Any, value: Any, readers: Readers) -> bool:
    if kind is NoneType or value is None:
        return kind is NoneType and value is None
    if kind in readers:
        return True
    origin = get_origin(kind)
    if origin is Literal:
        return value in get_args(kind) if isinstance(value, str) else False
    if origin in (tuple, Sequence):
        return isinstance(value, (list, tuple))
    if origin is Mapping or is_dataclass(kind):  # pairs in a list stand in no union
        return isinstance(value, Mapping)
    return isinstance(value, (int, float)) if kind is float else isinstance(kind, type) and isinstance(value, kind)


def describe(kind: Any) -> str:
    """What a JSON value of a type is, in words."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(describe(alternative) for alternative in get_args(kind))
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    return _NEEDED.get(kind, "a list" if get_origin(kind) in (tuple, Sequence) else "an object")


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """The types of a class's fields."""
    return get_type_hints(kind)
