"""Places of Python values that outlive a call: attributes, items, closure variables, globals, optimizer state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, cast

import numpy as np
import torch
from torch.optim import Optimizer

from ..graph.graph import Input, Role
from .call_structure import Structure
from .optimizer_entries import Entry, Items, Lookup
from .state import StepState


class Missing:
    """The value of an empty place."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()
SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
PLAIN = (*SIMPLE, np.generic, PurePath, frozenset)
"""The types of values that are compared by `==`: in objects, and in arguments too."""
_DEPTH = 4  # of containers in containers that a step may replace


@dataclass
class Location:
    """The entry `key` of `holder`, which has items; `path` is the user's expression for it."""

    path: str
    holder: Any
    key: Any

    def get(self) -> Any:
        """Return the current value, or MISSING."""
        try:
            return self.holder[self.key]
        except (KeyError, IndexError):
            return MISSING

    def set(self, value: Any) -> None:
        """Assign `value`; MISSING deletes the entry."""
        if value is MISSING:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value


@dataclass
class GroupEntry(Lookup):
    """The options of a parameter group, by index: loading a state dict replaces the groups."""

    optimizer: Optimizer
    group: int

    def _now(self) -> Any:
        return self.optimizer.param_groups[self.group]


@dataclass
class StateEntry(Lookup):
    """An optimizer's state of one parameter, flat: placement replaces the parameter."""

    state: StepState
    optimizer: int
    owner: str

    def _now(self) -> Any:
        states = list(self.state.optimizers.values())[self.optimizer].state
        return Entry(states[self.state.params[self.owner].tensor])


def items_of(value: Any) -> dict[Any, Any] | None:
    """Return what a tuple, a list or a dict holds, by key; None of any other value."""
    if isinstance(value, tuple) or type(value) is list:
        return dict(enumerate(cast(Sequence[Any], value)))
    return cast(dict[Any, Any], value) if type(value) is dict else None


def tensors_of(value: Any, place: Location, depth: int = _DEPTH) -> dict[str, tuple[torch.Tensor, Location]]:
    """Return the tensors of a tuple, list or dict, and of such inside it, by path, each with its place."""
    tensors: dict[str, tuple[torch.Tensor, Location]] = {}
    if depth and (items := items_of(value)) is not None:
        holder = Items(place.holder, place.key, cast("type[Any]", type(value)), True)
        for key, item in items.items():
            tensors |= tensors_of(item, Location(f"{place.path}[{key_text(key, items)}]", holder, key), depth - 1)
    elif isinstance(value, torch.Tensor):
        tensors[place.path] = value, place
    return tensors


def alike(a: Any, b: Any, depth: int = _DEPTH) -> bool:
    """Return whether both are tensors, or tuples, lists or dicts of one class that hold such at the same places."""
    if depth and (first := items_of(a)) is not None:
        second = (items_of(b) if type(a) is type(b) else None) or {}
        return [*first] == [*second] and all(alike(item, second[key], depth - 1) for key, item in first.items())
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)


def places_of(state: StepState, source: Input) -> list[Location]:
    """Return the places of a buffer, or of a tensor of optimizer state."""
    if source.role is Role.STATE:
        return [Location(source.name, StateEntry(state, source.optimizer, source.owner), source.key)]
    return [Location(source.name, container, key) for container, key in state.buffers[source.name].places]


def same_kind(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether tensors have the same shape and dtype, so that one can be written into the other."""
    return a.shape == b.shape and a.dtype == b.dtype


@dataclass
class TensorAttributes(Lookup):
    """The attributes of a tensor, which placement may replace."""

    tensor: Callable[[], torch.Tensor]

    def now(self) -> dict[str, Any]:
        """Return the dict of attributes as it is now."""
        return vars(self.tensor())

    def _now(self) -> Any:
        return self.now()


@dataclass
class ArgumentItems(Lookup):
    """Object `number` among the arguments of the current call; with `attributes`, those of it."""

    arguments: dict[int, Any]
    number: int
    attributes: bool = False

    def _now(self) -> Any:
        value = self.arguments[self.number]
        return Slots(value) if self.attributes else value


@dataclass
class NumberLocation(Location):
    """A number at the place `holder`, read-only: item `key` of its sequence; without `key` its value as a float."""

    def get(self) -> Any:
        """Return the current number."""
        current = self.holder.get()
        return float(current) if self.key is None else current[self.key]


@dataclass
class Slots:
    """Attributes as items, of objects without a `__dict__`, classes, and the cells of closure variables."""

    owner: Any

    def __getitem__(self, key: Any) -> Any:
        try:
            return getattr(self.owner, key)
        except Exception:  # an empty cell, or what a descriptor of the user's raises
            raise KeyError(key) from None

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(self.owner, type):
            setattr(self.owner, key, value)
        else:
            object.__setattr__(self.owner, key, value)

    def pop(self, key: Any, default: Any) -> Any:
        """Delete an attribute."""
        if isinstance(self.owner, type):
            delattr(self.owner, key)
        else:
            object.__delattr__(self.owner, key)


@dataclass
class Reads:
    """What a function returns for a key, as an item."""

    getter: Callable[[Any], Any]

    def __getitem__(self, key: Any) -> Any:
        return self.getter(key)


class Words(str):
    """Text that an error message shows without quotes."""


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float (not a bool), also one of an array of float64, which is a float."""
    return type(value) in (int, float, np.float64)


def holds_items(value: object) -> bool:
    """Return whether a value is a dataclass or a non-empty container: a step may have read its items."""
    record = dataclasses.is_dataclass(value) and not isinstance(value, (type, torch.nn.Module))
    return record or (isinstance(value, (list, dict, tuple, set)) and len(cast("list[Any]", value)) > 0)


def key_text(key: object, keys: Iterable[object]) -> str:
    """The text of a dict key in a path. One with tensors, whose values change, is named by its place among `keys`."""
    if not any(isinstance(leaf, torch.Tensor) for leaf in _leaves(key)):
        return repr(key)
    return f"key {next((place for place, other in enumerate(keys) if other is key), -1)}"


def _leaves(key: object) -> Iterator[object]:
    for leaf in cast("tuple[object, ...]", key) if isinstance(key, tuple) else ():
        yield from _leaves(leaf)
    yield key


def shown(value: object) -> str:
    """Format a value for an error message."""
    if isinstance(value, Words):
        return value
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} {value.dtype}"
    if isinstance(value, Structure):
        return f"a {value.outline[0].__name__} of {len(value.outline[3])}"
    if isinstance(value, (list, dict, set, tuple)):
        sized: Any = cast(Any, value)
        text = repr(sized) if all(isinstance(v, SIMPLE) for v in sized) else ""
        return text if text and len(text) <= 60 else f"a {type(sized).__name__} of {len(sized)}"
    return repr(cast(object, value)) if isinstance(value, (*PLAIN, Missing)) else f"a {type(value).__name__}"
