"""What objects hold: items, and attributes in a `__dict__` or in slots.

Objects are looked at by their class and by what is stored in them; nothing that a class defines is called, so that one
that answers every name, or raises, is looked at like any other.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

TRAINABLE: tuple[type, ...] = (nn.Module, Optimizer, GradScaler, LRScheduler)
_Maker = Callable[[Any, Any], Any]
_empty = dict[Any, Any]()
_proxy: _Maker = lambda keys, items: types.MappingProxyType(dict(zip(keys, items, strict=True)))  # noqa: E731
_keys: _Maker = lambda _, items: dict[Any, Any].fromkeys(items).keys()  # noqa: E731
_values: _Maker = lambda _, items: {i: items[i] for i in range(len(items))}.values()  # noqa: E731
_items: _Maker = lambda _, items: dict[Any, Any](items).items()  # noqa: E731
VIEWS: dict[type, _Maker] = {  # what only shows what a dict has, and one of these keys and items
    types.MappingProxyType: _proxy, type(_empty.keys()): _keys, type(_empty.values()): _values,
    type(_empty.items()): _items,
}  # fmt: skip
FIXED = {tuple, *VIEWS}  # containers whose items nobody exchanges
_CONTAINERS: tuple[type, ...] = (OrderedDict, dict, list, tuple, deque, *VIEWS)
_LEAVES: tuple[type, ...] = (
    torch.Tensor, torch.Size, np.ndarray, np.generic, type, types.ModuleType, types.FunctionType, types.MethodType,
    Enum, BaseException, *TRAINABLE,
)  # fmt: skip
_OPENED = {  # of Python's own
    "_thread", "_weakrefset", "argparse", "asyncio", "collections", "concurrent", "configparser", "dataclasses",
    "functools", "queue", "threading", "types", "weakref",
}  # fmt: skip
_CLOSED = ("torch._", "torch.distributed", "torch.fx", "torch.cuda", "torch.profiler", "torch.jit", "wholestep")
_LOADERS = ("torch.utils.data", "torch.amp")


@dataclass(frozen=True)
class Form:
    """How objects of a class are built: on which container (`items`), with a `__dict__`, with which slots (their
    descriptors, by name). `is_record`: it is made to hold values: a container, a mapping or a dataclass.
    """

    items: type | None
    has_dict: bool
    slots: Mapping[str, Any]
    is_record: bool

    def attributes(self, value: Any) -> dict[str, Any]:
        """The attributes that are stored in an object, by name."""
        out: dict[str, Any] = {}
        if self.has_dict:
            out.update(dict_of(value))
        for name, slot in self.slots.items():
            try:
                out[name] = slot.__get__(value)
            except AttributeError:  # an empty slot
                continue
        return out

    def set_attributes(self, value: Any, attributes: Mapping[str, Any]) -> None:
        """Store attributes, and these alone."""
        table = {name: attribute for name, attribute in attributes.items() if name not in self.slots}
        if self.has_dict and not _same(stored := dict_of(value), table):
            if list(stored) != list(table):
                stored.clear()
            stored.update(table)
        for name, slot in self.slots.items():
            if name in attributes:
                slot.__set__(value, attributes[name])
            elif name in self.attributes(value):
                slot.__delete__(value)

    def contents(self, value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The keys of the items of an object, of a dict alone, and the items."""
        base = cast(Any, self.items)
        if self.items is None:
            return (), ()
        if issubclass(self.items, (dict, types.MappingProxyType)):
            return tuple(base.keys(value)), tuple(base.values(value))
        return (), tuple(base.__iter__(value))

    def set_contents(self, value: Any, keys: tuple[Any, ...], items: tuple[Any, ...]) -> None:
        """Store items in an object that can change, and these alone."""
        base: Any = self.items
        if base is None or base in FIXED:
            return
        had, stored = self.contents(value)
        if had == keys and len(stored) == len(items) and all(a is b for a, b in zip(stored, items, strict=True)):
            return
        if issubclass(base, dict):
            if had != keys:
                base.clear(value)
            for key, item in zip(keys, items, strict=True):
                base.__setitem__(value, key, item)
        elif base is list:
            base.__setitem__(value, slice(None), items)
        else:
            base.clear(value)
            base.extend(value, items)

    def made(self, kind: type, keys: tuple[Any, ...], items: tuple[Any, ...], attributes: Mapping[str, Any]) -> Any:
        """A new object of the class `kind`, without a call of its `__init__`."""
        if kind in VIEWS:
            return VIEWS[kind](keys, items)
        if self.items is tuple:
            try:
                instance = tuple.__new__(cast(Any, kind), items)
            except TypeError:  # a named result of torch
                instance = cast(Any, kind)(items)
        else:
            instance = cast(Any, self.items or object).__new__(kind)
            self.set_contents(instance, keys, items)
        self.set_attributes(instance, attributes)
        return instance


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return list(a) == list(b) and all(x is y for x, y in zip(a.values(), b.values(), strict=True))


def dict_of(value: Any) -> dict[str, Any]:
    """The `__dict__` of an object; no code of its class runs."""
    return cast(dict[str, Any], object.__getattribute__(value, "__dict__"))


@lru_cache(maxsize=4096)
def form_of(kind: type) -> Form | None:
    """How objects of a class are built; None for those that are one value: tensors, numbers, modules, functions, ..."""
    line = type.mro(kind) if kind is type else kind.__mro__
    if any(base in _LEAVES for base in line) or any("__next__" in vars(base) for base in line):
        return None
    items = next((base for base in _CONTAINERS if base in line), None)
    closed = is_closed(kind) or kind.__module__.startswith(_LOADERS)
    has_dict = bool(getattr(kind, "__dictoffset__", 0)) and not closed
    slots = {} if closed else slots_of(kind)
    if defaultdict in line:
        slots["default_factory"] = vars(defaultdict)["default_factory"]
    if items is None and not has_dict and not slots:
        return None
    if _fields_size(kind) - _fields_size(items or object) != 8 * len(slots):  # a class in C with fields of its own
        return None
    is_record = items is not None or dataclasses.is_dataclass(kind) or issubclass(kind, Mapping)
    return Form(items, has_dict, slots, is_record)


def _fields_size(kind: type) -> int:
    """The bytes of an object but for the pointers to its `__dict__` and to weak references."""
    is_at_end = kind.__dictoffset__ < 0 < kind.__itemsize__  # of a tuple
    return kind.__basicsize__ - 8 * ((kind.__weakrefoffset__ > 0) + (kind.__dictoffset__ > 0) + is_at_end)


def is_closed(kind: type) -> bool:
    """True for classes of Python and torch whose attributes are their own affair. A class that code of Python's makes
    for others has the name of its module, which does not have it.
    """
    module = str(kind.__module__ or "")
    top = module.partition(".")[0]
    of_python = top in sys.stdlib_module_names and top not in _OPENED and module != "__main__"
    of_python = of_python and hasattr(sys.modules.get(module), kind.__qualname__.partition(".")[0])
    return of_python or module.startswith(_CLOSED)


def slots_of(kind: type) -> dict[str, Any]:
    """The slots that a class and its bases define, by name."""
    tables = [vars(base) for base in reversed(kind.__mro__) if "__slots__" in vars(base)]
    return {k: slot for table in tables for k, slot in table.items() if isinstance(slot, types.MemberDescriptorType)}
