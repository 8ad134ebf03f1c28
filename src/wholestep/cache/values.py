"""Fingerprints of values, read all the way down, that are the same in every process which has the same values.

What cannot be read so (an open file, a generator, an object of a C extension) is refused by name: a program that may
depend on it is not kept.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import re
import threading
import types
import typing
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from .. import _torch
from .origin import code_digest, inside, origin_of_module

MOST_VALUES = 1_000_000
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range, slice)
_TORCH_WORDS = (torch.dtype, torch.layout, torch.memory_format, torch.Size)
_LOCK = type(threading.Lock())
_OPAQUE = (logging.Logger, _LOCK, type(threading.RLock()), types.GetSetDescriptorType, types.MemberDescriptorType)
_BUILTIN = (
    types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodWrapperType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)  # fmt: skip
_OF_CLASS = ("__module__", "__dict__", "__weakref__", "__doc__", "__annotations__", "__abstractmethods__", "_abc_impl")
_BY_CHANCE = ("_original_object_hash",)
"""Attributes with another value in every process: transformers keeps Python's salted hash of a configuration in one."""
_DERIVED = ("_flat_weights", "_flat_weight_refs")
"""What recurrent layers keep of their parameters, which after a trace are those of the trace."""
_NO_STATE = ("_parameters", "_buffers", "_modules")


class UnknownValueError(Exception):
    """A value that has no fingerprint; says where it is and what."""


@dataclass
class Values:
    """Takes fingerprints. `held` names tensors, modules and optimizers that are described elsewhere, by id.

    `tensors` collects those that were read, by where they are; `codes` the fingerprints of all code that was;
    `modules` those of modules, by their path.
    """

    held: Mapping[int, str] = field(default_factory=dict[int, str])
    device: str = ""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    codes: set[str] = field(default_factory=set[str])
    parts: dict[str, str] = field(default_factory=dict[str, str])
    _classes: dict[type, str] = field(default_factory=dict[type, str])

    def digest(self, where: str, value: Any, strict: bool = True) -> str:
        """The fingerprint of `value`, which is found at `where`. If not `strict`, what is unknown counts by its type.

        Raises:
            UnknownValueError: naming the place inside.
        """
        read = _Read(self, strict)
        try:
            read.value(where, value)
        except UnknownValueError:
            raise
        except Exception as error:  # attributes of the user's objects may be anything
            raise UnknownValueError(f"{where} cannot be read: {type(error).__name__}: {error}") from error
        return read.hash.hexdigest()

    def class_digest(self, where: str, kind: type) -> str:
        """The fingerprint of a class: its bases, and what it defines."""
        if kind not in self._classes:
            self._classes[kind] = f"{kind.__module__}.{kind.__qualname__}"  # for classes that lead back to themselves
            made = [f"{kind.__module__}.{kind.__qualname__}"]
            for base in kind.__mro__:
                origin = origin_of_module(base.__module__)
                made.append(f"{base.__module__}.{base.__qualname__}")
                if origin in ("python", "wholestep") or (origin == "torch" and not issubclass(base, _PATCHED)):
                    continue
                for name, value in vars(base).items():
                    if name in _OF_CLASS or (name.startswith("__") and not _is_code(value)):
                        continue
                    made.append(f"{name} {self.digest(f'{where}.{name}', value, strict=origin == 'user')}")
            self._classes[kind] = hashlib.sha256("\n".join(made).encode()).hexdigest()
        return self._classes[kind]


_PATCHED = (nn.Module, torch.optim.Optimizer)
"""Classes of torch whose methods people replace."""


def _is_code(value: object) -> bool:
    return isinstance(value, (types.FunctionType, classmethod, staticmethod, property))


