"""Guards on Python values: each names a place and the value that the captured step assumes there."""

from __future__ import annotations

import contextlib
import functools
import io
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from operator import is_
from typing import Any, cast

import numpy as np
import torch

from ..graph.meta import TensorMeta, meta_of
from .call_structure import equal_objects
from .locations import MISSING, SIMPLE, Location, Reads, is_number, key_text, shown
from .reachable import leads_to, opaque
from .state import is_users


@dataclass(frozen=True)
class Assumption:
    """A guard: the value that a place must have for the captured step to apply.

    `kind` is the comparison: "equal" (a plain value), "is" (the same object, or MISSING), "built" (one that is alike),
    "type" (a number of this type), "tensor" (`about` it), "size" (number of items of the container `place.holder`),
    "content" (its items: `value`), "attributes" (names of a tensor's), "shared" (the same places hold one object).
    """

    place: Location
    kind: str
    value: Any

    @property
    def holds(self) -> bool:
        """True if the guard passes now."""
        if self.kind == "content":
            return _same_content(self.value, self.place.holder)
        try:
            now = _NOW.get(self.kind, Location.get)(self.place)
        except (KeyError, TypeError):  # the tensor whose attributes these were is gone
            return False
        if self.kind == "built":
            return equal_objects(now, self.value)
        return now is self.value or (self.kind != "is" and type(now) is type(self.value) and now == self.value)

    @property
    def number(self) -> str:
        """The path of the number that is another one; "" if something else differs."""
        if self.kind == "equal":
            return self.place.path if is_number(self.value) and is_number(self.place.get()) else ""
        if self.kind != "content" or not isinstance(self.place.holder, (dict, list)):
            return ""
        items, _ = cast(tuple[dict[Any, Any], frozenset[Any]], self.value)
        now = dict(_items(self.place.holder))
        other = [key for key, value in items.items() if not _same_item(value, now.get(key, MISSING))]
        numbers = other and all(is_number(items[key]) and is_number(now.get(key)) for key in other)
        return f"{self.place.path}[{other[0]!r}]" if numbers else ""

    @property
    def difference(self) -> str:
        """The mismatch, for a log."""
        if self.kind in ("content", "size"):
            return f"{self.place.path} holds other items"
        if self.kind == "attributes":
            return f"{self.place.path} has other attributes"
        was = self.value.__name__ if self.kind == "type" else shown(self.value)
        if self.kind == "tensor":
            was = f"a tensor {tuple(self.value[0].shape)} {self.value[0].dtype}"
        return f"{self.place.path} is {shown(self.place.get())}, it was {was}"


def about(tensor: torch.Tensor) -> tuple[TensorMeta, bool, bool]:
    """Return what a guard compares of a tensor: its meta, and whether it requires and has a gradient."""
    return meta_of(tensor), tensor.requires_grad, tensor.grad is None


_NOW: dict[str, Callable[[Location], Any]] = {
    "size": lambda place: len(place.holder),
    "attributes": lambda place: frozenset[str](filter(is_users, place.holder.now())),
    "type": lambda place: cast("type[Any]", type(place.get())),
    "tensor": lambda place: about(tensor) if isinstance(tensor := place.get(), torch.Tensor) else None,
}
"""What the kinds of guards compare with their value, if it is not the value of the place."""


def expect(place: Location, value: Any) -> Assumption:
    """Guard `place` on `value`: by equality for a plain value, by identity otherwise."""
    return Assumption(place, "equal" if isinstance(value, SIMPLE) and value is not None else "is", value)


def shared(places: Sequence[Location]) -> Assumption:
    """Guard which of some places hold one object."""

    def pairs(_: object) -> str:
        first = dict[int, Location]()
        both = [(place, first.setdefault(id(place.get()), place)) for place in places]
        return ", ".join(f"{place.path} is {other.path}" for place, other in both if place is not other)

    place = Location("what is one tensor", Reads(pairs), None)
    return Assumption(place, "shared", place.get())


def contents(value: Any, path: str, carried: Mapping[int, set[Any]]) -> Iterator[Assumption]:
    """Guard the items of the container `value`, and of the containers inside it.

    `carried` maps the identity of a container to the keys that the step itself changes, which are not guarded.
    """
    changed = carried.get(id(value), set[Any]())
    if isinstance(value, (dict, list)):
        items = {k: v for k, v in _items(value) if k not in changed}
        yield Assumption(Location(path, value, None), "content", (items, frozenset(changed)))
    elif isinstance(value, _WITHOUT_ITEMS):
        yield Assumption(Location(path, value, None), "content", cast(Any, opaque(value))())
    elif led := leads_to(value):
        yield from contents(tuple(led), path, carried)
    if isinstance(value, (dict, list, tuple)):
        for key, item in _items(value):
            if isinstance(item, (dict, list, tuple, *_WITHOUT_ITEMS)) and key not in changed:
                yield from contents(item, f"{path}[{key_text(key, cast('Any', value))}]", carried)


_WITHOUT_ITEMS = (set, deque, array, bytearray, memoryview, np.ndarray, io.StringIO, io.BytesIO, ContextVar)


def _items(value: Any) -> list[tuple[Any, Any]]:
    container = cast("dict[Any, Any] | Sequence[Any]", value)
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def _same_content(expected: Any, now: Any) -> bool:
    if isinstance(cast(object, now), (dict, list)):
        items, changed = cast(tuple[dict[Any, Any], frozenset[Any]], expected)
        same = not changed and len(now) == len(items) and (isinstance(now, list) or list(now) == list(items))
        values = cast("dict[Any, Any]", now).values() if isinstance(now, dict) else cast("list[Any]", now)
        if same and all(map(is_, items.values(), values)):
            return True  # fast path: containers may be large
        current = {k: v for k, v in _items(now) if k not in changed}
        return [*current] == [*items] and all(_same_item(v, current[k]) for k, v in items.items())
    if isinstance(now, deque):
        current = list(cast("deque[Any]", now))
        return len(expected) == len(current) and all(map(_same_item, expected, current))
    return bool(expected == cast(Any, opaque(now))())


def _same_item(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, SIMPLE) and type(a) is type(b) and a == b)


def owned_by_callbacks(functions: Sequence[Callable[..., Any]]) -> set[int]:
    """Identities of objects that callbacks own: bound objects, partial arguments and closure variables."""
    out: set[int] = set()
    for fn in functions:
        out.add(id(fn.__self__) if isinstance(fn, (types.MethodType, types.BuiltinMethodType)) else id(None))
        if isinstance(fn, functools.partial):
            out |= owned_by_callbacks([fn.func]) | {id(a) for a in fn.args} | {id(a) for a in fn.keywords.values()}
        if isinstance(fn, types.FunctionType):
            for cell in fn.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell
                    out.add(id(cell.cell_contents))
    return out
