"""What stands, while a step is traced, for an argument whose values differ between calls and that is no number.

A trace in which nobody asks it for anything proves that the step does not read the argument: its value is not compared
from then on. Who asks is refused, and the step is captured for the value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from .locations import Location


class Unread:
    """In place of the value of the class `kind` at a `place` of the arguments, for an object of which it passes."""

    __slots__ = ("_kind", "_place", "_refuse")

    def __init__(self, kind: type, place: Location, refuse: Callable[[str], NoReturn]) -> None:
        for name, value in (("_kind", kind), ("_place", place), ("_refuse", refuse)):
            object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        kind: type = object.__getattribute__(self, "_kind")
        if name == "__class__":
            return kind
        if kind in (str, bytes, bool, int, float, type(None)) and not hasattr(kind, name):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        return _refused(self)


def _refused(unread: Unread, *_: Any, **__: Any) -> Any:
    place: Location = object.__getattribute__(unread, "_place")
    refuse: Callable[[str], NoReturn] = object.__getattribute__(unread, "_refuse")
    return refuse(place.path)


def place_of(value: object) -> Location | None:
    """Return the place for whose value this stands; None for any other value."""
    return object.__getattribute__(value, "_place") if type(value) is Unread else None


_ASKED = (
    "eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "len", "iter", "getitem", "contains", "call", "str", "repr",
    "format", "int", "float", "index", "fspath", "bytes", "add", "radd", "mod", "mul", "rmul", "setattr", "delattr",
    "array", "buffer", "setitem", "delitem", "dir", "reduce_ex", "length_hint", "and", "or", "xor",
    "rand", "ror", "rxor", "invert", "neg", "sub", "rsub", "rmod",
)  # fmt: skip
for _name in _ASKED:
    setattr(Unread, f"__{_name}__", _refused)
