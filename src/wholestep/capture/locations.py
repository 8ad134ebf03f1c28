"""Places of Python values that outlive a call: attributes, items, variables of closures, globals, optimizer state."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.optim import Optimizer

from .state import StepState


class Missing:
    """Marks a place that holds nothing."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()
NUMBERS = (int, float)
SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass
class Location:
    """One entry of `holder`: a dict, a list, or anything with items. `path` is how the user would write it."""

    path: str
    holder: Any
    key: Any

    def get(self) -> Any:
        """What is there now; MISSING if nothing is."""
        try:
            return self.holder[self.key]
        except (KeyError, IndexError):
            return MISSING

    def set(self, value: Any) -> None:
        """Put `value` there; MISSING removes what is there."""
        if value is MISSING:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value

    @property
    def container(self) -> Any:
        """What holds the entry now."""
        return self.holder


@dataclass
class GroupLocation(Location):
    """An option of a parameter group; loading a state dict replaces the groups, so they are looked up."""

    optimizer: Optimizer = field(kw_only=True)
    group: int = field(kw_only=True)

    def __post_init__(self) -> None:
        self.holder = _Groups(self.optimizer, self.group)

    @property
    def container(self) -> Any:
        """The group as it is now."""
        return self.optimizer.param_groups[self.group]


@dataclass
class StateLocation(Location):
    """A number in an optimizer's state of one parameter, which placing replaces, so it is looked up by name."""

    state: StepState = field(kw_only=True)
    optimizer: int = field(kw_only=True)
    owner: str = field(kw_only=True)

    def __post_init__(self) -> None:
        self.holder = _Entry(self.state, self.optimizer, self.owner)


@dataclass
class Arguments:
    """The arguments of the call under way: `now` has those by position, then those by name."""

    now: dict[Any, Any] = field(default_factory=dict[Any, Any])


@dataclass
class ArgumentLocation(Location):
    """An item of a container among the arguments of a call, found by the keys of `route`."""

    arguments: Arguments = field(kw_only=True)
    route: tuple[Any, ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        self.holder = _Route(self.arguments, self.route)


@dataclass
class PartLocation(Location):
    """One number of a tuple or list: `holder` is the place of the whole, `key` the index. It is only read."""

    def get(self) -> Any:
        """The number as it is now."""
        return self.holder.get()[self.key]


@dataclass
class FloatLocation(Location):
    """A number that may be kept as a tensor: `holder` is its place. It is only read."""

    def get(self) -> Any:
        """The number as it is now."""
        return float(self.holder.get())


class _Lookup(ABC):
    """Items of a container that is looked up at each use."""

    @abstractmethod
    def now(self) -> Any:
        """The container."""

    def __getitem__(self, key: Any) -> Any:
        return self.now()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.now()[key] = value

    def pop(self, key: Any, default: Any) -> Any:
        """Remove an item."""
        return self.now().pop(key, default)


@dataclass
class _Route(_Lookup):
    arguments: Arguments
    route: tuple[Any, ...]

    def now(self) -> Any:
        found: Any = self.arguments.now
        for key in self.route:
            found = Slots(found)[key] if dataclasses.is_dataclass(found) else found[key]
        return Slots(found) if dataclasses.is_dataclass(found) else found


@dataclass
class _Groups(_Lookup):
    optimizer: Optimizer
    group: int

    def now(self) -> Any:
        return self.optimizer.param_groups[self.group]


@dataclass
class _Entry(_Lookup):
    state: StepState
    optimizer: int
    owner: str

    def now(self) -> Any:
        states = list(self.state.optimizers.values())[self.optimizer].state
        return states[self.state.params[self.owner].tensor]


@dataclass
class Cell:
    """The variable of a closure, as a container of one item."""

    cell: Any

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:
            raise KeyError(key) from None

    def __setitem__(self, key: Any, value: Any) -> None:
        self.cell.cell_contents = value

    def pop(self, key: Any, default: Any) -> Any:
        """Empty the variable."""
        del self.cell.cell_contents


@dataclass
class Slots:
    """Attributes that an object keeps outside of a dict, or that go through its class."""

    owner: Any

    def __getitem__(self, key: Any) -> Any:
        try:
            return getattr(self.owner, key)
        except AttributeError:
            raise KeyError(key) from None

    def __setitem__(self, key: Any, value: Any) -> None:
        object.__setattr__(self.owner, key, value) if not isinstance(self.owner, type) else setattr(
            self.owner, key, value
        )

    def pop(self, key: Any, default: Any) -> Any:
        """Remove an attribute."""
        if isinstance(self.owner, type):
            delattr(self.owner, key)
        else:
            object.__delattr__(self.owner, key)


class Words(str):
    """Text that an error shows as it is."""


def is_number(value: object) -> bool:
    """True for an int or a float that arithmetic may follow; booleans are decisions."""
    return type(value) in NUMBERS


def holds_items(value: object) -> bool:
    """True for a container, or a dataclass, that is not empty: what follows from one may follow from its items."""
    record = dataclasses.is_dataclass(value) and not isinstance(value, (type, torch.nn.Module))
    return record or (isinstance(value, (list, dict, tuple, set)) and len(cast("list[Any]", value)) > 0)


def shown(value: object) -> str:
    """A value as an error shows it."""
    if isinstance(value, Words):
        return value
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} {value.dtype}"
    if isinstance(value, (list, dict, set, tuple)):
        sized: Any = cast(Any, value)
        text = repr(sized) if all(isinstance(v, SIMPLE) for v in sized) else ""
        return text if text and len(text) <= 60 else f"a {type(sized).__name__} of {len(sized)}"
    return repr(value) if isinstance(value, (*SIMPLE, Missing)) else f"a {type(value).__name__}"