@dataclass
class _Read:
    """One walk through a value."""

    values: Values
    strict: bool
    hash: Any = field(default_factory=hashlib.sha256)
    seen: dict[int, tuple[str, Any]] = field(default_factory=dict[int, tuple[str, Any]])
    count: int = 0

    def say(self, *words: object) -> None:
        self.hash.update("\0".join(map(str, words)).encode("utf-8", "surrogatepass") + b"\1")

    def value(self, where: str, value: Any) -> None:
        kind = cast(type[Any], type(value))
        if kind in _PLAIN:
            return self.say(kind.__name__, repr(value))
        self.count += 1
        if self.count > MOST_VALUES:
            raise UnknownValueError(f"{where} holds more than {MOST_VALUES:,} values")
        if (name := self.values.held.get(id(value))) is not None:
            return self.say("held", name)
        if id(value) in self.seen:
            return self.say("again", self.seen[id(value)][0])
        self.seen[id(value)] = (where, value)
        for types_, read in _READS:
            if isinstance(value, types_):
                return read(self, where, value)
        return self.instance(where, value)

    def items(self, where: str, items: Iterable[tuple[object, Any]]) -> None:
        for key, item in items:
            self.say("item")
            self.value(f"{where}[{key!r}]", item)

    def opaque(self, where: str, value: Any) -> None:
        self.say(type(value).__module__, type(value).__qualname__, getattr(value, "__name__", ""))

    def torch_word(self, where: str, value: Any) -> None:
        self.say(type(value).__name__, value)

    def place(self, where: str, value: torch.device) -> None:
        self.say("device", "@" if str(value) == self.values.device else value)

    def choice(self, where: str, value: enum.Enum) -> None:
        self.say("enum", type(value).__module__, type(value).__qualname__, value.name)

    def pattern(self, where: str, value: re.Pattern[Any]) -> None:
        self.say("pattern", repr(value.pattern), value.flags)

    def path(self, where: str, value: PurePath) -> None:
        self.say("path", value)

    def mapping(self, where: str, value: Mapping[Any, Any]) -> None:
        self.say(type(value).__qualname__, len(value))
        for key, item in list(value.items()):
            name = f"{where}[{key!r}]" if isinstance(key, (str, int)) else f"{where}[...]"
            self.value(f"{name} (the key)", key)
            self.value(name, item)
        self.extra(where, value)

    def sequence(self, where: str, value: Any) -> None:
        self.say(type(value).__qualname__, len(value))
        self.items(where, enumerate(list(value)))
        self.extra(where, value)

    def group(self, where: str, value: Iterable[Any]) -> None:
        made: list[str] = []
        for item in value:
            inner = _Read(self.values, self.strict, seen=dict(self.seen), count=self.count)
            inner.value(f"{where}{{...}}", item)
            made.append(inner.hash.hexdigest())
        self.say(type(value).__qualname__, sorted(made))

    def extra(self, where: str, value: Any) -> None:
        """What a container of a class of its own has besides its items."""
        if type(value).__module__ not in ("builtins", "collections", "types"):
            self.instance(where, value)

    def tensor(self, where: str, value: torch.Tensor) -> None:
        with _torch.unobserved():
            if not _torch.is_plain(value.detach()) or _torch.is_fake(value):
                return self.unknown(where, value)
            device = "@" if str(value.device) == self.values.device else value.device
            self.say("tensor", tuple(value.shape), value.stride(), value.dtype, device, value.requires_grad)
            self.values.tensors[where] = value
            if not value.is_meta:
                flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                self.hash.update(flat.numpy().tobytes())
            return None

    def scalar(self, where: str, value: Any) -> None:
        """A number or text of a class of its own."""
        kinds: tuple[Any, ...] = (int, float, complex, str, bytes)
        base = next(b for b in kinds if isinstance(value, b))
        self.say(type(value).__module__, type(value).__qualname__, base.__repr__(value))

    def array(self, where: str, value: np.ndarray[Any, Any] | np.generic) -> None:
        if value.dtype.hasobject:
            return self.unknown(where, value)
        self.say("array", value.dtype, value.shape)
        return self.hash.update(value.tobytes())

    def function(self, where: str, value: types.FunctionType) -> None:
        if "hooked" in vars(value) and "__wrapped__" in vars(value):
            value = vars(value)["__wrapped__"]  # an optimizer's step, wrapped when the first of its class is made
        self.code(value.__code__)
        self.say("function", value.__module__, value.__qualname__, code_digest(value.__code__))
        users = origin_of_module(value.__module__) == "user"
        strict, self.strict = self.strict, self.strict and users
        self.value(f"{where}'s defaults", value.__defaults__)
        self.value(f"{where}'s defaults", value.__kwdefaults__)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                found: Any = cell.cell_contents
            except ValueError:
                found = "nothing yet"
            if name == "__class__":
                self.say(found.__module__, found.__qualname__)
            else:
                self.value(f"{name!r} that {where} closes over", found)
        for name, item in vars(value).items():
            if users or name == "__wrapped__":  # libraries leave ids of objects there
                self.say(name)
                self.value(f"{where}.{name}", item)
        self.strict = strict

    def code(self, code: types.CodeType) -> None:
        self.values.codes.update(map(code_digest, inside(code)))

    def method(self, where: str, value: types.MethodType) -> None:
        self.say("method")
        self.value(where, value.__func__)
        self.value(f"the owner of {where}", value.__self__)

    def wrapped(self, where: str, value: Any) -> None:
        """A classmethod, a property and the like: the functions in it."""
        self.say(type(value).__qualname__)
        for name in ("__func__", "fget", "fset", "fdel", "func", "__wrapped__", "args", "keywords"):
            item = getattr(value, name, None)
            if item is not None and item is not value:
                self.value(where, item)

    def builtin(self, where: str, value: Any) -> None:
        self.say("builtin", getattr(value, "__module__", ""), value.__qualname__)
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, (types.ModuleType, type)):
            self.value(f"the owner of {where}", owner)

    def reference(self, where: str, value: weakref.ref[Any]) -> None:
        self.say("reference")
        self.value(where, value())

    def kind(self, where: str, value: type) -> None:
        self.say("class", value.__module__, value.__qualname__)
        if self.strict and origin_of_module(value.__module__) == "user":
            self.say(self.values.class_digest(where, value))

    def imported(self, where: str, value: types.ModuleType) -> None:
        self.say("module", value.__name__)

    def module(self, where: str, value: nn.Module) -> None:
        """A module of a model: its class, its flags, what it holds by name. Its part is kept under its path."""
        inner = _Read(self.values, self.strict, seen=self.seen, count=self.count)
        inner.say(self.values.class_digest(type(value).__qualname__, type(value)))
        for name, item in vars(value).items():
            inner.say(name)
            if name in _DERIVED:
                continue
            if name in _NO_STATE:
                for key, held in item.items():
                    inner.say(key)
                    inner.value(f"{where}.{key}", held)
            elif name.endswith("_hooks") and isinstance(item, Mapping):
                inner.items(f"{where}.{name}", enumerate(cast(Mapping[Any, Any], item).values()))  # ids are by chance
            else:
                inner.value(f"{where}.{name}", item)
        self.count = inner.count
        self.values.parts[where] = inner.hash.hexdigest()
        self.say("module of nn", self.values.parts[where])

    def unknown(self, where: str, value: Any) -> None:
        if self.strict:
            kind = cast(type[Any], type(value))
            raise UnknownValueError(f"{where} is a {kind.__module__}.{kind.__qualname__}")
        self.opaque(where, value)

    def instance(self, where: str, value: Any) -> None:
        """An object of a class written in Python, by its attributes."""
        kind = cast(type[Any], type(value))
        slots = [s for base in kind.__mro__ for s in _slots(base)]
        if not self.strict or not (hasattr(value, "__dict__") or slots) or _has_more(kind, len(slots)):
            return self.unknown(where, value)
        self.say("object", self.values.class_digest(kind.__qualname__, kind))
        found: dict[str, Any] = {**getattr(value, "__dict__", {}), **{s: getattr(value, s, None) for s in slots}}
        for name, item in found.items():
            if name in _BY_CHANCE and origin_of_module(kind.__module__) == "library":
                continue
            self.say(name)
            if name.endswith("_hooks") and isinstance(item, Mapping):
                self.items(f"{where}.{name}", enumerate(cast(Mapping[Any, Any], item).values()))
            else:
                self.value(f"{where}.{name}", item)
        return None


