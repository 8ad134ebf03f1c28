"""What an optimizer holds for one parameter, flat: entries, and what lists, tuples and dicts among them hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from .call_structure import Structure, put_together, take_apart

_OPENED = (list, tuple, dict)
_kind: Callable[[Any], type[Any]] = type


class Lookup(ABC):
    """A container that is looked up at each use."""

    @abstractmethod
    def _now(self) -> Any: ...

    def __getitem__(self, key: Any) -> Any:
        return self._now()[key]

    def __len__(self) -> int:
        try:
            return len(self._now())
        except (KeyError, IndexError):
            return 0

    def __setitem__(self, key: Any, value: Any) -> None:
        self._now()[key] = value

    def pop(self, key: Any, default: Any) -> Any:
        """Delete an entry."""
        return self._now().pop(key, default)


@dataclass
class Items(Lookup):
    """Items of the container at `holder[key]`, looked up at each use. To set one of a tuple makes a new container."""

    holder: Any
    key: Any
    kind: type
    replaced: bool = False

    def _now(self) -> Any:
        container = self.holder[self.key]
        if type(container) is not self.kind:
            raise KeyError(self.key)
        return container

    def __setitem__(self, key: Any, value: Any) -> None:
        items = self._now()
        if isinstance(items, tuple) and items[key] is not value:
            current = cast(tuple[Any, ...], items)
            self.holder[self.key] = remade(current, [value if i == key else item for i, item in enumerate(current)])
        elif not isinstance(items, tuple):
            if self.replaced:
                self.holder[self.key] = items = items.copy()
            items[key] = value


def remade(original: tuple[Any, ...], items: Sequence[Any]) -> tuple[Any, ...]:
    """Return a tuple of the class of another one."""
    make: Any = getattr(type(original), "_make", type(original))
    return make(items)


@dataclass(eq=False)
class Entry:
    """The state of one parameter as a flat dict: a container is its `Structure`, and an item of it is `name.key`."""

    table: dict[Any, Any]

    def leaves(self) -> dict[Any, Any]:
        """What is no container, by name."""
        return {name: value for name, _, _, value in self._walk() if type(value) not in _OPENED}

    def now(self) -> dict[Any, Any]:
        """What is no container, and the structures of those among the entries, by name."""
        walk = ((name, value) for name, _, _, value in self._walk())
        return {n: _structure(v) for n, v in walk if type(v) not in _OPENED or n in self.table}

    def __getitem__(self, name: Any) -> Any:
        holder, key = self.place(name)
        return _structure(holder[key])

    def __setitem__(self, name: Any, value: Any) -> None:
        holder, key = self.place(name)
        holder[key] = value

    def pop(self, name: Any, default: Any) -> Any:
        """Delete an entry; an item goes with its container."""
        return self.table.pop(name, default)

    def structures(self) -> dict[Any, Structure]:
        """How the containers among the entries are built, by name."""
        return {key: _structure(value) for key, value in self.table.items() if type(value) in _OPENED}

    def containers(self) -> Iterator[tuple[Any, Any, Any]]:
        """The containers, each with its place."""
        return ((holder, key, value) for _, holder, key, value in self._walk() if type(value) in _OPENED)

    def copy(self, change: Callable[[Any], Any] = lambda value: value) -> dict[Any, Any]:
        """New containers of the same structure, with `change(value)` in the place of each leaf."""
        call = take_apart(self.table, objects=False)
        return put_together(call.structure, map(change, call.leaves))

    def has(self, name: Any) -> bool:
        """Whether there is such an entry, or item of one."""
        holder, key = self.place(name)
        return holder is not self.table or key in self.table

    def double(self) -> Any:
        """A name that two entries or items share; None without one."""
        counts = Counter(name for name, *_ in self._walk())
        return next((name for name, count in counts.items() if count > 1), None)

    def place(self, name: Any) -> tuple[Any, Any]:
        """The container that holds an entry or item, and its key there."""
        if name in self.table or not isinstance(name, str) or "." not in name:
            return self.table, name
        return next(((holder, key) for path, holder, key, _ in self._walk() if path == name), (self.table, name))

    def _walk(self) -> Iterator[tuple[Any, Any, Any, Any]]:
        for key, value in self.table.items():
            yield key, self.table, key, value
            if type(value) in _OPENED:
                yield from _inside(key, self.table, key, value, (id(value),))


def _inside(
    path: Any, holder: Any, key: Any, value: Any, above: tuple[int, ...]
) -> Iterator[tuple[Any, Any, Any, Any]]:
    """The items of a container, each with its name and place, before those inside it."""
    items = cast(dict[Any, Any], value).items() if isinstance(value, dict) else enumerate(cast(list[Any], value))
    place = Items(holder, key, _kind(value))
    for inner, item in items:
        name = f"{path}.{inner}"
        yield name, place, inner, item
        if type(item) in _OPENED and id(item) not in above:
            yield from _inside(name, place, inner, item, (*above, id(item)))


def _structure(value: Any) -> Any:
    return take_apart(value, objects=False).structure if _kind(value) in _OPENED else value
