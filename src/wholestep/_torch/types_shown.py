"""The types of traced tensors as the user's code sees them."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from types import GenericAlias, ModuleType
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .undo import undo, undone


def _class_shown(tensor: Any) -> type:
    return torch.nn.Parameter if getattr(tensor, "_is_param", False) else torch.Tensor


class TracedTensor(FakeTensor):
    """A fake tensor that the user's code has: its `__class__` is what an uncompiled step has."""

    __class__: Any = property(_class_shown)  # pyright: ignore[reportIncompatibleMethodOverride]
    tolist = cast(Any, torch.Tensor).tolist  # reads all numbers at once, and not one by one


class StandIn:
    """What is in place of an object that is no tensor: its `__class__` is that of the object."""

    __slots__ = ()


FAKE_TYPES = frozenset[type]({FakeTensor, TracedTensor})


def shown_to_user(value: Any) -> Any:
    """Return a result of torch; a fake tensor becomes a TracedTensor, as the same object."""
    if type(value) is FakeTensor:
        value.__class__ = TracedTensor
    elif type(value) in (tuple, list):
        for item in cast(list[Any], value):
            shown_to_user(item)
    return value


@contextmanager
def types_shown(modules: Iterable[ModuleType], plain: Callable[[Any], Any]) -> Generator[None]:
    """Let `type(x)` and `isinstance(x, ...)` in the code of these modules be what they are in an uncompiled step, also
    where x is a traced tensor; `plain(x)` is the Python number for which a tensor stands, else x.
    """

    def is_instance(value: object, kinds: Any) -> bool:
        return isinstance(plain(value), kinds)

    class Kinds(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) != 1 or kwargs or cls is not Shown:
                return super().__call__(*args, **kwargs) if cls is not Shown else type(*args, **kwargs)
            value = args[0]
            kind = cast(type[Any], type(value))
            if kind in FAKE_TYPES:
                number = plain(value)
                return _class_shown(value) if number is value else type(number)
            kind = cast(type[Any], value.__class__) if issubclass(kind, StandIn) else kind
            return Shown if kind is type else kind  # so that `type(kind) is type`

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, type) if cls is Shown else super().__instancecheck__(instance)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, type) if cls is Shown else super().__subclasscheck__(subclass)

        def __eq__(cls, other: object) -> bool:
            return other is cls or (cls is Shown and other is type)

        def __hash__(cls) -> int:
            return hash(type) if cls is Shown else super().__hash__()

        def __getitem__(cls, item: Any) -> Any:
            return GenericAlias(type, item)

    Shown = Kinds("type", (type,), {})
    shown = {"type": Shown, "isinstance": is_instance}
    tables = [(vars(m), name) for m in modules for name in shown if name not in vars(m)]
    with undone():
        undo(_hide, tables)
        for table, name in tables:
            table[name] = shown[name]
        yield


def _hide(tables: Iterable[tuple[dict[str, Any], str]]) -> None:
    for table, name in tables:
        table.pop(name, None)