def _slots(kind: type) -> list[str]:
    found: Any = vars(kind).get("__slots__", ())
    names: list[str] = [found] if isinstance(found, str) else list(found)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _has_more(kind: type, slots: int) -> bool:
    """True for a class whose objects hold more than Python attributes and the items of a known container."""
    known = [b for b in kind.__mro__ if b in (dict, list, tuple, set, frozenset, deque, str, int, float, BaseException)]
    return not known and kind.__basicsize__ > object.__basicsize__ + 16 + 8 * slots


_READS: list[tuple[Any, Any]] = [
    (torch.Tensor, _Read.tensor),
    (nn.Module, _Read.module),
    (enum.Enum, _Read.choice),
    (types.FunctionType, _Read.function),
    (types.MethodType, _Read.method),
    (_BUILTIN, _Read.builtin),
    ((classmethod, staticmethod, property, functools.cached_property, functools.partial), _Read.wrapped),
    (type(functools.lru_cache(len)), _Read.wrapped),
    (type, _Read.kind),
    (types.ModuleType, _Read.imported),
    (torch.device, _Read.place),
    (_TORCH_WORDS, _Read.torch_word),
    (_torch.OP_TYPES, _Read.torch_word),
    ((np.ndarray, np.generic), _Read.array),
    (np.dtype, _Read.torch_word),
    ((dict, types.MappingProxyType), _Read.mapping),
    ((list, tuple, deque), _Read.sequence),
    ((set, frozenset), _Read.group),
    ((int, float, complex, str, bytes), _Read.scalar),
    (re.Pattern, _Read.pattern),
    (PurePath, _Read.path),
    (weakref.ref, _Read.reference),
    ((*_OPAQUE, types.GenericAlias, types.UnionType, typing.TypeVar, type(typing.Any)), _Read.opaque),
    ((type(typing.Optional[int]), type(typing.List[int])), _Read.opaque),  # noqa: UP006, UP045  # typing's own kinds
]
"""How each kind of value is read; the first that fits."""
